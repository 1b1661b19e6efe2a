"""Exporting: where to, the job that writes it, and handing the file over."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

from inshrink_app.jobs.job import Job
from inshrink_app.pages.export.form import ExportRequest
from inshrink_app.server.downloads import downloads
from inshrink_app.server.roots import settings
from inshrink_app.services import running
from inshrink_app.services.archives import chain_of
from inshrink_app.services.history import load_json
from inshrink_app.services.opening import resolve
from inshrink_app.services.planning import is_like
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

__all__ = [
    "download_url",
    "export_target",
    "newest_export",
    "start_export",
    "start_pack",
    "suggested_name",
]

_SUFFIX = ".inshrink"


def suggested_name(subject: Subject, request: ExportRequest) -> str:
    """Return a file name that is free, or belongs to an archive that the export would go on with."""
    stem = subject.name.removesuffix(_SUFFIX)
    if request.kind == "step":
        kept = "weights" if request.weights_only else "checkpoint"
        stem = f"{stem}-step-{request.steps[0] if request.steps else 0}-{kept}"
    elif request.kind == "pack":
        stem = f"{stem}-packed"
    elif request.optimizer == "drop":
        stem = f"{stem}-weights"
    folder = _default_folder(subject)
    for position in range(1, 100):
        name = f"{stem}{_SUFFIX}" if position == 1 else f"{stem}-{position}{_SUFFIX}"
        path = folder / name
        if not os.path.lexists(path) or (not request.packed and _goes_on(path, request)):
            return str(path)
    return str(folder / f"{stem}{_SUFFIX}")


def _default_folder(subject: Subject) -> Path:
    """Return where exports go by default: beside the run, or into the first root for a sample."""
    parent = subject.path.parent
    return parent if settings().allows(parent) else settings().roots[0]


def _goes_on(path: Path, request: ExportRequest) -> bool:
    """Return whether what lies at a path is an archive of the same settings, to be appended to."""
    try:
        return request.kind == "chain" and is_like(chain_of(str(path)), request)
    except ServiceError:
        return False


def export_target(text: str) -> Path:
    """Return the real path that an export may be written to.

    Raises
    ------
    ServiceError
        It lies outside of the roots, has another suffix, or its folder does not exist.
    """
    path = resolve(text)
    if not settings().allows(path):
        raise ServiceError(
            Problem(
                "an export goes into a folder of yours", text, "choose a folder that the explorer may see"
            )
        )
    if path.suffix != _SUFFIX or path.name.startswith("."):
        raise ServiceError(
            Problem(
                f"an archive's name ends in {_SUFFIX}", text, f"call it, for example, {path.stem}{_SUFFIX}"
            )
        )
    if not path.parent.is_dir():
        raise ServiceError(
            Problem("its folder does not exist", str(path.parent), "make the folder, or choose another one")
        )
    return path


def start_export(subject: Subject, request: ExportRequest, target: Path) -> Job:
    """Write the export; one that was cut off goes on where it stopped."""
    values = asdict(request) | {
        "task": "export",
        "path": str(subject.path),
        "target": str(target),
        "steps": list(request.steps),
    }
    return running.jobs().start(("export", str(subject.path)), values, load_json, again=True)


def start_pack(subject: Subject, archive: Path) -> Job:
    """Copy an archive into one file beside it."""
    request = ExportRequest(kind="pack", packed=True)
    named = suggested_name(_named_after(subject, archive), request)
    values = asdict(request) | {
        "task": "export",
        "path": str(archive),
        "target": named,
        "shown": str(subject.path),
    }
    return running.jobs().start(("export", str(subject.path)), values, load_json, again=True)


def _named_after(subject: Subject, archive: Path) -> Subject:
    """Return a subject by which a copy of an archive is named."""
    return replace(subject, name=archive.name, path=archive)


def newest_export(subject: Subject) -> Job | None:
    """Return the last export from a run or an archive."""
    return running.jobs().get(("export", str(subject.path)), load_json)


def download_url(text: str) -> tuple[str, int] | None:
    """Return the address at which a file can be fetched, and its size; None where it is gone."""
    try:
        path = resolve(text)
        if not path.is_file() or not settings().allows(path):
            return None
        return downloads.offer(path), path.stat().st_size
    except (ServiceError, OSError):
        return None
