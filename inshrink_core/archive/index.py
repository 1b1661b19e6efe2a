"""The index of a frame: which blocks it holds and its meta, told as the difference to its parent's.

A delta frame usually has the blocks of its parent, with other lengths. Its index therefore leaves
out each column that equals the parent's and each meta key whose bytes do. Offsets are not stored:
lengths and the alignment rule give them, so blocks cannot overlap.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from inshrink_core.archive.document import pack_value, unpack_value
from inshrink_core.archive.layout import FRAME_HEADER_NBYTES, MAX_STEP, align, damaged
from inshrink_core.frame import BlockEntry

__all__ = ["BlockColumns", "FrameIndex", "block_entries", "pack_index", "parse_index"]

_N_FIELDS: Final = 7

MAX_ATTRIBUTES: Final = 16
"""Attributes of one block; a small number keeps reading linear in the size of the index."""

_MAX_BLOCK_NBYTES: Final = MAX_STEP
"""Sums of lengths are Python integers, so only the field's own width limits a block."""


class BlockColumns(NamedTuple):
    """The blocks of one sort (tensors, or parts), a tuple for each property."""

    keys: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    attributes: tuple[tuple[Any, ...], ...] = ()


class FrameIndex(NamedTuple):
    """The whole content of an index, inheritance resolved.

    `runs` counts blocks in file order: tensors, parts, tensors, and so on. `nbytes` and `crcs` are in
    file order too. `meta` maps a key to the canonical msgpack bytes of its value.
    """

    tensors: BlockColumns
    parts: BlockColumns
    runs: tuple[int, ...]
    nbytes: tuple[int, ...]
    crcs: tuple[int, ...]
    meta: Mapping[str, bytes]


def _pack_codecs(codecs: tuple[str, ...]) -> list[Any]:
    names = list(dict.fromkeys(codecs))
    number = {name: i for i, name in enumerate(names)}
    return [names, [number[codec] for codec in codecs]]


def _pack_attributes(attributes: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Transpose, so that equal roles, dtypes and shapes stand side by side for zstd."""
    widths = [len(row) for row in attributes]
    columns = [[row[j] for row in attributes if len(row) > j] for j in range(max(widths, default=0))]
    return [widths, columns]


def _pack_columns(columns: BlockColumns, parent: BlockColumns | None) -> list[Any]:
    same = parent or BlockColumns((), (), ())
    inherit = parent is not None
    return [
        None if inherit and columns.keys == same.keys else list(columns.keys),
        None if inherit and columns.codecs == same.codecs else _pack_codecs(columns.codecs),
        None
        if inherit and pack_value(columns.attributes) == pack_value(same.attributes)
        else _pack_attributes(columns.attributes),
    ]


def pack_index(index: FrameIndex, parent: FrameIndex | None) -> bytes:
    """Return the uncompressed document; `parent` is None in a keyframe, which inherits nothing."""
    inherited: Mapping[str, bytes] = {} if parent is None else parent.meta
    return pack_value(
        [
            _pack_columns(index.tensors, None if parent is None else parent.tensors),
            _pack_columns(index.parts, None if parent is None else parent.parts),
            index.runs,
            index.nbytes,
            struct.pack(f"<{len(index.crcs)}I", *index.crcs),
            {key: value for key, value in index.meta.items() if inherited.get(key) != value},
            sorted(inherited.keys() - index.meta.keys()),
        ]
    )


class _MalformedError(Exception):
    """A document of the wrong shape; becomes a DamagedError that names the frame."""


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise _MalformedError(what)


def _tuple_of(value: Any, item_type: type, what: str) -> tuple[Any, ...]:
    _require(type(value) is tuple and all(type(item) is item_type for item in value), what)
    return tuple(value)


def _counts(value: Any, what: str) -> tuple[int, ...]:
    counts = _tuple_of(value, int, what)
    _require(all(0 <= count <= _MAX_BLOCK_NBYTES for count in counts), what)
    return counts


def _parse_codecs(value: Any) -> tuple[str, ...]:
    _require(type(value) is tuple and len(value) == 2, "codecs")
    names, numbers = _tuple_of(value[0], str, "codec names"), _counts(value[1], "codec numbers")
    _require(all(number < len(names) for number in numbers), "codec numbers")
    return tuple(names[number] for number in numbers)


def _parse_attributes(value: Any) -> tuple[tuple[Any, ...], ...]:
    _require(type(value) is tuple and len(value) == 2, "attributes")
    widths, columns = _counts(value[0], "attribute widths"), _tuple_of(value[1], tuple, "attribute columns")
    _require(max(widths, default=0) == len(columns) <= MAX_ATTRIBUTES, "attribute widths")
    rows: list[list[Any]] = [[] for _ in widths]
    for j, column in enumerate(columns):
        members = [row for row, width in zip(rows, widths, strict=True) if width > j]
        _require(len(members) == len(column), "attribute columns")
        for row, item in zip(members, column, strict=True):
            row.append(item)
    return tuple(map(tuple, rows))


def _parse_columns(value: Any, parent: BlockColumns | None) -> BlockColumns:
    _require(type(value) is tuple and len(value) == 3, "block columns")
    if parent is None:
        _require(None not in value, "inheritance in a frame without reference")
        parent = BlockColumns()
    keys, codecs, attributes = value
    columns = BlockColumns(
        parent.keys if keys is None else _tuple_of(keys, str, "block keys"),
        parent.codecs if codecs is None else _parse_codecs(codecs),
        parent.attributes if attributes is None else _parse_attributes(attributes),
    )
    _require(len({len(column) for column in columns}) == 1, "columns of unequal length")
    _require(len(set(columns.keys)) == len(columns.keys), "a block key stands twice")
    return columns


def _parse_meta(changed: Any, removed: Any, parent: FrameIndex | None) -> dict[str, bytes]:
    _require(type(changed) is dict, "meta")
    _require(all(type(key) is str and type(value) is bytes for key, value in changed.items()), "meta")
    meta = dict(parent.meta) if parent is not None else {}
    for key in _tuple_of(removed, str, "removed meta keys"):
        _require(key in meta and key not in changed, "removed meta keys")
        del meta[key]
    meta.update(changed)
    return meta


def parse_index(raw: bytes, parent: FrameIndex | None, index_offset: int, where: str) -> FrameIndex:
    """Read a document and resolve what it inherits.

    Parameters
    ----------
    raw
        The uncompressed document.
    parent
        The resolved index of the parent; None in a keyframe.
    index_offset
        Where the index starts in the file: the blocks must end exactly there.
    where
        The frame, for messages.

    Raises
    ------
    DamagedError
        Not an index, or blocks that do not fill the space before it.
    """
    document = unpack_value(raw, where, lists=False)
    try:
        _require(type(document) is tuple and len(document) == _N_FIELDS, "number of fields")
        tensors, parts, runs, nbytes, crcs, changed, removed = document
        index = FrameIndex(
            _parse_columns(tensors, parent and parent.tensors),
            _parse_columns(parts, parent and parent.parts),
            _counts(runs, "runs"),
            _counts(nbytes, "block lengths"),
            _parse_crcs(crcs),
            _parse_meta(changed, removed, parent),
        )
        _require(sum(index.runs[0::2]) == len(index.tensors.keys), "runs of tensors")
        _require(sum(index.runs[1::2]) == len(index.parts.keys), "runs of parts")
        _require(len(index.nbytes) == len(index.crcs) == sum(index.runs), "number of blocks")
        end = FRAME_HEADER_NBYTES
        for size in index.nbytes:
            end = align(end, size) + size
        _require(align(end, 0) == index_offset, "blocks do not end at the index")
    except _MalformedError as error:
        raise damaged(f"the frame's index is malformed: {error}", where) from error
    return index


def _parse_crcs(value: Any) -> tuple[int, ...]:
    _require(type(value) is bytes and len(value) % 4 == 0, "block checksums")
    return struct.unpack(f"<{len(value) // 4}I", value)


def block_entries(index: FrameIndex) -> tuple[BlockEntry, ...]:
    """Return the blocks in file order, offsets worked out. O(blocks)."""
    sorts = (zip(*index.tensors, strict=True), zip(*index.parts, strict=True))
    entries: list[BlockEntry] = []
    offset = FRAME_HEADER_NBYTES
    for run, count in enumerate(index.runs):
        for _ in range(count):
            key, codec, attributes = next(sorts[run % 2])
            nbytes, crc = index.nbytes[len(entries)], index.crcs[len(entries)]
            offset = align(offset, nbytes)
            entries.append(
                BlockEntry(
                    key=key,
                    part=run % 2 == 1,
                    codec=codec,
                    attributes=attributes,
                    offset=offset,
                    nbytes=nbytes,
                    crc=crc,
                )
            )
            offset += nbytes
    return tuple(entries)
