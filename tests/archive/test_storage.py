"""Every storage of ours keeps the suite, and one that lies does not; whole archives lie in memory."""

import contextlib
from importlib.metadata import EntryPoint

import pytest

from inshrink_core.archive import ArchiveWriter, LocalStorage
from inshrink_core.archive.storage import registry
from inshrink_core.archive.storage.contract import Lock
from inshrink_core.errors import ConflictError, LockedError
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


CLASSES = {
    kind.__name__[: -len("Storage")].lower(): kind
    for kind in (MemoryStorage, UnlockedStorage, BlindStorage, OverwritingStorage)
}


def point(group, name):
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
    ],
)
def test_a_storage_that_lies_fails_the_suite(tmp_path, scheme, law):
    with pytest.raises(FAILURES):
        getattr(Liar(scheme), law)(tmp_path / "lies")
    getattr(Liar("memory"), law)(tmp_path / "true")


def test_a_manifest_that_was_changed_on_the_disk_is_not_overwritten(tmp_path):
    path = build(tmp_path / "a")
    before = (path / "inshrink-manifest").read_bytes()
    with ArchiveWriter(path) as writer:
        append(writer, 300)
        (path / "inshrink-manifest").write_bytes(before)
        with pytest.raises(ConflictError):
            append(writer, 400)
    assert (path / "inshrink-manifest").read_bytes() == before


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
