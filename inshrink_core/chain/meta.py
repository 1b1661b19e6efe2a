"""What a frame says of itself and of each tensor beside the blocks: checked once, when it is opened."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from inshrink_core.archive.layout import damaged, newer
from inshrink_core.chain.attachments import DROPPED
from inshrink_core.chain.base import BASE, is_base_record
from inshrink_core.chain.parts import cell_spec
from inshrink_core.checkpoint import DTYPE_SIZES, MODEL_ROLES, Box, LayerType, TensorRole, TensorSpec
from inshrink_core.codec import decoding_memory
from inshrink_core.errors import DamagedError
from inshrink_core.frame import BlockEntry

ORIGINALS: Final = "originals"
"""Key of meta: which checksums vouched for the files of a frame, and what was damaged and stored so."""

QUALITY: Final = "quality"
"""Key of meta: what a restore of the frame costs by some figures, how that is known (``measured``,
``predicted`` or ``exact``), and what was promised."""

WRITTEN: Final = "written"
"""Key of meta: by a tensor's name, the step it was last written at, where that is before the frame's own."""

NAME: Final = "name"
"""Key of meta: the name of a checkpoint that is no step, such as ``best``."""

FOLDER: Final = "folder"
"""Key of meta: the name of the directory that the checkpoint was, unless that is ``checkpoint-STEP``."""

METRICS: Final = "metrics"
"""Key of meta: what the training measured at the step, by name."""


MODELS: Final = "models"
"""Key of meta: names of the models beside the main one, with which the names of their tensors begin."""


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == 16


def _is_list_of(value: Any, is_sound: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_sound, value))


def _is_dropped(value: Any) -> bool:
    """Whether a value is an id, and lists of keys."""
    pair = isinstance(value, list) and len(value) == 2 and _is_id(value[0])
    return pair and _is_list_of(value[1], lambda keys: _is_list_of(keys, lambda key: type(key) is str))


def _is_quality(value: Any) -> bool:
    """Whether a value holds words and numbers where they belong."""
    if not isinstance(value, dict) or not isinstance(bounds := value.get("bounds", {}), dict):
        return False
    words = all(isinstance(value.get(name, ""), str) for name in ("how", "why"))
    numbers = [item for name, item in value.items() if name not in ("how", "why", "bounds")]
    return words and all(isinstance(item, float) for item in [*numbers, *bounds.values()])


_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "codec": lambda value: isinstance(value, str),
    "config": lambda value: isinstance(value, dict),
    "overrides": lambda value: _is_list_of(value, lambda item: isinstance(item, dict)),
    "optimizer": lambda value: isinstance(value, str),
    NAME: lambda value: isinstance(value, str),
    "content": _is_id,
    QUALITY: lambda value: _is_quality(value),
    WRITTEN: lambda value: isinstance(value, dict) and all(type(step) is int for step in value.values()),
    DROPPED: lambda value: _is_dropped(value),
    FOLDER: lambda value: isinstance(value, str),
    METRICS: lambda value: isinstance(value, dict) and all(type(x) is float for x in value.values()),
    MODELS: lambda value: _is_list_of(value, lambda name: isinstance(name, str)),
    "restored": _is_id,
    "rekeyed": _is_id,
    BASE: is_base_record,
    "source": lambda value: _is_list_of(value, _is_id) and len(value) == 2,
}
"""The keys that are read (docs/format.md); others may hold anything."""


def check_meta(meta: Mapping[str, Any], where: str) -> None:
    """Refuse a frame whose meta holds what its keys cannot mean.

    Raises
    ------
    DamagedError
        A value is of another type than the format says.
    """
    for key, is_sound in _KINDS.items():
        if key in meta and not is_sound(meta[key]):
            raise damaged(f"the frame's meta '{key}' is malformed", where, found=repr(meta[key])[:80])


_MAX_DIMENSIONS = 64
_MAX_TENSOR_NBYTES = (1 << 63) - 1
"""What PyTorch can count."""


_N_ATTRIBUTES = 6
"""Of a cell; a tensor that is whole has one less."""


def pack_attributes(spec: TensorSpec) -> tuple[Any, ...]:
    """Return what a tensor's block entry carries of its spec: role, dtype, shape, exact, layer type.

    A cell has another: the shape of its tensor, and where it begins in it.
    """
    layer = spec.layer.value if spec.layer else None
    row = (spec.role.value, spec.dtype, list(spec.shape), spec.exact, layer)
    return row if spec.cell is None else (*row, [list(spec.cell.shape), list(spec.cell.offsets)])


def spec_of(entry: BlockEntry, where: str = "") -> TensorSpec:
    """Return the spec of a tensor's block.

    Raises
    ------
    DamagedError
        The attributes are not those of a tensor.
    IncompatibleError
        There are more of them than are known here.
    """
    if len(entry.attributes) > _N_ATTRIBUTES:
        raise newer(where, "six attributes of a tensor", f"{len(entry.attributes)} of '{entry.key}'")
    try:
        return _spec_of(entry.key, entry.attributes)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"the entry of tensor '{entry.key}' is damaged ({error})", where=where) from error


@functools.lru_cache(maxsize=1 << 15)
def _spec_of(key: str, attributes: tuple[Any, ...]) -> TensorSpec:
    """Read attributes once for all the frames that have them."""
    role_value, dtype, shape, exact, layer, *cell = attributes
    role = TensorRole(role_value)
    is_tensor = (
        dtype in DTYPE_SIZES
        and _is_shape(shape, DTYPE_SIZES[dtype])
        and all(_is_cell(row, shape, DTYPE_SIZES[dtype]) for row in cell)
    )
    if not is_tensor:
        raise ValueError(f"{dtype} {shape} is no tensor")
    name = key if role in MODEL_ROLES else key.removesuffix(f"@{role.value}")
    spec = TensorSpec(
        name=name.rpartition("[")[0] if cell else name,
        role=role,
        dtype=dtype,
        shape=cell[0][0] if cell else tuple(shape),
        exact=bool(exact),
        layer=LayerType(layer) if layer else None,
    )
    if cell:
        spec = cell_spec(spec, Box(cell[0][1], tuple(shape)))
    if spec.key != key:
        raise ValueError(f"{role_value} is not what the name says")
    return spec


def _is_shape(shape: Sequence[Any], itemsize: int) -> bool:
    return (
        len(shape) <= _MAX_DIMENSIONS
        and all(type(n) is int and n >= 0 for n in shape)
        and math.prod(max(n, 1) for n in shape) * itemsize <= _MAX_TENSOR_NBYTES
    )


def _is_cell(cell: Any, shape: Sequence[int], itemsize: int) -> bool:
    """Whether the shape of a tensor and an offset are those of a cell of some shape."""
    full_shape, offsets = cell
    return (
        len(full_shape) == len(offsets) == len(shape) > 0
        and _is_shape(full_shape, itemsize)
        and _is_shape(offsets, 0)
        and all(at + n <= end for at, n, end in zip(offsets, shape, full_shape, strict=True))
    )


def decoding_nbytes(spec: TensorSpec, entry: BlockEntry) -> int:
    """Return about how much memory decoding a block takes, its payload included."""
    return entry.nbytes + decoding_memory(entry.codec) * spec.nbytes
