"""One bad save holds up no other: it is refused before it is spooled, or quarantined with its files."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.errors import DamagedError, InputError, InshrinkError, StorageError, UnsafePickleError
from inshrink_core.formats.torch.pickles import read_pickle
from inshrink_core.training.archiver import MAX_QUARANTINED, Archiver
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import Spool, spool_folder
from tests.training.building import EXACT, Adapter, leave_in_the_spool, spoil


class Packed(torch.Tensor):
    """A tensor of two others, as 8-bit optimizers keep their state."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if function is torch.ops.aten._to_copy.default:
            return cls(args[0].codes.clone(), args[0].scale.clone())
        raise NotImplementedError(str(function))


class Named(torch.Tensor):
    """A plain tensor of another class."""


class PackedSGD(torch.optim.Optimizer):
    """Keeps what it gathers packed."""

    def __init__(self, parameters, kind=Packed):
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            rows = (parameter.detach() * 100).to(torch.uint8)
            inner = (rows, torch.rand(8)) if self.kind is Packed else (torch.rand(8),)
            self.state[parameter]["gathered"] = self.kind(*inner)
            parameter.data += 0.01


def begin(path, optimizer=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    made = None if optimizer is None else optimizer(model.parameters())
    return model, made, Saver(path, model, made, **(EXACT | options))


@pytest.fixture
def known():
    torch.serialization.add_safe_globals([Packed])
    yield
    torch.serialization.clear_safe_globals()


# Refused before it is spooled


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("codec", ["lossless", "lattice"])
def test_state_of_a_class_of_tensors_is_archived_as_the_tensors_it_is_made_of(path, known, wait, codec):
    _, optimizer, saver = begin(path, PackedSGD, codec=codec)
    with saver:
        for step in (1, 2):
            optimizer.step()
            saver.save(step, wait=wait)
            if not wait:
                saver.before_step()
    (state,) = optimizer.state.values()
    present = inshrink_core.open(path)[2]
    assert torch.equal(present["weight:gathered.codes@state"], state["gathered"].codes)
    assert torch.equal(present["weight:gathered.scale@state"], state["gathered"].scale)
    _, other, saver = begin(path, PackedSGD, codec=None)
    with saver:
        assert saver.restore() == 2
    (back,) = other.state.values()
    assert type(back["gathered"]) is Packed
    assert torch.equal(back["gathered"].codes, state["gathered"].codes)
    assert torch.equal(back["gathered"].scale, state["gathered"].scale)


def test_a_restore_without_the_class_names_it(path, known):
    _, optimizer, saver = begin(path, PackedSGD)
    with saver:
        optimizer.step()
        saver.save(1)
        torch.serialization.clear_safe_globals()
        with pytest.raises(InputError, match=r"Packed.*import what defines them"):
            saver.restore()


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"where": Path("x").resolve(), "what": Saver}


def test_what_could_not_be_read_back_is_refused_by_the_first_save_that_holds_it(path):
    _, optimizer, saver = begin(path, lambda p: PackedSGD(p, Named))
    with saver:
        saver.save(1)  # the optimizer has gathered nothing yet
        optimizer.step()
        for _ in range(2):
            with pytest.raises(InputError, match=r"could not be read back.*Named.*nothing was saved"):
                saver.save(2)
        assert not list(spool_folder(path).glob("*2*"))
        optimizer.state.clear()
        saver.save(2)
    with begin(path)[2] as saver:
        assert saver.restore() == 2
    with Saver(path, Extra(16, 16)) as saver, pytest.raises(InputError, match="could not be read back"):
        saver.save(3)
    assert not spool_folder(path).exists()


def test_a_pickled_class_of_tensors_is_its_tensors_and_nothing_is_called(tmp_path):
    tensor = Packed(torch.arange(6, dtype=torch.uint8), torch.ones(2))
    torch.save({"weight": tensor, "named": torch.ones(3).as_subclass(Named)}, tmp_path / "a.pt")
    run = inshrink_core.open(tmp_path)
    checkpoint = run[run.steps[0]]
    assert torch.equal(checkpoint["weight.codes"], tensor.codes)
    assert torch.equal(checkpoint["weight.scale"], tensor.scale)
    assert torch.equal(checkpoint["named"], torch.ones(3))


def test_hostile_classes_of_tensors_are_refused_and_none_is_called():
    def program(*arguments):
        name = b"ctorch._tensor\n_rebuild_from_type_v2\n"
        return name + b"(" + b"".join(arguments) + b"tR."

    separate, foreign = b"ctorch._tensor\n_rebuild_from_type_v2\n", b"cos\nsystem\n"
    with pytest.raises(DamagedError, match="within itself"):
        read_pickle(program(separate, b"N", b")", b"N"))
    with pytest.raises(UnsafePickleError, match=r"os\.system"):
        read_pickle(program(foreign, foreign, b"(X\x02\0\0\0lst", b"}"))
    for few in ((), (separate,), (b"N", b"N"), (b"ctorch._utils\n_rebuild_wrapper_subclass\n", b"N", b")")):
        with pytest.raises(DamagedError):
            read_pickle(program(*few))
    parts = read_pickle(
        program(b"ctorch._utils\n_rebuild_wrapper_subclass\n", foreign, b")", b"}(X\x01\0\0\0aK\x01u")
    )
    assert parts == {}


# Links


def folder(root, step):
    made = root / "out" / f"checkpoint-{step}"
    made.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    torch.save({"w": torch.full((8, 8), float(step))}, root / "blobs" / f"{step}.bin")
    (made / "pytorch_model.bin").symlink_to(f"../../blobs/{step}.bin")
    return made


@pytest.mark.parametrize("linked", [True, False])
def test_relative_links_are_followed_before_the_folder_has_its_name(tmp_path, path, monkeypatch, linked):
    if not linked:
        refuse = OSError(18, "Invalid cross-device link")
        monkeypatch.setattr("inshrink_core.training.spool.os.link", lambda *_: (_ for _ in ()).throw(refuse))
    with Saver(path, **EXACT) as saver:
        for step in (1, 2):
            made = folder(tmp_path, step)
            saver.save_folder(made, step)
            shutil.rmtree(made)
        shutil.rmtree(tmp_path / "blobs")
    assert saver.failures == {}
    assert inshrink_core.open(path).steps == (1, 2)


@pytest.mark.parametrize("what", ["dangling", "pipe", "folder"])
def test_what_cannot_be_followed_is_refused_and_leaves_nothing(tmp_path, path, what):
    made = folder(tmp_path, 1)
    if what == "pipe":
        os.mkfifo(made / "odd")
    else:
        (made / "odd").symlink_to("nowhere" if what == "dangling" else "../../blobs")
    with Saver(path, **EXACT) as saver:
        with pytest.raises(InputError):
            saver.save_folder(made, 1)
        assert not list(spool_folder(path).iterdir())
        (made / "odd").unlink()
        saver.save_folder(made, 1)
    assert inshrink_core.open(path).steps == (1,)


# Quarantined by the thread


@pytest.mark.parametrize("error", [RuntimeError, InputError])
def test_a_save_that_cannot_be_encoded_is_quarantined_and_told_once(path, monkeypatch, caplog, error):
    spoil(monkeypatch, 2, error=error)
    model, _, saver = begin(path)
    before = None
    with caplog.at_level(logging.WARNING), saver:
        for step in (1, 2, 3):
            model.weight.data += 1
            saver.save(step)
            before = model.weight.detach().clone() if step == 2 else before
        with pytest.raises(InputError, match=r"1 saves .* quarantined; step 2"):
            saver.flush()
        saver.flush()
        assert [aside.step for aside in saver.quarantined] == [2]
        assert saver.restore() == 3
    assert inshrink_core.open(path).steps == (1, 3)
    assert "step 2 cannot be archived" in caplog.text
    content = torch.load(saver.quarantined[0].folder / "step_000002.pt", weights_only=True)
    assert torch.equal(content["model"]["weight"], before)


def test_what_rots_in_the_spool_is_quarantined_and_a_damaged_archive_is_not_its_fault(path, monkeypatch):
    _, _, saver = begin(path)
    saver.save(1)
    saver.flush()
    settle = Spool.settle

    def rot(spool, save):
        if save.step == 2:
            save.path.write_bytes(save.path.read_bytes()[:-99])
        settle(spool, save)

    monkeypatch.setattr(Spool, "settle", rot)
    saver.save(2)
    saver.save(3)
    with pytest.raises(InputError, match="step 2"):
        saver.flush()
    (frame,) = (path / "frames").glob("*3.frame")
    frame.unlink()
    saver.save(4)
    with pytest.raises(InshrinkError) as caught:
        saver.flush()
    assert "quarantined" not in str(caught.value)
    assert [aside.step for aside in saver.quarantined] == [2]
    with pytest.raises(InshrinkError):
        saver.close()
    assert (spool_folder(path) / "00000004").is_dir()


def test_saves_behind_one_that_was_quarantined_continue_from_where_it_would_have(path, monkeypatch):
    for kill in (False, True):
        target = path.with_name(f"{kill}.inshrink")
        model, _, saver = begin(target)
        for step in (1, 2, 3):
            model.weight.data += 1
            saver.save(step)
        saver.restore(1)
        with monkeypatch.context() as patch:
            spoil(patch, 2, error=StorageError if kill else RuntimeError)
            patch.setattr(Archiver, "wait_for_room", lambda _: None)
            for step in (2, 4):
                model.weight.data += 5
                saver.save(step)
            with pytest.raises(InputError):
                saver.close()
        if kill:
            bad = spool_folder(target) / "00000004" / "step_000002.pt"
            bad.write_bytes(bad.read_bytes()[:-9])
            with begin(target)[2] as saver:
                assert [aside.step for aside in saver.quarantined] == [2]
        first, *_, last = inshrink_core.open(target).reader.frames
        assert (last.step, last.branch, last.parent_id) == (4, 1, first.frame_id)


def test_one_failure_after_the_other_is_no_fault_of_the_saves(tmp_path, path, monkeypatch):
    spoil(monkeypatch, error=RuntimeError)
    _, _, saver = begin(path)
    for step in range(MAX_QUARANTINED):
        saver.save(step)
        saver._drain()
    saver.save(MAX_QUARANTINED)
    with pytest.raises(RuntimeError, match="cannot be encoded"):
        saver.flush()
    assert len(saver.quarantined) == MAX_QUARANTINED
    with pytest.raises(RuntimeError):
        saver.close()
    folders = Adapter(tmp_path / "b.inshrink")
    for step in range(1, 7):
        folders.save(step)
        folders._settle()
    monkeypatch.undo()
    folders.save(100)
    folders.close()
    assert sorted(folders.failures) == [1, 2, 3, 6]
    assert len(folders.quarantined) == MAX_QUARANTINED
    assert inshrink_core.open(tmp_path / "b.inshrink").steps == (4, 5, 100)


def test_an_archive_that_is_gone_is_no_fault_of_the_saves(path):
    _, _, saver = begin(path)
    saver.save(1)
    saver.flush()
    path.rename(path.with_name("moved"))
    saver.save(2)
    with pytest.raises(InshrinkError, match=r"is missing|not an Inshrink archive"):
        saver.flush()
    assert saver.quarantined == ()
    path.with_name("moved").rename(path)
    saver.close()
    assert inshrink_core.open(path).steps == (1, 2)


def test_a_step_that_another_program_archived_meanwhile_is_quarantined(path, monkeypatch):
    leave_in_the_spool(begin(path)[2], monkeypatch, 1)
    kept = path.with_name("kept")
    spool_folder(path).rename(kept)
    model, _, saver = begin(path)
    with saver:
        model.weight.data += 5
        saver.save(1)
    kept.rename(spool_folder(path))
    model, _, saver = begin(path)
    with saver:
        saver.save(2)
    assert [aside.step for aside in saver.quarantined] == [1]
    assert inshrink_core.open(path).steps == (1, 2)
