"""What the headers of a run told, kept on disk: a run of hundreds of checkpoints opens at once the next time.

Kept beside the list of recent runs, for this user alone, one file a run, as the engine keeps results. It
counts as long as no file of the run has changed in name, size or time. A file that is lost, damaged or of
another version is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from inshrink_app.model import Subject
from inshrink_app.server.recent import recent_file

import inshrink_core
from inshrink_core.checkpoint import LayerType, TensorRole, TensorSpec
from inshrink_core.errors import StorageError
from inshrink_core.execution import keep_result, load_result

_VERSION = 7
"""Raised when what is kept changes."""

_KIND = _FIELD = "headers"
_MOST_KEPT = 32
_MOST_FILES = 20_000
"""Of a folder with more files it is not asked whether they changed."""

_OWN_FOLDER = ".inshrink"
"""Where the engine keeps what it measured of a run: not a part of the run."""


def files_stamp(folder: Path) -> str | None:
    """Return what changes with any file of a run; None where it cannot be told, or costs too much."""
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


def file_of_run(kind: str, run: Path) -> Path:
    """Return where something of a kind is kept of a run: one file a run, beside the list of recent ones."""
    name = hashlib.sha256(str(run).encode(errors="surrogateescape")).hexdigest()[:32]
    return recent_file().with_name(kind) / f"{name}.json"


def keep_for_run(path: Path, key: Mapping[str, Any], field: str, document: Any, most: int) -> None:
    """Keep something of a run for this user alone; of more than the most, those not used for longest go.

    A disk that refuses costs what would have been kept, and no more.
    """
    with contextlib.suppress(OSError, StorageError, UnicodeError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_result(path, key, field, document)
        by_age = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns, reverse=True)
        for old in by_age[most:]:
            old.unlink()


def kept_headers(folder: Path, stamp: str) -> tuple[Subject, str] | None:
    """Return the run and the token that were kept under a stamp, without its archive; None without any."""
    path = file_of_run(_KIND, folder)
    key = {"path": str(folder), "stamp": stamp}
    found = load_result(path, key, _FIELD, lambda told: (_subject(path, folder, told), str(told["token"])))
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # Those not used for longest are dropped first.
    return found


def keep_headers(subject: Subject, token: str, stamp: str) -> None:
    """Keep what a run told; a disk that refuses costs the next opening some time."""
    paths = {name: str(getattr(subject, name)) for name in ("directory", "newest")}
    tensors = [(row.name, row.role, row.dtype, row.shape, row.exact, row.layer) for row in subject.tensors]
    document = {name: getattr(subject, name) for name in _FIELDS} | paths
    document |= {"token": token, "tensors": tensors}
    key = {"path": str(subject.path), "stamp": stamp}
    keep_for_run(file_of_run(_KIND, subject.path), key, _FIELD, document, _MOST_KEPT)


def forget_headers(folder: Path) -> None:
    """Drop what is kept of a run."""
    with contextlib.suppress(OSError):
        file_of_run(_KIND, folder).unlink()


def _subject(path: Path, folder: Path, document: Any) -> Subject:
    """Rebuild a run; whatever does not fit raises, and the headers are read anew."""
    told = {name: parse(document[name]) for name, parse in _FIELDS.items()}
    return Subject(path=folder, kind="run", bytes_read=path.stat().st_size, **told)


def _rows(told: Any) -> tuple[tuple[str, str], ...]:
    return tuple((str(path), str(reason)) for path, reason in told)


def _spec(name: str, role: str, dtype: str, shape: list[int], exact: bool, layer: str) -> TensorSpec:
    return TensorSpec(
        name=str(name),
        role=TensorRole(role),
        dtype=str(dtype),
        shape=tuple(map(int, shape)),
        exact=bool(exact),
        layer=LayerType(layer),
    )


_FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("name", "format", "step_pattern"), str),
    "steps": lambda told: tuple(map(int, told)),
    "tensors": lambda told: tuple(_spec(*row) for row in told),
    "total_bytes": int,
    "skipped": _rows,
    "unreadable": _rows,
    "notes": lambda told: tuple(map(str, told)),
    "is_ordered": bool,
    **dict.fromkeys(("directory", "newest"), Path),
    "log": lambda told: {str(name): tuple((int(a), float(b)) for a, b in row) for name, row in told.items()},
}
"""What is kept of a run, and what makes it of JSON."""
