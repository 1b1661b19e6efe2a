"""Entropy coding of symbols in numba; `inshrink_core.ops.reference_symbols` is the norm.

Every index is proved in range or guarded, because compiled code checks none: tables that are indexed
by a byte have 256 entries, those indexed by a window of the bit stream have all its values, and words
are read only after the position was compared with the end (the arrays are padded by two words).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from inshrink_core.ops.reference_symbols import code_lengths as _reference_code_lengths
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

_U64 = np.uint64
_HOLE = np.uint64(0xFFFFFFFFFFFFFFFF)
_NO_LITERAL = 256

register("code_lengths", Backend.CPU)(njit(nogil=True, cache=True)(_reference_code_lengths))


@register("count_groups", Backend.CPU)
@njit(nogil=True, cache=True)
def count_groups(groups: NDArray[np.uint8]) -> NDArray[np.int64]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.count_groups`."""
    # Four tables, because a counter that is incremented twice in a row waits for its own store.
    parts = np.zeros((4, 256), np.int64)
    n = groups.size
    for i in range(0, n - 3, 4):
        parts[0, groups[i]] += 1
        parts[1, groups[i + 1]] += 1
        parts[2, groups[i + 2]] += 1
        parts[3, groups[i + 3]] += 1
    for i in range(n - n % 4, n):
        parts[0, groups[i]] += 1
    counts: NDArray[np.int64] = parts[0] + parts[1] + parts[2] + parts[3]
    return counts


@register("count_pairs", Backend.CPU)
@njit(nogil=True, cache=True)
def count_pairs(
    groups: NDArray[np.uint8], symbols: NDArray[np.uint8], stride: int
) -> NDArray[np.int64]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.count_pairs`."""
    counts = np.zeros((256, 256), np.int64)
    for i in range(0, symbols.size, stride):
        counts[groups[i], symbols[i]] += 1
    return counts


@njit(nogil=True, inline="always")
def _run_token(run: int) -> int:  # pragma: no cover - compiled
    """Class of a run length: exact below 16, then four classes an octave."""
    if run < 16:
        return run
    exponent = 4
    while (run >> exponent) > 1:
        exponent += 1
    return 16 + (exponent - 4) * 4 + ((run >> (exponent - 2)) & 3)


@register("delta_events", Backend.CPU)
@njit(nogil=True, cache=True)
def delta_events(
    groups: NDArray[np.uint8],
    symbols: NDArray[np.uint8],
    bases: NDArray[np.int64],
    expected: NDArray[np.int64],
    modulus: int,
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.delta_events`."""
    n = symbols.size
    records = np.empty(n + 256, np.uint64)
    run_counts = np.zeros((256, 96), np.int64)
    literal_counts = np.zeros((256, 256), np.int64)
    slot = np.arange(256)
    run = np.zeros(256, np.int64)
    n_records = 256
    for i in range(n):
        group = groups[i]
        symbol = np.int64(symbols[i])
        if symbol == expected[group]:
            run[group] += 1
            continue
        literal = bases[group] - symbol
        if literal < 0:
            literal += modulus
        length = run[group]
        token = _run_token(length)
        run_counts[group, token] += 1
        literal_counts[group, literal & 255] += 1
        records[slot[group]] = _U64(length | (token << 24) | (literal << 32) | (np.int64(group) << 48))
        run[group] = 0
        slot[group] = n_records
        n_records += 1
    for group in range(256):
        length = run[group]
        if length == 0:
            records[slot[group]] = _HOLE
            continue
        token = _run_token(length)
        run_counts[group, token] += 1
        records[slot[group]] = _U64(length | (token << 24) | (_NO_LITERAL << 32) | (group << 48))
    return records[:n_records], run_counts, literal_counts


@register("pack_events", Backend.CPU)
@njit(nogil=True, cache=True)
def pack_events(
    records: NDArray[np.uint64],
    tables: NDArray[np.int64],
    run_codes: NDArray[np.uint32],
    literal_codes: NDArray[np.uint32],
) -> tuple[NDArray[np.uint32], int]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.pack_events`."""
    # A record takes at most 12 + 18 + 12 bits, hence two words, and one word is open.
    words = np.empty(2 * records.size + 2, np.uint32)
    at = 0
    window = _U64(0)
    filled = _U64(0)
    for i in range(records.size):
        record = records[i]
        if record == _HOLE:
            continue
        table = tables[record >> _U64(48)]
        token = (record >> _U64(24)) & _U64(0xFF)
        code = _U64(run_codes[table, token])
        window |= (code & _U64(0xFFFF)) << filled
        filled += code >> _U64(16)
        if token >= _U64(16):
            n_extra = ((token - _U64(16)) >> _U64(2)) + _U64(2)
            window |= (record & ((_U64(1) << n_extra) - _U64(1))) << filled
            filled += n_extra
        words[at] = np.uint32(window & _U64(0xFFFFFFFF))
        full = filled >> _U64(5)
        at += int(full)
        window >>= full << _U64(5)
        filled &= _U64(31)
        literal = (record >> _U64(32)) & _U64(0xFFFF)
        if literal < _U64(_NO_LITERAL):
            code = _U64(literal_codes[table, literal])
            window |= (code & _U64(0xFFFF)) << filled
            filled += code >> _U64(16)
            words[at] = np.uint32(window & _U64(0xFFFFFFFF))
            full = filled >> _U64(5)
            at += int(full)
            window >>= full << _U64(5)
            filled &= _U64(31)
    words[at] = np.uint32(window & _U64(0xFFFFFFFF))
    return words[: at + 1], 32 * at + int(filled)


@register("unpack_events", Backend.CPU)
@njit(nogil=True, cache=True)
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
) -> int:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.unpack_events`."""
    run_bits = _window_bits(run_windows.shape[1])
    literal_bits = _window_bits(literal_windows.shape[1])
    run_mask = _U64(run_windows.shape[1] - 1)
    literal_mask = _U64(literal_windows.shape[1] - 1)
    runs = run_windows.reshape(run_windows.size)
    literals = literal_windows.reshape(literal_windows.size)
    fill = expected.astype(np.uint8)
    left = sizes.copy()
    run = np.zeros(256, np.int64)
    pending = np.zeros(256, np.uint8)
    end = _U64(n_bits)
    position = _U64(0)
    n = groups.size
    first = 0
    i = 0
    while True:
        # Before the first symbol, one event of each group; after that, of the group that ran dry. One
        # place reads events, because a function of its own costs more than the rest of the loop.
        if first < 256:
            group = _U64(first)
            first += 1
        else:
            while i < n:
                group = _U64(groups[i])
                length = run[group]
                if length == 0:
                    break
                run[group] = length - 1
                out[i] = fill[group]
                i += 1
            if i >= n:
                break
            out[i] = pending[group]
            i += 1
        rest = left[group]
        if rest == 0:
            continue
        if position > end:
            return -1
        word = position >> _U64(6)
        shift = position & _U64(63)
        window = (words[word] >> shift) | ((words[word + _U64(1)] << _U64(1)) << (_U64(63) - shift))
        table = _U64(tables[group])
        entry = _U64(runs[(table << run_bits) | (window & run_mask)])
        n_code = entry & _U64(15)
        n_extra = (entry >> _U64(4)) & _U64(31)
        window >>= n_code
        length = np.int64((entry >> _U64(9)) + (window & ((_U64(1) << n_extra) - _U64(1))))
        window >>= n_extra
        position += n_code + n_extra
        if length >= rest:
            if length > rest:
                return -1
            run[group] = length
            left[group] = 0
            continue
        entry = _U64(literals[(table << literal_bits) | (window & literal_mask)])
        position += entry >> _U64(8)
        symbol = bases[group] - np.int64(entry & _U64(255))
        if symbol < 0:
            symbol += modulus
        pending[group] = np.uint8(symbol)
        run[group] = length
        left[group] = rest - length - 1
    return int(position)


@njit(nogil=True, inline="always")
def _window_bits(n_values: int) -> np.uint64:  # pragma: no cover - compiled
    """Base-2 logarithm of a table size, unsigned because it is used as a shift."""
    bits = 0
    while (1 << bits) < n_values:
        bits += 1
    return _U64(bits)


@register("pack_symbols", Backend.CPU)
@njit(nogil=True, cache=True)
def pack_symbols(
    symbols: NDArray[np.uint8], codes: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], int]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.pack_symbols`."""
    # At most 12 bits a symbol, so that two symbols and the 31 open bits fit into the window.
    words = np.empty((symbols.size * 12 + 31) // 32 + 2, np.uint32)
    at = 0
    window = _U64(0)
    filled = _U64(0)
    n = symbols.size
    for i in range(0, n - 1, 2):
        code = _U64(codes[symbols[i]])
        window |= (code & _U64(0xFFFF)) << filled
        filled += code >> _U64(16)
        code = _U64(codes[symbols[i + 1]])
        window |= (code & _U64(0xFFFF)) << filled
        filled += code >> _U64(16)
        words[at] = np.uint32(window & _U64(0xFFFFFFFF))
        full = filled >> _U64(5)
        at += int(full)
        window >>= full << _U64(5)
        filled &= _U64(31)
    if n % 2:
        code = _U64(codes[symbols[n - 1]])
        window |= (code & _U64(0xFFFF)) << filled
        filled += code >> _U64(16)
        words[at] = np.uint32(window & _U64(0xFFFFFFFF))
        full = filled >> _U64(5)
        at += int(full)
        window >>= full << _U64(5)
        filled &= _U64(31)
    words[at] = np.uint32(window & _U64(0xFFFFFFFF))
    return words[: at + 1], 32 * at + int(filled)


@njit(nogil=True, cache=True)
def _triples(windows: NDArray[np.uint32]) -> NDArray[np.uint32]:  # pragma: no cover - compiled
    """Up to three whole symbols that one window holds: three bytes, then count and bits in a nibble each."""
    n = windows.size
    bits = np.int64(_window_bits(n))
    out = np.empty(n, np.uint32)
    for window in range(n):
        used = 0
        count = 0
        packed = 0
        while count < 3:
            entry = windows[window >> used]
            n_code = np.int64(entry >> np.uint32(8))
            if used + n_code > bits:
                break
            packed |= int(entry & np.uint32(255)) << (8 * count)
            used += int(n_code)
            count += 1
        out[window] = np.uint32(packed | (count << 24) | (used << 28))
    return out


@register("unpack_symbols", Backend.CPU)
@njit(nogil=True, cache=True)
def unpack_symbols(
    words: NDArray[np.uint64], n_bits: int, windows: NDArray[np.uint32], out: NDArray[np.uint8]
) -> int:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.unpack_symbols`."""
    triples = _triples(windows)
    mask = _U64(windows.size - 1)
    end = _U64(n_bits)
    position = _U64(0)
    n = out.size
    i = 0
    while i + 3 <= n:
        if position > end:
            return -1
        word = position >> _U64(6)
        shift = position & _U64(63)
        window = (words[word] >> shift) | ((words[word + _U64(1)] << _U64(1)) << (_U64(63) - shift))
        entry = _U64(triples[window & mask])
        out[i] = np.uint8(entry & _U64(255))
        out[i + 1] = np.uint8((entry >> _U64(8)) & _U64(255))
        out[i + 2] = np.uint8((entry >> _U64(16)) & _U64(255))
        i += int((entry >> _U64(24)) & _U64(15))
        position += entry >> _U64(28)
    while i < n:
        if position > end:
            return -1
        word = position >> _U64(6)
        shift = position & _U64(63)
        window = (words[word] >> shift) | ((words[word + _U64(1)] << _U64(1)) << (_U64(63) - shift))
        entry = _U64(windows[window & mask])
        out[i] = np.uint8(entry & _U64(255))
        position += entry >> _U64(8)
        i += 1
    return int(position)
