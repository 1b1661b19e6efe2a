"""The index of a frame: its blocks and metadata, stored as the difference from the parent's index.

A delta frame usually has the blocks of its parent, with other lengths. Its index therefore omits each column
that equals the parent's, and each unchanged metadata key. Offsets are not stored: lengths and the alignment
rule determine them, so blocks cannot overlap. Small blocks precede the index and are read with it; of small
blocks with equal bytes, such as step counters, only the first is stored.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from inshrink_core.archive import layout
from inshrink_core.archive.document import compress_document, pack_value, unpack_value
from inshrink_core.archive.layout import Count, converted, require
from inshrink_core.frame import BlockEntry

MAX_ATTRIBUTES: Final = 16
"""Most attributes of one block; a small limit keeps parsing linear in the size of the index."""

WORDS: Final = (
    *("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "embedding", "attention"),
    *("convolution", "linear", "vector", "layers.0.", "model.", "norm", "conv1", "fc1", "head"),
    *("buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "master", "gradient", "step"),
    *(".weight", ".bias", ".weight@step", ".weight@exp_avg", ".weight@exp_avg_sq"),
    *(".bias@step", ".bias@exp_avg", ".bias@exp_avg_sq", "@momentum"),
    *("float32", "bfloat16", "float16", "int64", "lattice/1", "lossless/1", "moments/1", "inshrinkerator/1"),
    *("stored/1", "zstd/1", "renamed/1", "same/1", "model.safetensors", "step_000100.pt"),
    *("lossless", "inshrinkerator", "compact", "drop", "overrides", "none", "restored"),
    *("source", "rekeyed", "base", "quality", "bounds", "how", "measured", "predicted", "why"),
    *("divergence", "restore_cost", "optimizer", "compressed"),
    *("originals", "checked", "crc32", "unchecked", "safetensors"),
    *("memory", "held", "movement", "rate", "probes", "content", "codec", "lattice", "config"),
    *("coarseness", "contexts", "history", "exact", "gain_per", "tensor", "gamma", "one_dimensional"),
    *("sensitivity", "written"),
)
"""Frequent strings of indexes; strings that are adjacent in indexes are adjacent here."""

INDEX_DICTIONARY: Final = pack_value(WORDS)
"""The zstd dictionary of indexes, a fixed part of the format."""


class FrameIndex(NamedTuple):
    """The whole content of an index, inheritance resolved.

    Attributes
    ----------
    entries
        The blocks, in frame order.
    meta
        Canonical msgpack bytes of each metadata value, by key.
    small
        The bytes of the small blocks.
    places
        For a part: the positions of its tensors among those of the frame. None for a whole frame.
    """

    entries: tuple[BlockEntry, ...]
    meta: Mapping[str, bytes]
    small: bytes = b""
    places: tuple[int, ...] | None = None


_Columns: TypeAlias = "tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[Any, ...], ...]]"
"""Keys, codecs and attributes of the blocks of one sort (tensors or attachments)."""


def _columns(index: FrameIndex) -> list[_Columns]:
    """Return the columns of tensors and of attachments."""
    sorts = ([entry for entry in index.entries if entry.attachment == sort] for sort in (False, True))
    return [
        (
            tuple(entry.key for entry in entries),
            tuple(entry.codec for entry in entries),
            tuple(entry.attributes for entry in entries),
        )
        for entries in sorts
    ]


def _pack_codecs(codecs: tuple[str, ...]) -> list[Any]:
    names = list(dict.fromkeys(codecs))
    number = {name: i for i, name in enumerate(names)}
    return [names, [number[codec] for codec in codecs]]


def _pack_attributes(attributes: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Transpose, so that zstd sees equal roles, dtypes and shapes side by side."""
    widths = [len(row) for row in attributes]
    columns = [[row[j] for row in attributes if len(row) > j] for j in range(max(widths, default=0))]
    return [widths, columns]


def _pack_columns(columns: _Columns, parent: _Columns | None) -> list[Any]:
    keys, codecs, attributes = columns
    if parent is None:
        return [list(keys), _pack_codecs(codecs), _pack_attributes(attributes)]
    # 1, 1.0 and True compare equal, but their stored bytes differ. Most frames have the same objects.
    same = len(keys) == len(parent[0]) and (
        all(map(operator.is_, attributes, parent[2])) or pack_value(attributes) == pack_value(parent[2])
    )
    return [
        None if keys == parent[0] else list(keys),
        None if codecs == parent[1] else _pack_codecs(codecs),
        None if same else _pack_attributes(attributes),
    ]


def _placeholder(number: int, nbytes: int) -> int:
    """Return a number as incompressible as a checksum."""
    return int.from_bytes(hashlib.sha256(f"{number} {nbytes}".encode()).digest()[:4], "little")


class IndexBuilder:
    """Collects the blocks of a frame being written; small blocks with equal bytes are stored once.

    Attributes
    ----------
    small
        The bytes of the small blocks.
    end, padding
        Offset in the frame after the large blocks, and the bytes of padding before these.
    """

    def __init__(self) -> None:
        self.small, self.end, self.padding = bytearray(), layout.FRAME_HEADER_NBYTES, 0
        self._first: dict[bytes, int] = {}
        self._entries: list[BlockEntry] = []
        self._places: list[int] = []

    def add(
        self,
        block: tuple[str, str, tuple[Any, ...]],
        payload: bytes | memoryview,
        place: int | None,
        nbytes: int | None = None,
    ) -> int | None:
        """Add a tensor (key, codec, attributes), or without a place an attachment.

        With `nbytes`, the block is only planned: the payload may be cut to the shortest length that counts
        as large, and its checksum is a placeholder. Return the bytes of padding before a large block, and
        None for a small one.
        """
        is_planned, padding, crc, back = nbytes is not None, None, None, 0
        nbytes = len(payload) if nbytes is None else nbytes
        content = bytes(payload) if layout.is_small(len(payload), 0) else b""
        first = self._first.get(content)
        if first is not None:
            offset, back = self._entries[first].offset, len(self._entries) - first
        elif layout.is_small(len(payload), len(self.small)):
            offset = len(self.small)
            if content:
                self._first[content] = len(self._entries)
            self.small += content
        else:
            offset = layout.align(self.end, nbytes)
            padding, self.end = offset - self.end, offset + nbytes
            self.padding += padding
            crc = _placeholder(len(self._entries), nbytes) if is_planned else layout.crc32c(payload)
        self._entries.append(BlockEntry(*block, place is None, offset, nbytes, crc, back))
        if place is not None:
            self._places.append(place)
        return padding

    def finish(self, meta: Mapping[str, Any], *, several: bool = False) -> FrameIndex:
        """Return the index; `several` is whether it belongs to one of several parts."""
        return FrameIndex(
            tuple(e if e.crc is not None else e._replace(offset=self.end + e.offset) for e in self._entries),
            {key: pack_value(value) for key, value in meta.items()},
            bytes(self.small),
            tuple(self._places) if several else None,
        )

    def overhead(self, index: FrameIndex, parent: FrameIndex | None) -> int:
        """Return the size of header, index, trailer and padding of a frame with this index.

        Accurate to a few bytes for planned blocks, whose checksums are placeholders.
        """
        document = compress_document(pack_index(index, parent), INDEX_DICTIONARY)
        return layout.FRAME_HEADER_NBYTES + self.padding + len(document) + layout.TRAILER_NBYTES


def pack_index(index: FrameIndex, parent: FrameIndex | None) -> bytes:
    """Return the uncompressed index document of a frame.

    Parameters
    ----------
    index
        The index.
    parent
        The index of the parent; None for a keyframe, which inherits nothing.
    """
    inherited: Mapping[str, bytes] = {} if parent is None else parent.meta
    places = None if parent is not None and parent.places == index.places else index.places
    runs = [0]
    for entry in index.entries:
        if (len(runs) % 2 == 0) != entry.attachment:  # the last run is of the other sort
            runs.append(0)
        runs[-1] += 1
    crcs = [entry.crc for entry in index.entries if entry.crc is not None]
    return pack_value(
        [
            *map(_pack_columns, _columns(index), (None, None) if parent is None else _columns(parent)),
            runs,
            [2 * entry.back + 1 if entry.back else 2 * entry.nbytes for entry in index.entries],
            struct.pack(f"<{len(crcs)}I", *crcs),
            {key: value for key, value in index.meta.items() if inherited.get(key) != value},
            sorted(inherited.keys() - index.meta.keys()),
            *([] if index.places is None else [places]),
        ]
    )


class _StoredColumns(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The stored blocks of one sort; None marks a column inherited from the parent."""

    keys: tuple[str, ...] | None
    codecs: tuple[tuple[str, ...], tuple[Count, ...]] | None
    attributes: tuple[tuple[Count, ...], tuple[tuple[Any, ...], ...]] | None


class _Document(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The stored index of a frame; only a part has places."""

    tensors: _StoredColumns
    attachments: _StoredColumns
    runs: tuple[Count, ...]
    lengths: tuple[Count, ...]
    crcs: bytes
    changed: dict[str, bytes]
    removed: tuple[str, ...]
    places: tuple[Count, ...] | msgspec.UnsetType | None = msgspec.UNSET


def _parse_attributes(
    widths: tuple[int, ...], columns: tuple[tuple[Any, ...], ...]
) -> tuple[tuple[Any, ...], ...]:
    require(max(widths, default=0) == len(columns) <= MAX_ATTRIBUTES, "attribute widths")
    rows: list[list[Any]] = [[] for _ in widths]
    for j, column in enumerate(columns):
        members = [row for row, width in zip(rows, widths, strict=True) if width > j]
        for row, item in zip(members, column, strict=True):
            row.append(item)
    return tuple(map(tuple, rows))


def _resolve(stored: _StoredColumns, parent: _Columns | None) -> _Columns:
    if parent is None:
        require(
            None not in (stored.keys, stored.codecs, stored.attributes),
            "inheritance in a frame without reference",
        )
        parent = (), (), ()
    names, numbers = ((), ()) if stored.codecs is None else stored.codecs
    require(all(number < len(names) for number in numbers), "codec numbers")
    columns = (
        parent[0] if stored.keys is None else stored.keys,
        parent[1] if stored.codecs is None else tuple(names[number] for number in numbers),
        parent[2] if stored.attributes is None else _parse_attributes(*stored.attributes),
    )
    require(len({len(column) for column in columns}) == 1, "columns of unequal length")
    require(len(set(columns[0])) == len(columns[0]), "a block key appears twice")
    return columns


def parse_index(
    raw: bytes, parent: FrameIndex | None, end: int, small: bytes, where: str, part: int | None = None
) -> FrameIndex:
    """Parse an index document and resolve inheritance. O(blocks).

    Parameters
    ----------
    raw
        The uncompressed document.
    parent
        The resolved index of the parent; None for a keyframe.
    end
        Offset at which the large blocks must end.
    small
        The bytes of the small blocks.
    where
        The frame, for messages.
    part
        Number of the part that the document belongs to; None for a frame in one part.

    Raises
    ------
    DamagedError
        The document is not an index, or its blocks do not fill the space before it.
    """
    document = unpack_value(raw, where, lists=False)
    try:
        stored = converted(document, _Document)
        require((stored.places is msgspec.UNSET) == (part is None), "places of tensors")
        meta = dict(parent.meta) if parent else {}
        for key in stored.removed:
            require(meta.pop(key, None) is not None and key not in stored.changed, "removed meta keys")
        inherited = (None, None) if parent is None else _columns(parent)
        sorts = list(map(_resolve, (stored.tensors, stored.attachments), inherited))
        places = None if stored.places is msgspec.UNSET else stored.places
        if part is not None:
            places = parent.places if parent and places is None else places
            sound = places is not None and all(map(operator.lt, places, places[1:]))
            require(sound and len(places or ()) == len(sorts[0][0]), "places of tensors")
        entries = _parse_blocks(stored, sorts, end, len(small), part or 0)
    except (ValueError, msgspec.ValidationError) as error:
        raise layout.damaged(f"the frame's index is malformed: {error}", where) from error
    return FrameIndex(entries, meta | stored.changed, small, places)


def _parse_blocks(
    stored: _Document, sorts: list[_Columns], end: int, n_small: int, part: int
) -> tuple[BlockEntry, ...]:
    """Return the blocks in frame order; each is placed after those before it."""
    for sort, name in enumerate(("tensors", "attachments")):
        require(sum(stored.runs[sort::2]) == len(sorts[sort][0]), f"runs of {name}")
    require(len(stored.lengths) == sum(stored.runs), "number of blocks")
    require(len(stored.crcs) % 4 == 0, "block checksums")
    crcs = [crc for (crc,) in struct.iter_unpack("<I", stored.crcs)]
    rows = [zip(*columns, strict=True) for columns in sorts]
    of_runs = [run % 2 for run, count in enumerate(stored.runs) for _ in range(count)]
    entries: list[BlockEntry] = []
    large_end, small_end, n_large = layout.FRAME_HEADER_NBYTES, end, 0
    for sort, value in zip(of_runs, stored.lengths, strict=True):
        nbytes, back, crc = value >> 1, 0, None
        if value & 1:
            back = nbytes
            require(0 < back <= len(entries), "a block that is another's")
            first = entries[-back]
            require(first.crc is None and not first.back, "a block that is another's")
            offset, nbytes = first.offset, first.nbytes
        elif layout.is_small(nbytes, small_end - end):
            offset, small_end = small_end, small_end + nbytes
        else:
            require(n_large < len(crcs), "number of checksums")
            offset, crc = layout.align(large_end, nbytes), crcs[n_large]
            large_end, n_large = offset + nbytes, n_large + 1
        entries.append(BlockEntry(*next(rows[sort]), bool(sort), offset, nbytes, crc, back, part))
    require(n_large == len(crcs), "number of checksums")
    require(large_end == end, "the large blocks do not end at the small ones")
    require(small_end - end == n_small, "small blocks do not fill their space")
    return tuple(entries)
