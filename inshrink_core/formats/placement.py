"""Where tensors lie in a file, and the regions they make.

A tensor is given as a byte offset, a shape and strides. Tensors that lie at the same place in the same
way are one tensor under several names; tensors that share only some bytes become one region together
and must survive exactly, since a change to one would change the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    MODEL_ROLES,
    LayerType,
    Member,
    Region,
    TensorRole,
    TensorSpec,
    ZipEntry,
    classify_layer,
)
from inshrink_core.errors import DamagedError, clipped
from inshrink_core.formats.pickles.names import TensorRef

__all__ = ["Named", "Placed", "PlacedFile", "contiguous_stride", "place", "place_in_regions"]


_MAX_EXTENT = 1 << 62
"""Extents of an empty tensor, 0 taken as 1: PyTorch's strides are such products, in 64 bits."""

_SUFFIXES = {role: "" if role in MODEL_ROLES else f"@{role.value}" for role in TensorRole}


class Placed(NamedTuple):
    """A tensor's place in a file: first byte, extent in bytes, element strides (None: contiguous)."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    span: int


class Named(NamedTuple):
    """A placed tensor and what it is called."""

    name: str
    role: TensorRole
    placed: Placed

    @property
    def key(self) -> str:
        """The key its spec will have."""
        return self.name + _SUFFIXES[self.role]


class PlacedFile(NamedTuple):
    """Regions of one file, the specs that stand in them, and further names of those."""

    regions: tuple[Region, ...]
    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    stride, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        stride[i] = step
        step *= max(shape[i], 1)
    return tuple(stride)


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] != 1:
            if stride[i] != step:
                return False
            step *= shape[i]
    return True


def place(ref: TensorRef, entry: ZipEntry, where: str) -> Placed | None:
    """Return where a tensor of a torch file lies, or None where it is carried unread (quantized, expanded).

    Raises
    ------
    DamagedError
        The tensor reaches past its storage.
    """
    itemsize = DTYPE_SIZES.get(ref.dtype)
    if itemsize is None:
        return None
    shape, stride = ref.shape, ref.stride
    numel, extent, reach = 1, 1, 1
    for size, step in zip(shape, stride, strict=True):
        numel *= size
        reach *= max(size, 1)
        extent += (size - 1) * step
    if numel == 0:
        if reach > _MAX_EXTENT:
            raise DamagedError(f"an empty tensor of shape {clipped(str(shape))}", where=where)
        return Placed(ref.dtype, shape, None, entry.data_offset, 0)
    if (ref.offset + extent) * itemsize > entry.data_nbytes:
        raise DamagedError(
            f"a tensor of shape {clipped(str(shape))} reaches past its storage '{ref.storage.key[:40]}'",
            where=where,
            expected=f"at most {entry.data_nbytes} bytes",
        )
    # An expanded tensor shows one element many times. Far more often than there are bytes, it is a
    # trap for memory or a constant: either way it is better carried than read.
    if numel > max(extent, 1 << 16) * 64:
        return None
    return Placed(
        ref.dtype,
        shape,
        None if _is_contiguous(shape, stride) else stride,
        entry.data_offset + ref.offset * itemsize,
        extent * itemsize,
    )


def _shows_a_byte_twice(placed: Placed) -> bool:
    """Tell whether two elements of a strided tensor may be the same bytes."""
    if placed.stride is None:
        return False
    reach = 1
    for step, size in sorted(zip(placed.stride, placed.shape, strict=True)):
        if size == 1:
            continue
        if step < reach:
            return True
        reach = step * size
    return False


@functools.lru_cache(maxsize=1 << 16)
def _layer(name: str, shape: tuple[int, ...]) -> LayerType:
    # The names of a run are the same at every step; classifying them again is most of opening it.
    return classify_layer(name, shape)


@functools.lru_cache(maxsize=1 << 16)
def _spec(
    name: str, role: TensorRole, dtype: str, shape: tuple[int, ...], exact: bool, layer: LayerType
) -> TensorSpec:
    # Specs hold no values: the checkpoints of a run share theirs, which saves time and most of the memory.
    return TensorSpec(name=name, role=role, dtype=dtype, shape=shape, exact=exact, layer=layer)


def _merge(ordered: Sequence[tuple[str, Placed]]) -> tuple[list[Region], set[str]]:
    """Return the regions of tensors in offset order, and the keys that share bytes with another."""
    regions: list[Region] = []
    shared: set[str] = set()
    group: list[tuple[str, Placed]] = []
    end = -1
    for key, placed in [*ordered, ("", Placed("", (), None, 1 << 63, 1))]:
        if group and placed.offset >= end:
            start = group[0][1].offset
            members = tuple([Member(k, p.offset - start, p.stride) for k, p in group])
            regions.append(Region(start, end - start, members))
            if len(group) > 1:
                shared.update(member.key for member in members)
            group = []
            end = -1
        group.append((key, placed))
        end = max(end, placed.offset + placed.span)
    return regions, shared


def place_in_regions(tensors: Iterable[Named]) -> PlacedFile:
    """Return regions, specs and aliases of the tensors of one file.

    Parameters
    ----------
    tensors
        In the order their specs shall have; keys are distinct.

    Notes
    -----
    O(n log n) in the number of tensors. A tensor tied to an embedding is an embedding, whichever of
    the two names comes first.
    """
    first_at: dict[Placed, str] = {}
    kept: dict[str, Named] = {}
    aliases: dict[str, str] = {}
    layers: dict[str, LayerType] = {}
    for tensor in tensors:
        key, placed = tensor.key, tensor.placed
        owner = first_at.setdefault(placed, key) if placed.span else key
        if owner != key:
            aliases[key] = owner
            if _layer(tensor.name, placed.shape) is LayerType.EMBEDDING:
                layers[owner] = LayerType.EMBEDDING
        else:
            kept[key] = tensor
    # Empty tensors too, as regions of no bytes: whoever asks which tensors a file holds finds them.
    ordered = sorted(((k, t.placed) for k, t in kept.items()), key=lambda kp: (kp[1].offset, kp[1].span))
    regions, shared = _merge(ordered)
    specs = tuple(
        _spec(
            t.name,
            t.role,
            t.placed.dtype,
            t.placed.shape,
            key in shared or _shows_a_byte_twice(t.placed),
            layers.get(key) or _layer(t.name, t.placed.shape),
        )
        for key, t in kept.items()
    )
    return PlacedFile(tuple(regions), specs, aliases)
