"""Bits of entropy-coded symbols in numba: writing them, and reading several codes at a time.

Every index is proved in range or guarded, because compiled code checks none. A position is compared
with the end of the stream before its word is read (streams are padded by two words); a window of the
stream is masked by the size of the table it indexes; places in a group are compared with its end.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from inshrink_core.ops.cpu.compiled import UInt8s, UInt32s, UInt64s

_U64 = np.uint64

FAST_BITS = 12
"""Bits looked up at once: any one literal fits, and 4096 entries still fit the first-level cache."""

_N_FAST = 1 << FAST_BITS
_FAST_MASK = np.uint64(_N_FAST - 1)

_PER_WINDOW = 5
"""Look-ups of `FAST_BITS` that a window of 64 bits feeds."""

_MOST_LITERALS = 6
"""Literals in one look-up: an entry has eight bytes, two of which count."""

_LONGEST_RUN = 500
"""Longest run in a fast entry: two of them and their literals fit the 12 bits of a place."""

_FAST_FROM = 4096
"""Symbols of a group from which on filling in a fast table, which has as many entries, pays."""


@njit(nogil=True, inline="always")
def put(
    words: UInt64s, at: int, window: np.uint64, filled: np.uint64, value: np.uint64, n_bits: np.uint64
) -> tuple[int, np.uint64, np.uint64]:  # pragma: no cover - compiled
    """Append up to 63 bits to a stream of which the last word, with less than 64 bits, is in `window`."""
    window |= value << filled
    words[at] = window
    carried = (value >> _U64(1)) >> (_U64(63) - filled)
    filled += n_bits
    full = filled >> _U64(6)
    return at + int(full), carried if full else window, filled & _U64(63)


@njit(nogil=True, inline="always")
def _window_at(words: UInt64s, position: np.uint64) -> np.uint64:  # pragma: no cover - compiled
    """Return the 64 bits from a position, which is at most the end of the stream."""
    word = position >> _U64(6)
    shift = position & _U64(63)
    window: np.uint64 = (words[word] >> shift) | ((words[word + _U64(1)] << _U64(1)) << (_U64(63) - shift))
    return window


@njit(nogil=True, cache=True)
def _literals_at_once(windows: UInt32s, out: UInt64s) -> None:  # pragma: no cover - compiled
    """Find the literals, at most six, that each value of `FAST_BITS` bits holds whole.

    An entry has the literals in its bytes 0 to 5, their number in byte 6 and their bits in byte 7.
    """
    mask = windows.size - 1
    for window in range(_N_FAST):
        used = 0
        count = 0
        packed = _U64(0)
        while count < _MOST_LITERALS:
            entry = windows[(window >> used) & mask]
            n_code = int(entry >> np.uint32(8))
            if used + n_code > FAST_BITS:
                break
            packed |= _U64(entry & np.uint32(255)) << _U64(8 * count)
            used += n_code
            count += 1
        out[window] = packed | _U64((count << 48) | (used << 56))


@njit(nogil=True, cache=True)
def _events_at_once(
    runs: UInt32s, literals: UInt32s, fill: int, out: UInt64s
) -> int:  # pragma: no cover - compiled
    """Find the events, at most two, that each value of `FAST_BITS` bits holds whole.

    An entry has the bits used in byte 0, the literals in bytes 1 and 2, and from bits 24, 36 and 48 on
    the place of the first, the place of the second, and the number of symbols. In place of an event
    that is missing, `fill` is where the next one begins: harmless, for it is there already.

    Returns
    -------
    int
        Most symbols of an entry, at least 1.
    """
    run_mask = runs.size - 1
    literal_mask = literals.size - 1
    # One event: bits used, literal << 8, run << 16; or -1.
    single = np.empty(_N_FAST, np.int64)
    for window in range(_N_FAST):
        entry = np.int64(runs[window & run_mask])
        used = entry & 15
        n_extra = (entry >> 4) & 31
        run = (entry >> 9) + ((window >> used) & ((1 << n_extra) - 1))
        used += n_extra
        single[window] = -1
        if used <= FAST_BITS and run <= _LONGEST_RUN:
            entry = np.int64(literals[(window >> used) & literal_mask])
            used += entry >> 8
            if used <= FAST_BITS:
                single[window] = used | ((entry & 255) << 8) | (run << 16)
    most = 1
    for window in range(_N_FAST):
        event = single[window]
        if event < 0:
            out[window] = _U64((fill << 8) | (fill << 16))
            continue
        used = event & 255
        first = event >> 16
        second = first + 1
        size = second
        literal = fill
        event_after = single[window >> used]
        if event_after >= 0 and used + (event_after & 255) <= FAST_BITS:
            used += event_after & 255
            second += event_after >> 16
            literal = (event_after >> 8) & 255
            size = second + 1
        most = max(most, size)
        out[window] = _U64(
            used | (event & 0xFF00) | (literal << 16) | (first << 24) | (second << 36) | (size << 48)
        )
    return most


@njit(nogil=True, cache=True)
def unpack_literals(
    words: UInt64s,
    position: np.uint64,
    n_bits: int,
    literals: UInt32s,
    fast: UInt64s,
    grouped: UInt8s,
    start: np.uint64,
    stop: np.uint64,
) -> np.uint64:  # pragma: no cover - compiled
    """Decode a group without expectation; return the position after it, beyond the end if it is bad."""
    end = _U64(n_bits)
    mask = _U64(literals.size - 1)
    at = start
    if stop - start >= _U64(_FAST_FROM):
        _literals_at_once(literals, fast)
        reach = _U64(_PER_WINDOW * _MOST_LITERALS)
        while at + reach <= stop and position <= end:
            window = _window_at(words, position)
            for _ in range(_PER_WINDOW):
                entry = fast[window & _FAST_MASK]
                grouped[at] = np.uint8(entry & _U64(255))
                grouped[at + _U64(1)] = np.uint8((entry >> _U64(8)) & _U64(255))
                grouped[at + _U64(2)] = np.uint8((entry >> _U64(16)) & _U64(255))
                grouped[at + _U64(3)] = np.uint8((entry >> _U64(24)) & _U64(255))
                grouped[at + _U64(4)] = np.uint8((entry >> _U64(32)) & _U64(255))
                grouped[at + _U64(5)] = np.uint8((entry >> _U64(40)) & _U64(255))
                at += (entry >> _U64(48)) & _U64(255)
                used = entry >> _U64(56)
                window >>= used
                position += used
    while at < stop:
        if position > end:
            return end + _U64(1)
        entry = _U64(literals[_window_at(words, position) & mask])
        grouped[at] = np.uint8(entry & _U64(255))
        at += _U64(1)
        position += entry >> _U64(8)
    return position


@njit(nogil=True, cache=True)
def unpack_runs(
    words: UInt64s,
    position: np.uint64,
    n_bits: int,
    runs: UInt32s,
    literals: UInt32s,
    fill: int,
    fast: UInt64s,
    grouped: UInt8s,
    start: np.uint64,
    stop: np.uint64,
) -> np.uint64:  # pragma: no cover - compiled
    """Decode a group with an expected delta; return the position after it, beyond the end if it is bad."""
    end = _U64(n_bits)
    run_mask = _U64(runs.size - 1)
    literal_mask = _U64(literals.size - 1)
    for i in range(start, stop):
        grouped[i] = np.uint8(fill)
    at = start
    # How far a window of events can lead; where there is no fast table, beyond the group.
    reach = stop - start + _U64(1)
    if stop - start >= _U64(_FAST_FROM):
        reach = _U64(_PER_WINDOW * _events_at_once(runs, literals, fill, fast))
    while at < stop:
        while at + reach <= stop and position <= end:
            window = _window_at(words, position)
            entry = _U64(0)
            for _ in range(_PER_WINDOW):
                entry = fast[window & _FAST_MASK]
                grouped[at + ((entry >> _U64(24)) & _U64(0xFFF))] = np.uint8((entry >> _U64(8)) & _U64(255))
                grouped[at + ((entry >> _U64(36)) & _U64(0xFFF))] = np.uint8((entry >> _U64(16)) & _U64(255))
                at += entry >> _U64(48)
                used = entry & _U64(255)
                window >>= used
                position += used
            # An event that does not fit the table stops every look-up after it too.
            if (entry >> _U64(48)) == _U64(0):
                break
        if position > end:
            return end + _U64(1)
        window = _window_at(words, position)
        entry = _U64(runs[window & run_mask])
        n_code = entry & _U64(15)
        n_extra = (entry >> _U64(4)) & _U64(31)
        window >>= n_code
        run = (entry >> _U64(9)) + (window & ((_U64(1) << n_extra) - _U64(1)))
        window >>= n_extra
        position += n_code + n_extra
        if run >= stop - at:
            return position if run == stop - at else end + _U64(1)
        at += run
        entry = _U64(literals[window & literal_mask])
        position += entry >> _U64(8)
        grouped[at] = np.uint8(entry & _U64(255))
        at += _U64(1)
    return position
