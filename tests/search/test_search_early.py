"""Trials that are given up early: only where a bound is broken, and never taken for whole ones."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from inshrink_core.chain import ChainConfig
from inshrink_core.codec import get_codec
from inshrink_core.errors import EvaluatorError
from inshrink_core.evaluate import Evaluation, EvaluatorRequest, PartialEvaluation
from inshrink_core.formats import open_run
from inshrink_core.metrics import Direction
from inshrink_core.search.bounds import Bounds, Partial
from inshrink_core.search.calibration import calibrate
from inshrink_core.search.judge import CONFIDENT_ERRORS, EarlyExit, Judge
from inshrink_core.search.space import space_of
from inshrink_core.search.trials import Trial, TrialLog, TrialRunner
from inshrink_core.verbs.search import search
from tests.runs import batch, model, write_run
from tests.search.evaluators import InProcess

HALVES = np.log(np.full((10, 2), 0.5))
LINE = space_of("lattice")


def original(value=1.0, direction=Direction.LOWER, log_probs=None):
    return Evaluation(
        metric="loss", direction=direction, value=value, metrics={"loss": value}, log_probs=log_probs
    )


def so_far(value, n, of=10, direction=Direction.LOWER, **more):
    return PartialEvaluation(metric="loss", direction=direction, value=value, n=n, of=of, **more)


def test_a_mean_of_scores_from_zero_is_given_up_when_zeros_for_the_rest_would_not_save_it():
    ended = EarlyExit(original(1.0), Bounds(max_drop=0.5))
    # 1.5 is allowed: after 4 of 10 samples at 3.7 the mean is at least 1.48, after 5 of 10 at least 1.85.
    assert not ended(so_far(3.7, 4, limits=(0.0, None)))
    assert ended(so_far(3.7, 5, limits=(0.0, None)))
    assert ended.figures.partial == Partial(rule="certain", n=5, of=10, least_drop=pytest.approx(0.85))
    assert ended.figures.drop == pytest.approx(2.7)


def test_a_score_that_is_better_higher_is_judged_by_its_largest():
    ended = EarlyExit(original(0.9, Direction.HIGHER), Bounds(max_drop=0.1))
    # .81 is allowed: with 6 of 10 at .7 it may still be .82, with 7 of 10 only .79.
    assert not ended(so_far(0.7, 6, direction=Direction.HIGHER, limits=(0.0, 1.0)))
    assert ended(so_far(0.7, 7, direction=Direction.HIGHER, limits=(0.0, 1.0)))


def test_without_a_range_or_an_error_a_mean_so_far_says_nothing():
    ended = EarlyExit(original(1.0), Bounds(max_drop=0.01))
    assert not ended(so_far(100.0, 9))
    assert not ended(so_far(100.0, 9, limits=(None, 200.0)))
    assert not ended(so_far(math.nan, 9, limits=(0.0, None)))
    assert not ended(dataclasses.replace(so_far(100.0, 9, limits=(0.0, None)), metric="other"))
    assert not ended(so_far(None, 9, limits=(0.0, None)))


def test_a_standard_error_gives_up_where_four_of_them_do_not_reach_the_bound():
    ended = EarlyExit(original(1.0), Bounds(max_drop=0.1))
    room = 0.3 / (CONFIDENT_ERRORS * math.sqrt(1 - 0.5))
    assert not ended(so_far(1.4, 5, standard_error=room * 1.01))
    assert ended(so_far(1.4, 5, standard_error=room * 0.99))
    assert ended.figures.partial.rule == "confident"
    assert not EarlyExit(original(1.0), Bounds(max_drop=0.1))(so_far(1.4, 5, standard_error=math.nan))


def test_rows_so_far_bound_the_divergence_from_below_for_none_is_negative():
    rows = np.log(np.tile([0.9, 0.1], (10, 1)))
    each = math.log(0.5) - 0.5 * math.log(0.9 * 0.1)
    ended = EarlyExit(original(log_probs=HALVES), Bounds(max_divergence=0.35 * each))
    assert not ended(so_far(None, 1, log_probs=rows[:2]))
    assert not ended(so_far(None, 2, log_probs=rows[2:3]))
    assert ended(so_far(None, 3, log_probs=rows[3:4]))
    assert ended.figures.partial.least_divergence == pytest.approx(0.4 * each)
    assert ended.figures.divergence == pytest.approx(each)
    assert ended.figures.partial.rule == "certain"


def test_what_rounding_could_undo_is_not_given_up():
    ended = EarlyExit(original(1.0), Bounds(max_drop=0.5))
    assert not ended(so_far(1.5 + 1e-9, 10, limits=(0.0, None)))


def test_rows_that_cannot_be_compared_are_left_to_the_full_result():
    ended = EarlyExit(original(log_probs=HALVES), Bounds(max_divergence=1e-9))
    assert not ended(so_far(None, 1, log_probs=np.full((2, 2), np.nan)))
    with pytest.raises(EvaluatorError, match="more rows"):
        EarlyExit(original(log_probs=HALVES), Bounds())(so_far(None, 1, log_probs=np.zeros((11, 2))))


@pytest.mark.parametrize("seed", range(20))
def test_a_state_that_keeps_the_bounds_in_full_is_never_given_up_for_certain(seed):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(2, 40, 5)) * [[[1.0]], [[0.2]]]
    first = logits[0] - np.log(np.exp(logits[0]).sum(1, keepdims=True))
    raw = logits[0] + logits[1]
    second = raw - np.log(np.exp(raw).sum(1, keepdims=True))
    losses = [-rows[np.arange(40), np.arange(40) % 5] for rows in (first, second)]
    before = original(losses[0].mean(), log_probs=first)
    after = original(losses[1].mean(), log_probs=second)
    bounds = Bounds(
        max_drop=max(after.value / before.value - 1, 0.0), max_divergence=before.divergence(after)
    )
    ended = EarlyExit(before, bounds)
    for n in range(1, 41):
        assert not ended(so_far(losses[1][:n].mean(), n, 40, limits=(0.0, None), log_probs=second[n - 1 : n]))


class Streaming(InProcess):
    """The evaluator of these tests, image by image."""

    n_seen = 0

    def evaluate_until(self, state_dict, stop):
        whole = self.evaluate(state_dict)
        network = model()
        network.load_state_dict(state_dict.state_dict())
        network.eval()
        inputs, targets = batch(10_000)
        with torch.inference_mode():
            log_probs = torch.log_softmax(network(inputs), dim=1)
        losses = nn.functional.nll_loss(log_probs.double(), targets, reduction="none")
        for n in range(1, len(inputs)):
            self.n_seen += 1
            partial = so_far(
                float(losses[:n].mean()),
                n,
                len(inputs),
                limits=(0.0, None),
                log_probs=log_probs[n - 1 : n].numpy(),
            )
            if stop(partial):
                return partial
        return whole


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("early") / "run", n_steps=3))


@pytest.fixture
def ask(run, tmp_path):
    """Return a function that makes a runner under bounds, its log in a file."""
    made = []

    def make(bounds, evaluator=None):
        judge = Judge([evaluator or Streaming(tmp_path)], run.__getitem__, bounds)
        made.append(judge)
        config = get_codec("lattice")()
        return TrialRunner(
            checkpoints=run.__getitem__,
            steps=run.steps,
            base=ChainConfig(config=config),
            judge=judge,
            log=TrialLog(tmp_path / "log.jsonl", "run"),
        )

    yield make
    for judge in made:
        judge.close()


def coarse(runner):
    return runner.walk(LINE.candidate(60.0), lambda trial: False)[0]


def test_a_trial_given_up_says_so_keeps_no_bound_and_is_read_back_as_such(ask, tmp_path):
    bounds = Bounds(max_divergence=1e-3)
    trial = coarse(ask(bounds))
    assert trial.partial is not None
    assert 0 < trial.partial.n < trial.partial.of
    assert not bounds.judge(trial.figures).kept
    assert bounds.judge(trial.figures).usage > 1
    assert trial.to_json()["partial"]["rule"] == "certain"
    again = ask(bounds)
    assert coarse(again) == trial
    assert coarse(again).cached
    assert again.judge.bounds(again.steps[0]) == bounds


def test_a_trial_given_up_under_one_bound_is_measured_in_full_under_a_looser_one(ask):
    assert coarse(ask(Bounds(max_divergence=1e-3))).partial is not None
    loose = ask(Bounds(max_divergence=1e9))
    whole = coarse(loose)
    assert whole.partial is None
    assert not whole.cached
    # The whole one stands in its place from now on, whatever is promised.
    assert coarse(ask(Bounds(max_divergence=1e-3))) == whole


def test_without_bounds_every_trial_is_whole(ask):
    assert coarse(ask(Bounds())).partial is None


def test_an_original_is_never_given_up(ask, run):
    runner = ask(Bounds(max_divergence=0.0))
    assert runner.judge.figures(run.steps[0], run[run.steps[0]], until_broken=True).partial is None


def test_partial_trials_tell_the_quadratic_model_nothing():
    trials = [
        Trial(step=1, config={}, raw_weights=4, weights_nbytes=2, divergence=d, damage=d)
        for d in (1.0, 2.0, 3.0)
    ]
    partial = dataclasses.replace(trials[0], divergence=99.0, partial=Partial(rule="certain", n=1, of=2))
    assert calibrate([*trials, partial]) == calibrate(trials)
    assert calibrate([*trials, partial]).n_trials == 3


def test_a_search_with_early_exits_keeps_its_bounds_and_sees_fewer_samples(run, tmp_path, monkeypatch):
    plain, streaming = InProcess(tmp_path), Streaming(tmp_path)
    options = {"max_divergence": 1e-3, "gain": False}
    found = {}
    for name, evaluator in (("plain", plain), ("streaming", streaming)):
        monkeypatch.setattr(EvaluatorRequest, "resolve", lambda *_, one=evaluator: one)
        found[name] = search(run, output=tmp_path / f"{name}.json", **options)
    assert found["streaming"].best.divergence <= 1e-3
    assert found["streaming"].best.ratio_weights > 0.95 * found["plain"].best.ratio_weights
    document = json.loads((tmp_path / "streaming.json").read_text())
    partial = [trial for trial in document["trials"] if trial["partial"]]
    assert partial
    assert all(trial["divergence"] > 1e-3 for trial in partial)
    assert streaming.n_seen < 15 * len(document["trials"])
    assert all(trial.partial is None for trial in found["streaming"].best.trials)


@pytest.mark.parametrize(
    "partial",
    [3, {}, {"rule": "certain", "n": "1", "of": 2}, {"rule": "x", "n": 1, "of": 2, "least_drop": "a"}],
)
def test_a_partial_trial_that_cannot_be_read_is_measured_again(ask, tmp_path, partial):
    trial = coarse(ask(Bounds(max_divergence=1e-3)))
    path = tmp_path / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["partial"] = partial
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = coarse(ask(Bounds(max_divergence=1e-3)))
    assert not again.cached
    assert again.partial == trial.partial
