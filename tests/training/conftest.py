import pytest


@pytest.fixture
def path(tmp_path):
    """The archive of a saver."""
    return tmp_path / "run.inshrink"


@pytest.fixture(autouse=True)
def _evaluators_here(evaluators_here):
    """No test of a saver is about the child of an evaluator."""
