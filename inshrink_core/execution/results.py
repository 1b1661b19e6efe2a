"""Results of long computations cached on disk, so that interrupted work can continue.

The cache is a folder with a file per result, or a JSON lines file that several processes append to. The key
of a result contains everything it depends on; unreadable results are recomputed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import Any, Final, Generic, TypeVar

from inshrink_core.errors import StorageError
from inshrink_core.execution.files import locked, new_file, open_regular, read_regular, temporary_path

# The sensitivities of 100,000 tensors take 20 MB; a larger file is not a result.
_MAX_NBYTES: Final = 64 << 20

# A comparison of a thousand steps takes 400 kB.
MAX_SHARED_NBYTES: Final = 8 << 20

_UNREADABLE: Final = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def key_digest(key: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a key; equal JSON values have equal digests.

    Examples
    --------
    >>> key_digest({"a": 1, "b": 2}) == key_digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def load_result(
    path: Path, key: Mapping[str, Any], field: str, parse: Callable[[Any], _Result]
) -> _Result | None:
    """Return the cached result of a key; None if it is missing or unreadable.

    Parameters
    ----------
    path
        File of the result.
    key
        Everything the result depends on, as JSON values; a file with another key does not match.
    field
        Name of the result in the file.
    parse
        Creates the result from JSON; raises ValueError, TypeError or KeyError for invalid values.
    """
    try:
        document = json.loads(read_regular(path, _MAX_NBYTES))
        if document["sha256"] != _digest(document[field]):
            raise ValueError("its digest is another")
        same = document["key"] == json.loads(json.dumps(key))
        return parse(document[field]) if same else None
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        _logger.warning("%s holds no %s (%s): it is made again", path, field, error)
        return None


def keep_result(path: Path, key: Mapping[str, Any], field: str, value: Any) -> None:
    """Write a result, as JSON values, and its key, atomically.

    Raises
    ------
    StorageError
        The disk is full, or the system refused.
    """
    write_atomic(path, json.dumps({"key": key, field: value, "sha256": _digest(value)}))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace the content of a file atomically.

    Raises
    ------
    StorageError
        The disk is full, or the system refused.
    """
    temporary = temporary_path(path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(temporary) as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"the results cannot be written: {error.strerror}", where=str(path)) from error


def results_folder(directory: Path, *, make: bool = True) -> Path | None:
    """Return the folder for results of a run: inside the run, or in the user's cache directory.

    Parameters
    ----------
    directory
        The run.
    make
        Create the folder. If False, nothing is written, and results in a read-only run are found.

    Returns
    -------
    Path or None
        ``.inshrink`` in the run if it is writable, not a symbolic link, and not part of a Python package, as
        the bundled samples are. Otherwise a folder of the run in the user's cache; None if that cannot be
        created.
    """
    inside = directory / ".inshrink"
    real = Path(os.path.realpath(directory))
    is_packaged = any((folder / "__init__.py").is_file() for folder in (real, *real.parents))
    fits = directory.is_dir() and not inside.is_symlink() and not is_packaged
    if fits and (_is_made(inside) if make else _is_writable(inside)):
        return inside
    base = user_cache_folder(make=False)
    if base is None:
        return None
    label = re.sub(r"[^A-Za-z0-9.-]+", "-", real.name)[:80]
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    users = base / "runs" / f"{label}-{digest}"
    if make:
        return users if _is_made(users) else None
    return inside if fits and inside.is_dir() and not users.is_dir() else users


def user_cache_folder(*, make: bool = True) -> Path | None:
    """Return the user's cache of results, created by default; None without a writable cache or a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = (named if named.is_absolute() else Path.home() / ".cache") / "inshrink"
    except RuntimeError:
        return None
    return base if not make or _is_made(base) else None


def cache_folder(directory: Path) -> Path | None:
    """Return the folder for cached measurements of a run: ``cache`` in `results_folder`; None without one."""
    results = results_folder(directory)
    if results is None:
        return None
    folder = results / "cache"
    return folder if not folder.is_symlink() and _is_made(folder) else None


def _is_made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _is_writable(folder: Path) -> bool:
    """Return whether a folder is writable or can be created."""
    if folder.exists():
        return folder.is_dir() and os.access(folder, os.W_OK)
    return os.access(folder.parent, os.W_OK)


class ResultStore(Generic[_Result]):
    """A cache of results by everything they depend on, one file each.

    Parameters
    ----------
    folder
        Created for the first result; None disables the cache.
    field
        Name of the result in its file.
    parse
        Creates a result from JSON; raises ValueError, TypeError or KeyError for invalid values.
    """

    def __init__(self, folder: Path | None, field: str, parse: Callable[[Any], _Result]) -> None:
        self.folder, self._field, self._parse = folder, field, parse

    def name_of(self, label: str, key: Mapping[str, Any]) -> str:
        """Return the file name of a result, without suffix; the label helps human readers."""
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', label)[:80]}-{key_digest(key)}"

    def _path(self, label: str, key: Mapping[str, Any]) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.name_of(label, key)}.json"

    def load(self, label: str, key: Mapping[str, Any]) -> _Result | None:
        """Return a cached result; None if it is missing or unreadable."""
        path = self._path(label, key)
        return None if path is None else load_result(path, key, self._field, self._parse)

    def keep(self, label: str, key: Mapping[str, Any], value: Any) -> None:
        """Write a result, as JSON values, atomically.

        Raises
        ------
        StorageError
            The disk is full, or the system refused.
        """
        path = self._path(label, key)
        if path is not None:
            keep_result(path, key, self._field, value)

    def try_keep(self, label: str, key: Mapping[str, Any], value: Any) -> None:
        """Cache a reproducible result; a failed write is only logged."""
        try:
            self.keep(label, key, value)
        except StorageError as error:
            _logger.info("%s", error)


def read_lines(path: Path, most: int, parse: Callable[[dict[str, Any]], Any] = dict) -> list[Any]:
    """Return the JSON objects of a file, one per line; invalid lines are skipped with a warning.

    Parameters
    ----------
    path
        The file.
    most
        Largest accepted file size in bytes.
    parse
        Creates a result from an object; raises ValueError, TypeError or LookupError for an invalid one.

    Raises
    ------
    OSError
        The file does not exist, is not regular, or has more than `most` bytes.
    """
    rows: list[Any] = []
    for number, line in enumerate(read_regular(path, most).splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("it is no object")
            rows.append(parse(row))
        except _UNREADABLE:
            _logger.warning("%s, line %d is not a result and is ignored", path, number)
    return rows


def add_line(path: Path, row: Mapping[str, Any], most: int | None = None) -> None:
    """Append a JSON object to a file shared by several processes, atomically.

    Parameters
    ----------
    path
        Created with the first object; symbolic links are not followed.
    row
        The object. Existing content is unchanged; a last line cut off by a crash stays a separate line.
    most
        Largest size in bytes of the file and of ``NAME.older``. A file that would grow larger is renamed to
        ``NAME.older``, which it replaces.

    Raises
    ------
    StorageError
        The disk is full, or the system refused.
    """
    line = json.dumps(row).encode() + b"\n"
    if most is not None and len(line) > most:
        _logger.info("%s: %d bytes are too many to be kept", path, len(line))
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            if most is not None and path.exists() and path.stat().st_size + len(line) > most:
                path.replace(_older(path))
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            with open(open_regular(path, flags, follow=False), "r+b", buffering=0) as file:  # noqa: PTH123
                if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    line = b"\n" + line
                while line:
                    line = line[file.write(line) or 0 :]
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageError(f"the results cannot be written: {why}", where=str(path)) from error


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.older")


def shared_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield every object of a bounded file, oldest first."""
    for file in (_older(path), path):
        with contextlib.suppress(OSError):
            status = file.stat()
            yield from _shared_lines(file, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _shared_lines(path: Path, inode: int, mtime_ns: int, nbytes: int) -> tuple[Mapping[str, Any], ...]:
    """Return the objects of a file, cached for one modification time and size."""
    return tuple(read_lines(path, 2 * MAX_SHARED_NBYTES))
