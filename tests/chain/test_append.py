"""Appending, skipping, branching, and what a failed append leaves behind."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import Archive, ChainConfig, ChainWriter
from inshrink_core.chain.sizes import archive_size
from inshrink_core.codec import get_codec
from inshrink_core.codecs.lattice.block import LatticeReference
from inshrink_core.codecs.moments.block import MomentsReference
from inshrink_core.errors import InputError, MissingFrameError, StepConflictError
from inshrink_core.frame import FrameKind
from tests.runs import payloads_of, write_run

CODECS = ("inshrinkerator", "lossless")


@pytest.mark.parametrize("codec", CODECS)
def test_appending_in_two_sessions_writes_the_same_blocks_as_in_one(codec, run_path, tmp_path):
    inshrink_core.compress(run_path, tmp_path / "one.inshrink", codec=codec)
    inshrink_core.compress(run_path, tmp_path / "two.inshrink", codec=codec, steps=[5, 10])
    report = inshrink_core.compress(run_path, tmp_path / "two.inshrink")
    assert report.appended == (15, 20)
    assert payloads_of(tmp_path / "one.inshrink") == payloads_of(tmp_path / "two.inshrink")


def test_a_changed_step_is_refused_and_a_branch_takes_it(run_path, tmp_path):
    target = tmp_path / "a.inshrink"
    inshrink_core.compress(run_path, target, codec="inshrinkerator")
    other = write_run(tmp_path / "other")
    state = torch.load(other / "step_20.pt", weights_only=True)
    state["model"]["4.bias"] += 1
    torch.save(state, other / "step_20.pt")
    with pytest.raises(StepConflictError, match="--resumed-from"):
        inshrink_core.compress(other, target)
    report = inshrink_core.compress(other, target, resumed_from=10)
    assert report.appended == (15, 20)
    archive = Archive.open(target)
    assert archive.steps == (5, 10, 15, 20)
    assert len(archive.reader.frames) == 6
    assert torch.equal(archive[20]["4.bias"].bfloat16(), state["model"]["4.bias"].bfloat16())
    assert inshrink_core.verify(target, deep=True).ok


def test_an_archive_without_frames_is_sound(tmp_path):
    ArchiveWriter(tmp_path / "empty.inshrink", create=True).close()
    assert inshrink_core.verify(tmp_path / "empty.inshrink", deep=True).ok


def test_another_codec_on_an_existing_archive_is_refused(run_path, tmp_path):
    inshrink_core.compress(run_path, tmp_path / "a.inshrink", codec="lossless", steps=[5])
    with pytest.raises(InputError, match="written with the codec 'lossless'"):
        inshrink_core.compress(run_path, tmp_path / "a.inshrink", codec="inshrinkerator")


def test_a_delta_that_saves_nothing_becomes_a_keyframe(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2, 3):
        generator = torch.Generator().manual_seed(step)
        weight = torch.randn(64, 512, generator=generator) * 10.0 ** (3 * step)
        torch.save({"model": {"fc.weight": weight}, "step": step}, run / f"step_{step}.pt")
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    archive = Archive.open(tmp_path / "a.inshrink")
    assert FrameKind.KEYFRAME in [info.kind for info in archive.frames[1:]]
    for step in archive:
        assert torch.equal(archive[step]["fc.weight"], inshrink_core.open(run)[step]["fc.weight"])


@pytest.mark.parametrize("codec", CODECS)
def test_tensors_may_change_shape_vanish_and_appear_mid_run(codec, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    torch.manual_seed(0)
    common = {f"layer{i}.weight": torch.randn(32, 32) for i in range(3)}
    shapes: dict[int, dict[str, tuple[int, ...]]] = {
        1: {"head.weight": (8, 32)},
        2: {"head.weight": (16, 32)},
        3: {},
        4: {"head.weight": (16, 32), "extra.weight": (4, 4)},
    }
    for step, extra in shapes.items():
        state = common | {name: torch.randn(shape) for name, shape in extra.items()}
        torch.save({"model": state, "step": step}, run / f"step_{step}.pt")
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec=codec)
    archive = Archive.open(tmp_path / "a.inshrink")
    for step, extra in shapes.items():
        assert set(archive[step]) == set(common) | set(extra)
        for name, shape in extra.items():
            assert tuple(archive[step][name].shape) == shape
    assert inshrink_core.verify(tmp_path / "a.inshrink", deep=True, against=inshrink_core.open(run)).ok


def test_a_cancelled_append_leaves_the_archive_and_the_writer_usable(run_path, tmp_path):

    run = inshrink_core.open(run_path)
    config = ChainConfig(config=get_codec("inshrinkerator")())
    with ArchiveWriter(tmp_path / "a.inshrink", create=True) as writer:
        chain = ChainWriter(writer, config)
        chain.append(run[5])
        with pytest.raises(ZeroDivisionError):
            chain.append(run[10], done=Mock(side_effect=ZeroDivisionError))
        assert Archive(writer.reader).steps == (5,)
        chain.append(run[10])
        chain.append(run[15])
    inshrink_core.compress(run_path, tmp_path / "b.inshrink", codec="inshrinkerator", steps=[5, 10, 15])
    one, two = Archive.open(tmp_path / "a.inshrink"), Archive.open(tmp_path / "b.inshrink")
    assert all(torch.equal(one[15][key], two[15][key]) for key in one[15])


def test_a_state_is_dropped_when_its_successor_is_made(run_path, tmp_path, request):
    def n_states():
        return sum(type(state) in (LatticeReference, MomentsReference) for state in gc.get_objects())

    run, counts = inshrink_core.open(run_path), list[int]()
    gc.freeze()  # what is there already is not looked at again
    request.addfinalizer(gc.unfreeze)
    with ArchiveWriter(tmp_path / "a.inshrink", create=True) as writer:
        chain = ChainWriter(writer, ChainConfig(config=get_codec("lattice")(), optimizer="compressed"))
        chain.append(run[5])
        chain.append(run[10], done=lambda _: counts.append(n_states()))
        after = n_states()
    assert after > 4
    assert max(counts) <= after + 1


def test_sizes_add_up_to_the_files_on_disk(run_path, tmp_path):
    target = tmp_path / "a.inshrink"
    report = inshrink_core.compress(run_path, target)
    archive = Archive.open(target)
    size = archive_size(archive)
    on_disk = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert size.nbytes == report.size.nbytes == on_disk
    for frame in size.frames:
        blocks = sum(tensor.nbytes for tensor in frame.tensors)
        attached = sum(entry.stored_nbytes for entry in archive.frame(frame.info).entries if entry.attachment)
        assert blocks + attached + frame.overhead_nbytes == frame.info.nbytes
    assert size.ratio_weights is not None
    assert size.ratio_weights == pytest.approx(size.raw_weights / size.weights_nbytes)


def test_a_reader_goes_on_with_the_frames_that_a_prune_put_in_place(archive_path):
    fresh, used = Archive.open(archive_path), Archive.open(archive_path)
    info = fresh.last
    wanted = {key: tensor.clone() for key, tensor in used.checkpoint(info).items()}
    checkpoint = used.checkpoint(info)
    inshrink_core.verbs.prune(archive_path, keep_last=1, apply=True)
    assert not (archive_path / info.path).exists()
    for archive in (fresh, used):
        for key, tensor in archive.checkpoint(info).items():
            assert torch.equal(tensor, wanted[key])
    assert torch.equal(checkpoint["0.weight"], wanted["0.weight"])
    assert checkpoint.source.skeleton(checkpoint.files[0])


def test_a_step_that_a_prune_removed_is_reported_as_gone_but_for_what_was_read_with_its_index(tmp_path):
    run = inshrink_core.open(write_run(tmp_path / "run"))
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    archive = Archive.open(tmp_path / "a.inshrink")
    checkpoint = archive[10]
    inshrink_core.verbs.prune(tmp_path / "a.inshrink", keep_last=1, apply=True)
    assert torch.equal(checkpoint["0.weight"], run[10]["0.weight"])
    with pytest.raises(MissingFrameError, match=r"step 10.*removed"):
        _ = checkpoint["4.weight"]


def test_a_reader_goes_on_where_small_files_were_put_together(tmp_path, monkeypatch):
    run = inshrink_core.open(write_run(tmp_path / "run"))
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless", steps=run.steps[:3])
    fresh, used = Archive.open(tmp_path / "a.inshrink"), Archive.open(tmp_path / "a.inshrink")
    checkpoint = used[10]
    assert torch.equal(checkpoint["0.weight"], run[10]["0.weight"])
    monkeypatch.setattr("inshrink_core.archive.segment.MAX_SMALL_FILES", 3)
    inshrink_core.compress(run, tmp_path / "a.inshrink")
    assert [file.suffix for file in (tmp_path / "a.inshrink" / "frames").iterdir()] == [".segment"]
    for step in run.steps[:3]:
        for archive in (fresh, used):
            assert all(torch.equal(archive[step][key], run[step][key]) for key in run[step])
    assert torch.equal(checkpoint["4.weight"], run[10]["4.weight"])
    assert used[10].source.skeleton(used[10].files[0])


def test_readers_that_open_while_prunes_run_find_every_step_that_stays(archive_path):
    done = threading.Event()

    def read():
        while not done.is_set():
            archive = Archive.open(archive_path)
            assert archive.checkpoint(archive.last)["0.weight"].numel()

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for keep in (3, 2, 1):
                inshrink_core.verbs.prune(archive_path, keep_last=keep, apply=True)
        finally:
            done.set()
    assert [reader.result() for reader in readers] == [None] * 3
