"""A small archive cut off at every byte of its files, or every third one, and every 97th bit flipped."""

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.maintenance import pack_archive
from inshrink_core.errors import InshrinkError
from tests.archive.building import build, flipped, read_what_is_there
from tests.archive.conftest import begin_in_parts

STEPS = (1, 100, 200)  # step 0 has a large block, which would only make the loop longer


@pytest.fixture
def path(tmp_path):
    return build(tmp_path / "x", STEPS)


@pytest.fixture(params=["files", "parts", "segment", "packed"])
def place(request, tmp_path, monkeypatch):
    """An archive of frame files, of frames in three parts, of a segment, or packed into a file."""
    if request.param == "parts":
        monkeypatch.setattr(ArchiveWriter, "begin", begin_in_parts)
    path = build(tmp_path / "x", STEPS[:2], grouped=request.param == "segment")
    if request.param == "packed":
        pack_archive(ArchiveReader.open(path), tmp_path / "p")
        return tmp_path / "p"
    return path


def files(path):
    found = path.rglob("*") if path.is_dir() else [path]
    return sorted(file for file in found if file.is_file() and file.name != "lock")


def is_reported(place):
    try:
        return bool(check_archive(place))
    except InshrinkError:
        return True


DAMAGES = {
    "cut": lambda content, every: (content[:length] for length in range(len(content) - 1, -1, -every)),
    "flipped": lambda content, _: flipped(content),
    "longer": lambda content, _: (content + b"\0", content * 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_is_reported_and_never_misread(place, damage, request):
    every = 1 if request.node.callspec.params["place"] == "files" else 3
    for file in files(place):
        content = file.read_bytes()
        for number, changed in enumerate(DAMAGES[damage](content, every)):
            file.write_bytes(changed)
            assert is_reported(place), f"{file.name}, {damage}, {number}"
            read_what_is_there(place)
        file.write_bytes(content)
    assert check_archive(place) == ()


def test_two_frames_exchanged_are_reported_and_never_misread(path):
    first, second = sorted((path / "frames").iterdir())[1:]
    first_content, second_content = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_content)
    second.write_bytes(first_content)
    assert len(check_archive(path)) >= 2
    read_what_is_there(path)


def test_every_frame_lost_or_kept_with_the_manifest_damaged_is_never_misread(path):
    (path / "inshrink-manifest").write_bytes(b"")
    for file in files(path)[:-1]:
        content = file.read_bytes()
        for changed in flipped(content):
            file.write_bytes(changed)
            read_what_is_there(path)
        file.write_bytes(content)
