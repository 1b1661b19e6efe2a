"""Entropy coding of symbols in numba; `inshrink_core.ops.symbols` is the norm.

Every index is proved in range or guarded, because compiled code checks none: tables that are indexed
by a byte have 256 entries, those indexed by a window of the bit stream have all its values, and words
are read only after the position was compared with the end (the arrays are padded by two words).
Places of grouped symbols are running sums of the groups' counts.
"""

from __future__ import annotations

import numpy as np

from inshrink_core.ops import symbols as in_plain
from inshrink_core.ops.cpu.compiled import Int64s, UInt8s, UInt32s, UInt64s, compiled
from inshrink_core.ops.registry import in_torch
from inshrink_core.ops.symbols import LITERAL_SHIFT, MAX_CODE_BITS, NO_LITERAL, RUN_MASK, run_token

_U64 = np.uint64
_LITERAL_SHIFT = np.uint32(LITERAL_SHIFT)
_RUN_MASK = np.uint32(RUN_MASK)
_RUN_ALONE = np.uint32(NO_LITERAL << LITERAL_SHIFT)

_KNOWN_EXPONENT = 10
"""Runs below two to this have their class in a table; longer ones are rare."""
_KNOWN_TOKENS = np.array([run_token(run) for run in range(1 << _KNOWN_EXPONENT)], np.uint8)

_code_lengths = compiled(nogil=True)(in_torch(in_plain.code_lengths))


def code_lengths(counts: Int64s, limit: int = MAX_CODE_BITS) -> Int64s:
    """See `symbols.code_lengths`."""
    lengths: Int64s = _code_lengths(counts, limit)
    return lengths


@compiled(nogil=True)
def count_groups(groups: UInt8s) -> Int64s:  # pragma: no cover - compiled
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
    counts: Int64s = parts[0] + parts[1] + parts[2] + parts[3]
    return counts


@compiled(nogil=True)
def count_pairs(groups: UInt8s, symbols: UInt8s, stride: int) -> Int64s:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.count_pairs`."""
    counts = np.zeros((256, 256), np.int64)
    for i in range(0, symbols.size, stride):
        counts[groups[i], symbols[i]] += 1
    return counts


@compiled(nogil=True, inline="always")
def _run_token(run: int) -> int:  # pragma: no cover - compiled
    """Class of a run length; a table for the lengths that are not rare."""
    if run < 1 << _KNOWN_EXPONENT:
        return int(_KNOWN_TOKENS[run])
    exponent = _KNOWN_EXPONENT
    while (run >> exponent) > 1:
        exponent += 1
    return 16 + (exponent - 4) * 4 + ((run >> (exponent - 2)) & 3)


@compiled(nogil=True)
def delta_events(
    groups: UInt8s, symbols: UInt8s, bases: Int64s, expected: Int64s, modulus: int
) -> tuple[UInt32s, Int64s, Int64s]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.delta_events`."""
    sizes = count_groups(groups)
    grouped = np.empty(symbols.size, np.uint8)
    _gather(groups, sizes, symbols, grouped)
    run_counts = np.zeros((256, 96), np.int64)
    literal_counts = np.zeros((256, 256), np.int64)
    # One record for each literal, and one for the run that may end each group.
    records = np.empty(symbols.size + 256, np.uint32)
    at = _U64(0)
    start = _U64(0)
    for group in range(256):
        if sizes[group] == 0:
            continue
        stop = start + _U64(sizes[group])
        _subtract(bases[group], modulus, grouped[start:stop])
        literal_counts[group] = count_groups(grouped[start:stop])
        if expected[group] > 255:
            for i in range(sizes[group]):
                records[at + _U64(i)] = np.uint32(grouped[start + _U64(i)]) << _LITERAL_SHIFT
            run_counts[group, 0] = sizes[group]
            at += _U64(sizes[group])
        else:
            rests = (bases[group] - expected[group]) % modulus
            literal_counts[group, rests] = 0
            first = at
            at = _record(grouped[start:stop], np.uint32(rests), records, at)
            for record in records[first:at]:
                run_counts[group, _run_token(int(record & _RUN_MASK))] += 1
        start = stop
    return records[:at], run_counts, literal_counts


@compiled(nogil=True)
def _gather(
    groups: UInt8s, sizes: Int64s, symbols: UInt8s, grouped: UInt8s
) -> None:  # pragma: no cover - compiled
    """Sort symbols by group; `sizes` are the counts of `groups`, so that places stay in range."""
    places = (np.cumsum(sizes) - sizes).astype(np.uint64)
    for i in range(_U64(symbols.size)):
        group = groups[i]
        place = places[group]
        places[group] = place + _U64(1)
        grouped[place] = symbols[i]


@compiled(nogil=True)
def _scatter(
    groups: UInt8s, sizes: Int64s, grouped: UInt8s, out: UInt8s
) -> None:  # pragma: no cover - compiled
    """Undo `_gather`."""
    places = (np.cumsum(sizes) - sizes).astype(np.uint64)
    for i in range(_U64(out.size)):
        group = groups[i]
        place = places[group]
        places[group] = place + _U64(1)
        out[i] = grouped[place]


@compiled(nogil=True)
def _subtract(base: int, modulus: int, values: UInt8s) -> None:  # pragma: no cover - compiled
    """Replace values below `modulus` by ``(base - value) mod modulus``, which undoes itself."""
    # Bytes alone, so that the compiler uses wide registers: the result is below 256, hence exact.
    low = np.uint8(base)
    high = np.uint8((base + modulus) & 255)
    for i in range(values.size):
        value = values[i]
        values[i] = np.uint8((low if value <= low else high) - value)


@compiled(nogil=True)
def _record(
    deltas: UInt8s, rests: np.uint32, records: UInt32s, at: np.uint64
) -> np.uint64:  # pragma: no cover - compiled
    """Write the records of one group; return the place after them."""
    run = np.uint32(0)
    # Without a branch on the delta, which would be mispredicted at every other literal: a record is
    # always written, and valid where `at` moves on.
    for i in range(deltas.size):
        delta = np.uint32(deltas[i])
        moved = delta != rests
        records[at] = np.uint32(run | np.uint32(delta << _LITERAL_SHIFT))
        at += _U64(moved)
        run = np.uint32(0) if moved else np.uint32(run + np.uint32(1))
    if run > 0:
        records[at] = np.uint32(run | _RUN_ALONE)
        at += _U64(1)
    return at


@compiled(nogil=True, inline="always")
def _put(
    words: UInt64s, at: int, window: np.uint64, filled: np.uint64, value: np.uint64, n_bits: np.uint64
) -> tuple[int, np.uint64, np.uint64]:  # pragma: no cover - compiled
    """Append up to 63 bits to a stream of which the last word, with less than 64 bits, is in `window`."""
    window |= value << filled
    words[at] = window
    carried = (value >> _U64(1)) >> (_U64(63) - filled)
    filled += n_bits
    full = filled >> _U64(6)
    return at + int(full), carried if full else window, filled & _U64(63)


@compiled(nogil=True, inline="always")
def _window_at(words: UInt64s, position: np.uint64) -> np.uint64:  # pragma: no cover - compiled
    """Return the 64 bits from a position, which is at most the end of the stream."""
    word = position >> _U64(6)
    shift = position & _U64(63)
    window: np.uint64 = (words[word] >> shift) | ((words[word + _U64(1)] << _U64(1)) << (_U64(63) - shift))
    return window


@compiled(nogil=True)
def pack_events(
    records: UInt32s,
    n_events: Int64s,
    expected: Int64s,
    tables: Int64s,
    run_codes: UInt32s,
    literal_codes: UInt32s,
) -> tuple[UInt64s, int]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.pack_events`."""
    # A record takes at most 12 + 19 + 12 bits, less than a word, and one word is open.
    words = np.empty(records.size + 1, np.uint64)
    at = 0
    window = _U64(0)
    filled = _U64(0)
    start = 0
    for group in range(256):
        codes = literal_codes[tables[group]]
        stop = min(start + n_events[group], records.size)
        if expected[group] > 255:
            # No runs: four literals of at most 12 bits fit into a word.
            while start + 4 <= stop:
                value = _U64(0)
                n_bits = _U64(0)
                for i in range(4):
                    code = _U64(codes[records[start + i] >> _LITERAL_SHIFT])
                    value |= (code & _U64(0xFFFF)) << n_bits
                    n_bits += code >> _U64(16)
                at, window, filled = _put(words, at, window, filled, value, n_bits)
                start += 4
        for i in range(start, stop):
            run = records[i] & _RUN_MASK
            token = _run_token(int(run))
            code = _U64(run_codes[tables[group], token])
            value = code & _U64(0xFFFF)
            n_bits = code >> _U64(16)
            n_extra = _U64((token - 8) >> 2 if token >= 16 else 0)
            value |= (_U64(run) & ((_U64(1) << n_extra) - _U64(1))) << n_bits
            n_bits += n_extra
            code = _U64(codes[records[i] >> _LITERAL_SHIFT])
            value |= (code & _U64(0xFFFF)) << n_bits
            n_bits += code >> _U64(16)
            at, window, filled = _put(words, at, window, filled, value, n_bits)
        start = stop
    words[at] = window
    return words[: at + 1], 64 * at + int(np.int64(filled))


@compiled(nogil=True)
def _unpack_literals(
    words: UInt64s, position: np.uint64, end: np.uint64, windows: UInt32s, out: UInt8s
) -> np.uint64:  # pragma: no cover - compiled
    """Decode codes of literals alone; return the position after them, beyond the end if they are bad."""
    mask = _U64(windows.size - 1)
    for i in range(out.size):
        if position > end:
            break
        entry = _U64(windows[_window_at(words, position) & mask])
        out[i] = np.uint8(entry & _U64(255))
        position += entry >> _U64(8)
    return position


@compiled(nogil=True)
def _unpack_runs(
    words: UInt64s,
    position: np.uint64,
    end: np.uint64,
    runs: UInt32s,
    literals: UInt32s,
    fill: int,
    out: UInt8s,
) -> np.uint64:  # pragma: no cover - compiled
    """Decode a group with an expected delta; return the position after it, beyond the end if it is bad."""
    run_mask, literal_mask = _U64(runs.size - 1), _U64(literals.size - 1)
    out[:] = np.uint8(fill)
    at, size = _U64(0), _U64(out.size)
    while at < size:
        if position > end:
            break
        window = _window_at(words, position)
        entry = _U64(runs[window & run_mask])
        n_code = entry & _U64(15)
        n_extra = (entry >> _U64(4)) & _U64(31)
        window >>= n_code
        run = (entry >> _U64(9)) + (window & ((_U64(1) << n_extra) - _U64(1)))
        window >>= n_extra
        position += n_code + n_extra
        if run >= size - at:
            return position if run == size - at else end + _U64(1)
        at += run
        entry = _U64(literals[window & literal_mask])
        position += entry >> _U64(8)
        out[at] = np.uint8(entry & _U64(255))
        at += _U64(1)
    return position


@compiled(nogil=True)
def unpack_events(
    words: UInt64s,
    n_bits: int,
    groups: UInt8s,
    sizes: Int64s,
    bases: Int64s,
    expected: Int64s,
    modulus: int,
    tables: Int64s,
    run_windows: UInt32s,
    literal_windows: UInt32s,
    out: UInt8s,
) -> int:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.unpack_events`."""
    grouped = np.empty(groups.size, np.uint8)
    position, end = _U64(0), _U64(n_bits)
    start = _U64(0)
    for group in range(256):
        size = sizes[group]
        if size == 0:
            continue
        stop = start + _U64(size)
        runs = run_windows[tables[group]]
        literals = literal_windows[tables[group]]
        if expected[group] > 255:
            position = _unpack_literals(words, position, end, literals, grouped[start:stop])
        else:
            fill = (bases[group] - expected[group]) % modulus
            position = _unpack_runs(words, position, end, runs, literals, fill, grouped[start:stop])
        if position > end:
            return -1
        _subtract(bases[group], modulus, grouped[start:stop])
        start = stop
    _scatter(groups, sizes, grouped, out)
    return int(np.int64(position))


@compiled(nogil=True)
def pack_symbols(symbols: UInt8s, codes: UInt32s) -> tuple[UInt64s, int]:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.pack_symbols`."""
    # At most 12 bits a symbol, so that four fit into a word; and one word is open.
    words = np.empty(symbols.size * 12 // 64 + 2, np.uint64)
    at = 0
    window = _U64(0)
    filled = _U64(0)
    n = symbols.size
    for i in range(0, n - 3, 4):
        value = _U64(0)
        n_bits = _U64(0)
        for j in range(4):
            code = _U64(codes[symbols[i + j]])
            value |= (code & _U64(0xFFFF)) << n_bits
            n_bits += code >> _U64(16)
        at, window, filled = _put(words, at, window, filled, value, n_bits)
    for i in range(n - n % 4, n):
        code = _U64(codes[symbols[i]])
        at, window, filled = _put(words, at, window, filled, code & _U64(0xFFFF), code >> _U64(16))
    words[at] = window
    return words[: at + 1], 64 * at + int(np.int64(filled))


@compiled(nogil=True)
def unpack_symbols(
    words: UInt64s, n_bits: int, windows: UInt32s, out: UInt8s
) -> int:  # pragma: no cover - compiled
    """See `inshrink_core.ops.symbols.unpack_symbols`."""
    position = _unpack_literals(words, _U64(0), _U64(n_bits), windows, out)
    return int(np.int64(position)) if position <= _U64(n_bits) else -1
