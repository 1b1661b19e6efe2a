"""Put tensors back into the skeleton of a file, in one pass, checksums anew."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Final

from isal.isal_zlib import crc32

from inshrink_core.checkpoint import Checkpoint, FileLayout, Region, TensorSpec
from inshrink_core.errors import DamagedError
from inshrink_core.execution import Limits
from inshrink_core.formats.source import bytes_between, hole_mask

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DEFAULT_LIMITS", "tensor_bytes", "write_layout"]

DEFAULT_LIMITS: Final = Limits()
"""What is available."""

_MAX_STRIDES: Final = 63
"""Of 64 dimensions that numpy knows, one counts the bytes of an element."""


def tensor_bytes(tensor: Tensor, spec: TensorSpec) -> memoryview:
    """Return the bytes of a tensor in row-major order, checked against its spec.

    Raises
    ------
    DamagedError
        The source gave a tensor of another dtype or shape than it promised.
    """
    import torch

    if str(tensor.dtype) != f"torch.{spec.dtype}" or tuple(tensor.shape) != spec.shape:
        raise DamagedError(
            f"tensor '{spec.key}' is not what its description says",
            expected=f"{spec.dtype} {spec.shape}",
            found=f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}",
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


class _Writer:
    """Writes a file front to back and keeps the CRC-32 of each zip entry on the way."""

    def __init__(self, file: IO[bytes], layout: FileLayout) -> None:
        self.file, self.at = file, 0
        self.entries = sorted(layout.zip_entries)
        self.crcs = [0] * len(self.entries)
        self.next_entry = 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        start, end = self.at, self.at + len(data)
        self.at = end
        view = memoryview(data)
        while self.next_entry < len(self.entries):
            entry = self.entries[self.next_entry]
            first, last = max(entry.data_offset, start), min(entry.data_offset + entry.data_nbytes, end)
            if first < last:
                self.crcs[self.next_entry] = crc32(
                    view[first - start : last - start], self.crcs[self.next_entry]
                )
            if entry.data_offset + entry.data_nbytes > end:
                break
            self.next_entry += 1

    def patch_checksums(self) -> None:
        for entry, crc in zip(self.entries, self.crcs, strict=True):
            for offset in entry.crc_offsets:
                self.file.seek(offset)
                self.file.write(crc.to_bytes(4, "little"))


def _check_layout(layout: FileLayout, checkpoint: Checkpoint, n_skeleton: int) -> None:
    """Refuse a layout, which may come from an archive, that contradicts itself.

    A region can hold no more bytes than its tensors and the holes of which the skeleton has the bytes: what
    is allocated for it is bounded by what is really there.
    """
    end = 0
    n_holes = n_skeleton - sum(nbytes for _, nbytes in bytes_between(layout))
    if n_holes < 0:
        raise DamagedError(
            f"the skeleton of '{layout.path}' is too short",
            where=checkpoint.origin,
            expected=f"{n_skeleton - n_holes} bytes",
            found=f"{n_skeleton}",
        )
    for region in layout.regions:
        if region.offset < end or region.nbytes < 0:
            raise DamagedError(f"the layout of '{layout.path}' has overlapping regions")
        end = region.offset + region.nbytes
        held = sum(checkpoint.spec(member.key).nbytes for member in region.members)
        if region.nbytes > held + n_holes:
            raise DamagedError(
                f"a region of '{layout.path}' is larger than what lies in it",
                where=checkpoint.origin,
                expected=f"at most {held + n_holes} bytes",
                found=f"{region.nbytes}",
            )
        for member in region.members:
            spec = checkpoint.spec(member.key)
            stride = member.stride
            if stride is not None and (
                not len(stride) == len(spec.shape) <= _MAX_STRIDES or any(s < 0 for s in stride)
            ):
                raise DamagedError(f"the layout of '{layout.path}' gives '{member.key}' wrong strides")
            span = spec.nbytes
            if stride is not None and spec.numel:
                itemsize = spec.nbytes // spec.numel
                span = (1 + sum((n - 1) * s for n, s in zip(spec.shape, stride, strict=True))) * itemsize
            if member.start < 0 or member.start + span > region.nbytes:
                raise DamagedError(f"the layout of '{layout.path}' puts '{member.key}' outside its region")
    crc_ends = [at + 4 for entry in layout.zip_entries for at in entry.crc_offsets]
    entry_ends = [entry.data_offset + entry.data_nbytes for entry in layout.zip_entries]
    if max([end, *crc_ends, *entry_ends]) > layout.nbytes:
        raise DamagedError(f"the layout of '{layout.path}' reaches past the file's end")
    _check_entries(layout)


def _check_entries(layout: FileLayout) -> None:
    """Refuse checksums of spans that overlap, and checksums that would be written over tensors."""
    entries = sorted(layout.zip_entries)
    for entry, following in itertools.pairwise(entries):
        if entry.data_offset + entry.data_nbytes > following.data_offset:
            raise DamagedError(f"the layout of '{layout.path}' has overlapping zip entries")
    starts = [region.offset for region in layout.regions]
    for at in (at for entry in entries for at in entry.crc_offsets):
        place = bisect.bisect_left(starts, at + 4) - 1
        if place >= 0 and layout.regions[place].offset + layout.regions[place].nbytes > at:
            raise DamagedError(f"the layout of '{layout.path}' has a checksum within a tensor")


def _is_one_tensor(region: Region) -> bool:
    """Whether a region is one contiguous tensor, which is written as it is decoded."""
    return len(region.members) == 1 and region.members[0].stride is None


def _region_bytes(checkpoint: Checkpoint, region: Region, holes: memoryview) -> tuple[memoryview, int]:
    """Return the bytes of a region, and how many of `holes` went into it."""
    specs = {member.key: checkpoint.spec(member.key) for member in region.members}
    if _is_one_tensor(region):
        spec = specs[region.members[0].key]
        data = tensor_bytes(checkpoint.source.read(spec), spec)
        if len(data) == region.nbytes:
            return data, 0
    import numpy as np

    buffer = np.zeros(region.nbytes, dtype=np.uint8)
    mask = hole_mask(region, {key: (spec.dtype, spec.shape) for key, spec in specs.items()})
    n_holes = 0
    if mask is not None:
        n_holes = int(np.count_nonzero(mask))
        if n_holes > len(holes):
            raise DamagedError("the skeleton is shorter than its layout says")
        buffer[mask] = np.frombuffer(holes[:n_holes], dtype=np.uint8)
    for member in region.members:
        spec = specs[member.key]
        data = tensor_bytes(checkpoint.source.read(spec), spec)
        if member.stride is None:
            buffer[member.start : member.start + spec.nbytes] = np.frombuffer(data, dtype=np.uint8)
        elif spec.numel:
            itemsize = spec.nbytes // spec.numel
            strides = (*(s * itemsize for s in member.stride), 1)
            view = np.lib.stride_tricks.as_strided(buffer[member.start :], (*spec.shape, itemsize), strides)
            view[...] = np.frombuffer(data, dtype=np.uint8).reshape(*spec.shape, itemsize)
    data_of_region: Any = buffer
    return memoryview(data_of_region), n_holes


def write_layout(
    file: IO[bytes],
    checkpoint: Checkpoint,
    layout: FileLayout,
    progress: Callable[[str], None],
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Write one file of a checkpoint as its layout says.

    Parameters
    ----------
    file
        Writable and seekable, empty.
    checkpoint
        Gives tensors and the skeleton.
    layout
        One of its files.
    progress
        Told the key of every tensor written.
    limits
        What a region whose tensors do not lie one after the other may take to put together.

    Raises
    ------
    DamagedError
        Layout, skeleton and tensors contradict each other.
    TooLargeError
        A region is larger than the limits allow.
    """
    skeleton = memoryview(checkpoint.source.skeleton(layout))
    _check_layout(layout, checkpoint, len(skeleton))
    for region in layout.regions:
        if not _is_one_tensor(region):
            what = f"filling a region of '{layout.path}'"
            largest = max((checkpoint.spec(member.key).nbytes for member in region.members), default=0)
            limits.require_memory(2 * region.nbytes + largest, what, checkpoint.origin)
    spans = bytes_between(layout)
    n_between = sum(nbytes for _, nbytes in spans)
    holes, used, at = skeleton[n_between:], 0, 0
    writer = _Writer(file, layout)
    gaps = dict(spans)
    regions = {region.offset: region for region in layout.regions if region.nbytes}
    for offset in sorted([*gaps, *regions]):
        if offset in gaps:
            data = skeleton[at : at + gaps[offset]]
            at += gaps[offset]
        else:
            data, n_holes = _region_bytes(checkpoint, regions[offset], holes[used:])
            used += n_holes
        writer.write(data)
        for member in regions[offset].members if offset in regions else ():
            progress(member.key)
    if used != len(holes) or writer.at != layout.nbytes:
        raise DamagedError(
            f"skeleton and tensors of '{layout.path}' do not make up the file",
            where=checkpoint.origin,
            expected=f"{layout.nbytes} bytes",
            found=f"{writer.at + len(holes) - used}",
        )
    writer.patch_checksums()
