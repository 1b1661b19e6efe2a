"""The modules of a model as a tree: the rows of every page that shows or chooses layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import streamlit as st
from inshrink_app import state
from inshrink_app.widgets import fmt
from inshrink_app.widgets.choices import one_of_few

from inshrink_core.errors import InputError
from inshrink_core.verbs.shared.values import matching_names

LAYER_TYPE, BLOCK, TENSOR = "layer_type", "block", "tensor"
"""Levels that are not numbers: layer types, modules that hold tensors, and tensors."""

_LEVELS = {LAYER_TYPE: "Layer types", BLOCK: "Blocks", TENSOR: "Tensors"}
_LEVELS_HELP = (
    "Depth of the rows: layer types, modules from the outermost inwards, blocks (modules that hold tensors), "
    "or tensors."
)
_MAX_LEVELS = 12
"""Deeper modules are opened all at once."""

_MAX_PARTS = 64
"""Number of dots after which the rest of a name is one part, since names are untrusted."""

_MAX_ROWS, _FEW_ROWS = 40, 8
"""With more rows, each is too low to click on a laptop's screen; fewer show too little."""

PATTERN_HELP = (
    "The name of a tensor or a module, part of a name, a glob such as *.bias, or a regular expression "
    "between slashes such as /bn\\d/."
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
    return tuple(within[:end] for end in (*dots[:_MAX_PARTS], len(within))) if within else ()


def levels(names: Sequence[str]) -> tuple[str, ...]:
    """Return the levels of a model's rows, coarsest first.

    Examples
    --------
    >>> levels(["h.0.attn.w"]), levels(["w"])
    (('layer_type', '1', '2', 'block', 'tensor'), ('layer_type', 'tensor'))
    """
    deepest = max((name.count(".") for name in names), default=0)
    modules = [str(level) for level in range(1, min(deepest, _MAX_LEVELS))]
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
    parts = [name.split(".", _MAX_PARTS) for name in names]
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
    best = max((i for i, size in enumerate(sizes) if size <= _MAX_ROWS), default=0)
    return depths[min(best + (sizes[best] < _FEW_ROWS), len(depths) - 1)]


def level_slider(names: Sequence[str]) -> str:
    """Draw the depth of the tree of all tensors, and return the level."""
    options = levels(names)
    labels = {level: _LEVELS.get(level, f"Modules {level}") for level in options}
    usual = default_level(tuple(names))
    return one_of_few("map", "Rows", state.BY, labels, usual, _LEVELS_HELP, st.select_slider, width=240)


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
