"""The peak of this process's resident memory, as the Linux kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

__all__ = ["PeakMemory"]

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"
"""Sets the high-water mark (``VmHWM``) to what is resident now (proc(5), Linux 4.0)."""

_KIB: Final = 1024
"""The unit of the numbers in ``/proc/self/status``, which call it kB."""


class PeakMemory:
    """Measures how far resident memory rises above where it stood.

    What earlier work left in the allocator is given back first, so that it does not hide memory that is
    taken anew.

    Examples
    --------
    >>> with PeakMemory() as memory:
    ...     block = bytearray(8 << 20)
    >>> memory.nbytes is None or memory.nbytes > 7 << 20
    True
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        """Bytes above the start; None where the system does not say, and until it is left."""
        self._before: int | None = None

    def __enter__(self) -> Self:
        gc.collect()
        _give_back()
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
            self._before = _status("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        peak = _status("VmHWM")
        if peak is not None and self._before is not None:
            self.nbytes = max(0, peak - self._before)


def _status(name: str) -> int | None:
    """Return a line of the status, in bytes; None where there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * _KIB
    return None


def _give_back() -> None:
    """Ask the C library to return free memory; others than GNU's have no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
