"""Archives taken apart and put together again with every checksum right, whatever is in them.

A frame or a manifest is read with the engine's own structs from a sound archive; what is written is
not checked by anything, so that a hostile value reaches the code behind the checksums.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import zstandard

from benchmarks.fuzz.runs import Files
from inshrink_core.archive.document import compress_document, decompress_document
from inshrink_core.archive.index import INDEX_DICTIONARY, IndexBuilder
from inshrink_core.archive.layout import (
    FRAME,
    FRAME_HEADER_NBYTES,
    MANIFEST_HEADER_NBYTES,
    TRAILER_NBYTES,
    FrameHeader,
    ManifestHeader,
    Trailer,
    align,
    crc32c,
    frame_path,
    is_small,
    segment_path,
)
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.packed import PACKED, align_file, pack_header, parse_directory

_LENGTHS: Final = 3
_CRCS: Final = 4
"""Where lengths and checksums stand in an index."""

_GENERATIONS: Final = 5
_SIZES: Final = 6
_DIGESTS: Final = 7

_SEGMENTS: Final = 10
"""Columns of a manifest that a changed frame changes; and where those begin that say where frames lie."""

_DIGEST_NBYTES: Final = 32


@dataclass
class OpenFrame:
    """A frame whose parts may be changed before it is sealed again."""

    header: FrameHeader
    index: list[Any]
    blocks: list[bytes]

    @classmethod
    def parse(cls, data: bytes) -> OpenFrame:
        """Take a sound frame apart."""
        header = FrameHeader.parse(data[:FRAME_HEADER_NBYTES], "")
        trailer = Trailer.parse(FRAME, data[-TRAILER_NBYTES:], len(data), "")
        at = len(data) - TRAILER_NBYTES - trailer.nbytes
        raw = decompress_document(data[at:-TRAILER_NBYTES], trailer.raw_nbytes, "", INDEX_DICTIONARY)
        index = msgpack.unpackb(raw, raw=False, strict_map_key=False)
        return cls(header, index, _blocks(data, index[_LENGTHS], trailer.offset))

    def fit_index(self) -> None:
        """Write lengths and checksums of the blocks into the index."""
        _, large, lengths = self._placed()
        self.index[_LENGTHS] = lengths
        self.index[_CRCS] = struct.pack(f"<{len(large)}I", *map(crc32c, large))

    def _placed(self) -> tuple[bytes, list[bytes], list[int]]:
        """Return the small blocks, the large ones, and what the index says of lengths."""
        builder = IndexBuilder()
        large = [block for block in self.blocks if builder.add(("", "", ()), block, None) is not None]
        index = builder.finish({})
        lengths = [2 * entry.back + 1 if entry.back else 2 * entry.nbytes for entry in index.entries]
        return index.small, large, lengths

    def seal(self) -> bytes:
        """Return the file; the index is taken as it is, fitting or not."""
        content = bytearray(self.header.pack())
        head = bytes(content)
        small, large, _ = self._placed()
        for block in large:
            content += bytes(align(len(content), len(block)) - len(content)) + block
        raw = packed(self.index)
        document = compress_document(raw, INDEX_DICTIONARY)
        size = len(content) + len(small) + len(document) + TRAILER_NBYTES
        trailer = Trailer(len(content), size, len(document), len(raw))
        tail = small + document
        return bytes(content) + tail + trailer.pack(FRAME, head, tail)


def _blocks(data: bytes, lengths: list[int], small_at: int) -> list[bytes]:
    """Return the blocks of a frame."""
    blocks: list[bytes] = []
    offset, n_small = FRAME_HEADER_NBYTES, 0
    for value in lengths:
        nbytes = value >> 1
        if value & 1:
            blocks.append(blocks[-nbytes])
        elif is_small(nbytes, n_small):
            blocks.append(data[small_at + n_small : small_at + n_small + nbytes])
            n_small += nbytes
        else:
            offset = align(offset, nbytes)
            blocks.append(data[offset : offset + nbytes])
            offset += nbytes
    return blocks


def packed(value: Any) -> bytes:
    """Return msgpack bytes of any value; what msgpack cannot hold becomes text."""
    found: bytes = msgpack.packb(value, use_bin_type=True, default=str)
    return found


def packed_files(files: Files) -> bytes:
    """Return files as one input."""
    return zlib.compress(packed(files))


def unpacked_files(data: bytes) -> Files:
    """Return the files that an input holds."""
    found: Files = msgpack.unpackb(zlib.decompress(data), raw=False)
    return found


def bounded(value: Any) -> Any:
    """Return a value whose integers msgpack can hold."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return min(max(value, -(1 << 63)), (1 << 64) - 1)
    if isinstance(value, list | tuple):
        return [bounded(item) for item in value]
    if isinstance(value, dict):
        return {str(key): bounded(item) for key, item in value.items()}
    return value


def open_manifest(data: bytes) -> tuple[bytes, list[Any]]:
    """Return the archive's id and the columns of a sound manifest."""
    header = ManifestHeader.parse(data, "")
    return header.archive_id, msgpack.unpackb(zstandard.decompress(data[MANIFEST_HEADER_NBYTES:]), raw=False)


def seal_manifest(archive_id: bytes, columns: Any, has_segments: bool = False) -> bytes:
    """Return the file of a manifest."""
    raw = packed(columns)
    payload = zstandard.compress(raw)
    return ManifestHeader(archive_id, len(payload), len(raw), has_segments).pack(payload) + payload


def has_segments(files: Files) -> bool:
    """Tell whether frames of a sound archive lie in segments."""
    return ManifestHeader.parse(files[MANIFEST_NAME], "").has_segments


def loosened(files: Files) -> Files:
    """Return a sound archive with each frame as a file of its own."""
    archive_id, columns = open_manifest(files[MANIFEST_NAME])
    loose = {MANIFEST_NAME: seal_manifest(archive_id, columns[:_SEGMENTS])}
    for frame in Manifest.parse(files[MANIFEST_NAME], "").frames:
        begin = frame.offset or 0
        loose[frame_path(frame.generation, frame.step)] = files[frame.path][begin : begin + frame.nbytes]
    return loose


def joined(loose: Files, files: Files) -> Files:
    """Return loose frames in the segments that those of another archive of as many lie in."""
    archive_id, columns = open_manifest(loose[MANIFEST_NAME])
    places = open_manifest(files[MANIFEST_NAME])[1][_SEGMENTS:]
    changed = {MANIFEST_NAME: seal_manifest(archive_id, [*columns, *places], has_segments=True)}
    for row, number in enumerate(places[0]):
        path = frame_path(columns[_GENERATIONS][row], columns[2][row])
        target = segment_path(number) if number else path
        changed[target] = changed.get(target, b"") + loose[path]
    return changed


def refit_manifest(manifest: bytes, frames: Files) -> bytes:
    """Return the manifest with the size and digest of every frame as it now is, by path."""
    archive_id, columns = open_manifest(manifest)
    digests = bytearray(columns[_DIGESTS])
    for row, generation in enumerate(columns[_GENERATIONS]):
        content = frames.get(frame_path(generation, columns[2][row]))
        if content is not None:
            columns[_SIZES][row] = len(content)
            at = row * _DIGEST_NBYTES
            digests[at : at + _DIGEST_NBYTES] = hashlib.sha256(content).digest()
    columns[_DIGESTS] = bytes(digests)
    return seal_manifest(archive_id, columns)


def is_packed_name(files: Files) -> bool:
    """Tell whether these are the one file of a packed archive."""
    return MANIFEST_NAME not in files


def unpacked(data: bytes) -> Files:
    """Return the files of a sound packed archive."""
    trailer = Trailer.parse(PACKED, data[-TRAILER_NBYTES:], len(data), "")
    directory = data[trailer.offset : trailer.offset + trailer.nbytes]
    return {
        found.path: data[found.offset : found.offset + found.nbytes]
        for found in parse_directory(directory, trailer, "")
    }


def repacked(files: Files, directory: Any = None) -> bytes:
    """Return a packed archive of these files; `directory` takes the place of what it should say."""
    content = bytearray(pack_header())
    for data in files.values():
        content += bytes(align_file(len(content)) - len(content)) + data
    document = [list(files), [len(data) for data in files.values()]] if directory is None else directory
    raw = packed(document)
    squeezed = zstandard.compress(raw)
    size = len(content) + len(squeezed) + TRAILER_NBYTES
    trailer = Trailer(len(content), size, len(squeezed), len(raw))
    return bytes(content) + squeezed + trailer.pack(PACKED, pack_header(), squeezed)
