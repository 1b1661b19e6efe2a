"""What is seen, measured and chosen: inspect, sensitivity, evaluate, compare, estimate, search."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.blackbox.conftest import JUDGE, STEPS, contents, document, inshrink, model


def weights(run: Path, step: int = STEPS[-1]) -> dict[str, torch.Tensor]:
    return torch.load(run / f"step_{step:04d}.pt", weights_only=True)["model"]


def loss(run: Path, step: int) -> float:
    names: dict = {}
    exec(JUDGE, names)  # the text above, by Python itself
    return names["evaluate"](weights(run, step))["loss"]


def test_a_run_is_described_by_its_headers(run: Path) -> None:
    found = document("inspect", run, "--tensors")
    assert (found["kind"], found["format"], found["steps"]) == ("run", "torch", list(STEPS))
    n_parameters = sum(parameter.numel() for parameter in model().parameters())
    assert found["roles"]["exp_avg"]["raw_bytes"] == n_parameters * 4 * len(STEPS)
    rows = {row["key"]: row for row in found["tensors"]}
    body = rows["body.weight"]
    assert (body["role"], body["dtype"], body["shape"]) == ("weight", "float32", [256, 64])
    assert (body["n_steps"], body["raw_bytes"]) == (len(STEPS), 256 * 64 * 4 * len(STEPS))
    assert rows["body.weight@exp_avg"]["shape"] == [256, 64]
    assert rows["norm.running_mean"]["role"] == "buffer"
    assert found["raw_bytes"] == sum(row["raw_bytes"] for row in found["tensors"])
    assert found["skipped"] == []


def test_a_run_of_folders_has_the_steps_of_their_names(folders: Path) -> None:
    found = document("inspect", folders)
    assert (found["format"], found["steps"]) == ("huggingface", list(STEPS[:3]))
    assert {"weight", "exp_avg", "exp_avg_sq"} <= found["roles"].keys()


def test_an_archive_is_described_by_its_frames_and_needs(run: Path, made_exact: Path) -> None:
    found = document("inspect", made_exact)
    assert (found["kind"], found["format"], found["codec"]) == ("archive", "inshrink", "lossless")
    assert (found["optimizer"], found["steps"], found["n_branches"]) == ("exact", list(STEPS), 1)
    assert [row["kind"] for row in found["frames"]] == ["keyframe", "delta", "delta", "delta"]
    assert found["ratio_total"] == pytest.approx(found["raw_bytes"] / found["archive_bytes"])
    assert found["archive_bytes"] <= sum(map(len, contents(made_exact).values()))
    assert (found["missing_frames"], found["manifest_problem"]) == ([], None)
    sizes = [len(content) for content in contents(run).values()]
    assert (found["needs"]["disk_step"], found["needs"]["disk_all"]) == (max(sizes), sum(sizes))


def test_magnitudes_are_the_means_of_absolute_weights(run: Path) -> None:
    words = ("sensitivity", run, "--metric", "magnitude", "--steps", "20:40:2")
    found = document(*words)
    assert (found["metric"], found["steps"]) == ("magnitude", [20, 40])
    (row,) = (row for row in found["rows"] if row["name"] == "body.weight")
    assert (row["n_parameters"], row["shape"]) == (256 * 64, [256, 64])
    for value, step in zip(row["mean"], (20, 40), strict=True):
        assert value == pytest.approx(float(weights(run, step)["body.weight"].abs().mean()), rel=1e-4)


@pytest.mark.parametrize("metric", ["fisher", "taylor", "update"])
def test_other_sensitivities_are_known_for_every_layer_type(run: Path, metric: str) -> None:
    found = document("sensitivity", run, "--metric", metric, "--by", "layer_type")
    assert {row["name"] for row in found["rows"]} >= {"linear", "vector"}
    assert all(row["mean"][-1] > 0 for row in found["rows"] if row["name"] == "linear")


def test_an_evaluator_gives_the_figure_that_it_gives_by_itself(run: Path, judge: str) -> None:
    found = document("evaluate", run, "--evaluator", judge, "--eval-metric", "loss", "--step", "20")
    assert (found["step"], found["metric"], found["direction"]) == (20, "loss", "lower")
    assert found["value"] == pytest.approx(loss(run, 20), rel=1e-6)
    assert found["log_probs"] == [64, 10]


def test_an_evaluator_that_fails_is_named_with_its_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def evaluate(state):\n    raise ValueError('no data today')\n")
    outcome = inshrink("evaluate", run, "--evaluator", f"{tmp_path / 'bad.py'}:evaluate", "--json")
    assert outcome.code == 2
    assert "no data today" in outcome.document["error"]["message"]


def test_an_exact_archive_compares_without_a_drop(run: Path, made_exact: Path, judge: str) -> None:
    found = document("compare", made_exact, "--against", run, "--evaluator", judge, "--eval-metric", "loss")
    assert (found["metric"], found["direction"]) == ("loss", "lower")
    assert (found["max_drop"], found["max_divergence"]) == (0, 0)
    rows = found["steps"]
    assert [row["step"] for row in rows] == list(STEPS)
    assert all(row["original"] == row["restored"] for row in rows)
    assert rows[1]["original"] == pytest.approx(loss(run, 20), rel=1e-6)
    assert rows[0]["previous_drop"] is None
    assert rows[1]["previous_drop"] == pytest.approx(loss(run, 10) / loss(run, 20) - 1, rel=1e-4)


def test_a_bound_that_is_broken_ends_a_comparison_with_1_and_its_figures(
    run: Path, made_lossy: Path, judge: str
) -> None:
    words = ("--against", run, "--evaluator", judge, "--eval-metric", "loss", "--max-divergence", "1e-12")
    outcome = inshrink("compare", made_lossy, *words, "--json")
    assert (outcome.code, outcome.document["error"]["exit_code"]) == (1, 1)
    assert outcome.document["max_divergence"] > 1e-12
    assert len(outcome.document["steps"]) == len(STEPS)


def test_an_estimate_is_near_what_compress_then_measures(run: Path, made_lossy: Path) -> None:
    found = document("estimate", run, "--set", "coarseness=2")
    assert found["estimate"] is True
    assert (found["codec"], found["config"]["coarseness"]) == ("lattice", 2)
    measured = document("inspect", made_lossy)
    assert measured["ratio_weights"] / 2 < found["ratio_weights"] < measured["ratio_weights"] * 2


def test_a_search_finds_a_configuration_that_keeps_its_bound_and_compress_takes_it(
    run: Path, judge: str, tmp_path: Path
) -> None:
    result = tmp_path / "search.json"
    words = ("--evaluator", judge, "--eval-metric", "loss", "--max-drop", "0.02", "--steps", "10:20")
    found = document("search", run, *words, "--budget", "6", "-o", result)
    assert (found["metric"], found["bounds"]["drop"], found["steps"]) == ("loss", 0.02, [10, 20])
    assert found["best"]["drop"] <= 0.02
    assert found["best"]["ratio_weights"] > 1
    made = document("compress", run, "-o", tmp_path / "a.inshrink", "--config", result, "--steps", "10:20")
    assert made["ratio_weights"] == pytest.approx(found["best"]["ratio_weights"], rel=0.1)
    judged = inshrink("compare", tmp_path / "a.inshrink", "--against", run, *words, "--json")
    assert judged.code == 0, judged.err
