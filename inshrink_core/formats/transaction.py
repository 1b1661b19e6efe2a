"""Files that appear all at once, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from inshrink_core.errors import ExistsError, StorageError
from inshrink_core.execution import make_folders, remove_empty, sync_path, working_folder
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


def _write_temporary(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write_files(
    directory: Path, writers: Mapping[str, Callable[[IO[bytes]], None]], *, force: bool, origin: str = ""
) -> tuple[Path, ...]:
    """Write several files into a directory under temporary names, then rename them all, durably.

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
    try:
        with _storage_errors(directory):
            made += make_folders(directory)
            with working_folder(directory) as folder:
                # Numbers for names: a long one may leave no room for more signs.
                fresh = [folder / str(number) for number in range(len(targets))]
                for path, write in zip(fresh, writers.values(), strict=True):
                    _write_temporary(path, write)
                for parent in {target.parent for target in targets.values()} - {directory}:
                    made += make_folders(parent)
                if not force:
                    _refuse_existing(targets)
                _switch(fresh, tuple(targets.values()), folder)
    except BaseException:
        remove_empty(made)
        raise
    return tuple(targets.values())


def _switch(fresh: Sequence[Path], targets: Sequence[Path], folder: Path) -> None:
    """Give all files their names, or none.

    Of several files the old ones go first, all of them: whatever cuts this off, no old file ever stands
    beside a new one. One file alone is replaced at once.
    """
    parents = {target.parent for target in targets}
    renamed: list[tuple[Path, Path]] = []

    def rename(source: Path, target: Path) -> None:
        renamed.append((source, target))
        source.rename(target)

    try:
        if len(targets) == 1:
            fresh[0].replace(targets[0])
        else:
            for number, target in enumerate(targets):
                if os.path.lexists(target):
                    rename(target, folder / f"old-{number}")
            if renamed:
                _sync(parents)
            for path, target in zip(fresh, targets, strict=True):
                rename(path, target)
        _sync(parents)
    except BaseException:
        for source, target in reversed(renamed):
            with contextlib.suppress(OSError):
                target.rename(source)
        raise


def _sync(folders: Iterable[Path]) -> None:
    for folder in folders:
        sync_path(folder)


def _refuse_existing(targets: Mapping[str, Path]) -> None:
    for path in targets.values():
        if os.path.lexists(path):
            raise ExistsError(
                "the file exists already",
                where=str(path),
                remedy="write elsewhere, or use --force to replace it",
            )
