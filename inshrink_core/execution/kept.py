"""Results of long work kept on disk, so that the same work goes on where it stopped.

Three shapes of one store: a folder with a file for each result, a log of one run with a line for each, and
logs that several processes add to. All find a result by everything it depends on, and have it made again
where what is on disk cannot be read.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from inshrink_core.errors import DamagedError, InputError, StorageError
from inshrink_core.execution.files import new_file, open_regular, read_regular
from inshrink_core.execution.folders import locked

# The sensitivities of 100,000 tensors take 20 MB; anything larger is something else.
_MAX_NBYTES: Final = 64 << 20

# A line takes half a kilobyte: half a million of them are another file by mistake.
_MAX_LOG_NBYTES: Final = 1 << 28

# A comparison of a thousand steps takes 400 kB.
_MAX_SHARED_NBYTES: Final = 8 << 20
_MAX_SHARED: Final = 256

_UNREADABLE: Final = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def key_digest(key: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that tell keys apart; the same for equal JSON values.

    Examples
    --------
    >>> key_digest({"a": 1, "b": 2}) == key_digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def load_result(
    path: Path, key: Mapping[str, Any], field: str, parse: Callable[[Any], _Result]
) -> _Result | None:
    """Return what was kept under a key; None where there is none, or none that can be read.

    Parameters
    ----------
    path
        File of the result.
    key
        Everything the result depends on, as JSON values; a file with another key is none.
    field
        Name of the result in the file.
    parse
        Makes the result from JSON; raises ValueError, TypeError or KeyError where it is none.
    """
    found = _read_result(path, field, parse, json.loads(json.dumps(key)))
    return None if found is None else found[1]


def _read_result(
    path: Path, field: str, parse: Callable[[Any], _Result], key: Any = None
) -> tuple[Mapping[str, Any], _Result] | None:
    """Return a file's key and result; None where it cannot be read, or has another key than is asked for."""
    try:
        document = json.loads(read_regular(path, _MAX_NBYTES))
        if key not in (None, document["key"]):
            return None
        if document["sha256"] != _digest(document[field]):
            raise ValueError("its digest is another")
        return dict(document["key"]), parse(document[field])
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        _logger.warning("%s holds no %s (%s): it is made again", path, field, error)
        return None


def keep_result(path: Path, key: Mapping[str, Any], field: str, value: Any) -> None:
    """Write a result, as JSON values, and its key: whole, or not at all.

    Raises
    ------
    StorageError
        The disk is full, or refuses.
    """
    write_whole(path, json.dumps({"key": key, field: value, "sha256": _digest(value)}))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file at once, so that none is ever half there.

    Raises
    ------
    StorageError
        The disk is full, or refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(temporary) as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"the results cannot be written: {error.strerror}", where=str(path)) from error


def results_folder(directory: Path, *, make: bool = True) -> Path | None:
    """Return where results of a run are kept: inside of it, else in the user's cache directory.

    Parameters
    ----------
    directory
        The run.
    make
        Make sure that the folder is there; without it nothing is written, and results that somebody else
        left in a run that cannot be written are found.

    Returns
    -------
    Path or None
        ``.inshrink`` where that can be written, leads nowhere else and is no part of a Python package, as the
        bundled samples are; else a folder of its own in the user's cache; None where there is neither.
    """
    own = directory / ".inshrink"
    real = Path(os.path.realpath(directory))
    is_packaged = any((folder / "__init__.py").is_file() for folder in (real, *real.parents))
    mine = directory.is_dir() and not own.is_symlink() and not is_packaged
    if mine and (_is_made(own) if make else _is_writable(own)):
        return own
    base = _user_cache()
    if base is None:
        return None
    label = re.sub(r"[^A-Za-z0-9.-]+", "-", real.name)[:80]
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    users = base / "runs" / f"{label}-{digest}"
    if make:
        return users if _is_made(users) else None
    return own if mine and own.is_dir() and not users.is_dir() else users


def user_cache_folder() -> Path | None:
    """Return where the user's cache of results lies; None where none can be written."""
    base = _user_cache()
    return base if base is not None and _is_made(base) else None


def _user_cache() -> Path | None:
    """Return where the user's cache of results would lie; None where the user has no home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "inshrink"
    except RuntimeError:
        return None


def cache_folder(directory: Path) -> Path | None:
    """Return where measurements of a run are cached: ``cache`` in `results_folder`; None without one."""
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
    """Return whether a folder can be written, or made."""
    if folder.exists():
        return folder.is_dir() and os.access(folder, os.W_OK)
    return os.access(folder.parent, os.W_OK)


def parse_record(kind: type[_Result], values: Any) -> _Result:
    """Return a dataclass from its JSON; each field must be of the type that its annotation says.

    Parameters
    ----------
    kind
        A dataclass of numbers, texts, mappings, tuples of those and such dataclasses. A field with a default
        may be missing. A whole number is a count: at least 0.

    Raises
    ------
    ValueError, TypeError, KeyError
        The values are none.
    """
    fields = {one.name: one for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, Mapping) or not set(values) <= set(fields):
        raise ValueError("it has other keys")
    hints = get_type_hints(kind)
    for name, one in fields.items():
        if name not in values and one.default is dataclasses.MISSING is one.default_factory:
            raise KeyError(name)
    return kind(**{name: _typed(hints[name], value, name) for name, value in values.items()})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Return a value as its annotation has it."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return None if value is None else _typed(inner[0], value, name)
    if kind is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"'{name}' is no list")
        # The curve of a training that diverged holds numbers that are none.
        return tuple(one if one != one else _typed(inner[0], one, name) for one in value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError(f"'{name}' is no number")
    elif kind is int:
        if type(value) is not int or value < 0:
            raise ValueError(f"'{name}' is no count")
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return parse_record(kind, value)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    elif not isinstance(value, dict if kind is Mapping else kind):
        raise TypeError(f"'{name}' has the wrong type")
    return value


class ResultStore(Generic[_Result]):
    """Results by everything they depend on, a file each.

    Parameters
    ----------
    folder
        Made when the first result is kept; None keeps nothing.
    field
        What a result is called in its file.
    parse
        Makes a result from JSON; raises ValueError, TypeError or KeyError where it is none.
    """

    def __init__(self, folder: Path | None, field: str, parse: Callable[[Any], _Result]) -> None:
        self.folder, self._field, self._parse = folder, field, parse

    def name_of(self, label: str, key: Mapping[str, Any]) -> str:
        """Return the file name of a result, without its suffix; the label is for people."""
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', label)[:80]}-{key_digest(key)}"

    def _path(self, label: str, key: Mapping[str, Any]) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.name_of(label, key)}.json"

    def load(self, label: str, key: Mapping[str, Any]) -> _Result | None:
        """Return a result; None where there is none, or none that can be read."""
        path = self._path(label, key)
        return None if path is None else load_result(path, key, self._field, self._parse)

    def kept(self, most: int) -> Iterator[tuple[Mapping[str, Any], _Result]]:
        """Yield the keys and results that can be read, of at most so many files, by their names."""
        for path in sorted([] if self.folder is None else self.folder.glob("*.json"))[:most]:
            found = _read_result(path, self._field, self._parse)
            if found is not None:
                yield found

    def keep(self, label: str, key: Mapping[str, Any], value: Any) -> None:
        """Write a result, as JSON values: whole, or not at all.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        path = self._path(label, key)
        if path is not None:
            keep_result(path, key, self._field, value)

    def try_keep(self, label: str, key: Mapping[str, Any], value: Any) -> None:
        """Write a result that can be made again: one that cannot be written is not kept."""
        try:
            self.keep(label, key, value)
        except StorageError as error:
            _logger.info("%s", error)

    def remembered(
        self,
        label: str,
        key: Mapping[str, Any],
        make: Callable[[], _Result],
        document: Callable[[_Result], Any],
    ) -> _Result:
        """Return a result, made and kept where there is none.

        Parameters
        ----------
        label, key
            What is asked for.
        make
            Makes it.
        document
            Returns it as JSON values.
        """
        result = self.load(label, key)
        if result is None:
            result = make()
            self.try_keep(label, key, document(result))
        return result


class ResultLog(Generic[_Result]):
    """Results by key, in memory and, with a path, in a file that every new one is added to at once.

    One JSON object a line. The first line says what the log is of; every other is a result and its key. What
    a crash leaves of the last line is dropped.

    Parameters
    ----------
    path
        The file; None keeps results in memory alone.
    what
        What the log is of, in words: ``trial``.
    head
        The first line's key for the version, and the version.
    run
        What tells the run from others.
    parse
        Makes a result from JSON; raises ValueError, TypeError or KeyError where it is none.
    read_only
        Leave the file as it is: another process may be writing to it.

    Raises
    ------
    InputError
        The file is no such log, or one of another run.
    DamagedError
        It is of a newer version.
    StorageError
        It cannot be read or written.
    """

    def __init__(
        self,
        path: Path | None,
        what: str,
        head: tuple[str, int],
        run: str,
        parse: Callable[[Any], _Result],
        *,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self._what, self._head, self._run, self._parse = what, head, run, parse
        self._results: dict[str, _Result] = {}
        self._lock = Lock()
        if path is not None:
            self._load(path, read_only=read_only)

    def __len__(self) -> int:
        return len(self._results)

    def values(self) -> tuple[_Result, ...]:
        """Return every result, in the order they were added."""
        return tuple(self._results.values())

    def get(self, key: str) -> _Result | None:
        """Return the result of a key; None where there is none."""
        return self._results.get(key)

    def put(self, key: str, result: _Result, document: Mapping[str, Any]) -> None:
        """Keep a result: on disk, as JSON values, when this returns.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        with self._lock:
            self._results[key] = result
            self._write({"key": key, **document})

    def _load(self, path: Path, *, read_only: bool) -> None:
        try:
            text = read_regular(path, _MAX_LOG_NBYTES)
        except FileNotFoundError:
            text = b""
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise self._refusal("it is too large") from error
            raise self._failure("read", error) from error
        if not text:
            self._write({self._head[0]: self._head[1], "run": self._run})
            return
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines()
        self._check_head(lines[0] if lines else text)
        for number, line in enumerate(lines[1:], start=2):
            try:
                values = json.loads(line)
                key = str(values.pop("key"))
                self._results[key] = self._parse(values)
            except (*_UNREADABLE, AttributeError) as error:
                _logger.warning(
                    "%s, line %d is no %s (%s): it is made again", path, number, self._what, error
                )
        if len(whole) < len(text) and not read_only:
            try:  # the next line must begin on a line of its own
                os.truncate(path, len(whole))
            except OSError as error:
                raise self._failure("mended", error) from error

    def _check_head(self, line: bytes) -> None:
        name, version = self._head
        try:
            head = json.loads(line)
            found, run = head[name], head["run"]
        except _UNREADABLE as error:
            raise self._refusal("its first line does not say so") from error
        if found != version:
            raise DamagedError(
                f"the {self._what} log is of another version",
                where=str(self.path),
                expected=str(version),
                found=str(found),
            )
        if run != self._run:
            raise InputError(
                f"this is the {self._what} log of another run",
                where=str(self.path),
                remedy="write to another file with -o, or remove the log",
            )

    def _write(self, document: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(open_regular(self.path, flags, follow=False), "ab") as file:  # noqa: PTH123
                file.write(json.dumps(document).encode() + b"\n")
        except OSError as error:
            raise self._failure("written", error) from error

    def _refusal(self, why: str) -> InputError:
        return InputError(
            f"this file is no {self._what} log: {why}",
            where=str(self.path),
            remedy="write to another file with -o",
        )

    def _failure(self, done: str, error: OSError) -> StorageError:
        return StorageError(f"the {self._what} log cannot be {done}: {error.strerror}", where=str(self.path))


class SharedLog:
    """JSON objects, a line each, that several processes add to; nothing is ever changed or taken out.

    Once the file would be too large it becomes ``NAME.older``, in the place of the one before, so that the
    newest are there and what is on disk is bounded; so is the number of logs in a folder.

    Parameters
    ----------
    path
        The file; made with the first object.
    most_nbytes
        Bytes of the file and, again, of the older one.
    """

    def __init__(self, path: Path, most_nbytes: int = _MAX_SHARED_NBYTES) -> None:
        self.path, self._most = path, most_nbytes
        self._older = path.with_name(f"{path.name}.older")

    def add(self, document: Mapping[str, Any]) -> None:
        """Add an object; whole, or not at all where it is too large.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        line = json.dumps(document).encode() + b"\n"
        if len(line) > self._most:
            _logger.info("%s: %d bytes are too many to be kept", self.path, len(line))
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent):
                self._make_room(len(line))
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
                with open(open_regular(self.path, flags, follow=False), "r+b", buffering=0) as file:  # noqa: PTH123
                    # What a crash left of the last line does not become part of this one.
                    if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                        line = b"\n" + line
                    while line:
                        line = line[file.write(line) or 0 :]
        except OSError as error:
            why = error.strerror or str(error)
            raise StorageError(f"the results cannot be written: {why}", where=str(self.path)) from error

    def _make_room(self, nbytes: int) -> None:
        """Put a file aside that would be too large, and remove the logs that nobody added to for longest."""
        if self.path.exists():
            if self.path.stat().st_size + nbytes > self._most:
                self.path.replace(self._older)
            return
        others = [one for one in self.path.parent.iterdir() if one.is_file() and not one.is_symlink()]
        for one in sorted(others, key=lambda one: -one.stat().st_mtime)[_MAX_SHARED:]:
            one.unlink(missing_ok=True)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield every object, the oldest first; what is none is passed over."""
        for path in (self._older, self.path):
            try:
                status = path.stat()
            except OSError:
                continue
            yield from _shared_rows(path, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _shared_rows(path: Path, inode: int, mtime_ns: int, nbytes: int) -> tuple[Mapping[str, Any], ...]:
    """Return the objects of a file as it was when it had this time and size."""
    rows: list[Mapping[str, Any]] = []
    try:
        text = read_regular(path, 2 * _MAX_SHARED_NBYTES)
    except OSError as error:
        _logger.info("%s cannot be read: %s", path, error)
        return ()
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except _UNREADABLE:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return tuple(rows)
