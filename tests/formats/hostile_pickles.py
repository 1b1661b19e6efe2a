"""Pickles of about a megabyte that want more of time or memory than they are worth, by name.

Run as a program it opens each in a file and tells what that took: name, seconds of CPU on a machine without
other work, megabytes, and the length of the message.
"""

import json
import os
import resource
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

SIZE = 1_000_000
_M61 = (1 << 61) - 1


def _long(value):
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw


def _fill(head, unit, tail):
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + tail


def _many(head, unit, tail):
    parts, n, i = [head], len(head) + len(tail), 0
    while n < SIZE:
        parts.append(unit(i))
        n += len(parts[-1])
        i += 1
    return b"".join([*parts, tail])


def _text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _short(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _named(n, value):
    """Leave a dictionary of `n` names on the stack that have one value."""
    return b"}(" + b"".join(_short(f"{i:x}") + value for i in range(n)) + b"u"


def _optimizer(state=b"}", groups=b"]"):
    """Leave the state of an optimizer on the stack; its groups stand last, and may go on."""
    return b"}(" + _text("state") + state + _text("param_groups") + groups


def _states(n):
    """Leave the states of `n` parameters on the stack that share one tensor."""
    each = b"}" + _short("exp_avg") + b"h\x03s"
    return b"}(" + b"".join(b"J" + struct.pack("<i", i) + each for i in range(n)) + b"u"


def _rebuilt(extents):
    """Leave what rebuilds a tensor on the stack: a function and its arguments, 1 and 2 in the memo."""
    storage = _text("storage") + b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu")
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\nq\x01((" + storage + b"K\x04tQK\x00" + extents + b"\x89}tq\x02"
    )


_HEAD = b"\x80\x02" + _rebuilt(b"K\x04\x85K\x01\x85") + b"Rq\x030"
"""Makes a tensor, which is 3 in the memo."""


def _doubled(levels, wide):
    """Containers inside of each other, each holding the one before many times."""
    program = _HEAD + b"]q\x04h\x03a"
    for _ in range(levels):
        program += b"0](" + b"h\x04" * wide + b"eq\x04"
    return program


def _state(inner):
    return b"}" + _text("model") + inner + b"s."


_OBJECT = b"cmine\nModule\nq\x050h\x05)\x81}(" + _text("_modules") + b"}"
"""A module without tensors, whose class is 5 in the memo; its state goes on and ends with ``ub``."""


_LEAF = _HEAD + _OBJECT + _text("_parameters") + b"}" + _text("w") + b"h\x03subq\x06"
"""A module of one tensor, which is 6."""


def _module(inner):
    """A module of such modules, which becomes 6 in the memo."""
    return b"0h\x05)\x81}" + _short("_modules") + b"}(" + inner + b"usbq\x06"


CASES: dict[str, Callable[[], bytes]] = {
    "integer keys of one hash": lambda: _many(b"\x80\x02}(", lambda i: _long(_M61 * (i + 1)) + b"N", b"u."),
    "integer keys in a row of one table": lambda: _many(
        b"\x80\x02}(", lambda i: _long((i + 1) << 40) + b"N", b"u."
    ),
    "float keys": lambda: _many(
        b"\x80\x02}(", lambda i: b"G" + struct.pack(">d", float(i << 40)) + b"N", b"u."
    ),
    "tuples of integers as keys": lambda: _many(
        b"\x80\x02}(", lambda i: _long(_M61 * (i + 1)) + b"K\x01\x86N", b"u."
    ),
    "memo of one hash": lambda: _many(b"\x80\x02N", lambda i: b"p%d\n" % (_M61 * (i + 1)), b"."),
    "memo with holes": lambda: _many(b"\x80\x02N", lambda i: b"r" + struct.pack("<I", i << 14), b"."),
    "parameters of one hash": lambda: _many(
        b"\x80\x02" + _optimizer(groups=b"]}" + _text("params") + b"]("),
        lambda i: _long(_M61 * (i + 1)),
        b"esau.",
    ),
    "marks": lambda: _fill(b"\x80\x02", b"(", b"."),
    "marks in a dictionary": lambda: _fill(b"\x80\x02(", b"(", b"N."),
    "empty lists": lambda: _fill(b"\x80\x02(", b"]", b"l."),
    "empty dictionaries": lambda: _fill(b"\x80\x02(", b"}", b"l."),
    "small dictionaries": lambda: _fill(b"\x80\x02(", b"}NNs", b"l."),
    "memoised over and over": lambda: _fill(b"\x80\x04N", b"\x94", b"."),
    "memoised lists": lambda: _fill(b"\x80\x04(", b"]\x94", b"l."),
    "nested tuples": lambda: _fill(b"\x80\x02N", b"\x85", b"."),
    "doubled tuples": lambda: _fill(b"\x80\x02N", b"2\x86", b"."),
    "nested lists": lambda: _fill(b"\x80\x02", b"]", b"a" * (SIZE // 2) + b"."),
    "names refused": lambda: _many(b"\x80\x02", lambda i: b"cx\n%x\n0" % i, b"N."),
    "one long name refused": lambda: b"\x80\x02c" + b"x" * SIZE + b"\nname\n.",
    "an integer of a megabyte": lambda: b"\x80\x02}" + _text("lr") + _long((1 << 8 * SIZE) - 1) + b"s.",
    "an integer of a megabyte as a key": lambda: _HEAD + _state(b"}" + _long(1 << 8 * SIZE) + b"h\x03s"),
    "a decimal of a megabyte": lambda: b"\x80\x02I" + b"9" * SIZE + b"\n.",
    "a fraction of a megabyte": lambda: b"\x80\x02F" + b"9" * SIZE + b"\n.",
    "lists that share a list": lambda: (
        _doubled(7, SIZE // 16).replace(b"\x80\x02", b"\x80\x02", 1) + b"0" + _state(b"h\x04")
    ),
    "dictionaries that share one": lambda: _many(
        _HEAD + _named(40_000, b"h\x03") + b"q\x040}(",
        lambda i: _short(f"{i:x}") + b"h\x04",
        b"u.",
    ),
    "optimizers that share their state": lambda: _many(
        _HEAD + _optimizer(_states(20_000)) + b"uq\x040}" + _text("optimizer") + b"}(",
        lambda i: _short(f"{i:x}") + b"h\x04",
        b"us.",
    ),
    "one tensor under many names": lambda: _many(
        _HEAD + b"}" + _text("model") + b"}(", lambda i: _short(f"{i:x}") + b"h\x03", b"us."
    ),
    "one rebuilding under many names": lambda: _many(
        _HEAD + b"}" + _text("model") + b"}(", lambda i: _short(f"{i:x}") + b"h\x01h\x02R", b"us."
    ),
    "long prefixes": lambda: (
        _HEAD
        + _named(40_000, b"h\x03")
        + b"q\x040"
        + _state(b"}(" + _text("p" * 400_000) + b"h\x04" + _text("q" * 100_000) + b"h\x04u")
    ),
    "a mapping copied": lambda: _many(
        b"\x80\x02" + _named(40_000, b"N") + b"q\x040ccollections\ndefaultdict\nq\x050(",
        lambda _: b"h\x05Nh\x04\x86R",
        b"l.",
    ),
    "an integer of many digits as a key again and again": lambda: _many(
        b"\x80\x02" + _long(1 << 8 * 400_000) + b"q\x04}", lambda _: b"h\x04Ns", b"."
    ),
    "a tuple listed again and again": lambda: _many(
        b"\x80\x02(" + b"N" * 300_000 + b"tq\x040(", lambda _: b"h\x04NK\x05\x87Q", b"l."
    ),
    "names of classes": lambda: _fill(b"\x80\x02(", b"i\n\n(", b"."),
    "arguments looked through": lambda: _many(
        b"\x80\x02(" + b"N" * 300_000 + b"tq\x040ccollections\ndefaultdict\nq\x050(",
        lambda _: b"h\x05h\x04R",
        b"l.",
    ),
    "tensors of many extents": lambda: _many(
        b"\x80\x02(" + b"K\x01" * 64 + b"tq\x070" + _rebuilt(b"h\x07h\x07") + b"0}" + _text("model") + b"}(",
        lambda i: _short(f"{i:x}") + b"h\x01h\x02R",
        b"us.",
    ),
    "modules that hold one module twice": lambda: _many(
        _LEAF,
        lambda i: _module(_short("a") + b"h\x06" + _short("b") + b"h\x06"),
        b".",
    ),
    "modules within each other": lambda: _many(
        _LEAF,
        lambda i: _module(_short("a" * 200) + b"h\x06"),
        b".",
    ),
    "a module of many tensors in many": lambda: _many(
        _HEAD + _OBJECT + _text("_parameters") + _named(40_000, b"h\x03") + b"ubq\x06q\x07",
        lambda i: _module(_short("a") + b"h\x07"),
        b".",
    ),
    "one state of many objects": lambda: _many(
        b"\x80\x02cmine\nC\nq\x050" + _named(40_000, b"N") + b"q\x060N",
        lambda _: b"0h\x05)\x81h\x06b",
        b".",
    ),
    "groups of an optimizer again and again": lambda: _many(
        b"\x80\x02cmine\nC\nq\x050"
        + _optimizer(groups=b"]}" + _text("params") + b"](" + b"N" * 300_000 + b"esa")
        + b"uq\x060N",
        lambda _: b"0h\x05)\x81h\x06b",
        b".",
    ),
    "attributes of attributes": lambda: _many(
        b"\x80\x02c__builtin__\ngetattr\nq\x050X\x00\x04\x00\x00" + b"a" * 1024 + b"q\x060cmine\nC\nq\x07",
        lambda _: b"0h\x05h\x07h\x06\x86Rq\x07",
        b".",
    ),
    "objects": lambda: _fill(b"\x80\x02cmine\nC\nq\x050(", b"h\x05)\x81", b"l."),
    "weights of one shape and states of two": lambda: _many(
        _HEAD + b"}(" + _text("optimizer") + _optimizer(_states(25_000)) + b"u" + _text("model") + b"}(",
        lambda i: _short(f"{i:x}") + b"h\x01h\x02R",
        b"uu.",
    ),
}


def write(path, program):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", program)
        archive.writestr("x/byteorder", b"little")
        archive.writestr("x/data/0", bytes(16))


def calibrated():
    """Return how many seconds a second of an idle machine of today takes here and now."""
    begun, total = time.process_time(), 0
    for i in range(1_000_000):
        total += i & 7
    return max(1.0, (time.process_time() - begun) / 0.05)


def measure(name, folder):
    """Open one of them and print what it took."""
    from inshrink_core.errors import InshrinkError
    from inshrink_core.formats import open_run

    path = Path(folder, "step_1.pt")
    write(path, CASES[name]())
    if os.fork():
        _, status = os.wait()
        if status:
            print(json.dumps([name, -1, 0, 0, f"ended with status {status}"]))
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scale, begun, said = calibrated(), time.process_time(), ""
    try:
        open_run(path)
    except InshrinkError as error:
        said = str(error)
    seconds = (time.process_time() - begun) / max(scale, calibrated())
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([name, seconds, used / 1024, len(said), said[:200]]), flush=True)
    os._exit(0)


def main():
    from inshrink_core.formats import open_run

    with tempfile.TemporaryDirectory() as folder:
        open_small(folder, open_run)
        for name in sys.argv[1:] or CASES:
            measure(name, folder)


def open_small(folder, open_run):
    """Open a small file first: what is imported and cached then is not the pickle's."""
    path = Path(folder, "step_0.pt")
    write(path, _HEAD + _state(b"}" + _short("w") + b"h\x03s"))
    open_run(path)


if __name__ == "__main__":
    main()
