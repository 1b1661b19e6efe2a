"""One thread of PyTorch for each test process, and an empty home folder for tests and their subprocesses.

The number of threads is set before anything imports torch. With more threads than cores, OpenMP's threads
spin at barriers; tests of several threads set the number themselves.

The home folder changes with each test, so that no test sees the results of the user's explorer, or those
of another test.
"""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("INSHRINK_TRACEBACK", None)
# A busy machine is slow, which is no failure.
# Examples are the same in each run; `make fuzz` searches for new ones.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
# Compiled kernels are no results; nothing else of the real home is used.
os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))

_HOMES = tempfile.TemporaryDirectory(prefix="inshrink-homes-")


def _new_home():
    """Return the variables that lead into a new home."""
    home = Path(tempfile.mkdtemp(dir=_HOMES.name))
    return {
        **dict.fromkeys(("HOME", "USERPROFILE"), str(home)),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
    }


os.environ.update(_new_home())  # for what is imported, before a fixture begins


def _at_home():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _new_home().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", autouse=True)
def _home_of_a_module():
    """Let fixtures of a module find nothing that another has left."""
    yield from _at_home()


@pytest.fixture(autouse=True)
def _home_of_a_test(_home_of_a_module):
    """Let a test find nothing that another has left."""
    yield from _at_home()


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    """A tiny training with four saves, 5 to 20; no test changes it."""
    from tests.runs import write_run

    return write_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A small task to rehearse."""
    from tests.lab.test_rehearsal import TASK

    path = tmp_path_factory.mktemp("task") / "colours.py"
    path.write_text(TASK)
    return f"{path}:Colours"


@pytest.fixture
def evaluators_here(monkeypatch):
    """Run evaluators of files in this process."""
    from tests.judging import evaluate_here

    monkeypatch.setattr("inshrink_core.evaluate.Evaluator.evaluate", evaluate_here)


@pytest.fixture
def streams(monkeypatch):
    """Let streams of CUDA be fakes, and return those that are made."""
    import torch

    from tests.streams import FakeStream

    monkeypatch.setattr(FakeStream, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return FakeStream.made
