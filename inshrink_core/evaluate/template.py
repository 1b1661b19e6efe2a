"""Template of an evaluator; only the model's class and the held-out samples are left to fill in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from inshrink_core.checkpoint import AVERAGE


def evaluator_source(which: str = "", models: Sequence[str] = ()) -> str:
    """Return the source of an evaluator.

    Parameters
    ----------
    which
        The evaluated model of a checkpoint; empty for the main one.
    models
        Further models of a checkpoint. This text is untrusted and never becomes code.
    """
    others = " or ".join(ascii(other) for other in (AVERAGE, *models) if other != which)
    return _SOURCE.format(
        which=f", which={which!a}" if which else "",
        others=f"\n# To judge another model, name it in which={others}." if models else "",
    )


_SOURCE: Final = '''"""Tells how good a checkpoint is. Written by `inshrink evaluate --write`; see TODO.

The evaluator gets a state dict and returns figures: docs/evaluators.md of Inshrink has every rule.
"""{others}

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from my_model import Model  # TODO: the class of your model


@cache
def samples():
    """Return held-out samples, the same at every call: what changes between two looks like damage."""
    # TODO: write them once, a few hundred are enough:
    #   np.savez("evaluation.npz", inputs=inputs, targets=targets)
    # inputs as the model takes them; targets, a class for each prediction: tokens[:, 1:] of tokens[:, :-1]
    with np.load(Path(__file__).with_name("evaluation.npz")) as arrays:
        return torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["targets"])


def evaluate(state_dict{which}):
    """Return the figures of one checkpoint, and the predictions that a divergence is measured by."""
    model = Model()
    model.load_state_dict(state_dict)
    model.eval()
    inputs, targets = samples()
    with torch.inference_mode():
        outputs = model(inputs)
    outputs = getattr(outputs, "logits", outputs).float()  # of a model of transformers, its logits
    # Of a regression: return {{"loss": functional.mse_loss(outputs, targets), "predictions": outputs}}
    log_probs, targets = functional.log_softmax(outputs, dim=-1).flatten(0, -2), targets.flatten()
    return {{
        "accuracy": (log_probs.argmax(-1) == targets).double().mean(),
        "loss": functional.nll_loss(log_probs, targets),
        "log_probs": log_probs,
    }}
'''
