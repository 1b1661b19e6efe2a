"""An evaluator to begin with: it works once finished, and names are no code."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest

import inshrink_core
from inshrink_core.errors import ExistsError, InputError
from inshrink_core.evaluate.template import evaluator_source

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
