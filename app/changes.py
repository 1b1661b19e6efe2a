"""Changes of a metric between two steps, or between two runs: tables in, tables out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from inshrink_app.tables import Sensitivity
from numpy.typing import NDArray

__all__ = ["Changes", "between_runs", "between_steps", "octaves"]


class Changes(NamedTuple):
    """Changes in octaves, the largest at the end first.

    Parameters
    ----------
    names, layers
        Of each row.
    steps
        Of each column.
    values
        float64 ``[rows, steps]``; NaN where one of the two has no value.
    first, second
        What each row is compared by: the values at both steps, or of both runs at the last common step.
    only_first, only_second
        Tensors that only one of the two has.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()


def octaves(before: NDArray[np.floating], after: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the base-2 logarithm of a quotient; NaN where one of the two is not positive and finite.

    Examples
    --------
    >>> import numpy as np
    >>> octaves(np.array([1.0, 0.0]), np.array([4.0, 1.0])).tolist()
    [2.0, nan]
    """
    first, second = np.broadcast_arrays(before.astype(np.float64), after.astype(np.float64))
    sound = np.isfinite(first) & np.isfinite(second) & (first > 0) & (second > 0)
    quotient = np.divide(second, first, out=np.ones(first.shape), where=sound)
    return np.where(sound, np.log2(quotient), np.nan)


def between_steps(table: Sensitivity, statistic: str, first: int, second: int) -> Changes:
    """Return how rows changed from one step to every step up to another.

    Parameters
    ----------
    table
        One metric.
    statistic
        A key of its values.
    first, second
        Any two steps of it, in any order.
    """
    values = table.values[statistic]
    a, b = table.steps.index(first), table.steps.index(second)
    columns = slice(min(a, b), max(a, b) + 1)
    before, after = values[:, a], values[:, b]
    order = _largest_first(octaves(before, after))
    has_first, has_second = np.isfinite(before), np.isfinite(after)
    return Changes(
        names=tuple(table.rows[i].name for i in order),
        layers=tuple(table.rows[i].layer for i in order),
        steps=table.steps[columns],
        values=octaves(before[order, None], values[order, columns]),
        first=before[order].astype(np.float64),
        second=after[order].astype(np.float64),
        only_first=_named(table, has_first & ~has_second),
        only_second=_named(table, has_second & ~has_first),
    )


def between_runs(mine: Sensitivity, other: Sensitivity, statistic: str) -> Changes:
    """Return how rows of one run differ from those of the same name in another, at their common steps."""
    places = {row.name: i for i, row in enumerate(other.rows)}
    common = [(i, places[row.name]) for i, row in enumerate(mine.rows) if row.name in places]
    steps = tuple(step for step in mine.steps if step in set(other.steps))
    rows, others = (np.asarray([pair[k] for pair in common], np.int64) for k in (0, 1))
    at, there = ([table.steps.index(step) for step in steps] for table in (mine, other))
    first = mine.values[statistic][rows][:, at].reshape(len(common), len(steps))
    second = other.values[statistic][others][:, there].reshape(len(common), len(steps))
    change = octaves(first, second)
    last = change[:, -1] if steps else np.full(len(common), np.nan)
    order = _largest_first(last)
    mine_names = {row.name for row in mine.rows}
    ends = [
        (values[order, -1] if steps else np.full(len(order), np.nan)).astype(np.float64)
        for values in (first, second)
    ]
    return Changes(
        names=tuple(mine.rows[rows[i]].name for i in order),
        layers=tuple(mine.rows[rows[i]].layer for i in order),
        steps=steps,
        values=change[order],
        first=ends[0],
        second=ends[1],
        only_first=tuple(row.name for row in mine.rows if row.name not in places),
        only_second=tuple(row.name for row in other.rows if row.name not in mine_names),
    )


def _largest_first(change: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the order by falling change, in either direction; what cannot be told comes last."""
    size = np.where(np.isfinite(change), -np.abs(change), np.inf)
    return np.argsort(size, kind="stable")


def _named(table: Sensitivity, which: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(row.name for row, chosen in zip(table.rows, which, strict=True) if chosen)
