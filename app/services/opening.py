"""Opening of runs and archives inside the roots, with cached headers."""

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
from inshrink_app.server.roots import Address, OutsideRootsError, path_of, real_path, settings
from inshrink_app.services.headers import files_stamp, forget_headers, store_headers, stored_headers
from inshrink_app.services.inside import is_inside, is_own, keep_inside, reported, require_inside

import inshrink_core
from inshrink_core import Run
from inshrink_core.archive.storage.registry import object_at, storage_at
from inshrink_core.chain import Archive, original_checks
from inshrink_core.chain.report import ChainReport, chain_report
from inshrink_core.errors import clipped
from inshrink_core.formats import Skipped, read_metrics, split_step_pattern
from inshrink_core.verbs.shared.measured import run_content

_MAX_OPEN = 4
"""Largest number of open runs; the headers of 400 tensors at 200 checkpoints take about 100 MB."""

_LONGEST_SHOWN = 400
"""Number of characters of a refused path that an error message repeats."""

_SECONDS_ELSEWHERE = 30.0
"""Time after which an address is checked again; Refresh checks it at once."""

_NOTHING = (0, 0)
"""The stamp of a missing file."""


class Opened(NamedTuple):
    """The headers of a run or an archive.

    `token` changes with the data and keys the measurements of a run. `stamp` covers all files as they were
    before reading; None if it is unavailable.
    """

    subject: Subject
    token: str
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
    """Open a run or an archive by its path; read headers only.

    Raises
    ------
    ServiceError
        Nothing to open exists at the path, or it cannot be read.
    """
    return opened(text).subject


def refresh(path: Path) -> None:
    """Drop a run from the cache, so that new checkpoints appear."""
    if isinstance(path, Address):
        _seen_at.clear(str(place_of(path)))
    forget_headers(path)
    _open_at.clear(str(path), *_stamp(path))
    _chain_at.clear()


def opened(text: str) -> Opened:
    """Return the open run at a path, from the cache unless its folder or archive has changed."""
    path = resolve(text)
    stamp = _stamp(path)
    if stamp == _NOTHING:
        raise ServiceError(
            "there is nothing at this path", str(path), "it may have been moved; open it again"
        )
    found = _open_at(str(path), *stamp)
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
    return engine_at(str(found.subject.path), found.token), found.token


@st.cache_resource(show_spinner=False, max_entries=_MAX_OPEN)
def engine_at(path: str, token: str, _made: Run | Archive | None = None) -> Run | Archive:
    """Return the engine's run or archive at a path; a few stay open, shared by all sessions.

    Parameters
    ----------
    path
        Its real path.
    token
        Cache key that changes with its files.
    _made
        The run or archive, if the caller has just opened it.

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
    """Return the time and size of a folder or file, which change when a checkpoint or frame is added."""
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
    """Return a stamp of the objects at an address, and their number."""
    with reported():
        found = list(storage_at(address).objects())
        if not found and address.count("/") > 2:  # a single file
            around, name = object_at(address)
            found = list(around.objects(name))
    digest = hashlib.sha256(repr(sorted(found)).encode(errors="surrogateescape"))
    return (int.from_bytes(digest.digest()[:8]), len(found)) if found else _NOTHING


@st.cache_resource(show_spinner=False, max_entries=16)
def _open_at(path: str, mtime_ns: int, size: int) -> Opened:
    """Open a run or an archive and read its headers; errors are not cached."""
    place = place_of(path_of(path))
    require_inside(place)
    stamp = files_stamp(place) if place.is_dir() else None
    stored = stored_headers(Path(path), stamp) if stamp is not None else None
    if stored is not None:
        return Opened(*stored, stamp)
    newest = _newest(path)
    with reported():
        # A run that was open before reads only the headers of changed files again.
        engine = keep_inside(newest.pop().refresh() if newest else inshrink_core.open(path))
        if isinstance(engine, Archive):
            found = Opened(_archive_subject(engine, path_of(path)), f"{mtime_ns}-{size}", stamp)
        else:
            newest.append(engine)
            # The folder's time is no key, since measurements write their cache into the folder.
            found = Opened(_run_subject(engine, path_of(path)), run_content(engine), stamp)
    engine_at(path, found.token, engine)
    if stamp is not None and found.subject.kind == "run":
        store_headers(found.subject, found.token, stamp)
    return found


@st.cache_resource(show_spinner=False, max_entries=_MAX_OPEN)
def _newest(path: str) -> list[Run]:
    """Return the last opened run at a path in a list; empty without one."""
    return []


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
    """Return a skipped file's name relative to the run, and the reason."""
    path = path_of(row.path)
    return (str(path.relative_to(run)) if path.is_relative_to(run) else row.path, row.reason)


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
        bytes_read=archive.bytes_read,
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
    stamps = [_stamp(file) for file in files]
    return _chain_at(str(path), tuple(stamps))


@st.cache_resource(show_spinner=False, max_entries=128)
def _chain_at(path: str, stamps: tuple[tuple[int, int], ...]) -> ChainReport:
    """Read the chain; cached by the files' times and sizes, errors are not cached."""
    require_inside(path_of(path))
    with reported():
        return dataclasses.replace(chain_report(Archive.open(path)), path=path_of(path))


def listed_at(folder: Address) -> tuple[Address, ...]:
    """Return the entries of an allowed folder of a bucket, with one request.

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
    """Return the run's archive at the default location of `inshrink compress`, if it is inside the roots."""
    for folder in (run.place.parent, *settings().roots):
        real = real_path(folder / f"{run.place.name}.inshrink")
        if settings().allows(real) and (isinstance(real, Address) or real.exists()):
            try:
                found = chain_of(str(real))
            except ServiceError:
                continue
            # An archive with steps that the run does not have belongs to another run.
            is_complete = bool(found.steps) and not any(frame.damage for frame in found.line)
            if is_complete and set(found.steps) <= set(run.steps):
                return found
    return None


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
        return {name: tuple(series) for name, series in read_metrics(path).log().items()}
