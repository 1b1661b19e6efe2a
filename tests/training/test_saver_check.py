"""The saver under a check: every save keeps the promised restore cost, and training is not touched."""

import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.chain.archive import _FrameSource
from inshrink_core.chain.meta import QUALITY, check_meta
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.errors import ConfigError, DamagedError, EvaluatorError, InputError
from inshrink_core.search import bounded
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_core.training.check import ModelEvaluator
from inshrink_core.training.saver import Saver
from tests.builders import evaluation
from tests.runs import batch, model, train


def classifier():
    """The model of all runs, with dropout, which a check must not see."""
    network = model()
    network.insert(4, nn.Dropout(0.2))
    return network


INPUTS, LABELS = map(torch.cat, zip(*map(batch, range(10_000, 10_016)), strict=True))


def check(judged):
    logits = judged(INPUTS)
    return {
        "loss": functional.cross_entropy(logits, LABELS),
        "log_probs": functional.log_softmax(logits, 1),
    }


NAN = torch.tensor(math.nan)


def loss_of(judged):
    return functional.cross_entropy(judged(INPUTS), LABELS)


def begin(path, **options):
    network = classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    return network, optimizer, Saver(path, network, optimizer, **options)


def quality_of(path):
    archive = Archive.open(path)
    return [archive.frame(info).meta.get(QUALITY) for info in archive.frames]


def cost_of(path, originals, judge=check):
    """Return what a restore of each step costs, measured anew."""
    archive = Archive.open(path)
    evaluator = ModelEvaluator(classifier().eval(), judge)
    return [
        evaluator.evaluate(originals[info.step]).restore_cost(evaluator.evaluate(archive.checkpoint(info)))
        for info in archive.frames
    ]


def saved(path, n_saves=6, every=15, **options):
    network, optimizer, saver = begin(path, **options)
    originals = {}
    with saver:
        for end in range(every, (n_saves + 1) * every, every):
            train(network, optimizer, range(end - every, end))
            originals[end] = {name: value.clone() for name, value in network.state_dict().items()}
            saver.save(end)
        saver.flush()
        failures = saver.check_failures
    return originals, failures


@pytest.mark.parametrize(
    ("judge", "bound", "shaping"),
    [(check, 0.02, "off"), (check, 0.0005, "off"), (check, 0.02, "auto"), (loss_of, 0.02, "off")],
)
def test_every_save_keeps_the_restore_cost(tmp_path, judge, bound, shaping):
    """A loss alone bounds its rise; what shaped errors cost lasts longer, so less of it is allowed."""
    options = {"check": judge, "max_restore_cost": bound, "config": {"shaping": shaping}}
    originals, failures = saved(tmp_path / "a", n_saves=4, **options)
    assert not failures
    error_persistence = LatticeCodec(shaping=shaping).error_persistence(0, 0)
    assert (error_persistence > 1) == (shaping == "auto")
    costs = cost_of(tmp_path / "a", originals, judge)
    assert max(costs) <= bound / error_persistence * (1 + 1e-5)
    for text, cost in zip(quality_of(tmp_path / "a"), costs, strict=True):
        assert (text["how"], text["bounds"]) == ("measured", {"restore_cost": bound})
        assert text["restore_cost"] == pytest.approx(cost, rel=1e-3, abs=1e-9)


def test_the_coarseness_follows_the_bound(tmp_path):
    sizes, ends = [], []
    for bound in (0.0005, 0.05):
        saved(tmp_path / str(bound), check=check, max_restore_cost=bound)
        archive = Archive.open(tmp_path / str(bound))
        sizes.append(sum(info.nbytes for info in archive.frames))
        ends.append(archive.frame(archive.reader.head).meta["config"]["coarseness"])
        assert max(text["restore_cost"] / bound for text in quality_of(tmp_path / str(bound))) > 0.05
    assert sizes[0] > sizes[1]
    assert ends[1] >= 4 * ends[0]


def test_less_of_the_bound_is_used_once_the_learning_rate_has_fallen(tmp_path):
    bound, used, peaks = 0.01, {}, {}
    for name, factor in (("steady", 1.0), ("falling", 1 / 64)):
        network, optimizer, saver = begin(tmp_path / name, check=check, max_restore_cost=bound)
        for save in range(1, 9):
            if save == 4:
                optimizer.param_groups[0]["lr"] *= factor
            train(network, optimizer, range(15 * save, 15 * save + 15))
            saver.save(save)
            if save == 5:  # another process goes on, and has never seen the higher rate
                saver.close()
                saver = Saver(tmp_path / name, network, optimizer, check=check, max_restore_cost=bound)
                saver.restore(save)
        saver.close()
        quality = quality_of(tmp_path / name)
        used[name] = [text["restore_cost"] for text in quality]
        peaks[name] = {text["peak_learning_rate"] for text in quality}
        assert all(text["bounds"] == {"restore_cost": bound} for text in quality)
    assert peaks == {"steady": {3e-3}, "falling": {3e-3}}
    assert used["steady"][:3] == used["falling"][:3]
    assert max(used["falling"][3:]) <= bound / 8 < max(used["steady"][3:])


def test_training_is_not_touched(tmp_path):
    plain, optimizer, saver = begin(tmp_path / "plain", codec="lossless")
    with saver:
        train(plain, optimizer, range(30))
        saver.save(30)
        train(plain, optimizer, range(30, 60))
    drawn = torch.get_rng_state()
    checked, optimizer, saver = begin(tmp_path / "checked", check=check)
    with saver:
        checked.train()
        train(checked, optimizer, range(30))
        saver.save(30)
        saver.flush()
        assert all(module.training for module in checked.modules())
        assert all(parameter.requires_grad for parameter in checked.parameters())
        train(checked, optimizer, range(30, 60))
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, checked.state_dict()[name]), name


def test_after_a_restore_the_same_step_is_judged_by_its_new_values(tmp_path):
    network, optimizer, saver = begin(tmp_path / "a", check=check, max_restore_cost=0.002)
    with saver:
        for end in (15, 30, 45):
            train(network, optimizer, range(end - 15, end))
            saver.save(end)
        saver.restore(15)
        train(network, optimizer, range(500, 515))
        again = {name: value.clone() for name, value in network.state_dict().items()}
        saver.save(30)
    archive = Archive.open(tmp_path / "a")
    evaluator = ModelEvaluator(classifier().eval(), check)
    restored = archive[30]
    cost = evaluator.evaluate(again).restore_cost(evaluator.evaluate(restored))
    assert cost <= 0.002 * (1 + 1e-5)
    text = archive.frame(archive.reader.head).meta[QUALITY]
    assert text["restore_cost"] == pytest.approx(cost, rel=1e-3, abs=1e-9)


def test_saves_between_checks_say_predicted(tmp_path):
    saved(tmp_path / "a", check=check, check_every=3)
    assert [text["how"] for text in quality_of(tmp_path / "a")] == [
        *("measured", "predicted", "predicted"),
        *("measured", "predicted", "predicted"),
    ]


@pytest.mark.parametrize(
    ("fails", "outcome", "every", "last"),
    [
        (lambda call: call > 6, RuntimeError, 1, "exact"),
        (lambda call: call == 3, RuntimeError, 1, "measured"),  # the two before are of the constructor
        (lambda call: call == 3, RuntimeError, 2, "predicted"),
        (lambda call: call > 4, NAN, 1, "exact"),
        *(
            (lambda call: call > 2, kind, 1, "exact")
            for kind in (SystemExit, KeyboardInterrupt, GeneratorExit)
        ),
    ],
)
def test_a_check_that_fails_makes_the_save_exact_and_stops_nothing(tmp_path, fails, outcome, every, last):
    calls = itertools.count(1)

    def failing(model):
        if not fails(next(calls)):
            return check(model)
        if outcome is NAN:
            return outcome
        raise outcome("no more of that")

    originals, failures = saved(tmp_path / "a", n_saves=3, check=failing, check_every=every)
    quality, costs = quality_of(tmp_path / "a"), cost_of(tmp_path / "a", originals)
    assert quality[-1]["how"] == last
    assert failures
    for step, text, cost in zip(originals, quality, costs, strict=True):
        assert (text["how"] == "exact") == (step in failures)
        if step in failures:
            assert cost == 0
            words = ("loss' is nan", "found inf of it") if outcome is NAN else ("no more of that",)
            assert any(word in failures[step] for word in words)


def test_an_interrupt_of_the_user_while_a_check_is_tried_is_no_failed_check(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "a", check=Mock(side_effect=KeyboardInterrupt))


def drawing(judged):
    return functional.cross_entropy(judged(INPUTS + torch.randn(1)), LABELS)


def counting():
    calls = []

    def changing(model):
        calls.append(None)
        return {"loss": loss_of(model) + len(calls)}

    return changing


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"check": drawing}, EvaluatorError, "draws random numbers"),
        ({"check": counting()}, EvaluatorError, "is not deterministic"),
        ({"check": lambda model: None}, EvaluatorError, "no number"),
        ({"check": lambda model: {"accuracy": 1.0}}, EvaluatorError, "returned no 'loss'"),
        ({"check": Mock(side_effect=SystemExit(3))}, EvaluatorError, "SystemExit"),
        ({"check": lambda model: 1 / 0}, EvaluatorError, "ZeroDivisionError"),
        ({"check": lambda model: {"loss": 0.0}}, InputError, "--max-restore-cost cannot be checked"),
        ({"max_restore_cost": 0.01}, InputError, "no check"),
        ({"check": check, "check_every": 0}, InputError, "check_every"),
        ({"check": check, "max_restore_cost": -1}, InputError, "--max-restore-cost is not a bound"),
        ({"check": check, "codec": "lossless"}, ConfigError, "nothing to search"),
    ],
)
def test_misuse_is_refused_when_constructed(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        begin(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()
    classifier()
    after = torch.get_rng_state()
    with pytest.raises(error):
        begin(tmp_path / "b", **options)
    assert torch.equal(torch.get_rng_state(), after)


def test_restore_cost_is_divergence_over_the_loss_or_the_entropy():
    half, other = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.25, 0.75]]))
    nats = 0.5 * math.log(4 / 3)
    first = evaluation(2.0, log_probs=half.numpy())
    second = evaluation(2.0, log_probs=other.numpy())
    assert first.restore_cost(second) == pytest.approx(nats / 2, rel=1e-6)
    accuracy = evaluation(0.9, "accuracy", log_probs=half.numpy())
    assert accuracy.restore_cost(second) == pytest.approx(nats / math.log(2), rel=1e-6)


def test_restore_cost_of_a_regression_and_of_a_loss_alone():
    first = evaluation(0.5, predictions=torch.tensor([0.0, 1.0]).numpy())
    second = evaluation(0.4, predictions=torch.tensor([0.1, 1.0]).numpy())
    assert first.restore_cost(second) == pytest.approx(0.01 / 2 / 0.5)
    assert evaluation(0.5).restore_cost(evaluation(0.4)) == pytest.approx(0.2)
    assert evaluation(0.5, "accuracy").restore_cost(evaluation(0.4, "accuracy")) is None
    assert evaluation(0.0).restore_cost(evaluation(0.4)) is None


def test_compress_controls_the_restore_cost_where_there_is_an_evaluator(tmp_path):
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    evaluator = f"{run.directory}/evaluator.py:evaluate"
    report = inshrink_core.compress(run, tmp_path / "a", steps=run.steps[-2:], evaluator=evaluator)
    assert report.bound_record.bounds.limits == {"restore_cost": DEFAULT_MAX_RESTORE_COST}
    comparison = inshrink_core.compare(tmp_path / "a", run, evaluator=evaluator)
    assert 0 < comparison.max_restore_cost <= DEFAULT_MAX_RESTORE_COST
    assert all(text["how"] == "measured" for text in quality_of(tmp_path / "a"))
    free = inshrink_core.compress(run, tmp_path / "b", steps=run.steps[-2:])
    assert free.bound_record is None
    assert quality_of(tmp_path / "b") == [None, None]


@pytest.mark.parametrize(
    "quality", [{"how": 1}, {"how": "measured", "drop": "small"}, {"bounds": []}, {"bounds": {"drop": "x"}}]
)
def test_a_frame_that_says_nonsense_of_its_quality_is_damaged(quality):
    with pytest.raises(DamagedError, match="quality"):
        check_meta({QUALITY: quality}, "here")


def test_a_save_is_what_its_trial_encoded_and_is_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(Archive, "decode", Mock(side_effect=AssertionError("a frame is decoded")))
    _, failures = saved(tmp_path / "a", n_saves=2, check=check)
    assert not failures


def test_a_frame_that_does_not_lie_there_as_written_is_decoded_and_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "is_intact", lambda *_: False)
    originals, failures = saved(tmp_path / "a", n_saves=2, check=check)
    assert not failures
    assert len(cost_of(tmp_path / "a", originals)) == 2
    monkeypatch.setattr(_FrameSource, "read", lambda source, spec: torch.zeros(spec.shape))
    _, failures = saved(tmp_path / "b", n_saves=2, check=check)
    assert list(failures) == [15, 30]
    assert all("although it was measured" in why for why in failures.values())
