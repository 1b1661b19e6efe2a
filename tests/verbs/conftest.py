import shutil
from pathlib import Path

import pytest

from tests.runs import write_run


@pytest.fixture(autouse=True)
def _evaluators_here(evaluators_here):
    """No test of a verb is about the child of an evaluator."""


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    """A run of nine steps, 5 to 45."""
    return write_run(tmp_path_factory.mktemp("run") / "run", n_steps=9)


@pytest.fixture
def path(template, tmp_path):
    """A copy of the module's archive."""
    return Path(shutil.copytree(template, tmp_path / "a.inshrink"))
