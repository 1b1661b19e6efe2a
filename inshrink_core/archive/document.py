"""Small structured documents (frame index, manifest, metadata): canonical msgpack, compressed by zstd.

Writing is deterministic. Reading is bounded: the parser walks a document's structure without allocation
before it creates objects, so memory is proportional to the bytes present.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack
import zstandard

from inshrink_core.archive.layout import MAX_DOCUMENT_NBYTES, damaged
from inshrink_core.errors import InputError

_STRONG_LEVEL: Final = 19
_FAST_LEVEL: Final = 3
_STRONG_LIMIT_NBYTES: Final = 1 << 20
"""Above 1 MiB, level 19 takes about a second; indexes of usual models are far smaller."""

_MAX_WINDOW_NBYTES: Final = 128 << 20
"""The default limit of zstd decoders (ZSTD_WINDOWLOG_LIMIT_DEFAULT = 27)."""

_MAX_OBJECTS_NBYTES: Final = 512 << 20
"""Most memory that the objects of a document may take (docs/format.md, Documents). The index of half a
million tensors with names of 40 letters takes a third of it; a document of nothing but empty maps would
take 4 GB, and compress to a few kB.
"""

_CONTAINER_NBYTES: Final = 64
"""Cost of an empty map, or of a one-item sequence and its slot in another: the most per byte of msgpack."""

_TEXT_NBYTES, _BINARY_NBYTES, _INTEGER_NBYTES, _FLOAT_NBYTES, _PLAIN_NBYTES = 57, 41, 36, 32, 8
"""Sizes of CPython objects on 64 bits, each with its slot in a sequence; plain values are singletons."""

_MAX_DEPTH: Final = 64
"""Deepest nesting written; msgpack itself stops at 511 when reading."""

_PLAIN: Final = (type(None), bool, int, float, str, bytes)


def _canonical(value: Any, depth: int = 0) -> Any:
    """Sort maps by key, so that equal values have equal bytes."""
    if depth > _MAX_DEPTH:
        raise InputError(f"the value nests deeper than {_MAX_DEPTH} levels")
    if isinstance(value, _PLAIN):
        return value
    # Most items are plain: a call for each would dominate the time of packing an index.
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _PLAIN else _canonical(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise InputError("a map in an archive has text keys only")
        return {key: _canonical(value[key], depth + 1) for key in sorted(value)}
    raise InputError(
        f"a value of type {type(value).__name__} cannot be stored",
        remedy="use None, bool, int, float, str, bytes, sequences and maps with text keys",
    )


def pack_value(value: Any) -> bytes:
    """Return the canonical msgpack bytes of a value; equal values have equal bytes.

    Raises
    ------
    InputError
        The value has a type or range that msgpack cannot hold.
    """
    canonical = _canonical(value)
    try:
        packed: bytes = msgpack.packb(canonical, use_bin_type=True)
    except (ValueError, OverflowError, TypeError) as error:
        raise InputError(f"the value cannot be stored: {error}") from error
    return packed


def unpack_value(data: bytes, where: str, *, lists: bool) -> Any:
    """Return the value of exactly these msgpack bytes; sequences become lists, or tuples if `lists` is False.

    Raises
    ------
    DamagedError
        The bytes are not a single msgpack value, contain extension types or non-text keys, or their objects
        would take more than 512 MiB.
    """
    if is_dense(data):
        raise damaged("the document is too large: its objects would take over 512 MiB", where)
    try:
        walk = msgpack.Unpacker(max_buffer_size=max(len(data), 1), strict_map_key=True)
        walk.feed(data)
        walk.skip()
        # unpackb itself refuses a second value after the first.
        return msgpack.unpackb(
            data, use_list=lists, raw=False, strict_map_key=True, max_ext_len=0, ext_hook=_refuse_extension
        )
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise damaged(
            f"the document is not valid msgpack: {str(error) or type(error).__name__}", where
        ) from error


def objects_nbytes(data: bytes) -> int:
    """Return an upper bound of the memory that the objects of msgpack bytes take.

    Notes
    -----
    The bound counts every byte as the start of an object, although most may belong to text or numbers:
    parsing the structure would take longer than creating the objects. Documents of up to 8 MiB are always
    within `_MAX_OBJECTS_NBYTES`.
    """
    import numpy as np

    costs = np.full(256, _PLAIN_NBYTES, np.int64)
    costs[0x80:0xA0] = costs[0xDC:0xE0] = _CONTAINER_NBYTES
    costs[0xA0:0xC0] = costs[0xD9:0xDC] = _TEXT_NBYTES
    costs[0xC4:0xC7] = _BINARY_NBYTES
    costs[0xCA:0xCC] = _FLOAT_NBYTES
    costs[0xCC:0xD4] = _INTEGER_NBYTES
    total = 0
    for start in range(0, len(data), 1 << 20):
        chunk = np.frombuffer(data[start : start + (1 << 20)], np.uint8)
        total += int(np.bincount(chunk, minlength=256) @ costs)
    return total


def is_dense(data: bytes) -> bool:
    """Return whether the objects of msgpack bytes would take more memory than allowed."""
    return len(data) * _CONTAINER_NBYTES > _MAX_OBJECTS_NBYTES and objects_nbytes(data) > _MAX_OBJECTS_NBYTES


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not part of the format")


def compress_document(raw: bytes, dictionary: bytes = b"") -> bytes:
    """Return one zstd frame with its content size in the header.

    Parameters
    ----------
    raw
        The document.
    dictionary
        Raw content dictionary, known to the reader, that resembles the document.

    Raises
    ------
    InputError
        The document is larger than a reader accepts.
    """
    if len(raw) > MAX_DOCUMENT_NBYTES or is_dense(raw):
        raise InputError(
            "the index is too large",
            expected=f"at most {MAX_DOCUMENT_NBYTES} bytes",
            found=f"{len(raw)}",
            remedy="store fewer blocks or less meta in one frame",
        )
    level = _STRONG_LEVEL if len(raw) <= _STRONG_LIMIT_NBYTES else _FAST_LEVEL
    compressor = zstandard.ZstdCompressor(
        level=level, write_content_size=True, dict_data=raw_dictionary(dictionary)
    )
    return compressor.compress(raw)


def raw_dictionary(content: bytes | None) -> zstandard.ZstdCompressionDict | None:
    """Return bytes as a zstd raw content dictionary; None for empty bytes, which zstd refuses."""
    if not content:
        return None
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def decompress_document(data: bytes, raw_nbytes: int, where: str, dictionary: bytes = b"") -> bytes:
    """Return the content of one zstd frame, which must have `raw_nbytes` bytes.

    Raises
    ------
    DamagedError
        The data are not one zstd frame, or the length differs. Nothing is allocated before the lengths agree.
    """
    try:
        claimed = zstandard.frame_content_size(data)
        if claimed != raw_nbytes or raw_nbytes > MAX_DOCUMENT_NBYTES:
            raise damaged(
                "the length of a compressed document is wrong",
                where,
                expected=f"{raw_nbytes} bytes",
                found=f"{claimed}",
            )
        decompressor = zstandard.ZstdDecompressor(
            max_window_size=_MAX_WINDOW_NBYTES, dict_data=raw_dictionary(dictionary)
        )
        return decompressor.decompress(data, max_output_size=raw_nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise damaged(f"a document does not decompress: {error}", where) from error
