"""Runs that are short or explode: what cannot be controlled is exact, and nothing is lost."""

import math

import pytest
import torch

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.chain.meta import QUALITY
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.verbs.compress import compress
from tests.runs import write_run
from tests.search.evaluators import InProcess

EVERY = 5
N_SAVES = 6

States = dict[int, dict[str, torch.Tensor]]


def times(factor):
    return lambda value: value * factor


def one_infinity(value):
    changed = value.clone()
    changed.view(-1)[0] = math.inf
    return changed


EXPLOSIONS = {
    "1000 times": times(1e3),
    "1e30": times(1e30),
    "nan": times(math.nan),
    "an infinity": one_infinity,
}


def run_with(folder, change=None, at=0, n_saves=N_SAVES):
    """Write a run whose weights explode at one save; training goes on from what it was. Return its models."""
    states: States = {}
    for path in write_run(folder, n_saves, EVERY).iterdir():
        content = torch.load(path, weights_only=True)
        if change is not None and content["step"] == at * EVERY:
            for name, value in content["model"].items():
                content["model"][name] = change(value) if value.dim() > 1 else value
            torch.save(content, path)
        states[content["step"]] = content["model"]
    return dict(sorted(states.items()))


def errors(archive, states):
    """Return the largest relative error of a matrix by step; NaN where a value that is not finite is lost."""
    opened = Archive.open(archive)
    assert opened.steps == tuple(states)
    found = {}
    for step, state in states.items():
        restored = opened.checkpoint(opened.reader.find(step)).state_dict()
        assert restored.keys() == state.keys()
        found[step] = max(_error(restored[name], value) for name, value in state.items() if value.dim() > 1)
    return found


def _error(restored, original):
    if torch.equal(restored.nan_to_num(7.0, 8.0, 9.0), original.nan_to_num(7.0, 8.0, 9.0)):
        return 0.0
    return float((restored.double() - original).norm() / original.double().norm())


@pytest.fixture(scope="module")
def error_without_explosion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    states = run_with(folder / "run")
    compress(folder / "run", folder / "a", threads=1)
    largest = max(errors(folder / "a", states).values())
    assert largest < 0.04
    return largest


# Every kind at every place, and both of them with a look ahead and without.
@pytest.mark.parametrize(
    ("kind", "at", "look_ahead"),
    [
        (kind, at, (i + j) % 2 == 0)
        for i, kind in enumerate(EXPLOSIONS)
        for j, at in enumerate((1, 2, N_SAVES))
    ],
)
def test_weights_that_explode_at_one_step_do_not_harm_the_others(
    tmp_path, look_ahead, at, kind, error_without_explosion
):
    states = run_with(tmp_path / "run", EXPLOSIONS[kind], at)
    compress(tmp_path / "run", tmp_path / "a", threads=1, look_ahead=look_ahead)
    found = errors(tmp_path / "a", states)
    assert max(found.values()) < 4 * error_without_explosion
    if kind not in ("1000 times", "1e30"):
        assert found[at * EVERY] == 0


@pytest.mark.parametrize("kind", ["1e30", "nan"])
def test_a_bounded_compress_stores_exactly_what_it_cannot_judge(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(EvaluatorRequest, "resolve", lambda *_: InProcess(tmp_path))
    states = run_with(tmp_path / "run", EXPLOSIONS[kind], 3)
    report = compress(tmp_path / "run", tmp_path / "a", max_restore_cost=0.01, threads=1)
    assert report.failure is None
    assert report.to_json()["max_restore_cost"] <= 0.01
    found = errors(tmp_path / "a", states)
    assert max(found.values()) < 1
    assert found[3 * EVERY] == 0
    archive = Archive.open(tmp_path / "a")
    quality = archive.frame(archive.reader.find(3 * EVERY)).meta[QUALITY]
    assert quality["how"] == "exact"
    again = compress(tmp_path / "run", tmp_path / "a", max_restore_cost=0.01, threads=1)
    assert (again.failure, again.appended) == (None, ())


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("n_saves", [1, 2])
def test_runs_too_short_to_look_ahead(tmp_path, look_ahead, n_saves):
    states = run_with(tmp_path / "run", n_saves=n_saves)
    compress(tmp_path / "run", tmp_path / "a", threads=1, look_ahead=look_ahead)
    assert max(errors(tmp_path / "a", states).values()) < 0.05
    assert inshrink_core.verify(tmp_path / "a", deep=True).ok
