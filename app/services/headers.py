"""What the headers of a run told, kept on disk: a run of hundreds of checkpoints opens at once the next time.

Kept beside the list of recent runs, for this user alone, one file a run, as the engine keeps results. It
counts as long as no file of the run has changed in name, size or time. A file that is lost, damaged or of
another version is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.model.subject import Subject
from inshrink_app.server.recent import recent_file

if TYPE_CHECKING:
    from inshrink_core.checkpoint import TensorSpec

_VERSION = 6
"""Raised when what is kept changes."""

_FIELD = "headers"
_MOST_KEPT = 32
_MOST_FILES = 20_000
"""Of a folder with more files it is not asked whether they changed."""

_OWN_FOLDER = ".inshrink"
"""Where the engine keeps what it measured of a run: not a part of the run."""


def headers_folder() -> Path:
    """Return where they are kept."""
    return recent_file().with_name("headers")


def files_stamp(folder: Path) -> str | None:
    """Return what changes with any file of a run; None where it cannot be told, or costs too much."""
    import inshrink_core

    told = hashlib.sha256(f"{_VERSION} {inshrink_core.__version__}\0".encode())
    n_files = 0
    try:
        for parent, folders, names in os.walk(folder, onerror=_refuse):
            folders[:] = sorted(name for name in folders if name != _OWN_FOLDER)
            for name in sorted(names):
                n_files += 1
                if n_files > _MOST_FILES:
                    return None
                path = os.path.join(parent, name)  # noqa: PTH118 - ten times the speed of a Path
                status = os.stat(path)  # noqa: PTH116
                text = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\0"
                told.update(text.encode(errors="surrogateescape"))
    except OSError:
        return None
    return told.hexdigest()


def _refuse(error: OSError) -> None:
    raise error


def _file(folder: Path) -> Path:
    name = hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:32]
    return headers_folder() / f"{name}.json"


def kept_headers(folder: Path, stamp: str) -> tuple[Subject, str] | None:
    """Return the run and the token that were kept under a stamp, without its archive; None without any."""
    from inshrink_core.execution import load_result

    path = _file(folder)
    key = {"path": str(folder), "stamp": stamp}
    found = load_result(path, key, _FIELD, lambda told: (_subject(path, folder, told), str(told["token"])))
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # Those not used for longest are dropped first.
    return found


def keep_headers(subject: Subject, token: str, stamp: str) -> None:
    """Keep what a run told; a disk that refuses costs the next opening some time."""
    from inshrink_core.errors import StorageError
    from inshrink_core.execution import keep_result

    document = {
        "token": token,
        "name": subject.name,
        "format": subject.format,
        "steps": subject.steps,
        "tensors": [
            (row.name, row.role, row.dtype, row.shape, row.exact, row.layer) for row in subject.tensors
        ],
        "total_bytes": subject.total_bytes,
        "skipped": subject.skipped,
        "unreadable": subject.unreadable,
        "notes": subject.notes,
        "step_pattern": subject.step_pattern,
        "is_ordered": subject.is_ordered,
        "log": {name: list(series) for name, series in subject.log.items()},
    }
    folder = headers_folder()
    with contextlib.suppress(OSError, StorageError, UnicodeError, ValueError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_result(_file(subject.path), {"path": str(subject.path), "stamp": stamp}, _FIELD, document)
        _drop_oldest(folder)


def forget_headers(folder: Path) -> None:
    """Drop what is kept of a run."""
    with contextlib.suppress(OSError):
        _file(folder).unlink()


def _drop_oldest(folder: Path) -> None:
    """Keep the folder bounded."""
    by_age = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in by_age[_MOST_KEPT:]:
        path.unlink()


def _subject(path: Path, folder: Path, document: Any) -> Subject:
    """Rebuild a run; whatever does not fit raises, and the headers are read anew."""
    return Subject(
        path=folder,
        name=str(document["name"]),
        kind="run",
        format=str(document["format"]),
        steps=tuple(int(step) for step in document["steps"]),
        tensors=tuple(_spec(*row) for row in document["tensors"]),
        total_bytes=int(document["total_bytes"]),
        bytes_read=path.stat().st_size,
        skipped=_rows(document["skipped"]),
        unreadable=_rows(document["unreadable"]),
        notes=tuple(map(str, document["notes"])),
        step_pattern=str(document["step_pattern"]),
        is_ordered=bool(document["is_ordered"]),
        log={
            str(name): tuple((int(step), float(value)) for step, value in series)
            for name, series in document["log"].items()
        },
    )


def _rows(told: Any) -> tuple[tuple[str, str], ...]:
    return tuple((str(path), str(reason)) for path, reason in told)


def _spec(name: str, role: str, dtype: str, shape: list[int], exact: bool, layer: str) -> TensorSpec:
    from inshrink_core.checkpoint import LayerType, TensorRole, TensorSpec

    return TensorSpec(
        name=str(name),
        role=TensorRole(role),
        dtype=str(dtype),
        shape=tuple(map(int, shape)),
        exact=bool(exact),
        layer=LayerType(layer),
    )
