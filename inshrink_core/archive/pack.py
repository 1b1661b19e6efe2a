"""Packing an archive into one file, and unpacking it: the frames themselves are copied, not changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from inshrink_core.archive.durable import (
    LOCK_NAME,
    replacing,
    require_free,
    temporary_path,
    write_durably,
)
from inshrink_core.archive.layout import FRAME_FOLDER
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.pack_layout import PackedFile, align_file, pack_directory, pack_header
from inshrink_core.archive.reader import ArchiveReader
from inshrink_core.archive.storage import Storage, storage_error
from inshrink_core.errors import DamagedError, ExistsError
from inshrink_core.execution import make_folders, sync_path
from inshrink_core.frame import FrameInfo

__all__ = ["pack_archive", "unpack_archive"]

_CHUNK_NBYTES: Final = 4 << 20
"""Copied at a time: one request of a remote archive, and little memory."""

FrameDone = Callable[[int, int, int], None]
"""Called with (bytes done, bytes in all, step); may raise to cancel, which leaves nothing behind."""


def pack_archive(
    reader: ArchiveReader,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    done: FrameDone | None = None,
) -> int:
    """Write the live frames and a manifest of them into one file.

    Parameters
    ----------
    reader
        The archive, a folder or packed itself.
    target
        The file to make.
    force
        Replace the file if it exists.
    done
        Called after each piece copied.

    Returns
    -------
    int
        Size of the file in bytes.

    Raises
    ------
    ExistsError
        The target exists and `force` is not set, or is a folder.
    MissingFrameError, DamagedError
        A frame is gone, or not the one that was committed: nothing is written.
    StorageError
        The system refused; nothing is left behind.

    Notes
    -----
    Memory is bounded by 4 MiB. Every frame's SHA-256 is compared as it is copied. Frames that a writer
    commits meanwhile are not in it.
    """
    path = Path(target)
    require_free(path, force)
    reader.require_whole()
    with _storage_errors("the archive cannot be packed", path):
        make_folders(path.parent)
    with _storage_errors("the archive cannot be packed", path), replacing(path) as file:
        return _write(reader, file, done)


def _write(reader: ArchiveReader, file: IO[bytes], done: FrameDone | None) -> int:
    """Write header, frames, manifest, directory and trailer."""
    files: list[PackedFile] = []
    frames: list[FrameInfo] = []
    total, copied = sum(frame.nbytes for frame in reader.frames), 0
    file.write(pack_header())
    for frame in reader.frames:
        file.write(bytes(align_file(file.tell()) - file.tell()))
        files.append(PackedFile(frame.path, file.tell(), frame.nbytes))
        digest = hashlib.sha256()
        for chunk in _chunks(reader.storage, frame):
            file.write(chunk)
            digest.update(chunk)
            copied += len(chunk)
            if done is not None:
                done(copied, total, frame.step)
        _compare_digest(reader, frame, digest.digest())
        frames.append(replace(frame, digest=digest.digest()))
    old = reader.catalog.manifest
    manifest = Manifest(
        archive_id=old.archive_id, frames=tuple(frames), next_generation=reader.catalog.next_generation
    ).pack()
    file.write(bytes(align_file(file.tell()) - file.tell()))
    files.append(PackedFile(MANIFEST_NAME, file.tell(), len(manifest)))
    file.write(manifest)
    file.write(pack_directory(tuple(files), file.tell()))
    return file.tell()


def _chunks(storage: Storage, frame: FrameInfo) -> Iterator[bytes]:
    """Yield the bytes of a frame file."""
    for offset in range(0, frame.nbytes, _CHUNK_NBYTES):
        wanted = min(_CHUNK_NBYTES, frame.nbytes - offset)
        chunk = storage.read(frame.path, offset, wanted)
        if len(chunk) != wanted:
            raise DamagedError(
                f"the frame of step {frame.step} ends early", where=f"{storage.name}, {frame.path}"
            )
        yield chunk


def _compare_digest(reader: ArchiveReader, frame: FrameInfo, digest: bytes) -> None:
    """Refuse a frame that is not the one committed; of an unlisted one no digest is known."""
    if frame.digest not in (b"", digest):
        raise DamagedError(
            f"the frame of step {frame.step} is damaged: its SHA-256 is not the one in the manifest",
            where=f"{reader.path}, {frame.path}",
            remedy="`inshrink verify` says what is wrong; restore the frame from a backup",
        )


def unpack_archive(
    reader: ArchiveReader, target: str | os.PathLike[str], *, done: FrameDone | None = None
) -> None:
    """Write an archive as a folder, to which frames can be appended.

    Parameters
    ----------
    reader
        The archive, packed or a folder.
    target
        The folder to make; it must not exist.
    done
        Called after each piece copied.

    Raises
    ------
    ExistsError
        The target exists.
    MissingFrameError, DamagedError
        A frame is gone, or not the one that was packed.
    StorageError
        The system refused; nothing is left behind.
    """
    root = Path(target)
    if os.path.lexists(root):
        raise ExistsError("it exists already", where=str(root), remedy="choose another name")
    reader.require_whole()
    with _storage_errors("the archive cannot be unpacked", root):
        building = temporary_path(root)
        shutil.rmtree(building, ignore_errors=True)  # what an unpacking left that was cut off
        make_folders(root.parent)
        try:
            (building / FRAME_FOLDER).mkdir(parents=True)
            _write_folder(reader, building, done)
            building.rename(root)
            try:
                sync_path(root.absolute().parent)
            except BaseException:
                root.rename(building)
                raise
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def _write_folder(reader: ArchiveReader, root: Path, done: FrameDone | None) -> None:
    """Write the frames, then the manifest."""
    total, copied = sum(frame.nbytes for frame in reader.frames), 0
    frames = []
    for frame in reader.frames:
        digest = hashlib.sha256()
        with (root / frame.path).open("xb") as file:
            for chunk in _chunks(reader.storage, frame):
                file.write(chunk)
                digest.update(chunk)
                copied += len(chunk)
                if done is not None:
                    done(copied, total, frame.step)
            file.flush()
            os.fsync(file.fileno())
        _compare_digest(reader, frame, digest.digest())
        frames.append(replace(frame, digest=digest.digest()))
    sync_path(root / FRAME_FOLDER)
    (root / LOCK_NAME).touch()
    manifest = replace(
        reader.catalog.manifest, frames=tuple(frames), next_generation=reader.catalog.next_generation
    )
    write_durably(root / MANIFEST_NAME, manifest.pack())


@contextlib.contextmanager
def _storage_errors(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, str(path)) from error
