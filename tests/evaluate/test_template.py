"""Evaluators that are made: a template to begin with, and `--evaluator auto`; names are no code."""

import ast
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import inshrink_core
from inshrink_core.errors import EvaluatorError, ExistsError, InputError, MissingExtraError
from inshrink_core.evaluate import Evaluator, EvaluatorRequest
from inshrink_core.evaluate.evaluator import Prepared
from inshrink_core.evaluate.template import evaluator_source
from tests.builders import evaluation

SAMPLE = Path(inshrink_core.sample("digits-cnn"))


@pytest.fixture
def digits(tmp_path):
    """Return one step of the sample without its evaluator, and what its training has at hand."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(SAMPLE / "step_002000.pt", run)
    shutil.copy(SAMPLE / "evaluator.py", run / "train.py")
    with np.load(SAMPLE / "digits-validation.npz") as arrays:
        images = (arrays["images"].astype(np.float32) / 16)[:, None]
        np.savez(run / "evaluation.npz", inputs=images, targets=arrays["labels"].astype(np.int64))
    return run


def name_model(path, module, name):
    """Fill in the class of the model, as a user does."""
    source = path.read_text().replace("my_model", module)
    path.write_text(source.replace("import Model", f"import {name}").replace("Model()", f"{name}()"))


def test_a_finished_template_says_what_the_evaluator_of_the_sample_says(digits):
    made = inshrink_core.verbs.evaluate(digits, write=digits / "judge.py")
    name_model(made.output, "train", "DigitsCNN")
    found = inshrink_core.verbs.evaluate(digits, evaluator=f"{made.output}:evaluate", metric="accuracy")
    known = inshrink_core.verbs.evaluate(SAMPLE)
    assert found.found.value == known.found.value
    assert found.found.log_probs.shape == known.found.log_probs.shape == (540, 10)


def test_it_evaluates_a_language_model_of_transformers_too(digits):
    (digits / "net.py").write_text(
        "import torch, types\nclass Net:\n"
        "    def load_state_dict(self, state): pass\n    def eval(self): print('evaluating')\n"
        "    def __call__(self, x):\n"
        "        return types.SimpleNamespace(logits=torch.nn.functional.one_hot(x, 65))\n"
    )
    made = inshrink_core.verbs.evaluate(digits, write=digits / "judge.py")
    name_model(made.output, "net", "Net")
    tokens = np.arange(20).reshape(2, 10)
    np.savez(digits / "evaluation.npz", inputs=tokens[:, :-1], targets=tokens[:, 1:])
    found = inshrink_core.verbs.evaluate(digits, evaluator=f"{made.output}:evaluate")
    assert found.found.metric == "loss"
    assert found.found.log_probs.shape == (18, 65)
    assert found.printed == "evaluating"


def test_names_of_models_never_become_code():
    evil = '"""\nraise SystemExit  # \u2028\x0cimport os\r\n{task}'
    source = evaluator_source(which=evil, models=(evil, "other\nraise SystemExit"))
    code = ast.parse(source)
    assert not [node for node in ast.walk(code) if isinstance(node, ast.Raise)]
    assert "raise SystemExit" in source


def test_nothing_is_written_over_what_is_there(tmp_path):
    target = tmp_path / "judge.py"
    target.write_text("mine")
    with pytest.raises(ExistsError):
        inshrink_core.verbs.evaluate(SAMPLE, write=target)
    assert target.read_text() == "mine"
    made = inshrink_core.verbs.evaluate(SAMPLE, write=target, force=True)
    assert "def evaluate" in target.read_text()
    assert len(made.digest) == 64
    with pytest.raises(InputError, match="Python file"):
        inshrink_core.verbs.evaluate(SAMPLE, write=tmp_path / "judge.txt")


AUTO = EvaluatorRequest(evaluator="auto")


@pytest.fixture
def run_with(tmp_path):
    """Return a run of one checkpoint whose config.json says what is given."""

    def make(config):
        folder = tmp_path / "run" / "checkpoint-1"
        folder.mkdir(parents=True)
        torch.save({"weight": torch.ones(2, 2)}, folder / "pytorch_model.bin")
        if config is not None:
            (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return inshrink_core.open(tmp_path / "run")

    return make


NO_MODEL = "names no model of transformers"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, r"no config\.json.*--evaluator FILE"),
        *((config, NO_MODEL) for config in ({}, [], {"architectures": []}, {"architectures": ["os.system"]})),
        *((text, "cannot be read") for text in ("{", "[" * 100_000, "[" + " " * (1 << 20) + "]")),
    ],
    ids=range(8),
)
def test_a_configuration_that_names_no_model_is_refused(run_with, config, said):
    with pytest.raises(InputError, match=said):
        AUTO.resolve(run_with(config))


def test_without_transformers_the_extra_is_named(run_with, monkeypatch):
    run = run_with({"architectures": ["GPT2LMHeadModel"]})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"inshrink\[hf\]"):
        AUTO.resolve(run)


def test_it_is_made_from_a_run_alone():
    with pytest.raises(InputError, match="made from a run"):
        AUTO.resolve(None)


def test_what_was_prepared_reaches_the_child_and_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(folder):
        raise InputError("nothing to prepare")

    with pytest.raises(InputError, match="nothing to prepare"):
        Evaluator("auto", prepared=Prepared("", write)).evaluate({"weight": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_of_it_is_one_line():
    with pytest.raises(EvaluatorError, match="the evaluator failed") as failure:
        Evaluator("auto", prepared=Prepared("", lambda folder: None)).evaluate({"weight": torch.ones(1)})
    assert "\n" not in str(failure.value)


def test_a_correction_is_a_factor_of_what_a_restore_costs():
    def of(correction, shift):
        rows = torch.log_softmax(torch.tensor([[0.0, shift], [1.0, 0.0]]), -1).numpy().astype(np.float64)
        return evaluation(0.5, log_probs=rows, correction=correction)

    plain, corrected = (of(factor, 0.0).restore_cost(of(factor, 0.2)) for factor in (1.0, 2.0))
    assert corrected == pytest.approx(2 * plain)
    assert plain > 0
