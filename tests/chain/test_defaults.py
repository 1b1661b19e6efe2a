"""What is done where nobody says otherwise: settings, a look ahead, and exact buffers."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import inshrink_core
import inshrink_lab
from inshrink_core.chain import Archive, ChainConfig
from inshrink_core.chain.config import OPTIMIZER_CHOICES, optimizer_of
from inshrink_core.checkpoint import TensorRole
from inshrink_core.cli import main
from inshrink_core.codec import get_codec
from inshrink_core.codecs.lattice.codec import LatticeCodec
from tests.runs import load

STATE = {"exp_avg", "exp_avg_sq"}


def metas(path):
    archive = Archive.open(path)
    return [archive.frame(info).meta for info in archive.frames]


def bitstreams(path, step):
    """Return the bitstreams of a step's blocks by role of their tensors."""
    archive = Archive.open(path)
    found: dict[str, set[str]] = {}
    for info in archive.frames:
        if info.step == step:
            for spec in archive.checkpoint(info).specs:
                found.setdefault(spec.role.value, set()).add(archive.frame(info).entry(spec.key).codec)
    return found


def is_exact(found, role):
    return found[role] <= {get_codec("lossless").bitstream}


def test_compress_stores_model_and_optimizer_state_compressed_and_all_else_exactly(run_path, tmp_path):
    report = inshrink_core.compress(run_path, tmp_path / "a.inshrink")
    assert (report.optimizer, report.config["coarseness"]) == ("compressed", 0.5)
    found = bitstreams(tmp_path / "a.inshrink", 20)
    assert not any(is_exact(found, role) for role in STATE)
    assert is_exact(found, "step")
    restored = inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[20])
    assert set(restored.stored.lossy) == STATE | {"weight", "buffer"}
    assert "step" in restored.stored.exact


@pytest.mark.parametrize("way", ["codec", "setting"])
def test_what_is_asked_to_be_exact_is_exact_in_everything(run_path, tmp_path, way):
    options: dict[str, Any] = {"codec": "lossless"} if way == "codec" else {"config": {"exact": True}}
    inshrink_core.compress(run_path, tmp_path / "a.inshrink", **options)
    restored = inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[20])
    assert restored.stored.lossy == ()
    assert (tmp_path / "out" / "step_20.pt").read_bytes() == (run_path / "step_20.pt").read_bytes()


@pytest.mark.parametrize("optimizer", ["compact", "drop"])
def test_appending_keeps_what_the_archive_was_written_with(run_path, tmp_path, optimizer):
    target = tmp_path / "a.inshrink"
    run = inshrink_core.open(run_path)
    inshrink_core.compress(run, target, steps=run.steps[:2], config={"coarseness": 2.5}, optimizer=optimizer)
    report = inshrink_core.compress(run, target)
    assert report.appended == run.steps[2:]
    found = {(optimizer_of(meta), meta["config"]["coarseness"]) for meta in metas(target)}
    assert found == {(optimizer, 2.5)}


def test_a_step_that_bounds_make_exact_is_exact_in_everything_unless_another_state_was_asked_for():
    config = get_codec("inshrinkerator")()
    lossless = get_codec("lossless")
    for asked, expected in (("", "exact"), ("compact", "compact"), ("drop", "drop")):
        chain = ChainConfig(config=config, optimizer=asked)
        assert chain.made_exact(lossless()).optimizer == expected


def test_steps_stored_exactly_and_steps_that_are_not_follow_each_other_in_a_chain(run_path, tmp_path):
    target = tmp_path / "a.inshrink"
    run = inshrink_core.open(run_path)
    for number, step in enumerate(run.steps):
        config, optimizer = ({"exact": True}, "exact") if number % 2 else ({"exact": False}, "compressed")
        inshrink_core.compress(run, target, steps=[step], config=config, optimizer=optimizer)
    assert inshrink_core.verify(target, deep=True, against=run).ok
    for step in run.steps[1::2]:
        inshrink_core.restore(target, tmp_path / "out", steps=[step], force=True)
        assert (tmp_path / "out" / f"step_{step}.pt").read_bytes() == (
            run_path / f"step_{step}.pt"
        ).read_bytes()


def test_optimizer_state_that_the_moments_codec_has_no_rule_for_stays_exact(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    weight = torch.randn(32, 32)
    for step in (1, 2):
        state = {"step": torch.tensor(float(step)), "my_own": torch.randn(32, 32)}
        state |= {"exp_avg": torch.randn(32, 32), "exp_avg_sq": torch.full((32, 32), float("nan"))}
        optimizer = {"state": {0: state}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
        content = {"model": {"w": weight + step}, "optimizer": optimizer, "step": step}
        torch.save(content, run / f"step_{step}.pt")
    inshrink_core.compress(run, tmp_path / "a.inshrink")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[2])
    original = torch.load(run / "step_2.pt", weights_only=True)["optimizer"]["state"][0]
    restored = torch.load(tmp_path / "out" / "step_2.pt", weights_only=True)["optimizer"]["state"][0]
    for name in ("step", "exp_avg_sq", "my_own"):
        assert torch.equal(original[name].nan_to_num(-1), restored[name].nan_to_num(-1)), name
    assert not torch.equal(original["exp_avg"], restored["exp_avg"])


def test_a_rehearsal_restores_from_what_compress_would_write(task, tmp_path):
    for codec, expected in ((None, "compressed"), ("lossless", "exact")):
        found = inshrink_lab.rehearse(task, tmp_path / "out", codec=codec, seeds=1)
        assert found.optimizer == expected
    assert found.excess == 0


def test_saver_watch_and_the_explorer_write_as_compress_does(run_path, tmp_path):
    from inshrink_app.model.subject import Subject
    from inshrink_app.services.exporting import chain_export

    written = {}
    inshrink_core.compress(run_path, tmp_path / "compressed.inshrink")
    written["compress"] = metas(tmp_path / "compressed.inshrink")[0]
    inshrink_core.compress(run_path, tmp_path / "watched.inshrink", watch=True, until=20, interval=0.01)
    written["watch"] = metas(tmp_path / "watched.inshrink")[0]
    model, optimizer = load(run_path / "step_10.pt")
    with inshrink_core.Saver(tmp_path / "saved.inshrink", model, optimizer) as saver:
        saver.save(10)
    written["saver"] = metas(tmp_path / "saved.inshrink")[0]
    values = {"kind": "run", "format": "torch", "steps": (10, 20), "tensors": (), "total_bytes": 0}
    shown = Subject(path=run_path, name="run", **values)
    for asked in chain_export(shown, (10, 20)).placed(str(tmp_path / "exported.inshrink")):
        assert main(asked.words()) == 0
    written["explorer"] = metas(tmp_path / "exported.inshrink")[0]
    how = [(meta["codec"], meta["config"], meta["optimizer"]) for meta in written.values()]
    assert all(record == how[0] for record in how), json.dumps(how)
    assert how[0][1] == LatticeCodec().settings()


@pytest.mark.parametrize(
    ("options", "lossy"), [({}, STATE | {"weight", "buffer"}), ({"codec": "lossless"}, set())]
)
def test_what_was_exact_is_exact_in_a_frame_that_was_made_anew(run_path, tmp_path, options, lossy):
    inshrink_core.compress(run_path, tmp_path / "a.inshrink", **options)
    inshrink_core.verbs.export(tmp_path / "a.inshrink", tmp_path / "one.inshrink", step=15)
    inshrink_core.verbs.prune(tmp_path / "a.inshrink", keep_last=2, apply=True)
    for path in ("one.inshrink", "a.inshrink"):
        stored = inshrink_core.verify(tmp_path / path).stored
        assert set(stored.lossy) == lossy
        assert not set(stored.exact) & lossy


def memories(path):
    archive = Archive.open(path)
    return [archive.frame(info).meta["memory"] for info in archive.reader.frames]


def test_compress_plans_on_the_whole_run_on_any_number_of_threads(run_path, tmp_path):
    for threads in (1, 3):
        inshrink_core.compress(run_path, tmp_path / f"{threads}", threads=threads)
    found = memories(tmp_path / "1")
    assert found[0]["movement"] > 0
    assert all(memory == found[0] for memory in [*found, *memories(tmp_path / "3")])


def test_steps_that_come_later_and_branches_go_on_with_the_plan(run_path, tmp_path):
    run = inshrink_core.open(run_path)
    inshrink_core.compress(run, tmp_path / "a", steps=run.steps[:2])
    inshrink_core.compress(run, tmp_path / "a")
    inshrink_core.compress(run, tmp_path / "a", resumed_from=run.steps[1])
    found = memories(tmp_path / "a")
    assert len(found) > len(run.steps)
    assert all(memory == found[0] for memory in found)


OVERRIDE = {"match": "*.running_*", "exact": True}


@pytest.mark.parametrize(
    ("asked", "rounded", "words"),
    [
        ({}, {"1.running_mean", "1.running_var"}, "--set exact=true keeps every bit"),
        ({"config": {"overrides": [OVERRIDE]}}, set(), ""),
        ({"config": {"exact": True}}, set(), ""),
        ({"codec": "inshrinkerator"}, set(), ""),
    ],
)
def test_buffers_that_are_rounded_are_told_with_what_keeps_them(run_path, tmp_path, asked, rounded, words):
    report = inshrink_core.compress(run_path, tmp_path / "a.inshrink", **asked)
    originals, restored = inshrink_core.open(run_path), inshrink_core.open(tmp_path / "a.inshrink")
    different = {
        spec.name
        for step in originals.steps
        for spec in originals[step].specs
        if spec.role is TensorRole.BUFFER and not originals[step][spec.key].equal(restored[step][spec.key])
    }
    assert different == rounded
    shown = Console(file=io.StringIO(), width=200)
    report.show(shown)
    lines = shown.file.getvalue().splitlines()
    row = next((line for line in lines if line.startswith("buffers")), "")
    assert bool(row) == bool(rounded)
    assert words in row


PAGE = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("choice", OPTIMIZER_CHOICES)
def test_every_choice_has_a_row(choice):
    assert f"\n| `{choice}`" in PAGE
