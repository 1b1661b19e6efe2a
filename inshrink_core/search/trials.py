"""Trials: one configuration at one step of a chain, encoded in memory, evaluated, and logged.

Each step is encoded against the decoded values of the chain so far, so a trial measures the content of the
archive. A logged trial is neither encoded nor evaluated again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, ChainState, tensor_digest
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError, StorageError
from inshrink_core.evaluate import Evaluation, OriginalEvaluations, StateEvaluator, figures_of
from inshrink_core.execution.files import Closing
from inshrink_core.execution.results import add_line, read_lines
from inshrink_core.search.bounds import Bounds, Figures
from inshrink_core.search.measure import EncodedStep, encode_step
from inshrink_core.search.space import Settings, with_settings

if TYPE_CHECKING:
    from torch import Tensor

# A line takes half a kilobyte, so a file of half a million lines is not a trial log.
_MAX_NBYTES: Final = 1 << 28


# Maximum difference between two evaluations of one state, as a share of the tightest bound.
_STEADY: Final = 0.01

# Bound that the check of reproducibility uses if the search has no bound on the drop.
_TIGHTEST: Final = 1e-3


class BoundEvaluator(Closing):
    """Evaluates candidates against the originals of a run.

    Parameters
    ----------
    evaluator
        Closed together with the evaluator.
    originals
        Function that returns the original checkpoint of a step.
    bounds
        The requested limits; completed at the first evaluation (`Bounds.completed`).

    Attributes
    ----------
    original
        Evaluation of an original by step. It is made once, and its predictions go to files. EvaluatorError if
        the evaluator failed, or returned two values for one state, which is checked at the first step.
    spec, digest
        Name of the evaluator for messages, and digest that identifies it.
    metric, direction
        Metric of the evaluator and its direction, known after the first evaluation.
    seconds
        Time in the evaluator, including originals.
    evaluations
        Number of evaluated states, without originals.
    """

    def __init__(
        self, evaluator: StateEvaluator, originals: Callable[[int], Checkpoint], bounds: Bounds
    ) -> None:
        self._evaluator, self._originals, self._bounds = evaluator, originals, bounds
        self._folder = tempfile.TemporaryDirectory(prefix="inshrink-search-")
        self.original = OriginalEvaluations(self._first_look, Path(self._folder.name))
        self.spec = evaluator.spec
        self.metric = ""
        self.direction = ""
        self.seconds = 0.0
        self.evaluations = 0

    @property
    def digest(self) -> str:
        """Digest of the evaluator: its source, function, metric and direction."""
        return evaluator_digest(self._evaluator)

    @property
    def which(self) -> str | None:
        """The model of a checkpoint that is evaluated, known after the first evaluation."""
        return self._evaluator.which

    def bounds(self, step: int) -> Bounds:
        """Return the bounds, completed by the evaluator's result for a step's original.

        Raises
        ------
        InputError
            The evaluator's result does not allow to check a bound.
        """
        original = self.original(step)
        bounds = self._bounds.completed(original)
        bounds.check(figures_of(original, original))
        return bounds

    def _first_look(self, step: int) -> Evaluation:
        found = self._ask(self._originals(step))
        if not self.metric:
            tolerance = _STEADY * (self._bounds.limits.get("drop") or _TIGHTEST)
            require_steady(found, self._ask(self._originals(step)), tolerance, self.spec)
            self.metric, self.direction = found.metric, found.direction.value
        return found

    def close(self) -> None:
        """Close the evaluator and remove the files."""
        self._evaluator.close()
        self.original.clear()
        self._folder.cleanup()

    def figures(self, step: int, state: Mapping[str, Tensor] | Checkpoint) -> Figures:
        """Return the figures of a state in place of a step's original.

        A metric or prediction that is not finite is a failure of the state, because the original's is finite.

        Raises
        ------
        EvaluatorError
            The evaluator raised, hung or died.
        """
        first = self.original(step)
        try:
            found = self._ask(state)
        except NotFiniteError as error:
            self.evaluations += 1
            return Figures(failure=error.what)
        self.evaluations += 1
        try:
            return figures_of(first, found)
        except InputError as error:
            return Figures(failure=str(error))

    def baseline(self, step: int, before: int | None) -> Figures | None:
        """Return the figures of an earlier original in place of a step's, or None without one."""
        if before is None:
            return None
        previous, original = self.original(before), self.original(step)
        try:
            return figures_of(original, previous)
        except InputError as error:
            raise EvaluatorError(f"step {step} cannot be compared: {error}", where=self.spec) from error

    def _ask(self, state: Mapping[str, Tensor] | Checkpoint) -> Evaluation:
        found = self._evaluator.evaluate(state)
        self.seconds += found.seconds
        return found


def require_steady(first: Evaluation, second: Evaluation, tolerance: float, where: str) -> None:
    """Refuse an evaluator that is not deterministic.

    Parameters
    ----------
    first, second
        Two evaluations of one state.
    tolerance
        Largest relative difference of their values.
    where
        Name of the evaluator.

    Raises
    ------
    EvaluatorError
        The values differ by more.
    """
    if abs(first.value - second.value) > tolerance * abs(first.value):
        raise EvaluatorError(
            "the evaluator is not deterministic: it returned two results for one state",
            where=where,
            expected=f"{first.metric} {first.value:.9g} again",
            found=f"{second.value:.9g}",
            remedy="fix its seed, and evaluate the same samples every time",
        )


def evaluator_digest(evaluator: StateEvaluator) -> str:
    """Return 16 hexadecimal digits over an evaluator's source, function, metric and direction.

    The digest does not cover data that the evaluator reads; after a change of the data, use a new trial log.
    """
    file, _, function = evaluator.spec.rpartition(":")
    total = hashlib.sha256(Path(file).read_bytes() if Path(file).is_file() else b"")
    total.update(f"\0{function}\0{evaluator.metric}\0{evaluator.direction}".encode())
    total.update(getattr(evaluator, "setting", "").encode())
    return total.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Figures):
    """One configuration at one step of a chain.

    Parameters
    ----------
    step
        Training step.
    config
        Settings, as in a config file.
    raw_weights, weights_nbytes
        Raw bytes of weights and buffers, and their stored bytes; 0 if they were not requested.
    damage
        ½ Σ h·e², the uncalibrated input of the quadratic model; None if h is unknown.
    seconds
        Time of encoding and evaluating.
    cached
        Whether the trial comes from the log.
    """

    step: int
    config: Mapping[str, Any]
    raw_weights: int
    weights_nbytes: int
    damage: float | None = None
    seconds: float = 0.0
    cached: bool = field(default=False, compare=False)

    @property
    def ratio_weights(self) -> float:
        """Raw bytes over stored bytes of weights and buffers, including headers and indexes."""
        return self.raw_weights / self.weights_nbytes if self.weights_nbytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        values = asdict(self) | {"config": self.config, "ratio_weights": self.ratio_weights}
        del values["cached"]
        return values


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Return 32 hexadecimal digits over every tensor of a checkpoint and its learning rates.

    Notes
    -----
    Reads the complete checkpoint, because the optimizer state affects the coarseness of a step.
    """
    total = hashlib.sha256()
    for spec in checkpoint.specs:
        total.update(f"{spec.key}\0{spec.dtype}\0{spec.shape}\0".encode())
        total.update(tensor_digest(checkpoint.source.read(spec)))
    rates = sorted((name, sorted(group.items())) for name, group in checkpoint.hyperparameters.items())
    total.update(json.dumps(rates).encode())
    return total.hexdigest()[:32]


def model_digests(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the SHA-256 of every weight and buffer."""
    specs = [spec for spec in checkpoint.specs if spec.role in MODEL_ROLES]
    return {spec.key: tensor_digest(checkpoint[spec.key]) for spec in specs}


class TrialLog:
    """Trials by key, in memory and, with a path, in a file that each new trial is appended to at once.

    The file has one JSON object per line: a trial with its run and its key. Trials of other runs are ignored.

    Parameters
    ----------
    path
        Path of the file; None keeps trials in memory only.
    run
        Identification of the run: the digest of its first checkpoint.

    Raises
    ------
    StorageError
        The file cannot be read.
    """

    def __init__(self, path: Path | None, run: str) -> None:
        self._path, self._run = path, run
        self._trials: dict[str, Trial] = {}
        try:
            rows = [] if path is None else read_lines(path, _MAX_NBYTES, _parse_line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"the trial log cannot be read: {error.strerror}", where=str(path)) from error
        self._trials |= {key: trial for of_run, key, trial in rows if of_run == run}

    def values(self) -> tuple[Trial, ...]:
        """Return all trials in the order of addition."""
        return tuple(self._trials.values())

    def get(self, key: str) -> Trial | None:
        """Return the trial of a key, or None."""
        return self._trials.get(key)

    def add(self, key: str, trial: Trial) -> None:
        """Add a trial; it is on disk when this returns.

        Raises
        ------
        StorageError
            The trial cannot be written, for example because the disk is full.
        """
        self._trials[key] = trial
        if self._path is not None:
            add_line(self._path, {"run": self._run, "key": key, **trial.to_json()})


def _parse_line(row: dict[str, Any]) -> tuple[str, str, Trial]:
    """Return the run, the key and the trial of a line."""
    values = {name: value for name, value in row.items() if name not in ("run", "key", "ratio_weights")}
    return str(row["run"]), str(row["key"]), replace(msgspec.convert(values, Trial), cached=True)


class TriedFrame(NamedTuple):
    """Record of a tried frame: its index, and the SHA-256 of its decoded tensors.

    The states of all frames would not fit into memory.
    """

    frame_index: FrameIndex
    digests: Mapping[str, bytes]


OnTrial = Callable[[Trial], None]
"""Called after each trial; raising from it cancels the search."""


@dataclass(kw_only=True)
class Measurer:
    """Encodes candidates in memory and evaluates the restored states.

    Parameters
    ----------
    base
        Configuration of the frames, except for the candidate's settings.
    evaluator
        The evaluator.
    sized
        Whether to measure frame sizes, and to evaluate equal restored states only once. Neither pays off if
        nearly every candidate is written.
    """

    base: ChainConfig
    evaluator: BoundEvaluator
    sized: bool = True
    _figures: dict[tuple[int, tuple[bytes, ...]], Figures] = field(default_factory=dict, repr=False)

    def config(self, candidate: Settings, checkpoint: Checkpoint) -> ChainConfig:
        """Return the configuration of a candidate for the frame of a checkpoint."""
        return with_settings(self.base, candidate, checkpoint, self.evaluator.which)

    def document(self, candidate: Settings, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the full configuration of a candidate as a config file has it."""
        settings, defaults = self.base.config.settings(), type(self.base.config)().settings()
        common = {name: value for name, value in settings.items() if value != defaults.get(name)}
        overrides = [override.to_json() for override in self.config(candidate, checkpoint).overrides]
        document: dict[str, Any] = {"codec": self.base.codec, "settings": {**common, **candidate}}
        return document | ({"override": overrides} if overrides else {})

    def measured(
        self, candidate: Settings, checkpoint: Checkpoint, state: ChainState, index: FrameIndex | None
    ) -> tuple[Trial, EncodedStep, TriedFrame | None]:
        """Return the trial of a candidate at a step that is encoded against a state, and its frame."""
        begun = time.perf_counter()
        encoded = encode_step(self.config(candidate, checkpoint), checkpoint, state, index)
        restored, step, shards = encoded.restored(), checkpoint.step, state.shards
        raw_weights, weights_nbytes, tried, figures = encoded.raw_weights, 0, None, None
        if self.sized:
            weights_nbytes = encoded.weights_nbytes
            if shards is not None:
                rows = shards.gathered((raw_weights, weights_nbytes))
                raw_weights, weights_nbytes = map(sum, zip(*rows, strict=True))
            tried = TriedFrame(encoded.index, model_digests(restored))
            # The cache is per rank, so ranks of a collective save would disagree about cached figures.
            figures = None if shards is not None else self._figures.get((step, tuple(tried.digests.values())))
        figures = figures or self.evaluator.figures(step, restored)
        if tried is not None:
            self._figures[step, tuple(tried.digests.values())] = figures
        trial = Trial(
            **asdict(figures),
            step=step,
            config=self.document(candidate, checkpoint),
            raw_weights=raw_weights,
            weights_nbytes=weights_nbytes,
            seconds=time.perf_counter() - begun,
        )
        return trial, encoded, tried
