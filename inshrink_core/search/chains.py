"""One configuration for a whole run: a point is measured by writing the chain with it, in memory.

A point is given up at the first step that breaks the bounds, so a hopeless one costs few evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.execution import ordered_map
from inshrink_core.search.allocation import Allocation, allocate
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.measure import encode_chain, following
from inshrink_core.search.sampling import sample_keys, scaled_nbytes
from inshrink_core.search.space import Candidate, Cube, LatticeLine
from inshrink_core.search.strategies import Outcome
from inshrink_core.search.trials import Trial
from inshrink_core.search.walk import TrialRunner

__all__ = ["Chain", "ChainBench"]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A run written with one configuration.

    Parameters
    ----------
    candidate
        The configuration.
    trials
        A trial a step; fewer where it was given up.
    whole
        Whether every step is there.
    """

    candidate: Candidate
    trials: tuple[Trial, ...]
    whole: bool

    @property
    def ratio_weights(self) -> float:
        """Raw bytes of the weights over the bytes that hold them, all frames together."""
        nbytes = sum(trial.weights_nbytes for trial in self.trials)
        return sum(trial.raw_weights for trial in self.trials) / nbytes if nbytes else 0.0

    @property
    def drop(self) -> float | None:
        """Drop of the worst step; None where no step has one."""
        return max((trial.drop for trial in self.trials if trial.drop is not None), default=None)

    @property
    def divergence(self) -> float | None:
        """Divergence of the worst step; None where no step has one."""
        found = [trial.divergence for trial in self.trials if trial.divergence is not None]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``best`` in ``inshrink search --json``."""
        return {
            "config": self.candidate.document(),
            "ratio_weights": self.ratio_weights,
            "drop": self.drop,
            "divergence": self.divergence,
            "restore_gain": _mean([trial.restore_gain for trial in self.trials]),
            "restore_noise": _mean([trial.restore_noise for trial in self.trials]),
        }


@dataclass(kw_only=True)
class ChainBench:
    """Measures points of a space by whole chains.

    Parameters
    ----------
    runner
        The run, the evaluator and the log.
    bounds
        What is promised of every step.
    """

    runner: TrialRunner
    bounds: Bounds
    chains: dict[str, Chain] = field(default_factory=dict)
    _ratios: dict[str, float] = field(default_factory=dict)

    def outcomes(self, space: Cube | LatticeLine) -> Callable[[Sequence[Any]], list[Outcome[Any]]]:
        """Return what `explore` measures points of a space with; side by side where there are replicas."""

        def measure(points: Sequence[Any]) -> list[Outcome[Any]]:
            candidates = [space.candidate(point) for point in points]
            chains = ordered_map(self.chain, candidates, threads=self.runner.judge.replicas)
            return [self._outcome(point, chain) for point, chain in zip(points, chains, strict=True)]

        return measure

    def chain(self, candidate: Candidate, *, to_the_end: bool = False) -> Chain:
        """Return a chain with one configuration, given up at the first step that breaks the bounds."""
        known = self.chains.get(candidate.digest)
        if known is not None and (known.whole or not to_the_end):
            return known
        trials = self.runner.walk(
            candidate, lambda trial: to_the_end or self.bounds.judge(trial.figures).kept
        )
        chain = Chain(candidate=candidate, trials=tuple(trials), whole=len(trials) == len(self.runner.steps))
        self.chains[candidate.digest] = chain
        return chain

    def keeps(self, chain: Chain) -> bool:
        """Whether every step is there, and keeps the bounds."""
        return chain.whole and all(self.bounds.judge(trial.figures).kept for trial in chain.trials)

    def _outcome(self, point: Any, chain: Chain) -> Outcome[Any]:
        usage = max((self.bounds.judge(trial.figures).usage for trial in chain.trials), default=0.0)
        return Outcome(point, self.keeps(chain), chain.ratio_weights, usage)

    def ratio(self, candidate: Candidate) -> float:
        """Estimate a chain's ratio from a sample of tensors at a few steps, without the evaluator."""
        if candidate.digest not in self._ratios:
            self._ratios[candidate.digest] = estimate_ratio(self.runner, candidate, _FEW_STEPS)
        return self._ratios[candidate.digest]

    def whole_ratio(self, candidate: Candidate) -> float:
        """Return a chain's ratio, encoded at every step but not evaluated."""
        checkpoints = map(self.runner.checkpoints, self.runner.steps)
        raw = nbytes = 0
        for encoded in encode_chain(candidate.chain_config(self.runner.base), checkpoints):
            raw, nbytes = raw + encoded.raw_weights, nbytes + encoded.weights_nbytes
        return raw / nbytes if nbytes else 0.0

    def allocation(self, line: LatticeLine, coarseness: float) -> Allocation:
        """Return factors of the layer types, from a delta in the middle of the run."""
        runner = self.runner
        middle = len(runner.steps) // 2
        if middle == 0:
            return Allocation(factors={}, predicted_gain=1.0)
        lead = map(runner.checkpoints, runner.steps[max(0, middle - _LEAD) : middle])
        chain = line.candidate(coarseness).chain_config(runner.base)
        step = runner.steps[middle]
        checkpoint = runner.checkpoints(step)
        keys = sample_keys(checkpoint)
        *_, before = encode_chain(chain, lead, keys)
        standing, index = following(before, keyframe=False)
        return allocate(runner.base, line, coarseness, checkpoint, standing, runner.h(step), index, keys)


_FEW_STEPS: Final = 3
"""Steps of an estimate that orders trials: a keyframe and two deltas."""

_LEAD: Final = 4
"""Steps encoded before the one whose rates are measured, so that it is coded in the context of others."""


def estimate_ratio(runner: TrialRunner, candidate: Candidate, n_steps: int) -> float:
    """Estimate the ratio of a chain from a sample of its tensors at some of its steps.

    Parameters
    ----------
    runner
        The run, and how frames are made.
    candidate
        The configuration.
    n_steps
        Consecutive steps to encode, from the middle of the run; all where there are no more.

    Notes
    -----
    One keyframe and mean deltas, put together in the proportion that the whole chain has them.
    """
    steps = runner.steps
    first = max(0, (len(steps) - n_steps) // 2)
    checkpoints = [runner.checkpoints(step) for step in steps[first : first + n_steps]]
    chain = candidate.chain_config(runner.base)
    encoded = encode_chain(chain, checkpoints, sample_keys(checkpoints[0]))
    sizes = [scaled_nbytes(one, checkpoint) for one, checkpoint in zip(encoded, checkpoints, strict=True)]
    raw = sum(checkpoint.raw_bytes(MODEL_ROLES) for checkpoint in checkpoints) / len(checkpoints)
    n_keyframes = math.ceil(len(steps) / runner.base.keyframe_every)
    deltas = sizes[1:] or sizes
    total = n_keyframes * sizes[0] + (len(steps) - n_keyframes) * math.fsum(deltas) / len(deltas)
    return len(steps) * raw / total if total else 0.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
