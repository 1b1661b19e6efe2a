"""The columns of a heatmap: steps, or neighbouring steps together where there are many. No Streamlit here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from inshrink_app.formatting import count_text
from numpy.typing import NDArray

__all__ = ["MAX_COLUMNS", "Columns", "bucket_steps", "column_edges", "column_of"]

MAX_COLUMNS = 100
"""More columns are thinner than a reader can tell apart on a laptop's screen."""


class Columns(NamedTuple):
    """The columns of a heatmap: values ``[rows, columns]``, a label each, and the most steps in one.

    `last` is the place of the last step in each column: what a click on it means.
    """

    values: NDArray[np.float32]
    labels: tuple[str, ...]
    steps_per_column: int
    last: tuple[int, ...]


def column_edges(n_steps: int, limit: int = MAX_COLUMNS) -> NDArray[np.int64]:
    """Return where columns begin, and the end of the last one."""
    return np.linspace(0, n_steps, min(limit, n_steps) + 1).round().astype(np.int64)


def bucket_steps(values: NDArray[np.float32], steps: Sequence[int], limit: int = MAX_COLUMNS) -> Columns:
    """Merge neighbouring steps into at most `limit` columns, by the mean of what is there.

    Parameters
    ----------
    values
        ``[rows, steps]``, NaN where there is no value. A column is NaN only where all its steps are.
    steps
        Ascending.
    """
    n_steps = len(steps)
    if n_steps <= limit:
        return Columns(values, tuple(count_text(step) for step in steps), 1, tuple(range(n_steps)))
    edges = column_edges(n_steps, limit)
    present = np.isfinite(values)
    sums = np.add.reduceat(np.where(present, values, 0).astype(np.float64), edges[:-1], axis=1)
    counts = np.add.reduceat(present, edges[:-1], axis=1, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums / counts).astype(np.float32)
    labels = tuple(
        f"{count_text(steps[a])} – {count_text(steps[b - 1])}" if b - a > 1 else count_text(steps[a])
        for a, b in pairwise(edges)
    )
    return Columns(means, labels, int(np.diff(edges).max()), tuple(int(b) - 1 for b in edges[1:]))


def column_of(place: int, n_steps: int, limit: int = MAX_COLUMNS) -> int:
    """Return the column that holds a step, by the step's place."""
    return int(np.searchsorted(column_edges(n_steps, limit), place, side="right")) - 1
