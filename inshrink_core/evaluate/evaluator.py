"""Evaluators of users, run in a child process that serves many evaluations."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError, StorageError
from inshrink_core.execution.files import Closing
from inshrink_core.execution.process import minimal_environment, start_python, user_environment
from inshrink_core.metrics import (
    Direction,
    divergence,
    is_loss,
    known_direction,
    mean_entropy,
    mean_squared_difference,
    output_error,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

DEFAULT_TIMEOUT_S = 600.0

_POLL_S = 0.1
"""Interval in seconds of the check that a silent child is alive; its answer wakes the parent at once."""

_CLOSE_S = 2.0
"""Seconds that a child may take to exit after its input has ended."""

_OUTPUT_TAIL_BYTES = 2000
"""Bytes of the evaluator's output in an error message: the end usually shows the cause."""

_MAX_OUTPUT_BYTES: Final = 16 << 20
"""Output beyond this size is discarded except for its end; checked as often as the child's life."""

_CHILD, _SAMPLES_FILE = (Path(__file__).with_name(name) for name in ("child.py", "own_samples.py"))


class Prepared(NamedTuple):
    """Data of an evaluator that is prepared for a run.

    Parameters
    ----------
    setting
        Everything that its results depend on, besides its code.
    write
        Function that writes the data into a folder.
    """

    setting: str
    write: Callable[[Path], None]


class Evaluator(Closing):
    """A user's evaluator, in one child process for many evaluations.

    A child that hangs or dies is replaced at the next evaluation. Not thread-safe.

    Parameters
    ----------
    spec
        ``FILE.py:FUNCTION``.
    metric
        The scalar to compare by; by default ``loss``, else the only scalar returned.
    direction
        ``higher`` or ``lower``; by default from the metric's name.
    timeout
        Seconds for one evaluation, and for importing the file; default 600.
    isolated
        Exclude modules in the file's folder from the import path.
    prepared
        Data from which `inshrink_core.evaluate.own_samples` builds the evaluator, in place of `spec`.
        The evaluator is made of this by `inshrink_core.evaluate.own_samples`, in the place of `spec`.

    Raises
    ------
    EvaluatorError
        `spec` does not have that form, or the file does not exist.

    Examples
    --------
    >>> import inshrink_core
    >>> directory = inshrink_core.sample("digits-cnn")
    >>> state = inshrink_core.open(directory)[2000].state_dict()
    >>> from inshrink_core.evaluate import Evaluator
    >>> with Evaluator(f"{directory}/evaluator.py:evaluate", metric="accuracy") as evaluator:
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
        prepared: Prepared | None = None,
    ) -> None:
        if prepared is not None:
            spec = f"{_SAMPLES_FILE}:evaluator_of"
        file, _, function = spec.rpartition(":")
        if not file or not function.isidentifier():
            raise EvaluatorError("an evaluator is named FILE.py:FUNCTION", where=spec)
        if not Path(file).is_file():
            raise EvaluatorError("there is no such evaluator file", where=file)
        self._file, self._function, self._prepared = Path(file).absolute(), function, prepared
        self.spec, self.metric, self.timeout = spec, metric, timeout
        if not timeout > 0:
            raise InputError("a timeout is a positive number of seconds", found=str(timeout), expected="> 0")
        if direction not in (None, *Direction):
            what = "a metric's direction is 'higher' or 'lower'"
            raise InputError(what, expected="higher or lower", found=str(direction))
        self.direction = Direction(direction) if direction is not None else None
        self._isolated = isolated
        self._child: _ChildProcess | None = None
        self.which = ""

    def close(self) -> None:
        """End the child; the next evaluation starts a new one."""
        self._drop_child(kill=False)

    @property
    def setting(self) -> str:
        """Everything that the results depend on, besides the evaluator's code."""
        return "" if self._prepared is None else self._prepared.setting

    @property
    def printed(self) -> str:
        """End of the output during the last evaluation, in one line."""
        return "" if self._child is None else self._child.output()

    def _drop_child(self, *, kill: bool) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._finalizer.detach()
            child.close(kill=kill)

    def _fail(
        self, what: str, *, kill: bool = False, remedy: str = "", kind: type[EvaluatorError] = EvaluatorError
    ) -> NoReturn:
        """Raise with the evaluator's output, and end an unusable child."""
        output = self.printed
        if kill:
            self._drop_child(kill=True)
        shown = f"; it printed: {output}" if output else ""
        raise kind(f"the evaluator failed: {what}{shown}", where=self.spec, remedy=remedy)

    def _receive(self, child: _ChildProcess, seconds: float) -> dict[str, Any]:
        """Receive a reply; raise a clear error for a hang, a death or an error of the child."""
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
            self._fail(reply["error"])
        return reply

    def _running_child(self) -> _ChildProcess:
        """Return the child; the first evaluation starts it and imports the user's file."""
        if self._child is None:
            write = None if self._prepared is None else self._prepared.write
            self._child = _ChildProcess(self._file, self._function, isolated=self._isolated, write=write)
            # Without a call of `close`, the finalizer removes process and directory.
            self._finalizer = weakref.finalize(self, self._child.close, kill=True)
            try:
                self.which = str(self._receive(self._child, self.timeout).get("which", ""))
            except BaseException:
                self._drop_child(kill=True)
                raise
        return self._child

    def evaluate(self, state_dict: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate one state.

        Parameters
        ----------
        state_dict
            Tensors by name as in the run: weights and buffers, any dtype. From a `Checkpoint`, those of the
            model in the default of the function's parameter ``which``.

        Raises
        ------
        EvaluatorError
            The evaluator raised, hung, died, read a missing tensor, or returned an unusable result. The
            message includes its output.
        InputError
            The direction of the metric is unknown.

        Notes
        -----
        The state goes through a temporary file that the child maps, so the cost is its size on disk.
        """
        try:
            child = self._running_child()
            if isinstance(state_dict, Checkpoint):
                state_dict = state_dict.state_dict(self.which)
            state = child.directory / "state.pt"
            write_state(state_dict, state)
            child.send({"state": str(state), "results": str(child.directory)})
            return self._read(self._receive(child, self.timeout))
        except InputError:  # includes EvaluatorError; an unusable child has already ended
            raise
        except BaseException:  # for example Ctrl-C: the child must not outlive its evaluation
            self._drop_child(kill=True)
            raise

    def _read(self, reply: Mapping[str, Any]) -> Evaluation:
        """Return a full result."""
        arrays, metrics = self._arrays(reply), reply["metrics"]
        chosen = self._choose_metric(metrics)
        if not math.isfinite(metrics[chosen]):
            self._fail(f"its '{chosen}' is {metrics[chosen]}", kind=NotFiniteError)
        return Evaluation(
            metric=chosen,
            direction=self._direction_of(chosen),
            value=metrics[chosen],
            metrics=metrics,
            log_probs=arrays.get("log_probs"),
            predictions=arrays.get("predictions"),
            standard_errors=reply["standard_errors"],
            correction=reply["correction"],
            seconds=reply["seconds"],
        )

    def _arrays(self, reply: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Read arrays from their files; class predictions have two axes."""
        import numpy as np

        arrays = {name: np.load(path, allow_pickle=False) for name, path in reply["arrays"].items()}
        log_probs = arrays.get("log_probs")
        if log_probs is not None and (log_probs.ndim != 2 or log_probs.size == 0):
            self._fail(
                f"its 'log_probs' has the shape {tuple(log_probs.shape)}",
                remedy="return shape (n, classes); for a sequence model, log_probs.flatten(0, -2)",
            )
        return arrays

    def _choose_metric(self, metrics: Mapping[str, float]) -> str:
        """Return the requested metric, else ``loss``, else the only scalar."""
        there = ", ".join(metrics) or "none"
        if self.metric is not None:
            if self.metric not in metrics:
                what = f"it returned no '{self.metric}' (its scalars: {there})"
                self._fail(what, remedy="name one with --eval-metric")
            return self.metric
        if "loss" in metrics:
            return "loss"
        if len(metrics) != 1:
            self._fail(
                f"it is not clear which scalar to compare by (its scalars: {there})",
                remedy="name one with --eval-metric" if metrics else "return at least one number by name",
            )
        return next(iter(metrics))

    def _direction_of(self, metric: str) -> Direction:
        """Return the given direction, else that of the metric's name."""
        direction = self.direction or known_direction(metric)
        if direction is None:
            raise InputError(
                f"the better direction of '{metric}' is unknown",
                where=self.spec,
                remedy=f'give it with --direction, or as direction = "higher" with metric = "{metric}"'
                " under [evaluator] in inshrink.toml",
            )
        return direction


def write_state(state_dict: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a file that the child can map; torch.save preserves dtypes and tied tensors."""
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


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of evaluating one state.

    Parameters
    ----------
    metric
        Metric that is compared.
    direction
        Better direction of the metric: ``higher`` or ``lower``.
    value
        Value of the metric; finite.
    metrics
        All metrics returned, by name.
    log_probs
        Shape (n, classes), nats; None if not returned.
    predictions
        Regression outputs, any shape; None if not returned.
    standard_errors
        Standard errors returned, by name of the metric.
    correction
        Factor for the restore cost on samples that are known to underestimate it.
    seconds
        Time in the evaluator, in seconds.
    """

    metric: str
    direction: Direction
    value: float
    metrics: Mapping[str, float]
    log_probs: NDArray[Any] | None = field(default=None, repr=False)
    predictions: NDArray[Any] | None = field(default=None, repr=False)
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    correction: float = 1.0
    seconds: float = 0.0

    def divergence(self, restored: Evaluation) -> float | None:
        """Return the divergence of a restored state's predictions; None without predictions.

        With `log_probs`, it is the mean KL(original ‖ restored) in nats, ``mean_i Σ_c p_ic (log p_ic - log
        q_ic)``. With `predictions` x and y, it is ``mean((x - y)²) / var(x)``.
        """
        if self.log_probs is not None and restored.log_probs is not None:
            return divergence(self.log_probs, restored.log_probs)
        if self.predictions is not None and restored.predictions is not None:
            return output_error(self.predictions, restored.predictions)
        return None

    def restore_cost(self, restored: Evaluation, nats: float | None = None) -> float | None:
        """Return the expected relative rise of the loss after a restore.

        Predictions with a divergence D cost D nats of cross-entropy in expectation, whatever the labels.
        Regression predictions cost their mean squared difference. Unlike the measured rise, neither is ever
        negative, and few samples suffice. The result is relative to the loss: to the metric if that is a
        loss, otherwise to the entropy of the predictions. Without predictions it is the absolute value of the
        measured rise. It is None if the loss is 0, or if the metric is no loss and predictions are missing.
        `nats` is the `divergence` of the two states if already known.
        """
        if self.log_probs is not None and restored.log_probs is not None:
            if not self._scale > 0:
                return None
            lost = divergence(self.log_probs, restored.log_probs) if nats is None else nats
            return self.correction * lost / self._scale
        if not self._is_loss or not self.value > 0:
            return None
        if self.predictions is not None and restored.predictions is not None:
            lost = mean_squared_difference(self.predictions, restored.predictions)
        else:
            lost = abs(restored.value - self.value)
        return self.correction * lost / self.value

    @cached_property
    def _scale(self) -> float:
        """Cross-entropy that the divergence is relative to; cached, because each candidate reads it."""
        if self._is_loss or self.log_probs is None:
            return self.value
        return mean_entropy(self.log_probs)

    @property
    def _is_loss(self) -> bool:
        """Return whether the metric is a cross-entropy or a mean squared error, by its name."""
        return self.direction is Direction.LOWER and is_loss(self.metric)


class StateEvaluator(Protocol):
    """An evaluator of states."""

    @property
    def spec(self) -> str:
        """Name of the evaluator for messages."""

    @property
    def metric(self) -> str | None:
        """The requested scalar; None applies the default rules."""

    @property
    def direction(self) -> Direction | None:
        """Direction of the metric, if given."""

    @property
    def which(self) -> str | None:
        """The model of a checkpoint that is evaluated, known after the first evaluation."""

    def evaluate(self, state_dict: Mapping[str, Tensor] | Checkpoint, /) -> Evaluation:
        """Return the evaluation of a state."""

    def close(self) -> None:
        """Release the evaluator's resources."""


class _ChildProcess:
    """A child process and its exchange directory; unusable after any failure of the process."""

    def __init__(
        self, file: Path, function: str, *, isolated: bool, write: Callable[[Path], None] | None
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="inshrink-evaluate-"))
        prepared = [] if write is None else [str(self.directory / "prepared")]
        if write is not None:
            try:
                Path(prepared[0]).mkdir()
                write(Path(prepared[0]))
            except BaseException:
                shutil.rmtree(self.directory, ignore_errors=True)
                raise
        self._output_path = self.directory / "output.txt"
        self._log: IO[bytes] = self._output_path.open("ab")
        # An evaluator of this package needs none of the user's files. The user trusts any other evaluator; it
        # runs in the folder of its file, not in the working directory.
        alone = isolated or write is not None
        self._process = start_python(
            [str(_CHILD), str(file), function, "isolated" if alone else "beside", *prepared],
            errors=self._log,
            environment=minimal_environment() if isolated else user_environment(),
            directory=None if alone else file.parent,
            new_session=True,  # so that the child's processes end with it
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._receive, daemon=True)
        self._reader.start()

    def _receive(self) -> None:
        """Read in a thread, because waiting for a pipe with a timeout is not possible on every platform."""
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one command; `receive` detects a dead child."""
        os.truncate(self._output_path, 0)  # the child appends
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next reply; None if the process has ended without one.

        Raises
        ------
        TimeoutError
            No reply came in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply: dict[str, Any] = json.loads(self._lines.get(timeout=_POLL_S))
            except Empty:
                self._limit_output()
                if self._process.poll() is not None and not self._reader.is_alive() and self._lines.empty():
                    return None
                if time.monotonic() > deadline:
                    raise TimeoutError from None
            else:
                return reply

    def died(self) -> str:
        """Return how the process ended."""
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _limit_output(self) -> None:
        """Discard all but the end of a large output, so that it cannot fill the disk."""
        if self._output_path.stat().st_size > _MAX_OUTPUT_BYTES:
            end = self._end_of_output()
            os.truncate(self._output_path, 0)
            self._log.write(end)
            self._log.flush()

    def output(self) -> str:
        """Return the end of what the evaluator printed since the last command, in one line."""
        lines = self._end_of_output().decode("utf-8", "replace").splitlines()
        return " | ".join(line.strip() for line in lines if line.strip())

    def _end_of_output(self) -> bytes:
        with self._output_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _OUTPUT_TAIL_BYTES))
            return log.read(_OUTPUT_TAIL_BYTES)

    def close(self, *, kill: bool) -> None:
        """End the process, wait for its exit unless `kill` is set, and remove the directory."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        self._reader.join(_CLOSE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)
