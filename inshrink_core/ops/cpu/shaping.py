"""Numba kernels of error feedback: sixteen rows at a time, one row per vector lane.

`inshrink_core.ops.shaping` documents the functions and has the versions in plain PyTorch. Fractions of the
step size and their sums are integers below 2**53 in float64. They are exact in any order, with or without
fused operations, and faster in vectors than 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic
from torch import Tensor

from inshrink_core.ops.cpu.compiled import (
    Float32s,
    Float64s,
    Int16s,
    Int32s,
    Int64s,
    call,
    inlined,
    kernel,
    load,
    part,
    store,
)
from inshrink_core.ops.lattice import Lattice
from inshrink_core.ops.shaping import (
    FAR,
    MAX_COUNTED,
    MAX_ERROR,
    MAX_FEEDBACK,
    PARTS,
    RANK,
    SKETCHED,
    Factors,
)

_LANES = 16
_STEPS = 128
"""Number of columns transposed at a time: they take 24 kB next to 4 kB of sums."""

_WIDTH = _STEPS * _LANES

_PASSED, _ERROR, _ALONG, _BELOW, _GRADES, _LEADS = (_LANES * at for at in (0, 1, 2, 3, 4, 6))
"""Offsets of the per-lane values of a step; the last two hold two values each."""

_ROWS, _WIDE = 4, 2 * _LANES
"""Rows of a sketch that are updated at a time, and number of 16-bit values in a vector."""

_SPLIT = 12
"""Products with signs have 26 bits; a multiple of 2**12 and a remainder fit 16 bits each."""

_FEW = 32
"""Number of pairs of products whose sum stays below 2**31, for factors below 2**12 and such multiples."""

_I16, _I32, _F32, _F64 = np.int16, np.int32, np.float32, np.float64

_VECTOR = ir.VectorType(ir.DoubleType(), _LANES)
_intrinsic: Any = intrinsic
_cgutils: Any = untyped_cgutils


class _Vectors:
    """Loads and stores of vectors in a float64 array.

    LLVM does not vectorize a loop over the ranks of two arrays, because it cannot prove that they do not
    overlap.
    """

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any) -> None:
        self._builder, self._data = builder, context.make_array(kind)(context, builder, array).data

    def load(self, at: Any) -> Any:
        """Return the vector at an index."""
        return load(self._builder, self._data, at, _VECTOR)

    def spread(self, at: Any) -> Any:
        """Return the number at an index, broadcast to every lane."""
        number = self._builder.load(self._builder.gep(self._data, [at]))
        first = self._builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        return self._builder.shuffle_vector(first, first, lanes)

    def put(self, number: Any, at: Any) -> None:
        """Write a scalar."""
        self._builder.store(number, self._builder.gep(self._data, [at]))

    def store(self, value: Any, at: Any) -> None:
        """Write a vector."""
        store(self._builder, value, self._data, at)


def _fused(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Return ``left * right + total``, in one operation if the processor supports it."""
    return call(builder, f"llvm.fmuladd.v{_LANES}f64", _VECTOR, left, right, total)


@_intrinsic
def _add_paired(
    _: Any, out: Any, at: Any, rows: Any, row_at: Any, step: Any, pairs: Any, pair_at: Any, n_pairs: Any
) -> Any:
    """Add the products of four rows of numbers with paired rows to four rows of `SKETCHED` sums.

    Two products of 16-bit numbers become a 32-bit sum; processors have an instruction for it.
    """

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        totals, numbers, beside = (
            context.make_array(signature.args[i])(context, builder, given[i]).data for i in (0, 2, 5)
        )
        sums, paired, wide = (
            ir.VectorType(ir.IntType(bits), n) for bits, n in ((32, _LANES), (16, _WIDE), (32, _WIDE))
        )
        order, first = ir.VectorType(ir.IntType(32), _LANES), ir.IntType(32)(0)
        even, odd = (ir.Constant(order, list(range(begin, _WIDE, 2))) for begin in (0, 1))

        def place(begin: Any, factor: Any, number: Any) -> Any:
            return builder.add(begin, builder.mul(factor, number))

        def constant(number: int) -> Any:
            return context.get_constant(types.intp, number)

        stored = [(row, half, _cgutils.alloca_once(builder, sums)) for row in range(_ROWS) for half in (0, 1)]
        ends = [place(given[1], constant(_LANES), constant(2 * row + half)) for row, half, _ in stored]
        for (_, _, total), end in zip(stored, ends, strict=True):
            builder.store(load(builder, totals, end, sums), total)
        with _cgutils.for_range(builder, given[7]) as each:
            pair = builder.mul(builder.add(given[6], each.index), constant(2 * _WIDE))
            halves = [
                load(builder, beside, builder.add(pair, constant(half * _WIDE)), paired) for half in (0, 1)
            ]
            for row, half, total in stored:
                number = place(place(given[3], given[4], constant(row)), constant(2), each.index)
                left = load(builder, numbers, number, ir.VectorType(ir.IntType(16), 2))
                left = builder.bitcast(left, ir.IntType(32))
                left = builder.insert_element(ir.Constant(sums, ir.Undefined), left, first)
                left = builder.shuffle_vector(left, left, ir.Constant(order, [0] * _LANES))
                left = builder.bitcast(left, paired)
                # LLVM recognizes the instruction in this form.
                product = builder.mul(builder.sext(left, wide), builder.sext(halves[half], wide))
                added = [builder.shuffle_vector(product, product, which) for which in (even, odd)]
                builder.store(builder.add(builder.load(total), builder.add(*added)), total)
        for (_, _, total), end in zip(stored, ends, strict=True):
            store(builder, builder.load(total), totals, end)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(out, integer, rows, integer, integer, pairs, integer, integer), build


class _Total:
    """Sum of products in two halves, so that each addition waits only for the one before the last."""

    def __init__(self, builder: Any) -> None:
        self._builder, self._halves = builder, [ir.Constant(_VECTOR, [0.0] * _LANES)] * 2

    def add(self, left: Any, right: Any) -> None:
        """Add a product."""
        self._halves.reverse()
        self._halves[0] = _fused(self._builder, left, right, self._halves[0])

    def end(self) -> Any:
        """Return the rounded sum, halves upwards."""
        b, half = self._builder, ir.Constant(_VECTOR, [0.5] * _LANES)
        return call(b, f"llvm.floor.v{_LANES}f64", _VECTOR, b.fadd(b.fadd(*self._halves), half))


def _advancing(take: Callable[[_Vectors, Any], Any]) -> Any:
    """Return a function that adds a column's errors to the row sums and computes the next column's feedback.

    The `RANK` sums are `_LANES` apart, their multipliers one step apart. `take` reads a multiplier.
    """

    def advance(
        _: Any, out: Any, sums: Any, error: Any, directions: Any, at: Any, gains: Any, next_at: Any, step: Any
    ) -> Any:
        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            feedback, stored, missed, spread, feed = (
                _Vectors(context, builder, signature.args[i], given[i]) for i in (0, 1, 2, 3, 5)
            )
            place, next_place, total = given[4], given[6], _Total(builder)
            error = missed.load(context.get_constant(types.intp, 0))
            for rank in range(RANK):
                here = context.get_constant(types.intp, rank * _LANES)
                now = _fused(builder, take(spread, place), error, stored.load(here))
                stored.store(now, here)
                total.add(take(feed, next_place), now)
                place, next_place = builder.add(place, given[7]), builder.add(next_place, given[7])
            feedback.store(total.end(), context.get_constant(types.intp, 0))
            return context.get_dummy_value()

        integers = (types.intp,) * 3
        return types.void(out, sums, error, directions, integers[0], gains, *integers[1:]), build

    return _intrinsic(advance)


_advance_row, _advance_diagonal = _advancing(_Vectors.spread), _advancing(_Vectors.load)


@_intrinsic
def _pass_down(
    _: Any, out: Any, sums: Any, error: Any, rows: Any, down: Any, leaving: Any, entering: Any
) -> Any:
    """Add the errors of a diagonal to the column sums, and compute the feedback of the next diagonal.

    Each column moves to the next row, which is the next lane. Sums of the last lane leave, others enter.
    `rows` has W, then H. `down` has the sums of columns, `RANK` for each.
    """

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        feedback, stored, missed, factors, memory = (
            _Vectors(context, builder, signature.args[i], given[i]) for i in range(5)
        )
        total, error = _Total(builder), missed.load(context.get_constant(types.intp, 0))
        last, places = ir.IntType(32)(_LANES - 1), [_LANES, *range(_LANES - 1)]
        order = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), places)
        for rank in range(RANK):
            here, there = (context.get_constant(types.intp, (rank + more) * _LANES) for more in (0, RANK))
            number = context.get_constant(types.intp, rank)
            now = _fused(builder, factors.load(there), error, stored.load(here))
            memory.put(builder.extract_element(now, last), builder.add(given[5], number))
            now = builder.shuffle_vector(now, memory.spread(builder.add(given[6], number)), order)
            stored.store(now, here)
            total.add(factors.load(here), now)
        feedback.store(total.end(), context.get_constant(types.intp, 0))
        return context.get_dummy_value()

    return types.void(out, sums, error, rows, down, types.intp, types.intp), build


@part
def turn_rows(
    values: Float32s,
    factor: np.float32,
    first: int,
    n: int,
    skew: int,
    begin: int,
    size: int,
    turned: Float32s,
) -> None:  # pragma: no cover - compiled
    """Transpose a part of sixteen rows: values of a step become adjacent, missing rows become NaN."""
    n_here = min(_LANES, values.size // n - first)
    for block in range(begin, begin + size, _LANES):
        at, place = (block - begin) * _LANES, first * n + block
        if n_here == _LANES and block >= skew * _LANES and block + _LANES <= n:
            for i in range(_LANES):
                for lane in range(_LANES):
                    value = _F32(values[place + lane * (n - skew) + i])
                    turned[at + i * _LANES + lane] = _F32(value * factor)
            continue
        turned[at : at + _LANES * _LANES] = _F32(np.nan)
        for lane in range(n_here):
            column = block - lane * skew
            for i in range(max(0, -column), min(_LANES, n - column)):
                turned[at + i * _LANES + lane] = _F32(_F32(values[place + lane * (n - skew) + i]) * factor)


@part
def turn_back(
    turned: Float32s, first: int, n: int, skew: int, begin: int, size: int, values: Float32s
) -> None:  # pragma: no cover - compiled
    """Undo `turn_rows` for a part of sixteen rows."""
    n_here = min(_LANES, values.size // n - first)
    for block in range(begin, begin + size, _LANES):
        at, place = (block - begin) * _LANES, first * n + block
        if n_here == _LANES and block >= skew * _LANES and block + _LANES <= n:
            for lane in range(_LANES):
                for i in range(_LANES):
                    values[place + lane * (n - skew) + i] = turned[at + i * _LANES + lane]
            continue
        for lane in range(n_here):
            column = block - lane * skew
            for i in range(max(0, -column), min(_LANES, n - column)):
                values[place + lane * (n - skew) + i] = turned[at + i * _LANES + lane]


@inlined
def round_nearest(
    work: Float32s, at: int, reciprocal: np.float32, lanes: Float64s
) -> None:  # pragma: no cover - compiled
    """Round a step to the nearest points without a base; the points become changes."""
    most, worst, parts = _F64(MAX_FEEDBACK), _F64(MAX_ERROR), _F64(PARTS)
    for lane in range(_LANES):
        point = at + lane + _WIDTH
        u = _F32(_F32(work[at + lane] - work[point]) * reciprocal)
        here = np.abs(u) < _F32(FAR)
        r = _F64(np.rint(_F32(u * _F32(PARTS)))) if here else 0.0
        wanted = r - min(max(lanes[_ALONG + lane] + lanes[_BELOW + lane], -most), most)
        q = np.floor(wanted * (1.0 / parts) + 0.5)
        missed = min(max(parts * q - r, -worst), worst)
        lanes[_ERROR + lane] = missed if here else 0.0
        passed = min(max(lanes[_ERROR + lane] + lanes[_ALONG + lane], -worst), worst)
        lanes[_PASSED + lane] = passed if here else 0.0
        work[point] = _F32(q) if here else np.rint(u)


@inlined
def round_matched(
    work: Float32s, at: int, reciprocal: np.float32, lanes: Float64s
) -> None:  # pragma: no cover - compiled
    """Round a step under matched gain; each lane has two thresholds, the second for values that crossed."""
    most, worst, parts = _F64(MAX_FEEDBACK), _F64(MAX_ERROR), _F64(PARTS)
    for lane in range(_LANES):
        point = at + lane + _WIDTH
        start = work[point + _WIDTH]
        u = _F32(_F32(work[at + lane] - work[point]) * reciprocal)
        moved = _F32(_F32(work[at + lane] - start) * reciprocal)
        offset = _F32(_F32(work[point] - start) * reciprocal)
        here = (np.abs(moved) < _F32(FAR)) & (np.abs(offset) < _F32(FAR))
        r = _F64(np.rint(_F32(moved * _F32(PARTS)))) if here else 0.0
        o = _F64(np.rint(_F32(offset * _F32(PARTS)))) if here else 0.0
        wanted = r - min(max(lanes[_ALONG + lane] + lanes[_BELOW + lane], -most), most)
        ahead = -o if wanted < 0.0 else o
        grade, crossed = lanes[_GRADES + lane], lanes[_GRADES + _LANES + lane]
        threshold = crossed if ahead > 0.5 * parts else grade
        size = np.floor((4.0 * np.abs(wanted) + 4.0 * parts - threshold) * (1.0 / 4096.0))
        matched = -size if wanted < 0.0 else size
        y = np.floor(wanted * (1.0 / parts) + 0.5) if grade == 0.0 else matched
        q = np.floor((parts * y - o) * (1.0 / parts) + 0.5)
        missed = min(max(parts * q + o - r, -worst), worst)
        lanes[_ERROR + lane] = missed if here else 0.0
        passed = min(max(lanes[_ERROR + lane] + lanes[_ALONG + lane], -worst), worst)
        lanes[_PASSED + lane] = passed if here else 0.0
        work[point] = _F32(q) if here else np.rint(u)
        movement = r if np.abs(r) < _F64(MAX_COUNTED) else 0.0
        lanes[_LEADS + lane] += (parts * y - movement) * movement
        lanes[_LEADS + _LANES + lane] += movement * movement


@kernel
def _shape(
    w: Float32s,
    b: Float32s,
    based: bool,
    x: Int32s,
    unit: np.float32,
    reciprocal: np.float32,
    grade: int,
    columns: Float64s,
    rows: Float64s,
    n: int,
    down: Float64s,
    work: Float32s,
    sums: Float64s,
    changes: Float32s,
    leads: Int64s,
) -> None:  # pragma: no cover - compiled
    """Apply error feedback to a tensor, sixteen rows at a time; with `rows`, each lane is a column behind.

    `columns` holds gains and directions by column. With `rows` it holds them by rank, from the last column to
    the first with sixteen zeros around them, `down` holds the sums of as many columns, and `rows` holds W and
    H by sixteen rows and rank. `work` holds three parts of sixteen rows, and `sums` the other values of each
    row.
    """
    n_rows, size, both = leads.shape[0], RANK * _LANES, rows.size > 0
    skew, length, half = int(both), columns.size // (2 * RANK), columns.size // 2
    values, points, starts = work[:_WIDTH], work[_WIDTH : 2 * _WIDTH], work[2 * _WIDTH :]
    stored, passing, lanes = sums[:size], sums[size : 2 * size], sums[2 * size :]
    passed, error = lanes[_PASSED:_ERROR], lanes[_ERROR:_ALONG]
    along, below = lanes[_ALONG:_BELOW], lanes[_BELOW:_GRADES]
    gains, directions = columns[:half], columns[half:]
    for first in range(0, n_rows, _LANES):
        n_here = min(_LANES, n_rows - first)
        mine = rows[first * 2 * RANK : (first + _LANES) * 2 * RANK]
        sums[:] = 0.0
        for lane in range(n_here):
            lanes[_GRADES + lane] = grade
            lanes[_GRADES + _LANES + lane] = grade * 7 // 10
        if both:
            _pass_down(below, passing, passed, mine, down, 0, _LANES * RANK)
        n_steps = n + skew * (n_here - 1)
        for begin in range(0, n_steps, _STEPS):
            n_now = min(_STEPS, n_steps - begin)
            turn_rows(w, _F32(1.0), first, n, skew, begin, n_now, values)
            turn_rows(x, unit, first, n, skew, begin, n_now, points)
            if based:
                turn_rows(b, _F32(1.0), first, n, skew, begin, n_now, starts)
            for k in range(n_now):
                step, at = begin + k, k * _LANES
                if based:
                    round_matched(work, at, reciprocal, lanes)
                else:
                    round_nearest(work, at, reciprocal, lanes)
                if both:
                    place, column = n - 1 + _LANES - step, (step + 1) * RANK
                    _advance_diagonal(along, stored, error, directions, place, gains, place - 1, length)
                    _pass_down(below, passing, passed, mine, down, column, column + _LANES * RANK)
                else:
                    place = step * RANK
                    _advance_row(along, stored, error, directions, place, gains, place + RANK, 1)
            turn_back(points, first, n, skew, begin, n_now, changes)
        for lane in range(n_here):
            leads[first + lane, 0] = np.int64(lanes[_LEADS + lane])
            leads[first + lane, 1] = np.int64(lanes[_LEADS + _LANES + lane])


@part
def take_integers(
    values: Float32s, factor: float, first: int, n: int, numbers: Int16s
) -> None:  # pragma: no cover - compiled
    """Convert sixteen rows to integers; missing rows become 0."""
    wide, n_here = numbers.size // _LANES, min(_LANES, values.size // n - first)
    numbers[n_here * wide :] = _I16(0)
    for lane in range(n_here):
        line = values[(first + lane) * n : (first + lane + 1) * n]
        found = numbers[lane * wide : (lane + 1) * wide]
        for i in range(n):
            found[i] = _I16(np.rint(_F64(line[i]) * factor))
        found[n:] = _I16(0)


@part
def pair_up(rows: Float64s, pairs: Int16s) -> None:  # pragma: no cover - compiled
    """Interleave pairs of rows of `SKETCHED` numbers; missing rows become zeros."""
    pairs[rows.size // (2 * SKETCHED) * 2 * SKETCHED :] = _I16(0)
    for at in range(0, rows.size, SKETCHED):
        begin = at // (2 * SKETCHED) * 2 * SKETCHED + at // SKETCHED % 2
        for i in range(SKETCHED):
            pairs[begin + 2 * i] = _I16(rows[at + i])


@part
def split(numbers: Int32s, low: Int16s, high: Int16s) -> None:  # pragma: no cover - compiled
    """Split paired rows of `SKETCHED` numbers into multiples of 2**`_SPLIT` and a signed remainder."""
    for at in range(0, numbers.size, 2 * SKETCHED):
        for i in range(SKETCHED):
            for k in range(2):
                number = numbers[at + k * SKETCHED + i]
                upper = _I32(_I32(number + _I32(1 << (_SPLIT - 1))) >> _I32(_SPLIT))
                high[at + 2 * i + k] = _I16(upper)
                low[at + 2 * i + k] = _I16(number - _I32(upper << _I32(_SPLIT)))


@inlined
def add_parted(low: Int32s, high: Int32s, out: Float64s) -> None:  # pragma: no cover - compiled
    """Add sums of remainders and of multiples to the totals."""
    for i in range(out.size):
        out[i] += _F64(high[i]) * _F64(1 << _SPLIT) + _F64(low[i])


@kernel
def _sketch(
    values: Float32s,
    factor: float,
    n: int,
    signs: Float64s,
    row_signs: Float64s,
    scratch: tuple[Any, ...],
    columns: Float64s,
    rows: Float64s,
) -> float:  # pragma: no cover - compiled
    """Fill in the sketches ``M' M S`` of columns and ``M M' R`` of rows; return the sum of squares of M.

    M is ``rint(values * factor)`` in 16 bits. S and R are signs; without R the row sketch is skipped. The
    kernel takes sixteen rows at a time. The products ``M S`` have 26 bits, so they are split into multiples
    of 2**`_SPLIT`, `high`, and a remainder, `low`. Both are multiplied with M again, and `upper` and `lower`
    are the sums. `middle` is ``M' R``, `turned` the transpose of the sixteen rows in `numbers`, and `pairs`
    and `row_pairs` are signs in pairs of rows. Both sketches must be zero at first and are padded to full
    vectors of columns and rows.
    """
    numbers, turned, low, high, pairs, row_pairs, products, lower, upper, middle = scratch
    n_rows, wide = values.size // n, columns.size // SKETCHED
    size, down = _LANES * SKETCHED, row_signs.size > 0
    pair_up(signs, pairs)
    pair_up(row_signs, row_pairs)
    squares = np.int64(0)
    for first in range(0, n_rows, _LANES):
        take_integers(values, factor, first, n, numbers)
        products[:] = _I32(0)
        for row in range(0, _LANES, _ROWS):
            _add_paired(products, row * SKETCHED, numbers, row * wide, wide, pairs, 0, wide // 2)
        split(products, low[:size], high[:size])
        for column in range(wide):
            for lane in range(_LANES):
                number = numbers[lane * wide + column]
                turned[column * _LANES + lane] = number
                squares += np.int64(number) * np.int64(number)
        for column in range(0, wide, _ROWS):
            begin, end, at = column * SKETCHED, (column + _ROWS) * SKETCHED, column * _LANES
            lower[: end - begin] = _I32(0)
            upper[: end - begin] = _I32(0)
            _add_paired(lower, 0, turned, at, _LANES, low, 0, _LANES // 2)
            _add_paired(upper, 0, turned, at, _LANES, high, 0, _LANES // 2)
            add_parted(lower, upper, columns[begin:end])
            if down:
                _add_paired(middle, begin, turned, at, _LANES, row_pairs, first // 2, _LANES // 2)
    if down:
        split(middle, low, high)
        for first in range(0, n_rows, _LANES):
            take_integers(values, factor, first, n, numbers)
            for pair in range(0, wide // 2, _FEW):
                lower[:] = _I32(0)
                upper[:] = _I32(0)
                n_pairs = min(_FEW, wide // 2 - pair)
                for row in range(0, _LANES, _ROWS):
                    at = row * wide + 2 * pair
                    _add_paired(lower, row * SKETCHED, numbers, at, wide, low, pair, n_pairs)
                    _add_paired(upper, row * SKETCHED, numbers, at, wide, high, pair, n_pairs)
                add_parted(lower, upper, rows[first * SKETCHED : (first + _LANES) * SKETCHED])
    return _F64(squares)


def _zeros(*sizes: int) -> list[Float64s]:
    """Return newly allocated zeros, each array aligned for vectors of any processor."""
    ends = np.cumsum([n + -n % 8 for n in sizes])
    memory = np.zeros(ends[-1] + 7)
    memory = memory[-memory.__array_interface__["data"][0] // 8 % 8 :]
    return [memory[end - n - -n % 8 :][:n] for end, n in zip(ends, sizes, strict=True)]


def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grade: int,
    factors: Factors,
    by_row: Factors | None = None,
) -> tuple[Tensor, int, int]:
    """See `shaping.shape_changes`."""
    n, n_rows, both = factors.gains.shape[0], values.numel() // factors.gains.shape[0], by_row is not None
    changes, leads = np.empty(values.numel(), np.float32), np.zeros((n_rows, 2), np.int64)
    start, high = (values if base is None else base).numpy(), n_rows + -n_rows % _LANES
    # Without feedback down the rows, an extra column takes the feedback of the last one.
    wide = n + 2 * _LANES if both else n + 1
    columns, rows, down, work, sums = _zeros(
        2 * RANK * wide, 2 * RANK * high * both, RANK * wide * both, 3 * _WIDTH // 2, (2 * RANK + 8) * _LANES
    )
    gains = factors.gains * 2.0**-factors.shift
    if by_row is None:
        columns.reshape(2, wide, RANK)[:, :n] = gains, factors.directions
    else:
        turned = gains[::-1].T, factors.directions[::-1].T
        columns.reshape(2, RANK, wide)[:, :, _LANES:-_LANES] = turned
        padded = np.zeros((2, high, RANK))
        padded[:, :n_rows] = by_row.gains * 2.0**-by_row.shift, by_row.directions
        rows.reshape(-1, 2, RANK, _LANES)[:] = padded.reshape(2, -1, _LANES, RANK).transpose(1, 0, 3, 2)
    given = (values.numpy(), start, base is not None, integers.numpy())
    numbers = (_F32(lattice.unit), _F32(lattice.reciprocal), grade)
    room = (down, work.view(np.float32), sums)
    _shape(*given, *numbers, columns, rows, n, *room, changes, leads)
    lead, square = leads.sum(0).tolist()
    return torch.from_numpy(changes), lead, square


def sketch_sides(
    values: Tensor, up: int, signs: Float64s, row_signs: Float64s | None
) -> tuple[Float64s, Float64s | None, float]:
    """See `shaping.sketch_sides`."""
    n_rows, n = values.shape
    wide, high = ((left + -left % _LANES) * SKETCHED for left in (n, n_rows))
    of_rows = np.zeros(0) if row_signs is None else row_signs.reshape(-1)
    columns, rows = np.zeros(wide), np.zeros(high if of_rows.size else 0)
    lines, size = wide * _LANES // SKETCHED, _LANES * SKETCHED
    shorts = [np.empty(n, np.int16) for n in (lines, lines, wide, wide, wide, rows.size)]
    sums = [np.zeros(n, np.int32) for n in (size, size, size, wide if of_rows.size else 0)]
    flat = values.reshape(-1).numpy()
    square = _sketch(flat, 2.0**up, n, signs.reshape(-1), of_rows, (*shorts, *sums), columns, rows)
    down = 2.0 ** (-2 * up)
    by_row = None if row_signs is None else rows.reshape(-1, SKETCHED)[:n_rows] * down
    return columns.reshape(-1, SKETCHED)[:n] * down, by_row, square * down
