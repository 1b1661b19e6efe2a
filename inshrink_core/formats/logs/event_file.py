"""Read scalars from TensorBoard event files: checksummed records, and the few fields with numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import google_crc32c

from inshrink_core.errors import DamagedError
from inshrink_core.varint import read_varint

_HEADER: Final = struct.Struct("<QI")
"""Length of a record, and the masked checksum of these eight bytes."""

_CHECKSUM: Final = struct.Struct("<I")
_MASK_DELTA: Final = 0xA282EAD8
_MAX_VARINT_BYTES: Final = 10
"""Maximum size of a 64-bit varint: protobuf uses it for negative numbers."""

_LARGEST_EVENT_BYTES: Final = 1 << 22
"""Maximum size of an event; larger ones are graphs and images."""

_EVENT_STEP, _EVENT_SUMMARY = 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_SIMPLE = 1, 2


def is_event_file(content: bytes) -> bool:
    """Return whether a file begins with a record header whose checksum is correct."""
    return len(content) >= _HEADER.size and _header(content, 0) is not None


def scalar_rows(content: bytes) -> list[dict[str, float]]:
    """Return the logged scalars, one event per row.

    Parameters
    ----------
    content
        An event file. Entries that are no scalars are ignored, also the tensors of TensorFlow's writer.

    Returns
    -------
    list of dict
        ``step`` of each event, and its scalars by tag. A record truncated at
        the end, as while a training writes, is omitted; so is one with a wrong checksum, and everything after
        a header with a wrong checksum.

    Notes
    -----
    The framing is that of TFRecord; the messages are ``Event`` and ``Summary`` of TensorFlow's
    ``core/util/event.proto`` and ``core/framework``.
    """
    rows: list[dict[str, float]] = []
    offset = 0
    while offset + _HEADER.size <= len(content) and (length := _header(content, offset)) is not None:
        start, offset = offset + _HEADER.size, offset + _HEADER.size + length + _CHECKSUM.size
        if offset > len(content):
            break
        record = content[start : start + length]
        if (
            length > _LARGEST_EVENT_BYTES
            or _masked(record) != _CHECKSUM.unpack_from(content, start + length)[0]
        ):
            continue
        with suppress(DamagedError, ValueError, struct.error):
            row = _row(record)
            if len(row) > 1:
                rows.append(row)
    return rows


def _header(content: bytes, offset: int) -> int | None:
    """Return the length of the record at an offset; None if its checksum is wrong."""
    length, checksum = _HEADER.unpack_from(content, offset)
    head = content[offset : offset + _HEADER.size - _CHECKSUM.size]
    return int(length) if _masked(head) == checksum else None


def _masked(content: bytes) -> int:
    """Return the CRC-32C in TFRecord's masked form: rotated, with a constant added."""
    checksum: int = google_crc32c.value(content)
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _row(event: bytes) -> dict[str, float]:
    row: dict[str, float] = {"step": 0.0}
    for number, value in _fields(event):
        if number == _EVENT_STEP and isinstance(value, int):
            row["step"] = float(value)
        elif number == _EVENT_SUMMARY and isinstance(value, bytes):
            found = [item for kind, item in _fields(value) if kind == _SUMMARY_VALUE]
            row |= dict(_scalar(item) for item in found if isinstance(item, bytes))
    row.pop("", None)
    return row


def _scalar(message: bytes) -> tuple[str, float]:
    """Return tag and value; an empty tag if the value is no scalar."""
    tag, found = "", None
    for number, value in _fields(message):
        if isinstance(value, int):
            continue
        if number == _VALUE_TAG:
            tag = value.decode(errors="replace")
        elif number == _VALUE_SIMPLE:
            (found,) = struct.unpack("<f", value)
    return (tag, found) if found is not None else ("", 0.0)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field: an integer, or the bytes of other types."""
    offset = 0
    while offset < len(message):
        key, offset = read_varint(message, offset, _MAX_VARINT_BYTES)
        wire = key & 7
        if wire == 0:
            value, offset = read_varint(message, offset, _MAX_VARINT_BYTES)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            length, offset = read_varint(message, offset, _MAX_VARINT_BYTES)
        if length is None or offset + length > len(message):
            raise ValueError("no protobuf message")
        yield key >> 3, message[offset : offset + length]
        offset += length
