"""Rehearsals under a promise: every save keeps it as restored, and the chain is the one `compress` writes."""

import json
import shutil

import pytest
import torch

import inshrink_lab
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.formats import open_run
from inshrink_core.training.spool import Spool
from inshrink_core.verbs.compress import compress
from inshrink_lab import failing as training
from inshrink_lab.failing import task_evaluator
from inshrink_lab.tasks.task import find_task
from tests.lab.test_rehearsal import TASK


@pytest.fixture
def originals(tmp_path, monkeypatch):
    """Every save as training made it, copied before the spool lets go of it."""
    folder = tmp_path / "originals"
    folder.mkdir()
    original = Spool.drop

    def drop(spool, path):
        for file in path.glob("step_*.pt"):
            shutil.copy(file, folder)
        original(spool, path)

    monkeypatch.setattr(Spool, "drop", drop)
    return folder


def judged(task, run, archive, step):
    """Drop and divergence of a step as its frame decodes, worked out anew."""
    evaluator = task_evaluator(find_task(task)[0])
    first, second = evaluator.evaluate(run[step]), evaluator.evaluate(archive[step])
    return (second.value - first.value) / first.value, first.divergence(second)


def test_every_save_of_a_training_that_fails_keeps_the_bounds_as_restored(task, originals, tmp_path):
    result = inshrink_lab.rehearse(
        task, tmp_path / "out", seeds=1, steps=60, max_drop=0.01, max_divergence=1e-3, keep_archives=True
    )
    document = result.to_json()
    assert document["bounds"] == {"drop": 0.01, "divergence": 1e-3}
    assert document["restored_at"] == [20, 40]
    assert document["evaluations"] >= len(document["frames"]) == 6
    run = open_run(originals)
    (path,) = (tmp_path / "out" / "archives").iterdir()
    archive = Archive.open(path)
    for frame in document["frames"]:
        drop, divergence = judged(task, run, archive, frame["step"])
        assert (frame["drop"], frame["divergence"]) == (pytest.approx(drop), pytest.approx(divergence))
        assert drop <= 0.01
        assert divergence <= 1e-3
        assert frame["seed"] == 0
        assert frame["discriminative"] in (True, False)
        assert frame["config"]["codec"] == "lattice"
    assert document["max_divergence"] == max(frame["divergence"] for frame in document["frames"])
    assert len({json.dumps(frame["config"]) for frame in document["frames"]}) > 1


@pytest.mark.parametrize("codec", ["lattice", "qd"])
def test_a_training_without_failures_is_archived_as_compress_archives_its_saves(
    task, originals, tmp_path, monkeypatch, codec
):
    options = {"codec": codec, "max_drop": 0.01, "max_divergence": 1e-3}
    if codec == "lattice":
        # Of a first save, nobody knows the one after it: nothing coarser than the start is tried.
        options["config"] = {"coarseness": 2.5}
    rehearsed = inshrink_lab.rehearse(
        task, tmp_path / "out", seeds=1, steps=60, restores=0, keep_archives=True, **options
    )
    evaluator = task_evaluator(find_task(task)[0])
    monkeypatch.setattr(EvaluatorRequest, "resolve", lambda *_: evaluator)
    report = compress(open_run(originals), tmp_path / "a.inshrink", **options, threads=1, look_ahead=False)
    names = ("step", "config", "drop", "divergence", "discriminative", "exact")
    found, expected = (
        [{name: frame[name] for name in names} for frame in frames]
        for frames in (rehearsed.to_json()["frames"], report.to_json()["frames"])
    )
    assert found == expected
    (path,) = (tmp_path / "out" / "archives").iterdir()
    first, second = Archive.open(path), Archive.open(tmp_path / "a.inshrink")
    for step in first.steps:
        for spec in first[step].specs:
            if spec.role in MODEL_ROLES:
                assert torch.equal(first[step][spec.key], second[step][spec.key])


@pytest.mark.parametrize("codec", ["lattice", "qd"])
def test_a_bound_that_nothing_keeps_makes_every_save_exact_and_the_excess_zero(task, tmp_path, codec):
    result = inshrink_lab.rehearse(
        task, tmp_path, codec=codec, seeds=1, steps=60, restores=3, max_divergence=0.0
    )
    assert [frame["exact"] for frame in result.to_json()["frames"]] == [True] * 6
    assert result.excess == 0.0


def test_a_rehearsal_under_bounds_is_kept_apart_and_not_run_again(task, tmp_path, monkeypatch):
    options = {"seeds": 1, "steps": 12, "restores": 1}
    plain = inshrink_lab.rehearse(task, tmp_path, **options)
    bounded = inshrink_lab.rehearse(task, tmp_path, **options, max_drop=0.01)
    inshrink_lab.rehearse(task, tmp_path, **options, max_drop=0.01, max_divergence=0.003)
    assert len(list((tmp_path / "results").glob("restored-*"))) == 3
    assert len(list((tmp_path / "results").glob("uninterrupted-*"))) == 1
    assert "bounds" not in plain.to_json()
    monkeypatch.setattr(training, "Training", None)
    assert inshrink_lab.rehearse(task, tmp_path, **options) == plain
    assert inshrink_lab.rehearse(task, tmp_path, **options, max_drop=0.01) == bounded


def test_a_divergence_bound_needs_a_task_that_gives_predictions(tmp_path, monkeypatch):
    path = tmp_path / "blind.py"
    path.write_text(TASK.replace('"log_probs":', '"others":'))
    monkeypatch.setattr(training, "Training", None)
    with pytest.raises(InputError, match="log_probs"):
        inshrink_lab.rehearse(f"{path}:Colours", tmp_path / "out", max_divergence=0.01)


@pytest.mark.parametrize("name", ["char-gpt", "digits-cnn", "denoise", "regression"])
def test_shipped_tasks_give_predictions_beside_the_metric(name):
    found, _ = find_task(name)
    evaluation = task_evaluator(found).evaluate(found.build().state_dict())
    assert (evaluation.log_probs is None) != (evaluation.predictions is None)


def test_a_state_that_the_task_cannot_judge_is_one_clear_error(task):
    found, _ = find_task(task)
    evaluator = task_evaluator(found)
    state = found.build().state_dict()
    with pytest.raises(EvaluatorError, match=r"no tensor '0\.weight'"):
        evaluator.evaluate({})
    with pytest.raises(EvaluatorError, match="another model"):
        evaluator.evaluate(state | {"0.weight": torch.zeros(2, 2)})
    with pytest.raises(NotFiniteError, match="'loss' is nan"):
        evaluator.evaluate(state | {"0.weight": state["0.weight"] * float("nan")})
    found.judged = lambda model: {}["loss"]
    with pytest.raises(EvaluatorError, match="KeyError"):
        task_evaluator(found).evaluate(state)
