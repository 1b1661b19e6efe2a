"""Attachments come back bit for bit; a damaged layout is refused, never trusted."""

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import inshrink_core
from inshrink_core.chain.attachments import (
    attachments_of,
    content_digest,
    decode_attachment,
    encode_attachment,
    encode_attachments,
    pack_layout,
    unpack_layout,
)
from inshrink_core.checkpoint import FileLayout, Member, Region, ZipEntry
from inshrink_core.errors import DamagedError, IncompatibleError

LAYOUT = (
    FileLayout(
        path="step_1.pt",
        nbytes=1000,
        kind="torch",
        regions=(
            Region(64, 16, (Member("a", 0, None),)),
            Region(128, 40, (Member("b", 0, (1, 4)), Member("a", 8, None))),
        ),
        zip_entries=(ZipEntry(64, 16, (14, 900)),),
    ),
    FileLayout(path="tokenizer.json", nbytes=5, kind="opaque"),
)


@given(content=st.binary(max_size=2000), previous=st.binary(max_size=2000))
def test_every_attachment_comes_back_that_had_another_name(content, previous):
    ((key, codec, payload),) = encode_attachments({"step_2.pt": content}, {"step_1.pt": previous})
    assert (key, codec) in {("step_2.pt", "renamed/1"), ("step_2.pt", "stored/1")}
    assert decode_attachment(codec, payload, previous, "here") == content


def test_attachments_are_compared_by_name_and_else_by_place():
    same, other = bytes(range(200)), bytes(reversed(range(200)))
    before = {"": same, "step_1.pt": other, "tokenizer.json": same}
    now = {"": same, "step_2.pt": other, "tokenizer.json": same, "new.bin": other}
    assert [(codec, len(payload) < 30) for _, codec, payload in encode_attachments(now, before)] == [
        ("same/1", True), ("renamed/1", True), ("same/1", True), ("stored/1", False),
    ]  # fmt: skip


@given(content=st.binary(max_size=2000), previous=st.none() | st.binary(max_size=2000))
def test_every_attachment_comes_back(content, previous):
    codec, payload = encode_attachment(content, previous)
    assert decode_attachment(codec, payload, previous, "here") == content
    assert len(payload) <= len(content)


def test_the_digest_of_a_checkpoint_depends_on_every_file():
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    checkpoint = run[run.steps[0]]
    files = dict(attachments_of(checkpoint))
    changed = [{**files, key: content[:-1] + bytes([content[-1] ^ 1])} for key, content in files.items()]
    digests = {content_digest(checkpoint, None, attachments) for attachments in (files, *changed)}
    assert len(digests) == 1 + len(files) > 2


def test_an_attachment_like_the_previous_one_costs_little():
    import random

    content = random.Random(0).randbytes(100_000)
    changed = content[:50_000] + b"!" + content[50_001:]
    _, payload = encode_attachment(changed, content)
    assert len(payload) < 100


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        ("zstd/1", b""),
        ("zstd/1", b"\xff" * 20),
        ("zstd/1", b"\x05\0\0\0\0junk"),
        ("same/1", b""),
        ("renamed/1", b"\0" * 20),
    ],
)
def test_a_damaged_attachment_is_refused(codec, payload):
    with pytest.raises(DamagedError):
        decode_attachment(codec, payload, None, "here")


def test_a_newer_coding_is_incompatible_not_damaged():
    with pytest.raises(IncompatibleError):
        decode_attachment("brotli/9", b"", None, "here")


def test_a_layout_comes_back():
    packed = pack_layout(LAYOUT, {"tied": "a"}, ("a", "b"))
    assert unpack_layout(packed, ("a", "b"), "here") == (LAYOUT, {"tied": "a"})


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"files": []},
        {"files": [["p", 10, "torch", [[8, 4, []]], []]], "aliases": [["x", 9]]},
        {"files": [["p", 10, "torch", [[8, 4, [[0, 0, None]]]], []]], "aliases": []},
        {"files": [["p", 100, "torch", [[8, 4, [[0, 0, None]]], [9, 4, [[0, 0, None]]]], []]], "aliases": []},
        {"files": [["p", 100, "torch", [[-1, 4, [[0, 0, None]]]], []]], "aliases": []},
        {"files": [["p", 100, "torch", [], [[0, 4, [97]]]]], "aliases": []},
        {"files": [["p", 100, "torch", [[0, 4, [[7, 0, None]]]], []]], "aliases": []},
    ],
)
def test_a_layout_that_points_outside_is_refused(document):
    with pytest.raises(DamagedError):
        unpack_layout(msgpack.packb(document), ("a", "b"), "here")


@given(st.binary(max_size=200))
def test_random_bytes_are_never_more_than_a_damaged_layout(content):
    with contextlib.suppress(DamagedError):
        unpack_layout(content, ("a",), "here")
