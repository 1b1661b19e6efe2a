"""Evaluators of runs with several models: each gets the model that it asks for, and loads it strictly."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.evaluate import Evaluator
from inshrink_core.formats import open_run

NET = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
"""

PATTERN = """
import torch
from net import Net

def evaluate(state_dict{which}):
    model = Net()
    model.load_state_dict(state_dict)
    return {{"loss": model[0].weight.detach().square().mean(), "names": len(state_dict)}}
"""


def net():
    names: dict[str, type[nn.Module]] = {}
    exec(NET, names)
    return names["Net"]()


@pytest.fixture(scope="module")
def states():
    torch.manual_seed(0)
    model, critic = net(), nn.Linear(3, 1)
    average = copy.deepcopy(model)
    with torch.no_grad():
        average[0].weight.fill_(2.0)
        model[0].weight.fill_(1.0)
    return {"model": model.state_dict(), "average": average.state_dict(), "critic": critic.state_dict()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    np.savez(tmp_path / "evaluation.npz", inputs=np.ones((5, 4), np.float32), targets=np.arange(5) % 3)
    (tmp_path / "run").mkdir()
    return tmp_path


def save(folder, **models):
    for step in (1, 2):
        torch.save({**models, "step": step}, folder / f"run/ckpt_{step}.pt")


def test_an_evaluator_gets_the_model_that_it_asks_for_or_is_told_that_there_is_none(folder, states):
    save(folder, model=states["model"], ema=states["average"], critic=states["critic"])
    (folder / "judge.py").write_text(PATTERN.format(which=", which='average'"))
    inshrink_core.compress(folder / "run", folder / "a.inshrink", codec="lossless")
    with Evaluator(f"{folder}/judge.py:evaluate", metric="loss") as evaluator:
        for source in (open_run(folder / "run"), inshrink_core.Archive.open(folder / "a.inshrink")):
            assert evaluator.evaluate(source[2]).value == 4
        assert not (folder / "__pycache__").exists()
        save(folder, model=states["model"])
        with pytest.raises(inshrink_core.errors.NotFoundError, match="no model 'average'"):
            evaluator.evaluate(open_run(folder / "run")[2])


@pytest.mark.parametrize(
    ("names", "which"),
    [
        ({"model": "model", "ema": "average"}, ""),
        ({"generator": "model", "discriminator": "critic"}, "generator"),
        ({"G": "model", "D": "critic", "G_ema": "average"}, "G"),
    ],
)
@pytest.mark.usefixtures("evaluators_here")
def test_a_template_loads_strictly_on_a_run_of_several_models(folder, states, names, which):
    save(folder, **{name: states[key] for name, key in names.items()})
    made = inshrink_core.verbs.evaluate(folder / "run", write=folder / "judge.py")
    source = made.output.read_text().replace("from my_model import Model", "from net import Net as Model")
    made.output.write_text(source)
    assert re.search(r"def evaluate\(state_dict(.*)\):", source)[1] == (f", which='{which}'" if which else "")
    found = inshrink_core.verbs.evaluate(folder / "run", evaluator=f"{made.output}:evaluate")
    assert found.found.log_probs.shape == (5, 3)
    assert all(f"'{name}'" in source for name in names if name not in ("model", which))
