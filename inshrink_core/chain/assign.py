"""A value for each tensor, written as few overrides, and read back from them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from inshrink_core.chain.config import ChainConfig
from inshrink_core.checkpoint import TensorSpec


def literal_pattern(name: str) -> str:
    """Return the pattern of an override that matches one name alone.

    Examples
    --------
    >>> literal_pattern("h.[0].w*")
    'h.[[]0].w[*]'
    """
    return re.sub(r"([*?[])", r"[\1]", name)


def assigned(chain: ChainConfig, specs: Sequence[TensorSpec], setting: str) -> dict[str, Any]:
    """Return the value of a codec's setting for each tensor, by key, overrides counted in."""
    return {spec.key: getattr(chain.config_of(spec), setting) for spec in specs}


def assignments(
    specs: Sequence[TensorSpec], values: Mapping[str, Any], base: Any, settings: Sequence[str]
) -> tuple[dict[str, Any], ...]:
    """Return the fewest simple overrides that give each tensor its value.

    Parameters
    ----------
    specs
        Every tensor that the codec takes: a pattern must not catch one that is not named here.
    values
        By key.
    base
        The value that needs no override.
    settings
        Settings of the codec that take the value.

    Returns
    -------
    tuple of dict
        Tables as `inshrink_core.chain.parse_overrides` takes them. One for each layer type where the type
        decides; else one for each largest module whose tensors share a value. No tensor is caught by two.

    Notes
    -----
    O(n · depth of the modules). Tensors of several roles that share a name share their overrides: the value
    of the first counts.

    Examples
    --------
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> names = ("h.0.a", "h.0.b", "h.1.a", "head")
    >>> specs = [TensorSpec(name=n, role=TensorRole.WEIGHT, dtype="float32", shape=(2, 2)) for n in names]
    >>> assignments(specs, {"h.0.a": 1.0, "h.0.b": 1.0, "h.1.a": 2.0, "head": 2.0}, 2.0, ("coarseness",))
    ({'match': 'h.0.*', 'coarseness': 1.0},)
    """
    by_name: dict[str, Hashable] = {}
    for spec in specs:
        by_name.setdefault(spec.name, values[spec.key])
    by_type: dict[str | None, set[Hashable]] = {}
    for spec in specs:
        by_type.setdefault(None if spec.layer is None else str(spec.layer), set()).add(by_name[spec.name])
    untyped = by_type.pop(None, set())
    if all(len(found) == 1 for found in by_type.values()) and untyped <= {base}:
        only = {layer: next(iter(found)) for layer, found in by_type.items()}
        if len(set(only.values())) > 1:
            return tuple(
                {"layer_type": layer, **dict.fromkeys(settings, value)}
                for layer, value in sorted(only.items())
                if value != base
            )
    found = _of_modules([(name.split("."), value) for name, value in by_name.items()], (), base)
    return tuple({"match": pattern, **dict.fromkeys(settings, value)} for pattern, value in found)


def _of_modules(
    tensors: Sequence[tuple[Sequence[str], Any]], path: tuple[str, ...], base: Any
) -> Iterator[tuple[str, Any]]:
    """Yield pattern and value of the largest modules that share a value other than the base."""
    values = {value for _, value in tensors}
    if values == {base}:
        return
    if len(values) == 1:
        value = values.pop()
        # A tensor may have the name of the module that holds the others, which the module's pattern misses.
        named = [parts for parts, _ in tensors if len(parts) == len(path)] if path else []
        below = [parts for parts, _ in tensors if parts not in named]
        yield from ((literal_pattern(".".join(parts)), value) for parts in named)
        if below:
            yield literal_pattern(".".join(below[0])) if len(below) == 1 else _all_below(path), value
        return
    children: dict[str, list[tuple[Sequence[str], Any]]] = {}
    for parts, value in tensors:
        if len(parts) == len(path):  # a tensor whose name is a module's too
            if value != base:
                yield literal_pattern(".".join(parts)), value
            continue
        children.setdefault(parts[len(path)], []).append((parts, value))
    for part, members in children.items():
        yield from _of_modules(members, (*path, part), base)


def _all_below(path: Sequence[str]) -> str:
    """Return what matches every tensor of a module."""
    return literal_pattern(".".join(path)) + ".*" if path else "*"
