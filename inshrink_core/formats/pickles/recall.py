"""Read the pickles of a run one after another, without running again what begins as the one before.

The state of the machine at a byte follows from the bytes before it alone. The checkpoints of a training
differ in a step number and a learning rate near their ends, so a pickle that begins with the same bytes goes
on from a copy of the state that they led to. Whatever goes wrong on this way, or would change a value that
another file shares, is answered by running the pickle from its beginning.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from inshrink_core.errors import InshrinkError
from inshrink_core.formats.pickles.machine import run_machine
from inshrink_core.formats.pickles.stack import PAUSED, Machine, SharedValueError

__all__ = ["PickleRecall"]

_LEAST_BYTES: Final = 4096
"""A shorter beginning is run in less time than a state is copied in."""

_ROOM_BYTES: Final = 256
"""Space before the first difference, so that the opcode which holds it is not part of the beginning."""


_MOST_STATES: Final = 16
"""Beginnings that are tried before it is given up: files that are not alike cost nothing more after that."""


class _State(NamedTuple):
    """A paused machine; nobody changes what it refers to."""

    prefix: bytes
    stack: list[Any]
    marks: list[list[Any]]
    memo: dict[int, Any]
    growing_in_memo: tuple[int, ...]
    wanted: frozenset[str]
    n_copied: int
    n_made: int
    n_refused: int
    growing: dict[int, list[Any] | dict[Any, Any]]
    shared: frozenset[int]


class PickleRecall:
    """Reads pickles that are alike; each must be kept from change, for they share values.

    Examples
    --------
    >>> import pickle
    >>> recall = PickleRecall()
    >>> [recall.read(pickle.dumps({"names": ["w"] * 9000, "step": step}))["step"] for step in (1, 2, 3)]
    [1, 2, 3]
    """

    def __init__(self) -> None:
        self._last = b""
        self._state: _State | None = None
        self._n_tried = 0

    def read(self, data: bytes, where: str = "") -> object:
        """Return what a pickle describes; equal to what `read_pickle` returns, and raises as it does."""
        last, self._last = self._last, data
        state = self._state
        if state is None or not data.startswith(state.prefix):
            state = self._state = self._begun_like(last, data)
        if state is not None and state.n_copied <= len(data):
            try:
                return run_machine(_resumed(state, data), where)
            except (InshrinkError, SharedValueError):
                self._state = None
        return run_machine(Machine(data), where)

    def _begun_like(self, last: bytes, data: bytes) -> _State | None:
        """Return the state after what two pickles begin with; None where that is little."""
        pause_at = _n_common(last, data) - _ROOM_BYTES
        if pause_at < _LEAST_BYTES or self._n_tried == _MOST_STATES:
            return None
        self._n_tried += 1
        return _paused(data, pause_at)


def _n_common(one: bytes, other: bytes) -> int:
    """Return with how many equal bytes two begin."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _paused(data: bytes, pause_at: int) -> _State | None:
    """Run the beginning of a pickle; None where it cannot be gone on from."""
    machine = Machine(data)
    try:
        if run_machine(machine, "", pause_at) is not PAUSED:
            return None
    except InshrinkError:
        return None
    stacks = [*machine.marks, machine.stack]
    growing = {id(one): one for items in stacks for one in items if type(one) in (list, dict)}
    shared = _containers(machine, growing)
    if shared is None:
        return None
    return _State(
        data[: machine.at],
        machine.stack,
        machine.marks,
        machine.memo,
        tuple(place for place, one in machine.memo.items() if id(one) in growing),
        frozenset(machine.wanted),
        machine.n_copied,
        machine.n_made,
        machine.n_refused,
        growing,
        shared - growing.keys(),
    )


def _containers(machine: Machine, growing: dict[int, Any]) -> frozenset[int] | None:
    """Return every list and dict by identity; None where one on the stack also lies inside of another."""
    todo = [*machine.memo.values(), *(one for items in [*machine.marks, machine.stack] for one in items)]
    seen: set[int] = set()
    found: set[int] = set()
    while todo:
        value = todo.pop()
        if type(value) not in (list, dict, tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is not tuple:
            found.add(id(value))
        inner = list(value.values() if type(value) is dict else value)
        if any(id(one) in growing for one in inner):
            return None
        todo += inner
    return frozenset(found)


def _resumed(state: _State, data: bytes) -> Machine:
    """Return a machine that goes on from a state, over another pickle."""
    machine = Machine(data)
    copies = {place: one.copy() for place, one in state.growing.items()}
    machine.at = len(state.prefix)
    machine.stack = [copies.get(id(one), one) for one in state.stack]
    machine.marks = [[copies.get(id(one), one) for one in items] for items in state.marks]
    machine.memo = state.memo.copy()
    for place in state.growing_in_memo:
        machine.memo[place] = copies[id(state.memo[place])]
    machine.wanted, machine.n_copied, machine.shared = set(state.wanted), state.n_copied, state.shared
    machine.n_made, machine.n_refused = state.n_made, state.n_refused
    return machine
