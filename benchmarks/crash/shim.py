"""The library between a process and its files (`shim.c`): built, armed in a child, and its log read."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

SOURCE = Path(__file__).with_name("shim.c")
REGION_NBYTES = 1 << 25
_HEAD = struct.Struct("<4Q")
_RECORD = struct.Struct("<IIqqqII")


class Kind(IntEnum):
    """Operations on files, as `shim.c` numbers them; CREATE is an OPEN that makes the file."""

    OPEN = 1
    WRITE = 2
    FSYNC = 3
    RENAME = 4
    LINK = 5
    UNLINK = 6
    RMDIR = 7
    MKDIR = 8
    TRUNCATE = 9
    CLOSE = 10
    LOCK = 11
    NOTE = 12
    CREATE = 13


class Strike(IntEnum):
    """What happens at the operation that is struck."""

    LOG = 0
    KILL_BEFORE = 1
    KILL_AMID = 2
    KILL_AFTER = 3
    FAIL_ONCE = 4
    FAIL_ON = 5
    FAIL_THEN_READ_ONLY = 6
    SHORT = 7


@dataclass(frozen=True, slots=True)
class Plan:
    """Which operation is struck, and how; by default none."""

    strike: Strike = Strike.LOG
    at: int = 0
    error: int = 0
    kinds: frozenset[Kind] = frozenset()

    @property
    def name(self) -> str:
        """What it is called in a report."""
        error = f" {errno.errorcode[self.error]}" if self.error else ""
        return f"{self.strike.name.lower().replace('_', ' ')}{error} at operation {self.at}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a log; `a` and `b` are descriptor, flags, offset or length, by kind."""

    kind: Kind
    result: int
    a: int
    b: int
    path: str
    other: str
    data: bytes


class NoShimError(Exception):
    """The shim cannot be built or loaded here; the message says why."""


def build() -> Path:
    """Return the compiled shim, kept under a name that tells its source.

    Raises
    ------
    NoShimError
        There is no C compiler, or it refuses.
    """
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoShimError("no C compiler (cc, gcc or clang): the harness needs one for its shim")
    digest = sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"inshrink-crash-{os.getuid()}-{digest}.so"
    if library.exists() and library.stat().st_uid == os.getuid():
        return library
    fresh = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(fresh), str(SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoShimError(f"the shim cannot be compiled: {done.stderr.strip()[:300]}")
    fresh.replace(library)
    return library


class Shim:
    """The shim of this process, and the memory that it logs to."""

    current: ClassVar[Shim]

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "crash_arm"):
            raise NoShimError("the shim is not loaded: start with LD_PRELOAD")
        self._region = mmap.mmap(-1, REGION_NBYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        Shim.current = self

    def arm(self, root: Path, plan: Plan) -> None:
        """Begin to log, and to strike as planned; in this process alone, not in its children."""
        self._library.crash_arm(
            ctypes.c_void_p(self._address),
            ctypes.c_size_t(REGION_NBYTES),
            os.fsencode(root),
            int(plan.strike),
            ctypes.c_uint64(plan.at),
            plan.error,
            ctypes.c_uint32(sum(1 << kind for kind in plan.kinds)),
        )

    def disarm(self) -> None:
        """End it."""
        self._library.crash_disarm()

    def note(self, text: str) -> None:
        """Put what the verb has promised by now into the log."""
        self._library.crash_note(text.encode())

    def clear(self) -> None:
        """Forget the log; to be called before a child is started."""
        _HEAD.pack_into(self._region, 0, 0, 0, 0, 0)

    @property
    def count(self) -> int:
        """Number of operations that could be struck."""
        return self._head()[1]

    @property
    def fired(self) -> int:
        """Number of the operation that was struck first; 0 if none was."""
        return self._head()[2]

    def _head(self) -> tuple[int, int, int, int]:
        head: tuple[int, int, int, int] = _HEAD.unpack_from(self._region)
        if head[3]:
            raise RuntimeError("a case wrote more than the log can hold")
        return head

    def log(self) -> Iterator[Operation]:
        """Yield the operations and notes, in order."""
        at, end = _HEAD.size, _HEAD.size + self._head()[0]
        while at < end:
            nbytes, kind, result, a, b, n_first, _ = _RECORD.unpack_from(self._region, at)
            first = self._region[at + _RECORD.size : at + _RECORD.size + n_first]
            second = self._region[at + _RECORD.size + n_first : at + nbytes]
            two_paths = kind in (Kind.RENAME, Kind.LINK)
            yield Operation(
                Kind(kind),
                result,
                a,
                b,
                os.fsdecode(first),
                os.fsdecode(second) if two_paths else "",
                b"" if two_paths else second,
            )
            at += nbytes

    def notes(self) -> tuple[str, ...]:
        """Return what the verb had promised."""
        return tuple(operation.path for operation in self.log() if operation.kind is Kind.NOTE)
