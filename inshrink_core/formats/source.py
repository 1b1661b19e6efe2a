"""Tensor bytes from the files of a run, and the rest of those files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.checkpoint import DTYPE_SIZES, FileLayout, Region, TensorSpec
from inshrink_core.errors import NotFoundError
from inshrink_core.execution import new_buffer
from inshrink_core.formats.disk import ByteCounter, FileStamp, ReadableFile
from inshrink_core.formats.placement import Placed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FileSource", "bytes_between", "hole_mask"]


class FileSource:
    """Reads tensors and skeletons of one checkpoint; no file stays open, any thread may read.

    Parameters
    ----------
    paths, stamps
        Of every file by relative path; a file that changed since is refused.
    places
        Tensor key to file and place.
    counter
        Told of every byte read.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        stamps: Mapping[str, FileStamp],
        places: Mapping[str, tuple[str, Placed]],
        counter: ByteCounter,
    ) -> None:
        self._paths, self._stamps, self._places, self._counter = paths, stamps, places, counter

    def _open(self, name: str) -> ReadableFile:
        return ReadableFile(self._paths[name], self._counter, self._stamps[name])

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor, contiguous, in memory of its own.

        Raises
        ------
        NotFoundError
            The checkpoint has no such tensor.
        DamagedError
            The file was changed or cut off since its header was read.
        """
        import torch

        if spec.key not in self._places:
            raise NotFoundError(f"no tensor '{spec.key}' in these files")
        name, placed = self._places[spec.key]
        dtype = getattr(torch, placed.dtype)
        if not math.prod(placed.shape):
            return torch.empty(placed.shape, dtype=dtype)
        buffer = new_buffer(placed.span)
        with self._open(name) as file:
            file.read_into(placed.offset, buffer)
        if placed.dtype == "bool":
            # Any byte but 0 and 1 in a bool tensor is undefined behaviour in PyTorch.
            flat = torch.frombuffer(buffer, dtype=torch.uint8).ne(0)
        else:
            flat = torch.frombuffer(buffer, dtype=dtype)
        if placed.stride is None:
            return flat.reshape(placed.shape)
        return flat.as_strided(placed.shape, placed.stride).contiguous()

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes outside the regions, CRC fields zeroed, then the holes inside regions."""
        parts: list[bytes] = []
        with self._open(layout.path) as file:
            for offset, nbytes in bytes_between(layout):
                part = bytearray(file.read(offset, nbytes))
                for entry in layout.zip_entries:
                    for at in entry.crc_offsets:
                        if offset <= at < offset + nbytes:
                            part[at - offset : at - offset + 4] = bytes(4)
                parts.append(bytes(part))
            parts += [self._holes(file, region) for region in layout.regions]
        return b"".join(parts)

    def _holes(self, file: ReadableFile, region: Region) -> bytes:
        shapes = {m.key: (self._places[m.key][1].dtype, self._places[m.key][1].shape) for m in region.members}
        mask = hole_mask(region, shapes)
        if mask is None:
            return b""
        import numpy as np

        data = np.frombuffer(file.read(region.offset, region.nbytes), dtype=np.uint8)
        return bytes(data[mask].tobytes())


def bytes_between(layout: FileLayout) -> list[tuple[int, int]]:
    """Return offset and size of every span outside the regions of a file, in order."""
    spans, at = [], 0
    for region in layout.regions:
        if region.offset > at:
            spans.append((at, region.offset - at))
        at = region.offset + region.nbytes
    if layout.nbytes > at:
        spans.append((at, layout.nbytes - at))
    return spans


def hole_mask(region: Region, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> Any:
    """Return which bytes of a region belong to none of its members, or None where all belong.

    Parameters
    ----------
    region
        The region.
    shapes
        Dtype and shape of each member, by key.

    Returns
    -------
    numpy.ndarray or None
        Booleans, one a byte.

    Notes
    -----
    A view that skips elements (a column of a matrix) leaves holes, whose bytes the skeleton keeps so
    that the file can be written back whole.
    """
    if (
        sum(DTYPE_SIZES[shapes[m.key][0]] * math.prod(shapes[m.key][1]) for m in region.members)
        == region.nbytes
    ):
        strided = [m for m in region.members if m.stride is not None]
        if len(region.members) == 1 and (
            not strided or _is_permutation(strided[0].stride, shapes[strided[0].key][1])
        ):
            return None
    if all(m.stride is None for m in region.members):
        return None
    import numpy as np

    free = np.ones(region.nbytes, dtype=bool)
    for member in region.members:
        dtype, shape = shapes[member.key]
        itemsize, nbytes = DTYPE_SIZES[dtype], DTYPE_SIZES[dtype] * math.prod(shape)
        if member.stride is None:
            free[member.start : member.start + nbytes] = False
        else:
            strides = (*(s * itemsize for s in member.stride), 1)
            window = free[member.start :]
            np.lib.stride_tricks.as_strided(window, (*shape, itemsize), strides)[...] = False
    return free if free.any() else None


def _is_permutation(stride: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Tell whether strides are those of a contiguous tensor with its dimensions swapped."""
    step = 1
    for s, n in sorted((s, n) for s, n in zip(stride or (), shape, strict=True) if n != 1):
        if s != step:
            return False
        step *= n
    return True
