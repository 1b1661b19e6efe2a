"""Saves that are copied while training goes on: equal to those that are written at once."""

import threading
import zipfile
from unittest.mock import Mock

import pytest
import torch

import inshrink_core
from inshrink_core.errors import StorageError
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import Spool
from inshrink_core.training.staging import Staging, _Copies
from tests.training.building import EXACT

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OPTIONS = {name: {} for name in OPTIMIZERS} | {
    "SGD": {"momentum": 0.9},
    "AdamW amsgrad": {"amsgrad": True},
    "AdamW fused": {"fused": True},
    "Adam fused": {"fused": True},
    "SGD fused": {"fused": True, "momentum": 0.9},
    "Adagrad fused": {"fused": True},
    "Adam lr": {"lr": torch.tensor(0.01)},
}


class Net(torch.nn.Module):
    def __init__(self, dims=2):
        super().__init__()
        self.first = torch.nn.Linear(6, 6, bias=dims < 2)
        self.norm = torch.nn.BatchNorm1d(6, affine=dims < 2)
        self.last = torch.nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, rows):
        return self.last(self.norm(self.first(rows)))


def build(name):
    torch.manual_seed(0)
    kind = name.split()[0]
    model = Net(2 if kind == "Muon" else 1)
    parameters = list(model.parameters())
    if kind == "SparseAdam":
        model = torch.nn.Embedding(8, 4, sparse=True)
        parameters = list(model.parameters())
    return model, OPTIMIZERS[kind](parameters, **OPTIONS[name])


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)

    def loss():
        optimizer.zero_grad()
        if isinstance(model, torch.nn.Embedding):
            value = model(torch.randint(0, 8, (5,), generator=generator)).square().sum()
        else:
            value = model(torch.randn(8, 6, generator=generator)).square().mean()
        value.backward()
        return value

    optimizer.step(loss) if isinstance(optimizer, torch.optim.LBFGS) else (loss(), optimizer.step())


def delay_copies(monkeypatch, wait):
    settle = _Copies.settle
    monkeypatch.setattr(_Copies, "settle", lambda *arguments: (wait(), settle(*arguments)))


def entries(path):
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_lazy_save_is_byte_for_byte_the_eager_one(tmp_path, monkeypatch, name):
    stored: dict[str, list[dict[str, bytes]]] = {"eager": [], "lazy": []}
    put = Spool.put
    slow = threading.Event()

    def keep(self, *args, **kwargs):
        save = put(self, *args, **kwargs)
        stored[self.folder.name.partition(".")[0]].append(entries(save.path))
        return save

    monkeypatch.setattr(Spool, "put", keep)
    delay_copies(monkeypatch, lambda: slow.wait(0.05))
    for how in stored:
        model, optimizer = build(name)
        with Saver(tmp_path / f"{how}.inshrink", model, optimizer, **EXACT) as saver:
            for number in range(1, 5):
                step(model, optimizer, number)
                if number % 2 == 0:
                    saver.save(number, {"seed": torch.tensor(number)}, wait=how == "eager")
    assert len(stored["lazy"]) == 2
    assert stored["eager"] == stored["lazy"]


def test_buffers_settings_and_foreign_tensors_are_copied_before_save_returns(tmp_path, monkeypatch):
    go = threading.Event()
    delay_copies(monkeypatch, lambda: go.wait(30))
    model, optimizer = build("AdamW")
    step(model, optimizer, 1)
    extra = torch.zeros(4)
    mean = model.norm.running_mean.clone()
    with Saver(tmp_path / "a.inshrink", model, optimizer, **EXACT) as saver:
        saver.save(1, {"extra": extra}, wait=False)
        extra += 1
        optimizer.param_groups[0]["lr"] = 7.0
        model(torch.randn(8, 6))  # moves the running mean
        go.set()
        assert saver.restore() == 1
        assert torch.equal(saver.extra["extra"], torch.zeros(4))
        assert torch.equal(model.norm.running_mean, mean)
        assert optimizer.param_groups[0]["lr"] == 1e-3


def test_the_optimizer_waits_for_the_copy_and_not_for_the_disk(tmp_path, monkeypatch):
    written, put = threading.Event(), Spool.put
    monkeypatch.setattr(Spool, "put", lambda self, *a, **k: (written.wait(30), put(self, *a, **k))[1])
    model, optimizer = build("AdamW")
    with Saver(tmp_path / "a.inshrink", model, optimizer, **EXACT) as saver:
        saver.save(1, wait=False)
        step(model, optimizer, 1)  # would hang if it waited for the disk
        written.set()
        saver.flush()
    assert inshrink_core.open(tmp_path / "a.inshrink").steps == (1,)
    assert not optimizer._optimizer_step_pre_hooks


def test_what_the_thread_could_not_write_is_raised_by_the_next_call(tmp_path, monkeypatch):

    model, optimizer = build("AdamW")
    with Saver(tmp_path / "a.inshrink", model, optimizer, **EXACT) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(Spool, "put", Mock(side_effect=StorageError("the disk is full")))
            saver.save(1, wait=False)
            with pytest.raises(StorageError, match="disk is full"):
                saver.flush()
        saver.save(2, wait=False)
    assert inshrink_core.open(tmp_path / "a.inshrink").steps == (2,)


def test_without_an_optimizer_everything_is_copied_at_once(tmp_path):
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with Saver(tmp_path / "a.inshrink", model, **EXACT) as saver:
        saver.save(1, wait=False)
        with torch.no_grad():
            model.weight.zero_()
        saver.restore()
    assert torch.equal(model.weight, before)


def test_a_device_copies_by_a_stream_that_begins_where_the_training_stands(monkeypatch, streams):
    monkeypatch.setattr("inshrink_core.training.staging._ASYNCHRONOUS", "cpu")
    empty, pinned = torch.empty, []

    def allocate(*shape, pin_memory=False, **options):
        pinned.extend(shape if pin_memory else ())
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    state = {"weight": torch.arange(6.0), "buffer": torch.ones(2)}
    staging, found = Staging(), []
    for _ in range(2):
        staging.start(state, {id(state["weight"])}, found.append)
        staging.finish()
    staging.close()
    assert pinned == [24]
    assert all(torch.equal(made["weight"], torch.arange(6.0)) for made in found)
    assert [stream.calls for stream in streams] == [["wait for current of cpu", "work", "synchronize"]] * 2
