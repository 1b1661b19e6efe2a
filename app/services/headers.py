"""Disk cache of a run's headers, which lets a run of many checkpoints open at once.

Each run has one file beside the list of recent runs, readable only by this user. It is valid while no file of
the run changes in name, size or time. A missing, damaged or outdated cache file is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from inshrink_app.model import Subject
from inshrink_app.server.recent import recent_file

import inshrink_core
from inshrink_core.errors import StorageError
from inshrink_core.execution.results import keep_result, load_result

_VERSION = 9
"""Version of the stored document; increases with every change of it."""

_KIND = "headers"
_MAX_STORED = 32
_MAX_FILES = 20_000
"""A folder with more files is not checked for changes."""

_ENGINE_FOLDER = ".inshrink"
"""Folder of the engine's measurements, which is not a part of the run."""


def files_stamp(folder: Path) -> str | None:
    """Return a stamp that changes with any file of a run; None if it is unavailable or too expensive."""
    digest = hashlib.sha256(f"{_VERSION} {inshrink_core.__version__}\0".encode())
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


def file_of_run(kind: str, run: Path) -> Path:
    """Return the path of a document of some kind about a run: one file per run, beside the recent runs."""
    name = hashlib.sha256(str(run).encode(errors="surrogateescape")).hexdigest()[:32]
    return recent_file().with_name(kind) / f"{name}.json"


def store_for_run(path: Path, key: Mapping[str, Any], field: str, document: Any, most: int) -> None:
    """Store a document about a run for this user; above `most` files, delete the least recently used.

    A failed write is ignored.
    """
    with contextlib.suppress(OSError, StorageError, UnicodeError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_result(path, key, field, document)
        by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for old in by_age[most:]:
            old.unlink()


def stored_headers(folder: Path, stamp: str) -> tuple[Subject, str] | None:
    """Return the run and token stored under a stamp, without its archive; None without an entry."""
    path = file_of_run(_KIND, folder)

    def parse(document: Any) -> tuple[Subject, str]:
        subject = msgspec.convert(document["run"], Subject, dec_hook=lambda kind, text: kind(text))
        return dataclasses.replace(subject, bytes_read=path.stat().st_size), str(document["token"])

    found = load_result(path, {"path": str(folder), "stamp": stamp}, _KIND, parse)
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # The least recently used files are deleted first.
    return found


def store_headers(subject: Subject, token: str, stamp: str) -> None:
    """Store the headers of a run. A failed write only makes the next opening slower."""
    run = msgspec.to_builtins(dataclasses.replace(subject, archive=None), enc_hook=str)
    key = {"path": str(subject.path), "stamp": stamp}
    path = file_of_run(_KIND, subject.path)
    store_for_run(path, key, _KIND, {"token": token, "run": run}, _MAX_STORED)


def forget_headers(folder: Path) -> None:
    """Delete the stored headers of a run."""
    with contextlib.suppress(OSError):
        file_of_run(_KIND, folder).unlink()
