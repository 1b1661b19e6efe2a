"""Conformance suite for writable storages: subclass `StorageSuite`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive, is_archive
from inshrink_core.archive.maintenance import pack_archive, remove_frames, unpack_archive
from inshrink_core.archive.storage.contract import Storage, Tag
from inshrink_core.archive.storage.registry import object_at, storage_at
from inshrink_core.errors import ConflictError, InshrinkError, LockedError, UnsafePathError

__all__ = ["StorageSuite"]

_N_RIVALS = 8
_MIB = 1 << 20
_NAMES = ("", "/a", "..", "../a", "frames/../../a", "frames/..", ".", "./a", "a//b", "a/", "a\0b", ".a.tmp")
"""Invalid names: empty, absolute, outside of the root, with a NUL, not normalized, or of temporary files."""

_FOLDERS = ("", "frames")


class StorageSuite(ABC):
    """Tests of the contract of a storage.

    Examples
    --------
    ::

        class TestBucket(StorageSuite):
            def place(self, folder):
                return f"bucket://tests/{folder.name}/a"
    """

    @abstractmethod
    def place(self, folder: Path) -> str | Path:
        """Return the path or URL of a new archive; always the same for the same folder.

        Parameters
        ----------
        folder
            An empty folder of this test only.
        """

    def storage(self, folder: Path) -> Storage:
        """Return a new, writable view of the same place at each call."""
        storage = storage_at(self.place(folder))
        with storage.made():
            storage.recover(_FOLDERS)
        return storage

    def test_an_object_is_seen_when_it_is_committed_and_not_before(self, tmp_path: Path) -> None:
        """Other views see an object only after the commit, and then completely."""
        storage, other = self.storage(tmp_path), self.storage(tmp_path)
        with storage.create("frames/a") as creation:
            for piece in (b"one ", b"", memoryview(b"two "), bytearray(b"three")):
                creation.write(piece)
            assert other.list("frames") == ()
            with pytest.raises(FileNotFoundError):
                other.size("frames/a")
            creation.commit()
        storage.sync("frames")
        for view in (storage, other):
            assert view.list("frames") == ("a",)
            assert view.size("frames/a") == 13
            assert view.read("frames/a", 0, 13) == b"one two three"

    def test_bytes_that_were_given_may_be_changed_afterwards(self, tmp_path: Path) -> None:
        """A writer may reuse its buffers."""
        storage, buffer = self.storage(tmp_path), bytearray(b"first")
        with storage.create("a") as creation:
            creation.write(memoryview(buffer))
            buffer[:] = b"other"
            creation.write(buffer)
            creation.commit()
        assert storage.read("a", 0, 100) == b"firstother"

    def test_an_aborted_object_leaves_nothing(self, tmp_path: Path) -> None:
        """It is neither listed nor among the temporary files, and its name is free."""
        storage = self.storage(tmp_path)
        creation = storage.create("frames/a")
        creation.write(bytes(100))
        creation.abort()
        creation.abort()
        with pytest.raises(ZeroDivisionError), storage.create("frames/a") as creation:
            creation.write(bytes(1 // 0))
        assert (storage.list("frames"), storage.remains("frames")) == ((), ())
        _put(storage, "frames/a", b"x")
        assert storage.read("frames/a", 0, 10) == b"x"

    def test_what_a_writer_left_that_was_cut_off_is_cleared(self, tmp_path: Path) -> None:
        """Recovery removes temporary files and keeps complete objects."""
        storage, died = self.storage(tmp_path), self.storage(tmp_path)
        _put(storage, "frames/a", b"whole")
        with died.create("frames/b") as creation:
            creation.write(b"half")
            storage.recover(_FOLDERS)
            assert (storage.list("frames"), storage.remains("frames")) == (("a",), ())
        assert storage.read("frames/a", 0, 10) == b"whole"

    def test_an_object_is_not_created_where_one_is(self, tmp_path: Path) -> None:
        """An existing object is overwritten only with `over`."""
        storage = self.storage(tmp_path)
        _put(storage, "frames/a", b"old")
        with pytest.raises((FileExistsError, InshrinkError)):
            _put(storage, "frames/a", b"new")
        assert storage.read("frames/a", 0, 10) == b"old"
        with storage.create("frames/a", over=True) as creation:
            creation.write(b"over it")
            creation.commit()
        assert storage.read("frames/a", 0, 10) == b"over it"

    def test_of_several_that_create_one_name_one_wins(self, tmp_path: Path) -> None:
        """Several views create the same name at the same moment; the object is the winner's."""
        views = [self.storage(tmp_path) for _ in range(_N_RIVALS)]
        for turn in range(5):
            name = f"frames/{turn}"
            won = _race(lambda i, name=name: _put(views[i], name, bytes([i]) * 1000))  # type: ignore[misc]
            assert len(won) == 1
            assert views[0].read(name, 0, 2000) == bytes(won) * 1000

    def test_an_object_is_replaced_only_if_it_is_unchanged(self, tmp_path: Path) -> None:
        """An outdated tag, or the tag of a deleted object, is refused."""
        storage, other = self.storage(tmp_path), self.storage(tmp_path)
        first = storage.replace("m", b"first", None)
        with pytest.raises(ConflictError):
            other.replace("m", b"again", None)
        assert other.load("m") == (b"first", first)
        second = other.replace("m", b"second", first)
        assert other.load("m") == (b"second", second)
        with pytest.raises(ConflictError):
            storage.replace("m", b"third", first)
        with pytest.raises(ConflictError):
            storage.replace("none", b"third", second)
        assert storage.load("m") == (b"second", second)
        storage.delete("m")
        with pytest.raises(ConflictError):
            storage.replace("m", b"third", second)
        storage.replace("m", b"fourth", None)
        assert other.load("m")[0] == b"fourth"

    def test_of_several_that_replace_an_object_one_wins(self, tmp_path: Path) -> None:
        """They replace it at the same moment, with the same tag."""
        views = [self.storage(tmp_path) for _ in range(_N_RIVALS)]
        tag: Tag | None = None
        for turn in range(5):
            before = tag
            won = _race(lambda i, turn=turn, tag=before: views[i].replace("m", bytes([turn, i]) * 500, tag))  # type: ignore[misc]
            assert len(won) == 1
            content, tag = views[0].load("m")
            assert content == bytes([turn, *won]) * 500

    def test_who_reads_what_is_replaced_gets_the_old_or_the_new(self, tmp_path: Path) -> None:
        """A reader never gets a mixture, and never an error."""
        storage, other = self.storage(tmp_path), self.storage(tmp_path)
        tag, done = storage.replace("m", bytes(20_000), None), threading.Event()

        def replace(tag: Tag) -> None:
            try:
                for i in range(1, 60):
                    tag = storage.replace("m", bytes([i]) * (20_000 + i), tag)
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            replacing = pool.submit(replace, tag)
            while not done.is_set():
                for content in (other.load("m")[0], other.read("m", 0, 30_000)):
                    assert content == content[:1] * (20_000 + content[0])
            replacing.result()

    def test_a_listing_has_what_is_there_now(self, tmp_path: Path) -> None:
        """Listings are current for all views, sorted, per folder, and empty for a missing folder."""
        storage, other = self.storage(tmp_path), self.storage(tmp_path)
        assert other.list("frames") == other.list("nowhere") == ()
        for name in ("frames/b", "frames/a", "frames/é.frame", "m"):
            _put(storage, name, name.encode())
            assert name.rpartition("/")[2] in other.list(name.rpartition("/")[0])
        assert other.list("frames") == ("a", "b", "é.frame")
        assert {"frames", "m"} <= set(other.list(""))
        assert not {"a", "b"} & set(other.list(""))
        storage.delete("frames/b")
        assert other.list("frames") == ("a", "é.frame")

    def test_a_deleted_object_is_gone(self, tmp_path: Path) -> None:
        """Deleting a missing object is no error."""
        storage, other = self.storage(tmp_path), self.storage(tmp_path)
        _put(storage, "frames/a", b"x")
        storage.delete("frames/a")
        storage.delete("frames/a")
        storage.sync("frames")
        for ask in (other.size, other.load, lambda path: other.read(path, 0, 1)):
            with pytest.raises(FileNotFoundError):
                ask("frames/a")
        _put(storage, "frames/a", b"again")
        assert other.read("frames/a", 0, 10) == b"again"

    def test_ranges_end_where_the_object_ends(self, tmp_path: Path) -> None:
        """A range beyond the end returns no bytes and raises no error."""
        storage = self.storage(tmp_path)
        _put(storage, "a", b"0123456789")
        _put(storage, "empty", b"")
        reads = {(0, 10): b"0123456789", (3, 4): b"3456", (8, 9): b"89", (10, 1): b"", (99, 5): b""}
        opened = storage.open("a")
        assert opened.nbytes == storage.size("a") == 10
        before = storage.bytes_read
        for (offset, nbytes), expected in reads.items():
            assert storage.read("a", offset, nbytes) == expected
        assert storage.bytes_read - before == sum(map(len, reads.values()))
        for (offset, nbytes), expected in reads.items():
            assert opened.read(offset, nbytes) == expected
        assert storage.read("empty", 0, 5) == b""
        with pytest.raises(FileNotFoundError):
            storage.read("nothing", 0, 5)

    def test_many_ranges_come_in_the_order_in_which_they_are_asked_for(self, tmp_path: Path) -> None:
        """Ranges may be of several objects; an error takes the place of a missing object's bytes."""
        storage = self.storage(tmp_path)
        contents = {f"frames/{name}": name.encode() * 1000 for name in "abc"}
        for name, content in contents.items():
            _put(storage, name, content)
        asked = [(name, 7 * i, 40 + i) for i in range(12) for name in contents]
        before = storage.requests
        reads = [
            partial(storage.read, *span) for span in (*asked, ("frames/none", 0, 5), ("frames/a", 990, 50))
        ]
        found = storage.together(reads)
        assert storage.requests > before
        assert found[: len(asked)] == [contents[name][at:][:nbytes] for name, at, nbytes in asked]
        assert isinstance(found[-2], FileNotFoundError)
        assert found[-1] == b"a" * 10
        assert not storage.together([])
        assert storage.load("frames/b")[0] == contents["frames/b"]

    @pytest.mark.parametrize("name", _NAMES)
    def test_a_name_of_no_object_is_refused(self, tmp_path: Path, name: str) -> None:
        """Every method refuses the name, because names come from untrusted archives."""
        storage = self.storage(tmp_path)
        asked: list[Callable[[], object]] = [
            lambda: storage.read(name, 0, 1),
            lambda: storage.size(name),
            lambda: storage.open(name),
            lambda: storage.load(name),
            lambda: storage.create(name),
            lambda: storage.replace(name, b"x", None),
            lambda: storage.delete(name),
        ]
        for ask in asked:
            with pytest.raises(UnsafePathError):
                ask()

    def test_an_object_may_be_large(self, tmp_path: Path) -> None:
        """It is written in pieces, and read by ranges."""
        storage = self.storage(tmp_path)
        with storage.create("frames/a") as creation:
            for i in range(24):
                creation.write(bytes([i]) * _MIB)
            creation.commit()
        assert storage.size("frames/a") == 24 * _MIB
        for i in range(1, 24):
            assert storage.read("frames/a", i * _MIB - 2, 4) == bytes([i - 1, i - 1, i, i])
        assert storage.read("frames/a", 24 * _MIB - 5, 9) == bytes([23]) * 5

    def test_a_lock_is_released_once_and_then_free(self, tmp_path: Path) -> None:
        """If the storage has locks, a second writer is refused while the lock is taken."""
        storage, other = self.storage(tmp_path), self.storage(tmp_path)
        lock = storage.lock()
        states = [lock.released]
        if other.is_locked():
            with pytest.raises(LockedError):
                other.lock()
        lock.release()
        lock.release()
        states.append(lock.released)
        assert states == [False, True]
        assert not other.is_locked()
        other.lock().release()

    def test_an_archive_is_written_thinned_out_packed_and_checked(self, tmp_path: Path) -> None:
        """All operations on an archive work in this storage alone."""
        place = self.place(tmp_path)
        assert not is_archive(place)
        with ArchiveWriter(place, create=True) as writer:
            for step in range(3):
                _append(writer, step)
        with ArchiveWriter(place, grouped=True) as writer:
            for step in range(3, 9):
                _append(writer, step)
        assert is_archive(place)
        reader = ArchiveReader.open(place)
        assert [_weights(reader, step) for step in range(9)] == [bytes([step]) * 9 for step in range(9)]
        with ArchiveWriter(place) as writer:
            remove_frames(writer, [writer.reader.find(step).frame_id for step in (0, 5)])
        assert check_archive(place) == ()
        packed, again = f"{place}.packed", f"{place}.again"
        pack_archive(ArchiveReader.open(place), packed)
        assert check_archive(packed) == ()
        unpack_archive(ArchiveReader.open(packed), again)
        with ArchiveWriter(again) as writer:
            _append(writer, 9)
        assert check_archive(again) == ()
        assert [frame.step for frame in ArchiveReader.open(again).frames] == [1, 2, 3, 4, 6, 7, 8, 9]
        around, name = object_at(packed)
        assert around.size(name) == ArchiveReader.open(packed).nbytes

    def test_of_two_writers_one_is_refused_and_leaves_nothing(self, tmp_path: Path) -> None:
        """It is refused by the lock when it opens the archive, or by the manifest's tag when it commits."""
        place = self.place(tmp_path)
        with ArchiveWriter(place, create=True) as writer:
            _append(writer, 0)
            writer.flush()
            try:
                rival = ArchiveWriter(place)
            except LockedError:
                return
            with rival:
                _append(writer, 1)
                with pytest.raises(ConflictError):
                    _append(rival, 2)
        assert [frame.step for frame in ArchiveReader.open(place).frames] == [0, 1]
        assert check_archive(place) == ()


def _put(storage: Storage, path: str, content: bytes) -> None:
    with storage.create(path) as creation:
        creation.write(content)
        creation.commit()


def _race(act: Callable[[int], object]) -> list[int]:
    """Call a function at the same moment in several threads; return the indices without an error."""
    barrier, won = threading.Barrier(_N_RIVALS), []

    def run(i: int) -> None:
        barrier.wait()
        try:
            act(i)
        except (FileExistsError, InshrinkError):
            return
        won.append(i)

    with ThreadPoolExecutor(_N_RIVALS) as pool:
        list(pool.map(run, range(_N_RIVALS)))
    return won


def _append(writer: ArchiveWriter, step: int) -> None:
    with writer.begin(step=step, kind="keyframe", parent_id=None) as frame:
        frame.add("w", "raw/1", bytes([step]) * 9, attributes=("weight", "uint8", [9], False))
        frame.commit({"step": step})


def _weights(reader: ArchiveReader, step: int) -> bytes:
    frame = reader.frame(reader.find(step).frame_id)
    return frame.read(frame.entry("w"))
