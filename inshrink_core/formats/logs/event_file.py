"""Read scalars from TensorBoard event files: checksummed records, and the few fields with numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import google_crc32c

from inshrink_core.errors import DamagedError
from inshrink_core.varint import Cursor

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
    messages, offset = memoryview(content), 0
    while offset + _HEADER.size <= len(content) and (length := _header(content, offset)) is not None:
        start, offset = offset + _HEADER.size, offset + _HEADER.size + length + _CHECKSUM.size
        if offset > len(content):
            break
        record = messages[start : start + length]
        if (
            length > _LARGEST_EVENT_BYTES
            or _masked(bytes(record)) != _CHECKSUM.unpack_from(content, start + length)[0]
        ):
            continue
        with suppress(DamagedError, KeyError, ValueError, struct.error):
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


def _row(event: memoryview) -> dict[str, float]:
    row: dict[str, float] = {"step": 0.0}
    for number, value in _fields(event):
        if number == _EVENT_STEP and isinstance(value, int):
            row["step"] = float(value)
        elif number == _EVENT_SUMMARY and isinstance(value, memoryview):
            found = [item for kind, item in _fields(value) if kind == _SUMMARY_VALUE]
            row |= dict(_scalar(item) for item in found if isinstance(item, memoryview))
    row.pop("", None)
    return row


def _scalar(message: memoryview) -> tuple[str, float]:
    """Return tag and value; an empty tag if the value is no scalar."""
    tag, found = "", None
    for number, value in _fields(message):
        if isinstance(value, int):
            continue
        if number == _VALUE_TAG:
            tag = bytes(value).decode(errors="replace")
        elif number == _VALUE_SIMPLE:
            (found,) = struct.unpack("<f", value)
    return (tag, found) if found is not None else ("", 0.0)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field: an integer, or the bytes of other types.

    The lengths of other wire types are unknown, so reading ends with a `KeyError`.
    """
    cursor = Cursor(message)
    while cursor.rest:
        key = cursor.varint(_MAX_VARINT_BYTES)
        wire, number = key & 7, key >> 3
        if wire in (0, 2):
            value = cursor.varint(_MAX_VARINT_BYTES)
            yield number, cursor.take(value) if wire == 2 else value
        else:
            yield number, cursor.take({1: 8, 5: 4}[wire])
