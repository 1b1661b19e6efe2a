"""Proof that the harness can fail: defects are planted, and each must be found."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.crash.cases import Stage
from benchmarks.crash.modes import CASES, Case, replays
from benchmarks.crash.ranks import RANK_PLANTS, RankStage
from benchmarks.crash.shim import Shim
from benchmarks.crash.verbs import VERBS
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

N_CASES = 120
"""Within which a planted defect is found, by far."""


def prove(shim: Shim, folder: Path, seed: int) -> bool:
    """Plant each defect, look for it, and print which case found it; tell whether all were found."""
    missed = 0
    for name, (plant, verb, mode) in PLANTS.items():
        with plant():
            stage = Stage(VERBS[verb](), shim, folder / verb)
            stage.open()
            if not replays(stage):
                raise RuntimeError(f"the log of {verb} does not tell all that it did")
            cases = islice(CASES[mode](stage, Random(f"{seed} {name}")), N_CASES)
            found = next((case for case in cases if case.outcome.problems), None)
        missed += _tell(name, verb, mode, found)
    for name, (plant_in_ranks, point) in RANK_PLANTS.items():
        with plant_in_ranks():
            ranks = RankStage(folder / "ranks")
            ranks.open()
            kills = ranks.kills(Random(f"{seed} {name}"), point)
            found = next((case for case in kills if case.outcome.problems), None)
        missed += _tell(name, "ranks", "kill", found)
    return not missed


def _tell(name: str, verb: str, mode: str, found: Case | None) -> bool:
    """Print which case found a defect, and return whether none did."""
    message = "NOT FOUND" if found is None else f"{found.name}: {found.outcome.problems[0]}"
    print(f"{name:>18} {verb:>8} {mode:>6}  {message}", flush=True)
    return found is None
