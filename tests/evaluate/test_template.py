"""An evaluator to begin with: what is guessed, that it works once finished, and that names are no code."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import inshrink_core
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.errors import ExistsError, InputError, UntrustedCodeError
from inshrink_core.evaluate.template import evaluator_source, guess_task

SAMPLE = Path(inshrink_core.sample("digits-cnn"))


def weights(**shapes: tuple[int, ...]) -> list[TensorSpec]:
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return [
        TensorSpec(name=name, role=TensorRole.WEIGHT, dtype="float32", shape=shape)
        for name, shape in names.items()
    ]


@pytest.mark.parametrize(
    ("tensors", "task", "n_outputs"),
    [
        (weights(wte__weight=(65, 32), h__0__mlp__weight=(32, 128), head__weight=(65, 32)), "language", 65),
        (weights(wte__weight=(65, 32), h__0__mlp__c_proj__weight=(32, 128)), "language", 65),
        (weights(embed__weight=(1000, 32), fc__weight=(4, 32)), "classifier", 4),
        (weights(conv1__weight=(16, 3, 3, 3), bn__weight=(16,), fc__weight=(10, 16)), "classifier", 10),
        (weights(fc1__weight=(8, 4), fc2__weight=(1, 8)), "regression", 1),
        (weights(down__weight=(8, 1, 3, 3), up__weight=(1, 8, 3, 3)), "regression", 0),
        (weights(bias=(8,)), "regression", 0),
    ],
)
def test_the_task_is_told_by_names_and_shapes(tensors: list[TensorSpec], task: str, n_outputs: int) -> None:
    guess = guess_task(tensors)
    assert (guess.task, guess.n_outputs) == (task, n_outputs)


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Return one step of the sample without its evaluator, and what its training has at hand."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(SAMPLE / "step_002000.pt", run)
    shutil.copy(SAMPLE / "evaluator.py", run / "train.py")
    with np.load(SAMPLE / "digits-validation.npz") as arrays:
        images = (arrays["images"].astype(np.float32) / 16)[:, None]
        np.savez(run / "evaluation.npz", inputs=images, targets=arrays["labels"].astype(np.int64))
    return run


def test_a_finished_template_says_what_the_evaluator_of_the_sample_says(digits: Path) -> None:
    made = inshrink_core.verbs.make_evaluator(digits, digits / "judge.py", model="train:DigitsCNN")
    found = inshrink_core.verbs.evaluate(digits, evaluator=f"{made.output}:evaluate", metric="accuracy")
    known = inshrink_core.verbs.evaluate(SAMPLE)
    assert found.value == known.value
    assert found.log_probs == known.log_probs == (540, 10)


@pytest.mark.parametrize("task", ["language", "regression"])
def test_templates_of_other_tasks_evaluate_too(digits: Path, task: str) -> None:
    (digits / "net.py").write_text(
        "import torch\nclass Net:\n"
        "    def load_state_dict(self, state): pass\n    def eval(self): print('evaluating')\n"
        "    def __call__(self, x): return torch.nn.functional.one_hot(x, 65) if x.ndim == 2 else x\n"
    )
    made = inshrink_core.verbs.make_evaluator(digits, digits / "judge.py", model="net:Net", task=task)
    given = {"tokens": np.arange(20).reshape(2, 10)}
    if task == "regression":
        given = {"inputs": np.ones(5), "targets": np.zeros(5)}
    np.savez(digits / "evaluation.npz", **given)
    found = inshrink_core.verbs.evaluate(digits, evaluator=f"{made.output}:evaluate")
    assert found.metric == "loss"
    assert (found.log_probs, found.predictions) == ((18, 65), None) if task == "language" else (None, (5,))
    assert found.printed == "evaluating"


def test_names_of_tensors_never_become_code() -> None:
    evil = '"""\nraise SystemExit  # \u2028\x0cimport os\r\n{task}'
    tensors = [TensorSpec(name=evil, role=TensorRole.WEIGHT, dtype="float32", shape=(2, 3))]
    source = evaluator_source(tensors, guess_task(tensors), pretrained='"\n+__import__("os")+"')
    assert "raise SystemExit" in source
    code = [line for line in source.splitlines() if not line.startswith("#")]
    assert not any("SystemExit" in line for line in code)
    compile(source, "judge.py", "exec")
    assert '\\n+__import__("os")+"\'' in source


@pytest.mark.parametrize("model", ["train", "train:Net()", "os;x:Net", "class:Net", ":Net"])
def test_a_model_that_is_no_name_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(InputError, match="MODULE:CLASS"):
        inshrink_core.verbs.make_evaluator(SAMPLE, tmp_path / "judge.py", model=model)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over_what_is_there(tmp_path: Path) -> None:
    target = tmp_path / "judge.py"
    target.write_text("mine")
    with pytest.raises(ExistsError):
        inshrink_core.verbs.make_evaluator(SAMPLE, target)
    assert target.read_text() == "mine"
    made = inshrink_core.verbs.make_evaluator(SAMPLE, target, force=True)
    assert "def evaluate" in target.read_text()
    assert len(made.digest) == 64
    with pytest.raises(InputError, match="Python file"):
        inshrink_core.verbs.make_evaluator(SAMPLE, tmp_path / "judge.txt")
    with pytest.raises(InputError, match="no task"):
        inshrink_core.verbs.make_evaluator(SAMPLE, tmp_path / "other.py", task="poetry")


def test_a_run_of_transformers_is_made_from_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoint-10"
    folder.mkdir(parents=True)
    torch.save(
        {"wte.weight": torch.zeros(9, 4), "head.weight": torch.zeros(9, 4)}, folder / "pytorch_model.bin"
    )
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text('{"global_step": 10}')
    inshrink_core.verbs.make_evaluator(tmp_path / "run", tmp_path / "judge.py")
    source = (tmp_path / "judge.py").read_text()
    assert "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(" in source
    assert "Path(__file__).parent / 'run/checkpoint-10'" in source
    assert "model(inputs).logits" in source


def test_the_evaluator_of_a_run_needs_consent_here_too(digits: Path) -> None:
    (digits / "inshrink.toml").write_text('[evaluator]\nfile = "train.py"\n')
    with pytest.raises(UntrustedCodeError):
        inshrink_core.verbs.evaluate(digits)
