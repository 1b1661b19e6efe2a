"""Retention: rules say what stays and why; where optimizer state goes, everything else keeps every bit."""

import json

import pytest
import torch

import inshrink_core
from benchmarks.crash.verbs import write_run_of_folders
from inshrink_core.archive import check_archive
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.errors import InputError
from inshrink_core.training import Retention
from tests.runs import write_run
from tests.verbs.test_prune import branched, compressed, frame_bits, trained_on


@pytest.fixture(scope="module")
def template(run_path, tmp_path_factory):
    return compressed(run_path, tmp_path_factory.mktemp("made") / "a.inshrink", "lattice", "compressed")


def steps_with_state(path):
    archive = Archive.open(path)
    return [f.step for f in archive.frames if any("@" in key for key in archive.checkpoint(f))]


def assert_kept(before, path):
    """Every tensor and file that is there has the bits it had, and all that belongs to a model is there."""
    archive = Archive.open(path)
    for place, stored in frame_bits(path).items():
        assert stored.items() <= before[place].items()
        info = next(f for f in archive.reader.frames if (f.step, f.branch) == place)
        weights = {s.key for s in archive.checkpoint(info).specs if s.role in MODEL_ROLES}
        assert weights == {key for key in before[place] if "@" not in key and not key.startswith("file ")}


@pytest.mark.parametrize(
    ("codec", "optimizer"),
    [("lattice", "compressed"), ("lattice", "exact"), ("inshrinkerator", "compact"), ("lossless", "exact")],
)
def test_the_state_of_the_last_steps_alone_stays_and_no_kept_bit_changes(
    run_path, tmp_path, codec, optimizer
):
    target = compressed(run_path, tmp_path / "a", codec, optimizer)
    before = frame_bits(target)
    plan = inshrink_core.verbs.prune(target, optimizer_last=2)
    report = inshrink_core.verbs.prune(target, optimizer_last=2, apply=True)
    assert steps_with_state(target) == [40, 45]
    assert [frame.step for frame in report.plan.stripped] == [5, 10, 15, 20, 25, 30, 35]
    assert Archive.open(target).steps == tuple(range(5, 50, 5))
    assert_kept(before, target)
    assert report.after == Archive.open(target).reader.nbytes < report.before
    assert plan.after == pytest.approx(report.after, rel=0.15)  # indexes grow, too
    assert inshrink_core.verify(target, deep=True, against=inshrink_core.open(run_path)).ok
    assert inshrink_core.verbs.prune(target, optimizer_last=2, apply=True).plan.stripped == ()


def test_the_run_is_still_known_and_training_goes_on(path, tmp_path):
    inshrink_core.verbs.prune(path, keep_last=4, optimizer_last=2, apply=True)
    longer = write_run(tmp_path / "longer", n_steps=11)
    report = inshrink_core.compress(longer, path)
    assert report.appended == (50, 55)
    assert set(report.skipped) == set(range(5, 50, 5))
    assert steps_with_state(path) == [40, 45, 50, 55]
    before = frame_bits(path)
    inshrink_core.verbs.prune(path, optimizer_last=2, apply=True)
    assert steps_with_state(path) == [50, 55]
    assert inshrink_core.restore(path, tmp_path / "all", every=True).without_state == (30, 35, 40, 45)
    assert_kept(before, path)
    assert check_archive(path) == ()


def test_another_run_is_still_told_apart(path, tmp_path):
    inshrink_core.verbs.prune(path, optimizer_last=1, apply=True)
    other = write_run(tmp_path / "other", n_steps=2)
    state = torch.load(other / "step_10.pt", weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] += 1
    torch.save(state, other / "step_10.pt")
    found = inshrink_core.verify(path, against=inshrink_core.open(other))
    assert [problem.what for problem in found.problems] == [
        f"'{other / 'step_10.pt'}' is not the checkpoint that was archived"
    ]


def test_branches_each_keep_the_state_of_their_last_steps(path, run_path, tmp_path):
    branched(run_path, path, tmp_path)
    before = frame_bits(path)
    inshrink_core.verbs.prune(path, optimizer_last=1, apply=True)
    stored = {place for place, bits in frame_bits(path).items() if any("@" in key for key in bits)}
    assert stored == {(45, 0), (30, 1)}
    assert_kept(before, path)
    assert inshrink_core.verify(path, deep=True).ok


def test_training_goes_on_from_a_step_without_state(path, run_path, tmp_path):
    inshrink_core.verbs.prune(path, optimizer_last=1, apply=True)
    inshrink_core.compress(trained_on(run_path, tmp_path / "again"), path, resumed_from=20)
    assert Archive.open(path).steps == (5, 10, 15, 20, 25, 30)
    assert steps_with_state(path) == [25, 30]
    assert inshrink_core.verify(path, deep=True).ok


def test_a_frame_in_parts_loses_state_in_each_part(run_path, tmp_path):
    target = tmp_path / "a.inshrink"
    for part in ("1/2", "2/2"):
        inshrink_core.compress(run_path, target, part=part, optimizer="exact")
    before = frame_bits(target)
    inshrink_core.verbs.prune(target, keep_every=10, optimizer_last=1, apply=True)
    assert steps_with_state(target) == [45]
    assert_kept(before, target)
    assert inshrink_core.verify(target, deep=True, against=inshrink_core.open(run_path)).ok


def test_a_first_frame_upon_a_base_model_stays_upon_it(run_path, tmp_path):
    target, base = tmp_path / "a.inshrink", run_path / "step_5.pt"
    inshrink_core.compress(run_path, target, steps=[10, 15, 20], base=base, codec="lossless")
    before = frame_bits(target)
    inshrink_core.verbs.prune(target, optimizer_last=1, apply=True)
    assert_kept(before, target)
    assert Archive.open(target).base_of(Archive.open(target).frames[0]) is not None
    found = inshrink_core.verify(target, deep=True, against=inshrink_core.open(run_path))
    assert [problem.what for problem in found.problems] == ["not in the archive: steps 25, 30, 35, 40, 45"]


def test_a_restore_of_a_step_without_state_says_so_and_keeps_the_layout_where_it_can(path, tmp_path):
    write_run_of_folders(tmp_path / "folders")
    folders = compressed(tmp_path / "folders", tmp_path / "f.inshrink", "lossless")
    for target in (path, folders):
        inshrink_core.verbs.prune(target, optimizer_last=1, apply=True)
    entire = inshrink_core.restore(folders, tmp_path / "out", steps=[2])
    assert entire.without_state == (2,)
    assert sorted(file.name for file in entire.paths) == ["model.safetensors", "trainer_state.json"]
    original = tmp_path / "folders" / "checkpoint-2" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == original.read_bytes()
    plain = inshrink_core.restore(path, tmp_path / "plain", steps=[10])
    assert (plain.layout, plain.without_state) == ("torch", (10,))
    content = torch.load(plain.paths[0], weights_only=True)
    assert content["model"]["0.weight"].shape == (8, 1, 3, 3)
    assert "optimizer" not in content
    assert inshrink_core.restore(path, tmp_path / "last").without_state == ()


def test_the_best_steps_by_the_log_of_the_run_stay(path, tmp_path):
    rows = [{"step": step, "val_loss": abs(step - 21), "score": step % 20} for step in range(5, 50, 5)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    plan = inshrink_core.verbs.prune(path, keep_best="val_loss:2", log=log).plan
    assert [frame.step for frame in plan.kept] == [20, 25, 45]
    assert plan.why[plan.kept[0].frame_id] == ("the best 2 of val_loss",)
    assert plan.why[plan.kept[2].frame_id] == ("training continues there",)
    plan = inshrink_core.verbs.prune(path, keep_best=["score:2:higher"], keep_last=1, log=log).plan
    assert [frame.step for frame in plan.kept] == [15, 35, 45]
    with pytest.raises(InputError, match="which way is 'score' better"):
        inshrink_core.verbs.prune(path, keep_best="score:2", log=log)
    with pytest.raises(InputError, match="no step has a value of 'val_loss'"):
        inshrink_core.verbs.prune(path, keep_best="val_loss:2")


def test_a_policy_that_makes_no_sense_is_refused():
    for options in ({"keep_last": 0}, {"optimizer_last": 0}, {"keep_best": "loss"}, {"keep_best": "loss:0"}):
        with pytest.raises(InputError):
            Retention(**options)  # type: ignore[arg-type]
