"""The modules of a model as a tree: the rows of every page that shows or chooses layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import streamlit as st
from inshrink_app import state
from inshrink_app.widgets import fmt, listing
from inshrink_app.widgets.choices import one_of_few

from inshrink_core.errors import InputError
from inshrink_core.verbs.shared.values import matching_names

LAYER_TYPE, BLOCK, TENSOR = "layer_type", "block", "tensor"
"""Levels that are not numbers: layer types, modules that hold tensors, and tensors."""

_LEVELS = {LAYER_TYPE: "Layer types", BLOCK: "Blocks", TENSOR: "Tensors"}
_LEVELS_HELP = (
    "How deep the model is opened: all of a kind together, modules from the outermost inwards, blocks "
    "(the modules that hold tensors), or tensors."
)
_MOST_LEVELS = 12
"""Deeper modules are opened all at once."""

_MOST_PARTS = 64
"""Number of dots after which the rest of a name is one part, since names are untrusted."""

_MOST_ROWS, _FEW_ROWS = 40, 8
"""With more rows, each is too low to click on a laptop's screen; fewer show too little."""

PATTERN_HELP = (
    "The name of a tensor or a module; or a part of names, a glob such as *.bias, or a regular expression "
    "between slashes, such as /bn\\d/."
)

_INDENT, _OPEN, _CLOSED = "\N{EM SPACE}", "▼ ", "► "


class Node(NamedTuple):
    """A module or a tensor: its path, the indices of its tensors, and its position in the tree.

    Parameters
    ----------
    name
        Dotted path; untrusted text.
    members
        Indices of its tensors.
    depth
        Number of modules above it.
    is_open
        Whether its parts are listed below it; None for a tensor, which has none.
    """

    name: str
    members: tuple[int, ...]
    depth: int = 0
    is_open: bool | None = False


def is_within(name: str, module: str) -> bool:
    """Return whether a tensor or module equals or is inside another one; the empty one contains all."""
    return not module or name == module or name.startswith(module + ".")


def members_of(names: Sequence[str], within: str) -> tuple[int, ...]:
    """Return the indices of the tensors that are inside a module, or equal it.

    Examples
    --------
    >>> members_of(["h.1.w", "h.10.w", "h.1"], "h.1")
    (0, 2)
    """
    return tuple(i for i, name in enumerate(names) if is_within(name, within))


def matching(names: Sequence[str], pattern: str) -> frozenset[str]:
    """Return the names that a pattern matches: all if it is empty, none if it is invalid."""
    try:
        return frozenset(matching_names(names, pattern) if pattern else names)
    except InputError as error:
        st.caption(fmt.markdown(str(error)))
        return frozenset()


def trail(within: str) -> tuple[str, ...]:
    """Return a module and its ancestors, outermost first.

    Examples
    --------
    >>> trail("h.2.attn")
    ('h', 'h.2', 'h.2.attn')
    """
    dots = [i for i, sign in enumerate(within) if sign == "."]
    return tuple(within[:end] for end in (*dots[:_MOST_PARTS], len(within))) if within else ()


def levels(names: Sequence[str]) -> tuple[str, ...]:
    """Return the levels of a model's rows, coarsest first.

    Examples
    --------
    >>> levels(["h.0.attn.w"]), levels(["w"])
    (('layer_type', '1', '2', 'block', 'tensor'), ('layer_type', 'tensor'))
    """
    deepest = max((name.count(".") for name in names), default=0)
    modules = [str(level) for level in range(1, min(deepest, _MOST_LEVELS))]
    return (LAYER_TYPE, *modules, *([BLOCK] if deepest else []), TENSOR)


def outline(
    names: Sequence[str], level: str, *, opened: Collection[str] = (), closed: Collection[str] = ()
) -> tuple[Node, ...]:
    """Return the tree down to a level, each module before its parts.

    Parameters
    ----------
    names
        Dotted names of tensors, in model order.
    level
        One of `levels` except layer types. A number is a depth in modules.
    opened
        Modules or tensors that are visible with their parts at any level.
    closed
        Modules that stay closed at any level.

    Notes
    -----
    A module of one tensor is that tensor. A block that holds further modules is open at the level of blocks,
    so that no two rows share a tensor.
    O(names x depth); only open modules are visited.

    Examples
    --------
    >>> [node.name for node in outline(["h.0.w", "h.0.b", "h.1.w", "head"], "1", opened=["h.0"])]
    ['h', 'h.0', 'h.0.w', 'h.0.b', 'h.1.w', 'head']
    """
    cut = max(int(level), 1) if level.isdigit() else math.inf
    seen = {above for name in opened for above in trail(name)}
    parts = [name.split(".", _MOST_PARTS) for name in names]
    found: list[Node] = []
    waiting = [Node("", tuple(range(len(names))), -1, True)]
    while waiting:
        node = waiting.pop()
        if node.depth >= 0:
            found.append(node)
        if not node.is_open:
            continue
        depth = node.depth + 1
        children: dict[tuple[str, bool], list[int]] = {}
        for i in node.members:
            children.setdefault((".".join(parts[i][: depth + 1]), len(parts[i]) <= depth + 1), []).append(i)
        below = []
        for (name, is_tensor), members in children.items():
            if is_tensor or len(members) == 1:
                below.append(Node(names[members[0]], tuple(members), depth, None))
                continue
            holds_modules = any(len(parts[i]) > depth + 2 for i in members)
            is_open = level == TENSOR or name in seen or (depth + 1 < cut and holds_modules)
            below.append(Node(name, tuple(members), depth, is_open and name not in closed))
        waiting += reversed(below)
    return tuple(found)


def rows_at(names: Sequence[str], layers: Sequence[str], level: str) -> tuple[Node, ...]:
    """Return the rows at a level, side by side: every tensor belongs to one of them.

    Parameters
    ----------
    names, layers
        Dotted name and layer type of each tensor.
    level
        One of `levels`.
    """
    if level == LAYER_TYPE:
        kinds: dict[str, list[int]] = {}
        for i, layer in enumerate(layers):
            kinds.setdefault(layer or "other", []).append(i)
        return tuple(Node(name, tuple(members)) for name, members in kinds.items())
    return tuple(node._replace(depth=0) for node in outline(names, level) if not node.is_open)


@functools.lru_cache(maxsize=8)
def default_level(names: tuple[str, ...]) -> str:
    """Return the initial level: the deepest with at most 40 rows, or the next one after a handful."""
    depths = levels(names)[1:]
    sizes = [len(outline(names, level)) for level in depths]
    best = max((i for i, size in enumerate(sizes) if size <= _MOST_ROWS), default=0)
    return depths[min(best + (sizes[best] < _FEW_ROWS), len(depths) - 1)]


def level_slider(page: str, names: Sequence[str], *, types: bool = True) -> str:
    """Draw the depth of the tree, which the link carries from page to page.

    Parameters
    ----------
    page
        Names the widget.
    names
        Names of all tensors.
    types
        Whether to offer layer types too.
    """
    options = levels(names) if types else levels(names)[1:]
    if len(options) == 1:
        return options[0]
    labels = {level: _LEVELS.get(level, f"Modules {level}") for level in options}
    usual = default_level(tuple(names))
    return one_of_few(page, "Rows", state.BY, labels, usual, _LEVELS_HELP, st.select_slider, width=240)


def labels(nodes: Sequence[Node]) -> list[str]:
    r"""Return the row labels of a tree: indented, with a sign before modules, without the parent path.

    Examples
    --------
    >>> labels(outline(["h.0.w", "h.0.b", "h.1.w"], "1", opened=["h"]))
    ['▼ h', '\u2003► 0', '\u20031.w']
    """
    signs = {None: "", True: _OPEN, False: _CLOSED}
    above: list[str] = []
    lines = []
    for node in nodes:
        del above[node.depth :]
        name = node.name.removeprefix(above[-1] + ".") if above else node.name
        lines.append(_INDENT * node.depth + signs[node.is_open] + name)
        above.append(node.name)
    return lines


def table(
    frame: pd.DataFrame,
    names: Sequence[str],
    key: str,
    picked: Collection[str],
    on_pick: Callable[[list[str]], None],
    *,
    alt: str,
    columns: Mapping[str, Any],
    several: bool = False,
    height: int = listing.HEIGHT,
) -> None:
    """Draw rows that can be picked by a click before them, or by arrow keys and Shift+Space.

    Parameters
    ----------
    frame
        One line per row.
    names
        Name of each row.
    key
        Key of the widget.
    picked
        Names of the picked rows.
    on_pick
        Receives the names of the picked rows.
    alt, columns
        Alternative text, and the configuration of the columns.
    several
        More than one row can be picked.
    height
        Pixels above which the table scrolls.
    """
    wanted = [i for i, name in enumerate(names) if name in picked]

    def take(rows: list[int]) -> None:
        on_pick([names[row] for row in rows])

    listing.pickable(frame, columns, alt, key, wanted, take, several=several, height=height)


def say_picked(n: int, what: str) -> None:
    """Draw the number of picked rows, or how to pick some."""
    how = "Pick layers: the box before a line, or the arrow keys and Shift+Space."
    st.caption(f"{fmt.counted(n, what)} picked." if n else how, width="content")
