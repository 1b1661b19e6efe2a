"""An allocation by hand: sums of what levels told, the price of a bit, and settings for each tensor."""

import math

import numpy as np
import pytest

from inshrink_core.chain.config import assigned, assignments
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.errors import InputError
from inshrink_core.search.rates import MeasuredAllocation, rates_of
from inshrink_core.search.space import space_of

LEVELS = (0.5, 1.0, 2.0, 4.0)


def spec_of(name, shape=(10, 10)):
    return TensorSpec(name=name, role=TensorRole.WEIGHT, dtype="float32", shape=shape)


SPECS = (spec_of("h.0.a"), spec_of("h.0.b"), spec_of("h.1.a", (20, 10)))
H = {"h.0.a": 1.0, "h.0.b": 16.0, "h.1.a": 1.0}


def rows(h=None, **changes):
    """Return estimates in which a doubled step size saves a bit and costs four times the damage."""
    reported: dict[str, float | None] = {**H} if h is None else h
    found = []
    for level in LEVELS:
        tensors = [
            {
                "key": spec.key,
                "layer_type": "linear",
                "n_values": spec.numel,
                "bits_per_weight": 6.0 - math.log2(level),
                "sensitivity": reported[spec.key],
                "damage": None if reported[spec.key] is None else reported[spec.key] * spec.numel * level**2,
            }
            for spec in SPECS
        ]
        nbytes = sum(item["n_values"] * item["bits_per_weight"] for item in tensors) / 8 + 10
        row = {
            "set": {"codec": "lattice", "settings": {"coarseness": level}},
            "codec": "lattice",
            "tensors": tensors,
            "ratio_weights": 1600 / nbytes,
            "ratio_total": 1600 / nbytes / 2,
            "drop": 0.001 * level**2,
            "divergence": 1e-4 * level**2,
            "n_trials": 0,
        }
        found.append(row | changes)
    return found


@pytest.fixture
def rates():
    return rates_of(rows(), "coarseness", SPECS)


def test_uniform_settings_are_predicted_as_they_were_estimated(rates):
    for row, level in zip(rows(), LEVELS, strict=True):
        found = rates.predict([level] * 3)
        assert found.ratio_weights == pytest.approx(row["ratio_weights"])
        assert found.ratio_total == pytest.approx(row["ratio_total"])
        assert found.drop == pytest.approx(row["drop"])
        assert found.divergence == pytest.approx(row["divergence"])


def test_between_and_beyond_the_levels_bits_and_damage_go_on_evenly(rates):
    found = rates.predict([2**0.5, 8.0, 0.25])
    np.testing.assert_allclose(found.bits, [5.5, 3.0, 8.0])
    np.testing.assert_allclose(found.damage, [2 * 100, 64 * 1600, 200 / 16])
    assert (rates.predict([1e6] * 3).bits == 0).all()


def test_a_mixture_is_as_good_as_the_uniform_setting_of_its_damage(rates):
    uniform, mixed = rates.predict([2.0] * 3), rates.predict([2.0, 2.0, 4.0])
    assert mixed.divergence > uniform.divergence
    assert mixed.divergence < rates.predict([4.0] * 3).divergence
    share = mixed.damage.sum() / uniform.damage.sum()
    assert mixed.divergence / uniform.divergence == pytest.approx(share)


@pytest.mark.parametrize("wrong", [[1.0], [1.0, 1.0, 0.0], [1.0, 1.0, math.nan], [1.0, -1.0, 1.0]])
def test_an_allocation_has_one_positive_number_a_tensor(rates, wrong):
    with pytest.raises(InputError, match="one positive number a tensor"):
        rates.predict(wrong)


def test_bits_go_where_an_error_costs_most_and_the_size_is_kept(rates):
    even = rates.predict([2.0] * 3)
    chosen = rates.distribute(even.nbytes, [2.0] * 3, [False] * 3)
    found = rates.predict(chosen)
    assert found.nbytes <= even.nbytes * (1 + 1e-12)
    assert found.damage.sum() < even.damage.sum()
    assert chosen[1] < chosen[0] == chosen[2]


def test_locked_tensors_keep_what_they_have(rates):
    target = rates.predict([2.0] * 3).nbytes
    chosen = rates.distribute(target, [0.7, 2.0, 2.0], [True, False, False])
    assert chosen[0] == 0.7
    assert rates.distribute(target, [0.7, 1.0, 3.0], [True] * 3) == [0.7, 1.0, 3.0]


def test_a_size_that_cannot_be_reached_gives_the_coarsest(rates):
    assert rates.distribute(0.0, [1.0] * 3, [False] * 3) == [8.0] * 3


def test_tensors_without_a_known_damage_stay_and_the_rest_is_told():
    reported = rates_of(rows({**H, "h.0.a": None}), "coarseness", SPECS)
    found = reported.predict([1.0] * 3)
    assert math.isnan(found.damage[0])
    assert found.divergence == pytest.approx(1e-4)
    assert reported.distribute(10.0, [1.0] * 3, [False] * 3)[0] == 1.0


def test_where_levels_tell_no_quality_none_is_made_up():
    found = rates_of(rows(drop=None, divergence=None, ratio_total=None), "coarseness", SPECS).predict(
        [1.0] * 3
    )
    assert (found.drop, found.divergence, found.ratio_total) == (None, None, None)


def test_a_tensor_outside_of_the_sample_is_like_its_layer_type():
    more = (*SPECS, spec_of("h.2.a", (40, 10)))
    found = rates_of(rows(), "coarseness", more)
    assert found.is_sampled.tolist() == [True, True, True, False]
    assert found.bits[3].tolist() == found.bits[0].tolist()
    assert found.damages[3, 1] == pytest.approx(400 * (1 + 16 + 1) / 3)


def test_one_level_is_not_enough():
    with pytest.raises(InputError, match="two levels"):
        rates_of(rows()[:1], "coarseness", SPECS)


# Overrides


def through(values, specs, base=1.0):
    """Write values as overrides, and read them back by the rules of the chain."""
    overrides = assignments(specs, values, base, ("coarseness",))
    chain = make_chain_config(
        "", "lattice", {"coarseness": base, "overrides": list(overrides)}, None, 32, "cpu", 1
    )
    return assigned(chain, specs, "coarseness")


NAMES = ("h.0.a", "h.0.b", "h.1.a", "h.1.b.c", "h.1", "h", "x[0]*?.w", "x0aa.w", "single")


@pytest.mark.parametrize("seed", range(20))
def test_overrides_give_each_tensor_its_value_and_no_other(seed):
    chosen = np.random.default_rng(seed).choice([0.5, 1.0, 2.0], len(NAMES))
    specs = tuple(spec_of(name) for name in NAMES)
    values = {name: float(value) for name, value in zip(NAMES, chosen, strict=True)}
    assert through(values, specs) == values


def test_a_module_that_shares_a_value_is_one_override():
    specs = tuple(spec_of(f"h.{i}.{part}") for i in range(3) for part in "abc")
    values = {spec.key: 2.0 if spec.name.startswith("h.1.") else 1.0 for spec in specs}
    assert assignments(specs, values, 1.0, ("coarseness",)) == ({"match": "h.1.*", "coarseness": 2.0},)
    assert assignments(specs, values, 2.0, ("coarseness",)) == (
        {"match": "h.0.*", "coarseness": 1.0},
        {"match": "h.2.*", "coarseness": 1.0},
    )


def test_what_the_layer_type_decides_is_said_by_layer_type():
    specs = (spec_of("a.w"), spec_of("wte.weight"), spec_of("a.b", (4,)))
    values = {"a.w": 1.0, "wte.weight": 0.5, "a.b": 1.0}
    assert assignments(specs, values, 1.0, ("coarseness",)) == (
        {"layer_type": "embedding", "coarseness": 0.5},
    )


# On a real run


@pytest.fixture(scope="module")
def estimated():
    """Estimate two levels of three steps of the sample, tensor by tensor."""
    import inshrink_core

    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    asked = {"steps": run.steps[-3:], "keyframe_every": 2, "device": "cpu"}
    fine, coarse = space_of("lattice").levels(2)
    each = [f"coarseness={coarse['coarseness']}"]
    found = inshrink_core.verbs.estimate(run, config=fine, each=each, by_tensor=True, **asked)
    return run, (found, *found.each)


def test_a_mixture_is_predicted_within_a_few_percent_of_its_own_estimate(estimated):
    import inshrink_core

    run, levels = estimated
    specs = [spec for spec in run[run.steps[-1]].specs if spec.role in ("weight", "buffer")]
    rates = rates_of([item.to_json() for item in levels], "coarseness", specs)
    low, high = rates.levels
    values = [high if key.startswith("fc1") else low for key in rates.keys]
    turned = dict(zip(rates.keys, values, strict=True))
    overrides = assignments([spec for spec in specs if spec.key in turned], turned, low, ("coarseness",))
    reported = inshrink_core.verbs.estimate(
        run,
        config={"coarseness": low, "overrides": list(overrides)},
        steps=run.steps[-3:],
        keyframe_every=2,
        device="cpu",
        by_tensor=True,
    )
    found = rates.predict(values)
    assert found.ratio_weights == pytest.approx(reported.ratio_weights, rel=0.05)
    bits = {item.key: item.bits_per_weight for item in reported.tensors}
    assert found.bits.tolist() == pytest.approx([bits[key] for key in rates.keys], rel=1e-6)


def test_one_measurement_scales_all_that_is_predicted(rates):
    at_two, at_four = ([value] * 3 for value in (2.0, 4.0))
    reported = rates.predict(at_two)
    assert reported.divergence is not None
    found = rates.calibrated([MeasuredAllocation(at_two, None, 5 * reported.divergence)])
    assert found.n_measured == 1
    for values in (at_two, at_four):
        assert found.predict(values).divergence == pytest.approx(5 * (rates.predict(values).divergence or 0))
        assert found.predict(values).drop == pytest.approx(rates.predict(values).drop)
    np.testing.assert_allclose(found.curve("divergence"), 5 * rates.figures["divergence"])
    np.testing.assert_allclose(found.curve("drop"), rates.figures["drop"])
    assert not found.calibrated([]).corrections


def test_a_prediction_passes_through_every_measurement_and_goes_from_one_to_the_next(rates):
    measured = [MeasuredAllocation([at] * 3, 0.01 * at, None) for at in (1.0, 4.0)]
    found = rates.calibrated(measured)
    for item in measured:
        assert found.predict(item.values).drop == pytest.approx(item.drop)
    between = found.predict([2.0] * 3).drop
    assert between is not None
    assert 0.01 < between < 0.04
    factors = [(found.predict([at] * 3).drop or 0) / (rates.predict([at] * 3).drop or 1) for at in (4.0, 8.0)]
    assert factors[0] == pytest.approx(factors[1])


@pytest.mark.parametrize("nothing", [None, 0.0, -0.1, math.nan, math.inf])
def test_what_tells_no_positive_figure_calibrates_nothing(rates, nothing):
    found = rates.calibrated([MeasuredAllocation([2.0] * 3, nothing, nothing)])
    assert found.n_measured == 0
    assert found.predict([2.0] * 3).drop == rates.predict([2.0] * 3).drop


def test_a_wild_measurement_leaves_numbers(rates):
    found = rates.calibrated(
        [MeasuredAllocation([2.0] * 3, 1e300, 1e-300), MeasuredAllocation([2.0] * 3, 1e-300, 1e300)]
    )
    assert np.isfinite(found.curve("drop")).all()
