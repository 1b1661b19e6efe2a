"""Opening runs and archives inside of the roots, and what their headers tell of them, cached."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shlex
from pathlib import Path
from typing import NamedTuple

import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.recent import remember_recent
from inshrink_app.server.roots import Address, OutsideRootsError, path_of, real_path, settings
from inshrink_app.services.headers import files_stamp, forget_headers, store_headers, stored_headers
from inshrink_app.services.inside import is_inside, is_own, keep_inside, reported, require_inside

import inshrink_core
from inshrink_core import Run
from inshrink_core.archive.storage import object_at, storage_at
from inshrink_core.chain import Archive, ChainReport, chain_report, original_checks
from inshrink_core.formats import NamedStep, Skipped, preview_steps, split_step_pattern, suggest_step_pattern
from inshrink_core.text import elided as elide
from inshrink_core.verbs.shared.measured import run_content

_MOST_OPEN = 4
"""Headers of a run of 400 tensors and 200 checkpoints take some 100 MB of memory."""

_LONGEST_SHOWN = 400
"""Signs of a refused path that are repeated to its reader."""

_SECONDS_ELSEWHERE = 30.0
"""What lies at an address is looked at again after so long, or by Refresh."""

_NOTHING = (0, 0)
"""The stamp of what is not there."""


class Opened(NamedTuple):
    """What the headers of a run or an archive told.

    `token` changes when its data does; measurements of a run are kept by it. `stamp` is that of all its
    files as they were before they were read; None where it cannot be told.
    """

    subject: Subject
    token: str
    stamp: str | None = None


def resolve(text: str) -> Path:
    """Return what untrusted text names: a path in the roots, a sample's or what was dropped; or an address.

    Raises
    ------
    ServiceError
        The path lies elsewhere, or is none.
    """
    current = settings()
    try:
        return current.resolve(text)
    except OutsideRootsError as error:
        with contextlib.suppress(OSError, ValueError):
            real = Path(os.path.realpath(text))
            if is_own(real) and os.path.lexists(real):
                return real
        shown, root = elide(text.replace("\0", "\N{SYMBOL FOR NULL}"), _LONGEST_SHOWN), "FOLDER"
        if isinstance(address := path_of(text.strip()), Address):
            shown = root = "s3://BUCKET/PREFIX" if "@" in text or "?" in text else str(address)
        raise ServiceError(
            str(error),
            shown,
            f"start the explorer with what holds it: inshrink ui --root {shlex.quote(root)}",
            f"The explorer may see: {', '.join(map(str, (*current.roots, *current.addresses)))}",
        ) from error


def path_in_roots(path: Path) -> str:
    """Return a path as a reader knows it: within the first root where there is one alone."""
    roots = settings().roots
    is_alone = len(roots) == 1 and path.is_relative_to(roots[0]) and path != roots[0]
    return str(path.relative_to(roots[0]) if is_alone else path)


def place_of(path: Path) -> Path:
    """Return the folder or file of what is opened: its path without a step pattern at the end."""
    place = split_step_pattern(path)[0]
    return path_of(str(place)) if isinstance(path, Address) else place


def load_subject(text: str) -> Subject:
    """Open a run or an archive by its path; reads headers only.

    Raises
    ------
    ServiceError
        There is nothing to open, or it cannot be read.
    """
    return opened(text).subject


def refresh(path: Path) -> None:
    """Forget what is known of a run, so that checkpoints written since are seen."""
    if isinstance(path, Address):
        _seen_at.clear(str(place_of(path)))
    forget_headers(path)
    _open_at.clear(str(path), *_stamp(path))
    _chain_at.clear()


def remember(subject: Subject) -> None:
    """Put a run on top of the recent ones."""
    remember_recent(subject.path, subject.kind)


def opened(text: str) -> Opened:
    """Return the open run at a path, from the cache unless its folder or its archive has changed."""
    path = resolve(text)
    is_there = _stamp(path) != _NOTHING if isinstance(path, Address) else place_of(path).exists()
    if not is_there:
        raise ServiceError(
            "there is nothing at this path", str(path), "it may have been moved; open it again"
        )
    found = _open_at(str(path), *_stamp(path))
    if found.subject.kind == "archive":
        return found
    archive = _archive_of_run(found.subject)
    return found._replace(subject=dataclasses.replace(found.subject, archive=archive)) if archive else found


def engine_of(subject: Subject) -> tuple[Run | Archive, str]:
    """Return the engine's run or archive of what is on screen, and the token of its files.

    Raises
    ------
    ServiceError
        It cannot be opened any more.
    """
    found = opened(str(subject.path))
    return engine_at(str(found.subject.path), found.token), found.token


@st.cache_resource(show_spinner=False, max_entries=_MOST_OPEN)
def engine_at(path: str, token: str, _made: Run | Archive | None = None) -> Run | Archive:
    """Return the engine's run or archive at a path; a few stay open, shared by all sessions.

    Parameters
    ----------
    path
        Its real path.
    token
        Changes with its files.
    _made
        It, where the caller has just opened it.

    Raises
    ------
    ServiceError
        It cannot be opened.
    """
    if _made is not None:
        return _made
    require_inside(place_of(path_of(path)))
    with reported():
        return keep_inside(inshrink_core.open(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a checkpoint or a frame is added: the time and size of a folder or file."""
    place = place_of(path)
    if isinstance(place, Address):
        return _seen_at(str(place))
    try:
        status = place.stat()
    except OSError:
        return _NOTHING
    return (status.st_mtime_ns, status.st_size)


@st.cache_data(show_spinner=False, max_entries=256, ttl=_SECONDS_ELSEWHERE)
def _seen_at(address: str) -> tuple[int, int]:
    """Return what changes with the objects at an address, and how many there are."""
    with reported():
        found = list(storage_at(address).objects())
        if not found and address.count("/") > 2:  # a single file
            around, name = object_at(address)
            found = list(around.objects(name))
    digest = hashlib.sha256(repr(sorted(found)).encode(errors="surrogateescape"))
    return (int.from_bytes(digest.digest()[:8]), len(found)) if found else _NOTHING


@st.cache_resource(show_spinner=False, max_entries=16)
def _open_at(path: str, mtime_ns: int, size: int) -> Opened:
    """Open a run or an archive and read its headers; one that cannot be read is not cached."""
    place = place_of(path_of(path))
    require_inside(place)
    stamp = files_stamp(place) if place.is_dir() else None
    stored = stored_headers(Path(path), stamp) if stamp is not None else None
    if stored is not None:
        return Opened(*stored, stamp)
    newest = _newest(path)
    with reported():
        # Of a run that was open before, headers of files that have not changed are not read again.
        engine = keep_inside(newest.pop().refresh() if newest else inshrink_core.open(path))
        if isinstance(engine, Archive):
            found = Opened(_archive_subject(engine, path_of(path)), f"{mtime_ns}-{size}", stamp)
        else:
            newest.append(engine)
            # Not the folder's time: measuring writes its cache into the folder.
            found = Opened(_run_subject(engine, path_of(path)), run_content(engine), stamp)
    engine_at(path, found.token, engine)
    if stamp is not None and found.subject.kind == "run":
        store_headers(found.subject, found.token, stamp)
    return found


@st.cache_resource(show_spinner=False, max_entries=_MOST_OPEN)
def _newest(path: str) -> list[Run]:
    """Return a list for the run at a path as it was opened last, if it was."""
    return []


def look_again(path: Path) -> str:
    """Open a run or an archive that has changed, and return its token; what has not changed is not read.

    Raises
    ------
    ServiceError
        It cannot be opened any more.
    """
    refresh(path)
    return opened(str(path)).token


def _run_subject(run: Run, path: Path) -> Subject:
    """Gather what the headers of a run tell."""
    place = real_path(run.address if run.is_elsewhere else run.path)
    # The log of a folder called "checkpoints" may lie beside it, out of the roots.
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
        bytes_read=run.bytes_read,
        skipped=tuple(_shown(place, row) for row in run.skipped if not row.unreadable),
        unreadable=tuple(_shown(place, row) for row in run.unreadable),
        notes=tuple(run.notes),
        step_pattern="" if path == place else path.name,
        is_ordered=run.is_ordered,
        directory=run.directory,
        newest=run.path_of(run.steps[-1]) if run.steps else run.directory,
        log={name: tuple(series) for name, series in logged.items()},
    )


def _shown(run: Path, row: Skipped) -> tuple[str, str]:
    """Name a file that was left out as its reader sees it: within the run."""
    path = path_of(row.path)
    return (str(path.relative_to(run)) if path.is_relative_to(run) else row.path, row.reason)


def _archive_subject(archive: Archive, path: Path) -> Subject:
    """Gather what the indexes of an archive tell."""
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
        bytes_read=archive.bytes_read,
        notes=("steps come from the archive", f"checksums of the originals: {checks}") if checks else (),
        archive=chain,
    )


def chain_of(text: str) -> ChainReport:
    """Return all frames of an archive; reads its manifest and the indexes of its frames.

    Raises
    ------
    ServiceError
        It is no archive, or cannot be read.
    """
    path = resolve(text)
    is_elsewhere = isinstance(path, Address)
    files = (path,) if is_elsewhere else (path / "inshrink-manifest", path / "frames", path)
    stamps = [_stamp(file) for file in files]
    return _chain_at(str(path), tuple(stamps))


@st.cache_resource(show_spinner=False, max_entries=128)
def _chain_at(path: str, stamps: tuple[tuple[int, int], ...]) -> ChainReport:
    """Read the chain, as it was when these files had these times and sizes; what cannot be is not cached."""
    require_inside(path_of(path))
    with reported():
        return dataclasses.replace(chain_report(Archive.open(path)), path=path_of(path))


def listed_at(folder: Address) -> tuple[Address, ...]:
    """Return what lies in an allowed folder of a bucket; one request.

    Raises
    ------
    ServiceError
        The store refuses.
    """
    return _listed_at(str(folder)) if settings().allows(folder) else ()


@st.cache_data(show_spinner=False, max_entries=64, ttl=_SECONDS_ELSEWHERE)
def _listed_at(folder: str) -> tuple[Address, ...]:
    with reported():
        return tuple(Address(f"{folder}/{name}") for name in storage_at(folder).list(""))


def _archive_of_run(run: Subject) -> ChainReport | None:
    """Look for the run's archive where `inshrink compress` most often puts it, inside of the roots."""
    for folder in (run.place.parent, *settings().roots):
        real = real_path(folder / f"{run.place.name}.inshrink")
        if settings().allows(real) and (isinstance(real, Address) or real.exists()):
            try:
                found = chain_of(str(real))
            except ServiceError:
                continue
            # One that holds steps the run never had is another run's.
            is_whole = bool(found.steps) and not any(frame.damage for frame in found.line)
            if is_whole and set(found.steps) <= set(run.steps):
                return found
    return None


def step_pattern_of(shown: Subject) -> str:
    """Return the step pattern of a run, else one that suits its names; empty where none does."""
    if shown.step_pattern:
        return shown.step_pattern
    with reported():
        return suggest_step_pattern([row.name for row in preview_steps(shown.place, "{step}")])


def steps_by_pattern(shown: Subject, pattern: str) -> tuple[NamedStep, ...]:
    """Return what a step pattern would make of the names of a run; nothing of its files is read.

    Raises
    ------
    ServiceError
        The pattern is none with ``{step}``.
    """
    with_step_pattern(shown, pattern)
    with reported():
        return preview_steps(shown.place, pattern)


def with_step_pattern(shown: Subject, pattern: str) -> str:
    """Return the path that opens a run with a step pattern; without any where it is empty.

    Raises
    ------
    ServiceError
        The pattern is none with ``{step}``.
    """
    if not pattern:
        return str(shown.place)
    if "{step}" not in pattern or any(sign in pattern for sign in "/\\\0"):
        remedy = "write a whole name, with {step} for its number: model_ep{step}_*.pt"
        raise ServiceError("this is no step pattern", pattern[:200].replace("\0", ""), remedy)
    return str(shown.place / pattern)
