"""Numba kernels of shaped rounding: sixteen rows at a time, one to a lane of a vector.

`inshrink_core.ops.shaping` documents the functions; `inshrink_core.ops.reference.shaping` has their twins in
plain torch. Parts of spacings, and their sums, are whole float64 numbers below 2**53: exact in any order,
fused or not, and as fast in vectors as no 64-bit integer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.execution import new_array
from inshrink_core.ops.cpu.compiled import Float32s, Float64s, Int32s, Int64s, kernel, part
from inshrink_core.ops.lattice import Lattice
from inshrink_core.ops.reference import shaping as reference
from inshrink_core.ops.shaping import (
    FAR,
    MOST_COUNTED,
    MOST_ERROR,
    MOST_FED,
    PARTS,
    RANK,
    Factors,
    Shaped,
)

_LANES = 16
_COLUMNS = 128
"""Columns turned at a time: their parts and changes take 24 kB beside 4 kB of sums."""

_F32, _F64 = np.float32, np.float64

_VECTOR = ir.VectorType(ir.DoubleType(), _LANES)
_intrinsic: Any = intrinsic


class _Vectors:
    """Loads and stores vectors of an array of float64.

    LLVM makes none of a loop over the ranks of two arrays: it cannot know that these do not overlap.
    """

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any) -> None:
        self._builder, self._data = builder, context.make_array(kind)(context, builder, array).data

    def _pointer(self, at: Any) -> Any:
        return self._builder.bitcast(self._builder.gep(self._data, [at]), _VECTOR.as_pointer())

    def load(self, at: Any) -> Any:
        """Return the vector at an index."""
        return self._builder.load(self._pointer(at), align=8)

    def spread(self, at: Any) -> Any:
        """Return the number at an index in every lane."""
        number = self._builder.load(self._builder.gep(self._data, [at]))
        first = self._builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        return self._builder.shuffle_vector(first, first, lanes)

    def store(self, value: Any, at: Any) -> None:
        """Write a vector."""
        self._builder.store(value, self._pointer(at), align=8)


def _summing(take: Callable[[_Vectors, Any], Any]) -> Any:
    """Return a function that stores in `out` the sum of products of `RANK` vectors of two arrays.

    Each is a step after the last; `take` says how those of the first array are read.
    """

    def sum_products(
        _: Any, out: Any, one: Any, at: Any, step: Any, other: Any, other_at: Any, other_step: Any
    ) -> Any:
        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            result, first, second = (
                _Vectors(context, builder, signature.args[i], given[i]) for i in (0, 1, 4)
            )
            place, other_place, total = given[2], given[5], None
            for _ in range(RANK):
                product = builder.fmul(take(first, place), second.load(other_place))
                total = product if total is None else builder.fadd(total, product)
                place, other_place = builder.add(place, given[3]), builder.add(other_place, given[6])
            result.store(total, context.get_constant(types.intp, 0))
            return context.get_dummy_value()

        integers = (types.intp, types.intp)
        return types.void(out, one, *integers, other, *integers), build

    return _intrinsic(sum_products)


def _adding(take: Callable[[_Vectors, Any], Any]) -> Any:
    """Return a function that adds to `RANK` vectors of `out` those of `one` times one vector.

    Each is a step after the last; `take` says how those of `one` are read.
    """

    def add_products(
        _: Any, out: Any, at: Any, step: Any, one: Any, one_at: Any, one_step: Any, factor: Any
    ) -> Any:
        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            result, first, second = (
                _Vectors(context, builder, signature.args[i], given[i]) for i in (0, 3, 6)
            )
            times = second.load(context.get_constant(types.intp, 0))
            place, other_place = given[1], given[4]
            for _ in range(RANK):
                product = builder.fmul(take(first, other_place), times)
                result.store(builder.fadd(result.load(place), product), place)
                place, other_place = builder.add(place, given[2]), builder.add(other_place, given[5])
            return context.get_dummy_value()

        integers = (types.intp, types.intp)
        return types.void(out, *integers, one, *integers, factor), build

    return _intrinsic(add_products)


_sum_products, _sum_scaled = _summing(_Vectors.load), _summing(_Vectors.spread)
_add_products, _add_scaled = _adding(_Vectors.load), _adding(_Vectors.spread)


@part
def take_rows(
    w: Float32s,
    b: Float32s,
    based: bool,
    x: Int32s,
    unit: np.float32,
    reciprocal: np.float32,
    place: int,
    step: int,
    size: int,
    moved: Float32s,
    offset: Float32s,
    plain: Float32s,
    near: Float32s,
) -> None:  # pragma: no cover - compiled
    """Take a part of one row: its movement and offset in parts, its plain change; `near` is 1, or 0."""
    zero, one, far, parts = _F32(0.0), _F32(1.0), _F32(FAR), _F32(PARTS)
    for i in range(size):
        at = _F32(_F32(x[place + i]) * unit)
        u = _F32(_F32(w[place + i] - at) * reciprocal)
        r, o = u, zero
        if based:
            start = b[place + i]
            r = _F32(_F32(w[place + i] - start) * reciprocal)
            o = _F32(_F32(at - start) * reciprocal)
        inside = (np.abs(r) < far) & (np.abs(o) < far)
        moved[i * step] = np.rint(_F32(r * parts)) if inside else zero
        offset[i * step] = np.rint(_F32(o * parts)) if inside else zero
        plain[i * step] = np.rint(u)
        near[i * step] = one if inside else zero


@part
def feed(gains: Float64s, sums: Float64s, scale: float, fed: Float64s) -> None:  # pragma: no cover - compiled
    """Fill in what is fed to a column."""
    _sum_scaled(fed, gains, 0, 1, sums, 0, _LANES)
    for lane in range(_LANES):
        fed[lane] = np.floor(fed[lane] * scale + 0.5)


@part
def spread(directions: Float64s, error: Float64s, sums: Float64s) -> None:  # pragma: no cover - compiled
    """Add the errors of a column to the sums of their rows."""
    _add_scaled(sums, 0, _LANES, directions, 0, 1, error)


@part
def round_nearest(
    fed: Float64s, moved: Float32s, near: Float32s, changes: Float32s, error: Float64s
) -> None:  # pragma: no cover - compiled
    """Round a column to the nearest points, where there is no offset."""
    most, worst, parts = _F64(MOST_FED), _F64(MOST_ERROR), _F64(PARTS)
    for lane in range(_LANES):
        wanted = _F64(moved[lane]) - min(max(fed[lane], -most), most)
        q = np.floor(wanted * (1.0 / parts) + 0.5)
        missed = min(max(parts * q - _F64(moved[lane]), -worst), worst)
        here = near[lane] > _F32(0.0)
        error[lane] = missed if here else 0.0
        changes[lane] = _F32(q) if here else changes[lane]


@part
def round_matched(
    fed: Float64s,
    moved: Float32s,
    offset: Float32s,
    near: Float32s,
    grades: Float64s,
    changes: Float32s,
    error: Float64s,
    leads: Float64s,
) -> None:  # pragma: no cover - compiled
    """Round a column under matched gain; `grades` has a threshold by lane, then one for what crossed."""
    most, worst, parts = _F64(MOST_FED), _F64(MOST_ERROR), _F64(PARTS)
    for lane in range(_LANES):
        r, o = _F64(moved[lane]), _F64(offset[lane])
        wanted = r - min(max(fed[lane], -most), most)
        ahead = -o if wanted < 0.0 else o
        threshold = grades[_LANES + lane] if ahead > 0.5 * parts else grades[lane]
        size = np.floor((4.0 * np.abs(wanted) + 4.0 * parts - threshold) * (1.0 / 4096.0))
        matched = -size if wanted < 0.0 else size
        y = np.floor(wanted * (1.0 / parts) + 0.5) if grades[lane] == 0.0 else matched
        q = np.floor((parts * y - o) * (1.0 / parts) + 0.5)
        missed = min(max(parts * q + o - r, -worst), worst)
        here = near[lane] > _F32(0.0)
        error[lane] = missed if here else 0.0
        changes[lane] = _F32(q) if here else changes[lane]
        movement = r if here & (np.abs(r) < _F64(MOST_COUNTED)) else 0.0
        leads[lane] += (parts * y - movement) * movement
        leads[_LANES + lane] += movement * movement


@kernel
def _shape(
    w: Float32s,
    b: Float32s,
    based: bool,
    x: Int32s,
    unit: np.float32,
    reciprocal: np.float32,
    grades: Int32s,
    gains: Float64s,
    directions: Float64s,
    scale: float,
    work: Float32s,
    sums: Float64s,
    changes: Float32s,
    leads: Int64s,
) -> None:  # pragma: no cover - compiled
    """Shape a tensor; `work` holds four parts of sixteen rows, `sums` what else there is to each row."""
    n, n_rows, width = gains.shape[0], leads.shape[0], _COLUMNS * _LANES
    moved, offset = work[:width], work[width : 2 * width]
    plain, near = work[2 * width : 3 * width], work[3 * width :]
    held, at = sums[: RANK * _LANES], RANK * _LANES
    fed, error = sums[at : at + _LANES], sums[at + _LANES : at + 2 * _LANES]
    lane_grades, lane_leads = sums[at + 2 * _LANES : at + 4 * _LANES], sums[at + 4 * _LANES :]
    for first in range(0, n_rows, _LANES):
        n_here = min(_LANES, n_rows - first)
        sums[:] = 0.0
        work[:] = _F32(0.0)
        for lane in range(n_here):
            grade = grades[first + lane] if grades.size > 1 else grades[0]
            lane_grades[lane] = grade
            lane_grades[_LANES + lane] = grade * 7 // 10
        for begin in range(0, n, _COLUMNS):
            size = min(_COLUMNS, n - begin)
            for lane in range(n_here):
                place = (first + lane) * n + begin
                lanes = (moved[lane:], offset[lane:], plain[lane:], near[lane:])
                take_rows(w, b, based, x, unit, reciprocal, place, _LANES, size, *lanes)
            for k in range(size):
                at = k * _LANES
                rows = slice(at, at + _LANES)
                feed(gains[begin + k], held, scale, fed)
                if based:
                    round_matched(
                        fed,
                        moved[rows],
                        offset[rows],
                        near[rows],
                        lane_grades,
                        plain[rows],
                        error,
                        lane_leads,
                    )
                else:
                    round_nearest(fed, moved[rows], near[rows], plain[rows], error)
                spread(directions[begin + k], error, held)
            for lane in range(n_here):
                place = (first + lane) * n + begin
                for k in range(size):
                    changes[place + k] = plain[k * _LANES + lane]
        for lane in range(n_here):
            leads[first + lane, 0] = np.int64(lane_leads[lane])
            leads[first + lane, 1] = np.int64(lane_leads[_LANES + lane])


@part
def feed_both(
    gains: Float64s,
    sums: Float64s,
    row_gains: Float64s,
    down: Float64s,
    place: int,
    length: int,
    scale: float,
    row_scale: float,
    along: Float64s,
    fed: Float64s,
) -> None:  # pragma: no cover - compiled
    """Fill in what is fed to a diagonal, along its rows and in all; lanes are at places that follow."""
    _sum_products(along, gains, place, length, sums, 0, _LANES)
    _sum_products(fed, row_gains, 0, _LANES, down, place, length)
    for lane in range(_LANES):
        along[lane] = np.floor(along[lane] * scale + 0.5)
        fed[lane] = along[lane] + np.floor(fed[lane] * row_scale + 0.5)


@part
def spread_both(
    directions: Float64s,
    sums: Float64s,
    row_directions: Float64s,
    down: Float64s,
    place: int,
    length: int,
    near: Float32s,
    along: Float64s,
    error: Float64s,
) -> None:  # pragma: no cover - compiled
    """Add the errors of a diagonal to the sums of their rows, and of their columns."""
    worst = _F64(MOST_ERROR)
    _add_products(sums, 0, _LANES, directions, place, length, error)
    for lane in range(_LANES):
        passed = min(max(error[lane] + along[lane], -worst), worst)
        along[lane] = passed if near[lane] > _F32(0.0) else 0.0
    _add_products(down, place, length, row_directions, 0, _LANES, along)


@kernel
def _shape_both(
    w: Float32s,
    b: Float32s,
    based: bool,
    x: Int32s,
    unit: np.float32,
    reciprocal: np.float32,
    grades: Int32s,
    columns: Float64s,
    rows: Float64s,
    scale: float,
    row_scale: float,
    n: int,
    down: Float64s,
    work: Float32s,
    sums: Float64s,
    changes: Float32s,
    leads: Int64s,
) -> None:  # pragma: no cover - compiled
    """Shape a tensor both ways: lane i of sixteen rows is i columns behind the first.

    `columns` has gains and directions by rank, from the last column to the first and sixteen zeros around
    them, and `down` is as long as one of both; `rows` has both by sixteen rows and rank.
    """
    n_rows, width, length = leads.shape[0], (n + _LANES) * _LANES, down.size // RANK
    moved, offset = work[:width], work[width : 2 * width]
    plain, near = work[2 * width : 3 * width], work[3 * width :]
    held, at = sums[: RANK * _LANES], RANK * _LANES
    fed, error = sums[at : at + _LANES], sums[at + _LANES : at + 2 * _LANES]
    lane_grades, lane_leads = sums[at + 2 * _LANES : at + 4 * _LANES], sums[at + 4 * _LANES : at + 6 * _LANES]
    along, size = sums[at + 6 * _LANES :], RANK * _LANES
    gains, directions = columns[: RANK * length], columns[RANK * length :]
    for first in range(0, n_rows, _LANES):
        n_here = min(_LANES, n_rows - first)
        mine = rows[first // _LANES * 2 * size : (first // _LANES + 1) * 2 * size]
        sums[:] = 0.0
        work[:] = _F32(0.0)
        for lane in range(n_here):
            grade = grades[first + lane] if grades.size > 1 else grades[0]
            lane_grades[lane] = grade
            lane_grades[_LANES + lane] = grade * 7 // 10
            skew = lane * (_LANES + 1)
            lanes = (moved[skew:], offset[skew:], plain[skew:], near[skew:])
            take_rows(w, b, based, x, unit, reciprocal, (first + lane) * n, _LANES, n, *lanes)
        for step in range(n + n_here - 1):
            place, at = n - 1 + _LANES - step, step * _LANES
            here = slice(at, at + _LANES)
            feed_both(gains, held, mine[:size], down, place, length, scale, row_scale, along, fed)
            if based:
                round_matched(
                    fed, moved[here], offset[here], near[here], lane_grades, plain[here], error, lane_leads
                )
            else:
                round_nearest(fed, moved[here], near[here], plain[here], error)
            spread_both(directions, held, mine[size:], down, place, length, near[here], along, error)
        for lane in range(n_here):
            place = (first + lane) * n
            for k in range(n):
                changes[place + k] = plain[(k + lane) * _LANES + lane]
            leads[first + lane, 0] = np.int64(lane_leads[lane])
            leads[first + lane, 1] = np.int64(lane_leads[_LANES + lane])


def _aligned(n: int) -> Float64s:
    """Return memory for n numbers that begins where a vector of any processor may."""
    memory = np.empty(n + 7)
    begin = -memory.__array_interface__["data"][0] // 8 % 8
    return memory[begin : begin + n]


def _aligned_copy(values: NDArray[np.generic]) -> Float64s:
    copy = _aligned(values.size)
    copy[:] = values.reshape(-1)
    return copy


def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grades: Tensor,
    factors: Factors,
    by_row: Factors | None,
) -> Shaped:
    """See `shaping.shape_changes`."""
    n, n_rows = factors.gains.shape[0], values.numel() // factors.gains.shape[0]
    changes = new_array(values.numel(), np.float32)
    leads = np.zeros((n_rows, 2), np.int64)
    start = (values if base is None else base).numpy()
    known = (values.numpy(), start, base is not None, integers.numpy())
    numbers = (_F32(lattice.unit), _F32(lattice.reciprocal))
    scale, sums = 2.0**-factors.shift, _aligned((RANK + 7) * _LANES)
    if by_row is None:
        sides = (factors.gains.astype(np.float64), factors.directions.astype(np.float64))
        work = _aligned(2 * _COLUMNS * _LANES).view(np.float32)
        _shape(*known, *numbers, grades.numpy(), *sides, scale, work, sums, changes, leads)
        return Shaped(torch.from_numpy(changes), torch.from_numpy(leads))
    around = ((0, 0), (_LANES, _LANES))
    columns = np.stack([np.pad(side[::-1].T, around) for side in (factors.gains, factors.directions)])
    above = ((0, -n_rows % _LANES), (0, 0))
    rows = np.stack([np.pad(side, above) for side in (by_row.gains, by_row.directions)])
    rows = rows.reshape(2, -1, _LANES, RANK).transpose(1, 0, 3, 2)
    down = _aligned(RANK * (n + 2 * _LANES))
    down[:] = 0.0
    _shape_both(
        *known,
        *numbers,
        grades.numpy(),
        _aligned_copy(columns),
        _aligned_copy(rows),
        scale,
        2.0**-by_row.shift,
        n,
        down,
        _aligned(2 * (n + _LANES) * _LANES).view(np.float32),
        sums,
        changes,
        leads,
    )
    return Shaped(torch.from_numpy(changes), torch.from_numpy(leads))


_decompose, _feed_forward = kernel(reference.decompose), kernel(reference.feed_forward)


def factorize(
    sketch: Float64s, signs: Float64s, trace: float, dampings: Sequence[float], noise: float = 0.0
) -> tuple[Factors, ...]:
    """See `shaping.factorize`."""
    return reference.factors_by(_decompose, _feed_forward, sketch, signs, trace, dampings, noise)
