"""Measure available memory and disk space, and refuse work that needs more before it allocates any."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inshrink_core.errors import TooLargeError
from inshrink_core.text import format_size

_UNCHECKED_NBYTES: Final = 64 << 20
"""Available on any machine that runs PyTorch: measuring memory takes longer than using this much."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")

_GROUP_FILES: Final = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of a memory control group, and the field of reclaimable memory; version 2, then version 1."""


def memory_available() -> int | None:
    """Return how many more bytes this process may allocate; None if unknown.

    Notes
    -----
    The minimum of the system's available memory without swapping, and the memory left in the process's
    control groups (version 1 or 2, and their ancestors).
    """
    found = [_system_memory(), *_group_memory()]
    known = [max(0, nbytes) for nbytes in found if nbytes is not None]
    return min(known, default=None)


def new_buffer(nbytes: int) -> memoryview:
    """Return a writable buffer of undefined content; unwritten pages take no memory."""
    import numpy as np

    return np.empty(nbytes, np.uint8).data


def free_disk(folder: Path) -> int:
    """Return the free bytes of a folder's file system; the folder need not exist."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _number(path: Path) -> int | None:
    """Read a file with one number; None for other content, such as ``max`` of an unlimited group."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                fields[words[0]] = int(words[1])
    return fields


def _system_memory() -> int | None:
    """Return the kernel's available memory, or on other systems the total memory."""
    fields = _fields(_PROC / "meminfo")
    if "MemAvailable" in fields:
        return fields["MemAvailable"] << 10
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _group_memory() -> Iterator[int | None]:
    """Yield the memory left in each control group of the process; reclaimable page cache counts as free."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        kind = "memory" if controllers else ""  # version 2 has no list of controllers
        if kind not in controllers.split(","):
            continue
        names, root = _GROUP_FILES[kind], _CGROUPS / kind
        # In a container the path may be the host's, of which only the root is visible.
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if folder.is_relative_to(root) and limit is not None and used is not None:
                yield limit - used + _fields(folder / "memory.stat").get(names[2], 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for decoding and writing.

    Parameters
    ----------
    max_memory, max_disk
        Bytes; by default, as much as is available at the time of the check.
    share
        Fraction of the available amount to use where no limit in bytes is set; half for requests that cover a
        whole run, to leave room for other programs and the page cache.
    """

    max_memory: int | None = None
    max_disk: int | None = None
    share: float = 1.0

    def require_memory(self, nbytes: int, what: str, where: str, *, allocated: int = 0) -> None:
        """Raise an error if something takes more memory than available.

        Parameters
        ----------
        nbytes
            Total memory needed.
        what, where
            Subject and place for the message.
        allocated
            Part of `nbytes` that the process has allocated already.

        Raises
        ------
        TooLargeError
            `nbytes` exceeds the limit.
        """
        if self.max_memory is not None:
            limit = self.max_memory
        elif nbytes - allocated <= _UNCHECKED_NBYTES:
            return
        else:
            available = memory_available()
            if available is None:
                return
            limit = int(available * self.share) + allocated
        if nbytes > limit:
            raise _too_large(what, where, nbytes, limit, "memory", self.max_memory is not None)

    def require_disk(self, nbytes: int, folder: Path, what: str, where: str) -> None:
        """Raise an error if something takes more disk space than the file system of `folder` has.

        Raises
        ------
        TooLargeError
            `nbytes` exceeds the limit.
        """
        if self.max_disk is not None:
            limit = self.max_disk
        else:
            try:
                limit = int(free_disk(folder) * self.share)
            except OSError:  # the write itself shows whether the place accepts it
                return
        if nbytes > limit:
            raise _too_large(what, where, nbytes, limit, "disk", self.max_disk is not None)


def _too_large(what: str, where: str, nbytes: int, limit: int, kind: str, asked: bool) -> TooLargeError:
    """Return the error, with the needed and permitted amounts and the option that raises the limit."""
    more = "a larger" if asked else "if there is that much,"
    needed = f"{what} would take about {format_size(nbytes)} of {kind}"
    remedy = f"{more} --max-{kind} SIZE (in Python max_{kind}) allows it"
    return TooLargeError(needed, where=where, expected=f"at most {format_size(limit)}", remedy=remedy)
