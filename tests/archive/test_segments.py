"""Small frames share files: what is written, what crash, loss and damage leave, and what pruning does."""

import os
import shutil
from unittest.mock import Mock

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.layout import MAX_SEGMENT_NBYTES, SMALL_FRAME_NBYTES, segment_path
from inshrink_core.archive.maintenance import Rewrite, pack_archive, remove_frames, unpack_archive
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.errors import DamagedError
from inshrink_core.frame import FrameKind
from tests.archive.building import append, blocks_of, build, contents
from tests.builders import flip

STEPS = (0, 100, 200, 300)
SEGMENT = segment_path(4)


def names(path):
    return sorted(file.name for file in (path / "frames").iterdir())


def steps(path):
    return [frame.step for frame in ArchiveReader.open(path).frames]


def is_whole(path, expected=STEPS):
    """Whether an archive has some steps, with all that was written of each."""
    reader = ArchiveReader.open(path)
    assert [frame.step for frame in reader.frames] == list(expected)
    return all(contents(reader, frame.frame_id) == blocks_of(frame.step) for frame in reader.frames)


@pytest.fixture
def path(tmp_path):
    """An archive whose four frames are one segment."""
    return build(tmp_path / "x", STEPS, grouped=True)


@pytest.fixture
def crowded(monkeypatch):
    """More than three small files are written together."""
    monkeypatch.setattr("inshrink_core.archive.segment.MAX_SMALL_FILES", 3)


def test_a_group_is_one_file_with_the_bytes_that_frames_have_as_files_of_their_own(path, tmp_path):
    alone = build(tmp_path / "alone", STEPS)
    assert names(path) == ["00000004.segment"]
    assert (path / SEGMENT).read_bytes() == b"".join(
        (alone / "frames" / name).read_bytes() for name in names(alone)
    )
    assert is_whole(path)
    assert check_archive(path) == ()
    assert ArchiveReader.open(path).nbytes == sum(
        file.stat().st_size for file in (path / SEGMENT, path / MANIFEST_NAME)
    )


def test_a_group_is_read_by_its_writer_before_it_is_written_and_by_others_after(tmp_path):
    with ArchiveWriter(tmp_path / "x", create=True, grouped=True) as writer:
        infos = [append(writer, step) for step in STEPS]
        assert writer.reader.listed_head == infos[-1]
        assert contents(writer.reader, infos[-1].frame_id) == blocks_of(300)
        assert steps(tmp_path / "x") == []
        writer.flush()
        assert is_whole(tmp_path / "x")
        assert writer.reader.frames == tuple(infos)
        append(writer, 400)
    assert names(tmp_path / "x") == ["00000004.segment", "00000005-400.frame"]
    assert is_whole(tmp_path / "x", (*STEPS, 400))


def test_a_group_is_synced_once(tmp_path, monkeypatch):
    with ArchiveWriter(tmp_path / "x", create=True, grouped=True) as writer:
        synced, fsync = [], os.fsync
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor) or fsync(descriptor))
        for step in range(20):
            append(writer, step)
        assert synced == []
        writer.flush()
        assert len(synced) == 4  # the segment, its name, the manifest, its name


def test_a_large_frame_is_a_file_of_its_own_and_ends_the_group_before_it(tmp_path):
    with ArchiveWriter(tmp_path / "x", create=True, grouped=True) as writer:
        append(writer, 0)
        append(writer, 1)
        append(writer, 2, blocks={"w": bytes(SMALL_FRAME_NBYTES)})
        assert steps(tmp_path / "x") == [0, 1, 2]
    assert names(tmp_path / "x") == ["00000002.segment", "00000003-2.frame"]


def test_groups_end_by_their_number_their_size_and_their_age(tmp_path, monkeypatch):
    with ArchiveWriter(tmp_path / "x", create=True, grouped=True) as writer:
        for step in range(65):
            append(writer, step)
        assert names(tmp_path / "x") == ["00000064.segment"]
        for step in range(100, 118):
            append(writer, step, blocks={"w": bytes(SMALL_FRAME_NBYTES - 1000)})
        assert names(tmp_path / "x")[1:] == ["00000081.segment"]
        assert (tmp_path / "x" / segment_path(81)).stat().st_size <= MAX_SEGMENT_NBYTES
        monkeypatch.setattr("inshrink_core.archive.writer._GROUP_S", 0.0)
        append(writer, 200)
        assert steps(tmp_path / "x")[-1] == 200
    assert check_archive(tmp_path / "x") == ()


def test_an_interrupted_flush_is_made_up_for_when_the_writer_closes(path, monkeypatch):

    writer = ArchiveWriter(path, grouped=True)
    append(writer, 400)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    writer.close()
    assert is_whole(path, (*STEPS, 400))


@pytest.mark.parametrize("n_lost", [1, 40, 600])
def test_a_segment_cut_short_loses_its_last_frames_alone(path, n_lost):
    content = (path / SEGMENT).read_bytes()
    listed = ArchiveReader.open(path).frames
    (path / SEGMENT).write_bytes(content[:-n_lost])
    complete = [frame for frame in listed if frame.offset + frame.nbytes <= len(content) - n_lost]
    reader = ArchiveReader.open(path)
    assert all(contents(reader, frame.frame_id) == blocks_of(frame.step) for frame in complete)
    assert check_archive(path)
    (path / MANIFEST_NAME).unlink()
    reader = ArchiveReader.open(path)
    assert [frame.step for frame in reader.frames] == [frame.step for frame in complete]
    with pytest.raises(DamagedError, match="which frame is the last one"):
        _ = reader.head
    ArchiveWriter(path, rebuild=True).close()
    with ArchiveWriter(path) as writer:
        assert writer.manifest.next_generation == 5


@pytest.mark.parametrize("at", [3, 100, -20])
def test_without_a_manifest_the_frames_beside_a_damaged_one_are_found(path, at):
    second = ArchiveReader.open(path).frames[1]
    flip(path / SEGMENT, second.offset + (at if at >= 0 else second.nbytes + at))
    (path / MANIFEST_NAME).unlink()
    reader = ArchiveReader.open(path)
    found = [frame.step for frame in reader.frames]
    assert [step for step in found if step != 100] == [0, 200, 300]
    if 100 not in found:
        assert any("segment" in problem.where for problem in check_archive(path))


@pytest.mark.parametrize(
    ("removed", "files"),
    [([3], ["00000005.segment"]), ([0, 1, 2, 3], ["00000005-400.frame"]), ([1, 2, 3], ["00000001-0.frame"])],
    ids=["one", "all", "all but one"],
)
def test_frames_are_removed_from_a_segment_for_good(path, removed, files):
    with ArchiveWriter(path) as writer:
        frames = writer.reader.frames
        if len(removed) == len(frames):
            append(writer, 400, kind="keyframe")
        remove_frames(writer, [frames[at].frame_id for at in removed])
    assert names(path) == files
    assert check_archive(path) == ()
    left = [step for at, step in enumerate(STEPS) if at not in removed] or [400]
    assert is_whole(path, left)
    if len(removed) == 1:  # without a manifest nothing of the removed frame is found
        (path / MANIFEST_NAME).unlink()
        assert is_whole(path, left)


def test_removing_from_a_segment_with_a_damaged_frame_leaves_the_segment(path):
    flip(path / SEGMENT, 200)
    with ArchiveWriter(path) as writer:
        remove_frames(writer, [writer.reader.frames[3].frame_id])
    assert names(path) == ["00000004.segment"]
    reader = ArchiveReader.open(path)
    assert [frame.step for frame in reader.frames] == [0, 100, 200]
    assert contents(reader, reader.frames[2].frame_id) == blocks_of(200)


def test_a_rewrite_takes_frames_out_of_a_segment(path):
    with ArchiveWriter(path) as writer:
        first, last = writer.reader.frames[0], writer.reader.frames[3]
        with Rewrite(writer, [last]) as rewrite:
            with rewrite.begin(last.frame_id, kind=FrameKind.KEYFRAME, parent_id=first.frame_id) as frame:
                frame.add("w", "raw/1", b"new")
                frame.commit({})
            rewrite.switch(writer.reader.frames[2:3])
    assert names(path) == ["00000005-300.frame", "00000006.segment"]
    assert steps(path) == [0, 100, 300]
    assert check_archive(path) == ()


def test_an_older_manifest_finds_its_frames_in_the_segment_they_were_put_into(tmp_path, crowded):
    path = build(tmp_path / "x", STEPS[:3])
    older = (path / MANIFEST_NAME).read_bytes()
    with ArchiveWriter(path) as writer:
        append(writer, 300)
    (path / MANIFEST_NAME).write_bytes(older)
    assert is_whole(path)
    ArchiveWriter(path).close()
    assert check_archive(path) == ()
    assert is_whole(path)


def test_a_sound_copy_takes_the_place_of_a_damaged_frame(path, tmp_path):
    flip(path / SEGMENT, 200)
    alone = build(tmp_path / "alone", STEPS)
    shutil.copy(alone / "frames" / "00000001-0.frame", path / "frames")
    assert is_whole(path)
    ArchiveWriter(path).close()
    assert names(path) == ["00000001-0.frame", "00000004.segment"]
    assert is_whole(path)


def test_a_packed_archive_has_each_frame_as_a_file_and_is_unpacked_into_segments(path, tmp_path, monkeypatch):
    pack_archive(ArchiveReader.open(path), tmp_path / "packed")
    assert is_whole(tmp_path / "packed")
    assert check_archive(tmp_path / "packed") == ()
    unpack_archive(ArchiveReader.open(tmp_path / "packed"), tmp_path / "few")
    assert len(names(tmp_path / "few")) == 4
    monkeypatch.setattr("inshrink_core.archive.segment.MAX_SMALL_FILES", 3)
    unpack_archive(ArchiveReader.open(tmp_path / "packed"), tmp_path / "many")
    assert names(tmp_path / "many") == ["00000004.segment"]
    assert is_whole(tmp_path / "many")
    assert check_archive(tmp_path / "many") == ()


def test_bytes_of_a_segment_that_belong_to_no_frame_are_told(path):
    with (path / SEGMENT).open("ab") as file:
        file.write(b"more")
    assert [problem.what for problem in check_archive(path)] == [
        "the segment has bytes that belong to no frame"
    ]


@pytest.mark.parametrize("content", [b"", b"a segment", bytes(MAX_SEGMENT_NBYTES + 1)])
def test_what_is_no_segment_is_told_and_left(path, content):
    (path / segment_path(9)).write_bytes(content)
    assert is_whole(path)
    (problem,) = check_archive(path)
    assert "00000009.segment" in problem.where
    with ArchiveWriter(path) as writer:
        assert append(writer, 400).generation == 10
    assert (path / segment_path(9)).exists()
