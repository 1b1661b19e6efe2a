"""What restoring takes, in memory and on disk, told from headers before anything is decoded."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.chain.parts import LAYOUT_KEY, LAYOUT_MEMORY
from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    MODEL_ROLES,
    Checkpoint,
    FileLayout,
    LayerType,
    TensorRole,
    TensorSpec,
)
from inshrink_core.codec import decoding_memory
from inshrink_core.errors import DamagedError, TooLargeError
from inshrink_core.formats.write import restorable_layout, written_nbytes
from inshrink_core.frame import BlockEntry, FrameInfo

if TYPE_CHECKING:
    from inshrink_core.chain.archive import Archive

__all__ = ["StepNeeds", "decoding_nbytes", "pack_attributes", "sequential_within", "spec_of", "step_needs"]


class StepNeeds(NamedTuple):
    """About how many bytes a step takes.

    `decoding` is the most that one tensor takes on its way, `held` what stays besides until the step is
    done, `state` what a walk over several steps keeps of it for the next, and `disk` its files.
    """

    decoding: int
    held: int
    state: int
    disk: int

    def memory(self, threads: int = 1) -> int:
        """Return what restoring the step alone takes, with tensors decoded on some threads."""
        return self.held + self.decoding * (1 if threads <= 1 else threads + 1)

    @property
    def memory_in_turn(self) -> int:
        """What restoring it as one of several takes, so that each frame is decoded once."""
        return self.memory() + self.state


def step_needs(
    archive: Archive, info: FrameInfo, checkpoint: Checkpoint | None = None, layout: str | None = None
) -> StepNeeds:
    """Return what a step takes; reads its index and its layout.

    Parameters
    ----------
    archive, info
        The step.
    checkpoint
        The same, where it is open already.
    layout
        As what it is written (`inshrink_core.formats.write_checkpoint`); by default as it was, where it can
        be.

    Raises
    ------
    DamagedError, MissingFrameError
        They cannot be read.
    """
    if checkpoint is None:
        checkpoint = archive.checkpoint(info)
    entries = [entry for entry in archive.frame(info).entries if not entry.part]
    skeletons = sum(_skeleton_nbytes(checkpoint, file) for file in checkpoint.files)
    regions = (region for file in checkpoint.files for region in file.regions)
    mixed = [
        2 * r.nbytes + max((checkpoint.spec(m.key).nbytes for m in r.members if m.box is not None), default=0)
        for r in regions
        if len(r.members) != 1 or r.members[0].stride is not None or r.members[0].box is not None
    ]
    described = LAYOUT_MEMORY * len(archive.part(info, LAYOUT_KEY))
    written_as = layout or restorable_layout(checkpoint)
    # PyTorch's writer wants all tensors at once.
    whole = checkpoint.raw_bytes() if written_as == "torch" else 0
    return StepNeeds(
        decoding=max(map(decoding_nbytes, checkpoint.specs, entries), default=0),
        held=skeletons + described + whole + max(mixed, default=0),
        state=2 * checkpoint.raw_bytes(),
        disk=written_nbytes(checkpoint, written_as),
    )


def _skeleton_nbytes(checkpoint: Checkpoint, file: FileLayout) -> int:
    """Return the most bytes that the skeleton of a file can have: all that no tensor fills."""
    filled = sum(
        min(region.nbytes, sum(m.nbytes_in(checkpoint.spec(m.key)) for m in region.members))
        for region in file.regions
    )
    return file.nbytes - filled


def sequential_within(archive: Archive, needs: Iterable[StepNeeds]) -> Archive:
    """Return a view that decodes each frame once, if what it keeps between steps fits the limits.

    Raises
    ------
    TooLargeError
        Not even a single step fits.
    """
    rows = tuple(needs)
    where = archive.reader.path
    try:
        most = max((row.memory_in_turn for row in rows), default=0)
        archive.limits.require_memory(most, "decoding each frame once", where)
    except TooLargeError:
        most = max((row.memory() for row in rows), default=0)
        archive.limits.require_memory(most, "decoding a step", where)
        return archive
    return archive.sequential()


_MAX_DIMENSIONS = 64
_MAX_TENSOR_NBYTES = (1 << 63) - 1
"""What PyTorch can count."""


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
        return _spec_of(entry.key, entry.attributes)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"the entry of tensor '{entry.key}' is damaged ({error})", where=where) from error


@functools.lru_cache(maxsize=1 << 15)
def _spec_of(key: str, attributes: tuple[Any, ...]) -> TensorSpec:
    """Read attributes once for all the frames that have them."""
    role_value, dtype, shape, exact, layer = attributes
    role = TensorRole(role_value)
    spec = TensorSpec(
        name=key if role in MODEL_ROLES else key.removesuffix(f"@{role.value}"),
        role=role,
        dtype=dtype,
        shape=tuple(shape),
        exact=bool(exact),
        layer=LayerType(layer) if layer else None,
    )
    if not (
        dtype in DTYPE_SIZES
        and spec.key == key
        and len(shape) <= _MAX_DIMENSIONS
        and all(type(n) is int and n >= 0 for n in shape)
        and math.prod(max(n, 1) for n in shape) * DTYPE_SIZES[dtype] <= _MAX_TENSOR_NBYTES
    ):
        raise ValueError(f"{dtype} {shape} is no tensor")
    return spec


def decoding_nbytes(spec: TensorSpec, entry: BlockEntry) -> int:
    """Return about how much memory decoding a block takes, its payload included."""
    return entry.nbytes + decoding_memory(entry.codec) * spec.nbytes
