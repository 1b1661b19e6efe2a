"""Opening runs and archives inside of the roots; what their headers told is cached."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import streamlit as st
from inshrink_app.server.recent import remember_recent
from inshrink_app.server.roots import OutsideRootsError, settings
from inshrink_app.services.engines import engines
from inshrink_app.services.failures import reported
from inshrink_app.services.headers import files_stamp, forget_headers, keep_headers, kept_headers
from inshrink_app.services.inside import is_sample, require_inside
from inshrink_app.services.subjects import archive_of_run, archive_subject, run_subject
from inshrink_app.widgets.formatting import elide
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

if TYPE_CHECKING:
    from inshrink_core import Archive, Run

__all__ = [
    "Opened",
    "Sample",
    "engine_of",
    "load_subject",
    "opened",
    "refresh",
    "remember",
    "resolve",
    "samples",
]


_LONGEST_SHOWN = 400
"""Signs of a refused path that are repeated to its reader."""


class Sample(NamedTuple):
    """A bundled run."""

    name: str
    path: Path


class Opened(NamedTuple):
    """What the headers of a run or an archive told; `token` changes when its data does."""

    subject: Subject
    token: str


@st.cache_data(show_spinner=False, max_entries=32)
def samples() -> tuple[Sample, ...]:
    """Return the bundled runs; none where the package came without them."""
    from inshrink_core.samples import sample, sample_names

    with reported():
        return tuple(Sample(name, Path(os.path.realpath(sample(name)))) for name in sample_names())


def resolve(text: str) -> Path:
    """Return the real path of untrusted text, inside of the roots or of a bundled sample.

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
            if is_sample(real) and os.path.lexists(real):
                return real
        roots = ", ".join(map(str, current.roots))
        raise ServiceError(
            Problem(
                str(error),
                elide(text.replace("\0", "\N{SYMBOL FOR NULL}"), _LONGEST_SHOWN),
                "start the explorer with the folder that holds it: inshrink ui --root FOLDER",
                f"The explorer may see: {roots}",
            )
        ) from error


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
    forget_headers(path)
    _open_at.clear(str(path), *_stamp(path))


def remember(subject: Subject) -> None:
    """Put a run on top of the recent ones."""
    remember_recent(subject.path, subject.kind)


def opened(text: str) -> Opened:
    """Return the open run at a path, from the cache unless its folder has changed."""
    path = resolve(text)
    if not path.exists():
        raise ServiceError(
            Problem("there is nothing at this path", str(path), "it may have been moved; open it anew")
        )
    return _open_at(str(path), *_stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a checkpoint is added: the folder's time and size."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


@st.cache_resource(show_spinner=False, max_entries=16)
def _open_at(path: str, mtime_ns: int, size: int) -> Opened:
    """Open a run or an archive and read its headers; one that cannot be read is not cached."""
    import inshrink_core
    from inshrink_core.chain import Archive

    require_inside(Path(path))
    stamp = files_stamp(Path(path)) if Path(path).is_dir() else None
    kept = kept_headers(Path(path), stamp) if stamp is not None else None
    if kept is not None:
        subject, token = kept
        return Opened(
            dataclasses.replace(subject, archive=archive_of_run(subject.path, subject.steps)), token
        )
    with reported():
        engine = inshrink_core.open(path)
        if isinstance(engine, Archive):
            found = Opened(archive_subject(engine), f"{mtime_ns}-{size}")
        else:
            # Not the folder's time: measuring writes its cache into the folder.
            files = " ".join(engine.identity(step) for step in engine.steps)
            found = Opened(run_subject(engine), hashlib.sha256(files.encode()).hexdigest())
    engines().put(path, found.token, engine)
    if stamp is not None and found.subject.kind == "run":
        keep_headers(found.subject, found.token, stamp)
    return found


def engine_of(subject: Subject) -> tuple[Run | Archive, str]:
    """Return the engine's run or archive of what is on screen, and the token of its files.

    Raises
    ------
    ServiceError
        It cannot be opened any more.
    """
    found = opened(str(subject.path))
    return engines().get(str(found.subject.path), found.token), found.token
