"""What an archive claims is checked before anything is allocated, and verifying is restoring."""

import contextlib
import random

import pytest

import inshrink_core
from benchmarks.fuzz.archive_target import ArchiveTarget
from inshrink_core.archive import document
from inshrink_core.archive.layout import MAX_DOCUMENT_NBYTES
from inshrink_core.chain import Archive
from inshrink_core.errors import DamagedError, InshrinkError, TooLargeError
from inshrink_core.execution.resources import Limits
from tests.chain import hostile

GB = 10**9


def restored(path, **limits):
    inshrink_core.restore(path, path.parent / "out", **limits)


def read(path, **limits):
    _ = Archive.open(path).limited(Limits(**limits))[1]["w"]


def verified(path, **limits):
    inshrink_core.verify(path, deep=True, **limits)


def exported(path, **limits):
    inshrink_core.verbs.export(path, path.parent / "one.inshrink", **limits)


def constant(tmp_path, shape, nbytes):
    """Write an archive of a constant, of which its file holds `nbytes`."""
    layout = hostile.layout(hostile.small_header(nbytes))
    return hostile.build(tmp_path / "a.inshrink", {"w": hostile.constant(shape)}, layout, {"m.bin": bytes(8)})


def opaque(tmp_path, nbytes, part):
    """Write an archive of a file that is one part."""
    layout = hostile.layout(["m.bin", nbytes, "opaque", [], []])
    return hostile.build(tmp_path / "a.inshrink", {"w": hostile.constant([4])}, layout, {"m.bin": part})


DECODERS = [restored, read, verified, exported]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("shape", [[1 << 18, 1 << 18], [1 << 60]])
def test_a_constant_larger_than_memory_is_refused_before_it_is_allocated(tmp_path, decode, shape):
    nbytes = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    path = constant(tmp_path, shape, nbytes)
    with pytest.raises(TooLargeError, match=r"memory.*at most.*--max-memory") as caught:
        decode(path, max_memory=GB, **({} if decode is read else {"max_disk": 1 << 63}))
    assert caught.value.expected == "at most 1.0 GB"
    assert caught.value.exit_code == 2


def test_memory_is_measured_where_no_limit_is_given(tmp_path, monkeypatch):
    path = constant(tmp_path, [50_000_000], 200_000_000)
    monkeypatch.setattr("inshrink_core.execution.resources.memory_available", lambda: 500_000_000)
    with pytest.raises(TooLargeError, match=r"600\.0 MB of memory.*at most 500\.0 MB"):
        read(path)
    read(path, max_memory=GB)


def test_a_step_larger_than_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    path = constant(tmp_path, [1000], 4000)
    with pytest.raises(TooLargeError, match=r"4008 bytes of disk.*at most 4000 bytes.*--max-disk"):
        restored(path, max_disk=4000)
    monkeypatch.setattr("inshrink_core.execution.resources.free_disk", lambda _: 4000)
    with pytest.raises(TooLargeError, match="disk"):
        restored(path)
    assert not (tmp_path / "out").exists()
    restored(path, max_disk=5000)
    assert (tmp_path / "out" / "m.bin").stat().st_size == 4008


@pytest.mark.parametrize("decode", [restored, exported])
@pytest.mark.parametrize(
    ("nbytes", "claim", "in_frame"), [(14 << 20, (1 << 40) - 1, True), (1 << 10, 1 << 30, False)]
)
def test_a_part_that_claims_more_than_it_has_is_damaged(tmp_path, decode, nbytes, claim, in_frame):
    part = hostile.zeros_part(nbytes, claim=claim, in_frame=in_frame)
    if in_frame:  # the frame says more than the part: zstd would believe the frame
        part = part[0], (100).to_bytes(5, "little") + part[1][5:]
    path = opaque(tmp_path, 116, part)
    with pytest.raises(DamagedError):
        decode(path)
    assert not inshrink_core.verify(path, deep=True).ok


def test_a_part_larger_than_memory_is_refused_before_it_is_decoded(tmp_path):
    path = opaque(tmp_path, 1 << 30, hostile.zeros_part(1 << 30))
    assert (path / "frames").stat().st_size < 200_000
    for decode in (restored, verified, exported):
        with pytest.raises(TooLargeError):
            decode(path, max_memory=500_000_000)
    with pytest.raises(TooLargeError):
        Archive.open(path).limited(Limits(max_memory=500_000_000)).attachment(
            Archive.open(path).last, "m.bin"
        )


@pytest.mark.parametrize("nbytes", [3 * GB, 10**12])
@pytest.mark.parametrize("members", [[[0, 0, None]], [[0, 0, [1]]], [[0, 0, [2]], [0, 8, None]]])
def test_a_region_larger_than_what_lies_in_it_is_damaged(tmp_path, nbytes, members):
    path = hostile.build(
        tmp_path / "a.inshrink",
        {"w": hostile.constant([4])},
        hostile.layout(["m.bin", nbytes, "torch", [[0, nbytes, members]], []]),
        {"m.bin": b""},
    )
    with pytest.raises(InshrinkError) as caught:
        restored(path, max_disk=10**13)
    assert isinstance(caught.value, DamagedError | TooLargeError)
    with contextlib.suppress(TooLargeError):
        assert not inshrink_core.verify(path, deep=True).ok


@pytest.mark.parametrize("shape", [[1 << 63] * 64, [0, 1 << 63], [1 << 62, 4], [0, 1 << 62, 1 << 62]])
def test_extents_that_no_tensor_has_are_damaged(tmp_path, shape):
    path = constant(tmp_path, shape, 4)
    with pytest.raises(DamagedError, match="the entry of tensor 'w' is damaged"):
        read(path)


DAMAGED = {"lossless/1": b"\3\x80", "lattice/1": b"\6", "moments/1": b"\1\1\0\0\2", "uniform/1": b"\xff\xff"}


@pytest.mark.parametrize("codec", DAMAGED)
def test_a_damaged_block_is_named_by_its_step_and_its_tensor(tmp_path, codec):
    attributes, _, _ = hostile.constant([4, 4])
    block, layout = (attributes, codec, DAMAGED[codec]), hostile.layout(hostile.small_header(64))
    path = hostile.build(tmp_path / "a.inshrink", {"w": block}, layout, {"m.bin": bytes(8)})
    with pytest.raises(DamagedError) as caught:
        read(path)
    assert caught.value.where == f"{path}, step 1, tensor 'w'"


@pytest.mark.parametrize("piece", [b"\x80", b"\x91", b"\xa2ab", b"\xc4\x01x", b"\xcd\xff\xff"])
def test_a_document_that_would_become_gigabytes_is_refused(piece):
    n = (MAX_DOCUMENT_NBYTES - 5) // len(piece)
    raw = b"\xdd" + n.to_bytes(4, "big") + piece * n
    with pytest.raises(DamagedError, match="512 MiB"):
        document.unpack_value(raw, "here", lists=False)


def test_the_index_of_half_a_million_tensors_is_no_bomb():
    names = [f"model.layers.{i % 80}.mlp.experts.{i}.weight" for i in range(500_000)]
    raw = document.pack_value([names, list(range(500_000)), bytes(range(256)) * 8000])
    assert document.objects_nbytes(raw) < 512 << 20
    assert not document.is_dense(raw)


HOSTILE_LAYOUTS = {
    "another dtype": (hostile.small_header(16), {"m.bin": bytes(8)}, ("weight", "float16", [4], False, None)),
    "an unsafe path": (["../m.bin", 8, "opaque", [], []], {"../m.bin": bytes(8)}, None),
    "an empty path": (["", 8, "opaque", [], []], {}, None),
    "a long path": (["m" * 300, 8, "opaque", [], []], {"m" * 300: bytes(8)}, None),
    "a skeleton too long": (hostile.small_header(16), {"m.bin": bytes(9)}, None),
    "a skeleton too short": (hostile.small_header(16), {"m.bin": bytes(7)}, None),
    "no skeleton": (hostile.small_header(16), {}, None),
    "a checksum in a tensor": (
        ["m.bin", 24, "torch", [[8, 16, [[0, 0, None]]]], [[8, 16, [10]]]],
        {"m.bin": bytes(8)},
        None,
    ),
    "overlapping entries": (
        ["m.bin", 24, "torch", [[8, 16, [[0, 0, None]]]], [[8, 16, [0]], [9, 2, [4]]]],
        {"m.bin": bytes(8)},
        None,
    ),
}


@pytest.mark.parametrize("name", HOSTILE_LAYOUTS)
def test_what_cannot_be_restored_is_not_verified(tmp_path, name):
    file, parts, attributes = HOSTILE_LAYOUTS[name]
    tensor = hostile.constant([4])
    if attributes is not None:  # a tensor of other bytes than its region
        tensor = (attributes, tensor[1], b"\2\0\0")
    path = hostile.build(tmp_path / "a.inshrink", {"w": tensor}, hostile.layout(file), parts)
    with pytest.raises(InshrinkError):
        restored(path)
    assert not inshrink_core.verify(path, deep=True).ok
    assert inshrink_core.verify(path).ok


@pytest.mark.parametrize("paths", [("a", "A"), ("a", "a"), ("a", "a/b")])
def test_names_that_collide_are_not_verified(tmp_path, paths):
    files = [[path, 8, "opaque", [], []] for path in paths]
    path = hostile.build(
        tmp_path / "a.inshrink", {}, hostile.layout(*files), {name: bytes(8) for name in paths}
    )
    with pytest.raises(InshrinkError):
        restored(path)
    assert not inshrink_core.verify(path, deep=True).ok


CASES = 40


def test_hostile_documents_raise_typed_errors_alone_and_what_verifies_restores():
    target = ArchiveTarget("archive", sealed=True)
    outcomes = set()
    for number in range(CASES):
        try:
            outcomes.add(target.execute(target.mutate(random.Random(f"tests/{number}"))))
        except InshrinkError:  # more memory than there is, which the error says
            outcomes.add("refused")
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
    assert {"refused", "different"} <= outcomes
