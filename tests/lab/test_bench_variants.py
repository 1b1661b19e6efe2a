"""Codecs as they are named for a bench, what of them is swept and measured, and what stands in its table."""

import pytest

from inshrink_core.codec import codec_names, get_codec
from inshrink_core.codecs.variants import Variant, choose_variants
from inshrink_core.errors import ConfigError, InputError
from inshrink_lab.bench.benchmark import sweep
from inshrink_lab.bench.report import Bound, Point, choose_row, parse_bounds


def test_every_codec_for_weights_is_measured_by_default():
    assert {item.codec for item in choose_variants(None)} == set(codec_names()) - {"moments"}


def test_settings_that_are_held_are_in_every_config_and_in_the_label():
    variant = Variant("excp", {"coder": "rans", "bits": 3})
    assert variant.label == "excp:coder=rans,bits=3"
    held = {(config.coder, config.bits, config.keyframe) for config in variant.configs()}
    assert held == {("rans", 3, "quantized")}
    assert len({config.alpha for config in variant.configs()}) == len(variant.tunable.values)
    assert Variant("excp", {"keyframe": "exact"}).configs()[0].keyframe == "exact"


@pytest.mark.parametrize(
    ("text", "config"),
    [("lossless", get_codec("lossless")()), ("inshrinkerator:bins=12", get_codec("inshrinkerator")(bins=12))],
)
def test_without_a_tunable_or_where_it_is_held_there_is_nothing_to_sweep(text, config):
    (variant,), model = choose_variants(text), Model()
    assert (variant.tunable, variant.configs()) == (None, (config,))
    assert len(sweep(variant, bounds(0.1), model, refine=3)) == 1
    assert model.asked == [None]


def test_lists_are_split_at_codecs_not_at_settings():
    labels = [item.label for item in choose_variants("uniform, excp:coder=rans,bits=3 ,lattice,uniform")]
    assert labels == ["uniform", "excp:coder=rans,bits=3", "lattice"]


@pytest.mark.parametrize(
    "text",
    ["", "none-such", "uniform,", "uniform:bits", "uniform:bits=99", "uniform:none=1", "moments", "a=1", ":"],
)
def test_what_names_no_codec_or_setting_is_refused_before_anything_is_measured(text):
    with pytest.raises(ConfigError):
        choose_variants(text)


BINS = Variant("inshrinkerator")


class Model:
    """A codec of ratio 1000 / bins and divergence 1 / bins², unless said otherwise."""

    def __init__(self, divergence=lambda bins: bins**-2, ratio=lambda bins: 1000 / bins):
        self.divergence, self.ratio, self.asked = divergence, ratio, []

    def __call__(self, bins):
        self.asked.append(bins)
        return Point(
            codec="c",
            metric="loss",
            direction="lower",
            tunable=bins,
            ratio_weights=self.ratio(bins) if bins else 2.0,
            mean_divergence=self.divergence(bins) if bins else 0.0,
        )


def bounds(*limits):
    return tuple(Bound("divergence", limit) for limit in limits)


GRID = list(BINS.tunable.values)


@pytest.mark.parametrize(
    ("divergence", "limits", "expected"),
    [
        # Coarser values are not tried once two in a row keep no bound, but after one they are.
        (lambda bins: bins**-2, bounds(1 / 20**2), GRID[: GRID.index(12) + 1]),
        (lambda bins: 1.0 if bins == 64 else bins**-2, bounds(1 / 20**2), GRID[: GRID.index(12) + 1]),
        (lambda bins: 0.0, bounds(0.1), GRID),
        (lambda bins: 1.0, bounds(0.1), GRID[:2]),
    ],
)
def test_without_refining_the_grid_is_measured_as_far_as_a_bound_may_be_kept(divergence, limits, expected):
    model = Model(divergence)
    sweep(BINS, limits, model, refine=0)
    assert model.asked == expected


@pytest.mark.parametrize("limits", [bounds(1 / 20**2), bounds(1 / 40**2, 1 / 10**2)])
def test_refining_finds_the_coarsest_whole_value_of_each_bound_and_measures_nothing_twice(limits):
    model = Model()
    points = sweep(BINS, limits, model, refine=5)
    for bound in limits:
        best = min(p.tunable for p in points if p.mean_divergence <= bound.limit)
        assert best == round(bound.limit**-0.5)
    assert len(model.asked) == len(set(model.asked))
    assert [point.tunable for point in points] == sorted(model.asked, reverse=True)


def test_a_continuous_tunable_is_refined_between_grid_values():
    model = Model(lambda c: c / 100, lambda c: 8 * c)
    points = sweep(Variant("lattice"), bounds(0.05), model, refine=3)
    assert 4.0 < max(p.tunable for p in points if p.mean_divergence <= 0.05) <= 5.0
    assert [p.tunable for p in points] == sorted(p.tunable for p in points)


def point(ratio, drop, divergence=None):
    return Point(
        codec="c",
        metric="loss",
        direction="lower",
        ratio_weights=ratio,
        ratio_total=ratio,
        max_drop=drop,
        mean_divergence=divergence,
    )


DROP = Bound("drop", 0.01)


DIVERGENCE = Bound("divergence", 0.01)


@pytest.mark.parametrize(
    ("points", "bound", "kept", "ratio", "drop"),
    [
        # The largest ratio that keeps the bound, each kind of which reads its own figure.
        ([(10, -0.2), (30, 0.01), (20, 0.0), (40, 0.0101)], DROP, True, 30, 0.01),
        ([(10, 0.5, 0.001), (20, 0.0, 0.5)], DROP, True, 20, 0.0),
        ([(10, 0.5, 0.001), (20, 0.0, 0.5)], DIVERGENCE, True, 10, 0.5),
        # Out of reach: no ratio, and the figures of what comes nearest.
        ([(10, 0.03), (20, 0.02), (30, None)], DROP, False, None, 0.02),
        # Unknown figures keep no bound; the previous checkpoint keeps one without a ratio.
        ([(10, None)], DROP, False, None, None),
        ([], DROP, False, None, None),
        ([(None, 0.001)], DROP, True, None, 0.001),
    ],
)
def test_a_row_is_the_largest_ratio_that_keeps_the_bound(points, bound, kept, ratio, drop):
    document = choose_row("c", [point(*values) for values in points], bound).to_json()
    found = [document[key] for key in ("kept", "ratio_weights", "ratio_total", "max_drop")]
    assert found == [kept, ratio, ratio, drop]


def test_bounds_are_read_in_order_and_once():
    text = "drop=0.02, divergence=.01,drop=0.005,drop=0.02"
    assert parse_bounds(text) == (Bound("drop", 0.02), Bound("divergence", 0.01), Bound("drop", 0.005))


@pytest.mark.parametrize(
    "text", ["", "drop", "drop=", "drop=x", "drop=nan", "drop=inf", "drop=-1", "loss=1", "drop=1,,drop=2"]
)
def test_what_bounds_nothing_is_refused(text):
    with pytest.raises(InputError):
        parse_bounds(text)
