"""Files dropped onto the Open page, stored in a folder of the explorer."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import BinaryIO, NamedTuple

import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.inside import dropped_folder, is_dropped, reported
from inshrink_app.services.opening import load_whole

from inshrink_core.errors import clipped
from inshrink_core.formats.discovery import WEIGHT_SUFFIXES
from inshrink_core.text import size

_MAX_STORED_BYTES = 5_000_000_000
_MAX_FILES = 200
_LONGEST_NAME_BYTES = 200
_ARCHIVE_SUFFIX = ".inshrink"

_TOKEN = re.compile(r"[0-9a-f]{32}")
_NOT_IN_NAMES = re.compile(r"[^\w .,=+@()\[\]{}~-]")
"""Control characters, separators, and characters with a special meaning in shells or on Windows."""


class Dropped(NamedTuple):
    """One drop of files: content, folder and size."""

    path: Path
    folder: Path
    nbytes: int


def dropped() -> tuple[Dropped, ...]:
    """Return all stored drops, newest first."""
    found = []
    with contextlib.suppress(OSError):
        folders = [path for path in dropped_folder().iterdir() if _TOKEN.fullmatch(path.name)]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            for path in folder.iterdir():
                files = list(path.iterdir()) if path.is_dir() else [path]
                found.append(Dropped(path, folder, sum(file.stat().st_size for file in files)))
    return tuple(found)


def forget_dropped(folder: Path) -> bool:
    """Remove one drop; return True.

    Raises
    ------
    ServiceError
        The file system refuses, or the folder is not one of a drop.
    """
    if folder.parent != dropped_folder() or not _TOKEN.fullmatch(folder.name):
        raise ServiceError("nothing was dropped here", str(folder))
    with reported():
        shutil.rmtree(folder)
    return True


def open_dropped(files: Sequence[tuple[str, BinaryIO]]) -> Subject:
    """Store dropped files and open them as an archive, a checkpoint or a run; keep none that cannot be read.

    Parameters
    ----------
    files
        Untrusted names from the browser, and contents: a packed archive, or checkpoint files of one run.

    Raises
    ------
    ServiceError
        The files are too large, of another kind, share a name or step, cannot be written, or cannot be read.
    """
    if len(files) > _MAX_FILES:
        raise ServiceError(f"more than {_MAX_FILES} files", remedy="open their folder by its path")
    names = [_safe(name) for name, _ in files]
    opens = (_ARCHIVE_SUFFIX, *WEIGHT_SUFFIXES)
    if other := next((name for name in names if PureWindowsPath(name).suffix not in opens), None):
        remedy = f"drop a packed archive ({_ARCHIVE_SUFFIX}) or checkpoints ({' '.join(WEIGHT_SUFFIXES)})"
        raise ServiceError("neither an archive nor a checkpoint, by its name", other, remedy)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ServiceError("two files have the same name", twice, "rename either, or drop it alone")
    if len(names) > 1 and any(name.endswith(_ARCHIVE_SUFFIX) for name in names):
        raise ServiceError("an archive is opened alone", ", ".join(names[:3]), "drop it without others")
    _check_sizes(files)
    folder = dropped_folder() / secrets.token_hex(16)
    place = folder / names[0]
    if len(names) > 1:  # A run, named after the common part of its file names.
        stem = re.sub(r"[\W\d_]+$", "", os.path.commonprefix(names))  # noqa: RUF071
        place = folder / f"{stem or 'run'}-{len(names)}-files"
    try:
        with reported():
            (place if len(names) > 1 else folder).mkdir(parents=True, mode=0o700)
            for name, (_, content) in zip(names, files, strict=True):
                content.seek(0)
                with (place / name if len(names) > 1 else place).open("xb") as file:
                    shutil.copyfileobj(content, file)
        return _load_all(place)
    except ServiceError as error:
        shutil.rmtree(folder, ignore_errors=True)
        found = error.problem
        # The copy no longer exists, so its path would not help.
        where = ", ".join(names[:3]) if not found.where or is_dropped(Path(found.where)) else found.where
        remedy = found.remedy or "drop it again: it may have been cut off on its way"
        raise ServiceError(found.what.replace(f"{place}", where), where, remedy, found.detail) from error


def _load_all(place: Path) -> Subject:
    """Open a stored drop; raise if any of its files is left out."""
    subject = load_whole(str(place))
    for left_out, reason in (*subject.unreadable, *subject.skipped):
        remedy = "drop the others alone, or open their folder by its path, which leaves such files out"
        raise ServiceError(f"one of the files cannot be used: {reason}", left_out, remedy)
    return subject


def _safe(name: str) -> str:
    """Return the last part of a name, reduced to characters that every file system and shell accepts."""
    # Windows' rules split at both kinds of separators.
    safe = _NOT_IN_NAMES.sub("_", PureWindowsPath(name).name).lstrip(". ")
    if not 0 < len(safe.encode()) <= _LONGEST_NAME_BYTES:
        what = "the file's name is too long" if safe else "the file has no name"
        raise ServiceError(what, clipped(name, 200), "give it another name")
    return safe


def _check_sizes(files: Sequence[tuple[str, BinaryIO]]) -> None:
    """Refuse empty files, and files too large for memory or for the folder."""
    sizes = [content.seek(0, os.SEEK_END) for _, content in files]
    if 0 in sizes:
        raise ServiceError("the file is empty", clipped(files[sizes.index(0)][0], 200), "copy it again")
    most = st.get_option("server.maxUploadSize") << 20
    if sum(sizes) > most:
        what = f"{size(sum(sizes))} are too much to drop: at most {size(most)}"
        raise ServiceError(what, remedy="open it by its path: then nothing is copied, of any size")
    if sum(copy.nbytes for copy in dropped()) + sum(sizes) > _MAX_STORED_BYTES:
        what = f"the dropped files would take more than {size(_MAX_STORED_BYTES)}"
        raise ServiceError(what, str(dropped_folder()), "remove some of those that were dropped before")
