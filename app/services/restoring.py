"""Restoring files of a step: where to, the job that writes them, and what was written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from inshrink_app.jobs.job import Job
from inshrink_app.pages.archive.tables import Restored, RestoredFile
from inshrink_app.server.roots import settings
from inshrink_app.services import running
from inshrink_app.services.history import load_json
from inshrink_app.services.opening import resolve
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

__all__ = ["newest_restore", "restore_target", "restored", "start_restore", "suggested_folder"]


def suggested_folder(subject: Subject, archive: Path, step: int) -> str:
    """Return a folder that does not exist yet: beside the run, or in the first root for a sample."""
    parent = subject.path.parent
    base = parent if settings().allows(parent) else settings().roots[0]
    stem = f"{archive.name.removesuffix('.inshrink')}-step-{step}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 100))]
    return str(next((base / name for name in names if not os.path.lexists(base / name)), base / stem))


def restore_target(text: str) -> Path:
    """Return the real path of a folder that files may be restored to: a new one, or an empty one.

    Raises
    ------
    ServiceError
        It lies outside of the roots, is no folder, or holds something.
    """
    path = resolve(text)
    if not settings().allows(path):
        raise ServiceError(
            Problem("files are restored to a folder of yours", text, "choose one that the explorer may see")
        )
    if not path.parent.is_dir():
        raise ServiceError(
            Problem("its folder does not exist", str(path.parent), "make it, or choose another")
        )
    try:
        is_free = not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))
    except OSError:
        is_free = False
    if not is_free:
        raise ServiceError(
            Problem(
                "there is something at this path already",
                str(path),
                "choose a new folder; nothing is overwritten",
            )
        )
    return path


def start_restore(shown: Subject, archive: Path, step: int, layout: str, target: Path) -> Job:
    """Write the files of a step.

    Parameters
    ----------
    shown
        What the page is about, to come back to.
    archive, step
        What is restored.
    layout
        ``same`` as the run was, ``safetensors`` or ``torch``.
    target
        A folder that `restore_target` let pass.
    """
    request = {
        "task": "restore",
        "path": str(archive),
        "step": step,
        "layout": layout,
        "target": str(target),
        "shown": str(shown.path),
    }
    return running.jobs().start(("restore", str(shown.path)), request, load_json, again=True)


def newest_restore(shown: Subject) -> Job | None:
    """Return the last restore that was asked for on the page of a run or an archive."""
    return running.jobs().get(("restore", str(shown.path)), load_json)


def restored(document: Any) -> Restored:
    """Turn the document of a restore into plain values."""
    return Restored(
        step=int(document["step"]),
        target=str(document["target"]),
        layout=str(document["layout"]),
        files=tuple(
            RestoredFile(str(row["name"]), int(row["nbytes"]), str(row["sha256"]))
            for row in document["files"]
        ),
    )
