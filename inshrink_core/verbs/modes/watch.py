"""Archiving beside a training: each checkpoint as it is finished, before the trainer deletes it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from inshrink_core.errors import (
    InshrinkError,
    LockedError,
    NotFoundError,
    StepConflictError,
    UnreadableError,
    spoken,
)
from inshrink_core.execution.progress import Progress
from inshrink_core.report import Report, plain_value
from inshrink_core.text import url_of
from inshrink_core.verbs.shared.compressing import Compressing, CompressReport
from inshrink_core.verbs.shared.groups import PathLike

if TYPE_CHECKING:
    from inshrink_core.chain import ArchiveSize
    from inshrink_core.formats import Run, Skipped


_PATIENCE: Final = 12
"""Looks to wait for an archive that another process writes, and for files that the checkpoint before had
and this one lacks, as trainers write the optimizer and their own state last."""

_MOST_FAILURES: Final = 3
"""Looks in a row that may fail: a trainer that deletes as we look makes one or two fail."""


_STAGE: Final = "watch"


def watch_run(asked: Compressing) -> WatchReport:
    """Look at a run again and again until it ends, and archive what is new (`watch`)."""
    from inshrink_core.archive import is_archive
    from inshrink_core.chain import Archive, archive_size
    from inshrink_core.formats import split_step_pattern
    from inshrink_core.verbs.history.release import refuse_elsewhere

    asked.exclude("--watch", ("steps", "part", "engine", "workers"))
    begun = time.monotonic()
    run = os.fspath(cast("PathLike", asked.run))
    if url_of(run) and asked.release:
        refuse_elsewhere(run)
    is_pattern = any(sign in run for sign in "*?[")
    if not (is_pattern or url_of(run) or split_step_pattern(run)[0].exists()):
        raise NotFoundError("there is no such directory", where=run)
    watcher = _Watcher(asked, run)
    try:
        ended = watcher.work()
    except KeyboardInterrupt:
        ended = "interrupted"
    watcher.end(ended)
    if is_archive(asked.archive):
        with suppress(NotFoundError):  # every checkpoint may be gone by now
            watcher.writing.write_branches()
    if is_archive(asked.archive):
        opened = Archive.open(asked.archive)
        if opened.steps:
            watcher.report.size = archive_size(opened)
    watcher.report.seconds = time.monotonic() - begun
    return watcher.report


class _Watcher:
    """One watch: what was seen of each checkpoint, and what became of it."""

    def __init__(self, asked: Compressing, run: str) -> None:
        from inshrink_core.chain import ArchiveSize, open_base

        base = None if asked.base is None else open_base(asked.base)
        self._asked, self._path = asked, run
        self.writing = replace(asked, base=base, skip_damaged=True, look_ahead=False)
        self.report = WatchReport(
            archive=os.fspath(asked.archive),
            size=ArchiveSize(frames=(), manifest_nbytes=0),
            skip_damaged=asked.skip_damaged,
        )
        self._run: Run | None = None
        self._rows: dict[str, Skipped] = {}
        """Checkpoints that cannot be read and are wanted, by path."""
        self._age: dict[tuple[int | str, str], int] = {}
        """For how many looks a step, or the path of what cannot be read, has had an identity."""
        self._done: dict[int, str] = {}
        """Identity of each step that needs no writing any more."""
        self._names: dict[int, frozenset[str]] = {}
        self._archived = self._archived_now()
        self._last, self._n_failures, self._n_locked = -1, 0, 0

    def say(self, what: str, step: int | None = None, why: str = "") -> None:
        """Tell the listener what happened."""
        text = what if step is None else f"{what} step {step}"
        if self._asked.progress is not None:
            self._asked.progress(Progress(_STAGE, 0, 0, step, f"{text}: {why}" if why else text))

    def work(self) -> str:
        """Look again and again; return why it ended."""
        until, idle, busy_at = self._asked.until, self._asked.idle, time.monotonic()
        while True:
            if self._look():
                busy_at = time.monotonic()
            if until is not None and self._last >= until and not self._waits(until):
                return "until"
            if idle is not None and time.monotonic() - busy_at >= idle:
                return "idle"
            time.sleep(self._asked.interval)

    def _look(self) -> bool:
        """Look once; return whether something was written, or seen for the first time."""
        until = self._asked.until
        try:
            run, rows = self._opened()
        except (InshrinkError, OSError):
            # A trainer deletes while we look: that passes, and what does not is raised.
            self._n_failures += 1
            if self._n_failures >= _MOST_FAILURES:
                raise
            return False
        self._run, self._n_failures = run, 0
        self._rows = {row.path: row for row in rows if until is None or row.step is None or row.step <= until}
        found: dict[int | str, str] = {} if run is None else {step: run.identity(step) for step in run.steps}
        found |= {path: row.identity for path, row in self._rows.items()}
        steps = {key for key, _ in self._age if isinstance(key, int)}
        for step in steps - found.keys() - self._done.keys():
            self.report.vanished += (step,)
            self.say("vanished", step, "it was deleted before it could be archived")
        stirred = bool(found.items() - self._age.keys())
        self._age = {entry: self._age.get(entry, -1) + 1 for entry in found.items()}
        for path, row in self._rows.items():
            if self._age[path, row.identity] >= _PATIENCE:
                self._give_up(row)
        if run is None:
            return stirred
        ready = {step: found[step] for step in run.steps if self._is_ready(run, step, found[step])}
        if until is not None:
            later = [step for step in ready if step >= until]
            ready = {step: identity for step, identity in ready.items() if step not in later[1:]}
        return (bool(ready) and self._write(run, ready)) or stirred

    def _opened(self) -> tuple[Run | None, Sequence[Skipped]]:
        """Return the run as it is now, None where there is no checkpoint yet, and what cannot be read."""
        from inshrink_core.formats import open_run
        from inshrink_core.formats.run import NoCheckpointError

        try:
            run = open_run(self._path, **self._asked.reading) if self._run is None else self._run.refresh()
        except NoCheckpointError as error:
            return None, [row for row in error.skipped if row.unreadable]
        return run, run.unreadable

    def _is_ready(self, run: Run, step: int, identity: str) -> bool:
        """Tell whether a checkpoint is finished and not archived: it was the same at the look before."""
        age = self._age[step, identity]
        if self._done.get(step) == identity or not age:
            return False
        self._names[step] = frozenset(file.path for file in run[step].files)
        before = max((name for name in self._names if name < step), default=step)
        lacks = run.path_of(step).is_dir() and bool(self._names[before] - self._names[step])
        return not lacks or age >= _PATIENCE

    def _waits(self, until: int) -> bool:
        """Tell whether a step that is wanted is not archived yet, or may only be unfinished."""
        steps = () if self._run is None else self._run.steps
        return any(step <= until and step not in self._done for step in steps) or any(
            row.step is not None and path not in self.report.unreadable_by_path
            for path, row in self._rows.items()
        )

    def _give_up(self, row: Skipped) -> None:
        """Report a checkpoint that cannot be read, once."""
        if self.report.unreadable_by_path.get(row.path) != row:
            self.report.unreadable_by_path[row.path] = row
            self.say("unreadable", row.step, f"{row.path}: {row.reason}")

    def end(self, why: str) -> None:
        """Report why the watch ended, and what cannot be read and is not being written."""
        self.report.ended = why
        for path, row in self._rows.items():
            if why == "idle" or self._age.get((path, row.identity)):
                self._give_up(row)

    def _archived_now(self) -> frozenset[int]:
        from inshrink_core.archive import is_archive
        from inshrink_core.chain import Archive

        archive = self._asked.archive
        return frozenset(Archive.open(archive).steps if is_archive(archive) else ())

    def _write(self, run: Run, ready: Mapping[int, str]) -> bool:
        """Archive what is ready; what changes or vanishes meanwhile is left for the next look."""
        try:
            report = replace(self.writing, run=run, steps=tuple(ready)).write()
        except LockedError:
            # Another process prunes or appends; that passes.
            self._n_locked += 1
            if self._n_locked >= _PATIENCE:
                raise
            return False
        except (InshrinkError, OSError) as error:
            if isinstance(error, StepConflictError) or not self._changed(run, ready):
                raise
            return True
        finally:
            self._note_archived(run, ready)
        self._n_locked, self.report.last = 0, report
        for step in report.skipped:
            if step not in self._done:
                self.report.skipped += (step,)
                self.say("skipped", step, "it is there already, or was pruned")
            self._take(step, ready[step])
        lost = {step: identity for step, identity in ready.items() if self._done.get(step) != identity}
        changed = self._changed(run, lost) if lost else ()
        for row in report.unreadable:
            if row.step in lost and row.step not in changed:
                self._done[row.step] = ready[row.step]
                self._give_up(row)
        self.writing = replace(self.writing, resumed_from=None)
        if self._asked.release:
            self._release(run)
        return True

    def _note_archived(self, run: Run, ready: Mapping[int, str]) -> None:
        """Report the steps that were committed."""
        before, self._archived = self._archived, self._archived_now()
        for step in sorted(ready.keys() & (self._archived - before)):
            self.report.unreadable_by_path.pop(spoken(str(run.path_of(step))), None)
            self.report.appended += (step,)
            self.say("archived", step)
            self._take(step, ready[step])

    def _take(self, step: int, identity: str) -> None:
        self._done[step] = identity
        self._last = max(self._last, step)

    @staticmethod
    def _changed(run: Run, ready: Mapping[int, str]) -> list[int]:
        """Return the steps that are gone, or others by now."""
        try:
            now = run.refresh()
        except (InshrinkError, OSError):
            return list(ready)
        return [step for step, old in ready.items() if step not in now.steps or now.identity(step) != old]

    def _release(self, run: Run) -> None:
        """Release what is archived; what keeps it from that ends no watch."""
        from inshrink_core.verbs.history.release import Release

        asked = self._asked
        try:
            report = Release(
                run=self._path,
                archive=asked.archive,
                steps=[step for step in run.refresh().steps if step in self._done],
                lossy=asked.lossy,
                apply=True,
                base=self.writing.base,
                step_pattern=asked.step_pattern,
                follow_links=asked.follow_links,
            ).perform()
        except (InshrinkError, OSError) as error:
            self.say("nothing is released", why=str(error))
            return
        self.report.freed += report.freed
        self.report.released += report.released
        for step in report.released:
            self.say("released", step)


@dataclass(slots=True, kw_only=True)
class WatchReport(Report):
    """What `watch` did.

    Parameters
    ----------
    archive
        The archive.
    ended
        Why it ended: ``until``, ``idle`` or ``interrupted``.
    appended, skipped, vanished, released
        Steps that were archived; that were in the archive already, or were pruned; that went before they
        could be archived; whose originals were deleted.
    size
        Sizes of the archive's newest branch; without frames where nothing was ever archived.
    last
        The report of the last writing; None for none.
    seconds
        Wall time.
    unreadable_by_path
        Checkpoints that cannot be read and are not archived, by path.
    skip_damaged
        Whether such checkpoints are no failure.
    freed
        Bytes of originals that were released.
    """

    archive: str
    ended: str = ""
    appended: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    vanished: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    size: ArchiveSize
    last: CompressReport | None = None
    seconds: float = 0.0
    unreadable_by_path: dict[str, Skipped] = field(default_factory=dict)
    skip_damaged: bool = False
    freed: int = 0

    KEYS: ClassVar = (
        "archive ended codec=last.codec config=last.config optimizer=last.optimizer "
        "ratio_total=size.ratio_total ratio_weights=size.ratio_weights bits_per_weight=size.bits_per_weight "
        "raw_bytes=size.raw_total archive_bytes=size.nbytes appended skipped vanished released "
        "bytes_freed=freed unreadable seconds"
    )
    SHOWS: ClassVar = (
        "unreadable archive appended vanished released bytes_freed ended seconds codec base "
        "ratio_total ratio_weights bits_per_weight raw_bytes archive_bytes"
    )

    @property
    def unreadable(self) -> tuple[Skipped, ...]:
        """Checkpoints that cannot be read and are not archived."""
        return tuple(self.unreadable_by_path.values())

    @property
    def failure(self) -> UnreadableError | None:
        """Why a watch that ended well is no success: a checkpoint cannot be read."""
        from inshrink_core.formats import unreadable_error

        return None if self.skip_damaged else unreadable_error(self.unreadable, self.archive)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --watch --json``."""
        base = {} if self.size.base is None else {"base": plain_value(self.size.base)}
        return base | Report.to_json(self)
