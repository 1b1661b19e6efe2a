"""A packed archive reads as the folder does, and damage to any byte of it is told."""

from unittest.mock import Mock

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive, is_archive
from inshrink_core.archive.layout import FORMAT_VERSION, crc32c
from inshrink_core.archive.maintenance import pack_archive, unpack_archive
from inshrink_core.archive.packed import (
    PACK_HEADER_NBYTES,
    PackedFile,
    align_file,
    pack_directory,
    pack_header,
)
from inshrink_core.errors import DamagedError, ExistsError, IncompatibleError, InputError, MissingFrameError
from tests.archive.building import append, blocks_of, contents, read_all
from tests.builders import flip

MANIFEST = "inshrink-manifest"
STEPS = (0, 100, 200)


@pytest.fixture
def packed(path, tmp_path):
    target = tmp_path / "packed.inshrink"
    pack_archive(ArchiveReader.open(path), target)
    return target


def test_packed_archive_reads_as_the_folder(path, packed):
    folder, packed_reader = ArchiveReader.open(path), ArchiveReader.open(packed)
    assert is_archive(packed)
    assert packed_reader.frames == folder.frames
    assert packed_reader.archive_id == folder.archive_id
    assert read_all(packed) == {step: blocks_of(step) for step in STEPS}
    assert check_archive(packed) == ()


def test_packing_twice_gives_the_same_bytes_and_so_does_packing_a_pack(path, packed, tmp_path):
    pack_archive(ArchiveReader.open(path), tmp_path / "again")
    pack_archive(ArchiveReader.open(packed), tmp_path / "of-packed")
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()
    assert (tmp_path / "of-packed").read_bytes() == packed.read_bytes()


def test_packing_leaves_out_what_is_not_live(path, tmp_path):
    (path / "frames" / "notes.txt").write_text("not a frame")
    (path / ".x.tmp").write_text("cut off")
    pack_archive(ArchiveReader.open(path), tmp_path / "p")
    assert check_archive(tmp_path / "p") == ()


def test_frame_that_the_manifest_does_not_list_is_packed_with_its_digest(path, tmp_path):
    manifest = (path / MANIFEST).read_bytes()
    with ArchiveWriter(path) as writer:
        listed = append(writer, 300)
    (path / MANIFEST).write_bytes(manifest)
    pack_archive(ArchiveReader.open(path), tmp_path / "p")
    assert ArchiveReader.open(tmp_path / "p").frames[-1] == listed


def test_archive_with_a_missing_or_damaged_frame_is_not_packed(path, tmp_path):
    file = path / ArchiveReader.open(path).frames[1].path
    flip(file, 100)
    with pytest.raises(DamagedError, match="step 100 is damaged"):
        pack_archive(ArchiveReader.open(path), tmp_path / "p")
    file.unlink()
    with pytest.raises(MissingFrameError, match="step 100 is missing"):
        pack_archive(ArchiveReader.open(path), tmp_path / "p")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["run.inshrink"]


def test_existing_file_is_replaced_only_by_force(path, packed):
    packed.write_bytes(b"mine")
    with pytest.raises(ExistsError, match="--force"):
        pack_archive(ArchiveReader.open(path), packed)
    assert packed.read_bytes() == b"mine"
    pack_archive(ArchiveReader.open(path), packed, force=True)
    assert check_archive(packed) == ()
    with pytest.raises(ExistsError, match="folder"):
        pack_archive(ArchiveReader.open(path), path, force=True)


def test_replacing_a_packed_archive_does_not_disturb_its_reader(path, packed):
    reader = ArchiveReader.open(packed)
    with ArchiveWriter(path) as writer:
        append(writer, 300)
    pack_archive(ArchiveReader.open(path), packed, force=True)
    assert contents(reader, reader.frames[0].frame_id) == blocks_of(0)
    assert list(read_all(packed)) == [0, 100, 200, 300]


def test_cancelled_packing_and_unpacking_leave_nothing_behind(path, packed, tmp_path):
    cancel = Mock(side_effect=KeyboardInterrupt)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        pack_archive(ArchiveReader.open(path), tmp_path / "p", progress=cancel)
    with pytest.raises(KeyboardInterrupt):
        unpack_archive(ArchiveReader.open(packed), tmp_path / "u", progress=cancel)
    assert sorted(tmp_path.iterdir()) == before


def test_packed_archive_is_read_only_and_says_the_way_out(packed):
    with pytest.raises(InputError, match="--unpack"):
        ArchiveWriter(packed)
    with pytest.raises(InputError, match="--unpack"):
        ArchiveWriter(packed, create=True)


# ---- damage --------------------------------------------------------------------------------------


def test_newer_version_is_told_from_damage(packed):
    content = bytearray(packed.read_bytes())
    content[8] = FORMAT_VERSION + 1
    content[12:16] = crc32c(bytes(content[:12])).to_bytes(4, "little")
    packed.write_bytes(content)
    with pytest.raises(IncompatibleError, match="upgrade"):
        ArchiveReader.open(packed)


def forged(files, *, cut=0):
    """Return a packed archive whose directory says what it likes, every checksum right."""
    places, offset = [], PACK_HEADER_NBYTES
    for name, nbytes in files:
        offset = align_file(offset)
        places.append(PackedFile(name, offset, nbytes))
        offset += min(nbytes, 1 << 16)
    body = pack_header() + bytes(offset - PACK_HEADER_NBYTES - cut)
    return body + pack_directory(tuple(places), len(body))


@pytest.mark.parametrize(
    "files",
    [
        [("frames/00000001-0.frame", 10)],
        [(MANIFEST, 10), (MANIFEST, 10)],
        [(MANIFEST, 10), ("frames/../../etc/passwd", 10)],
        [(MANIFEST, 10), ("/etc/passwd", 10)],
        [(MANIFEST, 10), ("frames/00000001-0.frame", 1 << 62)],
        [(MANIFEST, 10), ("frames/00000001-0.frame", -1)],
        [(MANIFEST, 10), ("frames/0001-0.frame", 10)],
        [],
    ],
    ids=["no manifest", "twice", "parent", "absolute", "too long", "negative", "no frame name", "empty"],
)
def test_directory_that_cannot_be_is_refused(tmp_path, files):
    (tmp_path / "p").write_bytes(forged(files))
    with pytest.raises(DamagedError):
        ArchiveReader.open(tmp_path / "p")


def test_files_that_do_not_end_at_the_directory_are_refused(tmp_path):
    (tmp_path / "p").write_bytes(forged([(MANIFEST, 100)], cut=20))
    with pytest.raises(DamagedError, match="do not end at its directory"):
        ArchiveReader.open(tmp_path / "p")


def test_what_a_killed_packing_left_is_replaced_by_the_next(path, tmp_path):
    target = tmp_path / "packed.inshrink"
    pack_archive(ArchiveReader.open(path), target)
    leftover = tmp_path / ".packed.inshrink.tmp"
    leftover.write_bytes(b"half of a packed archive")
    pack_archive(ArchiveReader.open(path), target, force=True)
    assert check_archive(target) == ()
    assert not leftover.exists()
