"""An archive far away is read with few requests, in few round trips, and gives what it gives at hand."""

import pytest
import torch

import inshrink_core
from benchmarks.requests import counting_reader
from inshrink_core.archive import ArchiveReader, ArchiveWriter
from inshrink_core.archive.maintenance import pack_archive
from inshrink_core.archive.storage import blocks
from inshrink_core.archive.storage.local import LocalStorage
from inshrink_core.chain import Archive
from inshrink_core.chain.sizes import archive_size
from inshrink_core.errors import InshrinkError
from tests.archive.building import append, build, contents

N_FRAMES = 24


@pytest.fixture(autouse=True)
def nothing_cached():
    """Every test begins as a process does."""
    blocks.CACHE.clear()


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """An archive of 24 frames in one chain, and the same packed."""
    folder = tmp_path_factory.mktemp("requests")
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    inshrink_core.compress(run, folder / "a", steps=run.steps[:N_FRAMES], keyframe_every=N_FRAMES, threads=1)
    pack_archive(ArchiveReader.open(folder / "a"), folder / "p")
    return folder / "a"


def far(path):
    """Open an archive as from a bucket, and return what counts the requests."""
    reader, asked = counting_reader(ArchiveReader.open(path).storage)
    return Archive(reader), asked


def values(archive, step):
    """Read everything of a step as restoring does."""
    archive.fetch([archive.reader.find(step)])
    checkpoint = archive[step]
    with checkpoint.prefetch(checkpoint.specs) as ahead:
        tensors = {spec.key: ahead.source.read(spec) for spec in checkpoint.specs}
    return tensors, [checkpoint.source.skeleton(file) for file in checkpoint.files]


def same(first, other):
    """Compare what `values` returns."""
    return (
        first[1] == other[1]
        and first[0].keys() == other[0].keys()
        and all(torch.equal(a, b) for a, b in zip(first[0].values(), other[0].values(), strict=True))
    )


def test_opening_takes_two_requests_in_one_round_trip(sample):
    _, asked = far(sample)
    assert (asked.requests, asked.round_trips) == (2, 1)


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_takes_a_request_a_frame_and_three_more_in_three_round_trips(sample, packed, tmp_path):
    archive, asked = far(sample.with_name("p") if packed else sample)
    last = archive.steps[-1]
    assert len(archive.reader.chain(archive.last.frame_id)) == N_FRAMES
    inshrink_core.restore(archive, tmp_path / "far", steps=[last], threads=2)
    assert asked.requests <= N_FRAMES + 3
    assert asked.round_trips <= 3
    inshrink_core.restore(sample, tmp_path / "near", steps=[last], threads=2)
    written = [next((tmp_path / name).iterdir()).read_bytes() for name in ("far", "near")]
    assert written[0] == written[1]


def test_one_tensor_or_some_take_a_request_a_frame_and_three_more(sample, tmp_path):
    for read in (
        lambda archive: archive[archive.steps[-1]]["fc1.weight"],
        lambda archive: archive[archive.steps[-1]].state_dict(),
        lambda archive: inshrink_core.restore(archive, tmp_path, tensors="conv*", force=True),
    ):
        blocks.CACHE.clear()
        archive, asked = far(sample)
        read(archive)
        assert asked.requests <= N_FRAMES + 3
        assert asked.round_trips <= 3


def test_large_frames_take_both_ends_and_one_range_each(tmp_path):
    large = {name: name.encode() * 600_000 for name in "abc"}
    with ArchiveWriter(tmp_path / "x", create=True) as writer:
        for step in range(6):
            append(writer, step, blocks=large)
    reader, asked = counting_reader(LocalStorage(tmp_path / "x"))
    frames = [reader.frame(info.frame_id) for info in reader.chain(reader.head.frame_id)[::-1]]
    assert (asked.requests, asked.round_trips) == (2 + 12, 2)
    reader.fetch_blocks(span for frame in frames for key in "ab" for span in frame.spans(key))
    for frame in frames:
        assert [frame.read(frame.entry(key)) for key in "ab"] == [large["a"], large["b"]]
    assert (asked.requests, asked.round_trips) == (2 + 18, 3)
    assert asked.bytes_read < reader.manifest_nbytes + 6 * ((1 << 16) + 2 * 600_000 + 100)


def test_what_is_far_equals_what_is_near_however_little_fits(sample, monkeypatch):
    near = Archive.open(sample)
    step = near.steps[5]
    expected = values(near, step)
    for most, window, gap in ((1 << 20, 1 << 14, 0), (1 << 15, 1 << 12, 1 << 18), (100, 100, 0), (0, 0, 10)):
        monkeypatch.setattr(blocks, "_WINDOW_NBYTES", window)
        monkeypatch.setattr(blocks, "MAX_PREFETCH_NBYTES", most)
        monkeypatch.setattr("inshrink_core.archive.reader.MAX_PREFETCH_NBYTES", most)
        monkeypatch.setattr(blocks, "_GAP_NBYTES", gap)
        monkeypatch.setattr("inshrink_core.archive.frame_reader._COMPLETE_NBYTES", 4096)
        monkeypatch.setattr("inshrink_core.archive.frame_reader._END_NBYTES", 600)
        blocks.CACHE.clear()
        assert same(values(far(sample)[0], step), expected)


def test_steps_in_order_read_each_frame_once(sample):
    archive, asked = far(sample)
    near = Archive.open(sample)
    view = archive.sequential()
    frames = archive.frames[:5]
    for frame in frames:
        assert same(values(view, frame.step), values(near, frame.step))
    assert asked.bytes_read < 1.1 * sum(frame.nbytes for frame in frames) + near.reader.manifest_nbytes


def test_indexes_of_all_frames_come_together(sample):
    archive, asked = far(sample)
    archive_size(archive)
    assert asked.round_trips <= 3


def test_tensors_one_after_the_other_come_together(sample):
    archive, asked = far(sample)
    frame = archive.last
    for spec in archive.checkpoint(frame).specs:
        archive.decode(frame, spec.key)
    assert asked.round_trips <= 5


def test_an_archive_that_is_opened_again_asks_for_no_frame_twice(sample):
    before = values(far(sample)[0], 10)
    archive, asked = far(sample)
    assert same(values(archive, 10), before)
    assert asked.requests == 2


class Refusing(LocalStorage):
    """A folder some of whose files cannot be read in a batch."""

    n_at_once = 8

    def together(self, calls):
        found = super().together(calls)
        return [
            OSError("reset") if "000007" in str(call.args) else f
            for call, f in zip(calls, found, strict=True)
        ]


def test_what_could_not_be_fetched_is_read_when_it_is_needed(sample):
    archive = Archive(ArchiveReader(Refusing(sample)))
    assert same(values(archive, archive.steps[-1]), values(Archive.open(sample), archive.steps[-1]))


@pytest.mark.parametrize("damage", ["cut", "longer", "byte", "other", "gone", "header"])
def test_damage_is_told_as_it_is_at_hand(tmp_path, damage):
    path = build(tmp_path / "x")
    reader = ArchiveReader.open(path)
    file = path / reader.frames[1].path
    content = bytearray(file.read_bytes())
    changed = {
        "cut": content[:-5],
        "longer": content + b"x",
        "byte": content[:-40] + bytes([content[-40] ^ 1]) + content[-39:],
        "other": (path / reader.frames[2].path).read_bytes(),
        "header": content[:30] + bytes([content[30] ^ 1]) + content[31:],
        "gone": None,
    }[damage]
    far_reader, _ = counting_reader(LocalStorage(path))
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)
    errors = []
    for first in (reader, far_reader):
        try:
            contents(first, reader.frames[1].frame_id)
        except InshrinkError as error:
            errors.append((type(error), str(error)))
    assert len(errors) == 2
    assert errors[0] == errors[1]
    file.write_bytes(content)
    assert contents(far_reader, reader.frames[1].frame_id)["head.weight"] == b"delta" * 30


def test_small_frames_of_a_segment_come_with_one_request(tmp_path):
    path = build(tmp_path / "x", tuple(range(12)), grouped=True)
    near = ArchiveReader.open(path)
    assert len({frame.path for frame in near.frames}) == 1
    reader, asked = counting_reader(LocalStorage(path))
    assert contents(reader, near.head.frame_id) == contents(near, near.head.frame_id)
    assert asked.requests == 3
