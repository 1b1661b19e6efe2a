"""The manifest: the live frames in commit order, and the generations of removed frames."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec

from inshrink_core.archive import layout
from inshrink_core.archive.document import compress_document, decompress_document, pack_value, unpack_value
from inshrink_core.archive.layout import Count, converted, require
from inshrink_core.errors import DamagedError
from inshrink_core.frame import FrameInfo, FrameKind, FramePart

MANIFEST_NAME: Final = "inshrink-manifest"
"""A name that no other tool uses, because it marks a folder as an archive."""

_DIGEST_NBYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a manifest.

    Parameters
    ----------
    archive_id
        16 bytes.
    frames
        Live frames, by ascending generation.
    tombstones
        Generations of removed frames, ascending: a file with one of them is not live.
    next_generation
        Above every generation ever used.
    """

    archive_id: bytes
    frames: tuple[FrameInfo, ...] = ()
    tombstones: tuple[int, ...] = ()
    next_generation: int = 1

    def with_frame(self, info: FrameInfo) -> Manifest:
        """Return the manifest after the commit of a frame."""
        frames = tuple(sorted((*self.frames, info), key=lambda frame: frame.generation))
        return replace(self, frames=frames, next_generation=max(self.next_generation, info.generation + 1))

    def with_places(self, moved: Iterable[FrameInfo]) -> Manifest:
        """Return the manifest after some of its frames moved to other files."""
        places = {frame.generation: frame for frame in moved}
        frames = tuple(places.get(frame.generation, frame) for frame in self.frames)
        last = max((layout.file_number(frame.path) for frame in places.values()), default=0)
        return replace(self, frames=frames, next_generation=max(self.next_generation, last + 1))

    def without_frames(self, generations: frozenset[int]) -> Manifest:
        """Return the manifest with the given generations removed and listed as tombstones."""
        return replace(
            self,
            frames=tuple(frame for frame in self.frames if frame.generation not in generations),
            tombstones=tuple(sorted({*self.tombstones, *generations})),
        )

    def pack(self) -> bytes:
        """Return the bytes of the whole file."""
        rows = {frame.frame_id: row for row, frame in enumerate(self.frames)}
        columns = [
            [
                None if frame.frame_id == _derive(self.archive_id, frame) else frame.frame_id
                for frame in self.frames
            ],
            [
                before if (before := rows.get(frame.parent_id or b"", row)) < row else frame.parent_id
                for row, frame in enumerate(self.frames)
            ],
            [frame.step for frame in self.frames],
            [int(frame.kind is FrameKind.DELTA) for frame in self.frames],
            [frame.branch for frame in self.frames],
            [frame.generation for frame in self.frames],
            [file.nbytes for frame in self.frames for file in frame.files],
            b"".join(file.digest for frame in self.frames for file in frame.files),
            self.tombstones,
            self.next_generation,
        ]
        has_segments = any(frame.offset is not None for frame in self.frames)
        if has_segments:
            columns += zip(*_places(self.frames), strict=True)
        has_parts = any(frame.n_parts > 1 for frame in self.frames)
        if has_parts:
            columns.append([frame.n_parts for frame in self.frames])
        raw = pack_value(columns)
        payload = compress_document(raw)
        header = layout.ManifestHeader(self.archive_id, len(payload), len(raw), has_segments, has_parts)
        return header.pack(payload) + payload

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Parse and check the bytes of the whole file.

        Raises
        ------
        DamagedError
            The bytes are not a manifest, or the manifest contradicts itself.
        IncompatibleError
            The manifest has a newer version.
        """
        header = layout.ManifestHeader.parse(data, where)
        raw = decompress_document(data[layout.MANIFEST_HEADER_NBYTES :], header.payload_raw_nbytes, where)
        document = unpack_value(raw, where, lists=False)
        try:
            return _parse_document(document, header)
        except (ValueError, TypeError) as error:
            raise DamagedError(
                f"the manifest is malformed: {error}", where=where, remedy=layout.REBUILD_REMEDY
            ) from error


def _places(frames: Iterable[FrameInfo]) -> Iterator[tuple[int, int]]:
    """Yield the segment number of each file, or 0, and its gap to the preceding file of that segment."""
    ends: dict[str, int] = {}
    for file in (file for frame in frames for file in frame.files):
        if file.offset is None:
            yield 0, 0
        else:
            yield layout.file_number(file.path), file.offset - ends.get(file.path, 0)
            ends[file.path] = file.offset + file.nbytes


def _derive(archive_id: bytes, frame: FrameInfo) -> bytes:
    return layout.derive_frame_id(archive_id, frame.parent_id, frame.step, frame.branch, frame.generation)


_Generation = Annotated[int, msgspec.Meta(ge=1, le=layout.MAX_GENERATION)]
_Parts = Annotated[int, msgspec.Meta(ge=1, le=layout.MAX_PARTS)]
_Id = Annotated[bytes, msgspec.Meta(min_length=layout.ID_NBYTES, max_length=layout.ID_NBYTES)]


class _Document(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of every manifest. Two more place frames in segments, another counts parts of frames."""

    ids: tuple[_Id | None, ...]
    parents: tuple[_Id | Count | None, ...]
    steps: tuple[Count, ...]
    kinds: tuple[Literal[0, 1], ...]
    branches: tuple[Annotated[int, msgspec.Meta(ge=0, le=layout.MAX_BRANCH)], ...]
    generations: tuple[_Generation, ...]
    sizes: tuple[Count, ...]
    digests: bytes
    tombstones: tuple[_Generation, ...]
    next_generation: int


def _parse_document(document: Any, header: layout.ManifestHeader) -> Manifest:
    n_fields = len(_Document.__struct_fields__)
    n_placed = n_fields + 2 * header.has_segments
    require(isinstance(document, tuple) and len(document) == n_placed + header.has_parts, "number of fields")
    found = converted(document[:n_fields], _Document)
    counts = converted(document[-1], tuple[_Parts, ...]) if header.has_parts else (1,) * len(found.ids)
    columns = found.ids, found.parents, found.steps, found.kinds, found.branches, found.generations, counts
    require(len({*map(len, columns)}) == 1, "columns of unequal length")
    n_files = len(found.sizes)
    require(n_files == sum(counts) and len(found.digests) == _DIGEST_NBYTES * n_files, "sizes or digests")
    used, most = (*found.generations, *found.tombstones), layout.MAX_GENERATION + 1
    is_ascending = all([*column] == sorted({*column}) for column in (found.generations, found.tombstones))
    require(is_ascending, "generations")
    require(len({*used}) == len(used) and max(used, default=0) < found.next_generation <= most, "generations")
    require(layout.NO_ID not in (*found.ids, *found.parents), "frame ids")
    places = _parse_places(document[n_fields:n_placed], found, counts)
    digests = (found.digests[at : at + _DIGEST_NBYTES] for at in range(0, len(found.digests), _DIGEST_NBYTES))
    files = zip(found.sizes, digests, places, strict=True)
    frames: list[FrameInfo] = []
    rows = zip(*columns, strict=True)
    for row, (frame_id, parent, step, kind, branch, generation, n_parts) in enumerate(rows):
        require(not isinstance(parent, int) or parent < row, "parents")  # parents precede their children
        parent_id = frames[parent].frame_id if isinstance(parent, int) else parent
        frame_kind = FrameKind.DELTA if kind else FrameKind.KEYFRAME
        frame = FrameInfo(frame_id or b"", parent_id, step, frame_kind, branch, generation, n_parts, ())
        parts = tuple(
            FramePart(part, segment or layout.part_path(frame, part), nbytes, digest, offset)
            for part, (nbytes, digest, (segment, offset)) in zip(range(n_parts), files, strict=False)
        )
        frames.append(replace(frame, frame_id=frame_id or _derive(header.archive_id, frame), files=parts))
    return Manifest(
        archive_id=header.archive_id,
        frames=tuple(frames),
        tombstones=found.tombstones,
        next_generation=found.next_generation,
    )


def _parse_places(
    columns: Sequence[Any], found: _Document, counts: Sequence[int]
) -> Iterator[tuple[str, int | None]]:
    """Yield the segment path and offset of each file; "" and None for a separate file."""
    if not columns:
        yield from itertools.repeat(("", None), len(found.sizes))
        return
    segments, gaps = converted(columns, tuple[tuple[Count, ...], tuple[Count, ...]])
    frames = [each for each in zip(found.generations, counts, strict=True) for _ in range(each[1])]
    ends: dict[int, int] = {}
    for segment, gap, nbytes, (generation, n_parts) in zip(segments, gaps, found.sizes, frames, strict=True):
        if not segment:
            yield "", None
            continue
        begin = ends.get(segment, 0) + gap
        end = ends[segment] = begin + nbytes
        require(nbytes <= layout.SMALL_FRAME_NBYTES and end <= layout.MAX_SEGMENT_NBYTES, "offsets")
        require(n_parts == 1 and generation <= segment < found.next_generation, "segments")
        yield layout.segment_path(segment), begin
