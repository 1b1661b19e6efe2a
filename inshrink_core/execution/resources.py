"""How much memory and disk there is, and refusing what would take more, before any of it is allocated."""

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
"""What any machine that runs PyTorch has: to measure memory would take longer than to use so little."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")


def memory_available() -> int | None:
    """Return how many bytes this process may take besides those it has; None where it is not known.

    Notes
    -----
    The least of what the system could give without swapping, what the control groups of the process
    (version 1 or 2, and those around them) have left, and what its limit of address space leaves.
    """
    found = [_system_memory(), _address_space(), *_group_memory()]
    known = [max(0, nbytes) for nbytes in found if nbytes is not None]
    return min(known, default=None)


def new_buffer(nbytes: int) -> memoryview:
    """Return a writable buffer of any content; pages that are never written take no memory."""
    import numpy as np

    return np.empty(nbytes, np.uint8).data


def free_disk(folder: Path) -> int:
    """Return the free bytes of the file system of a folder, which need not exist."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _number(path: Path) -> int | None:
    """Read a file that holds one number; None where it does not, as ``max`` of a group without a limit."""
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
    """Return what the kernel says is available, or on other systems all there is."""
    fields = _fields(_PROC / "meminfo")
    if "MemAvailable" in fields:
        return fields["MemAvailable"] << 10
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _address_space() -> int | None:
    """Return what RLIMIT_AS leaves."""
    try:
        import resource
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    used = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        used = int((_PROC / "self" / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return limit - used


def _group_memory() -> Iterator[int | None]:
    """Yield what each control group of the process leaves; page cache it could drop counts as free."""
    for folder, version in _groups():
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and used is not None:
            yield limit - used + _fields(folder / "memory.stat").get(names[2], 0)


def _groups() -> Iterator[tuple[Path, int]]:
    """Yield the folders of the process's memory groups and of those around them, with the version."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        unified = number == "0" and not controllers
        if not unified and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS if unified else _CGROUPS / "memory"
        # In a container the path may be the host's, of which only the root is to be seen.
        place = root / path.lstrip("/")
        for folder in dict.fromkeys((place, *place.parents)):
            if folder == root or root in folder.parents:
                yield folder, 2 if unified else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What decoding and writing may take.

    Parameters
    ----------
    max_memory, max_disk
        Bytes; by default what is available when it is asked for.
    share
        Of what is available, where it is not said in bytes: half where a whole run is asked for, so that
        other programs, and the system's cache, are left some.
    """

    max_memory: int | None = None
    max_disk: int | None = None
    share: float = 1.0

    def require_memory(self, nbytes: int, what: str, where: str, *, allocated: int = 0) -> None:
        """Refuse what would take more memory than there is.

        Parameters
        ----------
        nbytes
            All that it takes.
        what, where
            For the message.
        allocated
            Of `nbytes`, what the process has allocated already.

        Raises
        ------
        TooLargeError
            It is above the limit.
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
        """Refuse what would take more disk than the file system of `folder` has.

        Raises
        ------
        TooLargeError
            It is above the limit.
        """
        if self.max_disk is not None:
            limit = self.max_disk
        else:
            try:
                limit = int(free_disk(folder) * self.share)
            except OSError:  # a place that cannot be asked is refused, or not, by writing there
                return
        if nbytes > limit:
            raise _too_large(what, where, nbytes, limit, "disk", self.max_disk is not None)


def _too_large(what: str, where: str, nbytes: int, limit: int, kind: str, asked: bool) -> TooLargeError:
    """Return the error: how much it would be, how much it may be, and what allows it."""
    more = "a larger" if asked else "if there is that much,"
    return TooLargeError(
        f"{what} would take about {format_size(nbytes)} of {kind}",
        where=where,
        needed=nbytes,
        limit=limit,
        expected=f"at most {format_size(limit)}",
        remedy=f"{more} --max-{kind} SIZE (in Python max_{kind}) allows it",
    )
