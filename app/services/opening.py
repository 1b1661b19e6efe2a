"""Opening of runs and archives inside the roots, and their headers in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.roots import Address, OutsideRootsError, path_of, real_path, settings
from inshrink_app.services.inside import is_inside, is_own, reported, require_inside

import inshrink_core
from inshrink_core import Run
from inshrink_core.archive.storage.registry import object_at, storage_at
from inshrink_core.chain import Archive, original_checks
from inshrink_core.chain.report import ChainReport, chain_report
from inshrink_core.errors import clipped
from inshrink_core.formats import read_metrics, split_step_pattern
from inshrink_core.formats.names import step_in_name
from inshrink_core.verbs.shared.measured import run_content

_Answer = TypeVar("_Answer")

_SECONDS_AT_ONCE = (0.3, 3.0)
"""Processor time, and time, in which the newest checkpoints are read at once; a thread reads the others."""

_SECONDS_OF_PATIENCE = (5.0, 0.5)
"""Longest time for which a thread waits for pages to be drawn: before it begins, and between checkpoints."""

_SECONDS_WANTED = 15.0
"""Time for which a thread reads a run after a page has last asked for it; pages ask twice a second."""

DRAWING: set[int] = set()
"""Identifiers of the threads that do now what a user waits for."""

_MAX_OPEN = 8
"""Number of runs and archives in memory; the headers of a large run take hundreds of megabytes."""

_AHEAD = ThreadPoolExecutor(1, "ahead")
"""Answers what pages show later than the rest (`Reading.ahead`)."""

_LONGEST_SHOWN = 400
"""Number of characters of a refused path that an error message repeats."""

_SECONDS_ELSEWHERE = 30.0
"""Time after which an address is checked again; Refresh checks it at once."""

_MAX_FILES = 20_000
"""A folder with more files is not checked for changes."""

_ENGINE_FOLDER = ".inshrink"
"""Folder of the engine's measurements, which is not a part of the run."""

_NOTHING = (0, 0)
"""The stamp of a missing file."""


class Opened(NamedTuple):
    """The headers of a run or an archive.

    `token` changes with the data and keys the measurements of a run. `engine` reads the data. `stamp` covers
    all files as they were before reading; None if it is unavailable.
    """

    subject: Subject
    token: str
    engine: Run | Archive
    stamp: str | None = None


def resolve(text: str) -> Path:
    """Return the path or address of untrusted text: inside the roots, of a sample, or dropped.

    Raises
    ------
    ServiceError
        The path is outside, or is invalid.
    """
    current = settings()
    try:
        return current.resolve(text)
    except OutsideRootsError as error:
        with contextlib.suppress(OSError, ValueError):
            real = Path(os.path.realpath(text))
            if is_own(real) and os.path.lexists(real):
                return real
        shown, root = clipped(text.replace("\0", "\N{SYMBOL FOR NULL}"), _LONGEST_SHOWN), "FOLDER"
        if isinstance(address := path_of(text.strip()), Address):
            shown = root = "s3://BUCKET/PREFIX" if "@" in text or "?" in text else str(address)
        raise ServiceError(
            str(error),
            shown,
            f"start the explorer with the folder that holds it: inshrink ui --root {shlex.quote(root)}",
            f"The explorer may see: {', '.join(map(str, (*current.roots, *current.addresses)))}",
        ) from error


def path_in_roots(path: Path) -> str:
    """Return a path for display: relative to the root if there is only one."""
    roots = settings().roots
    is_alone = len(roots) == 1 and path.is_relative_to(roots[0]) and path != roots[0]
    return str(path.relative_to(roots[0]) if is_alone else path)


def place_of(path: Path) -> Path:
    """Return the folder or file of a run: its path without a step pattern at the end."""
    place = split_step_pattern(path)[0]
    return path_of(str(place)) if isinstance(path, Address) else place


def load_subject(text: str) -> Subject:
    """Open a run or an archive by its path; read headers only, of a large run the newest at first.

    Raises
    ------
    ServiceError
        Nothing to open exists at the path, or it cannot be read.
    """
    return opened(text).subject


def load_whole(text: str) -> Subject:
    """Open a run or an archive by its path, and wait until the headers of all its checkpoints are read.

    Raises
    ------
    ServiceError
        Nothing to open exists at the path, or it cannot be read.
    """
    while (found := load_subject(text)).n_unread:
        reading_of(found).finish()
    return found


class Reading:
    """A run or archive in memory, and the thread that reads the other headers of a large run.

    The thread replaces what is in memory once, when it ends: because all is read, the user stopped it, no
    page has asked for the run for a while, or the run shall be refreshed. What was read is kept.

    Parameters
    ----------
    path
        The run or archive.

    Attributes
    ----------
    n_read
        Number of checkpoints whose headers are known.
    is_wanted
        Whether the thread may run; False once the user stopped it.
    """

    def __init__(self, path: str) -> None:
        self.n_read, self.is_wanted = 0, True
        self._path = path
        self._lock = threading.Lock()
        self._found: Opened | None = None
        self._stamp = _NOTHING
        self._error: Exception | None = None
        self._known: set[Path] = set()
        self._answers: dict[Hashable, Future[Any]] = {}
        self._thread: threading.Thread | None = None
        self._wanted_until = 0.0
        self._is_halted = False

    def opened(self, stamp: tuple[int, int]) -> Opened:
        """Return what is at the path: of a run that is not in memory, the newest checkpoints.

        Files that changed are read again, but not before the thread has ended.

        Parameters
        ----------
        stamp
            The stamp of the path now.
        """
        with self._lock:
            error, self._error = self._error, None
            if error is not None and stamp == self._stamp:
                raise error
            if self._found is None or (self._thread is None and stamp != self._stamp):
                work, wait = time.thread_time() + _SECONDS_AT_ONCE[0], time.monotonic() + _SECONDS_AT_ONCE[1]

                def goes_on(n_new: int) -> bool:
                    return n_new < 2 or (time.thread_time() < work and time.monotonic() < wait)

                self._found, before = None, self._found
                self._found = self._read(before, stamp, goes_on)
                self._stamp = stamp
            return self._found

    def is_newer(self, n_unread: int, n_answers: int) -> bool:
        """Return whether a page with so many unread checkpoints and answers is out of date."""
        found = self._found
        return found is None or (found.subject.n_unread, self.n_answers) != (n_unread, n_answers)

    @property
    def n_answers(self) -> int:
        """Number of the questions of `ahead` that are answered."""
        return sum(answer.done() for answer in list(self._answers.values()))

    def ahead(self, question: Hashable, task: Callable[[], _Answer]) -> _Answer | None:
        """Return the answer to a question about the run; None until a thread has found it.

        Raises
        ------
        ServiceError
            There is no answer.
        """
        with self._lock:
            if question not in self._answers:
                self._answers[question] = _AHEAD.submit(_perform, task)
            answer = self._answers[question]
        return answer.result() if answer.done() else None

    def start(self, seconds: float = _SECONDS_WANTED) -> None:
        """Let a thread read the other checkpoints for some time from now on, unless the user stopped it."""
        with self._lock:
            self._wanted_until = max(self._wanted_until, time.monotonic() + seconds)
            is_whole = self._found is None or not self._found.subject.n_unread
            if self.is_wanted and self._thread is None and not is_whole:
                self._is_halted = False
                self._thread = threading.Thread(target=self._read_on, args=(self._found,), daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Let the thread end after the current checkpoint, and start no other until the user resumes."""
        with self._lock:
            self.is_wanted = False
            self.halt()

    def resume(self) -> None:
        """Let the thread start again."""
        self.is_wanted = True

    def halt(self) -> None:
        """Let the thread end after the current checkpoint."""
        self._is_halted = True

    def refresh(self) -> None:
        """Read changed files again, once the thread has ended."""
        self.halt()
        self._stamp = _NOTHING

    def finish(self) -> None:
        """Wait until the thread has read the other checkpoints, or cannot."""
        DRAWING.discard(threading.get_ident())  # The thread would wait for this one.
        self.resume()
        self.start(math.inf)
        self.wait()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _read_on(self, before: Opened) -> None:
        """Read as many other checkpoints as are wanted; the body of the thread."""
        found, error = before, None
        try:
            _give_way(_SECONDS_OF_PATIENCE[0])
            found = self._read(before, _NOTHING, self._goes_on)
        except Exception as failed:
            error = failed
        with self._lock:
            self._found, self._error, self._thread = (found if error is None else None), error, None
            self._wanted_until = 0.0
            if found.token != before.token:
                self._answers.clear()

    def _goes_on(self, n_new: int) -> bool:
        _give_way(_SECONDS_OF_PATIENCE[1])
        return not self._is_halted and time.monotonic() < self._wanted_until

    def _read(self, before: Opened | None, stamp: tuple[int, int], goes_on: Callable[[int], bool]) -> Opened:
        path = path_of(self._path)
        place = place_of(path)
        require_inside(place)
        files = files_stamp(place) if place.is_dir() else None

        def chosen(paths: Sequence[Path]) -> Iterator[Path]:
            """Yield the known checkpoints, and others as long as it goes on, the latest first."""
            self._known.intersection_update(paths)
            self.n_read = n_before = len(self._known)
            for step in _latest_first(paths):
                if not self._known.isdisjoint(step) or goes_on(self.n_read - n_before):
                    self._known.update(step)
                    self.n_read = len(self._known)
                    yield from step

        with reported():
            if before is not None and isinstance(before.engine, Run):
                engine: Run | Archive = before.engine.refresh(chosen)
            else:
                self._known.clear()
                engine = inshrink_core.open(self._path, reading=chosen)
            if isinstance(engine, Archive):
                engine.bases.allows = is_inside  # Where it looks for a base model.
                return Opened(_archive_subject(engine, path), "-".join(map(str, stamp)), engine, files)
            # The folder's time is no key, since measurements write their cache into the folder.
            return Opened(_run_subject(engine, path), run_content(engine), engine, files)


def _perform(task: Callable[[], _Answer]) -> _Answer:
    """Perform a task once the pages are drawn that are being drawn; others give way to it."""
    _give_way(_SECONDS_OF_PATIENCE[0])
    DRAWING.add(threading.get_ident())
    try:
        return task()
    finally:
        DRAWING.discard(threading.get_ident())


def _give_way(seconds: float) -> None:
    """Wait while others do what a user waits for, for some time at most."""
    until = time.monotonic() + seconds
    while DRAWING and time.monotonic() < until:
        time.sleep(0.01)


@st.cache_resource(show_spinner=False, max_entries=_MAX_OPEN, on_release=Reading.halt)
def _reading_at(path: str) -> Reading:
    return Reading(path)


def reading_of(subject: Subject) -> Reading:
    """Return the reading of a run."""
    return _reading_at(str(subject.path))


def _latest_first(paths: Sequence[Path]) -> list[list[Path]]:
    """Return the paths of checkpoints by the steps in their names, the latest first.

    Files of one step stay together, since they may be parts of one checkpoint.
    """
    by_step: dict[int, list[Path]] = {}
    for path in paths:
        steps = (step_in_name(name) for name in (path.name, path.parent.name))
        by_step.setdefault(next((step for step in steps if step is not None), -1), []).append(path)
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def refresh(path: Path) -> None:
    """Drop a run from the cache, so that new checkpoints appear."""
    if isinstance(path, Address):
        _seen_at.clear(str(place_of(path)))
    _reading_at(str(path)).refresh()
    _chain_at.clear()


def opened(text: str) -> Opened:
    """Return the open run at a path, from the cache unless its folder or archive has changed.

    Of a large run, only the newest checkpoints are read at first (`Subject.n_unread`, `reading_of`).

    Raises
    ------
    ServiceError
        Nothing to open exists at the path, or it cannot be read.
    """
    path = resolve(text)
    stamp = _stamp(path)
    if stamp == _NOTHING:
        raise ServiceError(
            "there is nothing at this path", str(path), "it may have been moved; open it again"
        )
    found = _reading_at(str(path)).opened(stamp)
    if found.subject.kind == "archive":
        return found
    archive = _archive_of_run(found.subject)
    return found._replace(subject=dataclasses.replace(found.subject, archive=archive)) if archive else found


def engine_of(subject: Subject) -> tuple[Run | Archive, str]:
    """Return the engine's run or archive of a subject, and the token of its files.

    Raises
    ------
    ServiceError
        It cannot be opened any more.
    """
    found = opened(str(subject.path))
    return found.engine, found.token


def files_stamp(folder: Path) -> str | None:
    """Return a stamp that changes with any file of a run; None if it is unavailable or too expensive."""
    digest = hashlib.sha256()
    n_files = 0
    try:
        for parent, folders, names in os.walk(folder, onerror=_refuse):
            folders[:] = sorted(name for name in folders if name != _ENGINE_FOLDER)
            for name in sorted(names):
                n_files += 1
                if n_files > _MAX_FILES:
                    return None
                path = os.path.join(parent, name)  # noqa: PTH118 - ten times the speed of a Path
                status = os.stat(path)  # noqa: PTH116
                text = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\0"
                digest.update(text.encode(errors="surrogateescape"))
    except OSError:
        return None
    return digest.hexdigest()


def _refuse(error: OSError) -> None:
    raise error


def _stamp(path: Path) -> tuple[int, int]:
    """Return the time and size of a folder or file, which change when a checkpoint or frame is added."""
    place = place_of(path)
    if isinstance(place, Address):
        return _seen_at(str(place))
    try:
        status = place.stat()
    except OSError:
        return _NOTHING
    return (status.st_mtime_ns, status.st_size)


@st.cache_resource(show_spinner=False, max_entries=256, ttl=_SECONDS_ELSEWHERE)
def _seen_at(address: str) -> tuple[int, int]:
    """Return a stamp of the objects at an address, and their number."""
    with reported():
        found = list(storage_at(address).objects())
        if not found and address.count("/") > 2:  # a single file
            around, name = object_at(address)
            found = list(around.objects(name))
    digest = hashlib.sha256(repr(sorted(found)).encode(errors="surrogateescape"))
    return (int.from_bytes(digest.digest()[:8]), len(found)) if found else _NOTHING


def _run_subject(run: Run, path: Path) -> Subject:
    """Collect the headers of a run."""
    place = real_path(run.address if run.is_elsewhere else run.path)
    # The log of a folder called "checkpoints" may be beside it, outside of the roots.
    is_ours = not run.log or run.is_elsewhere or is_inside(Path(os.path.realpath(run.log.origin)))
    logged = run.log if is_ours else {}
    return Subject(
        path=path,
        name=run.name,
        kind="run",
        format=str(run.format),
        steps=tuple(run.steps),
        tensors=tuple(run[run.steps[-1]].specs) if run.steps else (),
        total_bytes=sum(run.nbytes_of(step) for step in run.steps),
        skipped=tuple(
            (path_inside(place, row.path), row.reason) for row in run.skipped if not row.unreadable
        ),
        unreadable=tuple((path_inside(place, row.path), row.reason) for row in run.unreadable),
        notes=tuple(run.notes),
        step_pattern="" if path == place else path.name,
        is_ordered=run.is_ordered,
        directory=run.directory,
        newest=run.path_of(run.steps[-1]) if run.steps else run.directory,
        log={name: tuple(series) for name, series in logged.items()},
        n_unread=run.n_unread,
    )


def path_inside(place: Path, path: str) -> str:
    """Return a path for display: relative to a folder, such as that of a run, if it is inside."""
    found = path_of(path)
    return str(found.relative_to(place)) if found.is_relative_to(place) else path


def _archive_subject(archive: Archive, path: Path) -> Subject:
    """Collect the indexes of an archive."""
    chain = dataclasses.replace(chain_report(archive), path=path)
    checks = original_checks(archive, archive.frames).text if archive.steps else ""
    return Subject(
        path=chain.path,
        name=chain.path.name,
        kind="archive",
        format="inshrink archive",
        steps=tuple(archive.steps),
        tensors=tuple(archive[archive.steps[-1]].specs) if archive.steps else (),
        total_bytes=chain.nbytes,
        notes=("steps come from the archive", f"checksums of the originals: {checks}") if checks else (),
        archive=chain,
    )


def chain_of(text: str) -> ChainReport:
    """Return all frames of an archive from its manifest and frame indexes.

    Raises
    ------
    ServiceError
        It is not an archive, or cannot be read.
    """
    path = resolve(text)
    is_elsewhere = isinstance(path, Address)
    files = (path,) if is_elsewhere else (path / "inshrink-manifest", path / "frames", path)
    return _chain_at(str(path), tuple(map(_stamp, files)))


@st.cache_resource(show_spinner=False, max_entries=128)
def _chain_at(path: str, stamps: tuple[tuple[int, int], ...]) -> ChainReport:
    """Read the chain; cached by the files' times and sizes, errors are not cached."""
    require_inside(path_of(path))
    with reported():
        return dataclasses.replace(chain_report(Archive.open(path)), path=path_of(path))


def with_log(shown: Subject, text: str) -> Subject:
    """Return a run with the metrics of another file, by its untrusted path.

    Raises
    ------
    ServiceError
        The file is outside the roots, cannot be read, or has no metrics or steps.
    """
    path = resolve(text)
    with reported():
        status = path.stat()
    return dataclasses.replace(shown, log=_log_at(str(path), status.st_mtime_ns, status.st_size))


@st.cache_resource(show_spinner=False, max_entries=2)
def _log_at(path: str, mtime_ns: int, size: int) -> dict[str, tuple[tuple[int, float], ...]]:
    """Read a file; a million rows take seconds."""
    with reported():
        return {name: tuple(series) for name, series in read_metrics(path).items()}


def listed_at(folder: Address) -> tuple[Address, ...]:
    """Return the entries of an allowed folder of a bucket, with one request.

    Raises
    ------
    ServiceError
        The store refuses.
    """
    return _listed_at(str(folder)) if settings().allows(folder) else ()


@st.cache_resource(show_spinner=False, max_entries=64, ttl=_SECONDS_ELSEWHERE)
def _listed_at(folder: str) -> tuple[Address, ...]:
    with reported():
        return tuple(Address(f"{folder}/{name}") for name in storage_at(folder).list(""))


def _archive_of_run(run: Subject) -> ChainReport | None:
    """Return the run's archive at the default location of `inshrink compress`, if it is inside the roots."""
    for folder in (run.place.parent, *settings().roots):
        real = real_path(folder / f"{run.place.name}.inshrink")
        if settings().allows(real) and (isinstance(real, Address) or real.exists()):
            with contextlib.suppress(ServiceError):
                found = chain_of(str(real))
                # An archive with steps that the run does not have belongs to another run.
                is_complete = bool(found.steps) and not any(frame.damage for frame in found.line)
                if is_complete and set(found.steps) <= set(run.steps):
                    return found
    return None
