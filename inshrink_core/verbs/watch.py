"""Archiving beside a training: each checkpoint as it is finished, before the trainer deletes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from inshrink_core.archive import is_archive
from inshrink_core.chain import Archive, ArchiveSize, archive_size, open_base
from inshrink_core.errors import (
    DamagedError,
    InputError,
    InshrinkError,
    LockedError,
    NotFoundError,
    RottenError,
    StepConflictError,
)
from inshrink_core.execution.progress import OnProgress
from inshrink_core.formats import Run, Skipped, open_run, split_step_pattern
from inshrink_core.formats.run import NoCheckpointError
from inshrink_core.report import Report, plain_value
from inshrink_core.verbs.compress import CompressReport, compress

__all__ = ["OnEvent", "Sights", "WatchEvent", "WatchReport", "watch"]

_PATIENCE: Final = 12
"""Intervals to wait for an archive that another process writes, and for files that the checkpoint before had
and this one lacks, as trainers write the optimizer and their own state last."""

_MOST_FAILURES: Final = 3
"""Looks in a row that may fail: a trainer that deletes as we look makes one or two fail."""


def watch(
    run: str | os.PathLike[str],
    archive: str | os.PathLike[str],
    *,
    interval: float = 5.0,
    until: int | None = None,
    idle: float | None = None,
    step_pattern: str | None = None,
    follow_links: bool = False,
    on_event: OnEvent | None = None,
    progress: OnProgress | None = None,
    **options: Any,
) -> WatchReport:
    """Archive each checkpoint of a run as it is finished, until told to end.

    Parameters
    ----------
    run
        The run: a directory, which may have no checkpoint yet, or a glob.
    archive
        The archive to make or to append to.
    interval
        Seconds between looks. A checkpoint counts as finished when it can be read and none of its files
        changed from one look to the next.
    until
        End when this step or a later one is archived.
    idle
        End when nothing new was archived for so many seconds.
    step_pattern
        How the step number stands in file names.
    follow_links
        Follow links out of the run.
    on_event, progress
        Called as steps are archived, and after each tensor.
    **options
        As for `compress`: codec, config, optimizer and others.

    Returns
    -------
    WatchReport
        Also after Ctrl-C, which ends the watch: steps that were committed are kept, one that was being
        written is dropped and archived by the next watch.

    Raises
    ------
    NotFoundError
        The directory is not there.
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
    begun = time.monotonic()
    _check(interval, until, idle)
    if not split_step_pattern(run)[0].exists() and not any(sign in os.fspath(run) for sign in "*?["):
        raise NotFoundError("there is no such directory", where=os.fspath(run))
    watcher = _Watcher(
        partial(
            open_run,
            os.fspath(run),
            step_pattern=step_pattern,
            follow_links=follow_links,
            allow_damaged=bool(options.get("allow_damaged")),
        ),
        archive,
        interval,
        on_event,
        {**options, **_opened_once(options), "progress": progress},
    )
    try:
        watcher.report.ended = watcher.work(until, idle)
    except KeyboardInterrupt:
        watcher.report.ended = "interrupted"
    watcher.say(WatchEvent("ended", None, watcher.report.ended))
    if is_archive(archive):
        opened = Archive.open(archive)
        if opened.steps:
            watcher.report.size = archive_size(opened)
    watcher.report.seconds = time.monotonic() - begun
    return watcher.report


def _opened_once(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base model opened, so that each writing need not read it again."""
    return {} if options.get("base") is None else {"base": open_base(options["base"])}


def _check(interval: float, until: int | None, idle: float | None) -> None:
    """Refuse numbers that make no sense."""
    for name, value, least in (("interval", interval, 0.0), ("idle", idle, 0.0)):
        if value is not None and not value > least:
            raise InputError(
                f"'{name}' is a number of seconds above {least:g}", found=str(value), expected="> 0"
            )
    if until is not None and until < 0:
        raise InputError("'until' is a step", expected="≥ 0", found=str(until))


class _Watcher:
    """The looks of one watch, and what they saw."""

    def __init__(
        self,
        open_first: Callable[[], Run],
        archive: str | os.PathLike[str],
        interval: float,
        on_event: OnEvent | None,
        options: dict[str, Any],
    ) -> None:
        self.report = WatchReport(archive=os.fspath(archive))
        self._open_first, self._archive = open_first, archive
        self._rotten: dict[str, tuple[str, bool]] = {}
        self._interval, self._on_event, self._options = interval, on_event, options
        self._run: Run | None = None
        self._failures = self._locked = 0
        self._sights = Sights(interval)

    def say(self, event: WatchEvent) -> None:
        """Note an event, and report it to the listener, if there is one."""
        self.report.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def work(self, until: int | None, idle: float | None) -> str:
        """Look again and again; return why it ended."""
        busy_at = time.monotonic()
        while True:
            if self._look(until):
                busy_at = time.monotonic()
            if until is not None and self._sights.last >= until:
                return "until"
            if idle is not None and time.monotonic() - busy_at >= idle:
                return "idle"
            time.sleep(self._interval)

    def _look(self, until: int | None) -> bool:
        """Look once; tell whether something was archived."""
        run = self._open()
        self._note_gone(frozenset() if run is None else frozenset(run.steps))
        if run is None:
            return False
        self._note_rotten(run.rotten)
        ready = [step for step in run.steps if self._sights.is_ready(run, step)]
        if until is not None:
            below = [step for step in ready if step < until]
            ready = ready[: len(below) + 1]
        ready = self._without_older(ready, run)
        return bool(ready) and self._write(run, ready)

    def _open(self) -> Run | None:
        """Return the run as it is now; None where there is no checkpoint yet."""
        try:
            if self._run is None:
                self._run = self._open_first()
            else:
                self._run = self._run.refresh()
        except NoCheckpointError as error:
            self._note_rotten(row for row in error.skipped if row.rotten)
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
        for step in self._sights.gone(steps):
            self.say(WatchEvent("vanished", step, "it was deleted before it could be archived"))

    def _note_rotten(self, rows: Iterable[Skipped]) -> None:
        """Report checkpoints that are damaged where their tensors are described, once they stay so."""
        for row in rows:
            reason, told = self._rotten.get(row.path, ("", False))
            if reason == row.reason and not told:
                self.say(WatchEvent("damaged", None, row.reason))
                told = True
            self._rotten[row.path] = (row.reason, told and reason == row.reason)

    def _pass_rotten(self, run: Run, identities: Mapping[int, str], error: RottenError) -> bool:
        """Report the step that does not match its checksums, and take it as done; tell which was meant."""
        for step, identity in identities.items():
            path = run.path_of(step)
            if path == error.path or path in error.path.parents:
                self._sights.pass_over(step, identity)
                self.say(WatchEvent("damaged", step, str(error)))
                return True
        return False

    def _without_older(self, ready: list[int], run: Run) -> list[int]:
        """Pass over steps before the archive's last one that it does not hold: they were pruned."""
        archived = self._archived()
        if not archived or "resumed_from" in self._options:
            return ready
        older = [step for step in ready if step < max(archived) and step not in archived]
        for step in older:
            self._sights.pass_over(step, run.identity(step))
            self.say(WatchEvent("skipped", step, "it is older than the archive's last step"))
        return [step for step in ready if step not in older]

    def _archived(self) -> tuple[int, ...]:
        return Archive.open(self._archive).steps if is_archive(self._archive) else ()

    def _write(self, run: Run, ready: list[int]) -> bool:
        """Archive what is ready; what vanishes meanwhile is reported and left out."""
        identities = {step: run.identity(step) for step in ready}
        before = frozenset(self._archived())
        try:
            report = compress(run, self._archive, steps=ready, look_ahead=False, **self._options)
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
            if isinstance(error, RottenError) and self._pass_rotten(run, identities, error):
                return True
            if not self._note_vanished(run, identities):
                raise
            return True
        self._locked = 0
        self.report.reports.append(report)
        self._note_archived(before, identities)
        for step in report.skipped:
            if not self._sights.is_done(step, identities[step]):
                self._finish(step, identities[step], WatchEvent("skipped", step, "it is there already"))
        self._options.pop("resumed_from", None)
        return True

    def _note_archived(self, before: frozenset[int], identities: Mapping[int, str]) -> None:
        """Report the steps that were committed."""
        for step in self._archived():
            if step in identities and step not in before:
                self._finish(step, identities[step], WatchEvent("archived", step))

    def _finish(self, step: int, identity: str, event: WatchEvent) -> None:
        """Take a step as done."""
        self._sights.finish(step, identity)
        self.say(event)

    def _note_vanished(self, run: Run, identities: Mapping[int, str]) -> bool:
        """Report steps that are gone, or others by now, while they were read; tell whether there are any."""
        try:
            now = run.refresh()
        except (InshrinkError, OSError):
            now = None
        found = False
        for step, identity in identities.items():
            if self._sights.is_done(step):
                continue
            if now is None or step not in now.steps or now.identity(step) != identity:
                self._sights.forget(step)
                self.say(WatchEvent("vanished", step, "it was deleted or changed while it was read"))
                found = True
        return found


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that happened while watching.

    Parameters
    ----------
    kind
        ``archived``, ``skipped`` (in the archive already, or older than its last step), ``vanished``
        (gone or changed while it was read), ``damaged`` (finished, and not what its checksums say) or
        ``ended``.
    step
        The step; None for ``ended``, and for a file so damaged that its step is not known.
    detail
        Why, or how: for people.
    """

    kind: str
    step: int | None
    detail: str = ""


OnEvent = Callable[[WatchEvent], None]
"""Called as things happen."""


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
    """

    archive: str
    ended: str = ""
    events: list[WatchEvent] = field(default_factory=list)
    size: ArchiveSize = field(default_factory=lambda: ArchiveSize(frames=(), manifest_nbytes=0))
    reports: list[CompressReport] = field(default_factory=list)
    seconds: float = 0.0

    DOCUMENT: ClassVar = (
        "archive ended codec=last.codec config=last.config optimizer=last.optimizer "
        "ratio_total=size.ratio_total ratio_weights=size.ratio_weights "
        "bits_per_weight=size.bits_per_weight raw_bytes=size.raw_total archive_bytes=size.nbytes "
        "appended skipped vanished damaged=damaged.detail seconds"
    )

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
    def damaged(self) -> tuple[WatchEvent, ...]:
        """Checkpoints that were not archived because they do not match their own checksums."""
        return tuple(event for event in self.events if event.kind == "damaged")

    @property
    def failure(self) -> DamagedError | None:
        """Why a watch that ended well is no success: a checkpoint was damaged."""
        if not self.damaged:
            return None
        return DamagedError(f"not archived: {self.damaged[0].detail}", where=self.archive)

    def steps(self, kind: str) -> tuple[int, ...]:
        """Return the steps of the events of a kind."""
        return tuple(event.step for event in self.events if event.kind == kind and event.step is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --watch --json``."""
        base = {} if self.size.base is None else {"base": plain_value(self.size.base)}
        return base | Report.to_json(self)


class _Sight(NamedTuple):
    """A checkpoint as it was seen: what it is, its files, and how long it has been so."""

    identity: str
    names: frozenset[str]
    since: float


class Sights:
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
        self._seen: dict[int, _Sight] = {}
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
            self._seen[step] = _Sight(identity, names, now)
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

    def forget(self, step: int) -> None:
        """Forget what was seen of a step."""
        self._seen.pop(step, None)

    def gone(self, steps: Set[int]) -> list[int]:
        """Forget steps that are not among these, and return those of them that were not done."""
        missing = sorted(self._seen.keys() - steps)
        for step in missing:
            del self._seen[step]
        return [step for step in missing if step not in self._done]
