"""Read a packed archive: one file that serves the files of an archive folder by byte ranges."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from inshrink_core.archive import layout
from inshrink_core.archive.document import compress_document, decompress_document, pack_value, unpack_value
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.archive.storage.contract import RangeFile, Storage
from inshrink_core.errors import DamagedError

PACK_MAGIC: Final = b"INSHRNKP"

_HEADER_FIELDS: Final = struct.Struct("<8sHH")

PACK_HEADER_NBYTES: Final = _HEADER_FIELDS.size + 4
PACKED: Final = layout.FileKind("packed archive", b"INSQ", PACK_HEADER_NBYTES)

_SUFFIX_NBYTES: Final = 64 << 10
"""First read at the end: trailer, directory and a manifest of some hundred frames, in one request."""


def is_packed(file: RangeFile) -> bool:
    """Return whether a file is a packed archive, by its first bytes or, if these are damaged, by its last."""
    if file.read(0, len(PACK_MAGIC)) == PACK_MAGIC:
        return True
    return file.read(max(0, file.nbytes - len(PACKED.magic)), len(PACKED.magic)) == PACKED.magic


class PackedStorage(Storage):
    """The read-only storage of a packed archive.

    Parameters
    ----------
    file
        The packed archive.

    Raises
    ------
    DamagedError
        Header, directory or trailer are invalid.
    IncompatibleError
        A newer version packed it.

    Notes
    -----
    Opening takes two simultaneous reads, of the first 16 bytes and of the last 64 KiB. Content of the latter,
    which includes the manifest of most archives, is not read again.
    """

    writable = False

    def __init__(self, file: RangeFile) -> None:
        super().__init__(file.name)
        self._file, self.n_at_once = file, file.storage.n_at_once
        start = self._suffix_offset = max(file.nbytes - _SUFFIX_NBYTES, PACK_HEADER_NBYTES)
        spans = (0, min(PACK_HEADER_NBYTES, file.nbytes)), (start, file.nbytes - start)
        header, self._suffix = self.together([partial(self._fetch, *span) for span in spans])
        for content in (header, self._suffix):
            if isinstance(content, Exception):
                raise content
            version, flags = layout.unpack_header(_HEADER_FIELDS, PACK_MAGIC, PACKED.name, header, self.name)
            layout.check_version(version, self.name, "packed")
            if flags:
                what = "a field of the packed archive's header is out of range"
                raise DamagedError(what, where=self.name)
        tail = self._suffix[-layout.TRAILER_NBYTES :]
        trailer = layout.Trailer.parse(PACKED, tail, file.nbytes, self.name)
        directory = self._range(trailer.offset, trailer.nbytes)
        if not trailer.covers(tail, header, directory):
            raise layout.damaged("the checksum of the packed archive's directory does not match", self.name)
        self._files = {file.path: file for file in parse_directory(directory, trailer, self.name)}

    @property
    def overhead_nbytes(self) -> int:
        """Bytes of the file outside the archive's files: header, padding, directory and trailer."""
        return self._file.nbytes - sum(found.nbytes for found in self._files.values())

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, or fewer at the end of the contained file."""
        found = self._files.get(path)
        if found is None:
            raise FileNotFoundError(path)
        return self._range(found.offset + offset, max(0, min(nbytes, found.nbytes - offset)))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path].nbytes

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        parts = [path.rpartition("/") for path in self._files]
        return tuple(name for parent, _, name in parts if parent == folder)

    def stray_padding(self) -> tuple[str, ...]:
        """Return the files whose padding has bytes other than zero."""
        end, found = PACK_HEADER_NBYTES, []
        for packed in self._files.values():
            if any(self._range(end, align_file(end) - end)):
                found.append(packed.path)
            end = packed.offset + packed.nbytes
        return tuple(found)

    def together(self, calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        """Run calls at the same time and return their results."""
        return self._file.storage.together(calls)

    def _range(self, offset: int, nbytes: int) -> bytes:
        """Return a span of the packed file, from the first read if that covers it."""
        begin = offset - self._suffix_offset
        return self._fetch(offset, nbytes) if begin < 0 else self._suffix[begin : begin + nbytes]

    def _fetch(self, offset: int, nbytes: int) -> bytes:
        content = self.counted(self._file.read(offset, nbytes))
        if len(content) != nbytes:
            raise DamagedError(
                f"the packed archive ends early, at offset {offset + len(content)}", where=self.name
            )
        return content


class PackedFile(NamedTuple):
    """The place of a file in the packed archive."""

    path: str
    offset: int
    nbytes: int


def align_file(offset: int) -> int:
    """Return the first multiple of 64 not below `offset`, the start of a file, so that blocks stay aligned.

    Examples
    --------
    >>> align_file(16), align_file(128)
    (64, 128)
    """
    return -(-offset // layout.LARGE_ALIGNMENT) * layout.LARGE_ALIGNMENT


def pack_header() -> bytes:
    """Return the first 16 bytes."""
    return layout.sealed(_HEADER_FIELDS.pack(PACK_MAGIC, layout.FORMAT_VERSION, 0))


def pack_directory(files: tuple[PackedFile, ...], offset: int) -> bytes:
    """Return the directory and the trailer, which end the file.

    Parameters
    ----------
    files
        The files, in file order.
    offset
        Where the directory starts: right after the last file.
    """
    raw = pack_value([[file.path for file in files], [file.nbytes for file in files]])
    directory = compress_document(raw)
    trailer = layout.Trailer(
        offset, offset + len(directory) + layout.TRAILER_NBYTES, len(directory), len(raw)
    )
    return directory + trailer.pack(PACKED, pack_header(), directory)


def parse_directory(directory: bytes, trailer: layout.Trailer, where: str) -> tuple[PackedFile, ...]:
    """Return the files that a directory names, in file order.

    Raises
    ------
    DamagedError
        The directory is malformed, has a name that no archive uses, or its files do not fill the space
        before it.
    """
    raw = decompress_document(directory, trailer.raw_nbytes, where)
    document = unpack_value(raw, where, lists=False)
    files: list[PackedFile] = []
    end = PACK_HEADER_NBYTES
    try:
        paths, sizes = layout.converted(document, tuple[tuple[str, ...], tuple[layout.Count, ...]])
        for path, nbytes in zip(paths, sizes, strict=True):
            files.append(PackedFile(path, align_file(end), nbytes))
            end = files[-1].offset + nbytes
    except (ValueError, msgspec.ValidationError) as error:
        raise layout.damaged(f"the packed archive's directory is malformed: {error}", where) from error
    if not all(map(_is_known, paths)) or len(set(paths)) != len(paths) or MANIFEST_NAME not in paths:
        raise layout.damaged("the packed archive's directory has other names than an archive", where)
    if end != trailer.offset:
        raise layout.damaged(
            "the files of the packed archive do not end at its directory",
            where,
            expected=f"offset {trailer.offset}",
            found=f"{end}",
        )
    return tuple(files)


def _is_known(path: str) -> bool:
    """Return whether the path is that of a manifest or frame file."""
    folder, _, name = path.rpartition("/")
    parsed = layout.parse_name(name) if folder == layout.FRAME_FOLDER else None
    return path == MANIFEST_NAME or (parsed is not None and parsed[1] is not None)
