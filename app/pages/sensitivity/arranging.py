"""How the rows of a measurement are laid out: their order, and what their values are relative to.

Nothing here is Streamlit's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from inshrink_app.model import Sensitivity

NORMALISED: Mapping[str, str] = {
    "plain": "Per weight",
    "share": "Share of the total",
    "rate": "Per learning rate",
}
"""What values are relative to."""

ORDERS: Mapping[str, str] = {
    "forward": "Model's order",
    "share": "Share of the total",
    "sensitivity": "Per weight",
    "size": "Size",
}
"""What rows are sorted by: the model's own order, or the largest first."""


def normalised(
    table: Sensitivity,
    how: str,
    whole: Sensitivity | None = None,
    rates: np.ndarray | None = None,
) -> Sensitivity:
    """Return a table relative to something.

    Parameters
    ----------
    table
        What was measured.
    how
        A key of `NORMALISED`: a share is what the row's parameters carry together (mean times size), of what
        all rows carry at the step.
    whole
        All tensors, where the table has only some of the rows.
    rates
        The learning rate summed over the steps that lead to each checkpoint (`learning_rates`).

    Examples
    --------
    >>> from inshrink_core.analysis.profile import Row
    >>> rows = tuple(Row(name, "", "linear", "weight", 1, n, (n,)) for name, n in (("a", 3), ("b", 1)))
    >>> values = {"mean": np.array([[1.0, 2.0], [1.0, 2.0]], np.float32)}
    >>> table = Sensitivity(metric="fisher", by="tensor", rows=rows, steps=(1, 2), values=values)
    >>> normalised(table, "share").values["mean"][:, 0].tolist()
    [0.75, 0.25]
    """
    if how == "rate" and rates is not None:
        values = {name: (one / rates).astype(np.float32) for name, one in table.values.items()}
    elif how == "share":
        sums = table.carried()
        every = sums if whole is None else whole.carried()
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            totals = np.nansum(every, axis=0)
            shares = np.where(totals > 0, sums / totals, np.nan).astype(np.float32)
        values = dict.fromkeys(table.values, shares)
    else:
        return table
    return dataclasses.replace(table, values=values)


def ordered(table: Sensitivity, by: str, statistic: str) -> tuple[int, ...]:
    """Return the places of the rows in the order they are drawn in.

    Parameters
    ----------
    table
        What is drawn.
    by
        A key of `ORDERS`. By share or per weight: the last that a row has.
    statistic
        Whose values count.

    Notes
    -----
    Of equal rows the earlier stands first.
    """
    if by == "forward":
        return tuple(range(len(table.rows)))
    if by == "size":
        keys: Sequence[float] = [float(row.numel) for row in table.rows]
    else:
        keys = list(map(_last, table.carried() if by == "share" else table.values[statistic]))
    return tuple(sorted(range(len(keys)), key=lambda place: -keys[place]))


def _last(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else -np.inf
