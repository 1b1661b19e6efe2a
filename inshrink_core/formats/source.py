"""Read tensors and skeletons from the files of a run, and restore files from both."""

from __future__ import annotations

import bisect
import functools
import math
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from isal.isal_zlib import crc32

from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    Checkpoint,
    FileLayout,
    Member,
    Region,
    TensorSource,
    TensorSpec,
)
from inshrink_core.errors import DamagedError, NotFoundError
from inshrink_core.execution.files import cached_parts
from inshrink_core.execution.resources import Limits
from inshrink_core.formats.checksums import Damage, FileChecks, PackedZip
from inshrink_core.formats.disk import ByteCounter, FileStamp, ReadableFile
from inshrink_core.formats.state_tree import Piece, Placed, extent, is_shared

if TYPE_CHECKING:
    from torch import Tensor


DEFAULT_LIMITS: Final = Limits()
"""Limits from the available resources."""

_SAMPLED_NBYTES: Final = 1 << 22
"""From this size on, 256 short reads are faster than one read of the whole tensor."""

_ODD_BOOLS: Final = struct.Struct("<2Q")

_MAX_STRIDES: Final = 63
"""numpy supports 64 dimensions; one is needed for the bytes of an element."""


class FileSource:
    """Reads tensors and skeletons of one checkpoint; safe for any thread, without keeping files open.

    Parameters
    ----------
    paths, stamps
        Path and stamp of every file by relative path; files that changed since are refused.
    places
        Tensor key to its place, with at least one piece; files are numbered as in `stamps`.
    counter
        Counts every byte read.
    zips
        For files that are a sequence of zips, the span of each.

    Notes
    -----
    `read` and `skeleton` compare the returned buffer itself with the checksums of the file, not an earlier
    read of the same bytes.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        stamps: Mapping[str, FileStamp],
        places: Mapping[str, Placed],
        counter: ByteCounter,
        zips: Mapping[str, Sequence[PackedZip]],
    ) -> None:
        self._paths, self._stamps, self._places, self._counter = paths, stamps, places, counter
        self._zips = zips
        # Damage that the user accepted; other damage raises an error.
        self.accepted: tuple[Damage, ...] = ()
        self._names = tuple(stamps)
        self._checks: dict[str, FileChecks] = {}
        self._lock = threading.Lock()

    def _open(self, name: str) -> ReadableFile:
        return ReadableFile(self._paths[name], self._counter, self._stamps[name])

    def _checks_of(self, name: str, file: ReadableFile) -> FileChecks:
        """Return the checksums of a file, located at the first access to its bytes."""
        with self._lock:
            if name not in self._checks:
                accepted = [item for item in self.accepted if item.file == name]
                tensors, zips = self._extents.get(name, []), self._zips.get(name, ())
                self._checks[name] = FileChecks(file, name, tensors, accepted, zips)
            return self._checks[name]

    @functools.cached_property
    def _extents(self) -> dict[str, list[tuple[str, int, int]]]:
        """Key, first byte and extent of the tensors, or their pieces, in each file."""
        found: dict[str, list[tuple[str, int, int]]] = {}
        for key, placed in self._places.items():
            for _, file, place in placed.pieces:
                found.setdefault(self._names[file], []).append((key, place.offset, place.span))
        return found

    def read(self, spec: TensorSpec, *, checked: bool = True) -> Tensor:
        """Return a tensor as a contiguous copy, after comparing it with the checksums of its file.

        Parameters
        ----------
        spec
            Its spec.
        checked
            False compares no checksums, for values that are not stored.

        Raises
        ------
        NotFoundError
            The checkpoint has no such tensor.
        ChecksumError
            Its bytes do not match the checksum stored with them.
        DamagedError
            The file was changed or truncated since its header was read.
        """
        import torch

        placed = self._place(spec)
        dtype = getattr(torch, placed.dtype)
        if not math.prod(placed.shape):
            return torch.empty(placed.shape, dtype=dtype)
        if len(placed.pieces) == 1:
            return self._read(placed.pieces[0], checked=checked)
        full = torch.empty((*placed.shape, dtype.itemsize), dtype=torch.uint8)
        for piece in placed.pieces:
            part = self._read(piece, checked=checked).reshape(-1).view(torch.uint8)
            target = full if piece.box is None else full[piece.box.slices]
            target.copy_(part.reshape(target.shape))
        return full.reshape(-1).view(dtype).reshape(placed.shape)

    def sample(self, spec: TensorSpec) -> Tensor | None:
        """Return the sample of a large tensor (`inshrink_core.ops.sample.sample`), read alone and unchecked.

        Returns
        -------
        Tensor or None
            None if reading the whole tensor is faster.
        """
        import torch

        from inshrink_core.ops.sample import SAMPLE_RUN, SAMPLE_RUNS

        (_, file_number, placed), *others = self._place(spec).pieces
        if others or placed.stride is not None or placed.dtype == "bool" or placed.span < _SAMPLED_NBYTES:
            return None
        itemsize = DTYPE_SIZES[placed.dtype]
        apart = placed.span // itemsize // SAMPLE_RUNS * itemsize
        starts = range(placed.offset, placed.offset + SAMPLE_RUNS * apart, apart)
        with self._open(self._names[file_number]) as file:
            runs = file.read_runs(starts, SAMPLE_RUN * itemsize)
        return torch.frombuffer(runs, dtype=getattr(torch, placed.dtype))

    def _place(self, spec: TensorSpec) -> Placed:
        if spec.key not in self._places:
            raise NotFoundError(f"no tensor '{spec.key}' in these files")
        return self._places[spec.key]

    def _read(self, piece: Piece, *, checked: bool) -> Tensor:
        """Return one piece of a tensor, contiguous."""
        import torch

        name, placed = self._names[piece.file], piece.placed
        dtype = getattr(torch, placed.dtype)
        with self._open(name) as file:
            if checked:
                buffer = self._checks_of(name, file).read(file, placed.offset, placed.span)
            else:
                buffer = file.read_buffer(placed.offset, placed.span)
        if placed.dtype == "bool":
            # In PyTorch, any byte but 0 and 1 in a bool tensor is undefined behaviour.
            flat = torch.frombuffer(buffer, dtype=torch.uint8).ne(0)
        else:
            flat = torch.frombuffer(buffer, dtype=dtype)
        if placed.stride is None:
            return flat.reshape(placed.shape)
        return flat.as_strided(placed.shape, placed.stride).contiguous()

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes outside the regions, CRC fields zeroed, then the holes inside regions.

        Regions of bools with a byte other than 0 and 1 follow, each after its offset and size.

        Raises
        ------
        ChecksumError, DamagedError
            As for `read`.
        """
        parts: list[bytes] = []
        crcs = sorted(at for entry in layout.zip_entries for at in entry.crc_offsets)
        with self._open(layout.path) as file:
            checks = self._checks_of(layout.path, file)
            for offset, nbytes in _bytes_between(layout):
                part = bytearray(checks.read(file, offset, nbytes))
                inside = slice(bisect.bisect_left(crcs, offset), bisect.bisect_left(crcs, offset + nbytes))
                for at in crcs[inside]:
                    part[at - offset : at - offset + 4] = bytes(4)
                parts.append(bytes(part))
            parts += [self._holes(file, checks, region) for region in layout.regions]
            parts += [self._odd_bools(file, checks, region) for region in layout.regions]
        return b"".join(parts)

    def _odd_bools(self, file: ReadableFile, checks: FileChecks, region: Region) -> bytes:
        """Return offset, size and bytes of bools with a byte above 1, which `read` returns as true."""
        if any(self._places[member.key].dtype != "bool" for member in region.members):
            return b""
        data = bytes(checks.read(file, region.offset, region.nbytes))
        return b"" if max(data, default=0) <= 1 else _ODD_BOOLS.pack(region.offset, region.nbytes) + data

    def _holes(self, file: ReadableFile, checks: FileChecks, region: Region) -> bytes:
        rows = ((self._places[member.key], member.box) for member in region.members)
        mask = _hole_mask(region, [(p.dtype, p.shape if box is None else box.sizes) for p, box in rows])
        if mask is None:
            return b""
        import numpy as np

        data = np.frombuffer(checks.read(file, region.offset, region.nbytes), dtype=np.uint8)
        return bytes(data[mask].tobytes())

    def checks_record(self, files: Sequence[FileLayout]) -> dict[str, Any]:
        """Return which checksums cover the tensors of some files, as recorded in a frame.

        Returns
        -------
        dict
            ``checked``: names of the checksums. ``unchecked``: kinds of the files that have none.
            ``damaged``, if the user accepted damage: file, entry, first byte and size of each.
        """
        checked, unchecked = set[str](), set[str]()
        for layout in files:
            if layout.kind != "opaque":
                with self._open(layout.path) as file:
                    algorithms = self._checks_of(layout.path, file).algorithms
                checked |= algorithms
                unchecked |= set() if algorithms else {layout.kind}
        record: dict[str, Any] = {"checked": sorted(checked), "unchecked": sorted(unchecked)}
        damaged = [[item.file, item.entry, item.offset, item.nbytes] for item in self.accepted]
        return record | ({"damaged": damaged} if damaged else {})

    def accept_damage(self, layouts: Iterable[FileLayout]) -> tuple[FileLayout, ...]:
        """Read every file once, accept its bytes as they are, and return the layouts without damaged entries.

        The stored checksum of a damaged entry is thus preserved: other tools detect the same damage in a
        restored file as in the original.
        """
        for name in sorted(self._names):
            with self._open(name) as file:
                self.accepted += tuple(self._checks_of(name, file).damage(file))
        self._checks.clear()
        damaged = {(item.file, item.offset) for item in self.accepted if item.entry}
        found = []
        for layout in layouts:
            sound = tuple(e for e in layout.zip_entries if (layout.path, e.data_offset) not in damaged)
            found.append(replace(layout, zip_entries=sound))
        return tuple(found)


def peek(source: TensorSource, spec: TensorSpec, *, sampled: bool = False) -> Tensor:
    """Return a tensor, or its flat sample, for inspection only: no checksum of a file is computed.

    For the sample of a large tensor in a file, little more than the sample is read.
    """
    from inshrink_core.ops.sample import sample

    files = source if isinstance(source, FileSource) else None
    if sampled and files and (found := files.sample(spec)) is not None:
        return found
    tensor = files.read(spec, checked=False) if files else source.read(spec)
    return sample(tensor) if sampled else tensor


def _bytes_between(layout: FileLayout) -> list[tuple[int, int]]:
    """Return offset and size of every span outside the regions of a file, in order."""
    spans, at = [], 0
    for offset, nbytes in [*(region[:2] for region in layout.regions), (layout.nbytes, 0)]:
        if offset > at:
            spans.append((at, offset - at))
        at = offset + nbytes
    return spans


def _hole_mask(region: Region, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Any:
    """Return a mask of the bytes of a region that belong to no member, or None if all bytes belong to one.

    Parameters
    ----------
    region
        The region.
    shapes
        Dtype and shape of each member.

    Returns
    -------
    numpy.ndarray or None
        Booleans, one per byte.

    Notes
    -----
    A view that skips elements (a column of a matrix) leaves holes. The skeleton stores their bytes so that
    the file can be restored exactly.
    """
    if all(member.stride is None for member in region.members):
        return None
    dtype, shape = shapes[0]
    nbytes = DTYPE_SIZES[dtype] * math.prod(shape)
    if len(shapes) == 1 and nbytes == region.nbytes and not is_shared(shape, region.members[0].stride):
        return None  # a contiguous tensor with permuted dimensions
    import numpy as np

    free = np.ones(region.nbytes, dtype=bool)
    for member, (dtype, shape) in zip(region.members, shapes, strict=True):
        _elements(free, member, shape, DTYPE_SIZES[dtype])[...] = False
    return free if free.any() else None


def _elements(buffer: Any, member: Member, shape: tuple[int, ...], itemsize: int) -> Any:
    """Return the bytes of a member of a region, as a view of its shape plus the item size."""
    import numpy as np

    shape = (*shape, itemsize)
    if member.stride is None or not math.prod(shape):
        return buffer[member.start : member.start + math.prod(shape)].reshape(shape)
    strides = (*(step * itemsize for step in member.stride), 1)
    return np.lib.stride_tricks.as_strided(buffer[member.start :], shape, strides)


def tensor_bytes(tensor: Tensor, spec: TensorSpec) -> memoryview:
    """Return the bytes of a tensor in row-major order, after checking it against its spec.

    Raises
    ------
    DamagedError
        The tensor has another dtype or shape than its spec.
    """
    import torch

    if str(tensor.dtype) != f"torch.{spec.dtype}" or tuple(tensor.shape) != spec.shape:
        what, expected = f"tensor '{spec.key}' differs from its spec", f"{spec.dtype} {spec.shape}"
        raise DamagedError(what, expected=expected, found=f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class _Writer:
    """Writes a file from front to back and computes the CRC-32 of each zip entry meanwhile."""

    def __init__(self, file: IO[bytes], layout: FileLayout) -> None:
        self.file, self.at = file, 0
        self.entries = sorted(layout.zip_entries)
        self.crcs = [0] * len(self.entries)
        self.next_entry = 0

    def write(self, view: memoryview) -> None:
        self.file.write(view)
        start, end = self.at, self.at + len(view)
        self.at = end
        while self.next_entry < len(self.entries):
            entry = self.entries[self.next_entry]
            first, last = max(entry.data_offset, start), min(entry.data_offset + entry.data_nbytes, end)
            if first < last:
                part = view[first - start : last - start]
                self.crcs[self.next_entry] = crc32(part, self.crcs[self.next_entry])
            if entry.data_offset + entry.data_nbytes > end:
                break
            self.next_entry += 1

    def patch_checksums(self) -> None:
        for entry, crc in zip(self.entries, self.crcs, strict=True):
            for offset in entry.crc_offsets:
                self.file.seek(offset)
                self.file.write(crc.to_bytes(4, "little"))


def _check_layout(layout: FileLayout, checkpoint: Checkpoint, n_skeleton: int) -> None:
    """Refuse a self-contradictory layout, which may come from an untrusted archive.

    A region may not exceed the size of its tensors plus the holes stored in the skeleton, so that allocations
    are bounded by the data present. Checksummed spans must not overlap, and a checksum field must not be
    inside a tensor.
    """
    name = layout.path

    def fail(what: str, expected: str = "", found: str = "") -> DamagedError:
        return DamagedError(what, where=checkpoint.origin, expected=expected, found=found)

    end = 0
    n_holes = n_skeleton - sum(nbytes for _, nbytes in _bytes_between(layout))
    if n_holes < 0:
        expected = f"{n_skeleton - n_holes} bytes"
        raise fail(f"the skeleton of '{name}' is too short", expected, f"{n_skeleton}")
    for region in layout.regions:
        if region.offset < end or region.nbytes < 0:
            raise fail(f"the layout of '{name}' has overlapping regions")
        end = region.offset + region.nbytes
        most = n_holes + sum(member.nbytes_in(checkpoint.spec(member.key)) for member in region.members)
        if region.nbytes > most:
            what = f"a region of '{name}' is larger than its tensors and holes"
            raise fail(what, f"at most {most} bytes", f"{region.nbytes}")
        for member in region.members:
            spec = checkpoint.spec(member.key)
            shape, stride, box = member.shape_in(spec), member.stride, member.box
            if box is not None and (
                not len(box.offsets) == len(shape) == len(spec.shape)
                or any(at + size > n for at, size, n in zip(*box, spec.shape, strict=True))
            ):
                raise fail(f"the layout of '{name}' has a part outside of '{member.key}'")
            if stride is not None and not (
                len(stride) == len(shape) <= _MAX_STRIDES and all(step >= 0 for step in stride)
            ):
                raise fail(f"the layout of '{name}' gives '{member.key}' wrong strides")
            span = member.nbytes_in(spec)
            if stride is not None and span:
                span = extent(shape, stride) * DTYPE_SIZES[spec.dtype]
            if member.start < 0 or member.start + span > region.nbytes:
                raise fail(f"the layout of '{name}' puts '{member.key}' outside its region")
    entries = sorted(layout.zip_entries)
    crcs = [at for entry in entries for at in entry.crc_offsets]
    ends = [entry.data_offset + entry.data_nbytes for entry in entries]
    if max([end, *ends, *(at + 4 for at in crcs)]) > layout.nbytes:
        raise fail(f"the layout of '{name}' reaches past the file's end")
    if any(at > following.data_offset for at, following in zip(ends, entries[1:], strict=False)):
        raise fail(f"the layout of '{name}' has overlapping zip entries")
    starts = [region.offset for region in layout.regions]
    for at in crcs:
        place = bisect.bisect_left(starts, at + 4) - 1
        if place >= 0 and starts[place] + layout.regions[place].nbytes > at:
            raise fail(f"the layout of '{name}' has a checksum within a tensor")


def _with_odd_bools(data: memoryview, odd: memoryview | None) -> memoryview:
    """Return the original bytes of bools where their truth values are unchanged."""
    if odd is None:
        return data
    import numpy as np

    now, then = np.frombuffer(data, dtype=np.uint8), np.frombuffer(odd, dtype=np.uint8)
    return np.where(now == (then != 0), then, now).data


def _is_bare_tensor(region: Region) -> bool:
    """Return whether a region is one whole contiguous tensor, whose decoded bytes are written directly."""
    return len(region.members) == 1 and region.members[0][2:] == (None, None)


class _Piece(NamedTuple):
    """A span of the skeleton; or a region, with its holes and its bools other than 0 and 1."""

    offset: int
    nbytes: int
    data: memoryview
    region: Region | None = None
    odd: memoryview | None = None


class RestoredFile:
    """A restored file that decodes only the parts that are read.

    Parameters
    ----------
    checkpoint
        Provides the tensors and the skeleton.
    layout
        One of its files.

    Raises
    ------
    DamagedError
        Layout, skeleton and tensors contradict each other.
    """

    def __init__(self, checkpoint: Checkpoint, layout: FileLayout) -> None:
        self.path, self.nbytes = Path(layout.path), layout.nbytes
        self._checkpoint = checkpoint
        rest = memoryview(checkpoint.source.skeleton(layout))
        _check_layout(layout, checkpoint, len(rest))

        def take(nbytes: int) -> memoryview:
            nonlocal rest
            taken, rest = rest[:nbytes], rest[nbytes:]
            return taken

        pieces = [_Piece(*span, take(span[1])) for span in _bytes_between(layout)]
        regions = [
            _Piece(region.offset, region.nbytes, take(self._n_holes(region) if rest else 0), region)
            for region in layout.regions
        ]
        odd = dict[int, memoryview]()
        while len(rest) > _ODD_BOOLS.size:
            offset, nbytes = _ODD_BOOLS.unpack(take(_ODD_BOOLS.size))
            odd[offset] = take(nbytes)
        sizes = {region.offset: region.nbytes for region in layout.regions}
        if rest or any(len(data) != sizes.get(offset) for offset, data in odd.items()):
            raise DamagedError(f"the skeleton of '{layout.path}' is too long", where=checkpoint.origin)
        pieces += [item._replace(odd=odd.get(item.offset)) for item in regions if item.nbytes]
        self.pieces = sorted(pieces, key=lambda piece: piece.offset)

    def read(self, offset: int, n_bytes: int, *, compared: bool = True) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.nbytes:
            raise DamagedError("a read past the end of a restored file", where=str(self.path))
        first = bisect.bisect_right(self.pieces, offset, key=lambda piece: piece.offset) - 1
        found = []
        for piece in self.pieces[max(first, 0) :]:
            start = piece.offset
            if start >= offset + n_bytes:
                break
            data = self.decoded(piece, self._checkpoint.source.read)
            found.append(data[max(offset - start, 0) : min(offset + n_bytes - start, piece.nbytes)])
        return b"".join(found)

    def _shapes(self, region: Region) -> list[tuple[str, tuple[int, ...]]]:
        specs = ((self._checkpoint.spec(member.key), member) for member in region.members)
        return [(spec.dtype, member.shape_in(spec)) for spec, member in specs]

    def _n_holes(self, region: Region) -> int:
        mask = _hole_mask(region, self._shapes(region))
        return 0 if mask is None else int(mask.sum())

    def decoded(self, piece: _Piece, read: Callable[[TensorSpec], Tensor]) -> memoryview:
        """Return the bytes of a piece; `read` is used for tensors that are split into several."""
        region, checkpoint = piece.region, self._checkpoint
        if region is None:
            return piece.data
        specs = [checkpoint.spec(member.key) for member in region.members]
        if _is_bare_tensor(region):
            data = tensor_bytes(checkpoint.source.read(specs[0]), specs[0])
            if len(data) == region.nbytes:
                return _with_odd_bools(data, piece.odd)
        import numpy as np

        buffer = np.zeros(region.nbytes, dtype=np.uint8)
        shapes = self._shapes(region)
        mask = _hole_mask(region, shapes)
        if mask is not None:
            if int(np.count_nonzero(mask)) != len(piece.data):
                raise DamagedError("the skeleton has fewer bytes of holes than its layout needs")
            buffer[mask] = np.frombuffer(piece.data, dtype=np.uint8)
        for member, spec, (dtype, shape) in zip(region.members, specs, shapes, strict=True):
            itemsize = DTYPE_SIZES[dtype]
            tensor = checkpoint.source.read(spec) if member.box is None else read(spec)
            full = np.frombuffer(tensor_bytes(tensor, spec), dtype=np.uint8)
            part = full.reshape(*spec.shape, itemsize)[() if member.box is None else member.box.slices]
            _elements(buffer, member, shape, itemsize)[...] = part
        return _with_odd_bools(buffer.data, piece.odd)


def write_layout(
    file: IO[bytes],
    checkpoint: Checkpoint,
    layout: FileLayout,
    progress: Callable[[str], None],
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Write one file of a checkpoint according to its layout.

    Parameters
    ----------
    file
        A writable and seekable empty file.
    checkpoint
        Provides the tensors and the skeleton.
    layout
        One of its files.
    progress
        Called with the key of every tensor written.
    limits
        Limits the memory for assembling a region whose tensors are not one contiguous tensor.

    Raises
    ------
    DamagedError
        Layout, skeleton and tensors contradict each other.
    TooLargeError
        A region is larger than the limits allow.
    """
    restored = RestoredFile(checkpoint, layout)
    for region in layout.regions:
        if not _is_bare_tensor(region):
            what = f"filling a region of '{layout.path}'"
            largest = max((checkpoint.spec(member.key).nbytes for member in region.members), default=0)
            limits.require_memory(2 * region.nbytes + largest, what, checkpoint.origin)
    writer = _Writer(file, layout)
    # Consecutive pieces of a tensor cut by rows share one decoded copy.
    read = functools.lru_cache(maxsize=1)(checkpoint.source.read)
    for piece in restored.pieces:
        for part in cached_parts(restored.decoded(piece, read)):
            writer.write(part)
        for member in piece.region.members if piece.region else ():
            progress(member.key)
    writer.patch_checksums()
