"""Trials: one configuration at one step of a chain, encoded in memory, evaluated, and logged.

Each step is encoded relative to what the chain decodes to so far, so that a trial measures what the archive
would hold. A trial that is in the log is neither encoded nor evaluated again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

from inshrink_core.archive.document import pack_value
from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, ChainState, PreparedFrame, step_gain, tensor_digest
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.errors import DamagedError, InputError, StorageError
from inshrink_core.execution.kept import add_line, parse_record, read_lines
from inshrink_core.search.bounds import Figures, Partial
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import EncodedStep, encode_step, following
from inshrink_core.search.quadratic import damage_of, sensitivities
from inshrink_core.search.space import Candidate

_HEAD: Final = "inshrink_trials"
_VERSION: Final = 1

# A line takes half a kilobyte: half a million of them are another file by mistake.
_MAX_NBYTES: Final = 1 << 28

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration at one step, in a chain that led there.

    Parameters
    ----------
    step
        Training step.
    config
        The configuration, as a config file says it.
    raw_weights, weights_nbytes
        Raw bytes of weights and buffers, and the bytes that hold them; 0 where they were not asked for.
    drop, divergence, restore_cost, drop_error
        Against the step's original (`inshrink_core.search.bounds.Figures`); None where not known.
    restore_gain, restore_noise
        Had training been restored at the step before; None where not measured.
    damage
        ½ Σ h·e², what the quadratic model predicts from, uncalibrated; None where nothing tells h.
    seconds
        Time of encoding and evaluating.
    failure
        Why the evaluator could not judge it; empty where it could.
    partial
        How far it was judged before it was given up; None for a trial measured in full. A partial trial
        keeps no bound, and its figures are those of the samples so far.
    cached
        Whether it comes from the log.
    """

    step: int
    config: Mapping[str, Any]
    raw_weights: int
    weights_nbytes: int
    drop: float | None = None
    divergence: float | None = None
    restore_cost: float | None = None
    drop_error: float | None = None
    restore_gain: float | None = None
    restore_noise: float | None = None
    damage: float | None = None
    seconds: float = 0.0
    failure: str = ""
    partial: Partial | None = None
    cached: bool = field(default=False, compare=False)

    @property
    def ratio_weights(self) -> float:
        """Raw bytes of the weights over the bytes that hold them."""
        return self.raw_weights / self.weights_nbytes if self.weights_nbytes else 0.0

    @property
    def figures(self) -> Figures:
        """What the evaluator made of it."""
        return Figures(**{name: getattr(self, name) for name in Figures.__dataclass_fields__})

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        values = asdict(self) | {"config": self.config, "ratio_weights": self.ratio_weights}
        del values["cached"]
        return values


def _parse_trial(values: Any) -> Trial:
    """Return a trial from its JSON; raises ValueError, TypeError or KeyError where it is none."""
    return replace(
        parse_record(Trial, {k: v for k, v in values.items() if k != "ratio_weights"}), cached=True
    )


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Return 32 hexadecimal digits over every tensor of a checkpoint and its learning rates.

    Notes
    -----
    Reads the whole checkpoint: optimizer state decides how coarse a step is.
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


def trial_key(checkpoint: str, history: str, config: str, evaluator: str) -> str:
    """Return the key of a trial: checkpoint, everything its chain was made of before, config, evaluator."""
    return hashlib.sha256("\0".join((checkpoint, history, config, evaluator)).encode()).hexdigest()[:32]


class TrialLog:
    """Trials by key, in memory and, with a path, in a file that every new trial is added to at once.

    One JSON object a line. The first line says what the log is of; every other is a trial and its key.

    Parameters
    ----------
    path
        The file; None keeps trials in memory alone.
    run
        What tells the run from others: the digest of its first checkpoint.

    Raises
    ------
    InputError
        The file is no trial log, or one of another run.
    DamagedError
        It is of another version.
    StorageError
        It cannot be read.
    """

    def __init__(self, path: Path | None, run: str) -> None:
        self.path, self._run = path, run
        self._trials: dict[str, Trial] = {}
        self._lock = Lock()
        self._is_begun = path is not None and self._load(path)

    def __len__(self) -> int:
        return len(self._trials)

    def values(self) -> tuple[Trial, ...]:
        """Return every trial, in the order they were added."""
        return tuple(self._trials.values())

    def get(self, key: str) -> Trial | None:
        """Return the trial of a key; None where there is none."""
        return self._trials.get(key)

    def add(self, key: str, trial: Trial) -> None:
        """Keep a trial: on disk when this returns.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        with self._lock:
            self._trials[key] = trial
            if self.path is not None:
                if not self._is_begun:
                    add_line(self.path, {_HEAD: _VERSION, "run": self._run})
                    self._is_begun = True
                add_line(self.path, {"key": key, **trial.to_json()})

    def _load(self, path: Path) -> bool:
        """Read the trials; return whether the file has a first line."""
        try:
            head, *rows = read_lines(path, _MAX_NBYTES) or [{}]
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise self._refusal("it is too large") from error
            raise StorageError(f"the trial log cannot be read: {error.strerror}", where=str(path)) from error
        if not path.stat().st_size:
            return False
        if _HEAD not in head or "run" not in head:
            raise self._refusal("its first line does not say so")
        if head[_HEAD] != _VERSION:
            raise DamagedError(
                "the trial log is of another version",
                where=str(path),
                expected=str(_VERSION),
                found=str(head[_HEAD]),
            )
        if head["run"] != self._run:
            raise InputError(
                "this is the trial log of another run",
                where=str(path),
                remedy="write to another file with -o, or remove the log",
            )
        for row in rows:
            try:
                key = str(row.pop("key"))
                self._trials[key] = _parse_trial(row)
            except (LookupError, TypeError, ValueError) as error:
                _logger.warning("%s has a line that is no trial (%s): it is measured again", path, error)
        return True

    def _refusal(self, why: str) -> InputError:
        return InputError(
            f"this file is no trial log: {why}",
            where=str(self.path),
            remedy="write to another file with -o",
        )


class TriedFrame(NamedTuple):
    """What is remembered of a frame that was tried: its index, and SHA-256 of what it decodes to.

    The states of all would fill a memory.
    """

    frame_index: FrameIndex
    digests: Mapping[str, bytes]


OnTrial = Callable[[Trial], None]
"""Called after each trial, from the thread that measured it; raising from it cancels the search."""


@dataclass(kw_only=True)
class TrialRunner:
    """Measures configurations at steps of a run, each once.

    Parameters
    ----------
    checkpoints
        The originals, by step.
    steps
        Steps of the chain, ascending.
    base
        How frames are made, but for what a candidate sets.
    judge
        The evaluator.
    log
        Trials there are already, and where new ones go; None to keep none, and to predict no damage.
    sized
        Measure what frames take, and do not ask twice about the same restored state. Where nearly every
        candidate is written, neither is worth its time.
    with_gain
        Measure restore gain and noise too, which costs an encoding a trial.
    on_trial
        Called after each trial.
    foreseen
        What the chain's first frame is planned with (`inshrink_core.chain.FrameEncoder.look_ahead`).

    Attributes
    ----------
    measured
        Trials that others have measured for this one, by key: as good as its own.
    """

    checkpoints: Callable[[int], Checkpoint]
    steps: tuple[int, ...]
    base: ChainConfig
    judge: Judge
    log: TrialLog | None
    sized: bool = True
    with_gain: bool = False
    on_trial: OnTrial | None = None
    foreseen: Any = None
    measured: dict[str, Trial] = field(default_factory=dict)
    _digests: dict[int, str] = field(default_factory=dict)
    _h: dict[int, Mapping[str, float]] = field(default_factory=dict)
    _figures: dict[tuple[int, tuple[bytes, ...]], Figures] = field(default_factory=dict)

    @property
    def foreseen_digest(self) -> str:
        """Digest of what was foreseen: the same steps are other frames where they are planned otherwise."""
        if self.foreseen is None:
            return ""
        return hashlib.sha256(pack_value(self.foreseen)).hexdigest()[:16]

    def before(self, step: int) -> int | None:
        """Return the step before in the chain; None for the first."""
        at = self.steps.index(step)
        return self.steps[at - 1] if at else None

    def digest(self, step: int) -> str:
        """Return the digest of a step's original."""
        if step not in self._digests:
            self._digests[step] = checkpoint_digest(self.checkpoints(step))
        return self._digests[step]

    def h(self, step: int) -> Mapping[str, float]:
        """Return the sensitivity of every weight at a step."""
        if step not in self._h:
            before = self.before(step)
            previous = None if before is None else self.checkpoints(before)
            self._h[step] = sensitivities(self.checkpoints(step), previous)
        return self._h[step]

    def document(self, candidate: Candidate) -> dict[str, Any]:
        """Return what a config file would say, what all candidates have in common included."""
        settings, defaults = self.base.config.settings(), type(self.base.config)().settings()
        common = {name: value for name, value in settings.items() if value != defaults.get(name)}
        document = candidate.document()
        overrides = [*(one.to_json() for one in self.base.overrides), *document.get("override", ())]
        document["settings"] = common | document["settings"]
        return document | ({"override": overrides} if overrides else {})

    def config_digest(self, candidate: Candidate) -> str:
        """Return the digest of everything that decides how a frame is made."""
        chain = candidate.chain_config(self.base)
        record: dict[str, Any] = chain.record() | {"keyframe_every": chain.keyframe_every}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]

    def trial(self, step: int, candidate: Candidate, position: Position) -> Trial:
        """Return what a candidate does at a step of a chain, from the log or measured now."""
        key = "" if self.log is None else self.key(step, candidate, position)
        known = self.known(key)
        if known is not None:
            return replace(known, config=self.document(candidate))
        trial = self.measured.pop(key, None) or self._measure(step, candidate, position)
        if self.log is not None:
            self.log.add(key, trial)
        if self.on_trial is not None:
            self.on_trial(trial)
        return trial

    def key(self, step: int, candidate: Candidate, position: Position) -> str:
        """Return the key of a trial (`trial_key`), without measuring anything."""
        config = self.config_digest(candidate)
        return trial_key(self.digest(step), position.history, config, self.judge.digest)

    def known(self, key: str) -> Trial | None:
        """Return a trial of the log that answers what is asked now; None where there is none."""
        known = None if self.log is None else self.log.get(key)
        return replace(known, cached=True) if known is not None and self._still_holds(known) else None

    def _still_holds(self, known: Trial) -> bool:
        """Whether a trial of the log answers what is asked now: one given up does only under its bounds."""
        partial = known.partial
        if partial is None:  # a log may be older than a figure
            return (
                known.failure != "" or not self.judge.asked.max_restore_cost or known.restore_cost is not None
            )
        bounds = self.judge.bounds(self.steps[0])
        return bounds.is_broken_by(partial.least_drop, partial.least_divergence)

    def _measure(self, step: int, candidate: Candidate, position: Position) -> Trial:
        begun = time.perf_counter()
        encoded = position.encode(step, candidate)
        restored = encoded.restored()
        figures = tried_as = None
        raw_weights, weights_nbytes = encoded.raw_weights, 0
        shards = position.state()[0].shards
        if self.sized:
            weights_nbytes = encoded.weights_nbytes
            if shards is not None:
                rows = shards.gathered((raw_weights, weights_nbytes))
                raw_weights, weights_nbytes = map(sum, zip(*rows, strict=True))
            tried = position.tried[candidate.digest] = TriedFrame(encoded.index, model_digests(restored))
            tried_as = step, tuple(tried.digests.values())
            # What a rank has tried before, another one has not.
            figures = self._figures.get(tried_as) if shards is None else None
        if figures is None:
            figures = self.judge.figures(step, restored, until_broken=True)
        if tried_as is not None:
            self._figures[tried_as] = figures
        gain: tuple[float | None, float | None] = None, None
        before = self.before(step) if self.with_gain and figures.partial is None else None
        if before is not None:
            state, _ = position.state()
            chain = candidate.chain_config(self.base)
            found = step_gain(chain, self.checkpoints(before), self.checkpoints(step), state)
            gain = found.gain, found.noise
        return Trial(
            step=step,
            config=self.document(candidate),
            raw_weights=raw_weights,
            weights_nbytes=weights_nbytes,
            restore_gain=gain[0],
            restore_noise=gain[1],
            damage=None if self.log is None else damage_of(encoded.squared_errors, self.h(step)),
            seconds=time.perf_counter() - begun,
            **{name: getattr(figures, name) for name in Figures.__dataclass_fields__},
        )

    def walk(self, candidate: Candidate, keep_on: Callable[[Trial], bool]) -> list[Trial]:
        """Write a chain in memory with one configuration; a trial a step, until `keep_on` says no."""
        position, trials = Position(self), []
        for step in self.steps:
            trials.append(self.trial(step, candidate, position))
            if not keep_on(trials[-1]):
                break
            position = position.after(step, candidate)
        return trials

    def unknown(self, candidate: Candidate, *, to_the_end: bool) -> list[int]:
        """Return the steps that `walk` would measure, up to a known one that breaks the bounds."""
        position, steps = Position(self), []
        for step in self.steps:
            key = self.key(step, candidate, position)
            known = self.measured.get(key) or self.known(key)
            if known is None:
                steps.append(step)
            elif self._ends(known, to_the_end):
                break
            position = position.after(step, candidate)
        return steps

    def some(self, candidate: Candidate, steps: Collection[int], *, to_the_end: bool) -> dict[str, Trial]:
        """Return what `walk` would measure at some of its steps, by key, for the `measured` of another."""
        position, found = Position(self), {}
        for step in self.steps[: self.steps.index(max(steps)) + 1]:
            if step in steps:
                key = self.key(step, candidate, position)
                found[key] = replace(self.trial(step, candidate, position), cached=False)
                if self._ends(found[key], to_the_end):
                    break
            position = position.after(step, candidate)
        return found

    def _ends(self, trial: Trial, to_the_end: bool) -> bool:
        return not (to_the_end or self.judge.bounds(self.steps[0]).judge(trial.figures).kept)


class Position:
    """A place in a chain: what the next step is encoded against, made only when it is needed.

    Parameters
    ----------
    runner
        The run and how frames are made.
    state, index
        What the next step is encoded against in a chain on disk, and the index it inherits from; None for a
        chain in memory.

    Attributes
    ----------
    history
        Digest of all that the chain was made of before.
    tried
        What is remembered of the next step's trials, by the candidate's digest.
    """

    def __init__(
        self, runner: TrialRunner, state: ChainState | None = None, index: FrameIndex | None = None
    ) -> None:
        self._runner = runner
        self._fixed = None if state is None else (state, index)
        self._led_here: tuple[Position, int, Candidate] | None = None
        self._encoded: EncodedStep | None = None
        self._newest: tuple[int, str, EncodedStep] | None = None
        self._depth = 0
        self.history = runner.foreseen_digest
        self.tried: dict[str, TriedFrame] = {}
        self._best: tuple[float, str, PreparedFrame] | None = None

    def after(self, step: int, candidate: Candidate) -> Position:
        """Return the place after a step that was written with a candidate."""
        position, runner = Position(self._runner), self._runner
        position._led_here = (self, step, candidate)
        position._depth = self._depth + 1
        position.history = trial_key(runner.digest(step), self.history, runner.config_digest(candidate), "")
        return position

    def state(self) -> tuple[ChainState, FrameIndex | None]:
        """Return what a step is encoded against, and the index before it; nothing where a keyframe is due."""
        due = self._depth % self._runner.base.keyframe_every == 0
        return self._fixed or following(self._last(), keyframe=due, foreseen=self._runner.foreseen)

    def encode(self, step: int, candidate: Candidate) -> EncodedStep:
        """Encode the next step; the last one encoded is remembered, for it may be the one to go on from."""
        digest = candidate.digest
        if self._newest is not None and self._newest[:2] == (step, digest):
            return self._newest[2]
        checkpoint = self._runner.checkpoints(step)
        chain = candidate.chain_config(self._runner.base)
        encoded = encode_step(chain, checkpoint, *self.state())
        self._newest = (step, digest, encoded)
        return encoded

    def keep(self, candidate: Candidate, ratio: float) -> None:
        """Hold the frame of the candidate that was tried last while none has a larger ratio, and no other."""
        newest, self._newest = self._newest, None
        if newest is None or newest[1] != candidate.digest or (self._best and self._best[0] >= ratio):
            return
        encoded, chain = newest[2], candidate.chain_config(self._runner.base)
        state, _ = self.state()
        frame = PreparedFrame(chain, encoded.checkpoint, state, encoded.plan, encoded.results)
        self._best = (ratio, candidate.digest, frame)

    def frame_of(self, candidate: Candidate) -> PreparedFrame | None:
        """Return the frame of a candidate, if it is held."""
        return self._best[2] if self._best and self._best[1] == candidate.digest else None

    def _last(self) -> EncodedStep | None:
        """Return the step that led here, encoded now if only its trial was known; None at the start."""
        if self._led_here is not None:
            parent, step, candidate = self._led_here
            self._encoded = parent.encode(step, candidate)
            self._led_here = None  # the states before are of no more use
        return self._encoded
