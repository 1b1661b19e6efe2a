"""The index of a frame: its blocks and metadata, stored as the difference from the parent's index.

A delta frame usually has the blocks of its parent, with other lengths. Its index therefore omits each column
that equals the parent's, and each unchanged metadata key. Offsets are not stored: lengths and the alignment
rule determine them, so blocks cannot overlap. Small blocks precede the index and are read with it; of small
blocks with equal bytes, such as step counters, only the first is stored.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from inshrink_core.archive import layout
from inshrink_core.archive.document import compress_document, pack_value, unpack_value
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


class BlockColumns(NamedTuple):
    """The blocks of one sort (tensors or attachments), a tuple for each property."""

    keys: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    attributes: tuple[tuple[Any, ...], ...] = ()


class FrameIndex(NamedTuple):
    """The whole content of an index, inheritance resolved.

    Attributes
    ----------
    tensors, attachments
        The blocks of each sort.
    runs
        Numbers of consecutive blocks in frame order: tensors, attachments, tensors, and so on.
    nbytes
        Length of each block, in frame order.
    crcs
        CRC-32C of each large block.
    meta
        Canonical msgpack bytes of each metadata value, by key.
    back
        For each block 0, or the distance to an earlier small block with the same bytes.
    small
        The bytes of the small blocks.
    places
        For a part: the positions of its tensors among those of the frame. None for a whole frame.
    """

    tensors: BlockColumns
    attachments: BlockColumns
    runs: tuple[int, ...]
    nbytes: tuple[int, ...]
    crcs: tuple[int, ...]
    meta: Mapping[str, bytes]
    back: tuple[int, ...] = ()
    small: bytes = b""
    places: tuple[int, ...] | None = None


def _pack_codecs(codecs: tuple[str, ...]) -> list[Any]:
    names = list(dict.fromkeys(codecs))
    number = {name: i for i, name in enumerate(names)}
    return [names, [number[codec] for codec in codecs]]


def _pack_attributes(attributes: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Transpose, so that zstd sees equal roles, dtypes and shapes side by side."""
    widths = [len(row) for row in attributes]
    columns = [[row[j] for row in attributes if len(row) > j] for j in range(max(widths, default=0))]
    return [widths, columns]


def _pack_columns(columns: BlockColumns, parent: BlockColumns | None) -> list[Any]:
    if parent is None:
        return [list(columns.keys), _pack_codecs(columns.codecs), _pack_attributes(columns.attributes)]
    # 1, 1.0 and True compare equal, but their stored bytes differ.
    same = pack_value(columns.attributes) == pack_value(parent.attributes)
    return [
        None if columns.keys == parent.keys else list(columns.keys),
        None if columns.codecs == parent.codecs else _pack_codecs(columns.codecs),
        None if same else _pack_attributes(columns.attributes),
    ]


class SmallBlocks:
    """The small blocks of a frame being written; equal blocks are stored once."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._first: dict[bytes, int] = {}

    def add(self, number: int, payload: bytes | memoryview) -> int | None:
        """Add a block if it is small.

        Parameters
        ----------
        number
            Number of blocks before it in the frame.
        payload
            Its bytes.

        Returns
        -------
        back
            0 for a new small block, the distance to an earlier block with the same bytes, or None if the
            block is not small.
        """
        if not layout.is_small(len(payload), 0):
            return None
        content = bytes(payload)
        first = self._first.get(content)
        if first is not None and content:
            return number - first
        if not layout.is_small(len(content), len(self.content)):
            return None
        self._first[content] = number
        self.content += content
        return 0


class IndexBuilder:
    """Collects the blocks of a frame being written."""

    def __init__(self) -> None:
        self.small, self.crcs = SmallBlocks(), list[int]()
        self._blocks: tuple[list[Any], list[Any]] = ([], [])
        self._runs, self._nbytes, self._back, self._places = [0], list[int](), list[int](), list[int]()

    def add(
        self,
        block: tuple[Any, ...],
        payload: bytes | memoryview,
        place: int | None,
        nbytes: int | None = None,
    ) -> bool:
        """Add a tensor (key, codec, attributes), or without a place an attachment; return if it is large.

        The caller appends the checksum of a large block to `crcs`.
        """
        back = self.small.add(len(self._nbytes), payload)
        if (len(self._runs) % 2 == 0) != (place is None):  # the last run is of the other sort
            self._runs.append(0)
        self._runs[-1] += 1
        if place is not None:
            self._places.append(place)
        self._blocks[place is None].append(block)
        self._nbytes.append(len(payload) if nbytes is None else nbytes)
        self._back.append(back or 0)
        return back is None

    def finish(self, meta: Mapping[str, Any], *, several: bool = False) -> FrameIndex:
        """Return the index; `several` as in `parse_index`."""
        rows = self._blocks
        tensors, attachments = (BlockColumns(*zip(*r, strict=True)) if r else BlockColumns() for r in rows)
        return FrameIndex(
            tensors,
            attachments,
            tuple(self._runs),
            tuple(self._nbytes),
            tuple(self.crcs),
            {key: pack_value(value) for key, value in meta.items()},
            tuple(self._back),
            places=tuple(self._places) if several else None,
        )


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
    return pack_value(
        [
            _pack_columns(index.tensors, None if parent is None else parent.tensors),
            _pack_columns(index.attachments, None if parent is None else parent.attachments),
            index.runs,
            [
                2 * back + 1 if back else 2 * nbytes
                for nbytes, back in zip(index.nbytes, index.back, strict=True)
            ],
            struct.pack(f"<{len(index.crcs)}I", *index.crcs),
            {key: value for key, value in index.meta.items() if inherited.get(key) != value},
            sorted(inherited.keys() - index.meta.keys()),
            *([] if index.places is None else [places]),
        ]
    )


_Count = Annotated[int, msgspec.Meta(ge=0, le=layout.MAX_STEP)]
"""Lengths are limited only by the field's width: Python integers do not overflow when summed."""


class _Columns(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The stored blocks of one sort; None marks a column inherited from the parent."""

    keys: tuple[str, ...] | None
    codecs: tuple[tuple[str, ...], tuple[_Count, ...]] | None
    attributes: tuple[tuple[_Count, ...], tuple[tuple[Any, ...], ...]] | None


class _Document(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The stored index of a frame."""

    tensors: _Columns
    attachments: _Columns
    runs: tuple[_Count, ...]
    lengths: tuple[_Count, ...]
    crcs: bytes
    changed: dict[str, bytes]
    removed: tuple[str, ...]


class _PartDocument(_Document):
    """The stored index of a part."""

    places: tuple[_Count, ...] | None


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _parse_codecs(names: tuple[str, ...], numbers: tuple[int, ...]) -> tuple[str, ...]:
    _require(all(number < len(names) for number in numbers), "codec numbers")
    return tuple(names[number] for number in numbers)


def _parse_attributes(
    widths: tuple[int, ...], columns: tuple[tuple[Any, ...], ...]
) -> tuple[tuple[Any, ...], ...]:
    _require(max(widths, default=0) == len(columns) <= MAX_ATTRIBUTES, "attribute widths")
    rows: list[list[Any]] = [[] for _ in widths]
    for j, column in enumerate(columns):
        members = [row for row, width in zip(rows, widths, strict=True) if width > j]
        for row, item in zip(members, column, strict=True):
            row.append(item)
    return tuple(map(tuple, rows))


def _resolve(stored: _Columns, parent: BlockColumns | None) -> BlockColumns:
    if parent is None:
        _require(
            None not in (stored.keys, stored.codecs, stored.attributes),
            "inheritance in a frame without reference",
        )
        parent = BlockColumns()
    columns = BlockColumns(
        parent.keys if stored.keys is None else stored.keys,
        parent.codecs if stored.codecs is None else _parse_codecs(*stored.codecs),
        parent.attributes if stored.attributes is None else _parse_attributes(*stored.attributes),
    )
    _require(len({len(column) for column in columns}) == 1, "columns of unequal length")
    _require(len(set(columns.keys)) == len(columns.keys), "a block key appears twice")
    return columns


def parse_index(
    raw: bytes, parent: FrameIndex | None, end: int, small: bytes, where: str, *, several: bool = False
) -> FrameIndex:
    """Parse an index document and resolve inheritance.

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
    several
        Whether the document belongs to one of several parts.

    Raises
    ------
    DamagedError
        The document is not an index, or its blocks do not fill the space before it.
    """
    document = unpack_value(raw, where, lists=False)
    kind = _PartDocument if several else _Document
    try:
        stored = msgspec.convert(document, kind, builtin_types=(bytes,))
        meta = dict(parent.meta) if parent else {}
        for key in stored.removed:
            _require(meta.pop(key, None) is not None and key not in stored.changed, "removed meta keys")
        _require(len(stored.crcs) % 4 == 0, "block checksums")
        nbytes, back = _parse_lengths(stored.lengths)
        tensor_places = getattr(stored, "places", None)
        if several and parent and tensor_places is None:
            tensor_places = parent.places
        ascending = all(before < after for before, after in itertools.pairwise(tensor_places or ()))
        _require(ascending and several == (tensor_places is not None), "places of tensors")
        index = FrameIndex(
            _resolve(stored.tensors, parent and parent.tensors),
            _resolve(stored.attachments, parent and parent.attachments),
            stored.runs,
            nbytes,
            struct.unpack(f"<{len(stored.crcs) // 4}I", stored.crcs),
            meta | stored.changed,
            back,
            small,
            tensor_places,
        )
        _require(not several or len(index.places or ()) == len(index.tensors.keys), "places of tensors")
        _require(sum(index.runs[0::2]) == len(index.tensors.keys), "runs of tensors")
        _require(sum(index.runs[1::2]) == len(index.attachments.keys), "runs of attachments")
        _require(len(index.nbytes) == sum(index.runs), "number of blocks")
        places = _places(index)
        _require(sum(not place.small for place in places) == len(index.crcs), "number of checksums")
        _require(_end_of_large(places) == end, "the large blocks do not end at the small ones")
        filled = sum(place.nbytes for place in places if place.small and not place.shared)
        _require(filled == len(small), "small blocks do not fill their space")
    except (ValueError, msgspec.ValidationError) as error:
        raise layout.damaged(f"the frame's index is malformed: {error}", where) from error
    return index


def _parse_lengths(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the length of each block, and its distance to an earlier block with the same bytes, or 0."""
    nbytes: list[int] = []
    back: list[int] = []
    for value in lengths:
        number, shared = value >> 1, value & 1
        _require(not shared or 0 < number <= len(nbytes), "a block that is another's")
        back.append(number if shared else 0)
        nbytes.append(nbytes[-number] if shared else number)
    return tuple(nbytes), tuple(back)


class _Place(NamedTuple):
    """The place of a block: an offset among the small blocks, or in the file."""

    offset: int
    nbytes: int
    small: bool
    shared: bool = False


def _places(index: FrameIndex) -> list[_Place]:
    """Return the place of every block. O(blocks)."""
    places: list[_Place] = []
    offset, n_small = layout.FRAME_HEADER_NBYTES, 0
    for nbytes, back in zip(index.nbytes, index.back, strict=True):
        if back:
            first = places[-back]
            _require(first.small and not first.shared, "a block that is another's")
            places.append(first._replace(shared=True))
        elif layout.is_small(nbytes, n_small):
            places.append(_Place(n_small, nbytes, small=True))
            n_small += nbytes
        else:
            offset = layout.align(offset, nbytes)
            places.append(_Place(offset, nbytes, small=False))
            offset += nbytes
    return places


def _end_of_large(places: Iterable[_Place]) -> int:
    """Return the end offset of the large blocks."""
    ends = (place.offset + place.nbytes for place in places if not place.small)
    return max(ends, default=layout.FRAME_HEADER_NBYTES)


def block_entries(index: FrameIndex, part: int = 0) -> tuple[BlockEntry, ...]:
    """Return the blocks of a frame or part, in order, with computed offsets. O(blocks)."""
    sorts = (zip(*index.tensors, strict=True), zip(*index.attachments, strict=True))
    places = _places(index)
    end, crcs = _end_of_large(places), iter(index.crcs)
    of_runs = [run % 2 for run, count in enumerate(index.runs) for _ in range(count)]
    entries: list[BlockEntry] = []
    for sort, place in zip(of_runs, places, strict=True):
        key, codec, attributes = next(sorts[sort])
        entries.append(
            BlockEntry(
                key=key,
                attachment=bool(sort),
                codec=codec,
                attributes=attributes,
                offset=place.offset + (end if place.small else 0),
                nbytes=place.nbytes,
                crc=None if place.small else next(crcs),
                shared=place.shared,
                part=part,
            )
        )
    return tuple(entries)


class ExpectedBlock(NamedTuple):
    """A block of a planned frame: its index entry, its size, and, if small, its bytes.

    The payload of a large block may be cut to the shortest length that counts as large.
    """

    key: str
    codec: str
    attributes: tuple[Any, ...]
    nbytes: int
    payload: bytes


def expected_index(
    tensors: Sequence[ExpectedBlock],
    attachments: Sequence[ExpectedBlock],
    meta: Mapping[str, Any],
    parent: FrameIndex | None,
) -> tuple[int, FrameIndex]:
    """Return the overhead and the index of a frame, without writing it.

    Parameters
    ----------
    tensors, attachments
        Its blocks.
    meta
        Its metadata, by key.
    parent
        Index of the parent; None for a keyframe, which inherits nothing.

    Returns
    -------
    nbytes
        Size of header, index, trailer and padding, accurate to a few bytes: placeholders replace checksums.
    index
        An approximation of the frame's index, from which the next one inherits.
    """
    builder, padding, offset = IndexBuilder(), 0, layout.FRAME_HEADER_NBYTES
    for number, block in enumerate((*tensors, *attachments)):
        row = block.key, block.codec, _as_read(block.attributes)
        if builder.add(row, block.payload, number if number < len(tensors) else None, block.nbytes):
            start = layout.align(offset, block.nbytes)
            padding, offset = padding + start - offset, start + block.nbytes
            digest = hashlib.sha256(f"{number} {block.nbytes}".encode()).digest()
            builder.crcs.append(int.from_bytes(digest[:4], "little"))  # as incompressible as a checksum
    index = builder.finish(meta)
    document = compress_document(pack_index(index, parent), INDEX_DICTIONARY)
    return layout.FRAME_HEADER_NBYTES + padding + len(document) + layout.TRAILER_NBYTES, index


def _as_read(value: Any) -> Any:
    """Convert sequences to tuples, as the parser returns them, so that inherited values compare equal."""
    return tuple(map(_as_read, value)) if isinstance(value, list | tuple) else value
