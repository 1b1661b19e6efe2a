"""Models that the evaluator does not get keep the settings of the chain under a bound."""

import pytest
import torch

import inshrink_core
from inshrink_core.chain import ChainConfig
from inshrink_core.chain.config import Override
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorsInMemory, TensorSpec
from inshrink_core.codec import get_codec
from inshrink_core.search.space import with_settings

_STATE = {"fc.weight": (8, 4), "fc.bias": (8,), "ema.fc.weight": (8, 4), "ema.fc.bias": (8,)}


def checkpoint(names, models=()):
    specs = [TensorSpec(name=n, role=TensorRole.WEIGHT, dtype="float32", shape=s) for n, s in names.items()]
    tensors = TensorsInMemory({spec.key: torch.zeros(spec.shape) for spec in specs})
    return Checkpoint(step=1, specs=tuple(specs), source=tensors, models=models)


def coarsenesses(which, names, models=(), overrides=()):
    """Return the coarseness of each tensor when a candidate has 8 and the chain 0.5."""
    base = ChainConfig(config=get_codec("lattice")(coarseness=0.5), overrides=overrides)
    found = checkpoint(names, models)
    candidate = with_settings(base, {"coarseness": 8.0}, found, which)
    recorded = ChainConfig(config=base.config, overrides=candidate.overrides)
    assert with_settings(recorded, {"coarseness": 8.0}, found, which) == candidate
    return {spec.name: candidate.config_of(spec).coarseness for spec in found.specs}


@pytest.mark.parametrize(
    ("which", "names", "models", "evaluated"),
    [
        ("", _STATE, ("ema",), {"fc.weight", "fc.bias"}),
        ("average", _STATE, ("ema",), {"ema.fc.weight", "ema.fc.bias"}),
        ("", {"model.fc.weight": (8, 4), "ema_model.fc.weight": (8, 4)}, (), {"model.fc.weight"}),
        ("D", {"G.a.weight": (8, 4), "D.b.weight": (4, 2)}, ("G", "D"), {"D.b.weight"}),
        ("", {"a.weight": (8, 4), "b.weight": (8, 4)}, (), {"a.weight", "b.weight"}),
    ],
)
def test_only_the_evaluated_model_takes_the_settings_of_a_candidate(which, names, models, evaluated):
    assert coarsenesses(which, names, models) == {name: 8.0 if name in evaluated else 0.5 for name in names}


def test_overrides_of_the_user_apply_to_models_that_are_not_evaluated():
    mine = Override(match="ema.fc.weight", settings={"coarseness": 2.0})
    found = coarsenesses("", _STATE, ("ema",), (mine,))
    assert (found["ema.fc.weight"], found["ema.fc.bias"]) == (2.0, 0.5)


def write_run(folder, averaged):
    """Write four checkpoints, some with a moving average, and an evaluator; return the last tensors."""
    torch.manual_seed(0)
    folder.mkdir()
    weight = torch.randn(64, 48)
    average = weight.clone()
    for step in range(1, 5):
        weight = weight + 0.05 * torch.randn_like(weight)
        average = 0.9 * average + 0.1 * weight
        state = {"model": {"fc.weight": weight, "clock": torch.tensor(step)}, "step": step}
        state |= {"ema": {"fc.weight": average}} if step in averaged else {}
        torch.save(state, folder / f"step_{step}.pt")
    (folder / "evaluator.py").write_text(
        "def evaluate(state):\n    return {'accuracy': float(state['clock'])}\n"
    )
    return weight, average


@pytest.mark.parametrize("averaged", [(1, 2, 3, 4), (3, 4), (1, 2)], ids=["always", "late", "early"])
def test_a_moving_average_is_as_exact_in_a_bounded_archive_as_by_default(tmp_path, averaged):
    """The evaluator accepts any error of the weight, so the bound alone would allow the coarsest settings."""
    weight, average = write_run(tmp_path / "run", averaged)
    bound = {"evaluator": f"{tmp_path / 'run' / 'evaluator.py'}:evaluate", "max_drop": 0.1}
    errors = {}
    for name, bounds in {"default": {}, "bounded": bound}.items():
        inshrink_core.compress(tmp_path / "run", tmp_path / name, **bounds)
        archive = inshrink_core.open(tmp_path / name)
        for key, original in (("fc.weight", weight), ("ema.fc.weight", average)):
            if key in archive[4]:
                errors[name, key] = float((archive[4][key] - original).norm() / original.norm())
    assert errors["bounded", "fc.weight"] > 2 * errors["default", "fc.weight"]
    if 4 in averaged:
        assert errors["bounded", "ema.fc.weight"] < 1.5 * errors["default", "ema.fc.weight"]
    kept = [{"match": "ema.fc.weight", "coarseness": 0.5}]
    overrides = {frame.step: list(archive.frame(frame).meta.get("overrides", ())) for frame in archive.frames}
    assert overrides == {step: kept if step in averaged else [] for step in (1, 2, 3, 4)}
    assert inshrink_core.search(tmp_path / "run", **bound).trials
