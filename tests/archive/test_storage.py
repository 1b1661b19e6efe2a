"""Every storage of ours keeps the suite, and one that lies does not; whole archives lie in memory."""

import contextlib
import functools
from importlib.metadata import EntryPoint

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, LocalStorage
from inshrink_core.archive.storage import Lock, OverlaidStorage, registry, storage_at
from inshrink_core.errors import ConflictError, InputError, LockedError
from inshrink_core.testing.storages import StorageSuite
from tests.archive.building import append, build
from tests.archive.memory_storage import MemoryStorage

FAILURES = pytest.fail.Exception, AssertionError


class UnlockedStorage(MemoryStorage):
    """Like a bucket: nobody is kept out, and who comes second is refused by the tag."""

    def lock(self):
        return Lock()


class BlindStorage(MemoryStorage):
    """Ignores what replacing expects, as some servers of buckets do."""

    def replace(self, path, content, expected):
        return super().replace(path, content, self._objects.get(self.key(path), (b"", None))[1])


class OverwritingStorage(MemoryStorage):
    """Creates over what is there."""

    def create(self, path, *, over=False):
        return super().create(path, over=True)


class StaleStorage(MemoryStorage):
    """Lists what it saw first."""

    @functools.cache  # noqa: B019 - as long as the test
    def names(self, folder):
        return super().names(folder)


class EagerStorage(MemoryStorage):
    """Shows what is not committed."""

    def create(self, path, *, over=False):
        creation = super().create(path, over=over)
        super().replace(path, b"", None)
        return creation


CLASSES = {
    kind.__name__[: -len("Storage")].lower(): kind
    for kind in (
        MemoryStorage,
        UnlockedStorage,
        BlindStorage,
        OverwritingStorage,
        StaleStorage,
        EagerStorage,
    )
}


def point(group: str, name: str) -> EntryPoint | None:
    entry = EntryPoint(name, f"{__name__}:{CLASSES[name].__name__}", group) if name in CLASSES else None
    if entry is None:
        return registry_plugin(group, name)
    return type("Point", (), {"load": lambda self: CLASSES[name]})()


registry_plugin = registry.plugin


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Register the storages of this file, each under its own scheme."""
    monkeypatch.setattr(registry, "plugin", point)


class TestLocal(StorageSuite):
    def place(self, folder):
        return folder / "a"


class TestFileUrl(StorageSuite):
    def place(self, folder):
        return f"file://{folder}/a"


class TestMemory(StorageSuite):
    def place(self, folder):
        return f"memory://{folder}/a"


class TestUnlocked(StorageSuite):
    def place(self, folder):
        return f"unlocked://{folder}/a"


class Liar(StorageSuite):
    def __init__(self, scheme):
        self.scheme = scheme

    def place(self, folder):
        return f"{self.scheme}://{folder}/a"


@pytest.mark.parametrize(
    ("scheme", "law"),
    [
        ("blind", "test_an_object_is_replaced_only_if_it_is_unchanged"),
        ("blind", "test_of_several_that_replace_an_object_one_wins"),
        ("overwriting", "test_an_object_is_not_created_where_one_is"),
        ("overwriting", "test_of_several_that_create_one_name_one_wins"),
        ("stale", "test_a_listing_has_what_is_there_now"),
        ("eager", "test_an_object_is_seen_when_it_is_committed_and_not_before"),
    ],
)
def test_a_storage_that_lies_fails_the_suite(tmp_path, scheme, law):
    with pytest.raises(FAILURES):
        getattr(Liar(scheme), law)(tmp_path / "lies")
    getattr(Liar("memory"), law)(tmp_path / "true")


# ---- storages that are read only -----------------------------------------------------------------


def test_what_can_be_read_only_says_so():
    storage = OverlaidStorage(MemoryStorage("memory://a"), {})
    assert not storage.writable
    for ask in (
        storage.lock,
        lambda: storage.create("a"),
        lambda: storage.replace("a", b"", None),
        lambda: storage.delete("a"),
    ):
        with pytest.raises(InputError, match="local or mounted file systems"):
            ask()


# ---- two writers ---------------------------------------------------------------------------------


def test_a_writer_that_another_overtook_is_refused_and_its_frame_is_gone(tmp_path):
    place = f"unlocked://{tmp_path}/a"
    build(place)
    first, second = ArchiveWriter(place), ArchiveWriter(place)
    append(first, 300)
    with pytest.raises(ConflictError, match="another writer"):
        append(second, 400)
    with pytest.raises(ConflictError):
        append(second, 300)  # the very same name
    second.close()
    append(first, 500)
    first.close()
    reader = ArchiveReader.open(place)
    assert [frame.step for frame in reader.frames] == [0, 100, 200, 300, 500]
    assert len(reader.storage.list("frames")) == 5


def test_a_manifest_that_was_changed_on_the_disk_is_not_overwritten(tmp_path):
    path = build(tmp_path / "a")
    before = (path / "inshrink-manifest").read_bytes()
    with ArchiveWriter(path) as writer:
        append(writer, 300)
        (path / "inshrink-manifest").write_bytes(before)
        with pytest.raises(ConflictError):
            append(writer, 400)
    assert (path / "inshrink-manifest").read_bytes() == before


# ---- whole archives ------------------------------------------------------------------------------


def test_an_archive_in_memory_has_the_bytes_of_one_on_the_disk(tmp_path):
    path, url = build(tmp_path / "a"), f"memory://{tmp_path}/a"
    build(url)
    storage = storage_at(url)
    for name in ("inshrink-manifest", *(f"frames/{name}" for name in storage.list("frames"))):
        assert storage.load(name)[0] == (path / name).read_bytes()
    assert storage.list("frames") == LocalStorage(path).list("frames")


def test_a_folder_that_two_make_at_a_time_stays_with_the_one_that_holds_its_lock(tmp_path):
    first, other = (LocalStorage(tmp_path / "x") for _ in range(2))
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(LockedError))
        stack.enter_context(first.made())
        lock = other.lock()
        first.lock()
    other.replace("inshrink-manifest", b"content", None)
    assert other.is_locked()
    lock.release()
