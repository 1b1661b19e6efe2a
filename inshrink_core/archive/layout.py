"""The fixed structs of an archive, and the rules that place blocks (docs/format.md).

Each struct is a ``struct.Struct``, a NamedTuple and a `pack`/`parse` pair; no other module uses byte
offsets. All integers are little-endian.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import google_crc32c
import msgspec

from inshrink_core.errors import DamagedError, IncompatibleError
from inshrink_core.frame import FrameInfo, FrameKind, FramePart

FORMAT_VERSION: Final = 1
"""Version of frames, manifests and packed archives."""

_EXTERNAL: Final = 1
"""Flag of a frame: decoding it needs data from outside the archive."""

_SEGMENTS, _PARTS = 1, 2
"""Flags of a manifest: it lists segments, or frames in parts."""

MAX_PARTS: Final = 1 << 16
"""Largest number of parts in a frame, the range of the header's field."""

FRAME_MAGIC: Final = b"INSHRNKF"
MANIFEST_MAGIC: Final = b"INSHRNKM"

ID_NBYTES: Final = 16
NO_ID: Final = bytes(ID_NBYTES)
"""Sixteen zeros: the parent id of a first frame. No frame has this id."""

LARGE_BLOCK_NBYTES: Final = 4096
LARGE_ALIGNMENT: Final = 64
"""A cache line and the widest vector load, so that a memory-mapped block can be used in place."""
SMALL_ALIGNMENT: Final = 8
"""Below a page, padding to 64 bytes costs more than an unaligned start."""

MAX_SMALL_NBYTES: Final = 1 << 16
"""Largest total size of a frame's small blocks, which are read and cached with the index."""

_CRC: Final = struct.Struct("<I")
_FRAME_FIELDS: Final = struct.Struct("<8sHBBI16s16s16sqQHH")
_TRAILER_FIELDS: Final = struct.Struct("<QQII")
_MANIFEST_FIELDS: Final = struct.Struct("<8sHHII16s")

FRAME_HEADER_NBYTES: Final = _FRAME_FIELDS.size + _CRC.size
TRAILER_NBYTES: Final = _TRAILER_FIELDS.size + _CRC.size + 4
MANIFEST_HEADER_NBYTES: Final = _MANIFEST_FIELDS.size + _CRC.size

RESTORE_REMEDY: Final = "restore the file from a backup"
REBUILD_REMEDY: Final = (
    "restore the manifest from a backup, or take the frames that are there for all of them: "
    "`inshrink prune ARCHIVE --forget-missing`"
)

MAX_DOCUMENT_NBYTES: Final = 64 << 20
"""Largest uncompressed index or manifest: about a million blocks in a frame, or frames in an archive."""

MAX_STEP: Final = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
"""Lengths are limited only by the field's width: Python integers do not overflow when summed."""

MAX_BRANCH: Final = (1 << 32) - 1
MAX_GENERATION: Final = (1 << 63) - 1
"""One bit below the field's width, so that the next generation always fits."""

SMALL_FRAME_NBYTES: Final = 1 << 18
"""Largest frame in a segment, and largest small file; a larger file loses at most 1 % in 4 KiB blocks."""

MAX_SEGMENT_NBYTES: Final = 1 << 22
"""Largest segment: read whole if no manifest lists its content, and rewritten if a frame is removed."""

FRAME_FOLDER: Final = "frames"
_STEP: Final = r"-(0|[1-9][0-9]{0,18})(?:\.([0-9]{5}))?\.frame"
_NAME: Final = re.compile(rf"([0-9]{{8,19}})(?:{_STEP}|\.segment)", re.ASCII)

_KINDS: Final = {1: FrameKind.KEYFRAME, 2: FrameKind.DELTA}
_KIND_CODES: Final = {kind: code for code, kind in _KINDS.items()}


_CRC_CHUNK_NBYTES: Final = 1 << 20
"""Bytes copied at a time if a checksum needs a copy; fits a second-level cache."""


def crc32c(*chunks: bytes | memoryview) -> int:
    """Return the CRC-32C (Castagnoli) of the concatenated chunks; memory views must have bytes as items."""
    crc: int = 0
    for chunk in chunks:
        if isinstance(chunk, bytes):
            crc = google_crc32c.extend(crc, chunk)
            continue
        for start in range(0, len(chunk), _CRC_CHUNK_NBYTES):  # the library accepts bytes objects only
            crc = google_crc32c.extend(crc, bytes(chunk[start : start + _CRC_CHUNK_NBYTES]))
    return crc


def align(offset: int, nbytes: int) -> int:
    """Return the first aligned offset, not below `offset`, for a block of `nbytes` bytes.

    Examples
    --------
    >>> align(88, 100), align(88, 4096)
    (88, 128)
    """
    alignment = LARGE_ALIGNMENT if nbytes >= LARGE_BLOCK_NBYTES else SMALL_ALIGNMENT
    return -(-offset // alignment) * alignment


def is_small(nbytes: int, before: int) -> bool:
    """Return whether a block is stored among the small blocks, next to the index.

    Parameters
    ----------
    nbytes
        Length of the block in bytes.
    before
        Total bytes of the small blocks before it.

    Examples
    --------
    >>> is_small(4095, 0), is_small(4096, 0), is_small(100, 65500)
    (True, False, False)
    """
    return nbytes < LARGE_BLOCK_NBYTES and before + nbytes <= MAX_SMALL_NBYTES


def frame_path(generation: int, step: int, part: int | None = None) -> str:
    """Return the path of a frame file, or of a part of a frame in several parts, within the archive.

    Examples
    --------
    >>> frame_path(3, 400), frame_path(3, 400, 2)
    ('frames/00000003-400.frame', 'frames/00000003-400.00002.frame')
    """
    of_part = "" if part is None else f".{part:05d}"
    return f"{FRAME_FOLDER}/{generation:08d}-{step}{of_part}.frame"


def part_path(frame: FrameInfo, part: int) -> str:
    """Return the path of a part of a frame as a separate file."""
    return frame_path(frame.generation, frame.step, part if frame.n_parts > 1 else None)


def parse_name(name: str) -> tuple[int, int | None] | None:
    """Return the generation and step in the name of a frame file; for a segment, its number and None.

    Return None for any other name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    number, step = int(match[1]), None if match[2] is None else int(match[2])
    fits = 1 <= number <= MAX_GENERATION and (step or 0) <= MAX_STEP and int(match[3] or 0) < MAX_PARTS
    return (number, step) if fits and match[1] == f"{number:08d}" else None


def segment_path(number: int) -> str:
    """Return the path of a segment, a file of several frames, within the archive.

    Examples
    --------
    >>> segment_path(64)
    'frames/00000064.segment'
    """
    return f"{FRAME_FOLDER}/{number:08d}.segment"


def file_number(path: str) -> int:
    """Return the generation in the path of a frame file or segment, the highest of its frames.

    Return 0 for any other path.
    """
    parsed = parse_name(path.rpartition("/")[2])
    return parsed[0] if parsed else 0


def derive_frame_id(
    archive_id: bytes, parent_id: bytes | None, step: int, branch: int, generation: int, salt: bytes = b""
) -> bytes:
    """Return the id of a new frame, unique because no generation is used twice.

    `salt` distinguishes the frames of several attempts to write parts of one generation.

    Notes
    -----
    The id is the first 16 bytes of SHA-256 over archive id, parent id, step, branch and generation, packed as
    ``<16s16sqIQ``, followed by the salt.
    """
    identity = struct.pack("<16s16sqIQ", archive_id, parent_id or NO_ID, step, branch, generation)
    return hashlib.sha256(identity + salt).digest()[:ID_NBYTES]


def converted(value: Any, kind: Any) -> Any:
    """Return an unpacked value as a type.

    Raises
    ------
    ValidationError
        The value does not have the type.
    """
    return msgspec.convert(value, kind, builtin_types=(bytes,))


def require(condition: bool, what: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(what)


def damaged(what: str, where: str, **found: str) -> DamagedError:
    """Return the error for a file that only a backup can replace."""
    return DamagedError(what, where=where, remedy=RESTORE_REMEDY, **found)


def sealed(fields: bytes, *chunks: bytes) -> bytes:
    """Return a struct followed by the CRC-32C of `chunks` and the struct."""
    return fields + _CRC.pack(crc32c(*chunks, fields))


def is_sealed(data: bytes, nbytes: int, *chunks: bytes) -> bool:
    """Return whether the checksum behind the first `nbytes` bytes covers `chunks` and these bytes."""
    return bool(_CRC.unpack_from(data, nbytes)[0] == crc32c(*chunks, data[:nbytes]))


def unpack_header(fields: struct.Struct, magic: bytes, name: str, data: bytes, where: str) -> tuple[Any, ...]:
    """Return the fields after the magic of a sealed struct at the beginning of a file.

    Raises
    ------
    DamagedError
        The data are too short, or magic or checksum are wrong.
    """
    if len(data) < fields.size + _CRC.size or not data.startswith(magic):
        raise damaged(f"this is not a {name}: it is too short, or its magic is wrong", where)
    if not is_sealed(data, fields.size):
        raise damaged(f"the checksum of the {name}'s header does not match", where)
    return fields.unpack_from(data)[1:]


def newer(where: str, expected: str, found: str, made: str = "written") -> IncompatibleError:
    """Return the error for data that only a newer version can read."""
    return IncompatibleError(
        f"it was {made} by a newer version of Inshrink",
        where=where,
        expected=expected,
        found=found,
        remedy="upgrade Inshrink",
    )


def check_version(version: int, where: str, made: str = "written") -> None:
    """Refuse newer versions, and version 0, which does not exist."""
    if version > FORMAT_VERSION:
        raise newer(where, f"format version {FORMAT_VERSION}", str(version), made)
    if version == 0:
        raise DamagedError("format version 0 does not exist", where=where)


class FrameHeader(NamedTuple):
    """The first 88 bytes of a frame file: the identity of the frame, whose files are left out.

    `external` is True if decoding needs data from outside the archive. `part` counts from 0.
    """

    archive_id: bytes
    frame: FrameInfo
    part: int = 0
    external: bool = False

    @property
    def path(self) -> str:
        """The path of the frame as a separate file."""
        return part_path(self.frame, self.part)

    def pack(self) -> bytes:
        """Return the 88 bytes."""
        frame = self.frame
        fields = _FRAME_FIELDS.pack(
            FRAME_MAGIC,
            FORMAT_VERSION,
            _KIND_CODES[frame.kind],
            _EXTERNAL if self.external else 0,
            frame.branch,
            self.archive_id,
            frame.frame_id,
            frame.parent_id or NO_ID,
            frame.step,
            frame.generation,
            self.part,
            frame.n_parts - 1,
        )
        return sealed(fields)

    @classmethod
    def parse(cls, data: bytes, where: str) -> FrameHeader:
        """Read and check a header; `data` is the first 88 bytes of the file, or fewer if it is shorter.

        Raises
        ------
        DamagedError
            The data are too short or not a frame, the checksum is wrong, or a field is out of range.
        IncompatibleError
            The frame has a newer version.
        """
        version, kind, flags, branch, archive_id, frame_id, parent_id, step, generation, part, last = (
            unpack_header(_FRAME_FIELDS, FRAME_MAGIC, "frame", data, where)
        )
        check_version(version, where)
        parent = None if parent_id == NO_ID else parent_id
        sound = (
            kind in _KINDS
            and flags in (0, _EXTERNAL)
            and part <= last
            and frame_id not in (NO_ID, parent_id)
            and step >= 0
            and 1 <= generation <= MAX_GENERATION
            and ((parent is not None and not flags) or _KINDS[kind] is FrameKind.KEYFRAME)
        )
        if not sound:
            raise damaged("a field of the frame's header is out of range", where)
        frame = FrameInfo(frame_id, parent, step, _KINDS[kind], branch, generation, last + 1, ())
        return cls(archive_id, frame, part, bool(flags))

    def listed(self, nbytes: int, digest: bytes = b"") -> FrameInfo:
        """Return the frame with this part as a separate file; an empty digest means unknown."""
        return replace(self.frame, files=(FramePart(self.part, self.path, nbytes, digest),))


def joined(parts: Iterable[FrameInfo]) -> FrameInfo:
    """Return the frame that the given parts make up, ordered by part number."""
    rows = sorted(parts, key=lambda row: row.files[0].number)
    return replace(rows[0], files=tuple(file for row in rows for file in row.files))


class FileKind(NamedTuple):
    """A kind of file that ends with a compressed document and a trailer, and its name in messages.

    Up to `max_before` bytes before the document belong to it: the checksum covers them, and the trailer's
    offset is their start.
    """

    name: str
    magic: bytes
    header_nbytes: int
    max_before: int = 0


FRAME: Final = FileKind("frame", b"INSE", FRAME_HEADER_NBYTES, MAX_SMALL_NBYTES)


class Trailer(NamedTuple):
    """The last bytes of a frame or packed archive: the place of its document (index or directory)."""

    offset: int
    file_nbytes: int
    nbytes: int
    raw_nbytes: int

    def pack(self, kind: FileKind, header: bytes, document: bytes) -> bytes:
        """Return the 32 bytes; the checksum covers header, `document` and these fields."""
        return sealed(_TRAILER_FIELDS.pack(*self), header, document) + kind.magic

    @classmethod
    def parse(cls, kind: FileKind, data: bytes, file_nbytes: int, where: str) -> Trailer:
        """Read a trailer and check its lengths against the file's; `covers` completes the check.

        Raises
        ------
        DamagedError
            The data are too short or not a trailer, or the lengths do not add up.
        """
        if len(data) != TRAILER_NBYTES or not data.endswith(kind.magic):
            raise damaged(f"the {kind.name} has no trailer: it was cut short", where)
        trailer = cls(*_TRAILER_FIELDS.unpack_from(data))
        if (
            trailer.file_nbytes != file_nbytes
            or trailer.offset < kind.header_nbytes
            or not 0 <= file_nbytes - trailer.offset - trailer.nbytes - TRAILER_NBYTES <= kind.max_before
            or trailer.raw_nbytes > MAX_DOCUMENT_NBYTES
        ):
            raise damaged(
                f"the lengths in the {kind.name}'s trailer do not fit the file",
                where,
                expected=f"{trailer.file_nbytes} bytes",
                found=f"{file_nbytes}",
            )
        return trailer

    @staticmethod
    def covers(data: bytes, header: bytes, document: bytes) -> bool:
        """Return whether the checksum in the trailer bytes `data` matches."""
        return is_sealed(data, _TRAILER_FIELDS.size, header, document)


def trailed_spans(kind: FileKind, content: bytes) -> dict[int, int]:
    """Return the start and first end of every span that a trailer of this kind describes."""
    spans: dict[int, int] = {}
    end = content.find(kind.magic) + len(kind.magic)
    while end >= len(kind.magic):
        if end >= TRAILER_NBYTES:
            begin = end - _TRAILER_FIELDS.unpack_from(content, end - TRAILER_NBYTES)[1]
            if begin >= 0:
                spans.setdefault(begin, end)
        end = content.find(kind.magic, end) + len(kind.magic)
    return spans


class ManifestHeader(NamedTuple):
    """The first bytes of the manifest; a zstd-compressed msgpack document follows."""

    archive_id: bytes
    payload_nbytes: int
    payload_raw_nbytes: int
    has_segments: bool = False
    has_parts: bool = False

    def pack(self, payload: bytes) -> bytes:
        """Return the 40 bytes; the checksum covers these fields and the payload."""
        fields = _MANIFEST_FIELDS.pack(
            MANIFEST_MAGIC,
            FORMAT_VERSION,
            self.has_segments * _SEGMENTS + self.has_parts * _PARTS,
            self.payload_nbytes,
            self.payload_raw_nbytes,
            self.archive_id,
        )
        return fields + _CRC.pack(crc32c(fields, payload))

    @classmethod
    def parse(cls, data: bytes, where: str) -> ManifestHeader:
        """Read and check a header, given the whole file.

        Raises
        ------
        DamagedError
            Too short, not a manifest, a wrong checksum, or a length that does not fit the file.
        IncompatibleError
            The manifest has a newer version.
        """
        problem = partial(DamagedError, where=where, remedy=REBUILD_REMEDY)
        if len(data) < MANIFEST_HEADER_NBYTES or data[:8] != MANIFEST_MAGIC:
            raise problem("this is not a manifest")
        fields, payload = data[: _MANIFEST_FIELDS.size], data[MANIFEST_HEADER_NBYTES:]
        _, version, flags, nbytes, raw_nbytes, archive_id = _MANIFEST_FIELDS.unpack(fields)
        if _CRC.unpack_from(data, _MANIFEST_FIELDS.size)[0] != crc32c(fields, payload):
            raise problem("the checksum of the manifest does not match")
        check_version(version, where)
        if flags & ~(_SEGMENTS | _PARTS) or nbytes != len(payload) or raw_nbytes > MAX_DOCUMENT_NBYTES:
            raise problem("a field of the manifest's header is out of range")
        return cls(archive_id, nbytes, raw_nbytes, bool(flags & _SEGMENTS), bool(flags & _PARTS))
