import errno
import shutil

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive, is_archive
from inshrink_core.archive.layout import MANIFEST_HEADER_NBYTES, crc32c
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.errors import (
    DamagedError,
    IncompatibleError,
    MissingFrameError,
    NotFoundError,
    StorageError,
)
from tests.archive.building import append, blocks_of, build, contents


def steps(frames):
    return [frame.step for frame in frames]


@pytest.mark.single_part
def test_small_blocks_with_the_same_bytes_are_stored_once(tmp_path):
    blocks = {"a": b"x" * 100, **dict.fromkeys(("a.step", "b.step", "c.step"), b"\0\0\0\1")}
    blocks |= {"d": b"\0\0\0\2", "e": b"", "f": b""}
    with ArchiveWriter(tmp_path / "x", create=True) as writer:
        for step in range(3):
            append(writer, step, blocks=blocks)
    reader = ArchiveReader.open(tmp_path / "x")
    for info in reader.frames:
        frame = reader.frame(info.frame_id)
        assert contents(reader, info.frame_id) == blocks
        assert [entry.key for entry in frame.entries if entry.back] == ["b.step", "c.step"]
        stored = sum(entry.stored_nbytes for entry in frame.entries)
        assert stored == 4 + 100 + 4 + len(b"skeleton")
        assert info.nbytes == stored + frame.overhead_nbytes
    assert check_archive(tmp_path / "x") == ()


def test_opening_reads_the_manifest_alone(path):
    reader = ArchiveReader.open(path)
    assert reader.storage.bytes_read == reader.manifest_nbytes == (path / "inshrink-manifest").stat().st_size


def test_keyframe_stands_alone_after_its_parent_is_gone(tmp_path):
    path = build(tmp_path / "x")
    with ArchiveWriter(path) as writer:
        info = append(writer, 300, kind="keyframe")
    for frame in ArchiveReader.open(path).frames[:3]:
        (path / frame.path).unlink()
    reader = ArchiveReader.open(path)
    assert contents(reader, info.frame_id) == blocks_of(300)
    assert reader.chain(info.frame_id) == (info,)


@pytest.mark.single_part
def test_tensors_and_parts_may_interleave_and_share_keys(tmp_path):
    order = [("x", True), ("x", False), ("y", True), ("z", True), ("y", False)]
    with ArchiveWriter(tmp_path / "x", create=True) as writer:
        for kind in ("keyframe", "delta"):
            head = writer.reader.head
            with writer.begin(step=0, kind=kind, parent_id=head and head.frame_id) as frame:
                for i, (key, part) in enumerate(order):
                    frame.add(key, "raw/1", bytes([i]), attachment=part)
                frame.commit({})
    reader = ArchiveReader.open(tmp_path / "x")
    for info in reader.frames:
        opened = reader.frame(info.frame_id)
        assert [(entry.key, entry.attachment) for entry in opened.entries] == order
        assert [opened.read(entry) for entry in opened.entries] == [bytes([i]) for i in range(5)]


LARGE = {name: bytes([number]) * 5000 for number, name in enumerate("abcd")}


@pytest.fixture
def large_blocks(tmp_path):
    """An archive of one frame with large blocks."""
    with ArchiveWriter(tmp_path / "large", create=True) as writer:
        append(writer, 0, blocks=LARGE)
    return tmp_path / "large"


@pytest.mark.parametrize("reason", ["short", "error"])
def test_damage_behind_a_block_does_not_stop_the_block(large_blocks, monkeypatch, reason):
    reader = ArchiveReader.open(large_blocks)
    frame = reader.frame(reader.frames[0].frame_id)
    first, second, third = frame.entries[:3]
    read_bytes = reader.storage.read

    def read(name, offset, nbytes):
        if reason == "error" and offset + nbytes > third.offset:
            raise OSError(errno.EIO, "no such sector")
        return read_bytes(name, offset, max(0, min(nbytes, third.offset - offset)))

    monkeypatch.setattr(reader.storage, "read", read)
    for entry in (first, second):
        assert frame.read(entry) == LARGE[entry.key]
    with pytest.raises(StorageError if reason == "error" else DamagedError):
        frame.read(third)


@pytest.fixture
def branched(tmp_path):
    path = build(tmp_path / "run.inshrink", (0, 100, 200, 300))
    with ArchiveWriter(path) as writer:
        fork = writer.reader.find(100)
        first = append(writer, 200, parent_id=fork.frame_id, branch=1)
        append(writer, 250, parent_id=first.frame_id, branch=1)
    return path


def test_find_prefers_the_history_of_the_head(branched):
    reader = ArchiveReader.open(branched)
    assert reader.find(200).branch == 1
    assert reader.find(200, branch=0).branch == 0
    assert reader.find(100, branch=1).branch == 0
    assert reader.find(300).branch == 0


def test_find_names_the_nearest_steps(branched):
    with pytest.raises(NotFoundError, match=r"no frame of step 260.*nearest steps are 250 and 300"):
        ArchiveReader.open(branched).find(260)
    with pytest.raises(NotFoundError, match=r"on branch 1.*nearest step is 250"):
        ArchiveReader.open(branched).find(300, branch=1)
    with pytest.raises(NotFoundError, match="on branch 5"):
        ArchiveReader.open(branched).find(0, branch=5)


def test_missing_frame_is_named_where_it_is_needed(path):
    reader = ArchiveReader.open(path)
    (path / reader.frames[1].path).unlink()
    reader.refresh()
    assert steps(reader.frames) == [0, 200]
    assert steps(reader.missing) == [100]
    assert steps(reader.history()) == [0, 200]
    assert contents(reader, reader.frames[0].frame_id) == blocks_of(0)
    for ask in (reader.chain, reader.frame):
        with pytest.raises(MissingFrameError, match="step 100"):
            ask(reader.head.frame_id)
    with pytest.raises(MissingFrameError, match="step 100"):
        reader.find(100)
    assert any("step 100 is missing" in problem.what for problem in check_archive(path))


def test_frame_removed_under_a_reader_is_reported_as_missing(path):
    reader = ArchiveReader.open(path)
    frame = reader.frame(reader.frames[0].frame_id)
    for name in reader.frames[0].paths:
        (path / name).unlink()
    with pytest.raises(MissingFrameError):
        frame.read(frame.entry("head.weight"))


def test_frames_of_another_archive_are_ignored_and_reported(path, tmp_path):
    with ArchiveWriter(tmp_path / "other", create=True) as writer:
        for step in range(5):
            stranger = append(writer, step)
    shutil.copy(tmp_path / "other" / stranger.path, path / stranger.path)
    reader = ArchiveReader.open(path)
    assert steps(reader.frames) == [0, 100, 200]
    assert [problem.what for problem in check_archive(path)] == ["this frame belongs to another archive"]
    with ArchiveWriter(path) as writer:
        append(writer, 300)
    assert steps(ArchiveReader.open(path).frames) == [0, 100, 200, 300]


def test_manifest_of_a_newer_version_asks_for_an_upgrade(path):
    content = (path / MANIFEST_NAME).read_bytes()
    newer = content[:8] + (2).to_bytes(2, "little") + content[10:36]
    crc = crc32c(newer, content[MANIFEST_HEADER_NBYTES:]).to_bytes(4, "little")
    (path / MANIFEST_NAME).write_bytes(newer + crc + content[MANIFEST_HEADER_NBYTES:])
    for ask in (ArchiveReader.open, ArchiveWriter, check_archive):
        with pytest.raises(IncompatibleError, match="expected format version 1, found 2"):
            ask(path)


def test_what_is_no_archive_is_not_found(tmp_path):
    (tmp_path / "run" / "frames").mkdir(parents=True)
    (tmp_path / "run" / "frames" / "00000001-5.frame").write_bytes(b"a video")
    (tmp_path / "file").write_bytes(b"INSHRNKM")
    for name in ("nothing", "run", "file", "nul\0"):
        assert not is_archive(tmp_path / name)
        with pytest.raises(NotFoundError):
            ArchiveReader.open(tmp_path / name)
