"""Read what a checkpoint's pickle describes without running it.

A pickle is a program for a small stack machine. Python's machine calls whatever the program names;
this one has no way to call anything: names from outside are looked up in a fixed table of inert
stand-ins, and a name that is not in the table is written down and the file refused. Everything the
program builds is made of plain containers and the records of `pickle_names`, so reading is safe on a
file from anywhere. Bounds on size and copies keep a hostile program from exhausting memory, and nothing
here recurses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from inshrink_core.errors import DamagedError, UnsafePickleError
from inshrink_core.formats.pickles.names import OPAQUE, MalformedError, Opaque
from inshrink_core.formats.pickles.stack import PAUSED, Action, Machine

__all__ = ["MAX_PICKLE_BYTES", "read_pickle", "run_machine"]

MAX_PICKLE_BYTES: Final = 256 << 20
"""Largest pickle that is read. 1 M tensors take about 200 MB; a larger one is no checkpoint."""


def _number(fmt: str) -> Callable[[Machine], int]:
    """Read one fixed-width number after the opcode."""
    codec = struct.Struct(fmt)
    size, unpack = codec.size, codec.unpack_from

    def read(machine: Machine) -> int:
        at = machine.at
        machine.at = at + size
        value: int = unpack(machine.data, at)[0]
        return value

    return read


_U8, _U16, _I32, _U32, _U64 = (_number(f) for f in ("<B", "<H", "<i", "<I", "<Q"))
_F64 = _number(">d")


def _push(read: Callable[[Machine], object]) -> Action:
    return lambda m: m.stack.append(read(m))


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.stack = m.marks.pop()


def _text(read_size: Callable[[Machine], int]) -> Action:
    return _push(lambda m: m.take(read_size(m)).decode("utf-8", "surrogatepass"))


def _make_tuple(n: int) -> Action:
    def make(m: Machine) -> None:
        items = m.stack[-n:]
        if len(items) != n:
            raise MalformedError("an empty stack")
        m.stack[-n:] = [tuple(items)]

    return make


def _close_list(m: Machine) -> None:
    m.make(m.pop_mark())


def _reduce_object(m: Machine) -> None:
    # NEWOBJ and INST make an object of a class; every class here is inert or a container.
    m.call()


def _make_instance(m: Machine) -> None:
    items = m.pop_mark()
    m.import_name(m.line(), m.line())
    m.stack[-1:] = [m.stack[-1], tuple(items)]
    m.call()


def _make_object(m: Machine) -> None:
    items = m.pop_mark()
    m.stack += [items[0], tuple(items[1:])]
    m.call()


def _new_with_keywords(m: Machine) -> None:
    m.stack.pop()
    m.call()


def _global_on_stack(m: Machine) -> None:
    name = m.stack.pop()
    m.import_name(m.stack.pop(), name)


def _set_one(m: Machine) -> None:
    items = m.stack[-2:]
    del m.stack[-2:]
    m.set_all(items)


def _add_items(m: Machine) -> None:
    m.pop_mark()
    if not isinstance(m.stack[-1], Opaque):
        raise MalformedError("items for something that is no set")


def _frozen_set(m: Machine) -> None:
    m.pop_mark()
    m.stack.append(OPAQUE)


def _long(read_size: Callable[[Machine], int]) -> Action:
    return _push(lambda m: int.from_bytes(m.take(read_size(m)), "little", signed=True))


def _old_int(m: Machine) -> object:
    line = m.line()
    return {"00": False, "01": True}.get(line) if line in ("00", "01") else int(line.rstrip("L"))


def _mapping(m: Machine) -> None:
    items = m.pop_mark()
    m.make({})
    m.set_all(items)


_BY_SIGN: Final[dict[str, Action]] = {
    "\x80": _U8,  # PROTO
    "\x95": _U64,  # FRAME
    "0": _pop,
    "1": lambda m: m.pop_mark(),
    "2": lambda m: m.stack.append(m.stack[-1]),
    "N": lambda m: m.stack.append(None),
    "\x88": lambda m: m.stack.append(True),
    "\x89": lambda m: m.stack.append(False),
    "M": _push(_U16),
    "J": _push(_I32),
    "\x8a": _long(_U8),
    "\x8b": _long(_I32),
    "I": _push(_old_int),
    "L": _push(_old_int),
    "F": _push(lambda m: float(m.line())),
    "G": _push(_F64),
    "\x8c": _text(_U8),
    "\x8d": _text(_U64),
    "V": _push(lambda m: m.line()),
    "B": _push(lambda m: m.take(_U32(m))),
    "C": _push(lambda m: m.take(_U8(m))),
    "\x8e": _push(lambda m: m.take(_U64(m))),
    "\x96": _push(lambda m: m.take(_U64(m))),
    "T": _push(lambda m: m.take(_U32(m))),
    "U": _push(lambda m: m.take(_U8(m))),
    "S": _push(lambda m: m.line().strip("'\"")),
    ")": lambda m: m.stack.append(()),
    "\x85": _make_tuple(1),
    "\x87": _make_tuple(3),
    "]": lambda m: m.make([]),
    "l": _close_list,
    "}": lambda m: m.make({}),
    "d": _mapping,
    "\x8f": _push(lambda m: OPAQUE),  # EMPTY_SET
    "\x90": _add_items,
    "\x91": _frozen_set,
    "a": lambda m: m.append_all([m.stack.pop()]),
    "e": lambda m: m.append_all(m.pop_mark()),
    "s": _set_one,
    "u": lambda m: m.set_all(m.pop_mark()),
    "c": lambda m: m.import_name(m.line(), m.line()),
    "\x93": _global_on_stack,
    "R": Machine.call,
    "b": Machine.build,
    "\x81": _reduce_object,
    "\x92": _new_with_keywords,
    "i": _make_instance,
    "o": _make_object,
    "Q": Machine.load_storage,
    "p": lambda m: m.store(int(m.line())),
    "\x94": lambda m: m.store(len(m.memo)),
    "g": _push(lambda m: m.memo[int(m.line())]),
}

_OPCODES: Final[list[Action | None]] = [_BY_SIGN.get(chr(code)) for code in range(256)]
"""One entry an opcode of protocols 0 to 5, but for those the machine does in place."""


def read_pickle(data: bytes, where: str = "") -> object:
    """Return what a pickle of a checkpoint describes, without importing or calling anything.

    Parameters
    ----------
    data
        The whole pickle, at most `MAX_PICKLE_BYTES`.
    where
        The file, for messages.

    Returns
    -------
    object
        Plain containers, numbers, strings and bytes; `TensorRef`, `StorageRef` and `DTypeRef`; and
        `Opaque` for values that are carried but not read. Lists and dicts may refer to themselves.

    Raises
    ------
    UnsafePickleError
        It imports names outside the allowlist; the error lists every one of them.
    DamagedError
        It is cut off, too large, or no pickle at all.

    Notes
    -----
    Linear in the number of opcodes, about 0.3 µs each. Nothing is executed: a call of an allowed name
    makes one of the records above.

    Examples
    --------
    >>> import pickle
    >>> read_pickle(pickle.dumps({"step": 3}))
    {'step': 3}
    """
    return run_machine(Machine(data), where)


def run_machine(machine: Machine, where: str, pause_at: int | None = None) -> object:
    """Run a machine to the end of its pickle, or until it pauses; raises as `read_pickle` does."""
    if len(machine.data) > MAX_PICKLE_BYTES:
        raise DamagedError(
            "the pickle is too large to be a checkpoint's",
            where=where,
            expected=f"at most {MAX_PICKLE_BYTES} bytes",
            found=f"{len(machine.data)}",
        )
    try:
        result = machine.run(_OPCODES, pause_at)
    except (
        MalformedError,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        MemoryError,
        struct.error,
        OverflowError,
    ) as error:
        _refuse_names(machine, where)
        raise DamagedError(
            f"the pickle is damaged at byte {machine.at} ({type(error).__name__}: {error})",
            where=where,
            remedy="restore the file from a backup or save it again",
        ) from error
    if result is not PAUSED:
        _refuse_names(machine, where)
    return result


def _refuse_names(machine: Machine, where: str) -> None:
    if machine.wanted:
        wanted = tuple(sorted(machine.wanted))
        if machine.n_refused:
            wanted += (f"(and {machine.n_refused:,} imports more)",)
        raise UnsafePickleError("the pickle wants to import", where=where, wanted=wanted)
