"""Rows of a measurement: some of them, or several as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from inshrink_app.widgets.modules import Node
from inshrink_app.widgets.tables import HeatRow, Sensitivity
from numpy.typing import NDArray

__all__ = ["aggregate", "take"]


def take(table: Sensitivity, places: Sequence[int]) -> Sensitivity:
    """Return some rows of a table."""
    index = np.asarray(places, dtype=np.int64)
    return dataclasses.replace(
        table,
        rows=tuple(table.rows[i] for i in places),
        values={name: values[index] for name, values in table.values.items()},
    )


def aggregate(table: Sensitivity, groups: Sequence[Node], exact: Sensitivity | None = None) -> Sensitivity:
    """Return a table with a row for each group.

    Parameters
    ----------
    table
        By tensor.
    groups
        Of its rows.
    exact
        The same metric by block or layer type: rows of the same name and extent are taken from it, medians
        and percentiles included. For all others these are means over tensors, weighted by their size.
    """
    known = {row.name: i for i, row in enumerate(exact.rows)} if exact is not None else {}
    rows, columns = [], {name: np.empty((len(groups), len(table.steps)), np.float32) for name in table.values}
    for place, group in enumerate(groups):
        row = _row_of(table, group)
        rows.append(row)
        at = known.get(group.name)
        same = exact is not None and at is not None and exact.rows[at].n_tensors == row.n_tensors
        for name, column in columns.items():
            if len(group.members) == 1:
                column[place] = table.values[name][group.members[0]]
            elif same and exact is not None and at is not None:
                column[place] = exact.values[name][at]
            else:
                column[place] = _mean(table, name, group)
    return dataclasses.replace(table, by="block", rows=tuple(rows), values=columns)


def _row_of(table: Sensitivity, group: Node) -> HeatRow:
    """Describe a group; one of a single tensor looks like that tensor."""
    members = [table.rows[i] for i in group.members]
    if len(members) == 1:
        return members[0]._replace(name=group.name)
    sizes: dict[str, int] = {}
    for member in members:
        sizes[member.layer] = sizes.get(member.layer, 0) + member.numel
    layer = max(sizes, key=sizes.__getitem__, default="")
    return HeatRow(group.name, layer, len(members), sum(member.numel for member in members), None)


def _mean(table: Sensitivity, name: str, group: Node) -> NDArray[np.float32]:
    """Return the mean over a group's tensors, of those that have a value."""
    index = np.asarray(group.members, dtype=np.int64)
    values = table.values[name][index].astype(np.float64)
    sizes = np.asarray([[table.rows[i].numel] for i in group.members], np.float64)
    weights = np.where(np.isfinite(values), sizes, 0.0)
    total = weights.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (np.where(np.isfinite(values), values, 0.0) * weights).sum(axis=0) / total
    return np.where(total > 0, means, np.nan).astype(np.float32)
