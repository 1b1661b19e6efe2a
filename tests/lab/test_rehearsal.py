"""The rehearsal: a control at exactly zero, failures that are real, and no training done twice."""

import json
import math

import pytest
import torch

import inshrink_core
import inshrink_lab
from inshrink_core.errors import InputError
from inshrink_lab import failing as training
from inshrink_lab.rehearsal import Rehearsal, half_width
from inshrink_lab.results import TrainingResult

TASK = '''
import torch
from torch import nn
from torch.nn import functional


class Colours:
    """Three classes of points. Dropout draws from torch's global generator, which is restored, too."""

    name, version, metric, direction = "colours", 1, "loss", "lower"
    n_steps, n_saves, n_restores, max_gradient_norm = 12, 6, 2, 1.0

    def build(self):
        return nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, 48), nn.Tanh(),
                             nn.Linear(48, 3))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def learning_rate_factor(self, step, n_steps):
        return 1.0

    def batch(self, step, generator):
        inputs = torch.randn(32, 6, generator=generator)
        return inputs, inputs[:, :3].argmax(1)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def judged(self, model):
        model.eval()
        inputs, labels = self.batch(0, torch.Generator().manual_seed(1))
        logits = model(inputs)
        model.train()
        return {"loss": functional.cross_entropy(logits.double(), labels),
                "log_probs": functional.log_softmax(logits, 1)}

    def evaluate(self, model):
        return float(self.judged(model)["loss"])
'''


@pytest.fixture
def counted(monkeypatch):
    """Count the trainings that are really run."""
    runs = []
    for name in ("train_uninterrupted", "train_restored", "train_perturbed"):
        original = getattr(training, name)

        def counting(*arguments, _original=original, _name=name, **options):
            runs.append(_name.removeprefix("train_"))
            return _original(*arguments, **options)

        monkeypatch.setattr(training, name, counting)
    return runs


def test_the_control_with_a_lossless_codec_is_at_exactly_zero(task, tmp_path):
    result = inshrink_lab.rehearse(task, tmp_path, codec="lossless", restores=5, seeds=2)
    assert result.restored_at == (2, 4, 6, 8, 10)
    assert result.excess == result.excess_half_width == 0.0
    for before, after in zip(result.uninterrupted, result.restored, strict=True):
        assert before.metrics == after.metrics
        assert before.train_losses == after.train_losses
    assert result.noise > 0


def test_a_control_moves_every_weight_by_its_last_bit_and_tells_what_chance_costs(task, tmp_path):
    options = {"codec": "lossless", "restores": 2, "seeds": 2}
    without = inshrink_lab.rehearse(task, tmp_path, **options)
    assert without.perturbed == ()
    assert without.chance is without.beyond_chance is without.beyond_chance_half_width is None
    result = inshrink_lab.rehearse(task, tmp_path, **options, control=True)
    for before, moved in zip(result.uninterrupted, result.perturbed, strict=True):
        assert moved.metrics[:2] == before.metrics[:2]
        assert moved.metrics[2:] == pytest.approx(before.metrics[2:], rel=0.2)
        assert moved.metrics[2:] != before.metrics[2:]
    assert result.chance != 0.0
    assert result.beyond_chance == pytest.approx(-result.chance)
    assert result.beyond_chance_half_width > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_perturbed_weight_is_a_neighbour_of_itself(dtype):
    model = torch.nn.Linear(50, 4).to(dtype)
    before = [weight.detach().clone() for weight in model.parameters()]
    training.perturb(model, torch.Generator().manual_seed(1))
    for old, new in zip(before, model.parameters(), strict=True):
        bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
        assert (old.view(bits) - new.detach().view(bits)).abs().eq(1).all()


def test_a_coarse_codec_changes_the_training_from_the_first_failure_on(task, tmp_path):
    result = inshrink_lab.rehearse(task, tmp_path, codec="inshrinkerator", config={"bins": 4}, seeds=1)
    (before,), (after,) = result.uninterrupted, result.restored
    assert result.restored_at == (4, 8)
    assert before.steps == (2, 4, 6, 8, 10, 12)
    assert before.metrics[:2] == after.metrics[:2]
    assert all(item != other for item, other in zip(before.metrics[2:], after.metrics[2:], strict=True))
    assert result.excess != 0.0
    assert result.excess_half_width is None


def test_finished_trainings_are_not_run_again_and_codecs_share_the_uninterrupted(task, tmp_path, counted):
    options = {"saves": 3, "restores": 1}
    first = inshrink_lab.rehearse(task, tmp_path, codec="lossless", seeds=2, **options)
    assert sorted(counted) == ["restored"] * 2 + ["uninterrupted"] * 2
    counted.clear()
    assert inshrink_lab.rehearse(task, tmp_path, codec="lossless", seeds=2, **options) == first
    assert counted == []
    inshrink_lab.rehearse(task, tmp_path, codec="uniform", seeds=2, **options)
    assert counted == ["restored"] * 2
    counted.clear()
    inshrink_lab.rehearse(task, tmp_path, codec="uniform", config={"bits": 5}, seeds=3, **options)
    assert sorted(counted) == ["restored"] * 3 + ["uninterrupted"]


def test_another_task_length_or_file_is_another_result(task, tmp_path, counted):
    inshrink_lab.rehearse(task, tmp_path / "out", codec="lossless", seeds=1)
    inshrink_lab.rehearse(task, tmp_path / "out", codec="lossless", seeds=1, steps=18)
    changed = tmp_path / "colours.py"
    changed.write_text(TASK.replace("lr=0.01", "lr=0.02"))
    inshrink_lab.rehearse(f"{changed}:Colours", tmp_path / "out", codec="lossless", seeds=1)
    assert len(counted) == 6


def test_an_interrupted_rehearsal_goes_on_where_it_stopped(task, tmp_path, counted):
    calls = []

    def interrupt(now):
        calls.append(now)
        if now.done == 12 + 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inshrink_lab.rehearse(task, tmp_path, codec="lossless", seeds=1, progress=interrupt)
    assert [(now.done, now.total, now.step) for now in calls][-1] == (19, 24, 7)
    assert counted == ["uninterrupted", "restored"]
    counted.clear()
    result = inshrink_lab.rehearse(task, tmp_path, codec="lossless", seeds=1)
    assert counted == ["restored"]
    assert result.excess == 0.0


def test_archives_are_kept_on_request_alone_and_hold_every_save(task, tmp_path):
    options = {"codec": "inshrinkerator", "seeds": 1}
    inshrink_lab.rehearse(task, tmp_path / "a", **options)
    assert list((tmp_path / "a" / "archives").iterdir()) == []
    result = inshrink_lab.rehearse(task, tmp_path / "b", keep_archives=True, **options)
    (path,) = (tmp_path / "b" / "archives").iterdir()
    archive = inshrink_core.open(path)
    assert archive.steps == (2, 4, 6, 8, 10, 12)
    assert {frame.branch for frame in archive.reader.frames} == {0}
    assert result.restored[0].nbytes == archive.reader.nbytes
    assert result.ratio_total == result.restored[0].raw_total / archive.reader.nbytes


def test_the_caller_keeps_its_random_numbers_and_threads(task, tmp_path):
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        inshrink_lab.rehearse(task, tmp_path, codec="lossless", restores=0, seeds=1, threads=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "options",
    [
        *({"restores": 6}, {"restores": -1}, {"saves": 13}, {"saves": 0}, {"steps": 0}, {"seeds": 0}),
        *({"threads": 0}, {"optimizer": "half"}, {"config": {"no_such": 1}}, {"codec": "no-such-codec"}),
        *({"max_divergence": math.inf}, {"max_drop": -0.1}, {"max_drop": 0.01, "codec": "lossless"}),
        *({"max_drop": 0.01, "restores": 6}, {"budget": 0.5}, {"lose": 0.0}, {"lose": 1.0}),
        *({"lose": 0.25, "restores": 0}, {"lose": 0.25, "budget": 1.0}, {"lose": 0.25, "budget": 0.01}),
        *({"lose": 0.25, "max_drop": 0.1}, {"lose": 0.25, "control": True}),
        {"lose": 0.25, "keep_archives": True},
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_training(task, tmp_path, counted, options):
    with pytest.raises(InputError):
        inshrink_lab.rehearse(task, tmp_path, **options)
    assert counted == []


def test_the_report_has_the_pairs_that_are_finished(task, tmp_path):
    seen = []

    def look(now):
        if now.detail == "seed 1, uninterrupted" and not seen:
            seen.extend(json.loads(path.read_text()) for path in (tmp_path / "reports").iterdir())

    made = inshrink_lab.rehearse(task, tmp_path, codec="lossless", restores=1, seeds=2, progress=look)
    assert [item["rehearsal"]["seeds"] for item in seen] == [[0]]
    (report,) = (tmp_path / "reports").iterdir()
    assert json.loads(report.read_text())["rehearsal"] == json.loads(json.dumps(made.to_json()))


def result(final, **sizes):
    return TrainingResult(
        seed=0, steps=(1, 2), metrics=(9.0, final), train_losses=(1.0, 1.0), seconds=1.0, **sizes
    )


def rehearsal(before, after, direction="lower"):
    return Rehearsal(
        task="t",
        metric="m",
        direction=direction,
        codec="c",
        config={},
        optimizer="exact",
        n_steps=2,
        n_saves=2,
        restored_at=(1,),
        uninterrupted=tuple(result(value) for value in before),
        restored=tuple(
            result(value, raw_weights=100, weights_nbytes=10 * (i + 1), raw_total=300, nbytes=100 * (i + 1))
            for i, value in enumerate(after)
        ),
    )


def test_excess_is_the_mean_of_paired_relative_changes_and_ratios_are_those_of_all_frames():
    found = rehearsal([2.0, 4.0], [2.02, 4.12])
    assert found.excesses == pytest.approx((0.01, 0.03))
    assert found.excess == pytest.approx(0.02)
    # t = 12.706 at one degree of freedom, sd = √2 · 0.01, n = 2
    assert found.excess_half_width == pytest.approx(12.706 * math.sqrt(2) * 0.01 / math.sqrt(2))
    assert found.noise == pytest.approx(math.sqrt(2) / 3)
    assert (found.ratio_weights, found.ratio_total) == pytest.approx((200 / 30, 600 / 300))
    document = found.to_json()
    assert (document["uninterrupted"], document["restored"]) == ([2.0, 4.0], [2.02, 4.12])
    assert document["curves"][1]["restored"] == [9.0, 4.12]
    assert {"excess", "excess_half_width", "noise", "ratio_weights", "ratio_total"} <= document.keys()


@pytest.mark.parametrize(
    ("before", "after", "direction", "excess"),
    [
        ([0.5, 0.5], [0.4, 0.4], "higher", pytest.approx(0.2)),
        ([1.0], [1.1], "lower", pytest.approx(0.1)),  # one seed has neither half width nor noise
        ([0.0, 1.0], [1.0, 1.0], "lower", None),
        ([1.0, 1.0], [math.nan, 1.0], "lower", None),
    ],
)
def test_an_excess_is_relative_for_the_worse_and_known_if_it_is_for_every_seed(
    before, after, direction, excess
):
    found = rehearsal(before, after, direction)
    assert found.excess == excess
    assert (found.excess_half_width is None) == (excess is None or len(before) == 1)
    assert (found.noise is None) == (len(before) == 1)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 31, 32, 60, 500])
def test_half_width_agrees_with_the_distribution_of_t(n):
    stats = pytest.importorskip("scipy.stats", reason="the oracle")
    values = [float(i % 7) for i in range(n)]
    mean = sum(values) / n
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    assert half_width(values) == pytest.approx(stats.t.ppf(0.975, n - 1) * sd / math.sqrt(n), rel=1e-3)
