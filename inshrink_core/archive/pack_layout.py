"""The structs of a packed archive: header, directory and trailer of the one file (docs/format.md).

The files of the archive stand in it one after the other, unchanged. The directory at the end names
them with their lengths; places follow from the lengths, so that files can neither overlap nor hide.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from inshrink_core.archive.document import compress_document, decompress_document, pack_value, unpack_value
from inshrink_core.archive.layout import (
    FORMAT_VERSION,
    FRAME_FOLDER,
    LARGE_ALIGNMENT,
    MAX_DOCUMENT_NBYTES,
    MAX_STEP,
    RESTORE_REMEDY,
    crc32c,
    parse_frame_name,
)
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.errors import DamagedError, IncompatibleError

__all__ = [
    "PACK_HEADER_NBYTES",
    "PACK_MAGIC",
    "PACK_TRAILER_MAGIC",
    "PACK_TRAILER_NBYTES",
    "PackTrailer",
    "PackedFile",
    "align_file",
    "pack_directory",
    "pack_header",
    "parse_directory",
    "parse_header",
]

PACK_MAGIC: Final = b"INSHRNKP"
PACK_TRAILER_MAGIC: Final = b"INSQ"

_CRC: Final = struct.Struct("<I")
_HEADER_FIELDS: Final = struct.Struct("<8sHH")
_TRAILER_FIELDS: Final = struct.Struct("<QQII")

PACK_HEADER_NBYTES: Final = _HEADER_FIELDS.size + _CRC.size
PACK_TRAILER_NBYTES: Final = _TRAILER_FIELDS.size + _CRC.size + len(PACK_TRAILER_MAGIC)


class PackedFile(NamedTuple):
    """Where one file of the archive lies in the packed one."""

    path: str
    offset: int
    nbytes: int


def align_file(offset: int) -> int:
    """Return where a file starts that may not start before `offset`: blocks keep their alignment.

    Examples
    --------
    >>> align_file(16), align_file(128)
    (64, 128)
    """
    return -(-offset // LARGE_ALIGNMENT) * LARGE_ALIGNMENT


def pack_header() -> bytes:
    """Return the first 16 bytes."""
    fields = _HEADER_FIELDS.pack(PACK_MAGIC, FORMAT_VERSION, 0)
    return fields + _CRC.pack(crc32c(fields))


def parse_header(data: bytes, where: str) -> None:
    """Check the first 16 bytes of the file, or what there is of them.

    Raises
    ------
    DamagedError
        Too short, no packed archive, a wrong checksum or a field out of range.
    IncompatibleError
        A newer version.
    """
    if len(data) < PACK_HEADER_NBYTES or not data.startswith(PACK_MAGIC):
        raise DamagedError("this is not a packed archive", where=where, remedy=RESTORE_REMEDY)
    fields = data[: _HEADER_FIELDS.size]
    _, version, flags = _HEADER_FIELDS.unpack(fields)
    if _CRC.unpack_from(data, _HEADER_FIELDS.size)[0] != crc32c(fields):
        raise DamagedError(
            "the checksum of the packed archive's header does not match", where=where, remedy=RESTORE_REMEDY
        )
    if version > FORMAT_VERSION:
        raise IncompatibleError(
            "it was packed by a newer version of Inshrink",
            where=where,
            expected=f"format version {FORMAT_VERSION} or older",
            found=f"{version}",
            remedy="upgrade Inshrink",
        )
    if version == 0 or flags:
        raise DamagedError("a field of the packed archive's header is out of range", where=where)


class PackTrailer(NamedTuple):
    """The last bytes of the file: where its directory lies."""

    directory_offset: int
    file_nbytes: int
    directory_nbytes: int
    directory_raw_nbytes: int

    def pack(self, directory: bytes) -> bytes:
        """Return the 32 bytes; the checksum covers the header, the directory and these fields."""
        fields = _TRAILER_FIELDS.pack(*self)
        return fields + _CRC.pack(crc32c(pack_header(), directory, fields)) + PACK_TRAILER_MAGIC

    @classmethod
    def parse(cls, data: bytes, file_nbytes: int, where: str) -> PackTrailer:
        """Read a trailer and check its lengths against the file's; `check_crc` completes the check.

        Raises
        ------
        DamagedError
            Too short, no trailer, or lengths that do not add up.
        """
        if len(data) != PACK_TRAILER_NBYTES or data[-len(PACK_TRAILER_MAGIC) :] != PACK_TRAILER_MAGIC:
            raise DamagedError(
                "the packed archive has no trailer: it was cut short", where=where, remedy=RESTORE_REMEDY
            )
        trailer = cls(*_TRAILER_FIELDS.unpack_from(data))
        if (
            trailer.file_nbytes != file_nbytes
            or trailer.directory_offset < PACK_HEADER_NBYTES
            or trailer.directory_offset + trailer.directory_nbytes + PACK_TRAILER_NBYTES != file_nbytes
            or trailer.directory_raw_nbytes > MAX_DOCUMENT_NBYTES
        ):
            raise DamagedError(
                "the lengths in the packed archive's trailer do not fit the file",
                where=where,
                expected=f"{trailer.file_nbytes} bytes",
                found=f"{file_nbytes}",
                remedy=RESTORE_REMEDY,
            )
        return trailer

    def check_crc(self, data: bytes, header: bytes, directory: bytes, where: str) -> None:
        """Raise DamagedError unless the checksum in the trailer's bytes `data` is right."""
        fields = data[: _TRAILER_FIELDS.size]
        if _CRC.unpack_from(data, _TRAILER_FIELDS.size)[0] != crc32c(header, directory, fields):
            raise DamagedError(
                "the checksum of the packed archive's directory does not match",
                where=where,
                remedy=RESTORE_REMEDY,
            )


def pack_directory(files: tuple[PackedFile, ...], offset: int) -> bytes:
    """Return the directory and the trailer, which end the file.

    Parameters
    ----------
    files
        In file order.
    offset
        Where the directory starts: right behind the last file.
    """
    raw = pack_value([[file.path for file in files], [file.nbytes for file in files]])
    directory = compress_document(raw)
    file_nbytes = offset + len(directory) + PACK_TRAILER_NBYTES
    return directory + PackTrailer(offset, file_nbytes, len(directory), len(raw)).pack(directory)


def parse_directory(directory: bytes, trailer: PackTrailer, where: str) -> tuple[PackedFile, ...]:
    """Return the files a directory names, in file order.

    Raises
    ------
    DamagedError
        Not a directory, a name that no archive has, or files that do not fill the space before it.
    """
    raw = decompress_document(directory, trailer.directory_raw_nbytes, where)
    document = unpack_value(raw, where, lists=False)
    try:
        files = _placed(document)
    except ValueError as error:
        raise DamagedError(
            f"the packed archive's directory is malformed: {error}", where=where, remedy=RESTORE_REMEDY
        ) from error
    end = files[-1].offset + files[-1].nbytes
    if end != trailer.directory_offset:
        raise DamagedError(
            "the files of the packed archive do not end at its directory",
            where=where,
            expected=f"offset {trailer.directory_offset}",
            found=f"{end}",
            remedy=RESTORE_REMEDY,
        )
    return files


def _placed(document: Any) -> tuple[PackedFile, ...]:
    """Work out where each file lies."""
    if type(document) is not tuple or len(document) != 2:
        raise ValueError("number of fields")
    paths, sizes = document
    if type(paths) is not tuple or type(sizes) is not tuple or len(paths) != len(sizes):
        raise ValueError("columns of unequal length")
    if not all(map(_is_known, paths)):
        raise ValueError("a name that is not one of an archive")
    if len(set(paths)) != len(paths) or MANIFEST_NAME not in paths:
        raise ValueError("a name stands twice, or there is no manifest")
    files, offset = [], PACK_HEADER_NBYTES
    for path, nbytes in zip(paths, sizes, strict=True):
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_STEP:
            raise ValueError("lengths")
        offset = align_file(offset)
        files.append(PackedFile(path, offset, nbytes))
        offset += nbytes
    return tuple(files)


def _is_known(path: object) -> bool:
    """Whether an archive has files of that name: its manifest, and frames."""
    if type(path) is not str:
        return False
    folder, slash, name = path.rpartition("/")
    return path == MANIFEST_NAME or (bool(slash) and folder == FRAME_FOLDER and bool(parse_frame_name(name)))
