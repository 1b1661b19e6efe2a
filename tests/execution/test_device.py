"""Streams of threads: one each, idle ones reused; and a training's process group is its own."""

import pytest
import torch
from torch import distributed

import inshrink_core
from inshrink_core.execution import device as devices
from inshrink_core.execution.device import separate_stream, upload


@pytest.fixture(autouse=True)
def no_idle_streams(monkeypatch):
    monkeypatch.setattr(devices, "_idle_streams", {})


def test_work_inside_waits_for_work_before_and_has_ended_after(streams):
    with separate_stream("cuda:1"):
        assert streams[0].calls == ["wait for current of cuda:1", "work"]
    assert streams[0].calls == ["wait for current of cuda:1", "work", "synchronize"]


def test_work_that_fails_is_awaited_as_well(streams):
    with pytest.raises(ZeroDivisionError), separate_stream("cuda"):
        raise ZeroDivisionError
    assert streams[0].calls[-1] == "synchronize"


def test_streams_in_use_differ_and_idle_ones_are_reused(streams):
    for _ in range(2):
        with separate_stream("cuda"), separate_stream("cuda"):
            pass
    assert len(streams) == 2
    with separate_stream("cuda:1"):
        assert len(streams) == 3


def test_the_cpu_has_no_streams_and_no_copies(streams):
    values = torch.ones(3)
    with separate_stream("cpu"):
        assert upload(values, "cpu") is values
    assert not streams


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
