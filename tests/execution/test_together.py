"""Processes that torchrun started: what a training has joined is its own."""

import pytest
import torch
from torch import distributed

import inshrink_core


@pytest.fixture
def training(monkeypatch):
    """A process that torchrun started, whose training has a process group."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_restore_and_verify_leave_the_group_of_a_training_alone(tmp_path, training):
    torch.save({"weight": torch.ones(4, 4)}, tmp_path / "model-1.pt")
    inshrink_core.compress(tmp_path, tmp_path / "a.inshrink")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "restored")
    inshrink_core.verify(tmp_path / "a.inshrink", deep=True)
    assert distributed.is_initialized()
