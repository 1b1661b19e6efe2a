"""Several small frames in one file: a segment is written once, whole and durable, as a frame file is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from inshrink_core.archive.durable import write_durably
from inshrink_core.archive.layout import (
    MAX_SEGMENT_NBYTES,
    SMALL_FRAME_NBYTES,
    frame_path,
    segment_path,
)
from inshrink_core.archive.manifest import Manifest
from inshrink_core.archive.storage import LocalStorage, frame_chunks, is_sound
from inshrink_core.frame import FrameInfo

__all__ = ["MAX_SMALL_FILES", "gathered", "parts", "placed", "small_files", "write_together"]

MAX_SMALL_FILES: Final = 64
"""An archive of so few has nothing to gain; where there are more, they are written together."""


def parts(frames: Iterable[FrameInfo]) -> Iterator[tuple[FrameInfo, ...]]:
    """Yield frames that may share a file, in their order; a larger one stands alone."""
    part: list[FrameInfo] = []
    nbytes = 0
    for frame in frames:
        small = frame.nbytes <= SMALL_FRAME_NBYTES
        if part and not (small and nbytes + frame.nbytes <= MAX_SEGMENT_NBYTES):
            yield tuple(part)
            part, nbytes = [], 0
        part.append(frame)
        nbytes += frame.nbytes if small else MAX_SEGMENT_NBYTES
    if part:
        yield tuple(part)


def placed(part: Sequence[FrameInfo], number: int) -> tuple[FrameInfo, ...]:
    """Return frames as they lie in one file: a segment, or a file of its own where there is one frame."""
    if len(part) == 1:
        return (replace(part[0], path=frame_path(part[0].generation, part[0].step), offset=None),)
    offset, found = 0, []
    for frame in part:
        found.append(replace(frame, path=segment_path(number), offset=offset))
        offset += frame.nbytes
    return tuple(found)


def write_together(
    root: Path, part: Sequence[FrameInfo], contents: Iterable[bytes], number: int
) -> tuple[FrameInfo, ...]:
    """Write frames one after another into a new file, and return them with their places.

    The file and its name are durable when this returns; after an error it is not there.
    """
    found = placed(part, number)
    path = root / found[0].path
    try:
        write_durably(path, b"".join(contents))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return found


def small_files(manifest: Manifest) -> list[list[FrameInfo]]:
    """Return the frames of each file that is small."""
    files: dict[str, list[FrameInfo]] = {}
    for frame in manifest.frames:
        files.setdefault(frame.path, []).append(frame)
    return [frames for frames in files.values() if sum(f.nbytes for f in frames) <= SMALL_FRAME_NBYTES]


def gathered(root: Path, manifest: Manifest, files: Iterable[Sequence[FrameInfo]]) -> Manifest:
    """Write the frames of some files into as few new ones, and return the manifest that says so.

    A file of which a frame is gone or damaged stays as it is. The manifest is not written, and no file
    deleted; after an error no new one is there.
    """
    storage = LocalStorage(root)
    sound = [frame for file in files if all(is_sound(storage, f) for f in file) for frame in file]
    made: list[Path] = []
    try:
        for part in parts(sorted(sound, key=lambda frame: frame.generation)):
            if len(part) == 1 and part[0].offset is None:
                continue
            contents = [b"".join(frame_chunks(storage, frame, frame.nbytes)) for frame in part]
            found = write_together(root, part, contents, manifest.next_generation)
            made.append(root / found[0].path)
            manifest = manifest.with_places(found)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    return manifest
