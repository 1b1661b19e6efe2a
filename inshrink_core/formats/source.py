"""Tensor bytes from the files of a run, and the rest of those files."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    Checkpoint,
    FileLayout,
    Region,
    TensorSource,
    TensorSpec,
)
from inshrink_core.errors import NotFoundError
from inshrink_core.execution import new_buffer
from inshrink_core.formats.checksums import Damage, FileChecks, digest_beside, summary
from inshrink_core.formats.disk import ByteCounter, FileStamp, ReadableFile
from inshrink_core.formats.state_tree import Placed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FileSource", "accepting_damage", "bytes_between", "hole_mask", "peek"]


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
    accepted
        Damage that the user accepted; any other is refused.

    Notes
    -----
    What `read` and `skeleton` return was compared with the checksums of the file: the very buffer, not an
    earlier read of the same bytes.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        stamps: Mapping[str, FileStamp],
        places: Mapping[str, tuple[str, Placed]],
        counter: ByteCounter,
        *,
        accepted: Sequence[Damage] = (),
    ) -> None:
        self._paths, self._stamps, self._places, self._counter = paths, stamps, places, counter
        self._accepted = tuple(accepted)
        self._checks: dict[str, FileChecks] = {}
        self._lock = threading.Lock()

    def _open(self, name: str) -> ReadableFile:
        return ReadableFile(self._paths[name], self._counter, self._stamps[name])

    def _checks_of(self, name: str, file: ReadableFile) -> FileChecks:
        """Return the checksums of a file, found when its bytes are first asked for."""
        with self._lock:
            if name not in self._checks:
                places = ((key, place) for key, (held, place) in self._places.items() if held == name)
                tensors = [(key, place.offset, place.span) for key, place in places]
                self._checks[name] = FileChecks(
                    file,
                    name,
                    tensors=tensors,
                    digest=digest_beside(self._paths[name], file.nbytes),
                    accepted=[one for one in self._accepted if one.file == name],
                    optional=not tensors,
                )
            return self._checks[name]

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor, contiguous, in memory of its own, compared with the checksums of its file.

        Raises
        ------
        NotFoundError
            The checkpoint has no such tensor.
        RottenError
            Its bytes do not match the checksum that was written with them.
        DamagedError
            The file was changed or cut off since its header was read.
        """
        return self._tensor(spec, checked=True)

    def peek(self, spec: TensorSpec) -> Tensor:
        """Return what `read` does, without a look at checksums: for values that nobody keeps."""
        return self._tensor(spec, checked=False)

    def _tensor(self, spec: TensorSpec, *, checked: bool) -> Tensor:
        import torch

        if spec.key not in self._places:
            raise NotFoundError(f"no tensor '{spec.key}' in these files")
        name, placed = self._places[spec.key]
        dtype = getattr(torch, placed.dtype)
        if not math.prod(placed.shape):
            return torch.empty(placed.shape, dtype=dtype)
        with self._open(name) as file:
            if checked:
                buffer = self._checks_of(name, file).read(file, placed.offset, placed.span)
            else:
                buffer = new_buffer(placed.span)
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
        """Return the bytes outside the regions, CRC fields zeroed, then the holes inside regions.

        Raises
        ------
        RottenError, DamagedError
            As for `read`.
        """
        parts: list[bytes] = []
        with self._open(layout.path) as file:
            checks = self._checks_of(layout.path, file)
            for offset, nbytes in bytes_between(layout):
                part = bytearray(checks.read(file, offset, nbytes))
                for entry in layout.zip_entries:
                    for at in entry.crc_offsets:
                        if offset <= at < offset + nbytes:
                            part[at - offset : at - offset + 4] = bytes(4)
                parts.append(bytes(part))
            parts += [self._holes(file, checks, region) for region in layout.regions]
        return b"".join(parts)

    def _holes(self, file: ReadableFile, checks: FileChecks, region: Region) -> bytes:
        shapes = {m.key: (self._places[m.key][1].dtype, self._places[m.key][1].shape) for m in region.members}
        mask = hole_mask(region, shapes)
        if mask is None:
            return b""
        import numpy as np

        data = np.frombuffer(checks.read(file, region.offset, region.nbytes), dtype=np.uint8)
        return bytes(data[mask].tobytes())

    def vouched(self, files: Sequence[FileLayout]) -> dict[str, Any]:
        """Return what vouched for the tensors of some files, as a frame records it.

        Returns
        -------
        dict
            ``checked``: names of the checksums. ``unchecked``: kinds of the files that have none.
            ``damaged``, where the user accepted damage: file, entry, first byte and size of each.
        """
        kinds = {layout.path: layout.kind for layout in files if layout.kind != "opaque"}
        for name in kinds:
            with self._open(name) as file:
                self._checks_of(name, file)
        return summary(kinds, self._checks, self._accepted)

    def accepting_damage(self, files: Sequence[FileLayout]) -> FileSource:
        """Return a source that takes the bytes as they are now, after a look at every one of them."""
        damage: list[Damage] = []
        for layout in files:
            with self._open(layout.path) as file:
                damage += self._checks_of(layout.path, file).damage(file)
        return FileSource(self._paths, self._stamps, self._places, self._counter, accepted=damage)

    @property
    def accepted(self) -> tuple[Damage, ...]:
        """The damage that was accepted."""
        return self._accepted


def peek(source: TensorSource, spec: TensorSpec) -> Tensor:
    """Return a tensor for a look at it: where it comes from a file, its checksum is not computed."""
    return source.peek(spec) if isinstance(source, FileSource) else source.read(spec)


def accepting_damage(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose bytes are taken as they are, though they do not match their checksums.

    Notes
    -----
    Reads every file once. The checksum of a damaged entry is left as it stands, so that a restored file
    is as damaged as the original for whoever checks it.
    """
    if not isinstance(checkpoint.source, FileSource):
        return checkpoint
    source = checkpoint.source.accepting_damage(checkpoint.files)
    damaged = {(one.file, one.offset) for one in source.accepted if one.entry}
    files = tuple(
        replace(
            layout,
            zip_entries=tuple(e for e in layout.zip_entries if (layout.path, e.data_offset) not in damaged),
        )
        for layout in checkpoint.files
    )
    return replace(checkpoint, source=source, files=files)


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
