"""Every byte of a small archive cut off, and every 97th bit flipped."""

from pathlib import Path

import pytest

from inshrink_core.archive import check_archive
from tests.archive.building import build, flipped, read_what_is_there

STEPS = (1, 100, 200)  # step 0 has a large block, which would only make the loop longer


@pytest.fixture
def path(tmp_path, n_parts):
    path = build(tmp_path / "x", STEPS)
    assert sum(file.stat().st_size for file in path.rglob("*.frame")) < 16_000
    return path


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock")


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
        for number, changed in enumerate(flipped(whole)):
            file.write_bytes(changed)
            assert check_archive(path), f"{file.name} flip {number}"
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
        for changed in flipped(whole):
            file.write_bytes(changed)
            read_what_is_there(path)
        file.write_bytes(whole)
