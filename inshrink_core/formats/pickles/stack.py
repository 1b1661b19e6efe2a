"""The stack machine that a pickle is a program for, without the power to call anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from inshrink_core.errors import clipped
from inshrink_core.formats.pickles.names import (
    ALLOWED,
    NOTHING,
    OPAQUE,
    DTypeRef,
    Global,
    MalformedError,
    Opaque,
    StorageRef,
    StorageType,
    TensorRef,
    set_item,
)

__all__ = ["PAUSED", "Action", "Machine", "SharedValueError"]

Action = Callable[["Machine"], Any]
"""What one opcode does to the machine."""


_SOME: Final = 1024
"""Of anything, for the shortest programs."""

_MOST_MARKS: Final = 10_000
"""Python's own pickler recurses, and gives up long before."""

_MOST_WANTED: Final = 1000
"""Refused names that are kept; further ones are counted."""

PAUSED: Final = Opaque()
"""What a run returns that stopped where it was told to, before the end of its pickle."""


class SharedValueError(Exception):
    """The program changes a container that another run made: it must be run from its beginning."""


class Machine:
    """One run over one pickle: a stack, the marks in it, and a memo.

    Notes
    -----
    What a program makes is bounded by its length: containers, memoised values, copies and the extents of
    tensors. A pickler writes two bytes at least for each of them, so that no checkpoint comes near.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.wanted: set[str] = set()
        self.n_copied = self.n_made = 0
        self.n_refused = 0
        self.most_made = _SOME + len(data) // 3
        self.most_memoised = _SOME + len(data) // 2
        self.shared: frozenset[int] = frozenset()

    def run(self, table: Sequence[Action | None], pause_at: int | None = None) -> object:
        """Run to STOP; the opcodes that make up nine tenths of a state dict are done in place.

        With `pause_at`, the first opcode that begins there or later is left for the next run.
        """
        data, memo, at, n_bytes = self.data, self.memo, self.at, len(self.data)
        run_to = n_bytes if pause_at is None else min(pause_at, n_bytes)
        while at < run_to:
            opcode = data[at]
            at += 1
            if opcode == 0x71:  # BINPUT
                memo[data[at]] = self.stack[-1]
                at += 1
            elif opcode == 0x68:  # BINGET
                self.stack.append(memo[data[at]])
                at += 1
            elif opcode == 0x72 or opcode == 0x6A:  # LONG_BINPUT, LONG_BINGET
                index = int.from_bytes(data[at : at + 4], "little")
                at += 4
                if opcode == 0x6A:
                    self.stack.append(memo[index])
                elif index > n_bytes:
                    raise MalformedError("a memo with holes")
                else:
                    memo[index] = self.stack[-1]
            elif opcode == 0x4B:  # BININT1
                self.stack.append(data[at])
                at += 1
            elif opcode == 0x28:  # MARK
                if len(self.marks) == _MOST_MARKS:
                    raise MalformedError(f"more than {_MOST_MARKS} values inside of each other")
                self.marks.append(self.stack)
                self.stack = []
            elif opcode == 0x74:  # TUPLE
                items = tuple(self.stack)
                self.stack = self.marks.pop()
                self.stack.append(items)
            elif opcode == 0x58:  # BINUNICODE
                end = at + 4 + int.from_bytes(data[at : at + 4], "little")
                if end > n_bytes:
                    self.at = at
                    raise MalformedError("a value longer than the rest of the pickle")
                self.stack.append(data[at + 4 : end].decode("utf-8", "surrogatepass"))
                at = end
            elif opcode == 0x86:  # TUPLE2
                stack = self.stack
                if len(stack) < 2:
                    raise MalformedError("an empty stack")
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif opcode == 0x2E:  # STOP
                return self.stack.pop()
            else:
                action = table[opcode]
                if action is None:
                    raise MalformedError(f"opcode 0x{opcode:02x}")
                self.at = at
                action(self)
                at = self.at
        if pause_at is not None and at < n_bytes:
            self.at = at
            return PAUSED
        raise MalformedError("it ends before STOP")

    def take(self, n_bytes: int) -> bytes:
        """Return the next bytes of the program."""
        start = self.at
        end = self.at = start + n_bytes
        if n_bytes < 0 or end > len(self.data):
            raise MalformedError("a value longer than the rest of the pickle")
        return self.data[start:end]

    def line(self) -> str:
        """Return the next line of the program, as protocol 0 writes values."""
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def store(self, index: int) -> None:
        """Memoise the top of the stack."""
        # Python's own hash of a number is the number: an index may be no one's choice but the pickler's.
        if not 0 <= index <= len(self.data) or len(self.memo) > self.most_memoised:
            raise MalformedError("a memo larger than the pickle")
        self.memo[index] = self.stack[-1]

    def make(self, container: list[Any] | dict[Any, Any]) -> None:
        """Push a new container."""
        self.n_made += 1
        if self.n_made > self.most_made:
            raise MalformedError("more containers than the pickle has room for")
        self.stack.append(container)

    def import_name(self, module: object, name: object) -> None:
        """Push what a name from outside stands for, or note that it is refused."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise MalformedError("an import whose name is no text")
        found = ALLOWED.get((module, name))
        if found is None:
            if len(self.wanted) < _MOST_WANTED:
                self.wanted.add(f"{clipped(module)}.{clipped(name)}")
            else:
                self.n_refused += 1
            found = NOTHING
        # A dtype or a storage type is used as a value, a function is only ever called.
        self.stack.append(found if found.value is OPAQUE else found.value)

    def call(self) -> None:
        """Replace a function and its arguments by what the function stands for."""
        args = self.stack.pop()
        function = self.stack[-1]
        if isinstance(function, Global):
            if not isinstance(args, tuple):
                raise MalformedError("a call without arguments")
            # One memoised value copied or looked through again and again would outgrow any patience.
            self.n_copied += len(args)
            for one in args[:8]:
                if isinstance(one, (list, tuple, dict, str, bytes)):
                    self.n_copied += len(one)
            if self.n_copied > _SOME + len(self.data):
                raise MalformedError("more values than the pickle has bytes")
            self.stack[-1] = function.apply(args)
        elif isinstance(function, (Opaque, StorageType, DTypeRef)):
            self.stack[-1] = OPAQUE
        else:
            raise MalformedError("a call of something that is no function")

    def build(self) -> None:
        """Take state set on an object and ignore it."""
        # State set on an object. OrderedDict's `_metadata` and numpy's dtype state tell us nothing.
        self.stack.pop()
        if not isinstance(self.stack[-1], (Opaque, dict, TensorRef, Global)):
            raise MalformedError("state for something that has none")

    def load_storage(self) -> None:
        """Replace a persistent id by the storage it names."""
        ref = self.stack[-1]
        if type(ref) is not tuple or len(ref) < 5 or ref[0] != "storage":
            raise MalformedError("a persistent id that is no storage")
        kind, key, n_elements = ref[1], ref[2], ref[4]
        if isinstance(kind, (Global, Opaque)):
            self.stack[-1] = OPAQUE
        elif isinstance(kind, StorageType) and type(key) is str and type(n_elements) is int:
            self.stack[-1] = StorageRef(key, kind.dtype, n_elements)
        else:
            raise MalformedError("a storage of unknown type")

    def append_all(self, items: list[Any]) -> None:
        """Extend the list on top of the stack."""
        target = self.stack[-1]
        if id(target) in self.shared:
            raise SharedValueError
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Opaque):
            raise MalformedError("items for something that is no list")

    def set_all(self, items: list[Any]) -> None:
        """Set pairs on the mapping on top of the stack."""
        target = self.stack[-1]
        if id(target) in self.shared:
            raise SharedValueError
        if isinstance(target, Opaque):
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise MalformedError("pairs for something that is no mapping")
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is str or (type(key) is int and 0 <= key <= len(target)):
                target[key] = items[i + 1]
            else:
                set_item(target, key, items[i + 1])
