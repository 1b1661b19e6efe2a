"""Bit rot in an original is found while its bytes are read, and is never made whole by a restore."""

import hashlib
import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file

import inshrink_core
from inshrink_core.errors import ChecksumError, InshrinkError, UnreadableError
from inshrink_core.formats import open_run
from inshrink_core.formats.disk import ByteCounter, ReadableFile, stamp_of
from inshrink_core.formats.torch.zip import read_entries
from inshrink_core.training.spool import Spool
from tests.builders import flip
from tests.formats.run_builders import without_checksums

N_FLIPS = int(os.environ.get("INSHRINK_ROT_FLIPS", "300"))


def state():
    torch.manual_seed(0)
    shared = torch.randn(60_000)
    return {
        "model": {
            "a.weight": torch.randn(40, 30),
            "b.weight": torch.randn(16, 8).t(),  # strided: a storage read whole
            "c.weight": shared[100:4000],  # a part of a storage of several pages
            "d.weight": shared[3000:50_000].reshape(470, 100),  # that overlaps another part
            "e.mask": torch.tensor([True, False, True]),
            "f.empty": torch.zeros(0, 3),
        },
        "rng": torch.get_rng_state(),  # a storage that is no tensor of the model
        "step": 7,
    }


def entries(path):
    with ReadableFile(path, ByteCounter(), stamp_of(path)) as file:
        return read_entries(file)[0] if read_entries(file)[1] else []


def read_everything(path):
    """Read what compressing reads: every tensor, and the rest of the file."""
    checkpoint = next(iter(open_run(path).values()))
    for spec in checkpoint.specs:
        checkpoint[spec.key]
    for file in checkpoint.files:
        checkpoint.source.skeleton(file)


@pytest.fixture
def original(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save(state(), folder / "step_7.pt")
    return folder / "step_7.pt"


def test_no_flipped_bit_of_a_checksummed_byte_is_accepted(original):
    read_everything(original)
    spans = [entry for entry in entries(original) if entry.nbytes]
    assert {entry.name.split("/", 1)[1] for entry in spans} >= {"data.pkl", "version", "byteorder", "data/0"}
    chance = random.Random(0)
    accepted = []
    for _ in range(N_FLIPS):
        # Every entry as often as any other, however small it is.
        entry = chance.choice(spans)
        at, bit = entry.offset + chance.randrange(entry.nbytes), chance.randrange(8)
        flip(original, at, bit)
        try:
            read_everything(original)
            accepted.append((entry.name, at, bit))
        except InshrinkError:
            pass
        flip(original, at, bit)
    assert accepted == []
    read_everything(original)


def test_a_rotten_entry_names_file_tensor_and_offset_and_nothing_is_archived(original, tmp_path):
    entry = next(e for e in entries(original) if e.name.endswith("data/0"))
    flip(original, entry.offset + 5)
    target = tmp_path / "a.inshrink"
    with pytest.raises(UnreadableError) as caught:
        inshrink_core.compress(original.parent, target)
    (row,) = caught.value.report.unreadable
    assert (row.path, row.step) == (str(original), 7)
    assert "a.weight" in row.reason
    assert f"offset {entry.offset}" in row.reason
    assert "--allow-damaged" in str(caught.value)
    assert inshrink_core.Archive.open(target).steps == ()


@pytest.mark.parametrize("codec", ["lossless", "lattice"])
def test_accepted_damage_is_told_for_ever_and_stays_damage(codec, original, tmp_path):
    for name in ("data/0", "data/2"):
        entry = next(e for e in entries(original) if e.name.endswith(name))
        flip(original, entry.offset + 5)
    target = tmp_path / "a.inshrink"
    report = inshrink_core.compress(original.parent, target, codec=codec, allow_damaged=True)
    assert "DAMAGED at step 7" in report.originals.text
    archive = inshrink_core.Archive.open(target)
    found = inshrink_core.verify(target, deep=True, against=open_run(original.parent))
    assert found.ok
    assert {row.entry.split("/", 1)[1] for row in found.originals.damaged} == {"data/0", "data/2"}
    restored = inshrink_core.restore(archive, tmp_path / "out")
    assert "DAMAGED" in restored.originals.text
    assert json.loads(json.dumps(restored.to_json()))["originals"]["damaged"][0]["step"] == 7
    if codec == "lossless":
        assert restored.paths[0].read_bytes() == original.read_bytes()
    with pytest.raises(ChecksumError):
        read_everything(restored.paths[0])
    exported = tmp_path / "one.inshrink"
    inshrink_core.verbs.export(archive, exported, step=7)
    assert "DAMAGED" in inshrink_core.verify(exported).originals.text


def test_a_checkpoint_whose_description_is_rotten_is_no_silent_gap(original, tmp_path):
    torch.save(state() | {"step": 8}, original.with_name("step_8.pt"))
    entry = next(e for e in entries(original) if e.name.endswith("data.pkl"))
    flip(original, entry.offset + entry.nbytes - 3)
    run = open_run(original.parent)
    assert run.steps == (8,)
    assert [row.path for row in run.unreadable] == [str(original)]
    with pytest.raises(UnreadableError, match="CRC-32"):
        inshrink_core.compress(run, tmp_path / "a.inshrink")
    assert inshrink_core.Archive.open(tmp_path / "a.inshrink").steps == (8,)


def test_files_without_checksums_are_stored_as_unchecked(original, tmp_path):
    assert inshrink_core.compress(original, tmp_path / "a.inshrink").originals.text == "checked"
    with without_checksums():
        torch.save({"model": {"w": torch.ones(9)}, "step": 1}, tmp_path / "step_1.pt")
    report = inshrink_core.compress(tmp_path / "step_1.pt", tmp_path / "t.inshrink")
    assert report.originals.text == "unchecked (torch.save was told to leave them out)"
    save_file({"w": torch.ones(9)}, tmp_path / "step_2.safetensors", metadata={"step": "2"})
    report = inshrink_core.compress(tmp_path / "step_2.safetensors", tmp_path / "s.inshrink")
    assert report.originals.text == "unchecked (safetensors has none)"
    assert inshrink_core.verify(tmp_path / "s.inshrink").to_json()["originals"]["unchecked"] == [2]


@pytest.mark.parametrize("form", ["sidecar", "sums", "blob"])
def test_a_digest_beside_a_file_is_compared(form, tmp_path):
    folder = tmp_path / "models--me--x" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    path = folder / "model.safetensors"
    save_file({"w": torch.randn(300, 300), "b": torch.ones(3)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if form == "sidecar":
        path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")
    elif form == "sums":
        path.with_name("SHA256SUMS").write_text(f"{'0' * 64}  other\n{digest} *./{path.name}\n")
    else:
        blobs = tmp_path / "models--me--x" / "blobs"
        blobs.mkdir()
        path.rename(blobs / digest)
        path.symlink_to(f"../../blobs/{digest}")
    read_everything(path)
    assert inshrink_core.compress(path, tmp_path / "a.inshrink").originals.text == "checked"
    flip(path, path.stat().st_size - 9)
    with pytest.raises(ChecksumError, match="digest"):
        read_everything(path)


def test_side_files_of_torch_are_checked_too(tmp_path):
    save_file({"w": torch.ones(9)}, tmp_path / "model.safetensors")
    torch.save({"last_epoch": 3, "state": torch.ones(50)}, tmp_path / "scheduler.pt")
    read_everything(tmp_path)
    entry = next(e for e in entries(tmp_path / "scheduler.pt") if e.name.endswith("data/0"))
    flip(tmp_path / "scheduler.pt", entry.offset)
    with pytest.raises(ChecksumError, match="data/0"):
        read_everything(tmp_path)


def test_a_spooled_save_has_checksums_whatever_the_training_told_torch(tmp_path):
    with without_checksums():
        save = Spool(tmp_path / "a.spool").put(3, {"checkpoint": {"model": {"w": torch.ones(9)}, "step": 3}})
        assert not torch.serialization.get_crc32_options()
    assert entries(save.path)
    assert [found.step for found in Spool(tmp_path / "a.spool").recover()] == [3]
