"""Mutants of what people give us: torch files, their pickles, safetensors, JSON, TOML, CSV."""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import zipfile
from typing import Any, Final

from benchmarks.fuzz.mutations import EXTREMES, TEXTS, mutate_bytes, mutate_value

_MAX_PICKLE_NBYTES: Final = 1 << 20
"""What of any pickle is promised within a second and 100 MB."""

_COLLIDING: Final = (1 << 61) - 1
"""Multiples of it have one hash in CPython: the modulus of the hash of integers."""

_CALLS: Final = (
    b"cposix\nsystem\n(Vtrue\ntR", b"cbuiltins\neval\n(V1\ntR", b"ctorch\nload\n)R", b"c__main__\nX\n)\x81",
    b"ctorch._utils\n_rebuild_tensor_v2\n)R", b"ccollections\nOrderedDict\n)R", b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_parameter\n)R", b"cbuiltins\nset\n)R", b"ccodecs\nencode\n(Vx\nVlatin1\ntR",
    b"i__main__\nX\n", b"(i__main__\nX\n", b"ctorch\nbfloat16\n", b"ctorch.serialization\n_get_layout\n)R",
    b"cnumpy._core.multiarray\nscalar\n)R", b"cnumpy.core.multiarray\n_reconstruct\n)R",
    b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n(K\x03tR",
    b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch._utils\n_rebuild_wrapper_subclass\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\ncx\nX\n)}tR",
)  # fmt: skip

_ATOMS: Final = (
    b"N", b"\x88", b"\x89", b"K\x01", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"]", b"}", b")", b"(", b"\x8f",
    b"0", b"1", b"2", b"a", b"e", b"s", b"u", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"Q", b"\x81",
    b"\x90", b"\x91", b"\x92", b"\x93", b"\x94", b"h\x00", b"h\x01", b"q\x00", b"X\x01\x00\x00\x00a",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"G\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\x96" + bytes(8),
    b"C\x01x", b"\x8d" + struct.pack("<Q", 1 << 40), b"j\xff\xff\xff\xff", b"P1\n", b"I01\n", b"L5L\n", b".",
    b"\x95" + struct.pack("<Q", 1 << 60), b"\x80\x05", b"\x80\xff", b"\x97", b"\x98", b"d", b"l", b"o",
    b"\x8c\x03w\x00x", b"\x8b\xff\xff\xff\x7f", b"\x82\x01", b"Vx\n", b"S'x'\n", b"F1e400\n", b"I1_0\n",
)  # fmt: skip


def mutate_pickle(rng: random.Random, program: bytes) -> bytes:
    """Return a pickle with opcodes inserted, left out, repeated or changed; at times a flood of one."""
    if rng.random() < 0.05:
        return _flood(rng, program)
    if rng.random() < 0.15:
        return mutate_bytes(rng, program)
    starts = [at for _, _, at in pickletools.genops(program) if at is not None]
    ops = [program[a:b] for a, b in zip(starts, [*starts[1:], len(program)], strict=True)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, kind = rng.randrange(len(ops)), rng.randrange(8)
        if kind <= 1:
            ops.insert(at, rng.choice(_ATOMS))
        elif kind == 2:
            ops.insert(at, rng.choice(_CALLS))
        elif kind == 3 and len(ops) > 1:
            del ops[at]
        elif kind == 4:
            ops[at:at] = ops[at : at + rng.choice((1, 3, 10))]
        elif kind == 5:
            ops[at] = rng.choice(_ATOMS)
        elif kind == 6:
            numbers = [i for i, op in enumerate(ops) if op[:1] in b"KMJG"]
            ops[rng.choice(numbers) if numbers else at] = _number(rng)
        else:
            ops[at] = mutate_bytes(rng, ops[at])
    return b"".join(ops)


def _number(rng: random.Random) -> bytes:
    """Return an integer, at times one of thousands of bits, or a float."""
    value = rng.choice((*EXTREMES, 1 << 2400, -1, 3 * _COLLIDING))
    if rng.random() < 0.2:
        return b"G" + struct.pack(">d", rng.choice((float("inf"), float("nan"), 1e308, -1.0, 0.5)))
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw


def _flood(rng: random.Random, program: bytes) -> bytes:
    """Return a pickle of up to a mebibyte that asks for far more: time, memory, or a long message."""
    size = rng.choice((1 << 14, 1 << 17, 6 << 17))
    kind = rng.randrange(7)
    if kind == 0:
        body = rng.choice((b"(", b"]", b"}", b")", b"N", b"K\x01", b"\x8f", b"2", b"(K\x01K\x02")) * size
        body = b"K\x01" + body
    elif kind == 1:
        keys = (b"\x8a\x0b" + (i * _COLLIDING).to_bytes(11, "little") + b"N" for i in range(1, size // 14))
        body = b"}(" + b"".join(keys) + rng.choice((b"u", b""))
    elif kind == 2:
        body = b"".join(b"cmodule%d\nname\n0" % i for i in range(size // 16))
    elif kind == 3:
        keys = (b"\x8a\x0b" + (i * _COLLIDING).to_bytes(11, "little") for i in range(1, size // 13))
        body = b"\x8f(" + b"".join(keys) + b"\x90"
    elif kind == 4:
        body = b")" + b"\x85" * size
    elif kind == 5:
        body = b"]q\x00" + b"h\x00a" * (size // 3)
    else:
        body = b"X" + struct.pack("<I", size) + b"n" * size + b"q\x00" + b"h\x00h\x00\x86q\x00" * (size // 6)
    at = rng.choice((2, 2, rng.randrange(2, max(len(program), 3))))
    flood = program[:at] + body[: _MAX_PICKLE_NBYTES - len(program)] + program[at:]
    return flood if rng.random() < 0.6 else program[:2] + body[: _MAX_PICKLE_NBYTES - 8] + b"."


def zip_entries(data: bytes) -> list[tuple[str, bytes]]:
    """Return the entries of a sound zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def zipped(entries: list[tuple[str, bytes]]) -> bytes:
    """Return a zip of the entries, stored, with the right checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def resealed_torch(rng: random.Random, data: bytes) -> bytes:
    """Return a torch file whose checksums are right and whose entries are hostile."""
    entries = zip_entries(data)
    at = rng.randrange(len(entries))
    program = next(i for i, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
    kind = rng.randrange(10)
    if kind <= 5:
        entries[program] = (entries[program][0], mutate_pickle(rng, entries[program][1]))
    elif kind == 6:
        entries[at] = (entries[at][0], mutate_bytes(rng, entries[at][1]))
    elif kind == 7:
        name = rng.choice((rng.choice(TEXTS).replace("\0", "_")[:9000] or "x", entries[at][0] + "x"))
        entries[at] = (name, entries[at][1])
    elif kind == 8:
        entries.insert(at, (f"{entries[at][0]}_", entries[at][1]))
    else:
        del entries[at]
    return zipped(entries)


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Return a safetensors file with a hostile header of the right length, or changed bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if rng.random() < 0.1:
        shape = [rng.choice(EXTREMES), 0] if rng.random() < 0.7 else [0] * rng.choice((9, 65, 2000))
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        header["empty"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}
        text = json.dumps(header).encode()
    else:
        text = mutate_json(rng, json.dumps(header).encode(), parsed=header)
    claimed = len(text) if rng.random() < 0.9 else rng.choice(EXTREMES)
    return struct.pack("<Q", claimed) + text + data[8 + size :]


def mutate_json(rng: random.Random, text: bytes, parsed: Any = None) -> bytes:
    """Return a JSON text of another value, or no JSON at all."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, text)
    if rng.random() < 0.1:
        return rng.choice(
            (b"[" * 100_000, b"9" * 5000, b"1e999", b"NaN", b'"\\ud800"', b"", b"null", b"\xff\xfe{\x00}\x00")
        )
    value = mutate_value(rng, json.loads(text) if parsed is None else parsed)
    changed = json.dumps(value, default=str).encode()
    if rng.random() < 0.1:
        numbers = (b"1e400", b"-0", b"9" * 4400, b"1E-400", b"NaN", b"-Infinity", b"1" + b"0" * 800)
        digits = [i for i, c in enumerate(changed) if 48 <= c <= 57]
        if digits:
            at = rng.choice(digits)
            changed = changed[:at] + rng.choice(numbers) + changed[at + 1 :]
    return changed


def mutate_text(rng: random.Random, text: bytes) -> bytes:
    """Return a text with bytes changed, or with a line of someone else's making."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, text)
    lines = text.split(b"\n")
    new = rng.choice(
        (*(t.encode() for t in TEXTS), b"x = [[[[", b"a.b.c = 1979-05-27", b"[evaluator]", b'"' * 99)
    )
    at = rng.randrange(len(lines))
    key = lines[at].partition(b"=")[0]
    value = rng.choice(
        (b"1", b"[]", b"{}", b"inf", b'""', b'"' + b"x" * 6000 + b'"', b'"../../x.py"', b"true")
    )
    lines[at] = rng.choice((new, key + b"= " + value, lines[at] + b"\n" + lines[at], b",".join([new] * 200)))
    return b"\n".join(lines)
