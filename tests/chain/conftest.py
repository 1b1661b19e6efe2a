"""The archive that tests of chains read and go on with."""

import pytest

import inshrink_core


@pytest.fixture
def archive_path(run_path, tmp_path):
    inshrink_core.compress(run_path, tmp_path / "a.inshrink")
    return tmp_path / "a.inshrink"
