"""Sensitivity of weights, and its profile over a run, by tensor, block and layer type."""

import math

import numpy as np
import pytest
import torch

from inshrink_core.analysis.profile import StepScores, sensitivity
from inshrink_core.errors import InputError, NotFoundError
from inshrink_core.sensitivity import ScoreHistogram, SensitivityMetric
from tests.builders import memory_run, seeded

BETA2 = 0.9
HYPERPARAMETERS = {"conv1.weight": {"beta2": BETA2}, "fc.weight": {"beta2": BETA2}}


def tensors_of(step):
    return {
        "conv1.weight": seeded((4, 1, 3, 3), step),
        "conv1.bias": seeded((4,), step + 1),
        "bn1.running_mean": torch.full((4,), 1e6),
        "fc.weight": seeded((10, 40), step + 2),
        "conv1.weight@exp_avg": seeded((4, 1, 3, 3), step + 3),
        "conv1.weight@exp_avg_sq": seeded((4, 1, 3, 3), step + 4).square(),
        "conv1.weight@step": torch.tensor(float(step)),
        "fc.weight@exp_avg_sq": seeded((10, 40), step + 5).square(),
    }


@pytest.fixture
def run(tmp_path):
    return memory_run(
        {step: tensors_of(step) for step in (1, 2, 3)}, hyperparameters=HYPERPARAMETERS, directory=tmp_path
    )


def test_a_profile_has_a_row_per_weight_and_a_column_per_step(run):
    table = sensitivity(run).by("tensor")
    assert table.rows == ("conv1.weight", "conv1.bias", "fc.weight")
    assert table.steps == (1, 2, 3)
    for values in (table.mean, table.p50, table.p99):
        assert (values.shape, values.dtype) == ((3, 3), np.float32)
    expected = tensors_of(2)["fc.weight"].abs().mean()
    assert table.mean[2, 1] == pytest.approx(expected.item(), rel=1e-6)


def test_groups_pool_the_parameters_of_their_tensors(run):
    prof = sensitivity(run)
    blocks, types = prof.by("block"), prof.by("layer_type")
    assert blocks.rows == ("conv1", "fc")
    assert types.rows == ("convolution", "vector", "linear")
    tensors = tensors_of(3)
    pooled = torch.cat([tensors["conv1.weight"].flatten(), tensors["conv1.bias"]]).abs()
    assert blocks.mean[0, 2] == pytest.approx(pooled.mean().item(), rel=1e-6)
    exact = np.quantile(pooled.numpy(), 0.5, method="inverted_cdf")
    assert blocks.p50[0, 2] == pytest.approx(exact, rel=2**-7)
    assert blocks.details[0][:6] == ("conv1", "conv1", "convolution", "weight", 2, 40)


def test_fisher_is_corrected_by_the_steps_own_beta2(run):
    table = sensitivity(run, "fisher").by("tensor")
    expected = tensors_of(2)["conv1.weight@exp_avg_sq"].mean() / (1 - BETA2**2)
    assert table.mean[0, 1] == pytest.approx(expected.item(), rel=1e-5)
    assert np.isnan(table.mean[1]).all()


def test_the_first_step_has_no_update_and_a_subset_uses_the_steps_real_predecessor(run):
    table = sensitivity(run, "update").by("tensor")
    assert np.isnan(table.mean[:, 0]).all()
    assert np.array_equal(sensitivity(run, "update", steps=[3]).by("tensor").mean[:, 0], table.mean[:, 2])
    moved = (tensors_of(3)["fc.weight"] - tensors_of(2)["fc.weight"]).abs().mean()
    assert table.mean[2, 2] == pytest.approx(moved.item(), rel=1e-6)


def test_a_tensor_that_appears_vanishes_or_changes_shape_leaves_a_gap():
    later = tensors_of(2) | {"head.weight": seeded((3, 3), 9), "fc.weight": seeded((10, 50), 1)}
    later.pop("conv1.bias")
    run = memory_run({1: tensors_of(1), 2: later})
    magnitude = sensitivity(run).by("tensor")
    assert magnitude.rows == ("conv1.weight", "conv1.bias", "fc.weight", "head.weight")
    assert np.argwhere(np.isnan(magnitude.mean)).tolist() == [[1, 1], [3, 0]]
    assert np.isnan(sensitivity(run, "update").by("tensor").mean[2]).all()
    assert magnitude.details[2].shape == (10, 50)


def test_nan_in_a_weight_is_counted_and_left_out():
    weight = torch.tensor([[1.0, math.nan], [math.inf, 3.0]])
    table = sensitivity(memory_run({1: {"w": weight}})).by("tensor")
    assert (table.mean[0, 0], table.n_nonfinite[0, 0]) == (2.0, 2)


@pytest.mark.parametrize("metric", SensitivityMetric)
def test_a_second_profile_reads_no_tensor_and_is_equal(run, metric):
    first = sensitivity(run, metric)
    before = run.reads()
    assert first.bytes_read > 0
    second = sensitivity(run, metric)
    assert (run.reads(), second.bytes_read) == (before, 0)
    for grouping in ("tensor", "block", "layer_type"):
        a, b = first.by(grouping), second.by(grouping)
        assert (a.rows, a.details, a.sources) == (b.rows, b.details, b.sources)
        assert np.array_equal(a.mean, b.mean, equal_nan=True)
        assert np.array_equal(a.p99, b.p99, equal_nan=True)
        assert np.array_equal(a.n_nonfinite, b.n_nonfinite)


def test_a_file_that_changed_is_measured_anew_and_so_is_the_update_after_it(run):
    for metric in SensitivityMetric:
        sensitivity(run, metric)
    run.identities[2] = "written again"
    before = {step: len(run[step].source.reads) for step in run.steps}
    for metric in SensitivityMetric:
        sensitivity(run, metric)
    assert len(run[1].source.reads) > before[1]  # as the predecessor of 2
    assert len(run[2].source.reads) > before[2]
    assert set(run[3].source.reads[before[3] :]) == {"conv1.weight", "conv1.bias", "fc.weight"}


def test_a_run_that_cannot_be_written_to_is_cached_for_the_user(run, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    (tmp_path / ".inshrink").write_text("a file in the place of the directory")
    sensitivity(run)
    assert len(list((home / "inshrink" / "runs").glob("*/cache/*.json"))) == 3
    assert sensitivity(run).bytes_read == 0


def test_a_cache_that_is_a_link_elsewhere_is_not_followed(run, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / ".inshrink").symlink_to(elsewhere)
    sensitivity(run)
    assert list(elsewhere.iterdir()) == []


def test_a_run_without_identities_is_measured_and_not_cached():
    run = memory_run({1: {"w": torch.ones(2, 2)}})
    assert sensitivity(run).bytes_read == sensitivity(run).bytes_read == 16


def test_what_was_measured_before_an_interruption_is_kept(run):
    def stop(done, total, step):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sensitivity(run, progress=stop)
    before = run.reads()
    sensitivity(run)
    assert run.reads() - before == 3


def test_bad_requests_are_refused(run):
    with pytest.raises(NotFoundError, match="no step 7"):
        sensitivity(run, steps=[1, 7])
    with pytest.raises(InputError, match=r"no sensitivity metric.*magnitude, taylor, fisher, update"):
        sensitivity(run, "hessian")
    with pytest.raises(InputError, match="no grouping"):
        sensitivity(run).by("column")


WEIGHT = torch.tensor([[1.0, -2.0], [0.5, -0.0]])


def summary_of(*parts):
    histogram = ScoreHistogram()
    for part in parts:
        histogram.add(part)
    return histogram.summary()


ONES = torch.ones(2, 2)


def scored(metric, weight=WEIGHT, *, previous=None, beta2=None, **beside):
    """Return the scores of a weight with tensors of other roles, and its values at the step before."""
    steps = {} if previous is None else {1: {"w": previous}}
    steps[3] = {"w": weight, **{f"w@{role}": tensor for role, tensor in beside.items()}}
    run = memory_run(steps, hyperparameters={"w": {} if beta2 is None else {"beta2": beta2}})
    reader = StepScores(run[3], None if previous is None else run[1])
    return reader.of(SensitivityMetric(metric), run[3].spec("w"))


@pytest.mark.parametrize(
    ("metric", "given", "expected", "source"),
    [
        ("magnitude", {}, WEIGHT.abs(), None),
        ("taylor", {"gradient": -3 * ONES, "exp_avg": 7 * ONES}, 3 * WEIGHT.abs(), "gradient"),
        ("taylor", {"exp_avg": -2 * ONES}, 2 * WEIGHT.abs(), "exp_avg"),
        ("taylor", {"exp_avg": torch.zeros(3)}, None, None),  # of another shape
        ("taylor", {}, None, None),
        ("fisher", {"exp_avg_sq": ONES}, ONES, "uncorrected"),
        ("fisher", {}, None, None),
        ("update", {"previous": WEIGHT + 1}, ONES, None),
        ("update", {"previous": torch.zeros(3)}, None, None),  # it changed its shape
        ("update", {}, None, None),
    ],
)
def test_scores_come_from_what_a_metric_needs_and_say_which_of_it(metric, given, expected, source):
    found = scored(metric, **given)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert torch.equal(found.values, expected)
        assert found.source == source


def test_fisher_recovers_the_mean_square_of_a_constant_gradient_at_any_step():
    gradient, beta2 = torch.tensor([0.5, -2.0]), 0.99
    moment = torch.zeros(2)
    for step in range(1, 6):
        moment = beta2 * moment + (1 - beta2) * gradient.square()
        count = torch.tensor(float(step))
        found = scored("fisher", gradient, beta2=beta2, exp_avg_sq=moment, step=count)
        torch.testing.assert_close(found.values, gradient.square(), rtol=1e-5, atol=0)
        assert found.source is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_every_dtype_is_scored_in_float32(dtype):
    found = scored("magnitude", torch.tensor([1, 0, 1]).to(dtype)).values
    assert found.dtype is torch.float32
    assert found.tolist() == [1.0, 0.0, 1.0]


def test_mean_and_quantiles_are_within_one_key_of_those_of_the_values():
    values = seeded((100_003,), 0).abs()
    found, exact = summary_of(values), values.double().numpy()
    assert found.mean == pytest.approx(exact.mean(), rel=1e-12)
    for share, quantile in ((0.5, found.p50), (0.99, found.p99)):
        assert quantile == pytest.approx(np.quantile(exact, share, method="inverted_cdf"), rel=2**-7)


@pytest.mark.parametrize("values", [torch.empty(0), torch.tensor([math.nan])])
def test_no_finite_score_gives_nan(values):
    found = summary_of(values)
    assert math.isnan(found.mean)
    assert found.n == 0


def test_edge_values_have_keys():
    tiny, largest = 2.0**-149, torch.finfo(torch.float32).max
    found = summary_of(torch.tensor([-0.0, 0.0, tiny, largest]))
    assert (found.p50, found.p99, found.n) == (tiny / 3, largest, 4)


def test_the_summary_does_not_depend_on_the_number_of_threads():
    values, before = seeded((300_000,), 5), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = summary_of(values)
        torch.set_num_threads(2)
        assert summary_of(values) == first
    finally:
        torch.set_num_threads(before)
