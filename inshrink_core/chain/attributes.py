"""What a tensor's block says of the tensor, and about how much memory it takes to decode."""

from __future__ import annotations

import math
from typing import Any

from inshrink_core.checkpoint import DTYPE_SIZES, MODEL_ROLES, LayerType, TensorRole, TensorSpec
from inshrink_core.errors import DamagedError
from inshrink_core.frame import BlockEntry

__all__ = ["decoding_nbytes", "pack_attributes", "spec_of"]

_MAX_DIMENSIONS = 64
_MAX_TENSOR_NBYTES = (1 << 63) - 1
"""What PyTorch can count."""

_DECODING = {"lossless": 3}
_DECODING_MOST = 7
"""Peak memory of decoding one tensor over its bytes: values, state and what decoding needs on the way.
Measured over every codec with tensors of 64 MB: 2.0 to 2.9 for lossless/1, 2.5 to 6.8 for the others."""


def pack_attributes(spec: TensorSpec) -> tuple[Any, ...]:
    """Return what a tensor's block entry carries of its spec: role, dtype, shape, exact, layer type."""
    layer = spec.layer.value if spec.layer else None
    return (spec.role.value, spec.dtype, list(spec.shape), spec.exact, layer)


def spec_of(entry: BlockEntry, where: str = "") -> TensorSpec:
    """Return the spec of a tensor's block.

    Raises
    ------
    DamagedError
        The attributes are not those of a tensor.
    """
    try:
        role_value, dtype, shape, exact, layer = entry.attributes
        role = TensorRole(role_value)
        spec = TensorSpec(
            name=entry.key if role in MODEL_ROLES else entry.key.removesuffix(f"@{role.value}"),
            role=role,
            dtype=dtype,
            shape=tuple(shape),
            exact=bool(exact),
            layer=LayerType(layer) if layer else None,
        )
        valid = (
            dtype in DTYPE_SIZES
            and spec.key == entry.key
            and len(shape) <= _MAX_DIMENSIONS
            and all(type(n) is int and n >= 0 for n in shape)
            and math.prod(max(n, 1) for n in shape) * DTYPE_SIZES[dtype] <= _MAX_TENSOR_NBYTES
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"the entry of tensor '{entry.key}' is damaged ({error})", where=where) from error
    if not valid:
        raise DamagedError(f"the entry of tensor '{entry.key}' is damaged", where=where)
    return spec


def decoding_nbytes(spec: TensorSpec, entry: BlockEntry) -> int:
    """Return about how much memory decoding a block takes, its payload included."""
    factor = _DECODING.get(entry.codec.partition("/")[0], _DECODING_MOST)
    return entry.nbytes + factor * spec.nbytes
