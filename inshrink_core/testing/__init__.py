"""Conformance suites: what a codec, a run layout or a storage must keep, for those who write one.

Needs pytest and hypothesis. A suite is a class to inherit from in a test file of one's own.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

pytest.register_assert_rewrite(
    "inshrink_core.testing.codecs", "inshrink_core.testing.readers", "inshrink_core.testing.storages"
)
