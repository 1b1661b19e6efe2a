"""Every byte of a small archive cut off, and every 97th bit flipped."""

from pathlib import Path

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.errors import InshrinkError
from tests.archive.building import META, append, blocks_of, contents

STEPS = (1, 100, 200)  # step 0 has a large block, which would only make the loop longer
FLIP_STRIDE = 97


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x"
    with ArchiveWriter(path, create=True, archive_id=bytes(range(16))) as writer:
        for step in STEPS:
            append(writer, step)
    assert sum(file.stat().st_size for file in path.rglob("*.frame")) < 16_000
    return path


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock")


def read_what_is_there(path: Path) -> None:
    """Read everything: each value is right, or a typed error says why there is none."""
    try:
        reader = ArchiveReader.open(path)
    except InshrinkError:
        return
    for frame in reader.frames:
        assert frame.step in STEPS
        try:
            assert contents(reader, frame.frame_id) == blocks_of(frame.step)
            assert reader.frame(frame.frame_id).meta == {**META, "step": frame.step}
        except InshrinkError:
            continue


def test_archive_cut_at_any_byte_is_reported_and_never_misread(path):
    for file in files(path):
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            assert check_archive(path), f"{file.name} cut at {length}"
            read_what_is_there(path)
        file.write_bytes(whole)
    assert check_archive(path) == ()


def test_archive_with_any_97th_bit_flipped_is_reported_and_never_misread(path):
    for file in files(path):
        whole = file.read_bytes()
        for bit in range(0, len(whole) * 8, FLIP_STRIDE):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            assert check_archive(path), f"{file.name} bit {bit}"
            read_what_is_there(path)
        file.write_bytes(whole)


def test_archive_with_bytes_appended_is_reported_and_never_misread(path):
    for file in files(path):
        whole = file.read_bytes()
        for extra in (b"\0", whole):
            file.write_bytes(whole + extra)
            assert check_archive(path), file.name
            read_what_is_there(path)
        file.write_bytes(whole)


@pytest.mark.one_part
def test_two_frames_exchanged_are_reported_and_never_misread(path):
    first, second = sorted((path / "frames").iterdir())[1:]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert len(check_archive(path)) >= 2
    read_what_is_there(path)


def test_every_frame_lost_or_kept_with_the_manifest_damaged_is_never_misread(path):
    (path / "inshrink-manifest").write_bytes(b"")
    for file in files(path)[:-1]:
        whole = file.read_bytes()
        for bit in range(0, len(whole) * 8, FLIP_STRIDE):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            read_what_is_there(path)
        file.write_bytes(whole)
