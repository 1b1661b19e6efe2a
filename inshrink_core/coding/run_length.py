"""Run lengths as classes with extra bits, and a coder of bytes made of them.

Runs below 16 have a class each; above, every octave has four classes and the rest of the length
follows in extra bits (an Elias-type code whose prefix is left to Huffman).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inshrink_core.coding.huffman import symbol_windows
from inshrink_core.errors import DamagedError
from inshrink_core.ops.symbols import N_RUN_TOKENS

__all__ = ["RUN_EXTRA_BITS", "RUN_STARTS", "RunLengthCoder", "run_windows"]

_TOKENS = np.arange(N_RUN_TOKENS, dtype=np.int64)

RUN_EXTRA_BITS: NDArray[np.int64] = np.where(_TOKENS < 16, 0, (_TOKENS - 16) // 4 + 2)
"""Extra bits that follow each run token."""

RUN_STARTS: NDArray[np.int64] = np.where(_TOKENS < 16, _TOKENS, (4 + (_TOKENS - 16) % 4) << RUN_EXTRA_BITS)
"""Shortest run of each token's class."""


def run_windows(lengths: NDArray[np.int64], n_bits: int) -> NDArray[np.uint32]:
    """Return the window table of run tokens: code length, extra bits, shortest run (`unpack_events`)."""
    code_lengths = lengths if np.count_nonzero(lengths) > 1 else np.zeros_like(lengths)
    entries = (code_lengths | RUN_EXTRA_BITS << 4 | RUN_STARTS << 9).astype(np.uint32)
    return symbol_windows(lengths, n_bits, entries)


class RunLengthCoder:
    """Runs of bytes as (value, length - 1) pairs, lengths in base-128 little endian: for zero masks."""

    name = "run_length"

    def encode(self, values: NDArray[np.uint8]) -> bytes:
        """Return the runs, or the values if they are shorter, after one byte that says which."""
        if values.size == 0:
            return b""
        starts = np.flatnonzero(np.diff(values, prepend=~values[:1]))
        lengths = np.diff(starts, append=values.size) - 1
        # A run takes two bytes at least; more runs than that cannot win.
        if 2 * starts.size > values.size:
            return b"\0" + values.tobytes()
        out = bytearray(b"\1")
        for value, length in zip(values[starts].tolist(), lengths.tolist(), strict=True):
            out.append(value)
            rest = length
            while rest >= 128:
                out.append(rest & 127 | 128)
                rest >>= 7
            out.append(rest)
        return bytes(out) if len(out) <= values.size else b"\0" + values.tobytes()

    def decode(self, payload: bytes | memoryview, n: int) -> NDArray[np.uint8]:
        """Return the `n` values; DamagedError if the runs are not theirs."""
        if n == 0 and len(payload) == 0:
            return np.zeros(0, np.uint8)
        if len(payload) == n + 1 and payload[0] == 0:
            return np.frombuffer(payload, np.uint8)[1:].copy()
        if len(payload) == 0 or payload[0] != 1:
            raise DamagedError("a run-length stream has no known form")
        values, lengths = self._parse_runs(bytes(payload), n)
        return np.repeat(np.array(values, np.uint8), lengths)

    def _parse_runs(self, payload: bytes, n: int) -> tuple[list[int], list[int]]:
        """Lengths are summed before anything is allocated."""
        values: list[int] = []
        lengths: list[int] = []
        at, total = 1, 0
        while at < len(payload):
            values.append(payload[at])
            at += 1
            length = shift = 0
            while True:
                if at >= len(payload) or shift > 35:
                    raise DamagedError("a run length ends early or is too long")
                length |= (payload[at] & 127) << shift
                shift += 7
                at += 1
                if payload[at - 1] < 128:
                    break
            lengths.append(length + 1)
            total += length + 1
            if total > n:
                break
        if total != n:
            raise DamagedError("runs have another length", expected=f"{n} values", found=str(total))
        return values, lengths

    def worst_case_bytes(self, n: int) -> int:
        """Return one byte more than the values."""
        return n + 1
