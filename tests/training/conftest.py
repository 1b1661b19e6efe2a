import pytest


@pytest.fixture
def path(tmp_path):
    """The archive of a saver."""
    return tmp_path / "run.inshrink"
