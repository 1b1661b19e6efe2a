"""Files dropped onto the page Open: kept once by their content, in a folder of the explorer's own."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PureWindowsPath
from typing import BinaryIO, NamedTuple, TypeVar

import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.inside import dropped_folder, is_dropped, reported
from inshrink_app.services.opening import load_subject

from inshrink_core.formats.discovery import WEIGHT_SUFFIXES
from inshrink_core.text import elided as elide
from inshrink_core.text import size as bytes_text

_MOST_KEPT_BYTES = 5_000_000_000
_MOST_FILES = 200
_CHUNK_BYTES = 1 << 20
_LONGEST_NAME_BYTES = 200
_ARCHIVE_SUFFIX = ".inshrink"
_Read = TypeVar("_Read")

_DIGEST = re.compile(r"[0-9a-f]{32}")
_NOT_IN_NAMES = re.compile(r"[^\w .,=+@()\[\]{}~-]")
"""Control signs, separators, and what shells or Windows take for something else."""


class Dropped(NamedTuple):
    """What was dropped at one time: what it is, where it lies, and how much it takes.

    `is_log` tells a file of metrics, which belongs to a run, from what is opened.
    """

    path: Path
    folder: Path
    n_files: int
    nbytes: int
    is_log: bool


def dropped() -> tuple[Dropped, ...]:
    """Return all that was dropped and not removed, newest first."""
    found = []
    with contextlib.suppress(OSError):
        folders = [path for path in dropped_folder().iterdir() if _DIGEST.fullmatch(path.name)]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            inner = next((path for path in folder.iterdir() if not path.name.startswith(".")), None)
            if inner is not None:
                files = [path for path in inner.iterdir() if path.is_file()] if inner.is_dir() else [inner]
                nbytes = sum(path.stat().st_size for path in files)
                is_log = inner.is_file() and not _opens(inner.name)
                found.append(Dropped(inner, folder, len(files), nbytes, is_log))
    return tuple(found)


def forget_dropped(folder: Path) -> None:
    """Remove what was dropped at one time.

    Raises
    ------
    ServiceError
        The file system refuses, or the folder is none of them.
    """
    if folder.parent != dropped_folder() or not _DIGEST.fullmatch(folder.name):
        raise ServiceError("nothing was dropped here", str(folder))
    with reported():
        shutil.rmtree(folder)


def open_dropped(files: Sequence[tuple[str, BinaryIO]]) -> Subject:
    """Keep dropped files and open them as one archive, checkpoint or run; keep nothing that cannot be opened.

    Parameters
    ----------
    files
        Names as the browser gave them, which are not trusted, and contents. One packed archive, or
        checkpoint files of one run.

    Raises
    ------
    ServiceError
        They are too large, of another kind, have the same name or step, cannot be written, or cannot be read.
    """
    names = _checked_names([name for name, _ in files])
    renamed = [(name, content) for name, (_, content) in zip(names, files, strict=True)]
    return keep_dropped(renamed, _opened_whole)


def keep_dropped(files: Sequence[tuple[str, BinaryIO]], read: Callable[[Path], _Read]) -> _Read:
    """Keep dropped files and return what reading them gives; keep nothing that cannot be read.

    Parameters
    ----------
    files
        Names, of which the last part counts, and contents.
    read
        Reads what was kept, given its path: of several files, their folder.

    Raises
    ------
    ServiceError
        They are too large, cannot be written, or cannot be read.
    """
    names = [_safe(name) for name, _ in files]
    _check_sizes(files)
    place, is_new = _keep([(name, content) for name, (_, content) in zip(names, files, strict=True)])
    try:
        return read(place)
    except ServiceError as error:
        if is_new:
            kept_in = dropped_folder()
            forget_dropped(kept_in / place.relative_to(kept_in).parts[0])
        found = error.problem
        # Where it lay a moment ago helps nobody.
        where = ", ".join(names[:3]) if not found.where or is_dropped(Path(found.where)) else found.where
        remedy = found.remedy or "drop it again, whole: it may have been cut off on its way"
        what = found.what.replace(f"{place}", where)
        raise ServiceError(what, where, remedy, found.detail) from error


def _opened_whole(place: Path) -> Subject:
    """Open what was kept, all of it: a file left out was dropped by mistake."""
    subject = load_subject(str(place))
    rows = (*subject.unreadable, *subject.skipped)
    if rows:
        left_out, reason = rows[0]
        remedy = "drop the others alone, or open their folder by its path, which leaves such files out"
        raise ServiceError(f"one of the files cannot be used: {reason}", left_out, remedy)
    return subject


def _safe(name: str) -> str:
    """Return the last part of a name, of signs that every file system and shell takes for a name.

    Raises
    ------
    ServiceError
        Nothing is left of it, or it is too long.
    """
    # Windows' rules take both kinds of separators for one.
    safe = _NOT_IN_NAMES.sub("_", PureWindowsPath(name).name).lstrip(". ")
    if not 0 < len(safe.encode()) <= _LONGEST_NAME_BYTES:
        what = "the file's name is too long" if safe else "the file has no name"
        raise ServiceError(what, elide(name, 200), "give it another one")
    return safe


def _opens(name: str) -> bool:
    """Return whether a name is that of an archive or a checkpoint."""
    return PureWindowsPath(name).suffix in (_ARCHIVE_SUFFIX, *WEIGHT_SUFFIXES)


def _checked_names(names: Sequence[str]) -> list[str]:
    """Return names that are safe to write, each once."""
    if len(names) > _MOST_FILES:
        raise ServiceError(f"more than {_MOST_FILES} files", remedy="open their folder by its path")
    safe = [_safe(name) for name in names]
    if other := next((name for name in safe if not _opens(name)), None):
        remedy = f"drop a packed archive ({_ARCHIVE_SUFFIX}) or checkpoints ({' '.join(WEIGHT_SUFFIXES)})"
        raise ServiceError("neither an archive nor a checkpoint, by its name", other, remedy)
    twice = next((name for name in safe if safe.count(name) > 1), None)
    if twice is not None:
        raise ServiceError("two files have the same name", twice, "rename one, or drop one alone")
    if len(safe) > 1 and any(name.endswith(_ARCHIVE_SUFFIX) for name in safe):
        raise ServiceError("an archive is opened alone", ", ".join(safe[:3]), "drop it without others")
    return safe


def _check_sizes(files: Sequence[tuple[str, BinaryIO]]) -> None:
    """Refuse empty files, and what is too much for memory or for the folder."""
    sizes = [content.seek(0, os.SEEK_END) for _, content in files]
    if 0 in sizes:
        raise ServiceError("the file is empty", elide(files[sizes.index(0)][0], 200), "copy it again")
    most = st.get_option("server.maxUploadSize") << 20
    if sum(sizes) > most:
        remedy = "open it by its path below: then nothing is copied, whatever its size"
        limit = f"at most {bytes_text(most)}"
        raise ServiceError(f"{bytes_text(sum(sizes))} are too much to drop: {limit}", remedy=remedy)
    held = sum(one.nbytes for one in dropped())
    if held + sum(sizes) > _MOST_KEPT_BYTES:
        what = f"the dropped files would take more than {bytes_text(_MOST_KEPT_BYTES)}"
        raise ServiceError(what, str(dropped_folder()), "remove some of those that were dropped before")


def _keep(files: Sequence[tuple[str, BinaryIO]]) -> tuple[Path, bool]:
    """Write files into a folder named after their content; return what to open, and whether it is new."""
    run = "" if len(files) == 1 else _run_name([name for name, _ in files])
    folder = dropped_folder()
    with reported():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-", ignore_cleanup_errors=True) as made:
            inner = Path(made) / "made" / run
            inner.mkdir(parents=True)
            told = hashlib.sha256()
            for name, content in sorted(files, key=lambda file: file[0]):
                told.update(f"{name}\0{_write(content, inner / name)}\0".encode())
            target = folder / told.hexdigest()[:32]
            try:
                (Path(made) / "made").rename(target)
                is_new = True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                is_new = False
    return target / (run or files[0][0]), is_new


def _write(content: BinaryIO, path: Path) -> str:
    """Copy a file, and return the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    content.seek(0)
    with path.open("xb") as file:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _run_name(names: Sequence[str]) -> str:
    """Name a run after what the names of its files have in common."""
    same = [len(set(signs)) == 1 for signs in zip(*names, strict=False)]
    stem = re.sub(r"[\W\d_]+$", "", names[0][: (*same, False).index(False)])
    return f"{stem or 'run'}-{len(names)}-files"
