"""Archives made by hand from the offsets in ``docs/format.md``, without any code that writes them."""

import hashlib
import struct
from pathlib import Path

import google_crc32c
import msgpack
import pytest
import zstandard

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.index import INDEX_DICTIONARY
from inshrink_core.chain import Archive
from inshrink_core.errors import IncompatibleError

ARCHIVE_ID, FRAME_ID = bytes(range(16)), b"a frame's own id"
LARGE, SMALL = bytes(i % 251 for i in range(5000)), b"small"
WHOLE = ("weight", "float32", [1250], False, "vector")


def crc(*chunks: bytes) -> bytes:
    return struct.pack("<I", google_crc32c.value(b"".join(chunks)))


def frame(part: int = 0, last: int = 0, attributes: tuple = WHOLE) -> bytes:
    """Return a keyframe of step 7: a large tensor, a small one, and an attachment with the same bytes."""
    header = b"INSHRNKF" + struct.pack("<HBBI", 1, 1, 0, 0) + ARCHIVE_ID + FRAME_ID + bytes(16)
    header += struct.pack("<qQHH", 7, 1, part, last)
    header += crc(header)
    index = [
        [["a", "b"], [["raw/1"], [0, 0]], [[len(attributes)] * 2, [[one, one] for one in attributes]]],
        [[""], [["stored/1"], [0]], [[0], []]],
        [2, 1],
        [2 * len(LARGE), 2 * len(SMALL), 2 * 1 + 1],
        crc(LARGE),
        {"codec": msgpack.packb("raw")},
        [],
    ]
    raw = msgpack.packb(index)
    words = zstandard.ZstdCompressionDict(INDEX_DICTIONARY, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    document = zstandard.ZstdCompressor(dict_data=words).compress(raw)
    start = 128  # the next multiple of 64
    offset = start + len(LARGE)
    trailer = struct.pack("<QQII", offset, offset + len(SMALL) + len(document) + 32, len(document), len(raw))
    trailer += crc(header, SMALL, document, trailer) + b"INSE"
    return header + bytes(start - len(header)) + LARGE + SMALL + document + trailer


def manifest(*frames: bytes, flags: int = 0, more: tuple = ()) -> bytes:
    """Return a manifest that lists frames of step 7, which are keyframes."""
    n = len(frames)
    columns = [
        [FRAME_ID] * n, [None] * n, [7] * n, [0] * n, [0] * n, list(range(1, n + 1)),
        [len(one) for one in frames], b"".join(hashlib.sha256(one).digest() for one in frames),
        [], n + 1, *more,
    ]  # fmt: skip
    raw = msgpack.packb(columns)
    payload = zstandard.compress(raw)
    fields = b"INSHRNKM" + struct.pack("<HHII", 1, flags, len(payload), len(raw)) + ARCHIVE_ID
    return fields + crc(fields, payload) + payload


def archive(path: Path, content: bytes, listed: bytes, name: str = "00000001-7.frame") -> Path:
    (path / "frames").mkdir(parents=True)
    (path / "frames" / name).write_bytes(content)
    (path / "inshrink-manifest").write_bytes(listed)
    return path


def read(path: Path) -> None:
    reader = ArchiveReader.open(path)
    reader.frame(reader.frames[0].frame_id)


def test_an_archive_made_by_hand_is_read(tmp_path):
    path = archive(tmp_path / "x", frame(), manifest(frame()))
    assert check_archive(path) == ()
    reader = ArchiveReader.open(path)
    found = reader.frame(reader.head.frame_id)
    assert (reader.head.frame_id, reader.head.step, reader.archive_id) == (FRAME_ID, 7, ARCHIVE_ID)
    assert {e.key: found.read(e) for e in found.entries} == {"a": LARGE, "b": SMALL, "": SMALL}
    assert [e.attachment for e in found.entries] == [False, False, True]
    assert found.entries[0].attributes == ("weight", "float32", (1250,), False, "vector")
    assert found.meta == {"codec": "raw"}


def test_the_flag_of_segments_places_a_frame_in_one(tmp_path):
    listed = manifest(frame(), flags=1, more=([1], [0]))
    path = archive(tmp_path / "x", frame(), listed, "00000001.segment")
    assert ArchiveReader.open(path).frames[0].path == "frames/00000001.segment"
    assert check_archive(path) == ()


def test_a_part_of_a_frame_asks_for_an_upgrade(tmp_path):
    """Listed or not, under the name that a part will have: nothing of it must look like a whole frame."""
    part = frame(part=2, last=3)
    names = ("00000001-7.frame", "00000001-7.00002.frame")
    for number, (name, listed) in enumerate((n, m) for n in names for m in (manifest(part), manifest())):
        path = archive(tmp_path / str(number), part, listed, name)
        with pytest.raises(IncompatibleError, match=r"newer version.*one part, found part 3 of 4.*upgrade"):
            read(path)


def test_a_manifest_of_frames_in_parts_asks_for_an_upgrade(tmp_path):
    for number, (flags, more) in enumerate(((2, ([1],)), (3, ([1], [0], [1])))):
        path = archive(tmp_path / str(number), frame(), manifest(frame(), flags=flags, more=more))
        for ask in (ArchiveReader.open, ArchiveWriter, check_archive):
            with pytest.raises(IncompatibleError, match="frames of one part, found frames of several"):
                ask(path)


def test_a_cell_of_a_tensor_asks_for_an_upgrade(tmp_path):
    content = frame(attributes=(*WHOLE, [[2500], [1250]]))
    path = archive(tmp_path / "x", content, manifest(content))
    opened = Archive.open(path)
    with pytest.raises(IncompatibleError, match=r"newer version.*whole tensors, found a cell of tensor 'a'"):
        opened.checkpoint(opened.frames[0])
