import hashlib
import struct
from dataclasses import replace

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inshrink_core.archive import layout
from inshrink_core.archive.layout import FRAME, FrameHeader, Trailer
from inshrink_core.errors import DamagedError, IncompatibleError
from inshrink_core.frame import FrameInfo, FrameKind

ARCHIVE_ID, FRAME_ID, PARENT_ID = b"A" * 16, b"F" * 16, b"P" * 16
INFO = FrameInfo(FRAME_ID, PARENT_ID, 400, FrameKind.DELTA, 7, 3, 1, ())
HEADER = FrameHeader(ARCHIVE_ID, INFO)


def crc(data):
    return struct.pack("<I", google_crc32c.value(data))


def test_frame_id_is_the_specified_digest():
    digest = hashlib.sha256(ARCHIVE_ID + PARENT_ID + struct.pack("<qIQ", 400, 7, 3)).digest()
    assert layout.derive_frame_id(ARCHIVE_ID, PARENT_ID, 400, 7, 3) == digest[:16]


def resealed(changes):
    """Return the header with some bytes changed and its checksum made right again."""
    data = bytearray(HEADER.pack())
    for offset, value in changes.items():
        data[offset] = value
    return bytes(data[:84]) + crc(bytes(data[:84]))


@given(st.dictionaries(st.integers(8, 83), st.integers(0, 255), max_size=4))
@settings(deadline=None)
def test_a_header_with_a_right_checksum_is_read_as_it_is_written_or_refused(changes):
    """A newer version asks for an upgrade."""
    data = resealed(changes)
    if int.from_bytes(data[8:10], "little") > 1:
        with pytest.raises(IncompatibleError, match="upgrade Inshrink"):
            FrameHeader.parse(data, "here")
        return
    try:
        written = FrameHeader.parse(data, "here").pack()
    except DamagedError:
        written = data if data != HEADER.pack() else b""
    assert written == data


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 0), (10, 0), (10, 3), (11, 1), (11, 2), (71, 0x80), (80, 1), (81, 1)],
    ids=["version 0", "kind 0", "kind 3", "flags", "flag 2", "negative step", "part", "part 256"],
)
def test_header_with_a_field_out_of_range_is_damaged_even_with_a_right_checksum(offset, value):
    with pytest.raises(DamagedError, match=r"out of range|does not exist"):
        FrameHeader.parse(resealed({offset: value}), "here")


@pytest.mark.parametrize(
    ("parent_id", "external"), [(None, False), (FRAME_ID, False), (PARENT_ID, True)], ids=str
)
def test_header_that_contradicts_itself_is_damaged(parent_id, external):
    """A delta without a parent, a frame that is its own, and a delta upon a base model."""
    header = FrameHeader(ARCHIVE_ID, replace(INFO, parent_id=parent_id), external=external)
    with pytest.raises(DamagedError, match="out of range"):
        FrameHeader.parse(header.pack(), "here")


@pytest.mark.parametrize(
    "trailer",
    [
        Trailer(80, 165, 53, 9),
        Trailer(128, 165, 6, 9),
        Trailer(1 << 63, 165, 5, 9),
        Trailer(128, 165, 5, layout.MAX_DOCUMENT_NBYTES + 1),
    ],
    ids=["in the header", "length", "past the end", "too large"],
)
def test_trailer_whose_lengths_do_not_fit_is_damaged(trailer):
    with pytest.raises(DamagedError, match="do not fit"):
        Trailer.parse(FRAME, trailer.pack(FRAME, b"", b""), 165, "here")


def test_small_blocks_stand_between_the_offset_and_the_index():
    most = layout.MAX_SMALL_NBYTES
    for offset, beside in ((129, 0), (129, 10), (129, most)):
        trailer = Trailer(offset, offset + beside + 5 + 32, 5, 9)
        assert Trailer.parse(FRAME, trailer.pack(FRAME, b"", b""), trailer.file_nbytes, "here") == trailer
    for beside in (-1, most + 1):
        trailer = Trailer(129, 129 + beside + 5 + 32, 5, 9)
        with pytest.raises(DamagedError, match="do not fit"):
            Trailer.parse(FRAME, trailer.pack(FRAME, b"", b""), trailer.file_nbytes, "here")


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
@settings(deadline=None)
def test_alignment_is_64_bytes_from_4_kilobytes_on_and_8_below(offset, nbytes):
    start = layout.align(offset, nbytes)
    alignment = 64 if nbytes >= 4096 else 8
    assert start % alignment == 0
    assert 0 <= start - offset < alignment


@given(st.integers(1, layout.MAX_GENERATION), st.integers(0, layout.MAX_STEP))
@settings(deadline=None)
def test_frame_names_give_generation_and_step_back(generation, step):
    folder, _, name = layout.frame_path(generation, step).partition("/")
    assert folder == "frames"
    assert layout.parse_name(name) == (generation, step)


@pytest.mark.parametrize(
    "name",
    ["3-400.frame", "000000003-400.frame", "00000003-0400.frame", "00000000-1.frame",
     "00000003-400.2.frame", "00000003-400.65536.frame", "00000003-400..frame",
     "00000003-400.frame.tmp",
     ".00000003-400.frame.tmp", "00000003--1.frame", "0000000٣-400.frame", "../0000003-400.frame",
     "9999999999999999999-1.frame", "00000003-400.frame\n"],
)  # fmt: skip
def test_other_names_are_no_frames(name):
    assert layout.parse_name(name) is None
