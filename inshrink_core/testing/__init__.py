"""Conformance suites for codecs, run readers and storages.

Each suite is a class to subclass in a test file. The suites need pytest and hypothesis.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

pytest.register_assert_rewrite(
    "inshrink_core.testing.codecs", "inshrink_core.testing.readers", "inshrink_core.testing.storages"
)
