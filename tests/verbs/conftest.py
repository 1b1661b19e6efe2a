import pytest


@pytest.fixture(autouse=True)
def _evaluators_here(evaluators_here):
    """No test of a verb is about the child of an evaluator."""
