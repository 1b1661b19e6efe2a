"""Archives made by hand from the offsets in ``docs/format.md``, without any code that writes them."""

import hashlib
import struct

import google_crc32c
import msgpack
import pytest
import zstandard

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.index import INDEX_DICTIONARY
from inshrink_core.chain import Archive
from inshrink_core.errors import ConflictError, DamagedError, IncompatibleError, MissingFrameError

ARCHIVE_ID, FRAME_ID = bytes(range(16)), b"a frame's own id"
LARGE, SMALL = bytes(i % 251 for i in range(5000)), b"small"
ATTRIBUTES = ("weight", "float32", [1250], False, "vector")


def crc(*chunks):
    return struct.pack("<I", google_crc32c.value(b"".join(chunks)))


def frame(part=0, last=0, attributes=ATTRIBUTES, *, keys=("a", "b"), places=None, attached=None):
    """Return a keyframe of step 7: a large tensor, a small one, and an attachment with the same bytes."""
    attached = not last if attached is None else attached
    header = b"INSHRNKF" + struct.pack("<HBBI", 1, 1, 0, 0) + ARCHIVE_ID + FRAME_ID + bytes(16)
    header += struct.pack("<qQHH", 7, 1, part, last)
    header += crc(header)
    index = [
        [keys, [["raw/1"], [0, 0]], [[len(attributes)] * 2, [[each, each] for each in attributes]]],
        [[""], [["stored/1"], [0]], [[0], []]] if attached else [[], [[], []], [[], []]],
        [2, 1] if attached else [2],
        [2 * len(LARGE), 2 * len(SMALL), *([2 * 1 + 1] if attached else [])],
        crc(LARGE),
        {"codec": msgpack.packb("raw")},
        [],
        *([] if places is None else [places]),
    ]
    raw = msgpack.packb(index)
    words = zstandard.ZstdCompressionDict(INDEX_DICTIONARY, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    document = zstandard.ZstdCompressor(dict_data=words).compress(raw)
    start = 128  # the next multiple of 64
    offset = start + len(LARGE)
    trailer = struct.pack("<QQII", offset, offset + len(SMALL) + len(document) + 32, len(document), len(raw))
    trailer += crc(header, SMALL, document, trailer) + b"INSE"
    return header + bytes(start - len(header)) + LARGE + SMALL + document + trailer


def manifest(*frames, flags=0, more=()):
    """Return a manifest that lists frames of step 7, which are keyframes."""
    n = len(frames)
    return listed(n, frames, flags, more)


def manifest_of_parts(*parts):
    """Return a manifest that lists one frame of step 7 in some parts."""
    return listed(1, parts, 2, ([len(parts)],))


def listed(n, files, flags, more):
    """Return a manifest of `n` frames in some files."""
    columns = [
        [FRAME_ID] * n, [None] * n, [7] * n, [0] * n, [0] * n, list(range(1, n + 1)),
        [len(each) for each in files], b"".join(hashlib.sha256(each).digest() for each in files),
        [], n + 1, *more,
    ]  # fmt: skip
    raw = msgpack.packb(columns)
    payload = zstandard.compress(raw)
    fields = b"INSHRNKM" + struct.pack("<HHII", 1, flags, len(payload), len(raw)) + ARCHIVE_ID
    return fields + crc(fields, payload) + payload


def archive(path, content, listed, name="00000001-7.frame"):
    (path / "frames").mkdir(parents=True)
    (path / "frames" / name).write_bytes(content)
    (path / "inshrink-manifest").write_bytes(listed)
    return path


def read(path):
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


def in_parts(path, parts, listed):
    archive(path, parts[0], listed, "00000001-7.00000.frame")
    for number, part in enumerate(parts[1:], 1):
        (path / "frames" / f"00000001-7.{number:05d}.frame").write_bytes(part)
    return path


PARTS = [frame(0, 1, places=[1, 3], attached=True), frame(1, 1, keys=("c", "d"), places=[0, 2])]


@pytest.mark.parametrize("listed", [manifest_of_parts(*PARTS), manifest()], ids=["listed", "unlisted"])
def test_a_frame_of_two_parts_made_by_hand_is_read_as_one(tmp_path, listed):
    path = in_parts(tmp_path / "x", PARTS, listed)
    reader = ArchiveReader.open(path)
    found = reader.frame(reader.head.frame_id)
    assert (reader.head.n_parts, reader.head.nbytes) == (2, sum(map(len, PARTS)))
    assert [(e.key, e.part) for e in found.entries] == [("c", 1), ("a", 0), ("d", 1), ("b", 0), ("", 0)]
    assert [found.read(e) for e in found.entries] == [LARGE, LARGE, SMALL, SMALL, SMALL]
    assert found.meta == {"codec": "raw"}
    assert [problem.leftover for problem in check_archive(path)] == [True] * (listed == manifest())


def test_a_frame_that_waits_for_a_part_is_not_live_and_no_other_writer_goes_on(tmp_path):
    path = in_parts(tmp_path / "x", PARTS[:1], manifest())
    reader = ArchiveReader.open(path)
    assert reader.frames == () == reader.missing
    assert [frame.step for frame in reader.catalog.pending] == [7]
    with pytest.raises(ConflictError, match=r"step 7 waits for part 2/2.*inshrink commit .* --discard"):
        ArchiveWriter(path)
    (problem,) = check_archive(path)
    assert "waits for part 2/2" in problem.what


def test_a_listed_frame_that_lacks_a_part_is_missing_and_the_part_is_named(tmp_path):
    path = in_parts(tmp_path / "x", PARTS[:1], manifest_of_parts(*PARTS))
    with pytest.raises(MissingFrameError, match=r"00001\.frame: part 2/2 of the frame of step 7 is missing"):
        ArchiveReader.open(path).frame(FRAME_ID)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (frame(1, 1, keys=("c", "d"), places=[0, 1]), "a tensor in the same place"),
        (frame(1, 1, keys=("c", "d"), places=[0, 4]), "no part of the frame holds the tensor"),
        (frame(1, 1, keys=("a", "d"), places=[0, 2]), "the same block"),
        (frame(1, 1, keys=("c", "d"), places=[0, 2], attached=True), "holds attachments"),
        (frame(1, 1, keys=("c", "d"), places=[2, 0]), "places of tensors"),
    ],
    ids=["place twice", "gap", "key twice", "attachments", "descending"],
)
def test_parts_that_contradict_each_other_are_damaged(tmp_path, other, match):
    parts = [PARTS[0], other]
    path = in_parts(tmp_path / "x", parts, manifest_of_parts(*parts))
    with pytest.raises(DamagedError, match=match):
        read(path)


def test_parts_of_different_frames_make_none(tmp_path):
    path = in_parts(tmp_path / "x", [PARTS[0], frame(1, 2, keys=("c", "d"), places=[0, 2])], manifest())
    reader = ArchiveReader.open(path)
    assert reader.frames == ()
    assert ["another frame" in str(error) for error in reader.catalog.faults] == [True, True]


def test_the_number_of_parts_in_a_manifest_must_fit_its_columns(tmp_path):
    for number, (flags, more) in enumerate(((2, ([2],)), (2, ([0],)), (2, ([1, 1],)), (2, ()), (3, ([1],)))):
        path = archive(tmp_path / str(number), frame(), manifest(frame(), flags=flags, more=more))
        assert ArchiveReader.open(path).catalog.manifest_problem is not None


def cells(path, *attributes):
    """Return an archive of blocks of 1,250 elements, each with the shape of a tensor and where it begins."""
    with (
        ArchiveWriter(path, create=True) as writer,
        writer.begin(step=1, kind="keyframe", parent_id=None) as written,
    ):
        for key, *more in attributes:
            written.add(key, "raw/1", bytes(5000), attributes=(*ATTRIBUTES, *more))
        written.commit({})
    return path


def test_cells_make_up_a_tensor(tmp_path):
    two = ("a[0:1250]", [[2500], [0]]), ("a[1250:2500]", [[2500], [1250]])
    opened = Archive.open(cells(tmp_path / "y", *two, ("b",)))
    assert [entry.key for entry in opened.blocks(opened.last, "a")] == [key for key, _ in two]
    assert [entry.key for entry in opened.blocks(opened.last, "b")] == ["b"]


@pytest.mark.parametrize(
    "attributes",
    [
        [("a[1250:2500]", [[2500], [1250]])],  # half of it
        [("a[0:1250]", [[3750], [0]]), ("a[2500:3750]", [[3750], [2500]])],  # without its middle
        [("a[0:1250]", [[1250], [0]]), ("a",)],  # a block of all of it, too
        [("a[0:1250]", [[2500], [0]]), ("a[1000:2250]", [[2500], [1000]])],  # they overlap
        [("a[0:1250]", [[2500], [0]]), ("a[1250:2500]", [[3000], [1250]])],  # of two shapes
        [("a[2:1252]", [[1250], [2]])],  # past its end
        [("a[0:1250]", [[1250, 1], [0, 0]])],  # of other dimensions
        [("a", [[1250], [0]])],  # another key
    ],
)
def test_cells_of_which_no_tensor_can_be_made_are_damage(tmp_path, attributes):
    opened = Archive.open(cells(tmp_path / "x", *attributes))
    with pytest.raises(DamagedError):
        opened.decode(opened.last, "a")


def test_a_seventh_attribute_asks_for_an_upgrade(tmp_path):
    content = frame(attributes=(*ATTRIBUTES, [[1250], [0]], 1), keys=("a[0:1250]", "b[0:1250]"))
    opened = Archive.open(archive(tmp_path / "x", content, manifest(content)))
    with pytest.raises(IncompatibleError, match="newer version"):
        opened.checkpoint(opened.frames[0])
