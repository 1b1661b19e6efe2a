"""What the fuzzer needs on disk is gone with each module of its tests."""

import pytest

from benchmarks.fuzz import scratch


@pytest.fixture(autouse=True, scope="module")
def _scratch():
    yield
    scratch.remove()
