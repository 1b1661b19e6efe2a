"""Archives behind a URL: read by ranges, in a folder or packed; what cannot be reached is told."""

import sys
import uuid
from pathlib import Path

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive, is_archive, pack_archive
from inshrink_core.errors import (
    DamagedError,
    InputError,
    MissingExtraError,
    NotFoundError,
    StorageError,
)
from tests.archive.building import blocks_of, build, contents

fsspec = pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")

STEPS = (0, 100, 200)


@pytest.fixture
def bucket(tmp_path):
    """A folder of an object store in memory with an archive and the same packed."""
    path = build(tmp_path / "a", STEPS)
    pack_archive(ArchiveReader.open(path), tmp_path / "p")
    store, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for file in path.rglob("*"):
        if file.is_file():
            store.pipe(f"{root}/a/{file.relative_to(path)}", file.read_bytes())
    store.pipe(f"{root}/p", (tmp_path / "p").read_bytes())
    store.pipe(f"{root}/other", b"something else")
    yield f"memory:/{root}"
    store.rm(root, recursive=True)


@pytest.mark.parametrize("name", ["a", "p"])
def test_archive_behind_a_url_reads_as_the_folder(bucket, name):
    url = f"{bucket}/{name}"
    assert is_archive(url)
    reader = ArchiveReader.open(url)
    assert {f.step: contents(reader, f.frame_id) for f in reader.frames} == {
        step: blocks_of(step) for step in STEPS
    }
    assert check_archive(url) == ()
    assert reader.path == url


def test_packed_archive_behind_a_url_is_read_by_ranges(bucket, monkeypatch):
    asked = []
    store = fsspec.filesystem("memory")
    real = type(store).cat_file

    def counted(self, path, start=None, end=None, **options):
        asked.append((start, end))
        return real(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(store), "cat_file", counted)
    reader = ArchiveReader.open(f"{bucket}/p")
    asked.remove((None, None))  # for a manifest, which a packed archive has inside
    assert len(asked) == 2
    assert reader.bytes_read == sum(end - start for start, end in asked)


def test_what_is_not_there_or_no_archive_is_told(bucket):
    with pytest.raises(NotFoundError):
        ArchiveReader.open(f"{bucket}/nothing")
    with pytest.raises(DamagedError, match="not a packed archive"):
        ArchiveReader.open(f"{bucket}/other")


def test_unknown_store_and_store_that_refuses_are_told(bucket, monkeypatch):
    with pytest.raises(StorageError, match="no object storage of the name 'nowhere'"):
        ArchiveReader.open("nowhere://bucket/a")

    def refuse(*_args, **_kwargs):
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", refuse)
    with pytest.raises(StorageError, match="403 Forbidden"):
        ArchiveReader.open(f"{bucket}/p")


@pytest.mark.parametrize("kind", [str, Path])
def test_archive_is_not_written_to_a_url_that_fsspec_reads(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="local or mounted"):
        ArchiveWriter(kind("ftp://host/run.inshrink"), create=True)
    assert list(tmp_path.iterdir()) == []


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"inshrink\[remote\]"):
        ArchiveReader.open("ftp://host/run.inshrink")
