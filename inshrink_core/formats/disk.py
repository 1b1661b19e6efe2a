"""Safe file access: counted and bounded reads, link checks, and checks of file names from archives.

All errors of the system become errors of Inshrink. Names from an archive are untrusted and must not lead
outside the target directory.
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
from inshrink_core.execution.files import Closing, open_regular
from inshrink_core.execution.mirror import OPEN_AGAIN, Content, mirror_of
from inshrink_core.execution.resources import new_buffer

MAX_JSON_BYTES: Final = 256 << 20
"""A trainer_state.json with half a million logged steps takes about 75 MB."""

MAX_VALUES: Final = 1 << 22
"""Limit for values in a JSON or CSV file: as objects they take about 700 MB and four seconds."""

_LONGEST_INTEGER: Final = 300
"""Limit for the digits of an integer, chosen so that it fits a float."""

_MAX_NAME_BYTES: Final = 255
"""NAME_MAX of every common file system."""

_DRIVE: Final = re.compile(r"^[A-Za-z]:")
_BLOB: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPOSITORY: Final = re.compile(r"(models|datasets|spaces)--.+")
_DIGITS: Final = re.compile(r"(\d+)")


CHANGED: Final = "the file changed since its header was read"


class ByteCounter:
    """A thread-safe counter of bytes read from disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, n_bytes: int) -> None:
        """Add a number of bytes."""
        with self._lock:
            self.total += n_bytes


class FileStamp(NamedTuple):
    """The identity of a file: real path, size in bytes and modification time in nanoseconds."""

    real_path: str
    nbytes: int
    mtime_ns: int


def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of a regular file; links are followed.

    Raises
    ------
    NotFoundError
        The path has no regular file.
    StorageError
        The file system refuses access.
    """
    try:
        found = path.stat()
        real_path = os.path.realpath(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError("there is no such file", where=str(path)) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"the file cannot be inspected: {error}", where=str(path)) from error
    if not stat.S_ISREG(found.st_mode):
        raise NotFoundError("not a regular file", where=str(path))
    return FileStamp(real_path, found.st_size, found.st_mtime_ns)


class ReadableFile(Closing):
    """An open file with positioned reads; use it as a context manager.

    Parameters
    ----------
    path
        The file.
    counter
        Counts every byte read.
    unchanged
        Stamp that the file must still have, so that earlier offsets remain valid. Its real path is
        opened, even if a link in `path` now leads elsewhere.

    Raises
    ------
    NotFoundError
        The file no longer exists.
    StorageError
        The system refused, or the path no longer has a regular file.
    DamagedError
        The file changed since `unchanged`, or is shorter than a read requires.
    """

    def __init__(self, path: Path, counter: ByteCounter, unchanged: FileStamp) -> None:
        self.path, self.counter, self.nbytes = path, counter, unchanged.nbytes
        try:
            self._descriptor = open_regular(unchanged.real_path, follow=False)
        except FileNotFoundError as error:
            raise NotFoundError("there is no such file any more", where=str(path)) from error
        except OSError as error:
            raise StorageError(f"the file cannot be opened: {error.strerror}", where=str(path)) from error
        try:
            self._require(unchanged)
            self._content = self._elsewhere(unchanged.real_path)
        except BaseException:
            self.close()
            raise

    def _require(self, unchanged: FileStamp) -> None:
        """Check that the open file matches a stamp and is still at its path."""
        found = os.fstat(self._descriptor)
        if not self._is_at(unchanged.real_path) or (found.st_size, found.st_mtime_ns) != unchanged[1:]:
            raise DamagedError(CHANGED, where=str(self.path), remedy=OPEN_AGAIN)

    def _elsewhere(self, path: str) -> Content | None:
        """Return the block cache's content of a remote file and redirect the descriptor to it."""
        mirror = mirror_of(path)
        if mirror is None:
            return None
        content = mirror.content(path)
        self._require_at(path)
        os.dup2(content.descriptor, self._descriptor, inheritable=False)
        return content

    def _require_at(self, path: str) -> None:
        """Check that the path still refers to the open file: a replaced object has a different one."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(self._descriptor)):  # noqa: PTH116
                return
        raise DamagedError("the object changed while it was opened", where=path, remedy=OPEN_AGAIN)

    def expect(self, spans: Iterable[tuple[int, int]], *, compared: bool = True) -> None:
        """Prefetch spans (offset, size) that are read soon; a remote file fetches them in one batch."""
        if self._content is not None:
            self._content.fill(spans, compared=compared)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the file is remote, so that its bytes are fetched when read."""
        return self._content is not None

    def is_here(self, offset: int, n_bytes: int) -> bool:
        """Return whether a span of bytes can be read without fetching it."""
        return self._content is None or self._content.is_here(offset, n_bytes)

    def assume(self, ranges: Iterable[tuple[int, bytes, int]]) -> None:
        """Register expected bytes; reads at an offset, or up to an end, are first compared with them.

        Parameters
        ----------
        ranges
            Tuples of an offset, the expected bytes there, and the end of the data that they describe.
        """
        if self._content is not None:
            self._content.assumed[:] = sorted(ranges)

    def _is_at(self, real_path: str) -> bool:
        """Return whether the open file is at a path without links."""
        try:
            # The kernel's link cannot be swapped by another process, unlike a path. It is also faster than
            # resolving the path, and this check runs at every opening.
            return os.readlink(f"/proc/self/fd/{self._descriptor}") == real_path  # noqa: PTH115
        except OSError:
            return os.path.realpath(real_path) == real_path

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, offset: int, n_bytes: int, *, compared: bool = True) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`, `compared` with bytes registered for that span."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.nbytes:
            expected, found = f"{n_bytes} bytes at offset {offset}", f"{self.nbytes} bytes in all"
            raise damaged(self, "the file is shorter than its records need", expected=expected, found=found)
        self.expect([(offset, n_bytes)], compared=compared)
        if n_bytes <= 4096:
            # Opening a run does thousands of small reads: avoid the buffer and the loop.
            try:
                data = os.pread(self._descriptor, n_bytes, offset)
            except OSError as error:
                raise self._failed(error) from error
            if len(data) == n_bytes:
                self.counter.add(n_bytes)
                return data
        return bytes(self.read_buffer(offset, n_bytes, compared=compared))

    def read_runs(self, offsets: range, n_bytes: int) -> bytearray:
        """Return short runs of `n_bytes` at ascending offsets, joined.

        The system reads the whole span into its page cache. A sampled file is read completely later, and many
        small reads from a disk take longer than one large read.
        """
        self.expect((offset, n_bytes) for offset in offsets)
        with contextlib.suppress(AttributeError, OSError):
            nbytes = offsets[-1] - offsets[0] + n_bytes
            os.posix_fadvise(self._descriptor, offsets[0], nbytes, os.POSIX_FADV_WILLNEED)
        with contextlib.suppress(OSError):  # `read` raises it again, with the file's name
            data = bytearray().join(os.pread(self._descriptor, n_bytes, offset) for offset in offsets)
            if len(data) == n_bytes * len(offsets):
                self.counter.add(len(data))
                return data
        return bytearray().join(self.read(offset, n_bytes) for offset in offsets)

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"reading failed: {error.strerror}", where=str(self.path))

    def read_buffer(self, offset: int, n_bytes: int, *, compared: bool = True) -> memoryview:
        """Return bytes like `read`, in a new writable buffer."""
        self.expect([(offset, n_bytes)], compared=compared)
        target, done = new_buffer(n_bytes), 0
        while done < n_bytes:
            try:
                # Linux limits one read to 2 GiB; 256 MiB also stays below the limits of other systems.
                part = os.preadv(self._descriptor, [target[done : done + (256 << 20)]], offset + done)
            except OSError as error:
                raise self._failed(error) from error
            if part == 0:
                raise DamagedError("the file ended while being read", where=str(self.path))
            done += part
        self.counter.add(n_bytes)
        return target


class Readable(Protocol):
    """The interface for reading the records of a file."""

    path: Path
    nbytes: int

    def read(self, offset: int, n_bytes: int, *, compared: bool = True) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`, `compared` with bytes registered for that span."""
        ...


def damaged(file: Readable, what: str, **facts: str) -> DamagedError:
    """Return the error for a file whose parts contradict each other."""
    remedy = "it may be half-written: wait, or restore it from a backup"
    return DamagedError(what, where=str(file.path), remedy=remedy, **facts)


def missing(folder: Path, name: str) -> DamagedError:
    """Return the error for a checkpoint in a folder that lacks one of its files."""
    remedy = "the checkpoint may be half-written: wait, or fetch the rest"
    return DamagedError(f"the file '{clipped(name)}' is missing", where=str(folder), remedy=remedy)


class Window:
    """A span of bytes of an open file, readable as a file."""

    def __init__(self, file: Readable, offset: int, nbytes: int) -> None:
        self.path, self.nbytes = file.path, nbytes
        self._file, self._offset = file, offset

    def read(self, offset: int, n_bytes: int, *, compared: bool = True) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.nbytes:
            what = f"a zip of {self.nbytes} bytes within the file is shorter than its records need"
            raise DamagedError(what, where=str(self.path))
        return self._file.read(self._offset + offset, n_bytes, compared=compared)


class Fate(StrEnum):
    """The fate of a tensor file when its run is archived."""

    STEP = "step"
    """Archived as a step of the run, or as a part of one."""
    AUXILIARY = "auxiliary"
    """Archived with a step: optimizer state, scaler, moving average."""
    BRANCH = "branch"
    """Archived under a name beside the steps, such as ``best``."""
    DUPLICATE = "duplicate"
    """Equal, bit for bit, to files of a step or of a branch."""
    EXCLUDED = "excluded"
    """Not requested: excluded by steps, step pattern or ``--skip-damaged``, or pruned from the archive."""
    PENDING = "pending"
    """Still being written."""
    OTHER_MODEL = "other model"
    """A file of another model, with different names or shapes."""
    UNREADABLE = "unreadable"
    """Damaged, or in an unsupported form."""
    LEFT_OUT = "left out"
    """Readable, and of the same model or named like a step, but not archived."""


class Skipped(NamedTuple):
    """A file or directory that is no step of the run, or no part of one, and the reason.

    Parameters
    ----------
    path, reason
        The file or directory, and why it was passed over.
    fate
        Its fate; None if it holds no tensors of the run.
    step
        The step in the name of an unreadable checkpoint, or the step that a duplicate equals.
    identity
        Digest of path, size and modification time of an unreadable checkpoint.
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
        """Whether tensors of the run are lost: the file is unreadable or left out."""
        return self.fate in (Fate.UNREADABLE, Fate.LEFT_OUT)

    def to_json(self) -> dict[str, Any]:
        """Return the row for the JSON output of the command line.

        Returns
        -------
        path : str
            File or folder.
        step : int?
            Training step.
        reason : str
            Why it cannot be read or was left out.
        """
        return {"path": self.path, "step": self.step, "reason": self.reason}


def is_file(path: Path | os.DirEntry[str]) -> bool:
    """Return whether a path leads to a regular file; False if the path cannot be examined."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a path that is too long


def is_dir(path: Path | os.DirEntry[str]) -> bool:
    """Return whether a path leads to a directory; False if the path cannot be examined."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a path that is too long


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The access rights for reading a run, and its byte counter.

    Parameters
    ----------
    root
        Real path of the run's directory; links may lead into it.
    counter
        Counts every byte read.
    follow_links
        Follow all links.
    allow_damaged
        Accept files that do not match their own checksums.
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
        """Return the access to a directory, which may itself be a link because the user chose it."""
        return cls(root=os.path.realpath(path), within=tuple(map(os.path.realpath, within)), **options)

    def admits(self, path: str | os.PathLike[str], real: str | None = None) -> bool:
        """Return whether a path leads to a readable location; `real` is its real path, if known."""
        if self.follow_links:
            return True
        real = os.path.realpath(path) if real is None else real
        if any(is_within(real, root) for root in (self.root, *self.within)):
            return True
        return any(is_blob(real, root) for root in (self.root, os.path.realpath(Path(path).parent)))

    def admit(self, path: Path) -> FileStamp:
        """Return the stamp for opening a file; refuse a path that leads out of the run.

        Raises
        ------
        RefusedLinkError
            The path leads out of the run.
        NotFoundError
            The path has no regular file.
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
            It is larger than `max_nbytes`.
        RefusedLinkError
            It is outside the run.
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
            It is larger than 256 MB or not valid JSON.
        RefusedLinkError
            It is outside the run.
        """
        return parse_json(self.read_text(path, MAX_JSON_BYTES), str(path))

    def skipped(self, path: str | os.PathLike[str]) -> Skipped:
        """Return the row of a link that is not followed."""
        target = clipped(os.path.realpath(path), 200)
        reason = f"a link out of the run, to '{target}', not followed without --follow-links"
        return Skipped(os.fspath(path), reason)

    def walk(self, root: Path, skipped: list[Skipped]) -> Iterator[Path]:
        """Yield the paths of all files below a directory; each linked directory is followed once."""
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
    """Return the content of untrusted JSON.

    Parameters
    ----------
    text
        The bytes.
    where
        The file, for messages.
    hook
        Makes an object of its list of pairs; by default a dict.

    Raises
    ------
    DamagedError
        It is not valid JSON, is nested too deeply, has more than four million values, or has an integer of
        more than 300 digits.
    """
    # Count values before parsing allocates memory: three bytes can become an object of 64 bytes.
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
    """Return the entries of a directory in natural order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: natural_key(entry.name))
    except OSError as error:
        raise StorageError(f"the directory cannot be read: {error.strerror}", where=str(folder)) from error


def is_within(real: str, root: str) -> bool:
    """Return whether a real path is `root` or inside it."""
    return real == root or real.startswith(root if root.endswith(os.sep) else root + os.sep)


def is_blob(real: str, folder: str) -> bool:
    """Return whether a file is a Hugging Face cache blob, and `folder` is in a snapshot of the same cache.

    The layout is ``models--NAME/snapshots/REVISION/…`` with links to ``models--NAME/blobs/DIGEST``.
    """
    blob = Path(real)
    repository, snapshots = blob.parent.parent, str(blob.parent.parent / "snapshots")
    is_named = _BLOB.fullmatch(blob.name) is not None and _REPOSITORY.fullmatch(repository.name) is not None
    is_snapshot = folder != snapshots and is_within(folder, snapshots)
    return blob.parent.name == "blobs" and is_named and is_snapshot


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that places ``step-9`` before ``step-10``."""
    return tuple(
        (0, int(part[:4000]), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )


def _reason(name: str) -> str | None:
    """Return the reason why a relative POSIX path is unsafe to write, or None."""
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
        POSIX paths relative to the target; if two collide, the later one is unsafe.

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
        inside = folders.get(folded) or next((p for p in above if p in remaining), None)
        if reason is None and inside:
            reason = f"'{inside}' and it cannot be a file and a directory at once"
        if reason is not None:
            found[name] = reason
            continue
        remaining[folded] = name
        folders.update(dict.fromkeys(above, name))
    return found


def check_names(names: Iterable[str], where: str = "") -> None:
    """Refuse relative paths that would be written outside their directory or overwrite each other.

    Parameters
    ----------
    names
        POSIX paths relative to the target.
    where
        The archive, for messages.

    Raises
    ------
    UnsafePathError
        A path is absolute, contains ``..``, a drive letter, a backslash or a control character, has an empty
        component, or occurs twice (ignoring case, as some file systems do).

    Examples
    --------
    >>> check_names(["model.safetensors", "side/config.json"])
    """
    for name, reason in unsafe_names(names).items():
        raise UnsafePathError(f"the file name {name[:200]!r} is not safe to write: {reason}", where=where)


def check_target(directory: Path, name: str) -> Path:
    """Return the target path of a checked name; refuse links on the way.

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
