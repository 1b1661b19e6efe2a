import array
import errno
import os
import shutil
import sys

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.maintenance import remove_frames, unpack_archive
from inshrink_core.errors import (
    DamagedError,
    ExistsError,
    InputError,
    LockedError,
    NotFoundError,
    StepConflictError,
    StorageError,
)
from tests.archive.building import GOLDEN, append, blocks_of, read_all, refuse
from tests.builders import flip
from tests.formats.run_builders import content_of
from tests.processes import ran

MANIFEST = "inshrink-manifest"


@pytest.mark.parametrize("name", ["folder", "segment", "packed"])
def test_the_golden_archives_stay_readable(tmp_path, name):
    if name == "packed":
        unpack_archive(ArchiveReader.open(GOLDEN / name), tmp_path / "golden.inshrink")
    else:
        shutil.copytree(GOLDEN / name, tmp_path / "golden.inshrink")
    assert check_archive(tmp_path / "golden.inshrink") == ()
    assert read_all(tmp_path / "golden.inshrink") == {step: blocks_of(step) for step in (0, 100, 200)}
    with ArchiveWriter(tmp_path / "golden.inshrink") as writer:
        append(writer, 300)
    assert read_all(tmp_path / "golden.inshrink")[300] == blocks_of(300)


def test_step_that_is_there_already_is_refused(path):
    with ArchiveWriter(path) as writer:
        parent = writer.reader.find(100)
        with pytest.raises(StepConflictError, match="step 200"):
            append(writer, 200, parent_id=parent.frame_id)
        append(writer, 200, parent_id=parent.frame_id, branch=1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kind": "delta", "parent_id": None}, InputError),
        ({"kind": "other"}, InputError),
        ({"parent_id": b"?" * 16}, NotFoundError),
        ({"step": -1}, InputError),
        ({"step": 1 << 63}, InputError),
        ({"step": 1.5}, InputError),
        ({"branch": 1 << 32}, InputError),
    ],
    ids=["delta without parent", "kind", "no parent", "negative", "too large", "float", "branch"],
)
def test_frame_that_cannot_be_described_is_refused(path, arguments, error):
    with ArchiveWriter(path) as writer, pytest.raises(error):
        writer.begin(**{"step": 300, "kind": "keyframe", "parent_id": None, **arguments})


@pytest.mark.single_part
def test_frame_is_used_once_and_alone(path):
    with ArchiveWriter(path) as writer:
        frame = writer.begin(step=300, kind="keyframe", parent_id=None)
        frame.add("a", "raw/1", memoryview(b"abcd"))
        with pytest.raises(InputError, match="are text"):
            frame.add(b"key", "raw/1", b"")
        with pytest.raises(InputError, match="added twice"):
            frame.add("a", "raw/1", b"")
        with pytest.raises(InputError, match="already: commit or abort"):
            writer.begin(step=400, kind="keyframe", parent_id=None)
        frame.commit({})
        with pytest.raises(InputError, match="committed or aborted"):
            frame.add("b", "raw/1", b"")
        frame.abort()
    assert read_all(path)[300] == {"a": b"abcd"}
    with pytest.raises(InputError, match="closed"):
        writer.begin(step=400, kind="keyframe", parent_id=None)


def test_creating_needs_an_empty_place(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("text")
    for name in ("notes", "file"):
        with pytest.raises(ExistsError):
            ArchiveWriter(tmp_path / name, create=True)
    with pytest.raises(NotFoundError):
        ArchiveWriter(tmp_path / "nothing")
    with pytest.raises(NotFoundError):
        ArchiveWriter(tmp_path / "notes")
    assert content_of(tmp_path) == {"notes/diary.txt": b"dear diary", "file": b"text"}


def test_creating_is_harmless_where_the_archive_exists(path):
    before = read_all(path)
    with ArchiveWriter(path, create=True):
        pass
    assert read_all(path) == before
    with pytest.raises(InputError, match="another id"):
        ArchiveWriter(path, create=True, archive_id=b"z" * 16)


# ---- crashes -------------------------------------------------------------------------------------


def test_higher_generation_wins_the_same_place(path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    with ArchiveWriter(path) as writer:
        append(writer, 300, blocks={"a": b"old"})
    with ArchiveWriter(tmp_path / "copy") as writer:
        remove_frames(writer, [append(writer, 1, kind="keyframe", branch=9).frame_id])
        newer = append(writer, 300, blocks={"a": b"new"})
    for name in newer.paths:
        shutil.copy(tmp_path / "copy" / name, path / name)
    assert read_all(path)[300] == {"a": b"new"}
    assert any("taken the place" in problem.what for problem in check_archive(path))


def test_generation_that_stands_twice_is_live_once(path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    with ArchiveWriter(tmp_path / "copy") as writer:
        stranger = append(writer, 301)
    with ArchiveWriter(path) as writer:
        append(writer, 300)
    shutil.copy(tmp_path / "copy" / stranger.path, path / stranger.path)
    assert list(read_all(path)) == [0, 100, 200, 300]
    with ArchiveWriter(path) as writer:
        append(writer, 400)
    assert list(read_all(path)) == [0, 100, 200, 300, 400]
    assert [problem.what for problem in check_archive(path)] == ["another frame has generation 4 too"]


@pytest.mark.single_part
def test_padding_that_is_not_zero_is_reported(path):
    # The header ends at 88, and the large block begins at 128.
    flip(path / "frames" / "00000001-0.frame", 100)
    assert any("SHA-256" in problem.what for problem in check_archive(path))


@pytest.mark.parametrize(
    "payload",
    [b"", bytearray(b"xy"), memoryview(b""), array.array("d", []), array.array("i", [1, 2])],
    ids=lambda payload: type(payload).__name__,
)
def test_payloads_may_be_any_buffer(path, payload):
    with ArchiveWriter(path) as writer, writer.begin(step=1, kind="keyframe", parent_id=None) as frame:
        frame.add("a", "raw/1", memoryview(payload))
        frame.commit({})
    assert read_all(path)[1] == {"a": bytes(memoryview(payload))}


# ---- locks ---------------------------------------------------------------------------------------


def test_second_writer_is_told_who_writes(path):
    program = "import sys; from inshrink_core.archive import ArchiveWriter; ArchiveWriter(sys.argv[1])"
    with ArchiveWriter(path) as writer:
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            ArchiveWriter(path)
        other = ran(sys.executable, "-c", program, path)
        assert "LockedError" in other.stderr
        assert f"process {os.getpid()}" in other.stderr
        append(writer, 300)
        assert list(read_all(path)) == [0, 100, 200, 300]
    with ArchiveWriter(path):
        pass


# ---- what the system refuses ---------------------------------------------------------------------


def test_reading_needs_no_right_to_write(path, monkeypatch):
    before = {file: file.stat().st_mtime_ns for file in (path, *path.rglob("*"))}
    opened = os.open

    def read_only(file, flags, *mode, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(file, flags, *mode, **options)

    monkeypatch.setattr("os.open", read_only)
    monkeypatch.setattr("os.fsync", refuse(errno.EROFS))
    assert list(read_all(path)) == [0, 100, 200]
    with pytest.raises(StorageError, match="read-only"):
        ArchiveWriter(path)
    assert {file: file.stat().st_mtime_ns for file in (path, *path.rglob("*"))} == before


# ---- removing and rebuilding ---------------------------------------------------------------------


def test_removing_refuses_a_frame_that_others_need(path):
    with ArchiveWriter(path) as writer:
        with pytest.raises(InputError, match="step 100 is the reference of step 200"):
            remove_frames(writer, [writer.reader.find(100).frame_id])
        with pytest.raises(NotFoundError):
            remove_frames(writer, [b"?" * 16])
        remove_frames(writer, [frame.frame_id for frame in writer.reader.frames[1:]])
    assert list(read_all(path)) == [0]
    assert check_archive(path) == ()


@pytest.mark.single_part
def test_removed_frame_never_comes_back(path):
    content = (path / "frames" / "00000003-200.frame").read_bytes()
    with ArchiveWriter(path) as writer:
        remove_frames(writer, [writer.reader.head.frame_id])
        assert append(writer, 300).generation == 4
    (path / "frames" / "00000003-200.frame").write_bytes(content)
    assert list(read_all(path)) == [0, 100, 300]
    assert [problem.what for problem in check_archive(path)] == [
        "this file was removed or replaced, and is still there"
    ]
    with ArchiveWriter(path):
        pass
    assert check_archive(path) == ()
    assert not (path / "frames" / "00000003-200.frame").exists()


def test_nothing_readable_is_damage(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:50])
    for ask in (ArchiveReader.open, ArchiveWriter):
        with pytest.raises(DamagedError):
            ask(path)
    assert check_archive(path)
