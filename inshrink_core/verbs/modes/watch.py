"""Archiving beside a training: each checkpoint as it is finished, before the trainer deletes it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

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
from inshrink_core.text import counted, duration, ratio, size, steps_in_short, url_of
from inshrink_core.verbs.compress import Compress, CompressReport
from inshrink_core.verbs.shared.groups import PathLike
from inshrink_core.verbs.shared.showing import (
    base_text,
    named_ratio,
    optimizer_text,
    show_facts,
    show_unreadable,
)

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.chain import ArchiveSize
    from inshrink_core.formats import Run, Skipped

__all__ = ["SeenSteps", "WatchReport", "watch", "watch_run"]

_PATIENCE: Final = 12
"""Intervals to wait for an archive that another process writes, and for files that the checkpoint before had
and this one lacks, as trainers write the optimizer and their own state last."""

_WHY: Final = {
    "until": "the step asked for is archived",
    "idle": "nothing new came",
    "interrupted": "interrupted; the same command goes on",
}

_MOST_FAILURES: Final = 3
"""Looks in a row that may fail: a trainer that deletes as we look makes one or two fail."""


_STAGE: Final = "watch"


def _event(kind: str, step: int | None, detail: str = "") -> Progress:
    """Return what is reported when something happened; `detail` says why, or how: for people."""
    text = kind if step is None else f"{kind} step {step}"
    return Progress(_STAGE, 0, 0, step, f"{text}: {detail}" if detail else text, {"event": kind})


def watch(run: PathLike, archive: PathLike, **options: Any) -> WatchReport:
    """Stay beside a training: archive each checkpoint as it is finished.

    Parameters
    ----------
    run
        A run's directory, a glob or a path with a step pattern.
    archive
        The archive to make or to append to.
    **options
        Of `inshrink_core.compress`, which does the same with ``watch=True``; of all but `steps`, `part`,
        `engine` and `workers`.

    Returns
    -------
    WatchReport
        Also after Ctrl-C, which ends the watch: steps that were committed are kept, one that was being
        written is dropped and archived by the next watch.

    Raises
    ------
    NotFoundError
        The directory is not there; one without a checkpoint yet is waited in.
    InputError
        `interval`, `until` or `idle` is out of range, or `compress` refuses its options.
    StepConflictError
        A step was archived and then written again with other values.
    LockedError
        Another process writes the archive for longer than a dozen intervals.
    StorageError
        As for any writer.

    Notes
    -----
    Beside how far each writing has come, `progress` gets what happens: events of the stage ``watch``, whose
    `found` has as ``event`` one of ``archived``, ``skipped`` (in the archive already, or older than its last
    step), ``vanished`` (gone or changed while it was read), ``unreadable`` (not unfinished, and not to be
    read), ``released`` (deleted, since the archive has it) and ``ended``.

    The archive is free between two writings, so that another process may read, prune or append. Each
    writing reads the state of the last step from the archive again, a decoding of at most
    `keyframe_every` frames.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.verbs.watch(
    ...     inshrink_core.sample("digits-cnn"), target, interval=0.1, until=25
    ... )
    >>> report.ended, report.steps("archived")
    ('until', (10, 25))
    """
    return watch_run(Compress(run, archive, watch=True, **options))


def watch_run(asked: Compress) -> WatchReport:
    """Look at a run again and again until it ends, and archive what is new (`watch`)."""
    from inshrink_core.archive import is_archive
    from inshrink_core.chain import Archive, archive_size
    from inshrink_core.formats import split_step_pattern
    from inshrink_core.verbs.history.release import refuse_elsewhere

    asked.exclude("--watch", ("steps", "part", "engine", "workers"))
    begun = time.monotonic()
    run = os.fspath(cast("PathLike", asked.run))
    if url_of(run) and (asked.release or asked.release_lossy):
        refuse_elsewhere(run)
    is_pattern = any(sign in run for sign in "*?[")
    if not (is_pattern or url_of(run) or split_step_pattern(run)[0].exists()):
        raise NotFoundError("there is no such directory", where=run)
    watcher = _Watcher(asked, run)
    try:
        watcher.report.ended = watcher.work(asked.idle)
    except KeyboardInterrupt:
        watcher.report.ended = "interrupted"
    watcher.end()
    if is_archive(asked.archive):
        with suppress(NotFoundError):  # every checkpoint may be gone by now
            watcher.writing.write_branches()
    watcher.say(Progress(_STAGE, 0, 0, None, found={"event": "ended"}))
    if is_archive(asked.archive):
        opened = Archive.open(asked.archive)
        if opened.steps:
            watcher.report.size = archive_size(opened)
    watcher.report.seconds = time.monotonic() - begun
    return watcher.report


class _Watcher:
    """One watch: what was looked at, and what became of it."""

    def __init__(self, asked: Compress, run: str) -> None:
        from inshrink_core.chain import ArchiveSize, open_base

        base = None if asked.base is None else open_base(asked.base)
        self._asked, self._run_path = asked, run
        self._writing = replace(asked, base=base, skip_damaged=True, look_ahead=False)
        self.report = WatchReport(
            archive=os.fspath(asked.archive),
            size=ArchiveSize(frames=(), manifest_nbytes=0),
            skip_damaged=asked.skip_damaged,
        )
        self._archive, self._interval, self._until = asked.archive, asked.interval, asked.until
        self._doubted: dict[str, _Doubt] = {}
        self._stirs = False  # whether something that cannot be read is still being written
        self._run: Run | None = None
        self._failures = self._locked = 0
        self._told: set[int] = set()
        self._seen_steps = SeenSteps(asked.interval)

    @property
    def writing(self) -> Compress:
        """How the next steps are written."""
        return self._writing

    def say(self, event: Progress) -> None:
        """Note an event, and report it to the listener, if there is one."""
        self.report.events.append(event)
        if self._asked.progress is not None:
            self._asked.progress(event)

    def work(self, idle: float | None) -> str:
        """Look again and again; return why it ended."""
        until = self._until
        busy_at = time.monotonic()
        while True:
            if self._look(until) or self._stirs:
                busy_at = time.monotonic()
            if until is not None and self._seen_steps.last >= until and not self._waits(until):
                return "until"
            if idle is not None and time.monotonic() - busy_at >= idle:
                return "idle"
            time.sleep(self._interval)

    def _look(self, until: int | None) -> bool:
        """Look once; return whether something was archived."""
        run = self._open()
        self._note_gone(frozenset() if run is None else frozenset(run.steps))
        if run is None:
            return False
        self._doubt(run.unreadable)
        ready = [step for step in run.steps if self._seen_steps.is_ready(run, step)]
        if until is not None:
            below = [step for step in ready if step < until]
            ready = ready[: len(below) + 1]
        ready = self._without_older(ready, run)
        return bool(ready) and self._write(run, ready)

    def _open(self) -> Run | None:
        """Return the run as it is now; None where there is no checkpoint yet."""
        from inshrink_core.formats import open_run
        from inshrink_core.formats.run import NoCheckpointError

        try:
            if self._run is None:
                self._run = open_run(self._run_path, **self._asked.reading)
            else:
                self._run = self._run.refresh()
        except NoCheckpointError as error:
            self._doubt(row for row in error.skipped if row.unreadable)
            self._run, self._failures = None, 0
            return None
        except (InshrinkError, OSError):
            # A trainer deletes while we look: that passes, and what does not is raised.
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                raise
            return None
        self._failures = 0
        return self._run

    def _note_gone(self, steps: frozenset[int]) -> None:
        """Report what was seen and went before it could be archived."""
        if self._failures:
            return
        for step in self._seen_steps.gone(steps):
            self.say(_event("vanished", step, "it was deleted before it could be archived"))

    def _doubt(self, rows: Iterable[Skipped]) -> None:
        """Take note of what cannot be read; what stays so and does not change is no unfinished checkpoint."""
        now, before = time.monotonic(), self._doubted
        self._doubted, self._stirs = {}, False
        for row in rows:
            if self._until is not None and row.step is not None and row.step > self._until:
                continue
            doubt = before.get(row.path)
            if doubt is None or doubt.row != row:
                doubt, self._stirs = _Doubt(row, now), True
            elif now - doubt.since >= _PATIENCE * self._interval:
                self._give_up(row)
            self._doubted[row.path] = doubt

    def _waits(self, until: int) -> bool:
        """Whether a step that is wanted is not archived yet, or may only be unfinished."""
        steps = () if self._run is None else self._run.steps
        return any(step <= until and not self._seen_steps.is_done(step) for step in steps) or any(
            row.step is not None and row.path not in self.report.unreadable_by_path
            for row, _ in self._doubted.values()
        )

    def _give_up(self, row: Skipped) -> None:
        """Report a checkpoint that cannot be read, once."""
        if self.report.unreadable_by_path.get(row.path) != row:
            self.report.unreadable_by_path[row.path] = row
            self.say(_event("unreadable", row.step, f"{row.path}: {row.reason}"))

    def end(self) -> None:
        """Report what cannot be read at the end, but for what nobody waited for, or is being written."""
        now = time.monotonic()
        for row, since in self._doubted.values():
            if self.report.ended == "idle" or now - since >= self._interval:
                self._give_up(row)

    def _without_older(self, ready: list[int], run: Run) -> list[int]:
        """Pass over steps before the last one of an archive that was pruned: it held them once."""
        from inshrink_core.chain import Archive

        archived = self._archived()
        if not archived or self._writing.resumed_from is not None:
            return ready
        if not Archive.open(self._archive).reader.catalog.manifest.tombstones:
            return ready
        older = [step for step in ready if step < max(archived) and step not in archived]
        for step in older:
            self._seen_steps.pass_over(step, run.identity(step))
            self.say(_event("skipped", step, "it is older than the last step of a pruned archive"))
        return [step for step in ready if step not in older]

    def _archived(self) -> tuple[int, ...]:
        from inshrink_core.archive import is_archive
        from inshrink_core.chain import Archive

        return Archive.open(self._archive).steps if is_archive(self._archive) else ()

    def _write(self, run: Run, ready: list[int]) -> bool:
        """Archive what is ready; what vanishes meanwhile is reported and left out."""
        identities = {step: run.identity(step) for step in ready}
        before = frozenset(self._archived())
        try:
            report = replace(self._writing, run=run, steps=ready).write()
        except LockedError:
            # Another process prunes or appends; that passes.
            self._locked += 1
            if self._locked >= _PATIENCE:
                raise
            return False
        except BaseException as error:
            self._note_archived(before, identities)
            if not isinstance(error, InshrinkError | OSError) or isinstance(error, StepConflictError):
                raise
            if not self._note_vanished(run, identities):
                raise
            return True
        self._locked = 0
        self.report.reports.append(report)
        self._note_archived(before, identities)
        lost = {
            row.step: row
            for row in report.unreadable
            if row.step in identities and row.path == spoken(str(run.path_of(row.step)))
        }
        if lost and self._note_vanished(run, {step: identities[step] for step in lost}):
            lost = {step: row for step, row in lost.items() if not self._seen_steps.is_new(step)}
        for step, row in lost.items():
            self._seen_steps.pass_over(step, identities[step])
            self._give_up(row)
        for step in report.skipped:
            if not self._seen_steps.is_done(step, identities[step]):
                self._finish(step, identities[step], _event("skipped", step, "it is there already"))
        self._writing = replace(self._writing, resumed_from=None)
        if self._asked.release or self._asked.release_lossy:
            self._release(run)
        return True

    def _release(self, run: Run) -> None:
        """Release what is archived; what keeps it from that ends no watch."""
        from inshrink_core.verbs.history.release import Release

        asked = self._asked
        try:
            report = Release(
                run=self._run_path,
                archive=self._archive,
                steps=[step for step in run.refresh().steps if self._seen_steps.is_done(step)],
                lossy=asked.release_lossy,
                apply=True,
                base=self._writing.base,
                step_pattern=asked.step_pattern,
                follow_links=asked.follow_links,
            ).perform()
        except (InshrinkError, OSError) as error:
            self.say(_event("kept", None, f"nothing is released: {error}"))
            return
        self.report.freed += report.freed
        for step in report.released:
            self.say(_event("released", step))
        for row in report.steps:
            if row.why and row.step not in self._told and "newest" not in row.why:
                self._told.add(row.step)
                self.say(_event("kept", row.step, row.why))

    def _note_archived(self, before: frozenset[int], identities: Mapping[int, str]) -> None:
        """Report the steps that were committed."""
        for step in self._archived():
            if step in identities and step not in before:
                if self._run is not None and step in self._run:
                    self.report.unreadable_by_path.pop(spoken(str(self._run.path_of(step))), None)
                self._finish(step, identities[step], _event("archived", step))

    def _finish(self, step: int, identity: str, event: Progress) -> None:
        """Take a step as done."""
        self._seen_steps.finish(step, identity)
        self.say(event)

    def _note_vanished(self, run: Run, identities: Mapping[int, str]) -> bool:
        """Report steps that are gone, or others by now, while they were read; tell whether there are any."""
        try:
            now = run.refresh()
        except (InshrinkError, OSError):
            now = None
        found = False
        for step, identity in identities.items():
            if self._seen_steps.is_done(step):
                continue
            if now is None or step not in now.steps or now.identity(step) != identity:
                self._seen_steps.forget(step)
                self.say(_event("vanished", step, "it was deleted or changed while it was read"))
                found = True
        return found


@dataclass(slots=True, kw_only=True)
class WatchReport(Report):
    """What `watch` did.

    Parameters
    ----------
    archive
        The archive.
    ended
        Why it ended: ``until``, ``idle`` or ``interrupted``.
    events
        What happened, in order.
    size
        Sizes of the archive's newest branch; without frames where nothing was ever archived.
    reports
        The report of each writing.
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
    events: list[Progress] = field(default_factory=list)
    size: ArchiveSize
    reports: list[CompressReport] = field(default_factory=list)
    seconds: float = 0.0
    unreadable_by_path: dict[str, Skipped] = field(default_factory=dict)
    skip_damaged: bool = False
    freed: int = 0

    def _document(self) -> dict[str, Any]:
        last = self.last
        return {
            "archive": self.archive,
            "ended": self.ended,
            "codec": None if last is None else last.codec,
            "config": None if last is None else last.config,
            "optimizer": None if last is None else last.optimizer,
            "ratio_total": self.size.ratio_total,
            "ratio_weights": self.size.ratio_weights,
            "bits_per_weight": self.size.bits_per_weight,
            "raw_bytes": self.size.raw_total,
            "archive_bytes": self.size.nbytes,
            "appended": self.appended,
            "skipped": self.skipped,
            "vanished": self.vanished,
            "released": self.steps("released"),
            "bytes_freed": self.freed,
            "unreadable": self.unreadable,
            "seconds": self.seconds,
        }

    @property
    def last(self) -> CompressReport | None:
        """The report of the last writing; None for none."""
        return self.reports[-1] if self.reports else None

    @property
    def appended(self) -> tuple[int, ...]:
        """Steps that were archived."""
        return self.steps("archived")

    @property
    def skipped(self) -> tuple[int, ...]:
        """Steps that were in the archive already, or are older than its last."""
        return self.steps("skipped")

    @property
    def vanished(self) -> tuple[int, ...]:
        """Steps that were gone or changed while they were read."""
        return self.steps("vanished")

    @property
    def unreadable(self) -> tuple[Skipped, ...]:
        """Checkpoints that cannot be read and are not archived."""
        return tuple(self.unreadable_by_path.values())

    @property
    def failure(self) -> UnreadableError | None:
        """Why a watch that ended well is no success: a checkpoint cannot be read."""
        from inshrink_core.formats import unreadable_error

        return None if self.skip_damaged else unreadable_error(self.unreadable, self.archive)

    def steps(self, kind: str) -> tuple[int, ...]:
        """Return the steps of the events of a kind."""
        return tuple(
            one.step for one in self.events if (one.found or {}).get("event") == kind and one.step is not None
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --watch --json``."""
        base = {} if self.size.base is None else {"base": plain_value(self.size.base)}
        return base | Report.to_json(self)

    def show(self, console: Console) -> None:
        """Print what was archived, and why the watch ended."""
        show_unreadable(console, self.unreadable)
        appended, vanished, released = self.appended, self.vanished, self.steps("released")
        facts = [
            ("archive", self.archive),
            ("appended", steps_in_short(appended) if appended else "nothing new"),
            ("vanished", steps_in_short(vanished) if vanished else ""),
            ("released", f"{steps_in_short(released)} ({size(self.freed)})" if released else ""),
            ("ended", _WHY.get(self.ended, self.ended)),
            ("time", duration(self.seconds)),
        ]
        if self.size.frames:
            held = f"{counted(len(self.size.frames), 'frame')}, {size(self.size.nbytes)}"
            optimizer = None if self.last is None else self.last.optimizer
            roles = {row.spec.role.value for frame in self.size.frames for row in frame.tensors}
            facts += [
                ("frames", held),
                ("optimizer state", optimizer_text(optimizer, roles)),
                ("base model", base_text(plain_value(self.size.base))),
                (named_ratio("ratio of everything", self.size.base), ratio(self.size.ratio_total)),
                (named_ratio("ratio of the weights", self.size.base), ratio(self.size.ratio_weights)),
            ]
        show_facts(console, facts)


class _Doubt(NamedTuple):
    """What cannot be read, and since when it has been as it is."""

    row: Skipped
    since: float


class _Seen(NamedTuple):
    """A checkpoint as it was seen: what it is, its files, and how long it has been so."""

    identity: str
    names: frozenset[str]
    since: float


class SeenSteps:
    """What was seen of each checkpoint, and which are done.

    Parameters
    ----------
    interval
        Seconds between looks.

    Attributes
    ----------
    last
        The last step that was finished; -1 for none.
    """

    def __init__(self, interval: float) -> None:
        self.last = -1
        self._interval = interval
        self._seen: dict[int, _Seen] = {}
        self._done: dict[int, str] = {}
        self._names: frozenset[str] = frozenset()

    def is_ready(self, run: Run, step: int) -> bool:
        """Whether a checkpoint is finished and not archived: it was the same at the look before."""
        identity, now = run.identity(step), time.monotonic()
        if self.is_done(step, identity):
            return False
        before = self._seen.get(step)
        if before is None or before.identity != identity:
            names = frozenset(file.path for file in run[step].files)
            self._seen[step] = _Seen(identity, names, now)
            return False
        earlier = max((other for other in self._seen if other < step), default=None)
        expected = self._names if earlier is None else self._seen[earlier].names
        lacks = run.path_of(step).is_dir() and bool(expected - before.names)
        return not lacks or now - before.since >= _PATIENCE * self._interval

    def is_done(self, step: int, identity: str | None = None) -> bool:
        """Whether a step is done; with an identity, as the checkpoint that this is of."""
        return step in self._done and identity in (None, self._done[step])

    def finish(self, step: int, identity: str) -> None:
        """Take a step as done; the next ones are expected to have files of the same names."""
        self.pass_over(step, identity)
        self.last = max(self.last, step)
        if step in self._seen:
            self._names = self._seen[step].names

    def pass_over(self, step: int, identity: str) -> None:
        """Take a step as done that was never looked for."""
        self._done[step] = identity

    def is_new(self, step: int) -> bool:
        """Whether nothing was seen of a step, or what was seen is forgotten."""
        return step not in self._seen

    def forget(self, step: int) -> None:
        """Forget what was seen of a step."""
        self._seen.pop(step, None)

    def gone(self, steps: Set[int]) -> list[int]:
        """Forget steps that are not among these, and return those of them that were not done."""
        missing = sorted(self._seen.keys() - steps)
        for step in missing:
            del self._seen[step]
        return [step for step in missing if step not in self._done]
