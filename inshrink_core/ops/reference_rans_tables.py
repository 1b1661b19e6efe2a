"""Probability tables of the context rANS coder in plain Python: the norm, which numba also compiles.

The functions make no arrays and call nothing but each other: arrays of numpy's own functions would take
numba seconds to compile. Results go where the caller says. Every index is proved in range by a loop bound
or a guard, because compiled code checks none.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__ = ["choose_tables", "normalize_counts", "pool_contexts", "read_tables", "write_tables"]


@register("normalize_counts", Backend.REFERENCE)
def normalize_counts(
    counts: NDArray[np.int64], n_rows: int, precision: int, frequencies: NDArray[np.int64]
) -> None:
    """See `inshrink_core.ops.rans_tables.normalize_counts`."""
    n_symbols = counts.shape[1]
    size = 1 << precision
    for row in range(n_rows):
        total = 0
        for s in range(n_symbols):
            total += counts[row, s]
            frequencies[row, s] = 0
        if total == 0:
            frequencies[row, 0] = size
            continue
        left = size
        for s in range(n_symbols):
            if counts[row, s] > 0:
                frequencies[row, s] = max(counts[row, s] * size // total, 1)
                left -= frequencies[row, s]
        # log((f + 1) / f) is 2 / (2 f + 1) up to a term in f**-3: comparing count / (2 f + 1) finds the
        # symbol whose bits fall most by one more, comparing count / (2 f - 1) whose rise least by one less.
        while left != 0:
            best = -1
            side = 1 if left > 0 else -1
            for s in range(n_symbols):
                f = frequencies[row, s]
                if f == 0 or (side < 0 and f == 1):
                    continue
                if best < 0:
                    best = s
                    continue
                this = counts[row, s] * (2 * frequencies[row, best] + side)
                other = counts[row, best] * (2 * f + side)
                if (side > 0 and this > other) or (side < 0 and this < other):
                    best = s
            if best < 0:
                break
            frequencies[row, best] += side
            left -= side


@register("pool_contexts", Backend.REFERENCE)
def pool_contexts(
    merged: NDArray[np.int64],
    leaders: NDArray[np.int64],
    alive: NDArray[np.bool_],
    stale: NDArray[np.bool_],
    bits: NDArray[np.float64],
) -> float:
    """See `inshrink_core.ops.rans_tables.pool_contexts`; leaders are numbers of contexts, -1: not there.

    `merged` begins as the counts, `leaders` as anything; the others are memory to work in.
    """
    n_contexts, n_symbols = merged.shape
    for c in range(n_contexts):
        leaders[c] = -1
        for s in range(n_symbols):
            if merged[c, s] > 0:
                leaders[c] = c
        alive[c] = leaders[c] == c
        for d in range(n_contexts):
            stale[c, d] = True
    while True:
        best_gain, best_i, best_j = 0.0, -1, -1
        # The diagonal first: what two contexts take alone is compared with what they take together.
        for apart in range(n_contexts):
            for i in range(n_contexts - apart):
                j = i + apart
                if not alive[i] or not alive[j]:
                    continue
                if stale[i, j]:
                    stale[i, j] = False
                    total = 0
                    for s in range(n_symbols):
                        total += merged[i, s] + (merged[j, s] if j > i else 0)
                    log_total = math.log2(total)
                    seen = 0
                    before = 0
                    sum_bits = 0.0
                    for s in range(n_symbols):
                        if seen == total:
                            break
                        count = merged[i, s] + (merged[j, s] if j > i else 0)
                        length = 0
                        if count > 0:
                            sum_bits += count * (log_total - math.log2(count))
                            f = max(count * 4096 // total, 1)
                            while (f >> length) > 0:
                                length += 1
                            sum_bits += length - 1
                        # A change by d takes 1 bit and 2 for each bit of |d|: see write_tables.
                        jump = abs(length - before)
                        before = length
                        sum_bits += 1
                        while jump > 0:
                            sum_bits += 2
                            jump >>= 1
                        seen += count
                    bits[i, j] = sum_bits
                gain = bits[i, i] + bits[j, j] - bits[i, j]
                if j > i and gain > best_gain:
                    best_gain, best_i, best_j = gain, i, j
        if best_i < 0:
            break
        alive[best_j] = False
        for s in range(n_symbols):
            merged[best_i, s] += merged[best_j, s]
        for c in range(n_contexts):
            if leaders[c] == best_j:
                leaders[c] = best_i
            stale[best_i, c] = True
            stale[c, best_i] = True
    total_bits = 0.0
    for c in range(n_contexts):
        if alive[c]:
            total_bits += bits[c, c]
    return total_bits


@register("write_tables", Backend.REFERENCE)
def write_tables(
    frequencies: NDArray[np.int64], n_tables: int, precision: int, bits: NDArray[np.uint8], at: int
) -> int:
    """See `inshrink_core.ops.rans_tables.write_tables`; from a place on, returning the place after."""
    n_symbols = frequencies.shape[1]
    for table in range(n_tables):
        left = 1 << precision
        before = 0
        for s in range(n_symbols):
            if left <= 0:
                break
            f = frequencies[table, s]
            length = 0
            while (f >> length) > 0:
                length += 1
            change = length - before
            zigzag = 2 * change if change >= 0 else -2 * change - 1
            before = length
            golomb = 0
            while ((zigzag + 1) >> golomb) > 1:
                golomb += 1
            for _ in range(golomb):
                bits[at] = 0
                at += 1
            for k in range(golomb, -1, -1):
                bits[at] = ((zigzag + 1) >> k) & 1
                at += 1
            for k in range(length - 1):
                bits[at] = (f >> k) & 1
                at += 1
            left -= f
    return at


@register("choose_tables", Backend.REFERENCE)
def choose_tables(
    counts: NDArray[np.int64],
    rows: NDArray[np.int64],
    precisions: NDArray[np.int64],
    costs: NDArray[np.int64],
    pooled: NDArray[np.int64],
    frequencies: NDArray[np.int64],
    bits: NDArray[np.uint8],
) -> tuple[int, int, int, int]:
    """See `inshrink_core.ops.rans_tables.choose_tables`: tables, their precision, bits, cost of the data.

    `rows` becomes zeros where one table for all contexts is best. `pooled` is memory to work in.
    """
    n_contexts, n_symbols = counts.shape
    n_used, n_rows = 0, 1
    for s in range(n_symbols):
        used = 0
        for c in range(n_contexts):
            if counts[c, s] > 0:
                used = 1
        n_used += used
    for c in range(n_contexts):
        n_rows = max(n_rows, rows[c] + 1)
    best, best_cost, best_tables, best_precision = -1, 0, 0, 0
    n_tables, precision, n_bits, cost = 0, 0, 0, 0
    n_candidates = precisions.size * (2 if n_rows > 1 else 1)
    # Once more after the last, for the best.
    for candidate in range(n_candidates + 1):
        if candidate < n_candidates:
            n_tables = n_rows if candidate < precisions.size else 1
            precision = precisions[candidate % precisions.size]
        else:
            n_tables, precision = best_tables, best_precision
        if n_used > 1 << precision:
            continue
        for row in range(n_tables):
            for s in range(n_symbols):
                pooled[row, s] = 0
        width = 0
        while (n_tables - 1) >> width > 0:
            width += 1
        n_bits = 0
        for c in range(n_contexts):
            row = rows[c] if n_tables > 1 else 0
            for s in range(n_symbols):
                pooled[row, s] += counts[c, s]
            for k in range(width):
                bits[n_bits] = (row >> k) & 1
                n_bits += 1
        normalize_counts(pooled, n_tables, precision, frequencies)
        n_bits = write_tables(frequencies, n_tables, precision, bits, n_bits)
        cost = 0
        for row in range(n_tables):
            for s in range(n_symbols):
                # costs[0] stands for 4096, the only frequency whose symbols take no bits.
                cost += pooled[row, s] * costs[(frequencies[row, s] << (12 - precision)) & 4095]
        if best < 0 or cost + (n_bits << 16) < best_cost:
            best, best_cost = candidate, cost + (n_bits << 16)
            best_tables, best_precision = n_tables, precision
    if n_tables == 1:
        for c in range(n_contexts):
            rows[c] = 0
    return n_tables, precision, n_bits, cost


@register("read_tables", Backend.REFERENCE)
def read_tables(
    packed: NDArray[np.uint8],
    n_bits: int,
    precision: int,
    rows: NDArray[np.int64],
    width: int,
    frequencies: NDArray[np.int64],
) -> int:
    """See `inshrink_core.ops.rans_tables.read_tables`; returns the number of bits taken, or -1."""
    n_tables, n_symbols = frequencies.shape
    at = 0
    if rows.size * width > n_bits:
        return -1
    for c in range(rows.size):
        rows[c] = 0
        for k in range(width):
            rows[c] |= (int(np.int64(packed[at >> 3])) >> (at & 7) & 1) << k
            at += 1
        if rows[c] >= n_tables:
            return -1
    for table in range(n_tables):
        left = 1 << precision
        length = 0
        for s in range(n_symbols):
            frequencies[table, s] = 0
        for s in range(n_symbols):
            if left == 0:
                break
            golomb = 0
            while golomb < 5 and at < n_bits and (int(np.int64(packed[at >> 3])) >> (at & 7) & 1) == 0:
                golomb += 1
                at += 1
            if golomb == 5 or at + golomb + 1 > n_bits:
                return -1
            value = 0
            for _ in range(golomb + 1):
                value = 2 * value + (int(np.int64(packed[at >> 3])) >> (at & 7) & 1)
                at += 1
            zigzag = value - 1
            length += zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2
            if length < 0 or length > precision + 1 or at + length > n_bits + 1:
                return -1
            if length == 0:
                continue
            f = 1 << (length - 1)
            for k in range(length - 1):
                f |= (int(np.int64(packed[at >> 3])) >> (at & 7) & 1) << k
                at += 1
            if f > left:
                return -1
            frequencies[table, s] = f
            left -= f
        if left != 0:
            return -1
    return at
