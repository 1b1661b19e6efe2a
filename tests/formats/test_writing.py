"""Writing: the layouts, nothing overwritten, nothing outside the target, nothing half done."""

import errno
import json
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from inshrink_core.checkpoint import Checkpoint, FileLayout, TensorRole
from inshrink_core.errors import (
    DamagedError,
    ExistsError,
    InputError,
    NotFoundError,
    StorageError,
    UnsafePathError,
)
from inshrink_core.formats import open_run, write_checkpoint
from inshrink_core.formats.disk import check_names
from tests.builders import memory_checkpoint
from tests.formats.run_builders import same_bits, save_huggingface, save_run


def _opaque(*names):
    files = tuple(FileLayout(path=name, nbytes=3, kind="opaque") for name in names)
    source = SimpleNamespace(skeleton=lambda layout: b"abc")
    return Checkpoint(step=1, specs=(), source=source, files=files)


@pytest.fixture
def checkpoint(tmp_path):
    return open_run(save_run(tmp_path / "run", (10,)))[10]


def _files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_safetensors_layout_holds_every_tensor(tmp_path, checkpoint):
    paths = write_checkpoint(checkpoint, tmp_path / "out", layout="safetensors")
    assert [path.name for path in paths] == ["model.safetensors", "optimizer.safetensors"]
    stored = load_file(paths[0]) | load_file(paths[1])
    assert stored.keys() == set(checkpoint)
    assert all(same_bits(stored[key], checkpoint[key]) for key in stored)
    again = open_run(tmp_path / "out")
    assert again.steps == (10,)
    assert {s.key: s.role for s in again[10].specs if s.role is not TensorRole.BUFFER} == {
        s.key: s.role
        for s in checkpoint.specs
        if s.name not in ("3.running_mean", "3.running_var") and s.role is not TensorRole.BUFFER
    }


def test_tied_names_survive_the_safetensors_layout(tmp_path):
    weight = torch.randn(4, 2)
    torch.save({"head": weight, "emb": weight, "b": torch.ones(1)}, tmp_path / "step_1.pt")
    write_checkpoint(open_run(tmp_path / "step_1.pt")[1], tmp_path / "out", layout="safetensors")
    assert same_bits(open_run(tmp_path / "out")[1].state_dict()["emb"], weight)


def test_side_files_travel_into_another_layout_but_not_the_index(tmp_path):
    run = open_run(save_huggingface(tmp_path / "hf", (100,), sharded=True))
    write_checkpoint(run[100], tmp_path / "out", layout="safetensors")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "config.json", "training_args.bin"} <= names
    assert "model.safetensors.index.json" not in names


def test_selected_tensors_are_written_alone(tmp_path, checkpoint):
    (path,) = write_checkpoint(checkpoint, tmp_path / "out", keys=lambda key: key.startswith("1.weight"))
    assert set(load_file(path)) == {k for k in checkpoint if k.startswith("1.weight")}
    with pytest.raises(NotFoundError):
        write_checkpoint(checkpoint, tmp_path / "other", keys=lambda key: False)
    assert not (tmp_path / "other").exists()


def test_nothing_is_overwritten_without_force(tmp_path, checkpoint):
    target = tmp_path / "out" / "ckpt_10.pt"
    target.parent.mkdir()
    target.write_bytes(b"precious")
    with pytest.raises(ExistsError):
        write_checkpoint(checkpoint, tmp_path / "out")
    assert target.read_bytes() == b"precious"
    write_checkpoint(checkpoint, tmp_path / "out", force=True)
    assert target.read_bytes() != b"precious"
    assert _files_below(tmp_path / "out") == [target]


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "../x", "a/../../x", "C:/x", "C:x", "a\\b", "a\0b", "", "a//b", "a/", ".", "a/./b"),
        *("a\nb", "x" * 300),
    ],
)
def test_names_that_leave_the_target_are_refused_before_the_first_byte(tmp_path, name):
    with pytest.raises(UnsafePathError):
        write_checkpoint(_opaque(name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_duplicate_names_are_refused():
    for names in (["a", "a"], ["A.bin", "a.bin"], ["a", "a/b"]):
        with pytest.raises(UnsafePathError):
            check_names(names)
    with pytest.raises(UnsafePathError):
        write_checkpoint(_opaque("a", "a"), "/nowhere")


def test_links_inside_the_target_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "side").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out" / "file").symlink_to(tmp_path / "elsewhere" / "file")
    for name in ("side/x", "file"):
        with pytest.raises(UnsafePathError):
            write_checkpoint(_opaque(name), tmp_path / "out", force=True)
    assert not _files_below(tmp_path / "elsewhere")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path, monkeypatch, checkpoint, code):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, os.strerror(code))))
    for layout in ("same", "safetensors", "torch"):
        with pytest.raises(StorageError):
            write_checkpoint(checkpoint, tmp_path / "deep" / "out", layout=layout)
    assert not (tmp_path / "deep").exists()


def test_an_interrupt_leaves_nothing_behind(tmp_path, checkpoint):

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(checkpoint, tmp_path / "out", progress=Mock(side_effect=KeyboardInterrupt))
    assert not (tmp_path / "out").exists()


def test_a_target_that_is_a_file_is_a_storage_error(tmp_path, checkpoint):
    (tmp_path / "out").write_bytes(b"x")
    with pytest.raises(InputError):
        write_checkpoint(checkpoint, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"x"


def test_a_layout_or_skeleton_that_lies_is_damage(tmp_path, checkpoint):
    layout = checkpoint.files[0]

    class Short:
        read = staticmethod(checkpoint.source.read)

        @staticmethod
        def skeleton(layout):
            return b"short"

    with pytest.raises(DamagedError):
        write_checkpoint(replace(checkpoint, source=Short()), tmp_path / "out")
    region = layout.regions[0]
    lies = [
        replace(layout, regions=(region, region)),
        replace(layout, regions=(region._replace(members=(region.members[0]._replace(start=1 << 40),)),)),
        replace(layout, nbytes=10),
    ]
    for lie in lies:
        with pytest.raises(DamagedError):
            write_checkpoint(replace(checkpoint, files=(lie,)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layouts_that_cannot_be_are_told(tmp_path, checkpoint):
    with pytest.raises(InputError, match="layout"):
        write_checkpoint(checkpoint, tmp_path / "out", layout="onnx")
    with pytest.raises(InputError, match="layout"):
        write_checkpoint(replace(checkpoint, files=()), tmp_path / "out")
    odd = memory_checkpoint(1, {"z": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(InputError, match="complex128"):
        write_checkpoint(odd, tmp_path / "out", layout="safetensors")
    assert not (tmp_path / "out").exists()


def _safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, held) in tensors.items():
        span = [len(data), len(data) + len(held)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        data += held
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_four_bits_an_element_are_read_and_written_as_safetensors_does(tmp_path):
    packed = torch.arange(64, dtype=torch.uint8).reshape(8, 8).view(torch.float4_e2m1fn_x2)
    save_file(
        {"w": packed, "v": torch.ones(3), "e": torch.ones(5).to(torch.float8_e8m0fnu)},
        tmp_path / "a_1.safetensors",
    )
    checkpoint = open_run(tmp_path / "a_1.safetensors")[1]
    assert checkpoint.spec("w").shape == (8, 8)
    assert same_bits(checkpoint["w"].view(torch.uint8), packed.view(torch.uint8))
    (path,) = write_checkpoint(checkpoint, tmp_path / "same")
    assert path.read_bytes() == (tmp_path / "a_1.safetensors").read_bytes()
    (path,) = write_checkpoint(checkpoint, tmp_path / "plain", layout="safetensors")
    again = load_file(path)
    assert again["w"].dtype is torch.float4_e2m1fn_x2
    assert same_bits(again["w"].view(torch.uint8), packed.view(torch.uint8))
    assert same_bits(again["e"].view(torch.uint8), checkpoint["e"].view(torch.uint8))


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
@pytest.mark.parametrize(
    ("shape", "packed"), [([2, 4], (2, 3)), ([4, 2], (6,)), ([0, 4], (0, 3)), ([8], (6,))]
)
def test_six_bits_an_element_are_read_as_bytes(tmp_path, dtype, shape, packed):
    held = bytes(range(1, 1 + shape[0] * (shape[1] if len(shape) > 1 else 1) * 6 // 8))
    _safetensors(tmp_path / "a_1.safetensors", {"w": (dtype, shape, held), "v": ("F32", [1], bytes(4))})
    checkpoint = open_run(tmp_path / "a_1.safetensors")[1]
    assert (checkpoint.spec("w").dtype, checkpoint.spec("w").shape) == ("uint8", packed)
    assert bytes(checkpoint["w"].reshape(-1).tolist()) == held
    (path,) = write_checkpoint(checkpoint, tmp_path / "same")
    assert path.read_bytes() == (tmp_path / "a_1.safetensors").read_bytes()


def test_a_dtype_that_is_not_known_is_named_and_not_taken_for_damage(tmp_path):
    _safetensors(tmp_path / "a_1.safetensors", {"w": ("F3_X", [2], b"x")})
    with pytest.raises(InputError, match=r"found F3_X") as caught:
        open_run(tmp_path / "a_1.safetensors")
    assert "half-written" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "shape", "n_bytes"), [("F4", [3], 2), ("F6_E2M3", [3], 3), ("F4", [4], 4), ("F4", [], 1)]
)
def test_elements_that_do_not_fill_their_bytes_are_damage(tmp_path, dtype, shape, n_bytes):
    _safetensors(tmp_path / "a_1.safetensors", {"w": (dtype, shape, bytes(n_bytes))})
    with pytest.raises(DamagedError, match="'w'"):
        open_run(tmp_path / "a_1.safetensors")
