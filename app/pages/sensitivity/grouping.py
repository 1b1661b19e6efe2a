"""Rows of a heatmap for models of any size: tensors, or the blocks that hold them, a few dozen at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from inshrink_app.widgets.tables import HeatRow, Sensitivity
from numpy.typing import NDArray

from inshrink_core.sensitivity import Grouping

__all__ = ["LABELS", "MOST_ROWS", "Group", "aggregate", "groups_within", "members_of", "take", "trail"]

LABELS = {str(one): one.replace("_", " ").capitalize() for one in Grouping}
"""What a row is, in words."""

MOST_ROWS = 60
"""More rows than this are lower than a reader can point at on a laptop's screen."""

_FEW_ROWS = 12
"""Fewer rows than this say too little, where the next level of modules has more."""


class Group(NamedTuple):
    """One row: its name, and the places of its tensors."""

    name: str
    members: tuple[int, ...]


def members_of(names: Sequence[str], within: str) -> tuple[int, ...]:
    """Return the places of the tensors that lie in a module.

    Parameters
    ----------
    names
        Dotted names.
    within
        A module's path; empty for all. The last part may be a range of siblings in brackets, as they stand
        in `names`: ``h.[0-3]``.

    Examples
    --------
    >>> members_of(["h.0.w", "h.1.w", "h.2.w", "head"], "h.[1-2]")
    (1, 2)
    """
    if not within:
        return tuple(range(len(names)))
    parent, _, last = within.rpartition(".")
    if last.startswith("[") and last.endswith("]"):
        return _range_members(names, parent, last[1:-1])
    exact = within + "."
    return tuple(i for i, name in enumerate(names) if name == within or name.startswith(exact))


def _range_members(names: Sequence[str], parent: str, text: str) -> tuple[int, ...]:
    """Return the places of the tensors in a range of siblings; none where the range is no such."""
    prefix = parent + "." if parent else ""
    depth = prefix.count(".")
    inside = [i for i, name in enumerate(names) if name.startswith(prefix)]
    order = dict.fromkeys(names[i].split(".")[depth] for i in inside)
    siblings = list(order)
    for cut in [k for k, sign in enumerate(text) if sign == "-"]:
        first, last = text[:cut], text[cut + 1 :]
        if first in order and last in order:
            chosen = set(siblings[siblings.index(first) : siblings.index(last) + 1])
            return tuple(i for i in inside if names[i].split(".")[depth] in chosen)
    return ()


def groups_within(
    names: Sequence[str], within: str = "", limit: int = MOST_ROWS, *, modules: bool = False
) -> tuple[Group, ...]:
    """Return the rows of a module: its tensors where they are few, else the blocks they lie in.

    Parameters
    ----------
    names
        Dotted names of all tensors, in model order.
    within
        As for `members_of`.
    limit
        Greatest number of rows.
    modules
        A row is the module that holds its tensors, however few they are.

    Notes
    -----
    The deepest level of modules that has at most `limit` of them. Where that would be a handful and the
    next level is too much, neighbouring siblings of the next level share a row.

    Examples
    --------
    >>> [group.name for group in groups_within([f"h.{i}.w" for i in range(5)], limit=3)]
    ['h.[0-2]', 'h.[3-4]']
    """
    places = members_of(names, within)
    if modules:
        holders: dict[str, list[int]] = {}
        for i in places:
            holders.setdefault(names[i].rpartition(".")[0] or names[i], []).append(i)
        if len(holders) <= limit:
            return tuple(Group(name, tuple(members)) for name, members in holders.items())
    if len(places) <= limit:
        return tuple(Group(names[i], (i,)) for i in places)
    parts = {i: names[i].split(".") for i in places}
    deepest = max(map(len, parts.values()))
    best: dict[str, list[int]] = {}
    for depth in range(1, deepest + 1):
        level: dict[str, list[int]] = {}
        for i in places:
            level.setdefault(".".join(parts[i][:depth]), []).append(i)
        if len(level) > limit:
            if len(best) < min(_FEW_ROWS, limit):
                best = _merged(level, limit)
            break
        best = level
    return tuple(Group(name, tuple(members)) for name, members in best.items())


def _merged(level: Mapping[str, list[int]], limit: int) -> dict[str, list[int]]:
    """Let neighbouring siblings share a row, so many that there are at most about `limit` rows."""
    families: dict[str, list[str]] = {}
    for name in level:
        families.setdefault(name.rpartition(".")[0], []).append(name)
    room = max(1, limit - len(families))
    together = -(-len(level) // room)
    merged: dict[str, list[int]] = {}
    for parent, children in families.items():
        for a in range(0, len(children), together):
            run = children[a : a + together]
            first, last = run[0].rpartition(".")[2], run[-1].rpartition(".")[2]
            name = run[0] if len(run) == 1 else f"{parent}.[{first}-{last}]".removeprefix(".")
            merged[name] = [i for child in run for i in level[child]]
    return merged


def trail(within: str) -> tuple[str, ...]:
    """Return the modules above and including one, the outermost first.

    Examples
    --------
    >>> trail("h.[0-3]"), trail("h.2.attn")
    (('h', 'h.[0-3]'), ('h', 'h.2', 'h.2.attn'))
    """
    places = [i for i, sign in enumerate(within) if sign == "."] + [len(within)]
    return tuple(within[:end] for end in places) if within else ()


def take(table: Sensitivity, places: Sequence[int]) -> Sensitivity:
    """Return some rows of a table."""
    index = np.asarray(places, dtype=np.int64)
    return dataclasses.replace(
        table,
        rows=tuple(table.rows[i] for i in places),
        values={name: values[index] for name, values in table.values.items()},
    )


def aggregate(table: Sensitivity, groups: Sequence[Group], exact: Sensitivity | None = None) -> Sensitivity:
    """Return a table with a row for each group.

    Parameters
    ----------
    table
        By tensor.
    groups
        Of its rows.
    exact
        The same metric by block: rows of the same name and extent are taken from it, medians and
        percentiles included. For all others these are means over tensors, weighted by their size.
    """
    known = {row.name: i for i, row in enumerate(exact.rows)} if exact is not None else {}
    rows, columns = [], {name: np.empty((len(groups), len(table.steps)), np.float32) for name in table.values}
    for place, group in enumerate(groups):
        row = _row_of(table, group)
        rows.append(row)
        at = known.get(group.name)
        same = exact is not None and at is not None and exact.rows[at].n_tensors == row.n_tensors
        for name, column in columns.items():
            if same and exact is not None and at is not None:
                column[place] = exact.values[name][at]
            else:
                column[place] = _mean(table, name, group)
    return dataclasses.replace(table, by="block", rows=tuple(rows), values=columns)


def _row_of(table: Sensitivity, group: Group) -> HeatRow:
    """Describe a group; one of a single tensor is that tensor."""
    members = [table.rows[i] for i in group.members]
    if len(members) == 1:
        return members[0]
    sizes: dict[str, int] = {}
    for member in members:
        sizes[member.layer] = sizes.get(member.layer, 0) + member.numel
    layer = max(sizes, key=sizes.__getitem__, default="")
    return HeatRow(group.name, layer, len(members), sum(member.numel for member in members), None)


def _mean(table: Sensitivity, name: str, group: Group) -> NDArray[np.float32]:
    """Return the mean over a group's tensors, of those that have a value."""
    index = np.asarray(group.members, dtype=np.int64)
    values = table.values[name][index].astype(np.float64)
    sizes = np.asarray([[table.rows[i].numel] for i in group.members], np.float64)
    weights = np.where(np.isfinite(values), sizes, 0.0)
    total = weights.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (np.where(np.isfinite(values), values, 0.0) * weights).sum(axis=0) / total
    return np.where(total > 0, means, np.nan).astype(np.float32)
