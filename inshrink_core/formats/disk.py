"""Bytes from files: counted, bounded, found only where they may be, and never a surprise from the system.

Names from an archive are untrusted too: none may lead outside the directory that is written to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from inshrink_core.errors import (
    DamagedError,
    NotFoundError,
    RefusedLinkError,
    StorageError,
    UnsafePathError,
    clipped,
)
from inshrink_core.execution.mirror import OPEN_AGAIN, Content, mirror_of

MAX_JSON_BYTES: Final = 256 << 20
"""A trainer_state.json of half a million logged steps is about 75 MB."""

MAX_VALUES: Final = 1 << 22
"""In a JSON or a CSV file: as objects they take some 700 MB, and four seconds."""

_LONGEST_INTEGER: Final = 300
"""Digits that are a float, too."""

_MAX_NAME_BYTES: Final = 255
"""NAME_MAX of every common file system."""

_DRIVE: Final = re.compile(r"^[A-Za-z]:")
_BLOB: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPOSITORY: Final = re.compile(r"(models|datasets|spaces)--.+")
_DIGITS: Final = re.compile(r"(\d+)")


CHANGED: Final = "the file changed since its header was read"


class ByteCounter:
    """Bytes read from disk so far, added up from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes read so far."""
        return self._total

    def add(self, n_bytes: int) -> None:
        """Count some more bytes."""
        with self._lock:
            self._total += n_bytes


class FileStamp(NamedTuple):
    """By what a file is known to be the same: where it really lies, its size and its time."""

    real_path: str
    nbytes: int
    mtime_ns: int


def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of a regular file, links followed.

    Raises
    ------
    NotFoundError
        There is no regular file at the path.
    StorageError
        The file system refuses.
    """
    try:
        found = path.stat()
        real_path = os.path.realpath(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError("there is no such file", where=str(path)) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"the file cannot be looked at: {error}", where=str(path)) from error
    if not stat.S_ISREG(found.st_mode):
        raise NotFoundError("not a regular file", where=str(path))
    return FileStamp(real_path, found.st_size, found.st_mtime_ns)


class ReadableFile:
    """An open file that is read by position; use it as a context manager.

    Parameters
    ----------
    path
        The file.
    counter
        Told of every byte read.
    unchanged
        Stamp the file must still have, so that an offset found earlier still means the same. The file it
        was taken of is opened, wherever a link in `path` may lead by now.

    Raises
    ------
    DamagedError
        The file changed since `unchanged`, or is shorter than a read wants.
    """

    def __init__(self, path: Path, counter: ByteCounter, unchanged: FileStamp | None = None) -> None:
        self.path, self.counter = path, counter
        # Not blocking: a pipe in the place of a checkpoint must not hang the reader.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        flags |= 0 if unchanged is None else getattr(os, "O_NOFOLLOW", 0)
        try:
            self._descriptor = os.open(path if unchanged is None else unchanged.real_path, flags)
        except FileNotFoundError as error:
            raise NotFoundError("there is no such file any more", where=str(path)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StorageError(f"the file cannot be opened: {reason}", where=str(path)) from error
        try:
            self.nbytes = self.require(unchanged, unchanged is None or self._is_at(unchanged.real_path))
        except BaseException:
            self.close()
            raise
        self._content = self._elsewhere(os.fspath(path) if unchanged is None else unchanged.real_path)

    def require(self, unchanged: FileStamp | None, is_there: bool = True) -> int:
        """Require that the open file is one, has a stamp, and lies where that says; return its size."""
        found = os.fstat(self._descriptor)
        if not is_there or (unchanged and (found.st_size, found.st_mtime_ns) != unchanged[1:]):
            raise DamagedError(CHANGED, where=str(self.path), remedy="open the run again")
        if not stat.S_ISREG(found.st_mode):
            raise NotFoundError("not a regular file", where=str(self.path))
        return found.st_size

    def _elsewhere(self, path: str) -> Content | None:
        """Return what fetches the bytes of a file that lies elsewhere, and read from that."""
        try:
            mirror = mirror_of(path)
            if mirror is None:
                return None
            content = mirror.content(path)
            self._require_at(path)
            os.dup2(content.descriptor, self._descriptor, inheritable=False)
        except BaseException:
            self.close()
            raise
        return content

    def _require_at(self, path: str) -> None:
        """Require that the open file is still the one of that path: another object has another."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(self._descriptor)):  # noqa: PTH116
                return
        raise DamagedError("the object changed while it was opened", where=path, remedy=OPEN_AGAIN)

    def expect(self, spans: Iterable[tuple[int, int]], *, compared: bool = True) -> None:
        """Say which bytes, each an offset and a size, are read soon: from elsewhere all come at once."""
        if self._content is not None:
            self._content.fill(spans, compared=compared)

    @property
    def is_elsewhere(self) -> bool:
        """Whether its bytes are fetched as they are read."""
        return self._content is not None

    def is_here(self, offset: int, n_bytes: int) -> bool:
        """Whether some bytes can be read without being fetched."""
        return self._content is None or self._content.is_here(offset, n_bytes)

    def promise(self, told: Iterable[tuple[int, bytes, int]]) -> None:
        """Say what lies somewhere, unread; what is read there, or up to an end, is compared first.

        Parameters
        ----------
        told
            Each an offset, the bytes there, and the end of what was found by them.
        """
        if self._content is not None:
            self._content.promised.take(told)

    def _is_at(self, real_path: str) -> bool:
        """Tell whether the open file lies where a path without links says."""
        try:
            # What Linux says of the open file cannot be changed behind it, as a path could.
            # Asked at every opening, and a path takes longer to make than the answer.
            return os.readlink(f"/proc/self/fd/{self._descriptor}") == real_path  # noqa: PTH115
        except OSError:
            return os.path.realpath(real_path) == real_path

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> ReadableFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, offset: int, n_bytes: int, *, compared: bool = True) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`; `compared` with what was promised of them."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.nbytes:
            expected, found = f"{n_bytes} bytes at offset {offset}", f"{self.nbytes} bytes in all"
            raise damaged(self, "the file is shorter than it says", expected=expected, found=found)
        self.expect([(offset, n_bytes)], compared=compared)
        if n_bytes <= 4096:
            # Thousands of these are read to open a run: no buffer, no loop.
            try:
                data = os.pread(self._descriptor, n_bytes, offset)
            except OSError as error:
                raise StorageError(f"reading failed: {error.strerror}", where=str(self.path)) from error
            if len(data) == n_bytes:
                self.counter.add(n_bytes)
                return data
        buffer = bytearray(n_bytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_runs(self, offset: int, n_bytes: int, apart: int, count: int) -> bytearray:
        """Return runs of bytes, one after the other, each `apart` bytes after the one before.

        What lies between them is read into the system's cache, if it is not there: whoever samples a file
        reads the whole of it later, and many small reads from a disk take longer than one large one.
        """
        span = (count - 1) * apart + n_bytes
        if offset < 0 or offset + span > self.nbytes:
            self.read(offset, span)  # says what is wrong
        places = range(offset, offset + count * apart, apart)
        self.expect((place, n_bytes) for place in places)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, offset, span, os.POSIX_FADV_WILLNEED)
            runs = [os.pread(self._descriptor, n_bytes, place) for place in places]
        except OSError as error:
            raise StorageError(f"reading failed: {error.strerror}", where=str(self.path)) from error
        found = bytearray().join(runs)
        if len(found) != count * n_bytes:
            raise DamagedError("the file ended while being read", where=str(self.path))
        self.counter.add(len(found))
        return found

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill a writable buffer of bytes from `offset`."""
        done, wanted = 0, len(target)
        self.expect([(offset, wanted)])
        while done < wanted:
            try:
                # One read is at most 2 GiB on Linux; 256 MiB keeps other systems' limits away too.
                part = os.preadv(self._descriptor, [target[done : done + (256 << 20)]], offset + done)
            except OSError as error:
                raise StorageError(f"reading failed: {error.strerror}", where=str(self.path)) from error
            if part == 0:
                raise DamagedError("the file ended while being read", where=str(self.path))
            done += part
        self.counter.add(wanted)


_MOST_IDLE: Final = 16
"""Files that stay open between reads: as many as threads read different ones of."""

_idle: list[tuple[FileStamp, ReadableFile]] = []
_n_holding = 0
_lock = threading.Lock()


@contextlib.contextmanager
def holding_files() -> Iterator[None]:
    """Leave files open between reads (`reading`) while the context is open, in any thread.

    To open a file, and to make sure that it is the one whose header was read, takes longer than to read a
    small tensor.
    """
    global _n_holding
    with _lock:
        _n_holding += 1
    try:
        yield
    finally:
        with _lock:
            _n_holding -= 1
            closed = [] if _n_holding else _idle.copy()
            del _idle[: len(closed)]
        for _, file in closed:
            file.close()


@contextlib.contextmanager
def reading(path: Path, counter: ByteCounter, unchanged: FileStamp) -> Iterator[ReadableFile]:
    """Give an open file, as `ReadableFile` opens it, or one that was left open and has not changed since."""
    with _lock:
        alike = (item for item in _idle if item[0] == unchanged and item[1].counter is counter)
        left = next(alike, None)
        if left is not None:
            _idle.remove(left)
    file = ReadableFile(path, counter, unchanged) if left is None else left[1]
    try:
        if left is not None:
            file.require(unchanged)
        yield file
    except BaseException:
        file.close()
        raise
    with _lock:
        closed = [file]
        if _n_holding and not file.is_elsewhere:
            _idle.append((unchanged, file))
            closed = [_idle.pop(0)[1]] if len(_idle) > _MOST_IDLE else []
    for item in closed:
        item.close()


class Readable(Protocol):
    """What a file is to whoever reads its records."""

    path: Path
    nbytes: int

    def read(self, offset: int, n_bytes: int, *, compared: bool = True) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`; `compared` with what was promised of them."""
        ...

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:
        """Say which bytes will be read soon."""
        ...


def damaged(file: Readable, what: str, **facts: str) -> DamagedError:
    """Return the error of a file that contradicts itself."""
    remedy = "it may be half-written: wait, or restore it from a backup"
    return DamagedError(what, where=str(file.path), remedy=remedy, **facts)


class Window:
    """Some bytes of an open file, read as a file."""

    def __init__(self, file: Readable, offset: int, nbytes: int) -> None:
        self.path, self.nbytes = file.path, nbytes
        self._file, self._offset = file, offset

    def read(self, offset: int, n_bytes: int, *, compared: bool = True) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.nbytes:
            what = f"a zip of {self.nbytes} bytes within the file is shorter than it says"
            raise DamagedError(what, where=str(self.path))
        return self._file.read(self._offset + offset, n_bytes, compared=compared)

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:
        """Say which bytes will be read soon: who reads the file has said so."""


class Fate(StrEnum):
    """What becomes of a tensor file when its run is archived."""

    STEP = "step"
    """Archived as a step of the run, or as a part of one."""
    AUXILIARY = "auxiliary"
    """Archived with a step: optimizer state, scaler, moving average."""
    BRANCH = "branch"
    """Archived under a name of its own, such as ``best``, beside the steps."""
    DUPLICATE = "duplicate"
    """Equal, bit for bit, to files of a step or of a branch."""
    EXCLUDED = "excluded"
    """Not asked for: by the steps, the step pattern or ``--skip-damaged``, or pruned from the archive."""
    PENDING = "pending"
    """Still being written."""
    OTHER_MODEL = "other model"
    """The file of another model, whose names or shapes differ."""
    UNREADABLE = "unreadable"
    """Damaged, or in a form that cannot be read."""
    LEFT_OUT = "left out"
    """Readable, of the same model, and archived nowhere."""


_LOST: Final = (Fate.UNREADABLE, Fate.LEFT_OUT)


class Skipped(NamedTuple):
    """A file or directory that is no step of the run, or not part of one, and why.

    Parameters
    ----------
    path, reason
        The file or directory, and why it was passed over.
    fate
        None if it holds no tensors of the run.
    step
        Step in the name of an unreadable checkpoint, or the step that a duplicate equals.
    identity
        Digest of path, size and time of an unreadable checkpoint.
    name
        Name of a branch.
    """

    path: str
    reason: str
    fate: Fate | None = None
    step: int | None = None
    identity: str = ""
    name: str = ""

    @property
    def unreadable(self) -> bool:
        """Whether tensors of the run are lost with it: it is unreadable or left out."""
        return self.fate in _LOST

    def to_json(self) -> dict[str, Any]:
        """Return the row of the documents of the command line."""
        return {"path": self.path, "step": self.step, "reason": self.reason}


def is_file(path: Path | os.DirEntry[str]) -> bool:
    """Tell whether a path leads to a regular file; a path that cannot be looked at does not."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a path that is too long


def is_dir(path: Path | os.DirEntry[str]) -> bool:
    """Tell whether a path leads to a directory; a path that cannot be looked at does not."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a path that is too long


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What opening a run may read, and who counts the bytes.

    Parameters
    ----------
    root
        Real path that links may lead into: the directory of the run.
    counter
        Told of every byte read.
    follow_links
        Follow links wherever they lead.
    allow_damaged
        Take files that do not match their own checksums.
    within
        Further real paths that links may lead into.
    """

    root: str
    counter: ByteCounter = field(default_factory=ByteCounter)
    follow_links: bool = False
    allow_damaged: bool = False
    within: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path, *, within: Sequence[str] = (), **options: Any) -> Access:
        """Return the access to a directory, which may be a link itself: that was the user's choice."""
        return cls(root=os.path.realpath(path), within=tuple(map(os.path.realpath, within)), **options)

    def admits(self, path: str | os.PathLike[str], real: str | None = None) -> bool:
        """Tell whether a path leads somewhere that may be read; `real` is where, if that is known."""
        if self.follow_links:
            return True
        real = os.path.realpath(path) if real is None else real
        if any(is_within(real, root) for root in (self.root, *self.within)):
            return True
        return any(is_blob(real, root) for root in (self.root, os.path.realpath(Path(path).parent)))

    def admit(self, path: Path) -> FileStamp:
        """Return the stamp of a file, by which it is opened; refuse a path that leads out of the run.

        Raises
        ------
        RefusedLinkError
            It does.
        NotFoundError
            There is no regular file.
        """
        if not self.admits(path):
            what = f"a link out of the run, to '{clipped(os.path.realpath(path), 200)}'"
            remedy = "if you trust it, follow it: --follow-links, follow_links=True"
            raise RefusedLinkError(what, where=str(path), remedy=remedy)
        stamp = stamp_of(path)
        if not self.admits(path, stamp.real_path):
            raise RefusedLinkError("a link that changed while it was looked at", where=str(path))
        return stamp

    def read_text(self, path: Path, max_nbytes: int) -> bytes:
        """Return the content of a small file.

        Raises
        ------
        DamagedError
            It is larger than allowed.
        RefusedLinkError
            It lies outside of the run.
        """
        with ReadableFile(path, self.counter, self.admit(path)) as file:
            if file.nbytes > max_nbytes:
                facts = {"expected": f"at most {max_nbytes} bytes", "found": f"{file.nbytes} bytes"}
                raise DamagedError("the file is too large", where=str(path), **facts)
            return file.read(0, file.nbytes)

    def read_json(self, path: Path) -> Any:
        """Return the content of a JSON file.

        Raises
        ------
        DamagedError
            It is larger than 256 MB, or no JSON.
        RefusedLinkError
            It lies outside of the run.
        """
        return parse_json(self.read_text(path, MAX_JSON_BYTES), str(path))

    def skipped(self, path: str | os.PathLike[str]) -> Skipped:
        """Return the row of a link that was not followed."""
        target = clipped(os.path.realpath(path), 200)
        reason = f"a link out of the run, to '{target}', not followed without --follow-links"
        return Skipped(os.fspath(path), reason)

    def walk(self, root: Path, skipped: list[Skipped]) -> Iterator[Path]:
        """Yield the paths of the files below a directory; linked directories are followed once."""
        seen = {os.path.realpath(root)}
        todo = [root]
        while todo:
            folder = todo.pop()
            inner = []
            for path in sorted(Path(entry.path) for entry in scan(folder)):
                if not is_dir(path):
                    yield path
                    continue
                if path.is_symlink():
                    if not self.admits(path):
                        skipped.append(self.skipped(path))
                        continue
                    real = os.path.realpath(path)
                    if real in seen or any(is_within(item, real) for item in seen):
                        skipped.append(Skipped(str(path), "a link to a directory that is read already"))
                        continue
                    seen.add(real)
                inner.append(path)
            todo += reversed(inner)


def parse_json(text: bytes, where: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the content of JSON that somebody wrote.

    Parameters
    ----------
    text
        The bytes.
    where
        The file, for messages.
    hook
        Makes an object of its pairs; by default a dict.

    Raises
    ------
    DamagedError
        It is no JSON, nested too deeply, has more than four million values or an integer of more than 300
        digits.
    """
    # Counted before anything is allocated for them: three bytes can be an object of sixty-four.
    if sum(text.count(sign) for sign in (b",", b"[", b"{")) > MAX_VALUES:
        expected = f"at most {MAX_VALUES:,}"
        raise DamagedError("it has more values than are read", where=where, expected=expected)
    try:
        return json.loads(text, object_pairs_hook=hook, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no valid JSON ({str(error)[:80]})", where=where) from error


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def scan(folder: Path) -> list[os.DirEntry[str]]:
    """Return what lies in a directory, in natural order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: natural_key(entry.name))
    except OSError as error:
        raise StorageError(f"the directory cannot be read: {error.strerror}", where=str(folder)) from error


def is_within(real: str, root: str) -> bool:
    """Tell whether a real path is a directory or lies in it."""
    return real == root or real.startswith(root if root.endswith(os.sep) else root + os.sep)


def is_blob(real: str, folder: str) -> bool:
    """Tell whether a file is a blob of the Hugging Face cache whose snapshot a folder is, or lies in.

    The layout is ``models--NAME/snapshots/REVISION/…`` with links to ``models--NAME/blobs/DIGEST``.
    """
    blob = Path(real)
    repository = blob.parent.parent
    if blob.parent.name != "blobs" or not _BLOB.fullmatch(blob.name):
        return False
    snapshots = str(repository / "snapshots")
    return (
        bool(_REPOSITORY.fullmatch(repository.name)) and folder != snapshots and is_within(folder, snapshots)
    )


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders ``step-9`` before ``step-10``."""
    return tuple(
        (0, int(part[:4000]), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )


def _reason(name: str) -> str | None:
    """Return why a relative POSIX path is not safe to write, or None."""
    parts = name.split("/")
    odd = next((part for part in parts if part in ("", ".", "..")), None)
    reasons = {
        "it is empty": not name,
        "it is no UTF-8": any("\ud800" <= sign <= "\udfff" for sign in name),
        "it holds a control sign": any(ord(sign) < 32 for sign in name),
        "it holds a backslash": "\\" in name,
        "it is absolute": name.startswith("/"),
        "it names a drive": _DRIVE.match(name) is not None,
        f"it has the component '{odd}'": odd is not None,
        "a component is too long": any(len(p.encode(errors="replace")) > _MAX_NAME_BYTES for p in parts),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def unsafe_names(names: Iterable[str]) -> dict[str, str]:
    """Return the relative paths that must not be written, each with the reason.

    Parameters
    ----------
    names
        POSIX paths relative to the target; earlier ones are kept where two collide.

    Examples
    --------
    >>> unsafe_names(["README.md", "Readme.md", "a/../b"])
    {'Readme.md': "it would overwrite 'README.md'", 'a/../b': "it has the component '..'"}
    """
    remaining: dict[str, str] = {}
    folders: dict[str, str] = {}
    found: dict[str, str] = {}
    for name in names:
        folded = name.casefold()
        parts = folded.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts))]
        reason = _reason(name)
        if reason is None and folded in remaining:
            reason = f"it would overwrite '{remaining[folded]}'"
        if reason is None and (
            inside := folders.get(folded) or next((p for p in above if p in remaining), None)
        ):
            reason = f"'{inside}' and it cannot be a file and a directory at once"
        if reason is not None:
            found[name] = reason
            continue
        remaining[folded] = name
        folders.update(dict.fromkeys(above, name))
    return found


def check_names(names: Iterable[str], where: str = "") -> None:
    """Refuse relative paths that could be written outside their directory, or over one another.

    Parameters
    ----------
    names
        POSIX paths relative to the target.
    where
        The archive, for messages.

    Raises
    ------
    UnsafePathError
        One is absolute, holds ``..``, a drive letter, a backslash or a control sign, has an empty
        component, or occurs twice (upper and lower case taken as one, as some file systems do).

    Examples
    --------
    >>> check_names(["model.safetensors", "side/config.json"])
    """
    for name, reason in unsafe_names(names).items():
        raise UnsafePathError(f"the file name {name[:200]!r} is not safe to write: {reason}", where=where)


def check_target(directory: Path, name: str) -> Path:
    """Return where a checked name is written, refusing links on the way.

    Raises
    ------
    UnsafePathError
        A component below `directory` is a symbolic link, or a file where a directory must be.
    """
    path = directory
    parts = name.split("/")
    for n, part in enumerate(parts):
        path = path / part
        if path.is_symlink():
            raise UnsafePathError("the target is a symbolic link", where=str(path), remedy="remove the link")
        if n < len(parts) - 1 and path.exists() and not path.is_dir():
            raise UnsafePathError("a file is where a directory must be", where=str(path))
        if n == len(parts) - 1 and path.is_dir():
            raise UnsafePathError("a directory is where a file must be", where=str(path))
    return path
