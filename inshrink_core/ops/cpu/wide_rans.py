"""Context rANS on sixteen lanes at a time, for processors with AVX-512; `cpu.rans` has the plain loops.

numba has no vectors, so this module builds the loop over the steps of a block in LLVM IR. It follows the rule
in `inshrink_core.ops.rans` exactly. Tables are read entry by entry: the gather instruction is slower, and
takes twice as long on processors patched against data sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic

from inshrink_core.ops.cpu.compiled import call, load, store
from inshrink_core.ops.rans import INITIAL_STATE, PRECISION

LANES = 16
"""Number of lanes in a 512-bit vector. A step has one or two vectors."""

_cgutils: Any = untyped_cgutils
_intrinsic: Any = intrinsic

_SLOT = (1 << PRECISION) - 1
_LIMIT_SHIFT = 31 - PRECISION
_HALF_OF_ERROR = 0.25
"""Subtracted from a float32 quotient below 2**19 whose error is less than 1/16. Rounded down, the result is
exact or one too small."""

_BIT, _BYTE, _WORD, _INT, _LONG = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
_BITS, _BYTES, _WORDS, _INTS = (ir.VectorType(kind, LANES) for kind in (_BIT, _BYTE, _WORD, _INT))
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(_LONG, LANES // 2)

_FEATURES = ("avx512f", "avx512bw", "avx512vl")


def is_wide() -> bool:
    """Return whether numba compiles for processors with AVX-512."""
    config: Any = numba.config
    if config.DISABLE_JIT or not config.ENABLE_AVX:
        return False
    if config.CPU_NAME or config.CPU_FEATURES:
        return bool(config.CPU_NAME == "x86-64-v4")
    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in _FEATURES)


def _all(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _count(b: Any, bits: Any) -> Any:
    """Return the number of set lanes."""
    return b.zext(call(b, "llvm.ctpop.i16", _WORD, b.bitcast(bits, _WORD)), _LONG)


def _read_entries(b: Any, table: Any, places: Any) -> Any:
    """Read a 32-bit table entry for each lane, two lanes per general register."""
    both = b.bitcast(places, _PAIRS)
    entries = ir.Constant(_PAIRS, [0] * (LANES // 2))
    for k in range(LANES // 2):
        pair = b.extract_element(both, _INT(k))
        low = b.load(b.gep(table, [b.and_(pair, _LONG(0xFFFFFFFF))]))
        high = b.load(b.gep(table, [b.lshr(pair, _LONG(32))]))
        entry = b.or_(b.zext(low, _LONG), b.shl(b.zext(high, _LONG), _LONG(32)))
        entries = b.insert_element(entries, entry, _INT(k))
    return b.bitcast(entries, _INTS)


def _read_bases(b: Any, contexts: Any, place: Any, bases: tuple[Any, Any]) -> Any:
    """Return the table offset of each lane's context; the permutation uses five bits of an index."""
    context = b.zext(load(b, contexts, place, _BYTES), _INTS)
    return call(b, "llvm.x86.avx512.vpermi2var.d.512", _INTS, bases[0], context, bases[1])


def _decode_lanes(b: Any, x: Any, at: Any, entry: Any, words: Any) -> tuple[Any, Any]:
    """Return the states before the symbols were coded, and the position of the next word."""
    frequency = b.add(b.and_(entry, _all(_SLOT)), _all(1))
    offset = b.and_(b.lshr(entry, _all(PRECISION)), _all(_SLOT))
    x = b.add(b.mul(frequency, b.lshr(x, _all(PRECISION))), offset)
    low = b.icmp_unsigned("<", x, _all(INITIAL_STATE))
    ahead = b.zext(load(b, words, at, _WORDS), _INTS)
    word = call(b, "llvm.x86.avx512.mask.expand.v16i32", _INTS, ahead, _all(0), low)
    x = b.select(low, b.or_(b.shl(x, _all(16)), word), x)
    return x, b.add(at, _count(b, low))


def _encode_lanes(b: Any, x: Any, at: Any, entry: Any, words: Any) -> tuple[Any, Any]:
    """Return the states after the symbols are coded, and the position of the last word written."""
    frequency = b.add(b.and_(entry, _all(_SLOT)), _all(1))
    spill = b.icmp_unsigned(">=", b.lshr(x, _all(_LIMIT_SHIFT)), frequency)
    packed = call(b, "llvm.x86.avx512.mask.compress.v16i32", _INTS, x, _all(0), spill)
    n_words = _count(b, spill)
    at = b.sub(at, n_words)
    there = b.bitcast(b.trunc(b.sub(b.shl(_LONG(1), n_words), _LONG(1)), _WORD), _BITS)
    place = b.bitcast(b.gep(words, [at]), _WORDS.as_pointer())
    call(b, "llvm.masked.store.v16i16.p0", ir.VoidType(), b.trunc(packed, _WORDS), place, _INT(2), there)
    x = b.select(spill, b.lshr(x, _all(16)), x)
    share = b.fdiv(b.sitofp(x, _FLOATS), b.sitofp(frequency, _FLOATS))
    quotient = b.fptosi(b.fsub(share, ir.Constant(_FLOATS, [_HALF_OF_ERROR] * LANES)), _INTS)
    rest = b.sub(x, b.mul(quotient, frequency))
    short = b.icmp_signed(">=", rest, frequency)
    quotient = b.select(short, b.add(quotient, _all(1)), quotient)
    rest = b.select(short, b.sub(rest, frequency), rest)
    start = b.lshr(entry, _all(PRECISION))
    return b.add(b.add(b.shl(quotient, _all(PRECISION)), rest), start), at


class _Loop:
    """State of a loop over steps: array pointers, and rANS states in registers."""

    def __init__(self, context: Any, b: Any, signature: Any, arguments: Any, n_vectors: int) -> None:
        arrays = zip(signature.args, arguments, strict=True)
        self.data = [
            context.make_array(kind)(context, b, value).data if isinstance(kind, types.Array) else value
            for kind, value in arrays
        ]
        self.words, self.symbols, self.contexts, self.every, bases, self.table, self.states = self.data[:7]
        self.bases = (load(b, bases, _LONG(0), _INTS), load(b, bases, _LONG(LANES), _INTS))
        self.n_vectors = n_vectors
        self.x = [_cgutils.alloca_once(b, _INTS) for _ in range(n_vectors)]
        for k in range(n_vectors):
            b.store(load(b, self.states, _LONG(k * LANES), _INTS), self.x[k])

    def base(self, b: Any, place: Any) -> Any:
        """Return table offsets; without contexts `every` is 0, so all positions read the same bytes."""
        return _read_bases(b, self.contexts, b.and_(place, self.every), self.bases)

    def store_states(self, b: Any) -> None:
        for k in range(self.n_vectors):
            store(b, b.load(self.x[k]), self.states, _LONG(k * LANES))


def _decode_loop(b: Any, loop: _Loop) -> Any:
    """Decode while steps and words for all lanes are left; return the number of steps and words done."""
    at0, n_steps, n_words = loop.data[7:]
    lanes = LANES * loop.n_vectors
    done, at = _cgutils.alloca_once_value(b, _LONG(0)), _cgutils.alloca_once_value(b, at0)
    last = b.sub(n_words, _LONG(lanes))
    with _cgutils.for_range(b, n_steps) as each:
        with b.if_then(b.icmp_signed(">", b.load(at), last)):
            each.do_break()
        for k in range(loop.n_vectors):
            place = b.add(b.mul(each.index, _LONG(lanes)), _LONG(k * LANES))
            x = b.load(loop.x[k])
            slot = b.add(b.and_(x, _all(_SLOT)), loop.base(b, place))
            entry = _read_entries(b, loop.table, slot)
            store(b, b.trunc(b.lshr(entry, _all(2 * PRECISION)), _BYTES), loop.symbols, place)
            x, after = _decode_lanes(b, x, b.load(at), entry, loop.words)
            b.store(x, loop.x[k])
            b.store(after, at)
        b.store(b.add(each.index, _LONG(1)), done)
    loop.store_states(b)
    return b.or_(b.shl(b.load(done), _LONG(32)), b.load(at))


def _encode_loop(b: Any, loop: _Loop) -> Any:
    """Encode steps from the last to the first; return the position of the first word."""
    at0, n_steps, _ = loop.data[7:]
    at, end = _cgutils.alloca_once_value(b, at0), b.sub(n_steps, _LONG(1))
    with _cgutils.for_range(b, n_steps) as each:
        step = b.mul(b.sub(end, each.index), _LONG(LANES * loop.n_vectors))
        for k in reversed(range(loop.n_vectors)):
            place = b.add(step, _LONG(k * LANES))
            symbol = b.zext(load(b, loop.symbols, place, _BYTES), _INTS)
            entry = _read_entries(b, loop.table, b.add(symbol, loop.base(b, place)))
            x, after = _encode_lanes(b, b.load(loop.x[k]), b.load(at), entry, loop.words)
            b.store(x, loop.x[k])
            b.store(after, at)
    loop.store_states(b)
    return b.load(at)


def _steps(build: Callable[[Any, _Loop], Any], n_vectors: int) -> Any:
    """Return a function for kernels that takes arrays and int64 numbers."""

    # numba does not accept *args here. Arguments: words, symbols, contexts, every, bases, table, states,
    # first position in the words, steps, and number of words.
    def steps(_: Any, w: Any, s: Any, c: Any, e: Any, b: Any, t: Any, x: Any, at: Any, n: Any, m: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return build(builder, _Loop(context, builder, signature, arguments, n_vectors))

        return types.int64(w, s, c, e, b, t, x, at, n, m), generate

    return _intrinsic(steps)


decode_steps = (_steps(_decode_loop, 1), _steps(_decode_loop, 2))
"""Decoders by number of vectors less one: decode full steps into symbols; return ``steps << 32 | words``
used.

Arguments: words, symbols, contexts, every (-1, or 0 if contexts has the same sixteen bytes for all), bases
(32 int32 values), table (int32), states, first word, steps, words.
"""

encode_steps = (_steps(_encode_loop, 1), _steps(_encode_loop, 2))
"""Encoders by number of vectors less one: encode full steps, words downwards; return the first word's
position.

Arguments: as for decoding, but with a table of ``frequency - 1 | start << 12`` and the end of the words in
place of the first word. The buffer must have room for all words.
"""
