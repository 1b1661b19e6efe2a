"""A first evaluator for a run: what its tensors say about the task, and a file that is nearly finished.

Names of runs and tensors are somebody else's text. They are in comments alone, as `ascii` writes them, so
that none of them becomes code.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inshrink_core.checkpoint import AVERAGE, MODEL_ROLES, LayerType, TensorRole, model_of, twins
from inshrink_core.errors import InputError
from inshrink_core.text import counted

if TYPE_CHECKING:
    from inshrink_core.checkpoint import TensorSpec


TASKS: Final = ("language", "classifier", "regression")

_MOST_TENSORS: Final = 60
"""Tensors listed in the file; a reader of more looks at `inshrink inspect --tensors`."""

_LONGEST_NAME: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGuess:
    """What a model is probably for, told from names and shapes.

    Parameters
    ----------
    task
        ``language``, ``classifier`` or ``regression``.
    why
        The tensors that say so. Holds names from the run.
    inputs
        What the model reads, in words.
    n_outputs
        Tokens, classes or values that it returns for a sample; 0 where nothing tells.
    """

    task: str
    why: str
    inputs: str
    n_outputs: int


def guess_task(tensors: Sequence[TensorSpec]) -> TaskGuess:
    """Return what a model is probably for.

    Parameters
    ----------
    tensors
        Those of a checkpoint, in model order; moving averages and others than weights do not count.

    Notes
    -----
    A model whose first matrix is an embedding with as many rows as its last one has is one of language, as
    is one without any other output (the two are tied). Else the last matrix has a row for each class. One
    row, or a convolution at the end, is regression.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> guess = guess_task(run[2000].specs)
    >>> guess.task, guess.inputs, guess.n_outputs
    ('classifier', 'images with 1 channel', 10)
    """
    averages = twins({spec.name: spec.shape for spec in tensors if spec.role in MODEL_ROLES})
    weights = [spec for spec in tensors if spec.role is TensorRole.WEIGHT and spec.name not in averages]
    matrices = [spec for spec in weights if len(spec.shape) >= 2]
    if not matrices:
        return TaskGuess(task="regression", why="there is no matrix of weights", inputs="inputs", n_outputs=0)
    first, last = matrices[0], matrices[-1]
    inputs = _inputs_of(first)
    embedded = first.layer is LayerType.EMBEDDING
    heads = [one for one in matrices[1:] if one.shape[0] == first.shape[0] and len(one.shape) == 2]
    # A body that ends square, as a block of a transformer does, has no output of its own.
    tied = embedded and last.shape[0] == first.shape[1]
    if embedded and (tied or last in heads):
        head = "and nothing else gives outputs" if tied else f"and {_named(last)} gives one output each"
        why = f"{_named(first)} embeds {counted(first.shape[0], 'token')}, {head}"
        return TaskGuess(task="language", why=why, inputs=inputs, n_outputs=first.shape[0])
    if len(last.shape) > 2:
        why = f"the last layer, {_named(last)}, is a convolution"
        return TaskGuess(task="regression", why=why, inputs=inputs, n_outputs=0)
    task = "regression" if last.shape[0] == 1 else "classifier"
    why = f"the last layer, {_named(last)}, gives {counted(last.shape[0], 'output')}"
    return TaskGuess(task=task, why=why, inputs=inputs, n_outputs=last.shape[0])


def _inputs_of(first: TensorSpec) -> str:
    """Say what a first layer reads."""
    if first.layer is LayerType.EMBEDDING:
        return f"integers from 0 to {first.shape[0] - 1}"
    if len(first.shape) == 4:
        return f"images with {counted(first.shape[1], 'channel')}"
    return f"vectors of {counted(first.shape[1], 'value')}"


def _named(spec: TensorSpec) -> str:
    return f"{spec.name[:_LONGEST_NAME]!a} {spec.shape}"


def evaluator_source(
    tensors: Sequence[TensorSpec],
    guess: TaskGuess,
    *,
    model: str | None = None,
    pretrained: str | None = None,
    models: Sequence[str] = (),
) -> str:
    """Return the text of an evaluator that is finished but for the model's class and the held-out samples.

    Parameters
    ----------
    tensors
        Those of a checkpoint, in model order.
    guess
        What the model is for.
    model
        ``MODULE:CLASS`` of the model; by default a name to be replaced.
    pretrained
        Folder of a ``config.json``, as seen from the evaluator: the model is then one of `transformers`.
    models
        What a checkpoint has beside the main model, or, if `tensors` are of one of them, instead of it.

    Raises
    ------
    InputError
        `model` is not of that form.
    """
    module, name = _model_named(model)
    automatic = pretrained is not None and model is None
    samples, body, result = _TASKS[guess.task]
    listed = [spec for spec in tensors if spec.role in MODEL_ROLES]
    which = model_of(listed[0].name, models) if listed else ""
    others = [f"{name[:_LONGEST_NAME]!a}" for name in (AVERAGE, *models) if name != which]
    lines = [f"#   {_named(spec)} {spec.dtype}" for spec in listed[:_MOST_TENSORS]]
    if len(listed) > _MOST_TENSORS:
        lines.append(f"#   and {len(listed) - _MOST_TENSORS} more")
    kind = {"language": "ForCausalLM", "classifier": "ForImageClassification", "regression": ""}[guess.task]
    if automatic and guess.task == "classifier" and guess.inputs.startswith("integers"):
        kind = "ForSequenceClassification"
    if automatic:
        imports = f"from transformers import AutoConfig, AutoModel{kind}"
        made = (
            f"AutoModel{kind}.from_config(AutoConfig.from_pretrained(Path(__file__).parent / {pretrained!a}))"
        )
        todo = "the samples"
    else:
        imports = f"from {module} import {name}" + ("" if model else "  # TODO: the class of your model")
        made = f"{name}()"
        todo = "the samples" if model else "the model and the samples"
    outputs = "model(inputs).logits" if automatic and kind else "model(inputs)"
    if automatic and not kind:
        outputs = "model(inputs).last_hidden_state"
    return _SOURCE.format(
        task=guess.task,
        why=guess.why,
        todo=todo,
        tensors="\n".join(lines),
        which=f", which={which!a}" if which else "",
        others=f"\n# To judge another model, name it in which={' or '.join(others)}." if models else "",
        imports=imports,
        samples=samples.format(inputs=guess.inputs, last=max(0, guess.n_outputs - 1)),
        made=made,
        body=body.format(outputs=outputs),
        result=result,
    )


def _model_named(model: str | None) -> tuple[str, str]:
    """Take ``MODULE:CLASS`` apart; what is no name would be code."""
    if model is None:
        return "my_model", "Model"
    module, _, name = model.partition(":")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in (*module.split("."), name)):
        raise InputError(
            "a model is named MODULE:CLASS", found=model[:_LONGEST_NAME], remedy="for example train:Net"
        )
    return module, name


_SOURCE: Final = '''"""Tells how good a checkpoint is. Written by `inshrink evaluate --write`; TODO: {todo}.

The evaluator gets a state dict and returns figures: docs/evaluators.md of Inshrink has every rule.
"""

# Guessed: {task}, since {why}.
# A checkpoint holds:
{tensors}{others}

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

{imports}


@cache
def samples():
    """Return held-out samples, the same at every call: what changes between two looks like damage."""
    # TODO: write them once, a few hundred are enough:
{samples}
    with np.load(Path(__file__).with_name("evaluation.npz")) as arrays:
        return tuple(torch.from_numpy(arrays[name]) for name in arrays.files)


def evaluate(state_dict{which}):
    """Return the figures of one checkpoint, and the predictions that a divergence is measured by."""
    model = {made}
    model.load_state_dict(state_dict)
    model.eval()
{body}
    return {{
{result}
    }}
'''

_SCORED: Final = """    with torch.inference_mode():
        log_probs = functional.log_softmax({outputs}.float(), dim=-1).flatten(0, -2)"""

_TASKS: Final = {
    "language": (
        '    #   np.savez("evaluation.npz", tokens=tokens)\n    # tokens: {inputs}, shape (samples, length)',
        "    (tokens,) = samples()\n    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()\n"
        + _SCORED,
        '        "loss": functional.nll_loss(log_probs, targets),\n        "log_probs": log_probs,',
    ),
    "classifier": (
        '    #   np.savez("evaluation.npz", inputs=inputs, targets=targets)\n'
        "    # inputs: {inputs}, as the model takes them; targets: integers from 0 to {last}",
        "    inputs, targets = samples()\n" + _SCORED,
        '        "accuracy": (log_probs.argmax(-1) == targets).double().mean(),\n'
        '        "loss": functional.nll_loss(log_probs, targets),\n        "log_probs": log_probs,',
    ),
    "regression": (
        '    #   np.savez("evaluation.npz", inputs=inputs, targets=targets)\n'
        "    # inputs: {inputs}, as the model takes them; targets: of the shape of its outputs",
        "    inputs, targets = samples()\n    with torch.inference_mode():\n"
        "        predictions = {outputs}.float()",
        '        "loss": functional.mse_loss(predictions, targets),\n        "predictions": predictions,',
    ),
}
"""Of each task: how its samples are written, how it is evaluated, and what is returned."""
