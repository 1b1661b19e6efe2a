"""Read the objects that a checkpoint's pickle describes without executing it.

A pickle is a program for a stack machine, and Python's machine calls every function that the program names.
This module first scans the program, opcode by opcode. Each opcode that makes, calls or changes an object is
replaced by one that passes its operands to `_Reader`. Python's machine, which is written in C and 20 times
faster than one in Python, runs the rest: it pushes numbers, text, bytes and tuples, moves values on its stack
and in its memo, and extends the containers made here. The opcodes of protocol 0 are not read: PyTorch
loads no tensors from it either, since its persistent ids are text.

An imported name is looked up in a fixed table of inert stand-ins. A name outside the table becomes an opaque
symbol: nothing is imported, and objects made with it are carried unread, for example enums, dates and
dataclasses among hyperparameters. A program is refused, with the names, if it calls a function that no
harmless value needs (`Foreign.is_refused`). Reading is therefore safe for untrusted files.

The scan also bounds what the program may allocate: values end within the file, the memo has no holes, and the
number of containers is limited by the file's size. Nothing here recurses, and no hash chosen by the program
affects the time of a lookup.
"""

from __future__ import annotations

import _compat_pickle
import functools
import io
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final, NamedTuple

from inshrink_core.errors import DamagedError, UnsafePickleError, clipped

MAX_PICKLE_BYTES: Final = 256 << 20
"""Maximum size of a pickle. One million tensors take about 200 MB; checkpoints have no larger pickles."""

_SOME: Final = 1024
"""Number of containers and calls that even the shortest program may make."""

_MAX_WANTED: Final = 1000
"""Maximum number of refused names that are listed; further ones are counted."""

_MOST: Final = 1 << 62
"""Upper bound for offsets, extents and strides."""

_MAX_PARTS: Final = 8
"""Maximum length of a tuple that is compared by value as a key."""

_WORD_BITS: Final = 64
_MAX_BITS: Final = 1024
"""Maximum size of a number that is written out for comparison as a key."""

_HASH_MODULUS: Final = (1 << 61) - 1
"""Modulus of Python's integer hash: numbers that differ by it collide (sys.hash_info)."""

_FEW_KEYS: Final = 4096
"""Number of items that takes only milliseconds to look up even if all of them collide."""


class _MalformedError(Exception):
    """The pickle is no program of a checkpoint; converted to a DamagedError."""


_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(_MalformedError, pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError),
    *(MemoryError, TypeError, ValueError),
)
"""Exceptions that Python's machine raises for a malformed program."""


class Opaque:
    """A value that is carried but never inspected: numpy scalars, sparse tensors, sets of them."""

    __slots__ = ()

    def append(self, item: object) -> None:
        """Discard an item."""

    def extend(self, items: object) -> None:
        """Discard items."""

    def __setitem__(self, key: object, value: object) -> None:
        """Discard an item."""


OPAQUE: Final = Opaque()


class DTypeRef(NamedTuple):
    """A torch dtype by name, such as ``DTypeRef("float32")``."""

    name: str


class StorageType(NamedTuple):
    """A storage class, given by its element dtype; ``""`` for the untyped class."""

    dtype: str


class RecordType(NamedTuple):
    """A class whose objects are read as `Record`, given by its name."""

    name: str


@dataclass(eq=False, slots=True)
class Record:
    """An object described by the pickle: the name of its class and its state."""

    kind: str
    state: object = None


class StorageRef(NamedTuple):
    """A storage of the file: the entry ``data/<key>``, its element type and its size.

    `dtype` is ``""`` for an untyped storage, whose `n_elements` counts bytes.
    """

    key: str
    dtype: str
    n_elements: int


class TensorRef:
    """A tensor described by the pickle; offsets and strides count elements.

    This is a class, not a tuple, so that tensors are compared and hashed by identity.
    """

    __slots__ = ("dtype", "offset", "shape", "storage", "stride")

    def __init__(
        self, storage: StorageRef, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.storage, self.dtype, self.offset = storage, dtype, offset
        self.shape, self.stride = shape, stride


class OddTensor(TensorRef):
    """A tensor whose values differ from the bytes of one storage; it is carried unread.

    Parameters
    ----------
    kind
        ``conjugate``, ``negative``, ``sparse``, ``quantized``, ``meta`` or ``numpy``.
    args
        Arguments of PyTorch's rebuild function; for the first two kinds, the tensor without its bits.
    """

    __slots__ = ("args", "kind")

    def __init__(self, kind: str, args: tuple[Any, ...]) -> None:
        super().__init__(StorageRef("", "", 0), "", 0, (), ())
        self.kind, self.args = kind, args


@dataclass(frozen=True, slots=True)
class _OddKey:
    """A stand-in for a mapping key whose hash an attacker could choose.

    Keys are compared by text, which Python hashes with a secret of the process.
    """

    text: str
    shown: str = field(default="object", compare=False)

    def __str__(self) -> str:
        return self.shown


def _is_small(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= _MAX_BITS
    return value is None or isinstance(value, (str, float))


def _written(value: object) -> str:
    # Decimals of a large integer would take quadratic time.
    return f"{value:#x}" if type(value) is int and value.bit_length() > _WORD_BITS else repr(value)


class _Mapping(dict[Any, Any]):
    """A dict that accepts text and plausible numbers as keys and replaces other keys.

    The author of a pickle can predict the hash of a number. If all keys collide, each insertion takes time
    proportional to the number of items. Hashing a deeply nested tuple is too slow or overflows the C stack.
    """

    __slots__ = ()

    def __setitem__(self, key: Any, value: object) -> None:
        if type(key) is not str and not (type(key) is int and 0 <= key <= len(self)):
            key = self._safe(key)
        dict.__setitem__(self, key, value)

    def _safe(self, key: Any) -> object:
        if isinstance(key, (str, bytes, bool, _OddKey, Record)) or key is None:
            return key
        if type(key) is tuple and len(key) <= _MAX_PARTS and all(isinstance(k, str) for k in key):
            return key
        if isinstance(key, int):
            # Accept nearly dense numbers, such as those of parameters, and arbitrary ones, such as ids, while
            # few.
            few = len(self) < _FEW_KEYS and abs(key) < _HASH_MODULUS
            if few or 0 <= key < 8 * len(self):
                return key
        parts = key if type(key) is tuple else (key,)
        if len(parts) <= _MAX_PARTS and all(map(_is_small, parts)):
            text = ", ".join(map(_written, parts))
            return _OddKey(f"{type(key)} {text}", clipped(text if parts is not key else f"({text})"))
        # Each opcode makes a new object, and the program cannot choose memory addresses.
        return _OddKey(f"object {id(key)}")


def _of_python_3(module: str, name: str) -> tuple[str, str]:
    """Return the Python 3 equivalents of module and name; protocol 2 writes those of Python 2."""
    other = _compat_pickle.IMPORT_MAPPING.get(module, module), name
    return _compat_pickle.NAME_MAPPING.get((module, name), other)


class Foreign(Opaque, _Mapping):
    """A name outside the table, or an object made with it (`is_made`); carried, never executed.

    An object of a dict subclass has its items. A module has the items of its state dict, an optimizer its
    state and groups, any other object the tensors of the modules among its attributes.
    """

    __slots__ = ("is_made", "module", "qualname")

    def __init__(self, module: str, qualname: str, is_made: bool = False) -> None:
        self.module, self.qualname, self.is_made = module, qualname, is_made

    __setitem__ = _Mapping.__setitem__

    @property
    def name(self) -> str:
        """Module and name, shortened."""
        return f"{clipped(self.module)}.{clipped(self.qualname)}"

    @property
    def known_as(self) -> tuple[str, str]:
        """The Python 3 equivalents of module and name."""
        return _of_python_3(self.module, self.qualname)

    @property
    def is_refused(self) -> bool:
        """Whether a call of it refuses the file: it is an object, or a function that no harmless value needs.

        These functions are all of Python's standard library except `_HARMLESS` and exceptions, and public
        functions of PyTorch and numpy.
        """
        module, name = self.known_as
        root, last = module.partition(".")[0], name.rpartition(".")[2]
        if self.is_made or f"{module}.{name}" in _HARMLESS:
            return self.is_made
        if root in sys.stdlib_module_names:
            return not last.endswith(("Error", "Exception", "Exit", "Interrupt", "Iteration", "Warning"))
        return root in ("torch", "numpy") and last[:1].islower()

    def take_state(self, state: Any, spend: Callable[[int], None]) -> None:
        """Store the tensors of a module, an optimizer, or an object with modules as attributes."""
        state = state[0] if type(state) is tuple and state else state
        if not isinstance(state, dict):
            return
        modules = state.get("_modules")
        groups = [state.get(key) for key in ("_parameters", "_buffers", "_non_persistent_buffers_set")]
        if isinstance(modules, dict):
            spend(sum(len(group) for group in groups if isinstance(group, (dict, list, tuple))))
            tensors = {k: v for group in groups[:2] if isinstance(group, dict) for k, v in group.items()}
            listed = groups[2] if isinstance(groups[2], (list, tuple)) else ()
            hidden = {name for name in listed if isinstance(name, str)}
            for name, value in tensors.items():
                if isinstance(value, (TensorRef, TensorParts)) and name not in hidden:
                    self[name] = value
        children = modules if isinstance(modules, dict) else state
        spend(len(children))
        for name, inner in children.items():
            for key, value in inner.items() if isinstance(inner, Foreign) and inner.is_made else ():
                spend(3 + (len(str(name)) + len(str(key))) // 16)
                if isinstance(value, (TensorRef, TensorParts)):
                    self[f"{name}.{key}"] = value
        if isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list):
            self._take_optimizer(state["state"], state["param_groups"], spend)

    def _take_optimizer(self, state: Any, groups: Any, spend: Callable[[int], None]) -> None:
        """Store state and groups with numbers for parameters, as in `state_dict`."""
        numbers: dict[int, int] = {}
        numbered = _Sequence()
        for group in groups:
            params = group.get("params") if isinstance(group, dict) else ()
            if isinstance(params, list):
                spend(len(params) + len(group))
                order = [numbers.setdefault(id(param), len(numbers)) for param in params]
                numbered.append(_mapping_of({**group, "params": _Sequence(order)}.items()))
        found = ((number, state.get(_OddKey(f"object {place}"))) for place, number in numbers.items())
        self["state"] = _mapping_of((number, items) for number, items in found if items is not None)
        self["param_groups"] = numbered


class TensorParts(_Mapping):
    """A tensor of a class that stores it as other tensors by name, such as codes and scales."""

    __slots__ = ()


class _Sequence(list[Any]):
    """A list that only grows at its end."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        raise _MalformedError("pairs for something that is no mapping")


def mapping(value: object) -> Mapping[Any, Any]:
    """Return a value of a pickle if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def _mapping_of(pairs: Any) -> _Mapping:
    made = _Mapping()
    for key, value in pairs:
        made[key] = value
    return made


def _rebuild_v2(args: tuple[Any, ...]) -> TensorRef:
    storage, offset, shape, stride = args[:4]
    bits = args[6] if len(args) == 7 else None
    return _tensor(storage, offset, shape, stride, getattr(storage, "dtype", ""), bits)


def _rebuild_v3(args: tuple[Any, ...]) -> TensorRef:
    if not isinstance(args[6], DTypeRef):
        raise _MalformedError("a tensor without dtype")
    bits = args[7] if len(args) == 8 else None
    return _tensor(args[0], args[1], args[2], args[3], args[6].name, bits)


def _tensor(storage: object, offset: Any, shape: Any, stride: Any, dtype: str, bits: object) -> TensorRef:
    """Return a tensor; an odd one if a bit makes its values differ from the bytes."""
    if isinstance(storage, Opaque):
        return OddTensor("opaque", ())
    if not isinstance(storage, StorageRef):
        raise _MalformedError("a tensor without storage")
    if type(shape) is not tuple or type(stride) is not tuple or not len(stride) == len(shape) <= 64:
        raise _MalformedError("a tensor without shape")
    for value in (offset, *shape, *stride):
        if type(value) is not int or not 0 <= value < _MOST:
            raise _MalformedError("a tensor without shape")
    made = TensorRef(storage, dtype, offset, shape, stride)
    for bit, kind in (("conj", "conjugate"), ("neg", "negative")):
        if isinstance(bits, dict) and bits.get(bit):
            made = OddTensor(kind, (made,))
    return made


def _odd(kind: str) -> Callable[[tuple[Any, ...]], object]:
    return lambda args: OddTensor(kind, args)


def _rebuild_nested(args: tuple[Any, ...]) -> object:
    # Jagged: a mapping of its parts; strided: values, sizes, strides and offsets.
    parts = args[0] if isinstance(args[0], dict) else dict(zip(_NESTED_PARTS, args, strict=False))
    return TensorParts((key, value) for key, value in parts.items() if isinstance(value, TensorRef))


def _first(args: tuple[Any, ...]) -> object:
    return args[0]


def _rebuild_wrapper(args: tuple[Any, ...]) -> object:
    # A tensor of a class without its own storage; the tensors that it holds follow as attributes.
    return OPAQUE


def _rebuild_subclass(args: tuple[Any, ...]) -> object:
    # (function, class, its arguments, attributes); `_Reader` handles the other functions.
    state = args[3][0] if type(args[3]) is tuple and args[3] else args[3]
    items = state.items() if isinstance(state, _Mapping) else ()
    return TensorParts((key, value) for key, value in items if isinstance(value, (TensorRef, TensorParts)))


_NESTED_PARTS: Final = ("values", "sizes", "strides", "storage_offsets")


def _reconstruct(args: tuple[Any, ...]) -> object:
    # Protocols 0 and 1 make an object this way, without calling its class.
    return Foreign(args[0].module, args[0].qualname, is_made=True) if isinstance(args[0], Foreign) else OPAQUE


def _inert(args: tuple[Any, ...]) -> object:
    return OPAQUE


def _make_dict(args: tuple[Any, ...]) -> object:
    # defaultdict(factory, mapping) and Counter(mapping); older Pythons write OrderedDict(pairs).
    if not args:
        return _Mapping()
    source = next((a for a in args if isinstance(a, (dict, list)) and not isinstance(a, Foreign)), ())
    return _mapping_of(source.items() if isinstance(source, dict) else source)


def _make_sequence(args: tuple[Any, ...]) -> object:
    if args and isinstance(args[0], (list, tuple)):
        return tuple(args[0]) if len(args) == 1 else OPAQUE
    return OPAQUE if args else ()


def _make_bytes(args: tuple[Any, ...]) -> object:
    # Protocol 2 writes bytes as _codecs.encode(text, "latin1").
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return args[0] if args and isinstance(args[0], bytes) else b""


_HARMLESS_NAMES: Final = """
    _io.BytesIO _io.StringIO _operator.getitem _operator.or_ argparse.Namespace array._array_reconstructor
    array.array builtins.bytearray builtins.enumerate builtins.iter builtins.list builtins.memoryview
    builtins.object builtins.reversed builtins.type builtins.zip collections.ChainMap collections.UserDict
    collections.UserList collections.UserString collections.deque copyreg.__newobj__ copyreg.__newobj_ex__
    datetime.date datetime.datetime datetime.time datetime.timedelta datetime.timezone decimal.Context
    decimal.Decimal fractions.Fraction functools.partial http.HTTPMethod http.HTTPStatus inspect.Parameter
    inspect.Signature inspect._ParameterKind io.BytesIO io.StringIO ipaddress.IPv4Address
    ipaddress.IPv4Interface ipaddress.IPv4Network ipaddress.IPv6Address ipaddress.IPv6Interface
    ipaddress.IPv6Network itertools.chain itertools.count itertools.cycle itertools.islice itertools.product
    itertools.repeat logging.getLogger operator.attrgetter operator.getitem operator.itemgetter
    operator.methodcaller operator.or_ random.Random random.SystemRandom re.RegexFlag re._compile
    signal.Signals string.Template time.struct_time torch.fx.graph_module.reduce_graph_module
    types.GenericAlias types.SimpleNamespace uuid.SafeUUID uuid.UUID zoneinfo.ZoneInfo
    zoneinfo.ZoneInfo._unpickle"""
_HARMLESS: Final = frozenset(_HARMLESS_NAMES.split())
"""Callables that harmless values need. None of them is called here."""

_StandIn = Callable[[tuple[Any, ...]], object] | DTypeRef | StorageType | RecordType
"""The stand-in for a name: a value, or a function of the call's arguments."""

_TABLE: Final[dict[Callable[..., Any], str]] = {
    _rebuild_v2: "torch._utils: _rebuild_tensor_v2",
    _rebuild_v3: "torch._utils: _rebuild_tensor_v3",
    _rebuild_subclass: "torch._tensor: _rebuild_from_type_v2",
    _rebuild_wrapper: "torch._utils: _rebuild_wrapper_subclass",
    _rebuild_nested: """torch._utils: _rebuild_nested_tensor;
        torch.nested._internal.nested_tensor: _rebuild_njt""",
    _odd("sparse"): "torch._utils: _rebuild_sparse_tensor",
    _odd("quantized"): "torch._utils: _rebuild_qtensor",
    _odd("meta"): "torch._utils: _rebuild_meta_tensor_no_storage",
    _odd("numpy"): "torch._utils: _rebuild_device_tensor_from_numpy",
    _first: """torch._utils: _rebuild_parameter _rebuild_parameter_with_state;
        torch.serialization: _get_layout""",
    _reconstruct: "copyreg: _reconstructor",
    _make_sequence: "builtins: list tuple set frozenset; torch: Size",
    _make_dict: "builtins: dict; collections: OrderedDict defaultdict Counter",
    _make_bytes: "builtins: bytes bytearray; _codecs: encode",
    _inert: """torch: device Tensor Generator strided sparse_coo sparse_csr per_tensor_affine
            per_channel_affine contiguous_format preserve_format channels_last channels_last_3d;
        torch.nn.parameter: Parameter Buffer; torch.storage: TypedStorage; numpy: dtype ndarray;
        numpy.core.multiarray numpy._core.multiarray: scalar _reconstruct;
        numpy.core.numeric numpy._core.numeric: _frombuffer;
        numpy.dtypes: Float16DType Float32DType Float64DType Int32DType Int64DType UInt32DType UInt64DType
            BoolDType;
        torch.distributed.checkpoint.metadata: _MEM_FORMAT_ENCODING;
        torch.distributed._shard.sharded_tensor.metadata: MEM_FORMAT_ENCODING;
        deepspeed.runtime.zero.config: ZeroStageEnum;
        pathlib: Path PosixPath PurePosixPath PureWindowsPath WindowsPath;
        pathlib._local: PosixPath PurePosixPath PureWindowsPath WindowsPath;
        builtins: complex slice range bool int float str""",
    StorageType: """torch torch.storage: DoubleStorage=float64 FloatStorage=float32 HalfStorage=float16
        BFloat16Storage=bfloat16 LongStorage=int64 IntStorage=int32 ShortStorage=int16 CharStorage=int8
        ByteStorage=uint8 BoolStorage=bool ComplexFloatStorage=complex64 ComplexDoubleStorage=complex128
        QInt8Storage=qint8 QUInt8Storage=quint8 QInt32Storage=qint32 QUInt4x2Storage=quint4x2
        QUInt2x4Storage=quint2x4 UntypedStorage=""",
    DTypeRef: """torch: float64 float32 float16 bfloat16 complex128 complex64 complex32 int64 int32 int16 int8
        uint8 uint16 uint32 uint64 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
        float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4
        bits4x2 double=float64 float=float32 half=float16 long=int64 int=int32 short=int16 cfloat=complex64
        cdouble=complex128""",
    RecordType: """torch.distributed.checkpoint.metadata: Metadata TensorStorageMetadata BytesStorageMetadata
            ChunkStorageMetadata MetadataIndex TensorProperties StorageMeta;
        torch.distributed._shard.sharded_tensor.metadata: TensorProperties;
        torch.distributed.checkpoint.filesystem: _StorageInfo _StoragePrefix""",
}
"""The known names by module, and their stand-ins.

A type is called with the name, or with the text after ``=``. Python 2 names use the entries of their Python 3
equivalents.
"""


def _allowlist() -> dict[tuple[str, str], _StandIn]:
    table: dict[tuple[str, str], _StandIn] = {}
    for stand_in, text in _TABLE.items():
        for row in text.split(";"):
            modules, _, names = row.partition(":")
            for word in names.split():
                name, equals, dtype = word.partition("=")
                value = stand_in(dtype if equals else name) if isinstance(stand_in, type) else stand_in
                table |= {(module, name): value for module in modules.split()}
    return table


_ALLOWED: Final = _allowlist()

_CALL, _CALL_ITEMS, _NEW, _BUILD, _ADD = range(5)
"""Operations of `_Reader` on two values; an opcode for one of them is replaced by its number."""


def _ask(operation: int, before: bytes = b"") -> bytes:
    """Return opcodes that replace the two topmost values by the result of a `_Reader` operation."""
    return before + b"K" + bytes([operation]) + b"\x87Q"


_REPLACED: Final = {
    b"}": b"NQ",  # EMPTY_DICT
    b"]": b"\x88Q",  # EMPTY_LIST
    b"\x8f": b"\x88Q",  # EMPTY_SET
    b"R": _ask(_CALL),  # REDUCE
    b"\x81": _ask(_NEW),  # NEWOBJ
    b"\x92": _ask(_NEW, b"0"),  # NEWOBJ_EX, without its keywords
    b"b": _ask(_BUILD),
    b"\x90": _ask(_ADD, b"t"),  # ADDITEMS
    b"\x91": b"t0\x89Q",  # FROZENSET
    b"o": _ask(_CALL_ITEMS, b"tN"),  # OBJ
}

_SIZES: Final = {
    bytes([sign]): size
    for size, signs in ((1, b"\x8a\x8cUC"), (4, b"\x8bXTB"), (8, b"\x8d\x8e\x96"))
    for sign in signs
}
"""Opcodes whose value follows its size, with the width of the size field in bytes."""


def _short(opcode: bytes, n_zeros: int, most: int) -> bytes:
    """Return a pattern of an opcode with a value of fewer than `most` bytes, matched without a callback."""
    groups = []
    for first in range(0, most, 8):
        sizes = range(first, first + 8)
        inner = b"|".join(re.escape(bytes([n])) + b"\0" * n_zeros + b".{%d}" % n for n in sizes)
        groups.append(b"(?=[\\x%02x-\\x%02x])(?:%b)" % (first, first + 7, inner))
    return opcode + b"(?:" + b"|".join(groups) + b")"


@functools.lru_cache(maxsize=64)
def _plain_opcodes(index: bytes) -> re.Pattern[bytes]:
    """Return a pattern of opcodes that Python's machine may run unchanged.

    Parameters
    ----------
    index
        Pattern of the largest memo index, as written by LONG_BINPUT.
    """
    patterns = [
        rb"[(N012aesut)Q\x85-\x89\x93]",
        rb"[qhK\x80].",
        rb"r" + index,
        _short(rb"X", 3, 96),
        _short(rb"\x8c", 0, 96),
        rb"M..|[jJ]....|G.{8}|\x94(?!\x94)|c[^\n]*+\n[^\n]*+\n",
        *(rb"\x8a\x%02x.{%d}" % (n, n) for n in range(1, 10)),
        # Integers and bools of protocol 1; Python 2 writes integers beyond 32 bits so with protocol 2.
        rb"I(?:0[01]?|-?[1-9]\d{0,18})\n|L(?:0|-?[1-9]\d{0,4000})L?\n",
    ]
    return re.compile(b"(?s:" + b"|".join(patterns) + b")*+")


def _plain_for(n_bytes: int) -> re.Pattern[bytes]:
    """Return the pattern for a program of `n_bytes` bytes, which also bounds its memo's size."""
    high, low = n_bytes >> 24, (n_bytes >> 16) & 0xFF
    index = b"..[\\x00-\\x%02x]\\x00" % low if not high else b"...[\\x00-\\x%02x]" % high
    return _plain_opcodes(index)


def _rewritten(data: bytes) -> tuple[bytes, str, int]:
    """Return a program without the opcodes that `_Reader` handles, its flaw, and its size in bytes.

    A flawed program is cut at the flaw, so that reading it still finds the names that it imports.
    """
    match, n_bytes = _plain_for(len(data)).match, len(data)
    pieces: list[bytes] = []
    at, remaining, flaw = 0, 0, ""
    most = _SOME + n_bytes // 3
    while True:
        found = match(data, at)
        at = found.end() if found else at
        opcode = data[at : at + 1]
        if opcode in _REPLACED:
            pieces += (data[remaining:at], _REPLACED[opcode])
            at = remaining = at + 1
            most -= 1
            if not most:
                flaw = "more containers than the pickle has room for"
                break
        elif opcode in _SIZES:
            begun = at + 1 + _SIZES[opcode]
            end = begun + int.from_bytes(data[at + 1 : begun], "little")
            if max(begun, end) > n_bytes:
                flaw = "a value longer than the rest of the pickle"
                break
            if opcode == b"\x96":
                # Rewrite BYTEARRAY8 as BINBYTES8, because bytes are immutable.
                pieces += (data[remaining:at], b"\x8e")
                remaining = at + 1
            at = end
        elif opcode == b"\x95" and at + 9 <= n_bytes:
            # Drop FRAME opcodes; one frame encloses the whole rewritten program.
            pieces.append(data[remaining:at])
            at = remaining = at + 9
        elif opcode == b".":
            at += 1
            break
        else:
            flaw = f"opcode 0x{opcode.hex()}" if opcode else "it ends before STOP"
            break
    program = b"".join([*pieces, data[remaining:at]])
    return b"\x95" + len(program).to_bytes(8, "little") + program, flaw and f"at byte {at}: {flaw}", at


def pickle_nbytes(data: bytes) -> int:
    """Return the size of the pickle at the start of the data; 0 if it is incomplete."""
    _, flaw, nbytes = _rewritten(data)
    return 0 if flaw else nbytes


class _Reader(pickle.Unpickler):
    """Python's own machine, for a program that calls only the two methods of this class."""

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(program), encoding="latin-1")
        self.wanted: set[str] = set()
        self.n_refused = 0
        self.storages: dict[str, StorageRef] = {}
        self._room = _SOME + len(program)

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for an imported name."""
        found = _ALLOWED.get(_of_python_3(module, name))
        return Foreign(module, name) if found is None else found

    def _refuse(self, foreign: Foreign) -> Opaque:
        """Record a refused name that an object is made with."""
        if len(self.wanted) < _MAX_WANTED:
            self.wanted.add(foreign.name)
        else:
            self.n_refused += 1
        return OPAQUE

    def persistent_load(self, pid: Any) -> object:
        """Return an empty container, the result of a replaced opcode, or the storage with an id."""
        if type(pid) is tuple:
            if len(pid) == 3:
                return self._apply(*pid)
            if len(pid) >= 5 and pid[0] == "storage":
                if isinstance(pid[1], Foreign):
                    return self._refuse(pid[1])
                if len(pid) > 5 and pid[5] is not None:
                    raise _MalformedError("a storage that is a part of another")
                storage = _storage(pid[1], pid[2], pid[4])
                if isinstance(storage, StorageRef):
                    self.storages.setdefault(storage.key, storage)
                return storage
            if len(pid) == 4 and pid[0] == "module":
                return pid[1]  # the class of a module, with its source
        elif pid is None:
            return _Mapping()
        elif pid is True:
            return _Sequence()
        elif pid is False:
            return OPAQUE
        raise _MalformedError("a persistent id that is no storage")

    def _apply(self, first: Any, second: Any, operation: object) -> object:
        """Return the result of a replaced opcode for two values."""
        if operation == _NEW and isinstance(first, Foreign):
            return self._new(first, second)
        if operation in (_CALL, _NEW):
            return self._call(first, second)
        if operation == _CALL_ITEMS and type(first) is tuple:
            self._spend(len(first))
            return self._call(first[0], first[1:])
        if operation == _BUILD and isinstance(first, (Opaque, dict, Record, TensorRef, FunctionType)):
            # Ignore the state of other objects: OrderedDict's `_metadata` and numpy's dtype are not needed.
            if isinstance(first, Foreign):
                first.take_state(second, self._spend)
            elif isinstance(first, Record):
                first.state = second
            return first
        if operation == _ADD and isinstance(first, (Opaque, _Sequence)):
            first.extend(second)
            return first
        raise _MalformedError("an opcode that does not go with its values")

    def _call(self, function: Any, args: Any) -> object:
        if type(args) is not tuple:
            raise _MalformedError("a call without arguments")
        if function is _rebuild_v2:
            self._spend(len(args) + len(args[2]))
            return _rebuild_v2(args)
        if function is _rebuild_subclass and args[0] is not _rebuild_wrapper:
            if args[0] is _rebuild_subclass:  # avoids recursion
                raise _MalformedError("a class of tensors within itself")
            return self._call(args[0], args[2])  # a class that adds methods to a tensor
        if type(function) is FunctionType:
            if args:
                sizes = [len(arg) for arg in args[:8] if isinstance(arg, (list, tuple, dict, str, bytes))]
                self._spend(len(args) + sum(sizes))
            return function(args)
        if isinstance(function, Foreign):
            return self._call_foreign(function, args)
        if isinstance(function, RecordType):
            return Record(function.name)
        if isinstance(function, (Opaque, StorageType, DTypeRef)):
            return OPAQUE
        raise _MalformedError("a call of something that is no function")

    def _call_foreign(self, function: Foreign, args: tuple[Any, ...]) -> object:
        """Return the object made by a call of an unknown name, unless the name is refused."""
        if function.known_as == ("builtins", "getattr") and len(args) == 2 and isinstance(args[1], str):
            owner = args[0]
            self._spend(len(args[1]) + len(getattr(owner, "qualname", "")))
            if isinstance(owner, Foreign) and not owner.is_made:
                return self.find_class(owner.module, f"{owner.qualname}.{args[1]}")
            return Foreign(function.module, function.qualname, is_made=True)  # a method of an object
        # A union of types is pickled as a reduction.
        is_reduction = function.known_as[1] == "reduce" and bool(args)
        is_union = is_reduction and getattr(args[0], "qualname", "") == "or_"
        return self._refuse(function) if function.is_refused and not is_union else self._new(function, args)

    def _new(self, kind: Foreign, args: object) -> Foreign:
        """Return an object of a class; a module may be constructed from another module or from its state."""
        made = Foreign(kind.module, kind.qualname, is_made=True)
        if type(args) is tuple and args and isinstance(args[0], dict):
            compiled = kind.qualname == "OptimizedModule"
            made.take_state({"_orig_mod": args[0]} if compiled else args[0], self._spend)
        return made

    def _spend(self, n_values: int) -> None:
        """Count copied or visited values, so that repeated references cannot multiply the work."""
        self._room -= n_values
        if self._room < 0:
            raise _MalformedError("more values than the pickle has bytes")


def _storage(kind: object, key: object, n_elements: object) -> object:
    if isinstance(kind, StorageType) and type(key) is str and type(n_elements) is int:
        return StorageRef(key, kind.dtype, n_elements)
    if isinstance(kind, (FunctionType, Opaque)):
        return OPAQUE
    raise _MalformedError("a storage of unknown type")


def read_pickle(data: bytes, where: str = "", *, storages: dict[str, StorageRef] | None = None) -> object:
    """Return the objects that a checkpoint's pickle describes, without importing or calling anything.

    Parameters
    ----------
    data
        The whole pickle, at most `MAX_PICKLE_BYTES`.
    where
        The file, for messages.
    storages
        Receives every storage that the pickle names, by key.

    Returns
    -------
    object
        Plain containers, numbers, strings and bytes; `TensorRef`, `TensorParts`, `StorageRef`, `DTypeRef`
        and `Record`; `Opaque` for values that are carried but not read (`Foreign` for classes outside the
        table, which is a mapping for modules). Lists and dicts may refer to themselves.

    Raises
    ------
    UnsafePickleError
            The pickle calls names that no harmless value needs, or is only an object; the error lists them.
        DamagedError
            The data is truncated, too large, or no pickle.

    Notes
    -----
    Time and memory are linear in the size of the pickle: about 50 ns and at most 100 bytes per byte.

    Examples
    --------
    >>> import pickle
    >>> read_pickle(pickle.dumps({"step": 3}))
    {'step': 3}
    """
    if len(data) > MAX_PICKLE_BYTES:
        facts = {"expected": f"at most {MAX_PICKLE_BYTES} bytes", "found": f"{len(data)}"}
        raise DamagedError("the pickle is too large to be a checkpoint's", where=where, **facts)
    program, flaw, _ = _rewritten(data)
    reader = _Reader(program)
    error: Exception | None = None
    result: object = None
    try:
        result = reader.load()
    except _ERRORS as caught:
        error = caught
    if isinstance(result, Foreign) and not result:
        reader.wanted.add(result.name)
    if reader.wanted:
        wanted = tuple(sorted(reader.wanted))
        if reader.n_refused:
            wanted += (f"(and {reader.n_refused:,} imports more)",)
        raise UnsafePickleError("the pickle wants to import", where=where, wanted=wanted)
    if error is not None:
        what = f"the pickle is damaged ({flaw or f'{type(error).__name__}: {error}'})"
        remedy = "restore the file from a backup or save it again"
        raise DamagedError(what, where=where, remedy=remedy) from error
    if storages is not None:
        storages |= reader.storages
    return result
