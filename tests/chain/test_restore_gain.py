"""Restore gain and noise of archives."""

import pytest

from inshrink_core.analysis.gain import restore_gain
from inshrink_core.chain.gain import pool
from inshrink_core.errors import InputError
from inshrink_core.formats import open_run
from inshrink_core.verbs.compress import compress

STEPS = (5, 10, 15, 20)


@pytest.fixture(scope="module")
def run(run_path):
    return open_run(run_path)


def measured(run, tmp_path, codec, **settings):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec=codec, config=settings)
    return restore_gain(target, run)


def test_a_lossless_archive_keeps_every_movement(run, tmp_path):
    found = measured(run, tmp_path, "lossless")
    assert [step.step for step in found.steps] == list(STEPS[1:])
    assert found.pooled.gain == pytest.approx(1.0, abs=1e-5)
    assert found.pooled.noise < 1e-9


def test_a_coarse_grid_rolls_training_back_where_matched_gain_does_not(run, tmp_path):
    coarse = measured(run, tmp_path / "u", "uniform", bits=3).pooled
    matched = measured(run, tmp_path / "l", "lattice", coarseness=4).pooled
    assert coarse.gain < 0.5
    assert matched.gain == pytest.approx(1.0, abs=0.05)
    # A step is halved before rms(r) is below .05, where gain 1 costs a noise of about 9.
    assert 0.01 < matched.noise < 10


def test_each_step_is_measured_with_the_config_of_its_own_frame(run, tmp_path):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec="uniform", config={"bits": 8, "grid": "refit"}, steps=STEPS[:3])
    compress(run, target, codec="uniform", config={"bits": 2, "grid": "refit"})
    found = restore_gain(target, run)
    assert found.steps[1].noise < 0.1
    assert found.steps[2].noise > 1


@pytest.mark.parametrize("selector", [{"match": "[04].*"}, {"layer_type": "linear"}])
def test_tensors_with_an_override_are_measured_with_the_settings_of_their_override(run, tmp_path, selector):
    settings = {"bits": 8, "grid": "refit"}
    overridden = measured(run, tmp_path / "o", "uniform", **settings, overrides=[selector | {"bits": 2}])
    fine = measured(run, tmp_path / "f", "uniform", **settings)
    coarse = measured(run, tmp_path / "c", "uniform", **settings | {"bits": 2})
    noise = [
        pool(row for step in found.steps for row in step.tensors if row.key == "4.weight").noise
        for found in (overridden, coarse, fine)
    ]
    assert noise[0] == noise[1] > 10 * noise[2]


def test_a_single_step_has_no_movement_to_measure(run, tmp_path):
    target = tmp_path / "a.inshrink"
    compress(run, target, steps=STEPS[:1])
    with pytest.raises(InputError, match="consecutive"):
        restore_gain(target, run)


def test_without_optimizer_state_the_encoder_sees_none(run, tmp_path):
    with_moments, dropped = tmp_path / "k.inshrink", tmp_path / "d.inshrink"
    compress(run, with_moments, codec="excp", config={"moments": "exact", "alpha": 1.0}, optimizer="exact")
    compress(run, dropped, codec="excp", config={"moments": "exact", "alpha": 1e-9}, optimizer="drop")
    # Without second moments ExCP prunes as much as it can, whatever its alpha.
    assert restore_gain(dropped, run).pooled.gain == pytest.approx(
        restore_gain(with_moments, run).pooled.gain, rel=0.05
    )
