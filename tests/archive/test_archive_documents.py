"""Documents that were made by hand to mislead: right checksums, wrong content."""

import functools
import struct
import tracemalloc
from pathlib import Path

import msgpack
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from inshrink_core.archive.document import compress_document, decompress_document, pack_value, unpack_value
from inshrink_core.archive.index import (
    INDEX_DICTIONARY,
    WORDS,
    IndexBuilder,
    pack_index,
    parse_index,
)
from inshrink_core.archive.layout import MANIFEST_HEADER_NBYTES, FrameHeader, ManifestHeader, derive_frame_id
from inshrink_core.archive.manifest import Manifest
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.frame import FrameInfo, FrameKind

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(VALUES)
@settings(deadline=None)
def test_values_survive_and_equal_values_have_equal_bytes(value):
    packed = pack_value({"a": value, "b": [value]})
    assert unpack_value(packed, "here", lists=True) == {"a": value, "b": [value]}
    assert pack_value({"b": (value,), "a": value}) == packed


@pytest.mark.parametrize(
    "bad",
    [object(), 1 << 64, "\ud800", {1: 2}, {1, 2}, functools.reduce(lambda value, _: [value], range(70))],
    ids=["object", "too large", "surrogate", "integer key", "set", "too deep"],
)
def test_values_that_msgpack_cannot_hold_are_refused(bad):
    with pytest.raises(InputError):
        pack_value(bad)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x10\x00\x00" * 500, b"\x91" * 5000, b"\x00\x00", b"\xd4\x05a",
     b"\xc7\x00\x05", b"\xd6\xff\x00\x00\x00\x00", b"\x81\x01\x02", b"\xa1\xff", b"\x81\x90\x01", b"\xc1"],
    ids=["empty", "long array", "nested long arrays", "deep", "two values", "extension", "empty extension",
         "timestamp", "integer key", "not utf-8", "list key", "reserved"],
)  # fmt: skip
def test_misleading_msgpack_is_damage_and_takes_no_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            unpack_value(data, "here", lists=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "raw_nbytes"),
    [
        (zstandard.ZstdCompressor().compress(bytes(1000)), 999),
        (zstandard.ZstdCompressor().compress(bytes(1000)) + b"x", 1000),
        (zstandard.ZstdCompressor().compress(bytes(1000))[:-1], 1000),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), 1000),
        (zstandard.ZstdCompressor().compress(bytes(1 << 27)), 1 << 27),
        (b"", 0),
        (b"not zstd at all", 15),
    ],
    ids=["other length", "trailing", "truncated", "no size", "too large", "empty", "no zstd"],
)
def test_misleading_compression_is_damage(data, raw_nbytes):
    with pytest.raises(DamagedError):
        decompress_document(data, raw_nbytes, "here")


def test_document_that_no_reader_would_accept_is_not_written(monkeypatch):
    monkeypatch.setattr("inshrink_core.archive.document.MAX_DOCUMENT_NBYTES", 10)
    with pytest.raises(InputError, match="too large"):
        compress_document(bytes(11))


# ---- the index -----------------------------------------------------------------------------------


def _index():
    builder = IndexBuilder()
    builder.add(("a", "raw/1", ("weight", 1)), b"first", 0)
    builder.add(("b", "raw/1", ()), bytes(4096), 1)
    builder.add(("model.pt", "zstd/1", ()), b"end", None)
    return builder.finish({"k": 1})


INDEX = _index()
END = 4224  # 88 -> 128, + 4096


def parsed(raw, parent=None):
    return parse_index(raw, parent, END, INDEX.small, "here")


def test_index_survives():
    assert parsed(pack_index(INDEX, None)) == INDEX
    assert parsed(pack_index(INDEX, INDEX), INDEX) == INDEX
    assert [entry.offset for entry in INDEX.entries] == [4224, 128, 4229]


@given(st.lists(st.integers(0, 6000), max_size=30))
@settings(deadline=None)
def test_index_with_blocks_of_any_lengths_survives(nbytes):
    builder = IndexBuilder()
    for number, n in enumerate(nbytes):
        builder.add((str(number), "raw/1", ()), bytes(n), number)
    index = builder.finish({})
    end = max([e.offset + e.nbytes for e in index.entries if e.crc is not None], default=88)
    assert parse_index(pack_index(index, None), None, end, index.small, "here") == index
    alike = [entry for entry in index.entries if entry.back]
    assert sum(entry.nbytes for entry in alike) + len(index.small) == sum(n for n in nbytes if n < 4096)


def test_words_of_the_dictionary_are_those_of_the_specification():
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    table = text.partition("<!-- derived: words -->")[2].partition("<!-- end -->")[0]
    assert tuple(table.replace("`", "").replace(",", " ").split()) == WORDS
    assert pack_value(WORDS) == INDEX_DICTIONARY


FIELDS = ["tensors", "attachments", "runs", "nbytes", "crcs", "meta", "removed"]
BAD_FIELDS = [
    ("tensors", None), ("tensors", [["a"], None]), ("tensors", [["a"], [["c"], [0]], None]),
    ("tensors", [["a", "a"], [["c"], [0, 0]], [[0, 0], []]]), ("tensors", [["a"], [["c"], [0]], [[0], []]]),
    ("tensors", [["a", "b"], [["c"], [0, 1]], [[0, 0], []]]),
    ("tensors", [["a", "b"], [["c"], [0, -1]], [[0, 0], []]]),
    ("tensors", [["a", 1], [["c"], [0, 0]], [[0, 0], []]]),
    ("tensors", [["a", "b"], [["c"], [0, 0]], [[1, 0], [[1, 2]]]]),
    ("tensors", [["a", "b"], [["c"], [0, 0]], [[2, 0], [[1]]]]),
    ("tensors", [["a", "b"], [["c"], [0, 0]], [[17, 0], [[1]] * 17]]),
    ("runs", [2]), ("runs", [3, 1]), ("runs", [2, 1, 1]), ("runs", [-1, 1, 3]), ("runs", [True, 1, 1]),
    ("runs", 3),
    ("nbytes", [10, 8192]), ("nbytes", [10, 8192, 6, 0]), ("nbytes", [10, 8192, 60]),
    ("nbytes", [10, 8192, -6]), ("nbytes", [10, 8192, (1 << 64) - 2]), ("nbytes", [10, 8192, 6.0]),
    ("nbytes", [10, 8192, 3]), ("nbytes", [10, 8192, 7]), ("nbytes", [10, 8192, 1]),
    ("nbytes", [3, 8192, 6]), ("nbytes", [10, 8192, 5]),
    ("crcs", bytes(11)), ("crcs", bytes(8)), ("crcs", b""), ("crcs", [1, 2, 3]),
    ("meta", [1]), ("meta", {"k": 1}), ("removed", ["k"]), ("removed", [1]), ("removed", None),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=str)
def test_misleading_index_is_damage(field, value):
    document = msgpack.unpackb(pack_index(INDEX, None))
    document[FIELDS.index(field)] = value
    with pytest.raises(DamagedError, match="malformed"):
        parsed(msgpack.packb(document))


def test_large_blocks_must_end_at_the_small_ones():
    for offset in (END - 8, END + 8):
        with pytest.raises(DamagedError, match="do not end at the small ones"):
            parse_index(pack_index(INDEX, None), None, offset, INDEX.small, "here")
    for small in (b"firsten", b"firstends", b""):
        with pytest.raises(DamagedError, match="do not fill their space"):
            parse_index(pack_index(INDEX, None), None, END, small, "here")


def test_inheritance_without_a_parent_is_damage():
    with pytest.raises(DamagedError, match="without reference"):
        parsed(pack_index(INDEX, INDEX))


def test_removing_a_meta_key_that_is_not_there_is_damage():
    removed = pack_index(INDEX._replace(meta={}), INDEX)
    assert parsed(removed, INDEX).meta == {}
    with pytest.raises(DamagedError, match="removed meta"):
        parsed(removed, INDEX._replace(meta={"other": b"\x01"}))


# ---- the manifest --------------------------------------------------------------------------------

ARCHIVE_ID = b"A" * 16


def frame(generation, parent_id, frame_id=None):
    step, kind = 100 * generation, FrameKind.DELTA if parent_id else FrameKind.KEYFRAME
    frame_id = frame_id or derive_frame_id(ARCHIVE_ID, parent_id, step, 0, generation)
    info = FrameInfo(frame_id, parent_id, step, kind, 0, generation, 1, ())
    return FrameHeader(ARCHIVE_ID, info).listed(1000, bytes([generation]) * 32)


FIRST = frame(2, None)
MANIFEST = Manifest(
    archive_id=ARCHIVE_ID,
    frames=(FIRST, frame(3, FIRST.frame_id), frame(5, b"gone" * 4), frame(7, None, b"chosen" + bytes(10))),
    tombstones=(1, 4),
    next_generation=9,
)


def test_manifest_survives_although_a_parent_has_a_higher_generation():
    child = frame(1, b"later" * 3 + b"x")
    frames = (child, frame(2, None, child.parent_id))
    for written in (MANIFEST, Manifest(archive_id=ARCHIVE_ID, frames=frames, next_generation=3)):
        assert Manifest.parse(written.pack(), "here") == written


def sealed(document, has_segments=False):
    raw = msgpack.packb(document)
    payload = compress_document(raw)
    return ManifestHeader(ARCHIVE_ID, len(payload), len(raw), has_segments).pack(payload) + payload


def document_of(manifest):
    packed = manifest.pack()
    raw_nbytes = struct.unpack_from("<I", packed, 16)[0]
    return msgpack.unpackb(decompress_document(packed[MANIFEST_HEADER_NBYTES:], raw_nbytes, "here"))


SEGMENTED = MANIFEST.with_places(
    info.at("frames/00000008.segment", offset)
    for info, offset in zip(MANIFEST.frames[1:], (0, 1000, 2500), strict=True)
)


def test_the_number_of_a_new_segment_is_used_up():
    placed = (FIRST.at("frames/00000009.segment", 0),)
    assert MANIFEST.with_places(placed).next_generation == 10


BAD_COLUMNS = [
    (0, [None] * 3), (0, [b"short", None, None, None]), (1, [0, 0, None, None]), (1, [4, 0, None, None]),
    (1, [-1, 0, None, None]), (1, ["x", 0, None, None]), (2, [-1, 0, 0, 0]), (2, [1 << 63, 0, 0, 0]),
    (3, [2, 0, 0, 0]), (4, [1 << 32, 0, 0, 0]), (5, [2, 2, 5, 7]), (5, [3, 2, 5, 7]), (5, [0, 3, 5, 7]),
    (5, [1, 3, 5, 7]), (6, [-1, 0, 0, 0]), (7, bytes(127)), (7, bytes(96)), (7, bytes(129)), (8, [4, 1]),
    (8, [1, 9]), (9, 7), (9, (1 << 64) - 1), (9, None), (1, [b"", None, None, None]),
    (1, [bytes(16), None, None, None]),
]  # fmt: skip
BAD_PLACES = [
    (10, [0, 8, 8]), (10, [0, 8, 8, -1]), (10, [0, 8, 8, 9]), (10, [0, 8, 8, 6]), (10, None),
    (10, [0, 8, 8, "8"]), (11, [0, 0, 0]), (11, [0, 0, 0, -1]), (11, [0, 0, 0, (1 << 22) - 2999]),
    (11, [0, 0, 0, 1 << 63]), (11, b""), (6, [1000, 1000, 1000, (1 << 18) + 1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("manifest", "column", "value"),
    [*((MANIFEST, *bad) for bad in BAD_COLUMNS), *((SEGMENTED, *bad) for bad in BAD_PLACES)],
    ids=range(len(BAD_COLUMNS) + len(BAD_PLACES)),
)
def test_misleading_manifest_is_damage(manifest, column, value):
    document, has_segments = document_of(manifest), manifest is SEGMENTED
    assert Manifest.parse(sealed(document, has_segments), "here") == manifest
    document[column] = value
    with pytest.raises(DamagedError, match="malformed"):
        Manifest.parse(sealed(document, has_segments), "here")


@pytest.mark.parametrize("has_segments", [False, True])
def test_a_manifest_has_the_fields_that_its_flags_say(has_segments):
    other = document_of(MANIFEST if has_segments else SEGMENTED)
    with pytest.raises(DamagedError, match="number of fields"):
        Manifest.parse(sealed(other, has_segments), "here")


@pytest.mark.parametrize("value", [1, True, 1.0])
def test_attributes_are_inherited_if_their_bytes_are_equal(value):
    def index(each):
        builder = IndexBuilder()
        builder.add(("w", "x/1", ("weight", each, (2, 3))), b"a", 0)
        return builder.finish({})

    parent, alike, copied = index(value), index(value), index(1)
    assert (pack_index(copied, parent) == pack_index(alike, parent)) is (type(value) is int)
