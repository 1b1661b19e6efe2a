"""The manifest: which frames are live, in commit order, and which generations were removed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from inshrink_core.archive import layout
from inshrink_core.archive.document import compress_document, decompress_document, pack_value, unpack_value
from inshrink_core.errors import DamagedError
from inshrink_core.frame import FrameInfo, FrameKind, FramePart

MANIFEST_NAME: Final = "inshrink-manifest"
"""A name no other tool uses, since its presence makes a folder an archive."""

_DIGEST_NBYTES: Final = 32
_N_FIELDS: Final = 10
"""Fields of every manifest; two more say where frames lie in segments, and one how many parts each has."""


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
        Generations whose frames were removed, ascending: a file that bears one is not live.
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
        """Return the manifest after some of its frames were written elsewhere."""
        places = {frame.generation: frame for frame in moved}
        frames = tuple(places.get(frame.generation, frame) for frame in self.frames)
        last = max((layout.file_number(frame.path) for frame in places.values()), default=0)
        return replace(self, frames=frames, next_generation=max(self.next_generation, last + 1))

    def without_frames(self, generations: frozenset[int]) -> Manifest:
        """Return the manifest with those frames buried."""
        return replace(
            self,
            frames=tuple(frame for frame in self.frames if frame.generation not in generations),
            tombstones=tuple(sorted({*self.tombstones, *generations})),
        )

    def pack(self) -> bytes:
        """Return the bytes of the whole file."""
        rows = {frame.frame_id: row for row, frame in enumerate(self.frames)}
        derived = [_derive(self.archive_id, frame) for frame in self.frames]
        columns = [
            [
                None if frame.frame_id == known else frame.frame_id
                for frame, known in zip(self.frames, derived, strict=True)
            ],
            [
                parent if (row := rows.get(frame.parent_id or b"", own)) >= own else row
                for own, frame in enumerate(self.frames)
                for parent in (frame.parent_id,)
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
        """Read and check the bytes of the whole file.

        Raises
        ------
        DamagedError
            Not a manifest, or one that contradicts itself.
        IncompatibleError
            A newer version.
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
    """Yield the segment of each file, 0 for none, and how far it begins behind the one before it there."""
    ends: dict[str, int] = {}
    for file in (file for frame in frames for file in frame.files):
        if file.offset is None:
            yield 0, 0
        else:
            yield layout.file_number(file.path), file.offset - ends.get(file.path, 0)
            ends[file.path] = file.offset + file.nbytes


def _derive(archive_id: bytes, frame: FrameInfo) -> bytes:
    return layout.derive_frame_id(archive_id, frame.parent_id, frame.step, frame.branch, frame.generation)


def _integers(value: Any, low: int, high: int, what: str) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(item) is int and low <= item <= high for item in value):
        raise ValueError(what)
    return value


def _ascending(values: tuple[int, ...], what: str) -> None:
    if any(second <= first for first, second in itertools.pairwise(values)):
        raise ValueError(what)


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == layout.ID_NBYTES and value != layout.NO_ID


def _parse_document(document: Any, header: layout.ManifestHeader) -> Manifest:
    n_fields = _N_FIELDS + 2 * header.has_segments + header.has_parts
    if type(document) is not tuple or len(document) != n_fields:
        raise ValueError("number of fields")
    ids, parents, *columns, digests, tombstones, next_generation = document[:_N_FIELDS]
    steps = _integers(columns[0], 0, layout.MAX_STEP, "steps")
    kinds = _integers(columns[1], 0, 1, "kinds")
    branches = _integers(columns[2], 0, layout.MAX_BRANCH, "branches")
    generations = _integers(columns[3], 1, layout.MAX_GENERATION, "generations")
    sizes = _integers(columns[4], 0, layout.MAX_STEP, "sizes")
    _integers(tombstones, 1, layout.MAX_GENERATION, "tombstones")
    _integers((next_generation,), 1, layout.MAX_GENERATION + 1, "next generation")
    _ascending(generations, "generations")
    _ascending(tombstones, "tombstones")
    if type(ids) is not tuple or type(parents) is not tuple or type(digests) is not bytes:
        raise ValueError("columns")
    counts = _integers(document[-1], 1, layout.MAX_PARTS, "parts") if header.has_parts else (1,) * len(sizes)
    if len({len(ids), len(parents), len(counts), *map(len, columns[:4])}) != 1:
        raise ValueError("columns of unequal length")
    if len(sizes) != sum(counts) or len(digests) != _DIGEST_NBYTES * len(sizes):
        raise ValueError("sizes or digests")
    used = (*generations, *tombstones)
    if len(set(used)) != len(used) or max(used, default=0) >= next_generation:
        raise ValueError("a generation is used twice, or above the next")
    segments = document[_N_FIELDS : _N_FIELDS + 2] if header.has_segments else None
    owners = [generation for generation, count in zip(generations, counts, strict=True) for _ in range(count)]
    places = _parse_places(segments, sizes, owners, next_generation)
    chunks = (digests[at : at + _DIGEST_NBYTES] for at in range(0, len(digests), _DIGEST_NBYTES))
    files = zip(sizes, chunks, places, strict=True)
    frames: list[FrameInfo] = []
    for row, (frame_id, parent) in enumerate(zip(ids, parents, strict=True)):
        parent_id = frames[_row(parent, row)].frame_id if type(parent) is int else parent
        identity = (header.archive_id, parent_id, steps[row], branches[row], generations[row])
        if not (parent_id is None or _is_id(parent_id)) or not (frame_id is None or _is_id(frame_id)):
            raise ValueError("frame ids")
        nbytes, digest, (segment, offset) = next(files) if counts[row] == 1 else (0, b"", ("", None))
        info = FrameInfo(
            frame_id=layout.derive_frame_id(*identity) if frame_id is None else frame_id,
            parent_id=parent_id,
            step=steps[row],
            kind=FrameKind.DELTA if kinds[row] else FrameKind.KEYFRAME,
            branch=branches[row],
            generation=generations[row],
            nbytes=nbytes,
            digest=digest,
            path=segment or layout.frame_path(generations[row], steps[row]),
            offset=offset,
            n_parts=counts[row],
        )
        if counts[row] > 1:
            info = layout.joined(
                [replace(info, parts=_parse_parts(info, itertools.islice(files, counts[row])))]
            )
        frames.append(info)
    return Manifest(
        archive_id=header.archive_id,
        frames=tuple(frames),
        tombstones=tombstones,
        next_generation=next_generation,
    )


def _parse_parts(info: FrameInfo, files: Iterable[Any]) -> tuple[FramePart, ...]:
    """Return the parts of a frame, each a file of its own."""
    parts = []
    for number, (nbytes, digest, (segment, _)) in enumerate(files):
        if segment:
            raise ValueError("a part lies in a segment")
        parts.append(FramePart(number, layout.part_path(info.generation, info.step, number), nbytes, digest))
    return tuple(parts)


def _parse_places(
    columns: Any, sizes: tuple[int, ...], generations: Sequence[int], next_generation: int
) -> Iterator[tuple[str, int | None]]:
    """Yield the segment of each file and where it begins there; "" and None for a file of its own."""
    if columns is None:
        yield from itertools.repeat(("", None), len(sizes))
        return
    segments = _integers(columns[0], 0, layout.MAX_GENERATION, "segments")
    gaps = _integers(columns[1], 0, layout.MAX_SEGMENT_NBYTES, "offsets")
    if not len(segments) == len(gaps) == len(sizes):
        raise ValueError("columns of unequal length")
    ends: dict[int, int] = {}
    for row, (segment, gap) in enumerate(zip(segments, gaps, strict=True)):
        if not segment:
            yield "", None
            continue
        begin = ends.get(segment, 0) + gap
        ends[segment] = begin + sizes[row]
        if sizes[row] > layout.SMALL_FRAME_NBYTES or ends[segment] > layout.MAX_SEGMENT_NBYTES:
            raise ValueError("offsets")
        if not generations[row] <= segment < next_generation:
            raise ValueError("segments")
        yield layout.segment_path(segment), begin


def _row(parent: int, row: int) -> int:
    """Parents come before their children, so a row never refers to itself or ahead."""
    if not 0 <= parent < row:
        raise ValueError("parents")
    return parent
