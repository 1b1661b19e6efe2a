"""Archive checkpoints beside a training, as they are finished and before the trainer deletes them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, cast

from inshrink_core.archive import is_archive
from inshrink_core.chain import Archive, open_base
from inshrink_core.chain.sizes import ArchiveSize, archive_size
from inshrink_core.errors import (
    InshrinkError,
    LockedError,
    NotFoundError,
    StepConflictError,
    UnreadableError,
    spoken,
)
from inshrink_core.execution.progress import Progress
from inshrink_core.formats import Run, Skipped, open_run, split_step_pattern, unreadable_error
from inshrink_core.formats.run import NoCheckpointError
from inshrink_core.report import Report, plain_value
from inshrink_core.text import url_of
from inshrink_core.verbs.release import Release, refuse_elsewhere
from inshrink_core.verbs.shared.compressing import CompressReport, write_branches, write_run
from inshrink_core.verbs.shared.groups import Compressing, PathLike

_PATIENCE: Final = 12
"""Polls to wait for an archive that another process writes, and for files that the previous checkpoint
has and this one lacks: trainers write the optimizer and their own state last."""

_MAX_FAILURES: Final = 3
"""Polls in a row that may fail: a trainer that deletes files during a poll makes one or two fail."""


_STAGE: Final = "watch"


def watch_run(asked: Compressing) -> WatchReport:
    """Poll a run until an end condition holds, and archive new checkpoints."""
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
        with suppress(NotFoundError):  # the trainer may have deleted every checkpoint
            write_branches(watcher.writing)
        opened = Archive.open(asked.archive)
        if opened.steps:
            watcher.report.size = archive_size(opened)
    watcher.report.seconds = time.monotonic() - begun
    return watcher.report


class _Watcher:
    """State of one watch: the checkpoints seen, and the result for each."""

    def __init__(self, asked: Compressing, run: str) -> None:

        base = None if asked.base is None else open_base(asked.base)
        self._asked, self._path = asked, run
        self.writing = replace(asked, base=base, skip_damaged=True, look_ahead=False)
        self.report = WatchReport(
            archive=os.fspath(asked.archive),
            size=ArchiveSize.of((), 0),
            skip_damaged=asked.skip_damaged,
        )
        self._run: Run | None = None
        self._rows: dict[str, Skipped] = {}
        """Unreadable checkpoints to be archived, by path."""
        self._age: dict[tuple[int | str, str], int] = {}
        """Number of polls since a step, or the path of an unreadable checkpoint, has had an identity."""
        self._done: dict[int, str] = {}
        """Identity of each step that needs no more writing."""
        self._names: dict[int, frozenset[str]] = {}
        self._archived = self._archived_now()
        self._last, self._n_failures, self._n_locked = -1, 0, 0

    def say(self, what: str, step: int | None = None, why: str = "") -> None:
        """Report an event to the progress callback."""
        text = what if step is None else f"{what} step {step}"
        if self._asked.progress is not None:
            self._asked.progress(Progress(_STAGE, 0, 0, step, f"{text}: {why}" if why else text))

    def work(self) -> str:
        """Poll until an end condition holds; return its name."""
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
        """Poll once; return whether a checkpoint was written, or seen for the first time."""
        until = self._asked.until
        try:
            run, rows = self._opened()
        except (InshrinkError, OSError):
            # A trainer that deletes files during the poll causes errors that do not repeat; others are
            # raised.
            self._n_failures += 1
            if self._n_failures >= _MAX_FAILURES:
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
        has_changed = bool(found.items() - self._age.keys())
        self._age = {entry: self._age.get(entry, -1) + 1 for entry in found.items()}
        for path, row in self._rows.items():
            if self._age[path, row.identity] >= _PATIENCE:
                self._give_up(row)
        if run is None:
            return has_changed
        ready = {step: found[step] for step in run.steps if self._is_ready(run, step, found[step])}
        if until is not None:
            later = [step for step in ready if step >= until]
            ready = {step: identity for step, identity in ready.items() if step not in later[1:]}
        return (bool(ready) and self._write(run, ready)) or has_changed

    def _opened(self) -> tuple[Run | None, Sequence[Skipped]]:
        """Return the current run, None without a checkpoint, and its unreadable checkpoints."""
        try:
            run = open_run(self._path, **self._asked.reading) if self._run is None else self._run.refresh()
        except NoCheckpointError as error:
            return None, [row for row in error.skipped if row.unreadable]
        return run, run.unreadable

    def _is_ready(self, run: Run, step: int, identity: str) -> bool:
        """Return whether a checkpoint is not archived and finished, that is unchanged since the last poll."""
        age = self._age[step, identity]
        if self._done.get(step) == identity or not age:
            return False
        self._names[step] = frozenset(file.path for file in run[step].files)
        before = max((name for name in self._names if name < step), default=step)
        lacks = run.path_of(step).is_dir() and bool(self._names[before] - self._names[step])
        return not lacks or age >= _PATIENCE

    def _waits(self, until: int) -> bool:
        """Return whether a step up to `until` is not archived yet, or may be unfinished."""
        steps = () if self._run is None else self._run.steps
        return any(step <= until and step not in self._done for step in steps) or any(
            row.step is not None and path not in self.report.unreadable_by_path
            for path, row in self._rows.items()
        )

    def _give_up(self, row: Skipped) -> None:
        """Report an unreadable checkpoint, once."""
        if self.report.unreadable_by_path.get(row.path) != row:
            self.report.unreadable_by_path[row.path] = row
            self.say("unreadable", row.step, f"{row.path}: {row.reason}")

    def end(self, why: str) -> None:
        """Record why the watch ended, and report unreadable checkpoints that are no longer changing."""
        self.report.ended = why
        for path, row in self._rows.items():
            if why == "idle" or self._age.get((path, row.identity)):
                self._give_up(row)

    def _archived_now(self) -> frozenset[int]:

        archive = self._asked.archive
        return frozenset(Archive.open(archive).steps if is_archive(archive) else ())

    def _write(self, run: Run, ready: Mapping[int, str]) -> bool:
        """Archive the finished steps; the next poll retries steps that change or vanish meanwhile."""
        try:
            report = write_run(replace(self.writing, run=run, steps=tuple(ready)))
        except LockedError:
            # Another process prunes or appends; retry at the next poll.
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
        for row in report.unreadable:
            found = {step: identity for step, identity in ready.items() if step == row.step}
            if found and not self._changed(run, found):
                self._done |= found
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
    def _changed(run: Run, ready: Mapping[int, str]) -> bool:
        """Return whether a step was deleted or changed."""
        try:
            now = run.refresh()
        except (InshrinkError, OSError):
            return True
        return any(step not in now.steps or now.identity(step) != old for step, old in ready.items())

    def _release(self, run: Run) -> None:
        """Release archived originals; report an error without ending the watch."""
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
    """Result of `compress` with `watch`.

    Parameters
    ----------
    archive
        Path of the archive.
    ended
        Why the watch ended: ``until``, ``idle`` or ``interrupted``.
    appended
        Steps written now.
    skipped
        Steps archived before, or pruned.
    vanished
        Steps that were deleted before they were archived.
    released
        Steps whose originals were released.
    size
        Sizes of the archive's newest branch; without frames if nothing was archived.
    last
        The report of the last write; None without one.
    seconds
        Wall time.
    unreadable_by_path
        Checkpoints of the run that cannot be read, by path.
    skip_damaged
        Whether unreadable checkpoints are no failure.
    freed
        Bytes freed, or to be freed.
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
        """Checkpoints of the run that cannot be read."""
        return tuple(self.unreadable_by_path.values())

    @property
    def failure(self) -> UnreadableError | None:
        """The error for unreadable checkpoints; None without any."""
        return None if self.skip_damaged else unreadable_error(self.unreadable, self.archive)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --watch --json``.

        Returns
        -------
        base : BaseRecord
            Base model that the archive needs; absent if none.
        """
        base = {} if self.size.base is None else {"base": plain_value(self.size.base)}
        return base | Report.to_json(self)
