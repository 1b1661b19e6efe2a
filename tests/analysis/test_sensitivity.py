import math

import numpy as np
import pytest
import torch

from inshrink_core.errors import InputError
from inshrink_core.sensitivity import ScoreHistogram, scores
from tests.builders import seeded

WEIGHT = torch.tensor([[1.0, -2.0], [0.5, -0.0]])


def summary_of(*parts):
    histogram = ScoreHistogram()
    for part in parts:
        histogram.add(part)
    return histogram.summary()


ONES = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("metric", "given", "expected", "source"),
    [
        ("magnitude", {}, WEIGHT.abs(), None),
        ("taylor", {"gradient": -3 * ONES, "exp_avg": 7 * ONES}, 3 * WEIGHT.abs(), "gradient"),
        ("taylor", {"exp_avg": -2 * ONES}, 2 * WEIGHT.abs(), "exp_avg"),
        ("taylor", {}, None, None),
        ("fisher", {"exp_avg_sq": ONES, "step": 3}, ONES, "uncorrected"),
        ("fisher", {}, None, None),
        ("update", {"previous": WEIGHT + 1}, ONES, None),
        ("update", {"previous": torch.zeros(3)}, None, None),  # it changed its shape
        ("update", {}, None, None),
    ],
)
def test_scores_come_from_what_a_metric_needs_and_say_which_of_it(metric, given, expected, source):
    found = scores(metric, WEIGHT, **given)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert torch.equal(found.values, expected)
        assert found.source == source


def test_fisher_recovers_the_mean_square_of_a_constant_gradient_at_any_step():
    gradient, beta2 = torch.tensor([0.5, -2.0]), 0.99
    moment = torch.zeros(2)
    for step in range(1, 6):
        moment = beta2 * moment + (1 - beta2) * gradient.square()
        found = scores("fisher", exp_avg_sq=moment, beta2=beta2, step=step)
        torch.testing.assert_close(found.values, gradient.square(), rtol=1e-5, atol=0)
        assert found.source is None


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(InputError, match="exp_avg is not of the weight's shape"):
        scores("taylor", WEIGHT, exp_avg=torch.zeros(3))


def test_an_unknown_metric_is_refused_with_the_names_of_the_others():
    with pytest.raises(InputError, match="magnitude, taylor, fisher, update"):
        scores("hessian", WEIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_every_dtype_is_scored_in_float32(dtype):
    found = scores("magnitude", torch.tensor([1, 0, 1]).to(dtype)).values
    assert found.dtype is torch.float32
    assert found.tolist() == [1.0, 0.0, 1.0]


def test_mean_and_quantiles_are_within_one_key_of_those_of_the_values():
    values = seeded((100_003,), 0).abs()
    found, exact = summary_of(values), values.double().numpy()
    assert found.mean == pytest.approx(exact.mean(), rel=1e-12)
    for share, quantile in ((0.5, found.p50), (0.99, found.p99)):
        assert quantile == pytest.approx(np.quantile(exact, share, method="inverted_cdf"), rel=2**-7)


def test_a_constant_tensor_has_its_value_as_every_statistic():
    assert summary_of(torch.full((1000,), 0.1))[:3] == pytest.approx([torch.tensor(0.1).item()] * 3)


def test_a_merged_histogram_is_the_histogram_of_all():
    parts = [seeded((n,), n) * n for n in (3, 1000, 50_000)]
    merged = ScoreHistogram()
    for part in parts:
        entry = ScoreHistogram()
        entry.add(part)
        merged.merge(entry)
    assert merged.summary()[1:] == pytest.approx(summary_of(torch.cat(parts))[1:])
    assert merged.summary().mean == pytest.approx(torch.cat(parts).abs().double().mean().item())


def test_a_group_is_weighted_by_the_number_of_parameters():
    # 990 ones and 10 thousands: the mean of the two means would be 500.5, the median of medians either.
    found = summary_of(torch.ones(990), torch.full((10,), 1000.0))
    assert (found.mean, found.p50, found.p99) == (10.99, 1.0, 1.0)


def test_nonfinite_scores_are_counted_apart():
    found = summary_of(torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0]))
    assert found == (2.0, 1.0, 3.0, 2, 3)


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
