"""Anatomy of one tensor; and curves of very many values keep what shows."""

import math

import numpy as np
import pytest
import torch
from inshrink_app.widgets.figures import thinned

import inshrink_core
from inshrink_core.analysis.anatomy import N_BINS, N_ROWS, anatomy, row_means, value_histogram
from inshrink_core.codec import PROTECTED
from inshrink_core.errors import ConfigError, InputError, NotFoundError
from inshrink_core.formats import open_run
from inshrink_core.report import plain_value
from tests.builders import memory_run

KEY = "fc1.weight"


@pytest.fixture(scope="module")
def run():
    return open_run(inshrink_core.sample("digits-cnn"))


@pytest.fixture(scope="module")
def archives(run, tmp_path_factory):
    """One archive of four steps by codec."""
    folder, made = tmp_path_factory.mktemp("anatomy"), {}
    for codec, config in (("lattice", {}), ("inshrinkerator", {"prune": 0.2, "protect": 0.02})):
        made[codec] = folder / f"{codec}.inshrink"
        inshrink_core.compress(run, made[codec], codec=codec, config=config, steps=run.steps[:4])
    return made


def shares(seen):
    return {part.name: part.share for part in seen.histogram.parts}


# Values by part


def test_every_value_is_in_one_bin_and_in_one_part():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    parts = (np.arange(1000) % 3).astype(np.uint8)
    found = value_histogram(values, parts)
    assert found.counts.shape == (3, N_BINS)
    assert found.counts.sum() == 1000
    assert [part.n for part in found.parts] == [334, 333, 333]
    expected, _ = np.histogram(values.double().numpy(), found.edges)
    np.testing.assert_array_equal(found.counts.sum(0), expected)
    assert found.rms == pytest.approx(float(values.double().square().mean().sqrt()))


@pytest.mark.parametrize(
    "values",
    [
        torch.empty(0),
        torch.tensor(3.0),
        torch.zeros(5),
        torch.full((4,), float("nan")),
        torch.tensor([7, -3]),
        torch.tensor([True, False]),
        torch.tensor([1e-45, 3e38]),
        torch.tensor([1 + 2j]),
        torch.randn(4, 6).t(),
        torch.randn(6).bfloat16(),
    ],
)
def test_tensors_of_every_kind_have_a_histogram(values):
    found = value_histogram(values, PROTECTED)
    assert found.counts.sum() + found.n_nonfinite == values.numel()


# A run


def test_a_codebook_is_shown_with_what_is_pruned_and_protected(run):
    seen = anatomy(run, 400, KEY, "inshrinkerator", {"bins": 8, "prune": 0.25, "protect": 0.05})
    assert seen.estimated
    assert not seen.restored
    assert (seen.level_kind, seen.kind, seen.points.size) == ("codebook", "delta", 8)
    assert shares(seen)["pruned"] == pytest.approx(0.25, abs=0.01)
    # By magnitude or by sensitivity: at most twice the fraction.
    assert 0.04 < shares(seen)["protected"] <= 0.1


def test_a_lattice_is_shown_with_its_step_and_its_cost(run):
    seen = anatomy(run, 400, KEY)
    assert (seen.codec, seen.level_kind) == ("lattice", "lattice")
    assert seen.step_size > 0
    assert seen.bits_per_weight == 8 * seen.nbytes / 24576
    assert (seen.kind, anatomy(run, run.steps[0], KEY).kind) == ("delta", "keyframe")


def test_what_a_codec_leaves_exact_is_shown_as_protected(run):
    seen = anatomy(run, 400, "fc1.bias", "inshrinkerator")
    assert (seen.level_kind, shares(seen)["protected"]) == ("exact", 1.0)
    moment = anatomy(run, 400, f"{KEY}@exp_avg", "inshrinkerator")
    assert (moment.codec, moment.level_kind) == ("lossless", "exact")


@pytest.mark.parametrize("codec", ["lossless", "uniform", "excp", "qd", "lc-checkpoint", "context"])
def test_every_codec_has_an_anatomy(run, codec):
    seen = anatomy(run, 400, "conv2.weight", codec)
    assert seen.histogram.counts.sum() == seen.spec.numel
    assert (seen.level_kind == "exact") == (codec == "lossless")


def test_settings_for_one_tensor_are_those_of_its_override(run):
    config = {"coarseness": 1.0, "overrides": [{"match": "fc1.*", "coarseness": 8.0}]}
    assert anatomy(run, 400, KEY, "lattice", config).config["coarseness"] == 8.0
    assert anatomy(run, 400, "fc2.weight", "lattice", config).config["coarseness"] == 1.0


def test_one_tensor_and_its_auxiliaries_are_read_and_nothing_else():
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(32, 16, generator=generator)
        for name in ("a.weight", "b.weight", "a.weight@exp_avg", "a.weight@exp_avg_sq", "b.weight@exp_avg")
    }
    series = memory_run({1: tensors, 2: tensors, 3: tensors})
    from inshrink_core.analysis.anatomy import _of_run

    seen = _of_run(series, 3, "a.weight", "lattice", None, None)
    read = {key for checkpoint in series.checkpoints.values() for key in checkpoint.source.reads}
    assert read <= {"a.weight", "a.weight@exp_avg", "a.weight@exp_avg_sq"}
    assert series.checkpoints[1].source.reads == []
    assert seen.metric == "taylor"


def test_a_wrong_question_says_what_is_wrong(run, archives):
    with pytest.raises(NotFoundError, match="no tensor 'nope'"):
        anatomy(run, 400, "nope")
    with pytest.raises(NotFoundError):
        anatomy(run, 401, KEY)
    with pytest.raises(ConfigError):
        anatomy(run, 400, KEY, "no-such-codec")
    with pytest.raises(InputError, match="an archive already has its codec"):
        anatomy(archives["lattice"], 10, KEY, "lattice")
    with pytest.raises(InputError, match="needs an archive, but this is a run"):
        anatomy(run, 400, KEY, against=run)
    with pytest.raises(InputError, match="not a sensitivity of tensors"):
        anatomy(run, 400, KEY, metric="magnitude")


# An archive


def test_an_archive_shows_the_codebook_it_was_written_with(run, archives):
    step = run.steps[2]
    seen = anatomy(archives["inshrinkerator"], step, KEY)
    assert not seen.estimated
    assert seen.restored
    assert seen.kind == "delta"
    assert seen.points.size <= 32
    decoded = inshrink_core.open(archives["inshrinkerator"])[step][KEY]
    assert set(seen.points.tolist()) <= set(decoded.unique().double().tolist())
    assert shares(seen)["pruned"] == pytest.approx(float((decoded == 0).float().mean()))


def test_the_bytes_are_those_of_the_block(run, archives):
    from inshrink_core.chain.sizes import frame_size

    archive = inshrink_core.open(archives["lattice"])
    for step in run.steps[:2]:
        sizes = frame_size(archive, archive.reader.find(step)).tensors
        assert anatomy(archive, step, KEY).nbytes == {size.spec.key: size.nbytes for size in sizes}[KEY]


def test_original_values_and_their_error_are_shown_where_the_run_is_given(run, archives):
    step = run.steps[1]
    seen, alone = (anatomy(archives["lattice"], step, KEY, against=given) for given in (run, None))
    assert not seen.restored
    assert alone.relative_error is None
    assert 0 < seen.relative_error < 0.5
    assert seen.rows.size == min(N_ROWS, seen.spec.shape[0])
    expected, _ = np.histogram(run[step][KEY].double().numpy(), seen.histogram.edges)
    np.testing.assert_array_equal(seen.histogram.counts.sum(0), expected)
    assert seen.step_size == alone.step_size


# Where in the matrix, and how far off


def test_rows_say_where_in_a_matrix_the_sensitivity_sits():
    score = torch.zeros(300, 4, 5)
    score[10:12] = 6.0
    found = row_means(score)
    assert found.size == N_ROWS
    assert found.argmax() == pytest.approx(10 * N_ROWS / 300, abs=1)


def test_what_is_not_finite_counts_for_no_row_and_vectors_have_none():
    nan, inf = float("nan"), float("inf")
    found = row_means(torch.tensor([[1.0, nan], [3.0, inf], [nan, nan]]))
    assert plain_value(found) == [1.0, 3.0, None]
    assert row_means(torch.ones(5)) is None
    assert row_means(torch.empty(0, 3)) is None


def test_a_coarser_codec_is_further_off_and_an_exact_one_not_at_all(run):
    errors = [anatomy(run, 400, KEY, "lattice", {"coarseness": item}).relative_error for item in (0.5, 4.0)]
    assert 0 < 4 * errors[0] < errors[1] < 1
    assert anatomy(run, 400, KEY, "lossless").relative_error == 0.0


def test_few_values_stay_as_they_are():
    series = [(step, float(step % 7)) for step in range(200)]
    assert thinned(series, 100) == series


def test_every_peak_of_a_long_curve_stays():
    values = np.zeros(200_000)
    values[[17, 100_001, 199_998]] = (5.0, -7.0, 9.0)
    found = thinned(list(enumerate(values.tolist())), 1_000)
    assert len(found) <= 2 * 1_000 + 2
    assert {(17, 5.0), (100_001, -7.0), (199_998, 9.0), (0, 0.0), (199_999, 0.0)} <= set(found)
    assert found == sorted(found)


def test_a_gap_stays_a_gap_and_infinity_hides_nothing():
    series = [(step, math.nan if 400 <= step < 600 else 1.0) for step in range(1_000)]
    series[100], series[900] = (100, math.inf), (900, 3.0)
    found = dict(thinned(series, 10))
    assert any(math.isnan(value) for step, value in found.items() if 400 <= step < 600)
    assert found[100] == math.inf
    assert found[900] == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e308])
def test_curves_of_one_value_or_one_step_are_thinned_too(value):
    assert 1 <= len(thinned([(step, value) for step in range(50)], 5)) <= 20
    assert {step for step, _ in thinned([(3, value)] * 50, 5)} == {3}
