"""Accelerate with the real library: state comes back from the archive bit for bit."""

import pytest
import torch

import inshrink_core
from tests.guides import blocks

accelerate = pytest.importorskip("accelerate", reason="needs the extra 'hf': make test-integrations")

from inshrink_core.integrations.accelerate import AcceleratorSaver  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

EXACT = {"codec": "lossless", "optimizer_state": "exact"}


def prepared():
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator, model, optimizer, n_steps):
    for _ in range(n_steps):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_state_that_cannot_be_written_never_stops_the_training(tmp_path, monkeypatch):
    accelerator, *_ = prepared()

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with AcceleratorSaver(accelerator, tmp_path / "run.inshrink", **EXACT) as saver:
        monkeypatch.setattr(accelerator, "save_state", refuse)
        saver.save_state(1)
        assert list(saver.failures) == [1]


def test_the_program_of_the_page_runs(tmp_path, monkeypatch):
    program = blocks("accelerate", "python", "integrations")[0]
    monkeypatch.chdir(tmp_path)
    accelerator, model, optimizer = prepared()

    def training_step():
        train(accelerator, model, optimizer, 1)

    exec(program, {"accelerator": accelerator, "training_step": training_step, "n_steps": 200})
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (100, 200)
