"""Models that the evaluator does not receive keep the settings of the chain under a bound."""

import pytest
import torch

import inshrink_core
from inshrink_core.chain import ChainConfig
from inshrink_core.chain.config import Override
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorsInMemory, TensorSpec
from inshrink_core.codec import get_codec
from inshrink_core.search.space import keeping_unjudged, space_of

_STATE = {"fc.weight": (8, 4), "fc.bias": (8,), "ema.fc.weight": (8, 4), "ema.fc.bias": (8,)}


def checkpoint(names, models=()):
    specs = [TensorSpec(name=n, role=TensorRole.WEIGHT, dtype="float32", shape=s) for n, s in names.items()]
    tensors = TensorsInMemory({spec.key: torch.zeros(spec.shape) for spec in specs})
    return Checkpoint(step=1, specs=tuple(specs), source=tensors, models=models)


def coarsenesses(which, names, models=(), overrides=()):
    """Return the coarseness of each tensor when a candidate has 8 and the chain 0.5."""
    base = ChainConfig(config=get_codec("lattice")(coarseness=0.5), overrides=overrides)
    found = checkpoint(names, models)
    kept = keeping_unjudged(base, space_of("lattice"), found, which)
    again = keeping_unjudged(kept, space_of("lattice"), found, which)
    assert again.overrides == kept.overrides
    candidate = ChainConfig(config=get_codec("lattice")(coarseness=8.0), overrides=kept.overrides)
    return {spec.name: candidate.config_of(spec).coarseness for spec in found.specs}


@pytest.mark.parametrize(
    ("which", "names", "models", "judged"),
    [
        ("", _STATE, ("ema",), {"fc.weight", "fc.bias"}),
        ("average", _STATE, ("ema",), {"ema.fc.weight", "ema.fc.bias"}),
        ("", {"model.fc.weight": (8, 4), "ema_model.fc.weight": (8, 4)}, (), {"model.fc.weight"}),
        ("D", {"G.a.weight": (8, 4), "D.b.weight": (4, 2)}, ("G", "D"), {"D.b.weight"}),
        ("", {"a.weight": (8, 4), "b.weight": (8, 4)}, (), {"a.weight", "b.weight"}),
    ],
)
def test_only_the_evaluated_model_takes_the_settings_of_a_candidate(which, names, models, judged):
    assert coarsenesses(which, names, models) == {name: 8.0 if name in judged else 0.5 for name in names}


def test_overrides_of_the_user_apply_to_models_that_are_not_evaluated():
    mine = Override(match="ema.fc.weight", settings={"coarseness": 2.0})
    found = coarsenesses("", _STATE, ("ema",), (mine,))
    assert (found["ema.fc.weight"], found["ema.fc.bias"]) == (2.0, 0.5)


def test_a_moving_average_is_as_exact_in_a_bounded_archive_as_by_default(tmp_path):
    """The evaluator accepts any error of the weight, so the bound alone would allow the coarsest settings."""
    torch.manual_seed(0)
    (tmp_path / "run").mkdir()
    weight = torch.randn(64, 48)
    average = weight.clone()
    for step in range(1, 5):
        weight = weight + 0.05 * torch.randn_like(weight)
        average = 0.9 * average + 0.1 * weight
        model = {"fc.weight": weight, "clock": torch.tensor(step)}
        state = {"model": model, "ema": {"fc.weight": average}, "step": step}
        torch.save(state, tmp_path / "run" / f"step_{step}.pt")
    evaluator = tmp_path / "evaluator.py"
    evaluator.write_text("def evaluate(state):\n    return {'accuracy': float(state['clock'])}\n")
    errors = {}
    for name, bound in {
        "default": {},
        "bounded": {"evaluator": f"{evaluator}:evaluate", "max_drop": 0.1},
    }.items():
        inshrink_core.compress(tmp_path / "run", tmp_path / name, **bound)
        archive = inshrink_core.open(tmp_path / name)
        for key, original in (("fc.weight", weight), ("ema.fc.weight", average)):
            error = (archive[4][key] - original).norm() / original.norm()
            errors[name, key] = float(error)
    assert errors["bounded", "fc.weight"] > 2 * errors["default", "fc.weight"]
    assert errors["bounded", "ema.fc.weight"] < 1.5 * errors["default", "ema.fc.weight"]
    frames = [frame.meta["overrides"] for frame in map(archive.frame, archive.frames)]
    assert frames == [[{"match": "ema.fc.weight", "coarseness": 0.5}]] * 4
