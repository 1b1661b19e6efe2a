"""Files that appear all at once, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from inshrink_core.errors import ExistsError, StorageError
from inshrink_core.formats.safe_path import check_names, check_target

__all__ = ["write_files"]

_REMEDIES: Final = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EROFS: "the file system is read-only: write elsewhere",
    errno.EACCES: "you may not write there: check the permissions",
    errno.EPERM: "you may not write there: check the permissions",
}


@contextlib.contextmanager
def _storage_errors(where: Path) -> Iterator[None]:
    """Turn what the file system refuses into an error with a remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"writing failed: {error.strerror or error}",
            where=str(where),
            remedy=_REMEDIES.get(error.errno or 0, "nothing was changed there; try another place"),
        ) from error


def _make_directories(directory: Path) -> list[Path]:
    """Create a directory and its parents; return those that were not there, innermost last."""
    missing: list[Path] = []
    path = directory
    while not path.exists():
        missing.append(path)
        path = path.parent
    made = []
    for path in reversed(missing):
        path.mkdir()
        made.append(path)
    return made


def _write_temporary(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write_files(
    directory: Path, writers: Mapping[str, Callable[[IO[bytes]], None]], *, force: bool, origin: str = ""
) -> tuple[Path, ...]:
    """Write several files into a directory under temporary names, then rename them all.

    Parameters
    ----------
    directory
        Created if missing.
    writers
        Relative POSIX path to a function that writes the file's bytes.
    force
        Replace files that exist.
    origin
        Where the names come from, for messages.

    Returns
    -------
    tuple of Path
        The files, in the order given.

    Raises
    ------
    UnsafePathError
        A name would leave the directory; nothing is written.
    ExistsError
        A target exists and `force` is not set; nothing is written.
    StorageError
        The disk is full, the target read-only; what was written is removed.
    """
    check_names(writers, origin)
    targets = {name: check_target(directory, name) for name in writers}
    if not force:
        _refuse_existing(targets)
    made: list[Path] = []
    temporary: dict[str, Path] = {}
    try:
        with _storage_errors(directory):
            for name, write in writers.items():
                target = targets[name]
                made += _make_directories(target.parent)
                # A name of its own: a long one may leave no room for more signs.
                temporary[name] = target.parent / f".inshrink-{secrets.token_hex(8)}.tmp"
                _write_temporary(temporary[name], write)
            if not force:
                _refuse_existing(targets)
            for name in writers:
                temporary[name].replace(targets[name])
    except BaseException:
        _clean(temporary.values(), made)
        raise
    return tuple(targets.values())


def _refuse_existing(targets: Mapping[str, Path]) -> None:
    for path in targets.values():
        if os.path.lexists(path):
            raise ExistsError(
                "the file exists already",
                where=str(path),
                remedy="write elsewhere, or use --force to replace it",
            )


def _clean(files: object, folders: list[Path]) -> None:
    """Remove what an interrupted write left; the first error is the one to tell, so none is raised."""
    for path in list(files):  # type: ignore[call-overload]
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for path in reversed(folders):
        with contextlib.suppress(OSError):
            path.rmdir()
