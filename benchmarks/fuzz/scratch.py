"""Folders to write into: in memory where the system has such a place, one a process."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")
_root: Path | None = None


def memory_folder() -> Path | None:
    """Return a folder in memory, where what is synced costs nothing; None where the system has none."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None


def root() -> Path:
    """Return the folder of this campaign, made on first use; workers inherit it."""
    global _root
    if _root is None or not _root.exists():
        _root = Path(tempfile.mkdtemp(prefix="inshrink-fuzz-", dir=memory_folder()))
    return _root


def fresh(name: str) -> Path:
    """Return an empty folder of this process."""
    path = root() / str(os.getpid()) / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def absent(name: str) -> Path:
    """Return a path of this process where nothing is."""
    path = root() / str(os.getpid()) / name
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def forget(pid: int) -> None:
    """Remove what a process left."""
    shutil.rmtree(root() / str(pid), ignore_errors=True)


def remove() -> None:
    """Remove everything."""
    global _root
    if _root is not None:
        shutil.rmtree(_root, ignore_errors=True)
        _root = None
