"""Defects that are planted to prove that the harness finds them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from inshrink_core.archive import ArchiveWriter, FrameWriter, frame_writer
from inshrink_core.archive.layout import FRAME_FOLDER
from inshrink_core.archive.maintenance import Rewrite
from inshrink_core.archive.storage import local
from inshrink_core.archive.storage.contract import Creation
from inshrink_core.errors import DamagedError
from inshrink_core.frame import FrameInfo
from inshrink_core.training.spool import Spool, SpooledSave


def _syncing_only(wanted: Callable[[int], bool]) -> AbstractContextManager[Any]:
    fsync = os.fsync

    def some(descriptor: int) -> None:
        if wanted(os.fstat(descriptor).st_mode):
            fsync(descriptor)

    return mock.patch.object(os, "fsync", some)


def file_unsynced() -> AbstractContextManager[Any]:
    """A writer that syncs folders, and no file."""
    return _syncing_only(stat.S_ISDIR)


def folder_unsynced() -> AbstractContextManager[Any]:
    """A writer that syncs files, and no folder."""
    return _syncing_only(stat.S_ISREG)


def manifest_first() -> AbstractContextManager[Any]:
    """A writer that lists a frame before it has its name."""

    def publish(self: ArchiveWriter, files: Sequence[Creation], info: FrameInfo) -> None:
        self.write_manifest(self._manifest.with_frame(info))
        for file in files:
            file.commit()
        self.storage.sync(FRAME_FOLDER)
        self.reader.refresh()

    return mock.patch.object(ArchiveWriter, "_publish", publish)


def early_report() -> AbstractContextManager[Any]:
    """A writer that reports a frame before it is renamed."""
    begin = ArchiveWriter.begin

    def begin_reporting(self: ArchiveWriter, **place: Any) -> FrameWriter:
        from benchmarks.crash.shim import Shim

        frame = begin(self, **place)
        Shim.current.note(f"committed {place['step']}")
        return frame

    return mock.patch.object(ArchiveWriter, "begin", begin_reporting)


def unlink_first() -> AbstractContextManager[Any]:
    """A writer that deletes the manifest before the new one has its name."""
    write_durably = local.write_durably

    def write(path: Path, content: bytes) -> None:
        path.unlink(missing_ok=True)
        write_durably(path, content)

    return mock.patch.object(local, "write_durably", write)


def deleted_first() -> AbstractContextManager[Any]:
    """A rewrite that deletes old frames before the manifest is switched."""
    switch = Rewrite.switch

    def switch_late(self: Rewrite, gone: Any = ()) -> None:
        for frame in self._old.values():
            self._storage.delete(frame.path)
        switch(self, gone)

    return mock.patch.object(Rewrite, "switch", switch_late)


def parents_unsynced() -> AbstractContextManager[Any]:
    """A pack that syncs no parent it makes."""
    return mock.patch.object(local, "make_folders", lambda folder: folder.mkdir(parents=True, exist_ok=True))


def raw_errors() -> AbstractContextManager[Any]:
    """A writer that lets the system's errors through."""
    return mock.patch.object(frame_writer, "storage_errors", return_value=nullcontext())


def deleted_bad() -> AbstractContextManager[Any]:
    """A saver that deletes a spooled save that it cannot read."""
    return mock.patch.object(Spool, "quarantine", lambda self, folder, _: self.drop(folder))


def aside_first() -> AbstractContextManager[Any]:
    """A saver that sets a save aside before that behind it knows from which frame it continues."""
    adopt = Spool.adopt

    def adopt_late(self: Spool, save: SpooledSave, parent: bytes) -> SpooledSave:
        for folder in self.folder.glob("[0-9]" * 8):
            if folder < save.folder:
                self.quarantine(folder, DamagedError("planted"))
        return adopt(self, save, parent)

    return mock.patch.object(Spool, "adopt", adopt_late)


class Plant(NamedTuple):
    """A defect, and the verb and the mode that must find it."""

    plant: Callable[[], AbstractContextManager[Any]]
    verb: str
    mode: str


PLANTS = {
    "file-unsynced": Plant(file_unsynced, "append", "power"),
    "group-unsynced": Plant(file_unsynced, "group", "power"),
    "folder-unsynced": Plant(folder_unsynced, "append", "power"),
    "parents-unsynced": Plant(parents_unsynced, "pack", "power"),
    "manifest-first": Plant(manifest_first, "append", "kill"),
    "early-report": Plant(early_report, "append", "kill"),
    "unlink-first": Plant(unlink_first, "append", "kill"),
    "deleted-first": Plant(deleted_first, "prune", "kill"),
    "deleted-bad": Plant(deleted_bad, "poisoned", "kill"),
    "aside-first": Plant(aside_first, "poisoned", "kill"),
    "raw-errors": Plant(raw_errors, "append", "fault"),
}
