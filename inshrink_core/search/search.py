"""Searching one configuration for a whole run: chains as trials, and the log of them.

A configuration is measured by writing the chain with it, in memory. It is given up at the first step that
breaks a bound, so a hopeless one costs few evaluations.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.errors import NotFoundError
from inshrink_core.execution import open_regular, ordered_map, results_folder
from inshrink_core.execution.progress import Progress
from inshrink_core.formats import Run, unreadable_error
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.measure import (
    EncodedStep,
    encode_chain,
    encode_step,
    estimate_rest,
    following,
    in_proportion,
    middle_of,
    sample_keys,
    scaled_nbytes,
)
from inshrink_core.search.quadratic import allocate
from inshrink_core.search.space import Candidate, Cube, CubePoint, Line, Space
from inshrink_core.search.strategies import Bracket, Outcome, Walk, explore
from inshrink_core.search.trials import Trial, TrialLog, TrialRunner, checkpoint_digest

if TYPE_CHECKING:
    from inshrink_core.codec import AnyCodec


_LOG_NAME: Final = "search.jsonl"

# Most spacings of the lattice that one bracketed search tries.
_BRACKET_CHAINS: Final = 8

# Most points of a cube that are measured for a target ratio: what estimates, which are within five percent of
# the real ratios, call equally small.
_FRONTIER: Final = 12
_SLACK: Final = 1.05

# Steps of an estimate that orders trials: a keyframe and two deltas.
_FEW_STEPS: Final = 3

# Steps encoded before the one whose rates are measured, so that it is coded in the context of others.
_LEAD: Final = 4

_logger = logging.getLogger(__name__)


def trial_log_of(run: Run, output: Path | None, *, make: bool = True) -> Path | None:
    """Return where the trials of a search are kept: beside its output, else with the run's results.

    Parameters
    ----------
    run, output
        What is searched, and where the result goes.
    make
        Make sure that it can be written; None where that is not so.
    """
    if output is not None:
        return output.with_suffix(".trials.jsonl")
    folder = results_folder(run.directory, make=make)
    if folder is None or not make:
        return None if folder is None else folder / _LOG_NAME
    path = folder / _LOG_NAME
    try:
        os.close(open_regular(path, os.O_WRONLY | os.O_CREAT, follow=False))
    except OSError as error:
        _logger.info("trials are not kept: %s", error)
        return None
    return path


def known_trials(run: Run, log: Path | None = None) -> tuple[Trial, ...]:
    """Return the trials at hand, without making a log where there is none.

    Parameters
    ----------
    run
        What was searched.
    log
        The log of a search (`SearchReport.log`); by default the one among the run's results.

    Raises
    ------
    NotFoundError
        A log that was named is not there.
    InputError
        It is one of another run.
    """
    if log is not None and not log.is_file():
        raise NotFoundError("there is no such trial log", where=str(log))
    found = log if log is not None else trial_log_of(run, None, make=False)
    if found is None or not found.is_file() or not found.stat().st_size:
        return ()
    return TrialLog(found, checkpoint_digest(run.attributed()[run.steps[0]])).values()


def choose_steps(run: Run, steps: Iterable[int] | None) -> tuple[int, ...]:
    """Return the steps of the chain, ascending; every one must exist.

    Raises
    ------
    NotFoundError
        One does not, or there is none.
    """
    chosen = run.steps if steps is None else tuple(sorted(set(steps)))
    missing = [step for step in chosen if step not in run.steps]
    if error := unreadable_error(run.unreadable, run.address, missing):
        raise error
    if missing or not chosen:
        raise NotFoundError(
            f"the run has no step {missing[0]}" if missing else "there is no step to search on",
            where=run.address,
            remedy=f"it has {run.steps[0]} to {run.steps[-1]}; `inshrink inspect` lists them",
        )
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress(Progress):
    """How far a search has come, after a trial: trials measured, those of the log not counted, of at most.

    Parameters
    ----------
    trial
        What was measured last.
    best_ratio
        Ratio of the best chain that keeps the bounds so far; None for none.
    seconds
        Since the search began.
    """

    trial: Trial
    best_ratio: float | None
    seconds: float = 0.0


OnSearch = Callable[[SearchProgress], None]
"""Called after each trial; raising from it cancels the search, and the log keeps what was measured."""


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
        return max(self._known("drop"), default=None)

    @property
    def divergence(self) -> float | None:
        """Divergence of the worst step; None where no step has one."""
        return max(self._known("divergence"), default=None)

    def _known(self, name: str) -> list[float]:
        values = [getattr(trial, name) for trial in self.trials]
        return [value for value in values if value is not None]

    def _mean(self, name: str) -> float | None:
        known = self._known(name)
        return math.fsum(known) / len(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``best`` in ``inshrink search --json``."""
        return {
            "config": self.trials[0].config,
            "ratio_weights": self.ratio_weights,
            "drop": self.drop,
            "divergence": self.divergence,
            "restore_cost": max(self._known("restore_cost"), default=None),
            "restore_gain": self._mean("restore_gain"),
            "restore_noise": self._mean("restore_noise"),
        }


Ahead = Callable[[Sequence[Candidate], bool], None]
"""Has candidates measured where their trials are not known: to the end, or until a bound is broken."""


def _by_nobody(candidates: Sequence[Candidate], to_the_end: bool) -> None:
    """Leave all of it to the runner."""


@dataclass(kw_only=True)
class ChainTrials:
    """Measures points of a space by whole chains.

    Parameters
    ----------
    runner
        The run, the evaluator and the log.
    bounds
        What is promised of every step.
    progress
        Called after each trial.
    ahead
        Called before candidates are measured, and whether to the end: gives `runner` trials that others
        measure, so that what is left for it costs nothing.

    Attributes
    ----------
    known
        Chains measured so far, by the configuration's digest.
    evaluations
        Trials measured, those of the log not counted.
    most
        Chains that are measured at most.
    after
        Trials that follow these chains at most.
    """

    runner: TrialRunner
    bounds: Bounds
    progress: OnSearch | None = None
    ahead: Ahead = _by_nobody
    known: dict[str, Chain] = field(default_factory=dict)
    evaluations: int = 0
    most: int = 1
    after: int = 0
    _begun: float = field(default_factory=time.perf_counter)
    _ratios: dict[str, float] = field(default_factory=dict)
    _reporting: threading.Lock = field(default_factory=threading.Lock)

    def _report(self, trial: Trial) -> None:
        """Report a trial, and how many follow at most."""
        if trial.cached:
            return
        self.evaluations += 1
        n_steps = len(self.runner.steps)
        left = n_steps - 1 - self.runner.steps.index(trial.step)
        left += n_steps * max(0, self.most - 1 - len(self.known)) + self.after
        self.tell(trial, self.evaluations, left, found=trial.to_json())

    def tell(self, trial: Trial, done: int, left: int, found: Mapping[str, Any] | None = None) -> None:
        """Report a trial: how many were measured, and are left at most."""
        if self.progress is None:
            return
        kept = [chain.ratio_weights for chain in self.known.values() if self.keeps(chain)]
        self.progress(
            SearchProgress(
                stage="search",
                done=done,
                total=done + left,
                step=trial.step,
                found=found,
                trial=trial,
                best_ratio=max(kept, default=None),
                seconds=time.perf_counter() - self._begun,
            )
        )

    def says_nothing_at(self, step: int) -> bool:
        """Whether the previous checkpoint keeps the bounds at a step, so that they say nothing there."""
        if not self.bounds.given:
            return False
        stale = self.runner.judge.stale(step, self.runner.before(step))
        return stale is not None and self.bounds.judge(stale).kept

    def outcomes(self, space: Space[Any]) -> Callable[[Sequence[Any]], list[Outcome[Any]]]:
        """Return what `explore` measures points of a space with; side by side where there are replicas."""

        def measure(points: Sequence[Any]) -> list[Outcome[Any]]:
            candidates = [space.candidate(point) for point in points]
            self.ahead([one for one in candidates if one.digest not in self.known], False)
            chains = ordered_map(self.chain, candidates, threads=self.runner.judge.replicas)
            return [self._outcome(point, chain) for point, chain in zip(points, chains, strict=True)]

        return measure

    def _outcome(self, point: Any, chain: Chain) -> Outcome[Any]:
        usage = max((self.bounds.judge(trial.figures).usage for trial in chain.trials), default=0.0)
        return Outcome(point, self.keeps(chain), chain.ratio_weights, usage, chain)

    def chain(self, candidate: Candidate, *, to_the_end: bool = False) -> Chain:
        """Return a chain with one configuration, given up at the first step that breaks the bounds."""
        known = self.known.get(candidate.digest)
        if known is not None and (known.whole or not to_the_end):
            return known

        def goes_on(trial: Trial) -> bool:
            with self._reporting:
                self._report(trial)
            return to_the_end or self._keeps_on(trial)

        if to_the_end:
            self.ahead([candidate], True)
        trials = self.runner.walk(candidate, goes_on)
        chain = Chain(candidate=candidate, trials=tuple(trials), whole=len(trials) == len(self.runner.steps))
        self.known[candidate.digest] = chain
        return chain

    def _keeps_on(self, trial: Trial) -> bool:
        return self.bounds.judge(trial.figures).kept

    def keeps(self, chain: Chain) -> bool:
        """Whether every step is there, and keeps the bounds."""
        return chain.whole and all(map(self._keeps_on, chain.trials))

    def ratio(self, candidate: Candidate) -> float:
        """Estimate a chain's ratio from a sample of tensors at a few steps, without the evaluator."""
        if candidate.digest not in self._ratios:
            self._ratios[candidate.digest] = estimate_ratio(self.runner, candidate, _FEW_STEPS)
        return self._ratios[candidate.digest]

    def whole_ratio(self, candidate: Candidate) -> float:
        """Return a chain's ratio, encoded at every step but not evaluated."""
        checkpoints = map(self.runner.checkpoints, self.runner.steps)
        raw = nbytes = 0
        chain = candidate.chain_config(self.runner.base)
        for encoded in encode_chain(chain, checkpoints, foreseen=self.runner.foreseen):
            raw, nbytes = raw + encoded.raw_weights, nbytes + encoded.weights_nbytes
        return raw / nbytes if nbytes else 0.0

    def ratio_total(self, best: Chain) -> float | None:
        """Estimate the ratio of everything: trials measure the weights alone."""
        runner = self.runner
        checkpoints = [runner.checkpoints(step) for step in middle_of(runner.steps)]
        chain = best.candidate.chain_config(runner.base)
        rest = estimate_rest(chain, checkpoints, len(runner.steps), sample_keys(checkpoints[0]))
        raw = sum(trial.raw_weights for trial in best.trials)
        return rest.ratio_total(raw, sum(trial.weights_nbytes for trial in best.trials))

    def factors(self, line: Line, coarseness: float) -> Mapping[str, float]:
        """Return factors of the layer types, from a delta in the middle of the run; else none."""
        runner = self.runner
        middle = len(runner.steps) // 2
        if middle == 0:
            return {}
        lead = map(runner.checkpoints, runner.steps[max(0, middle - _LEAD) : middle])
        chain = line.candidate(coarseness).chain_config(runner.base)
        step = runner.steps[middle]
        checkpoint = runner.checkpoints(step)
        keys = sample_keys(checkpoint)
        *_, before = encode_chain(chain, lead, keys, runner.foreseen)
        state, index = following(before, keyframe=False)

        def encode(candidate: Candidate) -> EncodedStep:
            return encode_step(candidate.chain_config(runner.base), checkpoint, state, index, keys)

        return allocate(line, coarseness, runner.h(step), encode).factors


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
    """
    checkpoints = [runner.checkpoints(step) for step in middle_of(runner.steps, n_steps)]
    chain = candidate.chain_config(runner.base)
    encoded = encode_chain(chain, checkpoints, sample_keys(checkpoints[0]), runner.foreseen)
    sizes = [scaled_nbytes(one, checkpoint) for one, checkpoint in zip(encoded, checkpoints, strict=True)]
    raw = sum(checkpoint.raw_bytes(MODEL_ROLES) for checkpoint in checkpoints) / len(checkpoints)
    total = in_proportion(sizes[:1], sizes[1:], len(runner.steps), runner.base.keyframe_every)
    return len(runner.steps) * raw / total if total else 0.0


def best_within(
    chains: ChainTrials, space: Cube | Line, config: AnyCodec, budget: int | None, *, informative: bool
) -> Chain | None:
    """Return the best chain that keeps the bounds.

    Parameters
    ----------
    chains, space, config
        What measures chains, what is searched, and where a search of a line begins.
    budget
        Most chains to measure.
    informative
        False where the bounds say nothing at any step: nothing coarser than the start is tried.
    """
    best: Outcome[Any] | None
    if isinstance(space, Line):
        best = _best_on_line(chains, space, space.point_of(config), budget, informative)
    else:
        n_points = len(space.points())
        chains.most = 1 + (n_points if budget is None else min(budget, n_points))
        ratio_of = _ratio_of(chains, space)
        walk = Walk(cube=space, ratio_of=ratio_of, replicas=chains.runner.judge.replicas)
        best = explore(walk, chains.outcomes(space), budget=budget).best
    chains.most = 0  # none but the default's follow
    return None if best is None else best.result


def _best_on_line(
    chains: ChainTrials, line: Line, start: float, budget: int | None, informative: bool
) -> Outcome[float] | None:
    """Search the number of a line; then once more with factors of the layer types."""
    limit = budget or _BRACKET_CHAINS
    chains.most = 1 + (budget or 2 * _BRACKET_CHAINS)
    bracket = Bracket(start=start) if informative else Bracket(start=start, most=start)
    explored = explore(bracket, chains.outcomes(line), budget=limit)
    best, left = explored.best, limit if budget is None else budget - len(explored.outcomes)
    if best is None or left < 1 or not informative or line.factors:
        return best
    factors = chains.factors(line, best.point)
    if not factors:
        return best
    outcomes = chains.outcomes(replace(line, factors=factors))
    other = explore(Bracket(start=best.point), outcomes, budget=left).best
    return max((one for one in (best, other) if one is not None), key=lambda one: one.ratio)


def best_reaching(chains: ChainTrials, space: Cube | Line, config: AnyCodec, target: float) -> Chain | None:
    """Return the chain of the smallest divergence, else drop, whose ratio is at least the target's.

    The finest points of which one may reach it are found without the evaluator.
    """
    candidates: list[Candidate]
    if isinstance(space, Line):
        start = space.point_of(config)
        candidates = [space.candidate(point) for point in _reaching_on_line(chains, space, start, target)]
    else:
        ratio_of = _ratio_of(chains, space)
        reaching = [point for point in space.points() if ratio_of(point) * _SLACK >= target]
        frontier = [p for p in reaching if not any(o != p and space.is_finer(o, p) for o in reaching)]
        candidates = [space.candidate(point) for point in sorted(frontier, key=ratio_of)[:_FRONTIER]]
    chains.most = len(candidates) + 1
    chains.ahead(candidates, True)
    found = [chains.chain(one, to_the_end=True) for one in candidates]
    return min((one for one in found if one.ratio_weights >= target), key=_faithfulness, default=None)


def _reaching_on_line(chains: ChainTrials, line: Line, start: float, target: float) -> Sequence[float]:
    """Close in on the finest spacing that reaches a ratio."""

    def outcomes(points: Sequence[float]) -> list[Outcome[float]]:
        ratios = [chains.whole_ratio(line.candidate(point)) for point in points]
        pairs = zip(points, ratios, strict=True)
        return [Outcome(point, ratio < target, ratio, ratio / target) for point, ratio in pairs]

    closing = Bracket(start=start, enough=1.0, power=1.0, tolerance=1.02, aim=1.005)
    explored = explore(closing, outcomes, budget=2 * _BRACKET_CHAINS)
    return sorted(one.point for one in explored.outcomes if not one.kept)[:1]


def _ratio_of(chains: ChainTrials, cube: Cube) -> Callable[[CubePoint], float]:
    return lambda point: chains.ratio(cube.candidate(point))


def _faithfulness(chain: Chain) -> tuple[float, float]:
    """Order chains by divergence, or by drop where nothing diverges."""
    divergence, drop = (math.inf if one is None else one for one in (chain.divergence, chain.drop))
    return divergence, drop
