"""Pruning: what stays keeps every bit, its reference and its place; what goes is gone."""

import shutil

import pytest
import torch

import inshrink_core
from inshrink_core.archive import check_archive
from inshrink_core.chain import Archive, tensor_digest
from inshrink_core.errors import LockedError
from tests.builders import flip
from tests.runs import write_run


def compressed(run, target, codec, optimizer="exact", every=4):
    inshrink_core.compress(run, target, codec=codec, optimizer=optimizer, keyframe_every=every)
    return target


@pytest.fixture(scope="module")
def template(run_path, tmp_path_factory):
    return compressed(run_path, tmp_path_factory.mktemp("made") / "a.inshrink", "lattice")


def frame_bits(path):
    """Return the digest of every tensor and part of every frame, by step and branch."""
    archive = Archive.open(path)
    found = {}
    for info in archive.reader.frames:
        checkpoint = archive.checkpoint(info)
        digests = {key: tensor_digest(checkpoint[key]) for key in checkpoint}
        digests |= {f"file {file.path}": checkpoint.source.skeleton(file) for file in checkpoint.files}
        found[info.step, info.branch] = digests
    return found


def branched(run, target, tmp_path):
    """Restore step 20 of 45, train on a little: branch 1 from there, to step 30."""
    inshrink_core.restore(target, tmp_path / "again", steps=[20])
    inshrink_core.compress(trained_on(run, tmp_path / "again"), target)
    return target


def trained_on(run, folder):
    """Write steps 25 and 30 as another training from step 20 would have them."""
    folder.mkdir(exist_ok=True)
    for step in (25, 30):
        state = torch.load(run / f"step_{step}.pt", weights_only=True)
        state["model"]["0.weight"] += 0.01
        torch.save(state, folder / f"step_{step}.pt")
    return folder


@pytest.mark.parametrize(
    ("codec", "optimizer"),
    [("lattice", "exact"), ("inshrinkerator", "compressed"), ("lossless", "exact"), ("excp", "exact")],
)
def test_every_step_kept_decodes_to_the_same_bits(run_path, tmp_path, codec, optimizer):
    target = compressed(run_path, tmp_path / "a", codec, optimizer)
    before = frame_bits(target)
    report = inshrink_core.verbs.prune(target, keep_every=10, keep_last=2, apply=True)
    after = frame_bits(target)
    assert sorted(after) == [(10, 0), (20, 0), (30, 0), (40, 0), (45, 0)]
    assert all(after[place] == before[place] for place in after)
    assert report.after == Archive.open(target).reader.nbytes
    assert inshrink_core.verify(target, deep=True, against=inshrink_core.open(run_path)).ok


def test_only_steps_that_lose_their_reference_are_re_keyed(path):
    # keyframes at 5, 25 and 45
    report = inshrink_core.verbs.prune(path, keep=[15, 20, 25, 30], apply=True)
    assert [frame.step for frame in report.plan.rekeyed] == [15]
    kinds = {frame.step: frame.kind.value for frame in Archive.open(path).frames}
    assert kinds == {15: "keyframe", 20: "delta", 25: "keyframe", 30: "delta", 45: "keyframe"}


def test_pruning_again_and_appending_go_on(path, tmp_path):
    before = frame_bits(path)
    inshrink_core.verbs.prune(path, keep_every=10, apply=True)
    inshrink_core.verbs.prune(path, keep_every=20, apply=True)
    assert Archive.open(path).steps == (20, 40, 45)
    longer = write_run(tmp_path / "longer", n_steps=10)
    inshrink_core.compress(longer, path, steps=[45, 50])
    assert Archive.open(path).steps == (20, 40, 45, 50)
    after = frame_bits(path)
    assert all(after[place] == before[place] for place in after if place != (50, 0))
    assert check_archive(path) == ()
    assert inshrink_core.verbs.prune(path, keep_every=20, keep_last=2, apply=True).plan.removed == ()


def test_branches_keep_their_ends_and_what_they_came_from(path, run_path, tmp_path):
    branched(run_path, path, tmp_path)
    before = frame_bits(path)
    assert (30, 1) in before
    report = inshrink_core.verbs.prune(path, keep_last=1, apply=True)
    after = frame_bits(path)
    assert sorted(after) == [(20, 0), (30, 1), (45, 0)]
    assert all(after[place] == before[place] for place in after)
    assert [frame.step for frame in report.plan.references] == [20]
    archive = Archive.open(path)
    head = archive.reader.head
    assert head is not None
    assert (head.step, head.branch) == (30, 1)
    assert archive.frame(head).meta["restored"] == archive.reader.find(20).frame_id
    assert [frame.step for frame in archive.reader.history()] == [20, 30]
    assert inshrink_core.verify(path, deep=True).ok


def test_older_branches_are_dropped_only_if_asked(path, run_path, tmp_path):
    branched(run_path, path, tmp_path)
    before = frame_bits(path)
    inshrink_core.verbs.prune(path, keep_last=3, drop_branches=True, apply=True)
    after = frame_bits(path)
    assert sorted(after) == [(20, 0), (25, 1), (30, 1)]
    assert all(after[place] == before[place] for place in after)


def test_a_record_of_a_removed_origin_stays_and_is_reported(path, run_path, tmp_path):
    branched(run_path, path, tmp_path)
    origin = Archive.open(path).reader.find(20).frame_id
    inshrink_core.restore(path, tmp_path / "more", steps=[30])
    shutil.copy(run_path / "step_35.pt", tmp_path / "more" / "step_35.pt")
    inshrink_core.compress(tmp_path / "more", path)  # its training came from step 30
    report = inshrink_core.verbs.prune(path, keep_last=2, drop_branches=True, apply=True)
    archive = Archive.open(path)
    assert archive.steps == (30, 35)
    assert [frame.step for frame in report.plan.lost_origins] == [30]
    assert archive.frame(archive.reader.find(30)).meta["restored"] == origin
    assert inshrink_core.verify(path, deep=True).ok


def test_frame_that_cannot_be_decoded_stops_pruning_before_anything_is_lost(path):
    flip(path / Archive.open(path).frames[2].path, 200)  # step 15, which 20 needs
    steps = Archive.open(path).steps
    with pytest.raises(inshrink_core.errors.DamagedError):
        inshrink_core.verbs.prune(path, keep=[20], apply=True)
    assert Archive.open(path).steps == steps
    assert len(list((path / "frames").iterdir())) == 9


def test_archive_being_written_is_not_pruned(path):
    from inshrink_core.archive import ArchiveWriter

    with ArchiveWriter(path), pytest.raises(LockedError):
        inshrink_core.verbs.prune(path, keep_last=1, apply=True)
