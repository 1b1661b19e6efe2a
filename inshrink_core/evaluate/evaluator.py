"""A user's evaluator, kept in a child process for many evaluations."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError, StorageError
from inshrink_core.evaluate.evaluation import Evaluation
from inshrink_core.evaluate.process import ChildProcess
from inshrink_core.metrics import Direction, known_direction

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DEFAULT_TIMEOUT_S", "Evaluator"]

DEFAULT_TIMEOUT_S = 600.0


class Evaluator:
    """A user's evaluator, kept in one child process for many evaluations.

    A child that hangs or dies is replaced at the next evaluation. Not for use from several threads.

    Parameters
    ----------
    spec
        ``FILE.py:FUNCTION``.
    metric
        The scalar to compare by; by default ``loss``, else the only scalar returned.
    direction
        ``higher`` or ``lower``; by default what the metric's name tells.
    timeout
        Seconds for one evaluation, and for importing the file; default 600.
    isolated
        True keeps modules that lie beside the file off the import path.

    Raises
    ------
    EvaluatorError
        `spec` is not of that form, or the file is not there.

    Examples
    --------
    >>> import inshrink_core
    >>> directory = inshrink_core.sample("digits-cnn")
    >>> state = inshrink_core.open(directory)[2000].state_dict()
    >>> with inshrink_core.Evaluator(f"{directory}/evaluator.py:evaluate", metric="accuracy") as evaluator:
    ...     evaluator.evaluate(state).value > 0.97
    True
    """

    def __init__(
        self,
        spec: str,
        *,
        metric: str | None = None,
        direction: Direction | str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        isolated: bool = False,
    ) -> None:
        file, _, self._function = spec.rpartition(":")
        self.spec, self.metric, self.timeout = spec, metric, timeout
        if not file or not self._function.isidentifier():
            raise EvaluatorError("an evaluator is named FILE.py:FUNCTION", where=spec)
        self._path = Path(file).absolute()
        if not self._path.is_file():
            raise EvaluatorError("there is no such evaluator file", where=file)
        if not timeout > 0:
            raise InputError("a timeout is a positive number of seconds", found=str(timeout), expected="> 0")
        if direction not in (None, *Direction):
            raise InputError(
                "a metric's direction is 'higher' or 'lower'",
                expected="higher or lower",
                found=str(direction),
            )
        self.direction = Direction(direction) if direction is not None else None
        self._isolated = isolated
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child; the evaluator may be used again, with a new one."""
        self._drop_child(kill=False)

    def _drop_child(self, *, kill: bool) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._finalizer.detach()
            child.close(kill=kill)

    def _fail(
        self, what: str, *, kill: bool, remedy: str = "", kind: type[EvaluatorError] = EvaluatorError
    ) -> NoReturn:
        """Raise with what the evaluator printed, and get rid of a child that is no longer of use."""
        output = self._child.output() if self._child is not None else ""
        if kill:
            self._drop_child(kill=True)
        shown = f"; it printed: {output}" if output else ""
        raise kind(f"the evaluator failed: {what}{shown}", where=self.spec, remedy=remedy)

    def _receive(self, child: ChildProcess) -> dict[str, Any]:
        """Turn a hang, a death and an error of the child into one clear error each."""
        try:
            reply = child.receive(self.timeout)
        except TimeoutError:
            self._fail(
                f"it did not answer within {self.timeout:g} s",
                kill=True,
                remedy="evaluate on fewer samples, or raise the evaluator's timeout",
            )
        if reply is None:
            self._fail(f"its process ended with {child.died()}", kill=True)
        if "error" in reply:
            self._fail(reply["error"], kill=False)
        return reply

    def _running_child(self) -> ChildProcess:
        """Start the child at the first evaluation, and import the user's file there once."""
        if self._child is None:
            self._child = ChildProcess(self._path, self._function, isolated=self._isolated)
            # Whoever forgets to close leaves neither a process nor a directory.
            self._finalizer = weakref.finalize(self, self._child.close, kill=True)
            try:
                self._receive(self._child)
            except BaseException:
                self._drop_child(kill=True)
                raise
        return self._child

    def evaluate(self, state_dict: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate one state.

        Parameters
        ----------
        state_dict
            Tensors by name as in the run, weights and buffers, any dtype. A `Checkpoint` stands for
            its own state_dict.

        Raises
        ------
        EvaluatorError
            The evaluator raised, hung, died, asked for a tensor that is not there, or returned
            something unusable. What it printed is in the message.
        InputError
            The direction of the metric is not known.

        Notes
        -----
        The state goes through a temporary file that the child maps, so its size on disk is the cost.
        """
        if isinstance(state_dict, Checkpoint):
            state_dict = state_dict.state_dict()
        try:
            child = self._running_child()
            state = child.directory / "state.pt"
            _write_state(state_dict, state)
            child.send({"state": str(state), "results": str(child.directory)})
            reply = self._receive(child)
            return self._read_reply(reply)
        except InputError:  # an EvaluatorError above all; a child of no more use is gone by now
            raise
        except BaseException:  # Ctrl-C above all: no child may outlive its evaluation
            self._drop_child(kill=True)
            raise

    def _read_reply(self, reply: Mapping[str, Any]) -> Evaluation:
        """Check what came back before anybody relies on it."""
        import numpy as np

        metrics: dict[str, float] = reply["metrics"]
        arrays = {name: np.load(path, allow_pickle=False) for name, path in reply["arrays"].items()}
        metric = self._choose_metric(metrics)
        if not math.isfinite(metrics[metric]):
            self._fail(f"its '{metric}' is {metrics[metric]}", kill=False, kind=NotFiniteError)
        log_probs = arrays.get("log_probs")
        if log_probs is not None and (log_probs.ndim != 2 or log_probs.size == 0):
            shape = tuple(log_probs.shape)
            self._fail(
                f"its 'log_probs' has the shape {shape}",
                kill=False,
                remedy="return (n, classes), for a sequence model log_probs.flatten(0, -2)",
            )
        return Evaluation(
            metric=metric,
            direction=self._choose_direction(metric),
            value=metrics[metric],
            metrics=metrics,
            log_probs=log_probs,
            predictions=arrays.get("predictions"),
            standard_errors=reply["standard_errors"],
            seconds=reply["seconds"],
        )

    def _choose_metric(self, metrics: Mapping[str, float]) -> str:
        """Apply the order: what was asked for, else ``loss``, else the only scalar."""
        there = ", ".join(metrics) or "none"
        if self.metric is not None:
            if self.metric not in metrics:
                self._fail(
                    f"it returned no '{self.metric}' (its scalars: {there})",
                    kill=False,
                    remedy="name one with --eval-metric",
                )
            return self.metric
        if "loss" in metrics:
            return "loss"
        if len(metrics) != 1:
            self._fail(
                f"it is not clear which scalar to compare by (its scalars: {there})",
                kill=False,
                remedy="name one with --eval-metric" if metrics else "return at least one number by name",
            )
        return next(iter(metrics))

    def _choose_direction(self, metric: str) -> Direction:
        """Prefer what was said over what the name tells; guess nothing."""
        direction = self.direction or known_direction(metric)
        if direction is None:
            raise InputError(
                f"it is not known whether '{metric}' is better higher or lower",
                where=self.spec,
                remedy=f'give it with --direction, or as direction = "higher" with metric = "{metric}"'
                " under [evaluator] in inshrink.toml",
            )
        return direction


def _write_state(state_dict: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors in a file the child can map; torch.save keeps every dtype and tied tensors tied."""
    import torch

    state = {name: tensor.detach().to("cpu") for name, tensor in state_dict.items()}
    try:
        torch.save(state, path)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"the state could not be handed to the evaluator: {error}",
            where=str(path.parent),
            remedy="free space there, or point TMPDIR elsewhere",
        ) from error
