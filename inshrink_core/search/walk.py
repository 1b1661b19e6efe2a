"""Trials in closed loop: each step is encoded against what the chain so far decodes to."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, Standing, step_gain
from inshrink_core.checkpoint import Checkpoint
from inshrink_core.search.bounds import Figures
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import EncodedStep, encode_step, following
from inshrink_core.search.quadratic import damage_of, sensitivities
from inshrink_core.search.space import Candidate
from inshrink_core.search.trials import Trial, TrialLog, checkpoint_digest, trial_key

__all__ = ["OnTrial", "Position", "TrialRunner"]

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
        Trials there are already, and where new ones go.
    with_gain
        Measure restore gain and noise too, which costs an encoding a trial.
    told
        Called after each trial.
    """

    checkpoints: Callable[[int], Checkpoint]
    steps: tuple[int, ...]
    base: ChainConfig
    judge: Judge
    log: TrialLog
    with_gain: bool = False
    told: OnTrial | None = None
    _digests: dict[int, str] = field(default_factory=dict)
    _h: dict[int, Mapping[str, float]] = field(default_factory=dict)

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

    def trial(self, step: int, candidate: Candidate, position: Position) -> Trial:
        """Return what a candidate does at a step of a chain, from the log or measured now."""
        key = trial_key(self.digest(step), position.history, self.config_digest(candidate), self.judge.digest)
        known = self.log.get(key)
        if known is not None and self._still_holds(known):
            return known
        trial = self._measure(step, candidate, position)
        self.log.add(key, trial)
        if self.told is not None:
            self.told(trial)
        return trial

    def _still_holds(self, known: Trial) -> bool:
        """Whether a trial of the log answers what is asked now: one given up does only under its bounds."""
        partial = known.partial
        if partial is None:
            return True
        bounds = self.judge.bounds(self.steps[0])
        return bounds.is_broken_by(partial.least_drop, partial.least_divergence)

    def _measure(self, step: int, candidate: Candidate, position: Position) -> Trial:
        begun = time.perf_counter()
        chain = candidate.chain_config(self.base)
        encoded = position.encode(step, candidate)
        figures = self.judge.figures(step, encoded.restored(), until_broken=True)
        gain = None
        before = self.before(step)
        if self.with_gain and before is not None and figures.partial is None:
            standing, _ = position.standing()
            found = step_gain(chain, self.checkpoints(before), self.checkpoints(step), standing)
            gain = found.gain, found.noise
        return trial_of(
            encoded, candidate, figures, damage_of(encoded.squared_errors, self.h(step)), begun, gain
        )

    def config_digest(self, candidate: Candidate) -> str:
        """Return the digest of everything that decides how a frame is made."""
        chain = candidate.chain_config(self.base)
        record: dict[str, Any] = chain.record() | {"keyframe_every": chain.keyframe_every}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]

    def walk(
        self, candidate: Candidate, keep_on: Callable[[Trial], bool], steps: Sequence[int] | None = None
    ) -> list[Trial]:
        """Write a chain in memory with one configuration; a trial a step, until `keep_on` says no."""
        position, trials = Position(self), []
        for step in self.steps if steps is None else steps:
            trials.append(self.trial(step, candidate, position))
            if not keep_on(trials[-1]):
                break
            position = position.after(step, candidate)
        return trials


def trial_of(
    encoded: EncodedStep,
    candidate: Candidate,
    figures: Figures,
    damage: float | None,
    begun: float,
    gain: tuple[float | None, float | None] | None = None,
) -> Trial:
    """Put a trial together; `begun` is when it started, by `time.perf_counter`."""
    return Trial(
        step=encoded.checkpoint.step,
        config=candidate.document(),
        raw_weights=encoded.raw_weights,
        weights_nbytes=encoded.weights_nbytes,
        drop=figures.drop,
        divergence=figures.divergence,
        drop_error=figures.drop_error,
        restore_gain=None if gain is None else gain[0],
        restore_noise=None if gain is None else gain[1],
        damage=damage,
        seconds=time.perf_counter() - begun,
        failure=figures.failure,
        partial=figures.partial,
    )


class Position:
    """A place in a chain in memory: what the next step is encoded against, made only when needed.

    Parameters
    ----------
    runner
        The run and how frames are made.
    """

    def __init__(self, runner: TrialRunner) -> None:
        self._runner = runner
        self._made: tuple[Position, int, Candidate] | None = None
        self._encoded: EncodedStep | None = None
        self._tried: tuple[int, str, EncodedStep] | None = None
        self._depth = 0
        self.history = ""

    def after(self, step: int, candidate: Candidate) -> Position:
        """Return the place after a step that was written with a candidate."""
        position = Position(self._runner)
        position._made = (self, step, candidate)
        position._depth = self._depth + 1
        position.history = trial_key(
            self._runner.digest(step), self.history, self._runner.config_digest(candidate), ""
        )
        return position

    def standing(self) -> tuple[Standing, FrameIndex | None]:
        """Return what a step is encoded against, and the index before it; nothing where a keyframe is due."""
        due = self._depth % self._runner.base.keyframe_every == 0
        return following(self._last(), keyframe=due)

    def encode(self, step: int, candidate: Candidate) -> EncodedStep:
        """Encode the next step; the last one encoded is remembered, for it may be the one to go on from."""
        digest = candidate.digest
        if self._tried is not None and self._tried[:2] == (step, digest):
            return self._tried[2]
        checkpoint = self._runner.checkpoints(step)
        chain = candidate.chain_config(self._runner.base)
        encoded = encode_step(chain, checkpoint, *self.standing())
        self._tried = (step, digest, encoded)
        return encoded

    def _last(self) -> EncodedStep | None:
        """Return the step that led here, encoded now if only its trial was known; None at the start."""
        if self._made is not None:
            parent, step, candidate = self._made
            self._encoded = parent.encode(step, candidate)
            self._made = None  # the states before are of no more use
        return self._encoded
