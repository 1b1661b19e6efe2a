"""Restore gain and noise of archives and runs."""

import pytest

from inshrink_core.analysis.gain import restore_gain, restore_gain_of_run
from inshrink_core.errors import InputError
from inshrink_core.formats import open_run
from inshrink_core.verbs.compress import compress
from tests.runs import write_run

STEPS = (5, 10, 15, 20)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("gain") / "run"))


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


def test_the_archive_is_as_it_was(run, tmp_path):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec="lattice")
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    restore_gain(target, run)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before


def test_each_step_is_measured_with_the_config_of_its_own_frame(run, tmp_path):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec="uniform", config={"bits": 8, "grid": "refit"}, steps=STEPS[:3])
    compress(run, target, codec="uniform", config={"bits": 2, "grid": "refit"})
    found = restore_gain(target, run)
    assert found.steps[1].noise < 0.1
    assert found.steps[2].noise > 1
    assert found.config["bits"] == 2


@pytest.mark.parametrize("selector", [{"match": "*"}, {"match": "[04].*"}, {"layer_type": "linear"}])
def test_tensors_with_an_override_are_measured_with_the_settings_of_their_override(run, tmp_path, selector):
    settings = {"bits": 8, "grid": "refit"}
    overridden = measured(run, tmp_path / "o", "uniform", **settings, overrides=[selector | {"bits": 2}])
    fine = measured(run, tmp_path / "f", "uniform", **settings)
    coarse = measured(run, tmp_path / "c", "uniform", **settings | {"bits": 2})
    key = "4.weight"
    assert overridden.by_tensor[key] == coarse.by_tensor[key]
    assert overridden.by_tensor[key].noise > 10 * fine.by_tensor[key].noise


def test_steps_can_be_chosen_and_progress_is_told(run, tmp_path):
    target, seen = tmp_path / "a.inshrink", []
    compress(run, target, codec="uniform")
    found = restore_gain(
        target, run, steps=[15], progress=lambda now: seen.append((now.done, now.total, now.step))
    )
    assert [step.step for step in found.steps] == [15]
    assert seen == [(1, 1, 15)]


def test_the_document_has_a_value_a_step_for_every_tensor(run, tmp_path):
    found = measured(run, tmp_path, "uniform")
    document = found.to_json()
    assert list(document) == ["codec", "config", "steps", "gain", "noise", "tensors"]
    assert document["codec"] == "uniform"
    assert len(document["gain"]) == len(document["noise"]) == 3
    assert {row["key"] for row in document["tensors"]} >= {"0.weight", "4.weight", "4.bias"}
    assert all(len(row["gain"]) == len(row["noise"]) == 3 for row in document["tensors"])
    assert set(found.by_tensor) == {row["key"] for row in document["tensors"]}


def test_a_run_is_measured_through_an_archive_that_is_gone_afterwards(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    through = restore_gain_of_run(run, codec="uniform", config={"bits": 4})
    assert list(tmp_path.iterdir()) == []
    assert through.to_json() == measured(run, tmp_path, "uniform", bits=4).to_json()


def test_a_single_step_has_no_movement_to_measure(run, tmp_path):
    target = tmp_path / "a.inshrink"
    compress(run, target, steps=STEPS[:1])
    with pytest.raises(InputError, match="consecutive"):
        restore_gain(target, run)


def test_without_optimizer_state_the_encoder_sees_none(run, tmp_path):
    kept, dropped = tmp_path / "k.inshrink", tmp_path / "d.inshrink"
    compress(run, kept, codec="excp", config={"moments": "exact", "alpha": 1.0}, optimizer="exact")
    compress(run, dropped, codec="excp", config={"moments": "exact", "alpha": 1e-9}, optimizer="drop")
    # Without second moments ExCP prunes as much as it can, whatever its alpha.
    assert restore_gain(dropped, run).pooled.gain == pytest.approx(
        restore_gain(kept, run).pooled.gain, rel=0.05
    )


@pytest.mark.parametrize("archived", [True, False])
def test_gain_and_noise_are_measured_together_and_once(run, tmp_path, monkeypatch, archived):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec="uniform", config={"bits": 7})

    def measured():
        if archived:
            return restore_gain(target, run)
        return restore_gain_of_run(run, codec="uniform", config={"bits": 7})

    first = measured()
    monkeypatch.setattr("inshrink_core.analysis.gain.step_gain", None)
    assert measured() == first
    with pytest.raises(TypeError):  # another archive is measured
        restore_gain_of_run(run, codec="uniform", config={"bits": 6})
