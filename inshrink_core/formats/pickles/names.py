"""The names a checkpoint's pickle may import, and the inert records they stand for.

No entry of the table imports or runs what it is called after: each makes a plain container, or one of
the records below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from inshrink_core.errors import clipped

__all__ = [
    "ALLOWED",
    "NOTHING",
    "OPAQUE",
    "DTypeRef",
    "Global",
    "MalformedError",
    "Opaque",
    "StorageRef",
    "StorageType",
    "TensorRef",
    "set_item",
]

_SMALL_TYPES = (str, int, float, bool, type(None))
_HASH_MODULUS: Final = (1 << 61) - 1
"""Numbers that differ by it have the same hash (sys.hash_info)."""

_FEW_KEYS: Final = 4096
"""So many items are found in milliseconds even where all of them collide."""


class Opaque:
    """A value that is carried, never looked into: numpy scalars, sparse tensors, sets of them."""

    __slots__ = ()


OPAQUE: Final = Opaque()


class DTypeRef(NamedTuple):
    """A torch dtype by name, as ``DTypeRef("float32")``."""

    name: str


class StorageRef(NamedTuple):
    """A storage of the file: the entry ``data/<key>``, its element type and its size.

    `dtype` is ``""`` for an untyped storage, whose `n_elements` counts bytes.
    """

    key: str
    dtype: str
    n_elements: int


class TensorRef:
    """A tensor as the pickle describes it; offsets and strides in elements.

    A class, not a tuple, so that it is compared and hashed by identity.
    """

    __slots__ = ("dtype", "offset", "shape", "storage", "stride")

    def __init__(
        self, storage: StorageRef, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.storage, self.dtype, self.offset, self.shape, self.stride = (
            storage,
            dtype,
            offset,
            shape,
            stride,
        )


_Function = Callable[[tuple[Any, ...]], Any]


class Global:
    """A name the pickle imports, and what calling it means here."""

    __slots__ = ("apply", "value")

    def __init__(self, apply: _Function, value: object = OPAQUE) -> None:
        self.apply, self.value = apply, value


class StorageType(NamedTuple):
    """A storage class by the dtype of its elements; ``""`` for the untyped one."""

    dtype: str


class MalformedError(Exception):
    """The pickle is no program this machine knows; becomes a DamagedError with the place."""


def _is_shape(value: object) -> bool:
    if type(value) is not tuple:
        return False
    return all([type(v) is int and 0 <= v < 1 << 62 for v in value])


def _tensor(storage: object, offset: object, shape: object, stride: object, dtype: str) -> TensorRef:
    if not isinstance(storage, StorageRef) or type(offset) is not int or not 0 <= offset < 1 << 62:
        raise MalformedError("a tensor without storage")
    if not (_is_shape(shape) and _is_shape(stride)):
        raise MalformedError("a tensor without shape")
    if len(shape) != len(stride) or len(shape) > 64:  # type: ignore[arg-type]
        raise MalformedError("a tensor whose shape and stride differ in length")
    return TensorRef(storage, dtype, offset, shape, stride)  # type: ignore[arg-type]


def _rebuild_v2(args: tuple[Any, ...]) -> object:
    # A seventh argument is metadata (conjugate or negative bit): values are not what the bytes say.
    if len(args) == 7 and args[6]:
        return OPAQUE
    storage, offset, shape, stride = args[:4]
    return _tensor(storage, offset, shape, stride, getattr(storage, "dtype", ""))


def _rebuild_v3(args: tuple[Any, ...]) -> object:
    if len(args) == 8 and args[7]:
        return OPAQUE
    if not isinstance(args[6], DTypeRef):
        raise MalformedError("a tensor without dtype")
    return _tensor(args[0], args[1], args[2], args[3], args[6].name)


def _first(args: tuple[Any, ...]) -> object:
    return args[0]


def _inert(args: tuple[Any, ...]) -> object:
    return OPAQUE


def _make_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    # defaultdict(factory, mapping) and Counter(mapping); OrderedDict(pairs) is older Pythons'.
    source = next((a for a in args if isinstance(a, (dict, list))), {})
    if isinstance(source, dict):
        return dict(source)
    made: dict[Any, Any] = {}
    for pair in source:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise MalformedError("a mapping made of no pairs")
        set_item(made, pair[0], pair[1])
    return made


def _make_sequence(args: tuple[Any, ...]) -> object:
    if args and isinstance(args[0], (list, tuple)):
        return tuple(args[0]) if len(args) == 1 else OPAQUE
    return () if not args else OPAQUE


def _make_bytes(args: tuple[Any, ...]) -> object:
    # Protocol 2 writes bytes as _codecs.encode(text, "latin1").
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return args[0] if args and isinstance(args[0], (bytes, bytearray)) else b""


_STORAGE_DTYPES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "",
}

_DTYPES: Final = (
    *("float64", "double", "float32", "float", "float16", "half", "bfloat16", "complex64", "cfloat"),
    *("complex128", "cdouble", "complex32", "int64", "long", "int32", "int", "int16", "short", "int8"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2"),
    *("quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)

_DTYPE_SYNONYMS = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
}

_INERT_NAMES: Final = {
    "torch": """device Tensor Generator strided sparse_coo sparse_csr per_tensor_affine per_channel_affine
        contiguous_format preserve_format channels_last channels_last_3d""",
    "torch.nn.parameter": "Parameter Buffer",
    "torch._utils": """_rebuild_sparse_tensor _rebuild_qtensor _rebuild_meta_tensor_no_storage
        _rebuild_device_tensor_from_numpy""",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.dtypes": """Float16DType Float32DType Float64DType Int32DType Int64DType UInt32DType UInt64DType
        BoolDType""",
    "builtins": "complex slice range bool int float str",
    "__builtin__": "complex slice xrange bool int long float str unicode",
}


def _allowlist() -> dict[tuple[str, str], Global]:
    table = {
        ("torch._utils", "_rebuild_tensor_v2"): Global(_rebuild_v2),
        ("torch._utils", "_rebuild_tensor_v3"): Global(_rebuild_v3),
        ("torch._utils", "_rebuild_parameter"): Global(_first),
        ("torch._utils", "_rebuild_parameter_with_state"): Global(_first),
        ("torch", "Size"): Global(_make_sequence),
        ("_codecs", "encode"): Global(_make_bytes),
    }
    for module in ("builtins", "__builtin__"):
        for name in ("list", "tuple", "set", "frozenset"):
            table[module, name] = Global(_make_sequence)
        table[module, "dict"] = Global(_make_dict)
        for name in ("bytes", "bytearray"):
            table[module, name] = Global(_make_bytes)
    for name in ("OrderedDict", "defaultdict", "Counter"):
        table["collections", name] = Global(_make_dict)
    for name, dtype in _STORAGE_DTYPES.items():
        table["torch", name] = table["torch.storage", name] = Global(_inert, StorageType(dtype))
    for name in _DTYPES:
        table["torch", name] = Global(_inert, DTypeRef(_DTYPE_SYNONYMS.get(name, name)))
    for module, inert in _INERT_NAMES.items():
        for name in inert.split():
            table[module, name] = Global(_inert)
    return table


ALLOWED: Final = _allowlist()
NOTHING: Final = Global(_inert)


class OddKey:
    """A key of a mapping that stands for one whose own hash its maker may have chosen.

    Compared by its text, which Python hashes with a secret of the process.
    """

    __slots__ = ("shown", "text")

    def __init__(self, text: str, shown: str) -> None:
        self.text, self.shown = text, shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OddKey) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.shown


def set_item(target: dict[Any, Any], key: object, value: object) -> None:
    """Set an item whose key is text or a number that a training would use; others are replaced.

    The hash of a number is known to whoever writes the pickle: with numbers that collide, every item
    takes as long as all before it together. Hashing a deep tuple takes for ever, or overflows the C stack.
    """
    if isinstance(key, (str, bytes, bool)) or key is None:
        target[key] = value
    elif isinstance(key, int):
        # Nearly dense, as the numbers of parameters are; others while they are few, as ids are.
        few = len(target) < _FEW_KEYS and abs(key) < _HASH_MODULUS
        if few or 0 <= key < 8 * len(target):
            target[key] = value
        else:
            odd = OddKey(f"int {key:x}", clipped(f"0x{key:x}") if key.bit_length() > 64 else str(key))
            target[odd] = value
    elif isinstance(key, float):
        target[OddKey(f"float {key.hex()}", str(key))] = value
    elif type(key) is tuple and len(key) <= 8 and all(isinstance(k, str) for k in key):
        target[key] = value
    elif type(key) is tuple and len(key) <= 8 and all(isinstance(k, _SMALL_TYPES) for k in key):
        text = ", ".join(f"{k:x}" if type(k) is int else repr(k) for k in key)
        target[OddKey(f"tuple {text}", clipped(f"({text})"))] = value
    else:
        # Another object at each opcode: their places in memory are no one's choice.
        target[OddKey(f"object {id(key)}", "object")] = value
