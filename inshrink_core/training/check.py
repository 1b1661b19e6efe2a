"""The evaluator of a training: a function of its model, asked about a copy of it, in this process."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from inshrink_core.chain import ChainConfig, ChainWriter
from inshrink_core.chain.append import Appended, TensorDone
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorsInMemory
from inshrink_core.errors import CheckFailedError, EvaluatorError, InputError, NotFiniteError, named
from inshrink_core.evaluate import Evaluation
from inshrink_core.execution.files import Closing
from inshrink_core.formats.state_tree import strip_wrappers
from inshrink_core.metrics import Direction
from inshrink_core.search.bounded import BoundedWriter
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds
from inshrink_core.search.space import space_of
from inshrink_core.search.trials import BoundEvaluator, require_steady
from inshrink_core.text import described, printable

_logger = logging.getLogger(__name__)

_STEADY: Final = 1e-6
"""Relative difference of two answers about one state, beyond which a check is not deterministic."""

Check = Callable[[nn.Module], Any]
"""A function of a model in eval mode. Returns the loss on a fixed small batch, a number or a tensor with
one element; or a dict of ``loss``, and ``log_probs`` (n, classes) or ``predictions``, as evaluators do."""


class ModelEvaluator:
    """Evaluates states of a model by a function of it.

    Parameters
    ----------
    model
        A model that nothing else uses: states are loaded into it.
    check
        The function.
    spec
        Name for messages.
    metric, direction
        Name of the metric, and which way it is better.

    Notes
    -----
    For use from one thread at a time. No gradients are computed. Loading a state takes O(model) memory beside
    the model.
    """

    which: str | None = ""
    """The model of a checkpoint that is evaluated, as in `Checkpoint.state_dict`."""

    def __init__(
        self,
        model: nn.Module,
        check: Check,
        *,
        spec: str = "check",
        metric: str = "loss",
        direction: Direction = Direction.LOWER,
    ) -> None:
        self._model, self._check = model, check
        raw = [name for name, value in model.state_dict().items() if isinstance(value, Tensor)]
        # Names in a checkpoint have no prefixes of wrappers.
        self._names = dict(zip(raw, strip_wrappers(raw), strict=True))
        # A file may have only one of several tied tensors.
        shared: dict[int, list[str]] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if name in self._names:
                shared.setdefault(id(value), []).append(self._names[name])
        self._tied = {name: names for names in shared.values() if len(names) > 1 for name in names}
        self.spec = spec
        self.metric, self.direction = metric, direction

    def evaluate(self, state_dict: Mapping[str, Tensor] | Checkpoint) -> Evaluation:
        """Return metric and predictions of a state.

        Raises
        ------
        EvaluatorError
            The state belongs to another model, or the function fails or returns an invalid value.
        NotFiniteError
            The metric is NaN or infinite.
        """
        begun = time.perf_counter()
        self._load(state_dict.state_dict() if isinstance(state_dict, Checkpoint) else state_dict)
        return self._answered(begun)

    def _answered(self, begun: float) -> Evaluation:
        """Evaluate the model with its current state."""
        try:
            with torch.no_grad():
                answer = self._check(self._model)
        except BaseException as error:  # SystemExit too: no check ends a training
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # the user's: signals come to the main thread
            raise EvaluatorError(f"it cannot be evaluated ({described(error)})", where=self.spec) from error
        value, arrays = self._understood(answer)
        if not math.isfinite(value):
            raise NotFiniteError(f"its '{self.metric}' is {value}", where=self.spec)
        return Evaluation(
            metric=self.metric,
            direction=self.direction,
            value=value,
            metrics={self.metric: value},
            seconds=time.perf_counter() - begun,
            **arrays,
        )

    def state_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state of a model of the same class, with names as in a checkpoint."""
        state = model.state_dict()
        return {name: state[raw] for raw, name in self._names.items()}

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _understood(self, answer: Any) -> tuple[float, dict[str, Any]]:
        """Return the metric and the predictions in the function's result."""
        arrays: dict[str, Any] = {}
        if isinstance(answer, Mapping):
            given = {name: answer[name] for name in ("log_probs", "predictions") if name in answer}
            arrays = {name: _array(value) for name, value in given.items()}
            if self.metric not in answer:
                raise EvaluatorError(
                    f"it returned no '{self.metric}'",
                    where=self.spec,
                    found=printable(named([str(key) for key in answer])) or "an empty dict",
                )
            answer = answer[self.metric]
        try:
            value = float(answer)
        except (TypeError, ValueError, RuntimeError) as error:
            raise EvaluatorError(
                "it returned no number",
                where=self.spec,
                expected=f"the {self.metric}, or a dict of it and of 'log_probs' (n, classes)",
                found=type(answer).__name__,
            ) from error
        return value, arrays

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state into the model."""
        missing = [
            name
            for name in self._names.values()
            if name not in state and not any(other in state for other in self._tied.get(name, ()))
        ]
        if missing:
            raise EvaluatorError(f"the state has no tensor '{missing[0]}'", where=self.spec)
        found = {raw: state[name] for raw, name in self._names.items() if name in state}
        try:
            self._model.load_state_dict(found, strict=False)
        except RuntimeError as error:
            raise EvaluatorError(
                f"the state is of another model ({described(error)})", where=self.spec
            ) from error


class CheckedWriter(Closing):
    """Writes the saves of one training so that each restored save meets the bounds.

    A `inshrink_core.search.bounded.StepWriter`; a context manager, since it stores predictions in files.

    Parameters
    ----------
    base
        How frames are encoded, except for the tuned parameter.
    evaluator
        Evaluates originals and decoded frames.
    bounds
        The bounds of every restored step.
    follows
        Measure each save once or twice, without a search, since training continues meanwhile.
    every
        Check every n-th save; saves between use the settings of the last one checked.
    resumed
        Whether the archive was written with `base` so far.
    forgiving
        Store a save exactly if it cannot be evaluated, and list it in `failures`, instead of raising.

    Attributes
    ----------
    failures
        Why saves could not be evaluated, by step.
    """

    def __init__(
        self,
        base: ChainConfig,
        evaluator: ModelEvaluator,
        bounds: Bounds,
        *,
        follows: bool = False,
        every: int = 1,
        resumed: bool = False,
        forgiving: bool = False,
    ) -> None:
        self._originals: dict[int, Checkpoint] = {}
        self._evaluator = BoundEvaluator(evaluator, self._originals.__getitem__, bounds)
        self._bounded = BoundedWriter(
            base, self._evaluator, self._originals.get, follows=follows, resumed=resumed
        )
        self._every, self._forgiving, self._n_unchecked = every, forgiving, 0
        self._follows = follows
        self.failures: dict[int, str] = {}

    @classmethod
    def following(
        cls,
        evaluator: ModelEvaluator,
        model: nn.Module,
        base: ChainConfig,
        max_restore_cost: float | None,
        **options: Any,
    ) -> Self:
        """Return the writer of a training, after trying the check on the current state of its model.

        Raises
        ------
        EvaluatorError
            The check fails.
        """
        limit = DEFAULT_MAX_RESTORE_COST if max_restore_cost is None else max_restore_cost
        bounds = Bounds(max_restore_cost=limit)
        bounds.completed(require_check(evaluator, model))
        return cls(base, evaluator, bounds, follows=True, **options)

    @classmethod
    def beside(
        cls, model: nn.Module, check: Check, base: ChainConfig, limit: float | None, **options: Any
    ) -> Self:
        """Return the writer of a training whose model is copied to be checked.

        Raises
        ------
        ConfigError
            The codec has no tunable parameter.
        EvaluatorError
            The model cannot be copied, or the check fails.
        """
        space_of(base.codec)  # refuses a codec without a tunable parameter
        evaluator = ModelEvaluator(copied_model(model), check)
        return cls.following(evaluator, model, base, limit, forgiving=True, **options)

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Write a save as the smallest frame found that meets the bounds, or exactly."""
        if self._n_unchecked and self._bounded.can_repeat(chain):
            self._n_unchecked = (self._n_unchecked + 1) % self._every
            return self._bounded.repeat(chain, checkpoint, done)
        # After a restore the same step may have other values.
        self._evaluator.original.forget(lambda step: step >= checkpoint.step)
        self._originals[checkpoint.step] = checkpoint
        try:
            appended = self._bounded.append(chain, checkpoint, done)
        except (EvaluatorError, InputError, CheckFailedError) as error:
            if not self._forgiving:
                raise
            _logger.warning("step %d cannot be checked: %s", checkpoint.step, error)
            self.failures[checkpoint.step] = str(error)
            written = self._bounded.appended
            if isinstance(error, CheckFailedError) and written is not None:
                appended = written  # exact: nothing coarser met the bounds
            else:
                appended = self._bounded.append_exactly(chain, checkpoint, done, str(error))
        self._n_unchecked = 1 % self._every
        self._originals.clear()
        if not self._follows:
            # The files of a save are deleted later; a search may still compare with its values.
            self._originals[checkpoint.step] = _in_memory(checkpoint)
        self._evaluator.original.forget(lambda step: step != checkpoint.step)
        return appended

    def bound_record(self) -> dict[str, Any]:
        """Return the quality record of every save, as JSON values."""
        bound_record = self._bounded.bound_record
        steps = sorted(bound_record.steps)
        return bound_record.to_json() | {
            "frames": [{"step": step, **bound_record.step_json(step)} for step in steps]
        }

    def close(self) -> None:
        """Remove the files of predictions."""
        self._evaluator.close()


def require_check_options(check: Check | None, max_restore_cost: float | None, check_every: int) -> None:
    """Refuse invalid options of a check, and options without a check.

    Raises
    ------
    InputError
        An option is invalid.
    """
    if type(check_every) is not int or check_every < 1:
        raise InputError("check_every is a number of saves", expected="≥ 1", found=repr(check_every))
    if check is None and (max_restore_cost is not None or check_every != 1):
        raise InputError("there is no check", remedy="give the saver `check`, a function of the model")


def _in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Return weights and buffers of a checkpoint, copied to memory."""
    specs = tuple(spec for spec in checkpoint.specs if spec.role in MODEL_ROLES)
    tensors = {spec.key: checkpoint[spec.key].clone() for spec in specs}
    return replace(checkpoint, specs=specs, files=(), source=TensorsInMemory(tensors))


def copied_model(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model in eval mode, without gradients.

    Raises
    ------
    EvaluatorError
        The model cannot be copied.
    """
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise EvaluatorError(
            f"the model cannot be copied to be checked beside the training ({described(error)})",
            where="check",
            remedy="leave out `check`, or archive with bounds and an evaluator: `inshrink compress`",
        ) from error
    copied.eval()
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return copied


def require_check(evaluator: ModelEvaluator, model: nn.Module) -> Evaluation:
    """Return the evaluation of a model, after checking that it is deterministic.

    Runs in the caller's thread, before training continues. Later checks run during training, where drawing
    from torch's generator would disturb it.

    Raises
    ------
    EvaluatorError
        The check fails, draws random numbers or is not deterministic.
    """
    state = evaluator.state_of(model)
    before = torch.get_rng_state()
    first, second = evaluator.evaluate(state), evaluator.evaluate(state)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise EvaluatorError(
            "it draws random numbers, which would disturb those of the training",
            where=evaluator.spec,
            remedy="draw its batch once, before; and use no dropout of its own",
        )
    require_steady(first, second, _STEADY, evaluator.spec)
    return first


def _array(values: Any) -> NDArray[Any]:
    tensor = torch.as_tensor(values).detach()
    array: NDArray[Any] = tensor.float().cpu().numpy()
    return array
