"""Meta of frames and attributes of tensors, which are validated when a frame is opened."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from inshrink_core.archive.layout import converted, damaged, newer
from inshrink_core.chain.attachments import DROPPED
from inshrink_core.chain.base import BASE
from inshrink_core.chain.parts import cell_spec
from inshrink_core.checkpoint import DTYPE_SIZES, MODEL_ROLES, Box, LayerType, TensorRole, TensorSpec
from inshrink_core.codec import decoding_memory
from inshrink_core.errors import DamagedError
from inshrink_core.frame import BlockEntry

ORIGINALS: Final = "originals"
"""Meta key: checksums that verified the frame's original files, and bytes that failed them."""

QUALITY: Final = "quality"
"""Meta key: the restore cost of the frame, how it is known (``measured``, ``predicted`` or ``exact``), and
the quality bounds."""

WRITTEN: Final = "written"
"""Meta key: the step at which each tensor was last written, by name, for tensors left unchanged since."""

NAME: Final = "name"
"""Meta key: name of a checkpoint that is not a step, such as ``best``."""

FOLDER: Final = "folder"
"""Meta key: name of the checkpoint's directory, unless it is ``checkpoint-STEP``."""

METRICS: Final = "metrics"
"""Meta key: the training metrics at the step, by name."""


MODELS: Final = "models"
"""Meta key: names of the models beside the main one; the names of their tensors start with these."""


class _Quality(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `QUALITY`."""

    how: str = ""
    why: str = ""
    bounds: dict[str, float] = {}
    drop: float = 0.0
    divergence: float = 0.0
    restore_cost: float = 0.0
    peak_learning_rate: float = 0.0
    coarseness: float = 0.0


class _Base(msgspec.Struct):
    """The fields of `BASE`."""

    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    tensors: bytes
    name: str
    path: str | None = None
    step: int | None = None


class _Originals(msgspec.Struct):
    """The fields of `ORIGINALS`."""

    checked: list[str] = []
    unchecked: list[str] = []
    damaged: list[tuple[str, str, int, int]] = []


_Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

_KINDS: Final[Mapping[str, Any]] = {
    "codec": str,
    "config": dict,
    "overrides": list[dict[str, Any]],
    "optimizer": str,
    NAME: str,
    "content": _Id,
    QUALITY: _Quality,
    WRITTEN: dict[str, int],
    DROPPED: tuple[_Id, list[list[str]]],
    FOLDER: str,
    METRICS: dict[str, float],
    MODELS: list[str],
    "restored": _Id,
    "rekeyed": _Id,
    BASE: _Base,
    ORIGINALS: _Originals,
    "source": tuple[_Id, _Id],
}
"""Types of the known keys (docs/format.md); other keys may have any value."""


def check_meta(meta: Mapping[str, Any], where: str) -> None:
    """Validate a frame's meta.

    Raises
    ------
    DamagedError
        A value does not have the type that the format requires.
    """
    for key, kind in _KINDS.items():
        try:
            if key in meta:
                converted(meta[key], kind)
        except msgspec.ValidationError as error:
            what = f"the frame's meta '{key}' is malformed"
            raise damaged(what, where, found=repr(meta[key])[:80]) from error


_MAX_DIMENSIONS = 64
_MAX_TENSOR_NBYTES = (1 << 63) - 1
"""Largest size that PyTorch supports."""


_N_ATTRIBUTES = 6
"""Attributes of a cell; a whole tensor has one less."""


@functools.lru_cache(maxsize=1 << 15)
def pack_attributes(spec: TensorSpec) -> tuple[Any, ...]:
    """Return the attributes of a tensor's block entry: role, dtype, shape, exact, layer type.

    A cell has a sixth attribute: the shape of its tensor, and the cell's offsets in it.
    """
    layer = spec.layer.value if spec.layer else None
    row = (spec.role.value, spec.dtype, tuple(spec.shape), spec.exact, layer)
    return row if spec.cell is None else (*row, (tuple(spec.cell.shape), tuple(spec.cell.offsets)))


def spec_of(entry: BlockEntry, where: str = "") -> TensorSpec:
    """Return the spec of a tensor's block.

    Raises
    ------
    DamagedError
        The attributes do not describe a tensor.
    IncompatibleError
        The entry has more attributes than this version knows.
    """
    if len(entry.attributes) > _N_ATTRIBUTES:
        raise newer(where, "six attributes of a tensor", f"{len(entry.attributes)} of '{entry.key}'")
    try:
        return _spec_of(entry.key, entry.attributes)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"the entry of tensor '{entry.key}' is damaged ({error})", where=where) from error


@functools.lru_cache(maxsize=1 << 15)
def _spec_of(key: str, attributes: tuple[Any, ...]) -> TensorSpec:
    """Parse attributes, cached because most frames share them."""
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
        raise ValueError(f"{role_value} does not match the name")
    return spec


def _is_shape(shape: Sequence[Any], itemsize: int) -> bool:
    return (
        len(shape) <= _MAX_DIMENSIONS
        and all(type(n) is int and n >= 0 for n in shape)
        and math.prod(max(n, 1) for n in shape) * itemsize <= _MAX_TENSOR_NBYTES
    )


def _is_cell(cell: Any, shape: Sequence[int], itemsize: int) -> bool:
    """Whether a tensor's shape and the offsets are valid for a cell of the given shape."""
    full_shape, offsets = cell
    return (
        len(full_shape) == len(offsets) == len(shape) > 0
        and _is_shape(full_shape, itemsize)
        and _is_shape(offsets, 0)
        and all(at + n <= end for at, n, end in zip(offsets, shape, full_shape, strict=True))
    )


def decoding_nbytes(spec: TensorSpec, entry: BlockEntry) -> int:
    """Return the approximate memory for decoding a block, including its payload, in bytes."""
    return entry.nbytes + decoding_memory(entry.codec) * spec.nbytes
