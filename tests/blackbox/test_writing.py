"""Compressing and restoring: which bytes come back, and what documents say of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.blackbox.conftest import STEPS, contents, document, inshrink, model, write_run


def test_files_of_torch_come_back_byte_for_byte(run: Path, made_exact: Path, tmp_path: Path) -> None:
    found = document("restore", made_exact, "--all", "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(run)
    assert found["steps"] == list(STEPS)
    assert found["format"] == "same"
    assert sorted(found["files"]) == [str(tmp_path / "out" / f"step_{step:04d}.pt") for step in STEPS]
    assert found["lossy_roles"] == []
    assert {"weight", "buffer", "exp_avg", "exp_avg_sq", "step"} <= {*found["exact_roles"]}


def test_folders_come_back_byte_for_byte_with_their_side_files(folders: Path, tmp_path: Path) -> None:
    words = ("--codec", "lossless", "--optimizer", "exact", "--keyframe-every", "2")
    made = document("compress", folders, "-o", tmp_path / "a.inshrink", *words)
    assert [(row["step"], row["kind"]) for row in made["frames"]] == [
        (10, "keyframe"),
        (20, "delta"),
        (30, "keyframe"),
    ]
    document("restore", tmp_path / "a.inshrink", "--all", "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folders)


def test_the_default_codec_is_smaller_and_keeps_names_shapes_and_whole_numbers(
    run: Path, made_lossy: Path, tmp_path: Path
) -> None:
    found = document("restore", made_lossy, "-o", tmp_path / "out")
    assert found["steps"] == [STEPS[-1]]
    assert "weight" in found["lossy_roles"]
    before, after = (
        torch.load(folder / "step_0040.pt", weights_only=True)["model"] for folder in (run, tmp_path / "out")
    )
    assert after.keys() == before.keys()
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == {
        name: (t.dtype, t.shape) for name, t in before.items()
    }
    assert torch.equal(after["norm.num_batches_tracked"], before["norm.num_batches_tracked"])
    moved = before["body.weight"] - after["body.weight"]
    assert 0 < float(moved.norm() / before["body.weight"].norm()) < 0.2
    assert sum(map(len, contents(made_lossy).values())) < sum(map(len, contents(run).values())) / 3


def test_the_document_of_compress_counts_what_was_written(run: Path, tmp_path: Path) -> None:
    found = document("compress", run, "-o", tmp_path / "a.inshrink", "--set", "coarseness=3")
    assert found["archive"] == str(tmp_path / "a.inshrink")
    assert (found["codec"], found["config"]["coarseness"]) == ("lattice", 3)
    assert (found["appended"], found["skipped"], found["unreadable"]) == (list(STEPS), [], [])
    assert found["raw_bytes"] == document("inspect", run)["raw_bytes"]
    assert found["ratio_total"] == pytest.approx(found["raw_bytes"] / found["archive_bytes"])
    assert found["ratio_weights"] > 2
    assert 0 < found["relative_error"] < 0.2
    assert [row["step"] for row in found["frames"]] == list(STEPS)
    assert sum(row["bytes"] for row in found["frames"]) <= found["archive_bytes"]


def test_the_same_run_gives_the_same_restored_bytes_whatever_threads_do_the_work(
    run: Path, made_lossy: Path, tmp_path: Path
) -> None:
    document("compress", run, "-o", tmp_path / "a.inshrink", "--coarseness", "2", "--threads", "3")
    for archive, out in ((made_lossy, "one"), (tmp_path / "a.inshrink", "other")):
        document("restore", archive, "--all", "-o", tmp_path / out, "--threads", "1")
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_steps_are_appended_and_what_is_there_stays_as_it_is(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.inshrink"
    words = ("compress", run, "-o", target, "--codec", "lossless", "--optimizer", "exact")
    assert document(*words, "--steps", "10,20")["appended"] == [10, 20]
    before = contents(target)
    found = document(*words)
    assert (found["appended"], found["skipped"]) == ([30, 40], [10, 20])
    frames = {path: content for path, content in before.items() if contents(target).get(path) == content}
    assert len(frames) >= 2
    again = contents(target)
    assert document(*words)["appended"] == []
    assert contents(target) == again
    document("restore", target, "--all", "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(run)


@pytest.mark.parametrize("codec", ["inshrinkerator", "lc-checkpoint", "excp", "qd", "uniform", "context"])
def test_every_codec_writes_what_verifies_and_restores(run: Path, tmp_path: Path, codec: str) -> None:
    target = tmp_path / "a.inshrink"
    made = document(
        "compress", run, "-o", target, "--codec", codec, "--steps", "10:20", "--keyframe-every", "2"
    )
    assert made["codec"] == codec
    assert made["archive_bytes"] < made["raw_bytes"]
    assert document("verify", target, "--deep")["ok"] is True
    document("restore", target, "-o", tmp_path / "out")
    before, after = (
        torch.load(folder / "step_0020.pt", weights_only=True)["model"] for folder in (run, tmp_path / "out")
    )
    assert after.keys() == before.keys()
    assert all(after[name].shape == before[name].shape for name in before)
    error = (after["body.weight"] - before["body.weight"]).norm() / before["body.weight"].norm()
    assert float(error) < 0.5


@pytest.mark.parametrize("optimizer", ["exact", "compressed", "compact", "drop"])
def test_optimizer_state_is_stored_as_asked(run: Path, tmp_path: Path, optimizer: str) -> None:
    target = tmp_path / "a.inshrink"
    made = document("compress", run, "-o", target, "--optimizer", optimizer, "--steps", "10:20")
    assert made["optimizer"] == optimizer
    found = document("restore", target, "-o", tmp_path / "out")
    moments = {"exp_avg", "exp_avg_sq"}
    assert (moments <= {*found["exact_roles"]}) == (optimizer == "exact")
    assert (moments <= {*found["lossy_roles"]}) == (optimizer in ("compressed", "compact"))
    assert moments.isdisjoint(made["roles"]) == (optimizer == "drop")


def test_settings_of_a_file_hold_and_options_come_first(run: Path, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(
        'codec = "lattice"\nkeyframe_every = 2\n[settings]\ncoarseness = 4\n'
        '[[override]]\nmatch = "head*"\ncoarseness = 1\n'
    )
    words = ("compress", run, "--steps", "10:20", "--config", config, "--optimizer", "drop")
    of_file = document(*words, "-o", tmp_path / "a.inshrink")
    assert of_file["config"]["coarseness"] == 4
    of_option = document(*words, "-o", tmp_path / "b.inshrink", "--coarseness", "0.5")
    assert of_option["config"]["coarseness"] == 0.5
    assert of_option["archive_bytes"] > of_file["archive_bytes"]
    errors = {}
    for row in inshrink("verify", tmp_path / "a.inshrink", "--against", run, "--json").document["errors"]:
        if row["step"] == 20:
            errors[row["tensor"]] = row["relative_rms"]
    assert 0 < errors["head.weight"] < errors["body.weight"]


def test_parts_of_two_processes_are_one_archive_once_committed(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.inshrink"
    words = ("compress", run, "-o", target, "--codec", "lossless", "--optimizer", "exact", "--steps", "10:20")
    first = document(*words, "--part", "1/2")
    assert (first["part"], first["waiting"]) == ("1/2", [10, 20])
    outcome = inshrink("commit", target, "--json")
    assert outcome.code == 1
    waiting = outcome.document
    assert (waiting["committed"], [row["step"] for row in waiting["waiting"]]) == ([], [10, 20])
    assert waiting["waiting"][0]["parts"] == ["2/2"]
    document(*words, "--part", "2/2")
    document("commit", target)
    assert document("inspect", target)["steps"] == [10, 20]
    document("restore", target, "--all", "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == {
        name: content for name, content in contents(run).items() if name < "step_0030"
    }


def test_a_watch_archives_what_appears_and_ends_at_its_step(run: Path, tmp_path: Path) -> None:
    words = ("--watch", "--poll", "0.05", "--until", "40", "--codec", "lossless", "--optimizer", "exact")
    found = document("compress", run, "-o", tmp_path / "a.inshrink", *words)
    assert (found["ended"], found["appended"]) == ("until", list(STEPS))
    document("restore", tmp_path / "a.inshrink", "--all", "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(run)


def test_a_bound_holds_for_every_step_as_written(run: Path, judge: str, tmp_path: Path) -> None:
    words = ("--evaluator", judge, "--eval-metric", "loss", "--max-drop", "0.01", "--steps", "10:30")
    found = document("compress", run, "-o", tmp_path / "a.inshrink", *words)
    assert found["bounds"]["drop"] == 0.01
    assert found["max_drop"] <= 0.01
    assert all(row["exact"] or row["drop"] <= 0.01 for row in found["frames"])
    judged = inshrink("compare", tmp_path / "a.inshrink", "--against", run, *words, "--json")
    assert judged.code == 0, judged.err
    assert judged.document["max_drop"] <= 0.01


def test_a_fine_tuning_is_stored_relative_to_its_base_and_needs_it(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned"
    before = {name: tensor.clone() for name, tensor in model().state_dict().items()}
    save_file(before, base)
    write_run(tuned, (10,), lr=1e-5)
    words = ("compress", tuned, "--codec", "lossless", "--optimizer", "drop")
    alone = document(*words, "-o", tmp_path / "alone.inshrink")
    upon = document(*words, "-o", tmp_path / "upon.inshrink", "--base", base)
    assert upon["base"]["tensors"] > 0
    assert upon["archive_bytes"] < alone["archive_bytes"]
    document("restore", tmp_path / "upon.inshrink", "-o", tmp_path / "out", "--format", "safetensors")
    (path,) = (tmp_path / "out").rglob("*.safetensors")
    wanted = torch.load(tuned / "step_0010.pt", weights_only=True)["model"]
    found = load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    base.rename(tmp_path / "elsewhere.safetensors")
    refused = inshrink("restore", tmp_path / "upon.inshrink", "-o", tmp_path / "no", "--json")
    assert refused.code in (2, 3)
    assert "base" in refused.document["error"]["message"]
    words = ("--base", tmp_path / "elsewhere.safetensors")
    assert document("verify", tmp_path / "upon.inshrink", "--deep", *words)["ok"] is True


def test_a_resumed_training_opens_a_branch_and_the_old_one_stays(
    run: Path, exact: Path, tmp_path: Path
) -> None:
    second = write_run(tmp_path / "second", (30, 40), lr=1e-2)
    document("compress", second, "-o", exact, "--resumed-from", "20")
    found = document("inspect", exact)
    assert (found["n_branches"], found["steps"]) == (2, list(STEPS))
    assert [row["branch"] for row in found["frames"]] == [0, 0, 1, 1]
    for branch, folder in (("0", run), ("1", second)):
        document("restore", exact, "--step", "40", "--branch", branch, "-o", tmp_path / branch)
        assert (tmp_path / branch / "step_0040.pt").read_bytes() == (folder / "step_0040.pt").read_bytes()


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_archived(run: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(run, tmp_path / "run"))
    content = (broken / "step_0020.pt").read_bytes()
    (broken / "step_0020.pt").write_bytes(content[: len(content) // 2])
    outcome = inshrink("compress", broken, "-o", tmp_path / "a.inshrink", "--optimizer", "drop", "--json")
    assert outcome.code == 1
    assert outcome.document["appended"] == [10, 30, 40]
    (row,) = outcome.document["unreadable"]
    assert (Path(row["path"]).name, row["step"]) == ("step_0020.pt", 20)
    words = ("compress", broken, "-o", tmp_path / "a.inshrink", "--skip-damaged")
    assert document(*words)["skipped"] == [10, 30, 40]


def test_a_request_in_a_file_does_what_its_verb_does(run: Path, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    fields = {
        "run": str(run),
        "archive": str(tmp_path / "a.inshrink"),
        "steps": [10, 20],
        "codec": "lossless",
        "optimizer": "exact",
    }
    request.write_text(json.dumps({"verb": "compress", "fields": fields}))
    assert document("run", request)["appended"] == [10, 20]
    document("restore", tmp_path / "a.inshrink", "--step", "20", "-o", tmp_path / "out")
    assert (tmp_path / "out" / "step_0020.pt").read_bytes() == (run / "step_0020.pt").read_bytes()
