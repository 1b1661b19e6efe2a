"""Evaluators of files run in the process of a test, where the child of their own is not what is tested.

A child takes seconds to start; `tests/evaluate` shows what it is for.
"""

import math
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, NotFiniteError
from inshrink_core.evaluate import Evaluation
from inshrink_core.evaluate.child import describe, function_of, load_file, model_wanted, read_outcome
from inshrink_core.metrics import known_direction


@lru_cache(maxsize=8)
def _loaded(path, name, source):
    sys.path.insert(0, str(path.parent))
    try:
        return function_of(load_file(path), name)
    finally:
        sys.path.remove(str(path.parent))


def evaluate_here(evaluator, state):
    """Return what an evaluator's child would; to be put in the place of `Evaluator.evaluate`."""
    file, _, name = evaluator.spec.rpartition(":")
    path, given = Path(file).absolute(), dict[str, Tensor]()
    try:
        function = _loaded(path, name, path.read_bytes())
        named = state.state_dict(model_wanted(function)) if isinstance(state, Checkpoint) else state
        given = {key: tensor.detach().clone() for key, tensor in named.items()}
        with tempfile.TemporaryDirectory() as folder:
            outcome = read_outcome(function(given), Path(folder))
            arrays = {key: np.load(stored) for key, stored in outcome.pop("arrays").items()}
    except (Exception, SystemExit) as error:
        raise EvaluatorError(
            f"the evaluator failed: {describe(error, path, given)}", where=evaluator.spec
        ) from None
    metrics = outcome["metrics"]
    metric = evaluator.metric or ("loss" if "loss" in metrics else next(iter(metrics)))
    if not math.isfinite(metrics[metric]):
        raise NotFiniteError(f"its '{metric}' is {metrics[metric]}", where=evaluator.spec)
    direction = evaluator.direction or known_direction(metric)
    return Evaluation(metric=metric, direction=direction, value=metrics[metric], **outcome, **arrays)
