"""Archives of a run and their frames."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.recent import load_recent
from inshrink_app.server.roots import Address, real_path, scan, settings
from inshrink_app.services.inside import samples
from inshrink_app.services.opening import chain_of, listed_at, load_whole

from inshrink_core.chain.report import ChainReport

_SUFFIX = ".inshrink"
_MAX_CANDIDATES = 64
"""Largest number of archives that are opened in the search for those of a run; each costs one manifest."""


def archives_of(subject: Subject) -> tuple[ChainReport, ...]:
    """Return the archives of a run beside it or in a root; for an archive, the archive itself.

    Damaged archives and archives with steps that the run does not have are omitted.
    """
    is_archive, found = subject.kind == "archive", []
    for path in [subject.path] if is_archive else _candidates(subject):
        with contextlib.suppress(ServiceError):
            chain = chain_of(str(path))
            if is_archive or (chain.steps and set(chain.steps) <= set(subject.steps)):
                found.append(chain)
    return tuple(found)


def _candidates(subject: Subject) -> list[Path]:
    """Return paths that may be archives of a run, those named after it first."""
    current = settings()
    found: dict[Path, None] = {}
    for folder in (subject.place.parent, *current.roots):
        for path in _archives_in(folder):
            real = real_path(path)
            if current.allows(real) and not _is_of_other(real, subject.place):
                found.setdefault(real)
    name = subject.place.name
    ordered = sorted(
        found, key=lambda path: (path.name != name + _SUFFIX, not path.name.startswith(name), path.name)
    )
    return ordered[:_MAX_CANDIDATES]


def _is_of_other(archive: Path, run: Path) -> bool:
    """Return whether an archive is named after another run beside it, which may have the same steps."""
    named = archive.with_suffix("")
    return named != run and not isinstance(named, Address) and named.is_dir()


def _archives_in(folder: Path) -> Iterator[Path]:
    """Yield paths with an archive's name; an unreadable folder yields none."""
    if isinstance(folder, Address):
        with contextlib.suppress(ServiceError):
            yield from (path for path in listed_at(folder) if path.suffix == _SUFFIX)
        return
    with contextlib.suppress(OSError):
        yield from (Path(entry.path) for entry in scan(folder) if entry.name.endswith(_SUFFIX))


def original_of(subject: Subject) -> Subject | None:
    """Return the run of an archive, found by its name or among recent runs.

    The run must have every step of the archive's current line.
    """
    if subject.kind == "run":
        return subject
    stem = subject.path.name.removesuffix(_SUFFIX)
    folders = (subject.path.parent, *settings().roots)
    paths = [str(folder / stem) for folder in folders]
    paths += [row.path for row in load_recent() if row.kind == "run"]
    paths += map(str, samples())
    for path in dict.fromkeys(paths):
        with contextlib.suppress(ServiceError):
            found = load_whole(path)
            if found.kind == "run" and set(subject.steps) <= set(found.steps):
                return found
    return None
