"""Readers with a defect each, which the fuzzer has to find and to name rightly."""

from __future__ import annotations

import os
import random
import signal
import struct
from collections.abc import Sequence

import numpy as np

from benchmarks.fuzz.bytewise import mutate_bytes
from benchmarks.fuzz.target import BrokenPromiseError
from inshrink_core.errors import DamagedError

SOUND = struct.pack("<8sBI", b"PLANTED!", 1, 42) + b"payload"
_MAGIC_NBYTES = 8
_VERSION_AT = 8


class Planted:
    """A reader of small inputs: sound but for what happens where the version is not 1.

    Parameters
    ----------
    defect
        What happens then; None is a reader without a defect.
    """

    def __init__(self, defect: str | None) -> None:
        self.name = f"planted-{defect}"
        self._defect = defect

    def seeds(self) -> Sequence[bytes]:
        return [SOUND]

    def mutate(self, rng: random.Random) -> bytes:
        return mutate_bytes(rng, SOUND)

    def execute(self, data: bytes) -> str | None:
        if data[:_MAGIC_NBYTES] != SOUND[:_MAGIC_NBYTES] or len(data) <= _VERSION_AT:
            raise DamagedError("no magic")
        if data[_VERSION_AT] != 1 and self._defect is not None:
            getattr(self, f"_{self._defect}")(data)
        if data != SOUND:
            raise DamagedError("something else is wrong")
        return "same"

    def _key_error(self, data: bytes) -> None:
        _ = {1: "one"}[data[_VERSION_AT]]

    def _wrong_value(self, data: bytes) -> None:
        raise BrokenPromiseError("the value is the one that was written", repr(data[:9]))

    def _allocation(self, data: bytes) -> None:
        # 4 GiB that are never touched: the resident memory would not tell.
        _ = np.empty(1 << 32, dtype=np.uint8)

    def _loop(self, data: bytes) -> None:
        while True:
            pass

    def _segfault(self, data: bytes) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _long(self, data: bytes) -> None:
        raise _VerboseError("too much")

    def _disk(self, data: bytes) -> None:
        from benchmarks.fuzz import scratch

        with (scratch.fresh("disk") / "hole").open("wb") as file:
            try:
                file.truncate(1 << 40)
            except OSError as error:
                raise DamagedError("the disk is full") from error


class _VerboseError(DamagedError):
    """An error of ours that says more than a screen holds, past the bounds of its parts."""

    def __str__(self) -> str:
        return "x" * 5000
