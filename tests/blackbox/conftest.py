"""Small trainings, the archives of them, and the command line: all that these tests know of Inshrink."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inshrink_core.cli import main

STEPS = (10, 20, 30, 40)

JUDGE = """
import torch

def evaluate(state):
    generator = torch.Generator().manual_seed(3)
    head = state["head.weight"].double()
    inputs = torch.randn(64, head.shape[1], generator=generator, dtype=torch.float64)
    log_probs = (inputs @ head.T).log_softmax(-1)
    return {"loss": -float(log_probs[:, 0].mean()), "log_probs": log_probs.float()}
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def inshrink(*words: object) -> Outcome:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    n_threads = torch.get_num_threads()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    torch.set_num_threads(n_threads)
    return Outcome(code, out.getvalue(), err.getvalue())


def document(*words: object) -> Any:
    """Run a command that must succeed, and return its JSON document."""
    outcome = inshrink(*words, "--json")
    assert outcome.code == 0, outcome.err
    return outcome.document


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, by path, but for what Inshrink keeps in a run."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".inshrink" not in path.relative_to(folder).parts
    }


def largest_file(folder: Path) -> Path:
    """Return the largest file of an archive: a frame that other frames need."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def model() -> nn.Module:
    """Return a network with weights, vectors, buffers and a tensor in half precision."""
    torch.manual_seed(0)
    layers = OrderedDict(body=nn.Linear(64, 256), norm=nn.BatchNorm1d(256), head=nn.Linear(256, 10))
    network = nn.Sequential(layers)
    network.register_buffer("table", torch.randn(16, 32).bfloat16())
    return network


def train(network: nn.Module, optimizer: torch.optim.Optimizer, n_steps: int) -> None:
    """Take some steps on data that is always the same."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(n_steps):
        inputs = torch.randn(32, 64, generator=generator)
        loss = nn.functional.cross_entropy(network(inputs), inputs.abs().argmax(-1) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def write_run(folder: Path, steps: tuple[int, ...] = STEPS, lr: float = 1e-3) -> Path:
    """Write one torch file a step, as many training scripts do."""
    folder.mkdir(parents=True)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr)
    for step in steps:
        train(network, optimizer, 10)
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / f"step_{step:04d}.pt")
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four torch files; no test writes there."""
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of folders with safetensors, an optimizer file and side files; no test writes there."""
    folder = tmp_path_factory.mktemp("runs") / "folders"
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in STEPS[:3]:
        train(network, optimizer, 10)
        inside = folder / f"checkpoint-{step}"
        inside.mkdir(parents=True)
        save_file(network.state_dict(), inside / "model.safetensors", metadata={"format": "pt"})
        torch.save(optimizer.state_dict(), inside / "optimizer.pt")
        (inside / "config.json").write_text('{"model_type": "small"}')
        (inside / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An evaluator with a loss and log-probabilities."""
    path = tmp_path_factory.mktemp("judge") / "judge.py"
    path.write_text(JUDGE)
    return f"{path}:evaluate"


def _made(run: Path, tmp_path_factory: pytest.TempPathFactory, *options: str) -> Path:
    target = tmp_path_factory.mktemp("archives") / "a.inshrink"
    document("compress", run, "-o", target, *options)
    return target


@pytest.fixture(scope="session")
def made_exact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, stored bit for bit; no test writes there."""
    return _made(run, tmp_path_factory, "--codec", "lossless", "--optimizer", "exact")


@pytest.fixture(scope="session")
def made_lossy(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, stored with the default codec; no test writes there."""
    return _made(run, tmp_path_factory, "--coarseness", "2")


@pytest.fixture
def exact(made_exact: Path, tmp_path: Path) -> Path:
    """An exact archive of the run that a test may change."""
    return Path(shutil.copytree(made_exact, tmp_path / "exact.inshrink"))
