import torch
from torch import nn
from torch.nn import functional

import inshrink_core
from benchmarks import rehearsal
from benchmarks.training import Recipe, train
from inshrink_core.lab.results import TrainingResult

EVALUATOR = """
import torch

def evaluate(state):
    return {"loss": float(state["weight"].square().sum())}
"""


def _recipe(tmp_path):
    evaluator = tmp_path / "loss.py"
    evaluator.write_text(EVALUATOR)
    return Recipe(
        seed=1,
        build=lambda: nn.Linear(3, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch=lambda generator: (torch.randn(4, 3, generator=generator), torch.zeros(4, 1)),
        loss=functional.mse_loss,
        saved_at=(2, 4, 6),
        warmup=2,
        floor=0.1,
        evaluator=evaluator,
        metric="loss",
        direction="lower",
        files={"sizes.npz": {"n": 3}},
    )


def test_the_learning_rate_warms_up_and_ends_at_its_floor(tmp_path):
    factor = _recipe(tmp_path).learning_rate_factor
    assert [round(factor(step), 3) for step in (1, 2, 4, 6)] == [0.5, 1.0, 0.55, 0.1]


def test_a_trained_run_has_checkpoints_optimizer_state_and_an_evaluator(tmp_path):
    directory = train(_recipe(tmp_path), tmp_path / "run")
    run = inshrink_core.open(directory)
    assert run.steps == (2, 4, 6)
    assert any(spec.role.value == "momentum" for spec in run[6].specs)
    assert run.settings.metric == "loss"
    assert (directory / "evaluator.py").read_text() == EVALUATOR
    assert (directory / "sizes.npz").exists()


def test_a_run_that_is_whole_is_not_trained_again(tmp_path):
    recipe = _recipe(tmp_path)
    directory = train(recipe, tmp_path / "run")
    before = (directory / "step_000006.pt").stat().st_mtime_ns
    train(recipe, directory)
    assert (directory / "step_000006.pt").stat().st_mtime_ns == before


def _training(seed, final):
    return TrainingResult(seed=seed, steps=(1,), metrics=(final,), train_losses=(0.0,), seconds=1.0)


def test_trainings_are_paired_by_seed_and_setting():
    common = {"task": "char-gpt/1", "n_steps": 9, "saved_at": [3, 6, 9]}
    common |= {"device": "cpu", "threads": 1, "torch": "2"}
    setting = {"codec": "lossless", "config": {}, "optimizer_state": "lossless"}
    setting |= {"keyframe_every": 32, "restored_at": [3], "bitstream": "lossless/1", "inshrink": "0"}
    trainings = [(common | {"seed": seed}, _training(seed, 2.0)) for seed in range(3)]
    trainings += [(common | setting | {"seed": seed}, _training(seed, 2.1)) for seed in (2, 0, 1)]
    trainings += [(common | setting | {"seed": 0, "restored_at": [6]}, _training(0, 9.0))]
    [(found, keyframe_every)] = rehearsal.assemble(trainings)
    assert keyframe_every == 32
    assert [result.seed for result in found.restored] == [0, 1, 2]
    assert round(found.excess, 6) == 0.05


def test_a_setting_is_named_by_what_is_not_the_default():
    assert rehearsal.setting_text("lattice", {"coarseness": 4, "sensitivity": 0.33}, 32) == "coarseness=4"
    assert rehearsal.setting_text("lattice", {}, 1) == "keyframe_every=1"
    assert rehearsal.setting_text("lattice", {"coarseness": 2.5}, 32) == "coarseness=2.5"
    assert rehearsal.setting_text("lattice", {"coarseness": 0.5}, 32) == "default"
