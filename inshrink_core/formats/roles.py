"""Names and roles of a checkpoint's tensors: which are buffers, and whose state is whose."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from inshrink_core.checkpoint import TensorRole
from inshrink_core.formats.placement import Named, Placed
from inshrink_core.formats.state_tree import OptimizerGroup, strip_wrappers

__all__ = ["PlacedOptimizer", "RoleMap", "assign_roles", "is_buffer"]

_BUFFER_NAME: Final = re.compile(
    r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|masked_bias|position_ids|attn_mask|"
    r"causal_mask|rotary_emb\.\w+)$"
)
_FLOATS: Final = ("float", "bfloat", "complex")


class PlacedOptimizer(NamedTuple):
    """An optimizer's state by parameter, each tensor with its place, and the parameter groups."""

    state: dict[int | str, dict[TensorRole, Placed]]
    groups: tuple[OptimizerGroup, ...]


class RoleMap(NamedTuple):
    """Model tensors with their roles, optimizer tensors by file, hyperparameters.

    `guessed` tells that parameters and state were matched by shape, not by position alone.
    """

    model: list[Named]
    state: list[list[Named]]
    hyperparameters: dict[str, dict[str, float]]
    guessed: bool


@functools.lru_cache(maxsize=1 << 16)
def is_buffer(name: str, dtype: str) -> bool:
    """Tell from name and dtype that a tensor is no parameter."""
    # The names of a run are the same at every step.
    return not dtype.startswith(_FLOATS) or _BUFFER_NAME.search(name) is not None


def _shape_of(state: dict[TensorRole, Placed]) -> tuple[int, ...] | None:
    """Return the shape of the parameter some state belongs to, or None where no tensor tells."""
    for role, placed in state.items():
        if role is not TensorRole.STEP:
            return placed.shape
    return None


class _Queue:
    """Weights of one shape by position; taking one costs next to nothing, wherever it stands."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._positions: list[int] = []
        self._next: list[int] = [0]

    def add(self, name: str, position: int) -> None:
        """Add a weight behind the others."""
        self._names.append(name)
        self._positions.append(position)
        self._next.append(len(self._names))

    def _free_from(self, i: int) -> int:
        """Return the first place from `i` on that was not taken; paths are halved on the way."""
        while self._next[i] != i:
            self._next[i] = self._next[self._next[i]]
            i = self._next[i]
        return i

    def take(self, after: int) -> tuple[str, int] | None:
        """Take the first weight behind a position, or the first of all; None where none is left."""
        i = self._free_from(bisect_right(self._positions, after))
        if i == len(self._names):
            i = self._free_from(0)
        if i == len(self._names):
            return None
        self._next[i] = i + 1
        return self._names[i], self._positions[i]


class _Matcher:
    """Gives each numbered parameter the name of a weight; every weight is given once."""

    def __init__(self, weights: Sequence[Named]) -> None:
        self.free = {tensor.name: tensor.placed.shape for tensor in weights}
        self.guessed = False

    def match(
        self, params: Sequence[int | str], shapes: Sequence[tuple[int, ...] | None]
    ) -> list[str | None]:
        names = list(self.free)
        if len(names) == len(params) and all(
            w is None or w == self.free[n] for n, w in zip(names, shapes, strict=True)
        ):
            self.free = {}
            return list(names)
        self.guessed = True
        return self._match_in_order(shapes)

    def _match_in_order(self, shapes: Sequence[tuple[int, ...] | None]) -> list[str | None]:
        """Take for each shape the next free weight that has it; where none follows, the first that has."""
        queues: dict[tuple[int, ...], _Queue] = {}
        for position, (name, held) in enumerate(self.free.items()):
            queues.setdefault(held, _Queue()).add(name, position)
        found: list[str | None] = []
        at = -1
        for shape in shapes:
            queue = queues.get(shape) if shape is not None else None
            taken = queue.take(at) if queue is not None else None
            if taken is not None:
                name, at = taken
                del self.free[name]
            found.append(taken[0] if taken is not None else None)
        return found

    def take(self, name: str) -> None:
        self.free.pop(name, None)


def _names_of(optimizer: PlacedOptimizer, matcher: _Matcher) -> dict[int | str, str]:
    """Return the name of each parameter of one optimizer."""
    params = [p for group in optimizer.groups for p in group.params]
    known = [n for group in optimizer.groups for n in group.names]
    names: dict[int | str, str] = {}
    if len(known) == len(params) and params:
        names = dict(zip(params, strip_wrappers(known), strict=True))
    else:
        by_name = [k for k in [*params, *optimizer.state] if isinstance(k, str)]
        names = dict(zip(by_name, strip_wrappers(by_name), strict=True))
    for name in names.values():
        matcher.take(name)
    numbered = list(dict.fromkeys(p for p in [*params, *optimizer.state] if p not in names))
    if numbered:
        shapes = [_shape_of(optimizer.state.get(p, {})) for p in numbered]
        for param, found in zip(numbered, matcher.match(numbered, shapes), strict=True):
            if found is not None:
                names[param] = found
    return names


def assign_roles(
    model: Sequence[tuple[str, Placed]], optimizers: Sequence[tuple[PlacedOptimizer, ...]]
) -> RoleMap:
    """Return every tensor with its name and role.

    Parameters
    ----------
    model
        Weights and buffers in the file's order; tied names stand with the same place.
    optimizers
        For each file, the optimizers it holds.

    Notes
    -----
    State numbered by position belongs to the weights in order. Where the counts or shapes disagree
    (frozen weights, float buffers, two groups), each takes the next weight of its shape. A float tensor
    that no group of a fully matched optimizer holds is a buffer, unless it is a matrix called
    ``weight``: that one is frozen.
    """
    seen: set[Placed] = set()
    weights = []
    for name, placed in model:
        if placed not in seen and not is_buffer(name, placed.dtype):
            weights.append(Named(name, TensorRole.WEIGHT, placed))
        seen.add(placed)
    matcher = _Matcher(weights)
    state: list[list[Named]] = []
    hyperparameters: dict[str, dict[str, float]] = {}
    n_unmatched, n_params, taken = 0, 0, set[str]()
    for file_number, held in enumerate(optimizers):
        state.append([])
        for number, optimizer in enumerate(held):
            names = _names_of(optimizer, matcher)
            prefix = "optimizer" if file_number == number == 0 else f"optimizer.{file_number + number}"
            for param, tensors in optimizer.state.items():
                n_params += 1
                name = names.get(param, "")
                if not name or any(f"{name}@{role.value}" in taken for role in tensors):
                    n_unmatched += 1
                    name = f"{prefix}.state.{param}"
                taken.update(f"{name}@{role.value}" for role in tensors)
                state[-1] += [Named(name, role, placed) for role, placed in tensors.items()]
            for group in optimizer.groups:
                for param in group.params:
                    if group.numbers and param in names:
                        hyperparameters[names[param]] = group.numbers
    complete = n_params > 0 and n_unmatched == 0
    loose = matcher.free if complete else {}
    roles = [Named(name, _model_role(name, placed, loose), placed) for name, placed in model]
    return RoleMap(roles, state, hyperparameters, matcher.guessed)


def _model_role(name: str, placed: Placed, loose: dict[str, tuple[int, ...]]) -> TensorRole:
    if is_buffer(name, placed.dtype):
        return TensorRole.BUFFER
    if name in loose and not (len(placed.shape) >= 2 and name.endswith("weight")):
        return TensorRole.BUFFER
    return TensorRole.WEIGHT
