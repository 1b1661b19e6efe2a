"""The manifest: which frames are live, in commit order, and which generations were removed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from inshrink_core.archive.document import compress_document, decompress_document, pack_value, unpack_value
from inshrink_core.archive.layout import (
    ID_NBYTES,
    MANIFEST_HEADER_NBYTES,
    MAX_BRANCH,
    MAX_GENERATION,
    MAX_SEGMENT_NBYTES,
    MAX_STEP,
    NO_ID,
    REBUILD_REMEDY,
    SMALL_FRAME_NBYTES,
    ManifestHeader,
    derive_frame_id,
    file_number,
    frame_path,
    segment_path,
)
from inshrink_core.errors import DamagedError
from inshrink_core.frame import FrameInfo, FrameKind

MANIFEST_NAME: Final = "inshrink-manifest"
"""A name no other tool uses, since its presence makes a folder an archive."""

_DIGEST_NBYTES: Final = 32
_N_FIELDS: Final = 10
"""Fields of every manifest; where frames lie in segments, two more say where."""


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
        last = max((file_number(frame.path) for frame in places.values()), default=0)
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
            [frame.nbytes for frame in self.frames],
            b"".join(frame.digest for frame in self.frames),
            self.tombstones,
            self.next_generation,
        ]
        has_segments = any(frame.offset is not None for frame in self.frames)
        if has_segments:
            columns += zip(*_places(self.frames), strict=True)
        raw = pack_value(columns)
        payload = compress_document(raw)
        return ManifestHeader(self.archive_id, len(payload), len(raw), has_segments).pack(payload) + payload

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Read and check the bytes of the whole file.

        Raises
        ------
        DamagedError
            Not a manifest, or one that contradicts itself.
        IncompatibleError
            A newer version, or frames in parts.
        """
        header = ManifestHeader.parse(data, where)
        raw = decompress_document(data[MANIFEST_HEADER_NBYTES:], header.payload_raw_nbytes, where)
        document = unpack_value(raw, where, lists=False)
        try:
            return _parse_document(document, header.archive_id, header.has_segments)
        except (ValueError, TypeError) as error:
            raise DamagedError(
                f"the manifest is malformed: {error}", where=where, remedy=REBUILD_REMEDY
            ) from error


def _places(frames: Iterable[FrameInfo]) -> Iterator[tuple[int, int]]:
    """Yield the segment of each frame, 0 for none, and how far it begins behind the one before it there."""
    ends: dict[str, int] = {}
    for frame in frames:
        if frame.offset is None:
            yield 0, 0
        else:
            yield file_number(frame.path), frame.offset - ends.get(frame.path, 0)
            ends[frame.path] = frame.offset + frame.nbytes


def _derive(archive_id: bytes, frame: FrameInfo) -> bytes:
    return derive_frame_id(archive_id, frame.parent_id, frame.step, frame.branch, frame.generation)


def _integers(value: Any, low: int, high: int, what: str) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(item) is int and low <= item <= high for item in value):
        raise ValueError(what)
    return value


def _ascending(values: tuple[int, ...], what: str) -> None:
    if any(second <= first for first, second in itertools.pairwise(values)):
        raise ValueError(what)


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == ID_NBYTES and value != NO_ID


def _parse_document(document: Any, archive_id: bytes, has_segments: bool) -> Manifest:
    if type(document) is not tuple or len(document) != _N_FIELDS + 2 * has_segments:
        raise ValueError("number of fields")
    ids, parents, *columns, digests, tombstones, next_generation = document[:_N_FIELDS]
    steps = _integers(columns[0], 0, MAX_STEP, "steps")
    kinds = _integers(columns[1], 0, 1, "kinds")
    branches = _integers(columns[2], 0, MAX_BRANCH, "branches")
    generations = _integers(columns[3], 1, MAX_GENERATION, "generations")
    sizes = _integers(columns[4], 0, MAX_STEP, "sizes")
    _integers(tombstones, 1, MAX_GENERATION, "tombstones")
    _integers((next_generation,), 1, MAX_GENERATION + 1, "next generation")
    _ascending(generations, "generations")
    _ascending(tombstones, "tombstones")
    if type(ids) is not tuple or type(parents) is not tuple or type(digests) is not bytes:
        raise ValueError("columns")
    if len({len(ids), len(parents), len(digests) // _DIGEST_NBYTES, *map(len, columns)}) != 1:
        raise ValueError("columns of unequal length")
    if len(digests) % _DIGEST_NBYTES:
        raise ValueError("digests")
    used = (*generations, *tombstones)
    if len(set(used)) != len(used) or max(used, default=0) >= next_generation:
        raise ValueError("a generation is used twice, or above the next")
    places = list(_parse_places(document[_N_FIELDS:], sizes, generations, next_generation))
    frames: list[FrameInfo] = []
    for row, (frame_id, parent) in enumerate(zip(ids, parents, strict=True)):
        parent_id = frames[_row(parent, row)].frame_id if type(parent) is int else parent
        identity = (archive_id, parent_id, steps[row], branches[row], generations[row])
        if not (parent_id is None or _is_id(parent_id)) or not (frame_id is None or _is_id(frame_id)):
            raise ValueError("frame ids")
        frames.append(
            FrameInfo(
                frame_id=derive_frame_id(*identity) if frame_id is None else frame_id,
                parent_id=parent_id,
                step=steps[row],
                kind=FrameKind.DELTA if kinds[row] else FrameKind.KEYFRAME,
                branch=branches[row],
                generation=generations[row],
                nbytes=sizes[row],
                digest=digests[row * _DIGEST_NBYTES : (row + 1) * _DIGEST_NBYTES],
                path=places[row][0] or frame_path(generations[row], steps[row]),
                offset=places[row][1],
            )
        )
    return Manifest(
        archive_id=archive_id,
        frames=tuple(frames),
        tombstones=tombstones,
        next_generation=next_generation,
    )


def _parse_places(
    columns: Any, sizes: tuple[int, ...], generations: tuple[int, ...], next_generation: int
) -> Iterator[tuple[str, int | None]]:
    """Yield the segment of each frame and where it begins there; "" and None for a file of its own."""
    if not columns:
        yield from itertools.repeat(("", None), len(sizes))
        return
    segments = _integers(columns[0], 0, MAX_GENERATION, "segments")
    gaps = _integers(columns[1], 0, MAX_SEGMENT_NBYTES, "offsets")
    if not len(segments) == len(gaps) == len(sizes):
        raise ValueError("columns of unequal length")
    ends: dict[int, int] = {}
    for row, (segment, gap) in enumerate(zip(segments, gaps, strict=True)):
        if not segment:
            yield "", None
            continue
        begin = ends.get(segment, 0) + gap
        ends[segment] = begin + sizes[row]
        if sizes[row] > SMALL_FRAME_NBYTES or ends[segment] > MAX_SEGMENT_NBYTES:
            raise ValueError("offsets")
        if not generations[row] <= segment < next_generation:
            raise ValueError("segments")
        yield segment_path(segment), begin


def _row(parent: int, row: int) -> int:
    """Parents stand before their children, so a row never refers to itself or ahead."""
    if not 0 <= parent < row:
        raise ValueError("parents")
    return parent
