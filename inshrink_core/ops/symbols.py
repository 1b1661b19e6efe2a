"""Entropy coding of symbols: modular delta, grouping, run lengths and Huffman codes, fused.

These run in host memory, because their output is bytes. Arrays that are indexed by a group have 256
rows, whatever the number of groups. ``docs/format.md`` (symbol streams) defines the bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.registry import op

MAX_CODE_BITS = 12
"""Longest Huffman code: a window table of 4096 entries still fits the first-level cache."""

MAX_CHUNK = 1 << 21
"""Most symbols per call: a run then needs at most 19 extra bits, an event at most 12 + 19 + 12."""

N_RUN_TOKENS = 85
"""Run classes: 16 exact ones, then four for each octave from 16 up to `MAX_CHUNK` inclusive."""


@op
def code_lengths(counts: NDArray[np.int64], limit: int = MAX_CODE_BITS) -> NDArray[np.int64]:
    """Return the code length of each symbol of a Huffman code no longer than a limit.

    Parameters
    ----------
    counts
        How often each symbol occurs; at most ``2**limit`` of them positive.
    limit
        Longest code allowed, in bits.

    Returns
    -------
    ndarray
        0 where the count is 0, else 1 to `limit`; 1 for a symbol that is the only one. Otherwise the
        Kraft sum is exactly 1.
    """
    raise NotImplementedError


@op
def count_groups(groups: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return how often each byte value occurs, as 256 counts."""
    raise NotImplementedError


@op
def count_pairs(groups: NDArray[np.uint8], symbols: NDArray[np.uint8], stride: int = 1) -> NDArray[np.int64]:
    """Return how often each symbol occurs in each group, (256, 256), over every `stride`-th element."""
    raise NotImplementedError


@op
def delta_events(
    groups: NDArray[np.uint8],
    symbols: NDArray[np.uint8],
    bases: NDArray[np.int64],
    expected: NDArray[np.int64],
    modulus: int,
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Return the events of a chunk, group after group: runs of the expected symbol, each ended by a literal.

    Parameters
    ----------
    groups, symbols
        Group and symbol of each element, at most `MAX_CHUNK`.
    bases
        256 values below `modulus`: the literal of a symbol s in group g is ``(bases[g] - s) mod modulus``.
    expected
        256 values: the symbol of which runs are counted in each group, 256 for none.
    modulus
        Size of the alphabet of literals; more than any symbol.

    Returns
    -------
    records : ndarray of uint32
        One per event; groups ascend, and the events of a group follow its symbols in order. Bits 0-22
        the run, 23-31 the literal that ends it (256: the group ended).
    run_counts : ndarray of int64, (256, 96)
        How often each run token occurs in each group.
    literal_counts : ndarray of int64, (256, 256)
        How often each literal occurs in each group.
    """
    raise NotImplementedError


@op
def pack_events(
    records: NDArray[np.uint32],
    n_events: NDArray[np.int64],
    expected: NDArray[np.int64],
    tables: NDArray[np.int64],
    run_codes: NDArray[np.uint32],
    literal_codes: NDArray[np.uint32],
) -> tuple[NDArray[np.uint64], int]:
    """Return a bit stream, first bit least significant, of `delta_events`' records; and its length in bits.

    Parameters
    ----------
    records
        From `delta_events`.
    n_events
        256 counts: the records of each group.
    expected
        As in `delta_events`.
    tables
        256 row numbers: the code tables of each group.
    run_codes, literal_codes
        (tables, 96) and (tables, 257): the code in bits 0-15, its length above; the last literal is none.
    """
    raise NotImplementedError


@op
def unpack_events(
    words: NDArray[np.uint64],
    n_bits: int,
    groups: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    bases: NDArray[np.int64],
    expected: NDArray[np.int64],
    modulus: int,
    tables: NDArray[np.int64],
    run_windows: NDArray[np.uint32],
    literal_windows: NDArray[np.uint32],
    out: NDArray[np.uint8],
) -> int:
    """Decode a chunk of events into symbols and return how many bits they took, or -1 for a bad stream.

    Parameters
    ----------
    words
        The stream, padded with two words of zeros at least.
    n_bits
        Length of the stream without padding.
    groups
        Group of each element.
    sizes
        `count_groups` of `groups`.
    bases, expected, modulus
        As in `delta_events`; `expected` is below 256 in groups whose run table holds more than run 0.
    tables
        256 row numbers of the window tables.
    run_windows
        (tables, 2**b): for each value of the next b bits, the code length in bits 0-3, the number of
        extra bits in 4-8, the shortest run of the class above.
    literal_windows
        (tables, 2**b): the literal in bits 0-7, the code length above.
    out
        Takes the symbols.
    """
    raise NotImplementedError


@op
def pack_symbols(symbols: NDArray[np.uint8], codes: NDArray[np.uint32]) -> tuple[NDArray[np.uint64], int]:
    """Return the codes of symbols as one bit stream, first bit least significant, and its length in bits.

    Parameters
    ----------
    symbols
        What to encode.
    codes
        256 entries: the code in bits 0-15, its length above.
    """
    raise NotImplementedError


@op
def unpack_symbols(
    words: NDArray[np.uint64], n_bits: int, windows: NDArray[np.uint32], out: NDArray[np.uint8]
) -> int:
    """Decode symbols and return how many bits they took, or -1 for a bad stream.

    Parameters
    ----------
    words
        The stream, padded with two words of zeros at least.
    n_bits
        Length of the stream without padding.
    windows
        For each value of the next bits, the symbol in bits 0-7 and the code length, at least 1, above.
    out
        Takes the symbols.
    """
    raise NotImplementedError
