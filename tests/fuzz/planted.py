"""Readers with a defect each, which the fuzzer has to find and to name rightly."""

import os
import signal
import struct

import numpy as np

from benchmarks.fuzz.mutations import mutate_bytes
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

    def __init__(self, defect):
        self.name = f"planted-{defect}"
        self._defect = defect

    def seeds(self):
        return [SOUND]

    def mutate(self, rng):
        return mutate_bytes(rng, SOUND)

    def execute(self, data):
        if data[:_MAGIC_NBYTES] != SOUND[:_MAGIC_NBYTES] or len(data) <= _VERSION_AT:
            raise DamagedError("no magic")
        if data[_VERSION_AT] != 1 and self._defect is not None:
            getattr(self, f"_{self._defect}")(data)
        if data != SOUND:
            raise DamagedError("something else is wrong")
        return "same"

    def _key_error(self, data):
        _ = {1: "one"}[data[_VERSION_AT]]

    def _wrong_value(self, data):
        raise BrokenPromiseError("the value is the one that was written", repr(data[:9]))

    def _allocation(self, data):
        # 4 GiB that are never touched: the resident memory would not tell.
        _ = np.empty(1 << 32, dtype=np.uint8)

    def _loop(self, data):
        while True:
            pass

    def _segfault(self, data):
        os.kill(os.getpid(), signal.SIGSEGV)

    def _long(self, data):
        raise _VerboseError("too much")

    def _disk(self, data):
        from benchmarks.fuzz import scratch

        with (scratch.fresh("disk") / "hole").open("wb") as file:
            try:
                file.truncate(1 << 40)
            except OSError as error:
                raise DamagedError("the disk is full") from error


class _VerboseError(DamagedError):
    """An error of ours that says more than a screen holds, past the bounds of its parts."""

    def __str__(self):
        return "x" * 5000
