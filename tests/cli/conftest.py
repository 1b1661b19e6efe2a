import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from inshrink_core.cli import main

SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "digits-cnn"
FIRST_STEPS = (10, 25, 50)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out)


def one_line(outcome, code=2):
    """Return the message of a refusal, after checking that it is all there is."""
    assert outcome.code == code
    assert outcome.err.startswith("inshrink: ")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err
    return outcome.err


@pytest.fixture
def cli(capfd):
    """Run the command line in this process."""

    def run(*words):
        capfd.readouterr()
        code = main([str(word) for word in words])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def _evaluators_here(evaluators_here):
    """No test of the command line is about the child of an evaluator, but for those that start a command."""


@pytest.fixture(autouse=True)
def threads_of_torch():
    """Take back what verbs set for a process of their own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The first three steps of the sample, with its evaluator."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    folder.mkdir()
    for path in SAMPLE.iterdir():
        if path.is_file() and path.suffix != ".pt":
            shutil.copy(path, folder)
    for step in FIRST_STEPS:
        shutil.copy(SAMPLE / f"step_{step:06}.pt", folder)
    return folder


@pytest.fixture(scope="session")
def made_archive(small_run, tmp_path_factory):
    """The small run, compressed once."""
    target = tmp_path_factory.mktemp("made") / "digits.inshrink"
    assert main(["compress", str(small_run), "-o", str(target), "--quiet"]) == 0
    return target


@pytest.fixture
def archive(made_archive, tmp_path):
    """An archive of the small run that a test may damage."""
    return Path(shutil.copytree(made_archive, tmp_path / "digits.inshrink"))


@pytest.fixture
def longer_run(tmp_path):
    """The first sixteen steps of the sample: long enough to be interrupted."""
    folder = tmp_path / "longer"
    folder.mkdir()
    for path in sorted(SAMPLE.glob("step_*.pt"))[:16]:
        shutil.copy(path, folder)
    return folder
