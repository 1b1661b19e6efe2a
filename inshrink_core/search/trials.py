"""Trials: one configuration at one step of a chain, encoded in memory, evaluated, and logged.

Each step is encoded relative to what the chain decodes to so far, so that a trial measures what the archive
would hold. A trial that is in the log is neither encoded nor evaluated again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from inshrink_core.archive.document import pack_value
from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, ChainState, PreparedFrame, step_gain, tensor_digest
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.errors import InputError, StorageError
from inshrink_core.execution.kept import add_line, parse_record, read_lines
from inshrink_core.search.bounds import Figures
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import EncodedStep, encode_step, following
from inshrink_core.search.quadratic import damage_of, sensitivities
from inshrink_core.search.space import Candidate

_HEAD: Final = "inshrink_trials"
_VERSION: Final = 1

# A line takes half a kilobyte: half a million of them are another file by mistake.
_MAX_NBYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Figures):
    """One configuration at one step, in a chain that led there.

    Parameters
    ----------
    step
        Training step.
    config
        The configuration, as in a config file.
    raw_weights, weights_nbytes
        Raw bytes of weights and buffers, and the bytes that hold them; 0 where they were not asked for.
    restore_gain, restore_noise
        Had training been restored at the step before; None where not measured.
    damage
        ½ Σ h·e², what the quadratic model predicts from, uncalibrated; None where h is not known.
    seconds
        Time of encoding and evaluating.
    cached
        Whether it comes from the log.
    """

    step: int
    config: Mapping[str, Any]
    raw_weights: int
    weights_nbytes: int
    restore_gain: float | None = None
    restore_noise: float | None = None
    damage: float | None = None
    seconds: float = 0.0
    cached: bool = field(default=False, compare=False)

    @property
    def ratio_weights(self) -> float:
        """Raw bytes of the weights over the bytes that hold them."""
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

    One JSON object a line: the run in the first, a trial and its key in each of the others.

    Parameters
    ----------
    path
        The file; None keeps trials in memory alone.
    run
        What distinguishes the run: the digest of its first checkpoint.

    Raises
    ------
    InputError
        The file is no trial log, or one of another run.
    StorageError
        It cannot be read.
    """

    def __init__(self, path: Path | None, run: str) -> None:
        self.path, self._head = path, {_HEAD: _VERSION, "run": run}
        self._trials: dict[str, Trial] = {}
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
        self._trials[key] = trial
        if self.path is not None:
            if not self._is_begun:
                add_line(self.path, self._head)
                self._is_begun = True
            add_line(self.path, {"key": key, **trial.to_json()})

    def _load(self, path: Path) -> bool:
        """Read the trials; return whether the file has a first line."""
        try:
            rows = read_lines(path, _MAX_NBYTES, _parse_line)
            is_empty = not path.stat().st_size
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StorageError(f"the trial log cannot be read: {error.strerror}", where=str(path)) from error
        if is_empty:
            return False
        head = rows[0] if rows and isinstance(rows[0], dict) else {}
        if head != self._head:
            raise InputError(
                "this is the trial log of another run"
                if head.get(_HEAD) == _VERSION
                else "this file is no trial log of this version",
                where=str(path),
                remedy="write to another file with -o, or remove the log",
            )
        self._trials |= {row[0]: row[1] for row in rows if isinstance(row, tuple)}
        return True


def _parse_line(row: dict[str, Any]) -> dict[str, Any] | tuple[str, Trial]:
    if _HEAD in row:
        return row
    values = {name: value for name, value in row.items() if name not in ("key", "ratio_weights")}
    return str(row["key"]), replace(parse_record(Trial, values), cached=True)


class TriedFrame(NamedTuple):
    """What is remembered of a frame that was tried: its index, and SHA-256 of what it decodes to.

    The states of all would fill a memory.
    """

    frame_index: FrameIndex
    digests: Mapping[str, bytes]


OnTrial = Callable[[Trial], None]
"""Called after each trial; raising from it cancels the search."""


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
        Trials that workers have measured for this runner, by key.
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
        overrides = [one.to_json() for one in self.base.overrides]
        document: dict[str, Any] = {"codec": candidate.codec, "settings": {**common, **candidate.settings}}
        return document | ({"override": overrides} if overrides else {})

    def config_digest(self, candidate: Candidate) -> str:
        """Return the digest of everything that decides how a frame is made."""
        chain = candidate.chain_config(self.base)
        record: dict[str, Any] = chain.record() | {"keyframe_every": chain.keyframe_every}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]

    def trial(self, step: int, candidate: Candidate, position: Position) -> Trial:
        """Return the trial of a candidate at a step of a chain, from the log or measured now."""
        key = "" if self.log is None else self.key(step, candidate, position)
        known = None if self.log is None else self.log.get(key)
        if known is not None:
            return replace(known, config=self.document(candidate), cached=True)
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
            figures = self.judge.figures(step, restored)
        if tried_as is not None:
            self._figures[tried_as] = figures
        gain: tuple[float | None, float | None] = None, None
        before = self.before(step) if self.with_gain else None
        if before is not None:
            state, _ = position.state()
            chain = candidate.chain_config(self.base)
            found = step_gain(chain, self.checkpoints(before), self.checkpoints(step), state)
            gain = found.gain, found.noise
        return Trial(
            **asdict(figures),
            step=step,
            config=self.document(candidate),
            raw_weights=raw_weights,
            weights_nbytes=weights_nbytes,
            restore_gain=gain[0],
            restore_noise=gain[1],
            damage=None if self.log is None else damage_of(encoded.squared_errors, self.h(step)),
            seconds=time.perf_counter() - begun,
        )

    def walk(
        self, candidate: Candidate, keep_on: Callable[[Trial], bool], only: Collection[int] | None = None
    ) -> list[Trial]:
        """Write a chain in memory with one configuration; a trial a step, until `keep_on` is false.

        With `only`, trials are of these steps alone, and what leads there is encoded.
        """
        position, trials = Position(self), []
        for step in self.steps if only is None else self.steps[: self.steps.index(max(only)) + 1]:
            if only is None or step in only:
                trials.append(self.trial(step, candidate, position))
                if not keep_on(trials[-1]):
                    break
            position = position.after(step, candidate)
        return trials

    def unknown(self, candidate: Candidate, keep_on: Callable[[Trial], bool]) -> dict[int, str]:
        """Return the steps that `walk` would measure, and the keys of their trials."""
        position, found = Position(self), {}
        for step in self.steps:
            key = self.key(step, candidate, position)
            known = self.measured.get(key) or (None if self.log is None else self.log.get(key))
            if known is None:
                found[step] = key
            elif not keep_on(known):
                break
            position = position.after(step, candidate)
        return found

    def until_broken(self, to_the_end: bool) -> Callable[[Trial], bool]:
        """Return whether a walk goes on after a trial: to the end, or until a bound is broken."""
        bounds = self.judge.bounds(self.steps[0])
        return lambda trial: to_the_end or bounds.judge(trial).kept


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
