"""A user's evaluator, kept in a child process for many evaluations."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, StorageError
from inshrink_core.evaluate.evaluation import Evaluation, PartialEvaluation
from inshrink_core.evaluate.process import ChildProcess
from inshrink_core.evaluate.reply import UnusableReplyError, read_partial_reply, read_reply
from inshrink_core.metrics import Direction

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

    def _receive(self, child: ChildProcess, seconds: float) -> dict[str, Any]:
        """Turn a hang, a death and an error of the child into one clear error each."""
        try:
            reply = child.receive(seconds)
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
                self._receive(self._child, self.timeout)
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
        return cast(Evaluation, self._evaluate(state_dict, None))  # nobody says stop

    def evaluate_until(
        self, state_dict: Mapping[str, Tensor], stop: Callable[[PartialEvaluation], bool]
    ) -> Evaluation | PartialEvaluation:
        """Evaluate one state, until what is known of it is enough.

        Parameters
        ----------
        state_dict
            As `evaluate` takes it.
        stop
            Asked after each partial result that the evaluator yields; True ends the evaluation.

        Returns
        -------
        Evaluation or PartialEvaluation
            The full result, or the partial one that was enough. An evaluator that yields none, or
            returns instead of yielding, is measured in full.

        Raises
        ------
        EvaluatorError, InputError
            As `evaluate`.
        """
        return self._evaluate(state_dict, stop)

    def _evaluate(
        self, state_dict: Mapping[str, Tensor], stop: Callable[[PartialEvaluation], bool] | None
    ) -> Evaluation | PartialEvaluation:
        """Hand a state to the child and answer what it says."""
        if isinstance(state_dict, Checkpoint):
            state_dict = state_dict.state_dict()
        try:
            child = self._running_child()
            state = child.directory / "state.pt"
            _write_state(state_dict, state)
            asked = {"state": str(state), "results": str(child.directory), "partial": stop is not None}
            child.send(asked)
            return self._answered(child, stop)
        except UnusableReplyError as error:
            self._fail(error.what, kill=False, remedy=error.remedy, kind=error.kind)
        except InputError:  # an EvaluatorError above all; a child of no more use is gone by now
            raise
        except BaseException:  # Ctrl-C above all: no child may outlive its evaluation
            self._drop_child(kill=True)
            raise

    def _answered(
        self, child: ChildProcess, stop: Callable[[PartialEvaluation], bool] | None
    ) -> Evaluation | PartialEvaluation:
        """Read partial results until the full one, or until one is enough."""
        deadline = time.monotonic() + self.timeout
        so_far: PartialEvaluation | None = None
        while True:
            reply = self._receive(child, deadline - time.monotonic())
            if so_far is not None and "stopped" in reply:
                return so_far
            if "partial" not in reply or stop is None:
                return read_reply(reply, self.spec, self.metric, self.direction)
            so_far, enough = self._judged(reply, stop)
            child.send({"go_on": not enough})

    def _judged(
        self, reply: Mapping[str, Any], stop: Callable[[PartialEvaluation], bool]
    ) -> tuple[PartialEvaluation, bool]:
        """Ask whether a partial result is enough; a child that gets no word waits for it for ever."""
        try:
            so_far = read_partial_reply(reply, self.spec, self.metric, self.direction)
            return so_far, stop(so_far)
        except UnusableReplyError as error:
            self._fail(error.what, kill=True, remedy=error.remedy, kind=error.kind)
        except BaseException:
            self._drop_child(kill=True)
            raise


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
