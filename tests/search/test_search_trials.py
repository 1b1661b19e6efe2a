"""The trial log: what it keeps, and what it does with a file that is none."""

import json

import pytest

from inshrink_core.search.trials import Trial, TrialLog, checkpoint_digest
from tests.builders import memory_checkpoint, seeded


def trial(step=10, **figures):
    return Trial(step=step, config={"codec": "lattice"}, raw_weights=1000, weights_nbytes=50, **figures)


def test_a_trial_comes_back_from_the_file_as_it_was(tmp_path):
    path = tmp_path / "search.trials.jsonl"
    log = TrialLog(path, "run")
    log.add("a", trial(drop=0.01, divergence=1e-4, drop_error=0.002, damage=3.0))
    log.add("b", trial(step=20, failure="its 'loss' is nan"))
    again = TrialLog(path, "run")
    assert again.values() == log.values()
    assert again.get("a").cached
    assert again.get("c") is None
    assert again.get("a").ratio_weights == 20


def test_what_a_crash_leaves_of_a_line_is_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    TrialLog(path, "run").add("a", trial())
    full = path.read_bytes()
    path.write_bytes(full + full.splitlines(keepends=True)[-1][:40])
    log = TrialLog(path, "run")
    assert len(log.values()) == 1
    log.add("b", trial(step=20))
    assert len(TrialLog(path, "run").values()) == 2


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"run": "run", "key": "x"}',
        json.dumps({"run": "run", "key": "x", **trial().to_json(), "drop": "much"}),
        json.dumps({"run": "run", "key": "x", **trial().to_json(), "config": []}),
    ],
)
def test_a_damaged_line_is_measured_again_and_the_others_are_kept(tmp_path, line, caplog):
    path = tmp_path / "log.jsonl"
    log = TrialLog(path, "run")
    log.add("a", trial())
    with path.open("a") as file:
        file.write(line + "\n")
    log = TrialLog(path, "run")
    assert len(log.values()) == 1
    assert "line 2 is not a result" in caplog.text


def test_trials_of_another_run_are_ignored(tmp_path):
    path = tmp_path / "log.jsonl"
    TrialLog(path, "run").add("a", trial())
    other = TrialLog(path, "other")
    assert other.values() == ()
    other.add("b", trial(step=20))
    assert [found.step for found in TrialLog(path, "run").values()] == [10]


def test_a_checkpoint_digest_tells_values_and_learning_rates():
    tensors = {"w": seeded((3, 4), 0), "w@exp_avg_sq": seeded((3, 4), 1)}
    item = checkpoint_digest(memory_checkpoint(1, tensors, {"w": {"lr": 1e-3}}))
    assert item == checkpoint_digest(memory_checkpoint(2, tensors, {"w": {"lr": 1e-3}}))
    assert item != checkpoint_digest(memory_checkpoint(1, tensors, {"w": {"lr": 1e-4}}))
    changed = {**tensors, "w@exp_avg_sq": seeded((3, 4), 2)}
    assert item != checkpoint_digest(memory_checkpoint(1, changed, {"w": {"lr": 1e-3}}))
