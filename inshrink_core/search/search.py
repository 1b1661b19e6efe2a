"""Searching one configuration for a whole run: chains as trials, the log of them, and strategies over both.

A configuration is measured by writing the chain with it, in memory. It is given up at the first step that
breaks a bound, so a hopeless one costs few evaluations.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic

from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.errors import InputError, NotFoundError
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
from inshrink_core.search.space import Candidate, Cube, CubePoint, Line, Point, Space
from inshrink_core.search.strategies import (
    Bracket,
    Everything,
    Explored,
    GuidedExhaustive,
    Outcome,
    Strategy,
    explore,
)
from inshrink_core.search.trials import Trial, TrialLog, TrialRunner, checkpoint_digest

if TYPE_CHECKING:
    from inshrink_core.codec import AnyCodec
    from inshrink_core.search.remaining import Measure, Remaining


STRATEGIES: Final = ("auto", "allocation", "bracket", "guided", "random", "grid")
"""Every strategy that can be asked for; which of them search a codec, its space says."""

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


def strategy_for(strategy: str, space: Space[Any]) -> str:
    """Return a strategy that suits the space; ``auto`` is the space's default.

    Raises
    ------
    InputError
        It searches another kind of space.
    """
    if strategy == "auto":
        return space.STRATEGIES[0]
    if strategy not in space.STRATEGIES:
        raise InputError(
            f"the strategy '{strategy}' does not search this codec",
            remedy=f"choose one of {', '.join(space.STRATEGIES)}",
        )
    return strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress(Progress):
    """How far a search has come, after a trial: trials measured, those of the log not counted, of about all.

    Parameters
    ----------
    trial
        What was measured last.
    best_ratio
        Ratio of the best chain that keeps the bounds so far; None for none.
    """

    trial: Trial
    best_ratio: float | None


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
    remaining
        How many trials there were, and may follow.
    """

    runner: TrialRunner
    bounds: Bounds
    progress: OnSearch | None = None
    ahead: Ahead = _by_nobody
    known: dict[str, Chain] = field(default_factory=dict)
    remaining: Remaining = field(init=False)
    _ratios: dict[str, float] = field(default_factory=dict)
    _reporting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        from inshrink_core.search.remaining import Remaining

        self.remaining = Remaining(len(self.runner.steps), self.runner.judge.replicas)

    def _report(self, candidate: Candidate, trial: Trial) -> None:
        """Report a trial, and how many are expected to follow."""
        place, usage = self.runner.steps.index(trial.step), self.bounds.judge(trial.figures).usage
        self.remaining.add(candidate, place, usage, None if trial.cached else trial.seconds)
        if self.progress is None or trial.cached:
            return
        left, seconds_left = self.remaining.left()
        # Kernels are compiled in the first one, which tells nothing of the others.
        known = seconds_left if self.remaining.evaluations > 1 else None
        self.tell(trial, self.remaining.evaluations, left, known, found=trial.to_json())

    def tell(
        self,
        trial: Trial,
        done: int,
        left: int,
        seconds_left: float | None = None,
        found: Mapping[str, Any] | None = None,
    ) -> None:
        """Report a trial to whoever wants to know: how many were measured, and about how many are left."""
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
                seconds_left=seconds_left,
                trial=trial,
                best_ratio=max(kept, default=None),
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
                self._report(candidate, trial)
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


@dataclass(frozen=True)
class ChainSearch(ABC, Generic[Point]):
    """Which strategy searches a space for what, in whole chains; made by `chain_search`.

    Parameters
    ----------
    chains
        What measures them.
    space
        What is searched.
    start
        Where a search begins that begins somewhere.
    """

    chains: ChainTrials
    space: Space[Point]
    start: Point | None

    def for_bounds(self, name: str, budget: int | None, seed: int, *, informative: bool) -> Chain | None:
        """Return the best chain that keeps the bounds.

        Where they say nothing at any step, nothing coarser than the start is tried.
        """
        if name not in ("random", "grid"):
            return _chain_of(self._cleverly(name, budget, informative=informative))
        replicas = self.chains.runner.judge.replicas
        everything = Everything(space=self.space, seed=seed if name == "random" else None, replicas=replicas)
        return _chain_of(self._explored(everything, budget).best)

    @abstractmethod
    def _cleverly(self, name: str, budget: int | None, *, informative: bool) -> Outcome[Point] | None:
        """Search by a strategy that is the space's own."""

    def _explored(
        self,
        strategy: Strategy[Point],
        budget: int | None,
        space: Space[Point] | None = None,
        ratio_of: Callable[[Point], float] | None = None,
    ) -> Explored[Point]:
        """Measure what a strategy asks for; first tell how long that may take."""
        space = space or self.space

        def walk(measure: Measure) -> Explored[Point]:
            return explore(strategy, measure, budget=budget)

        self.chains.remaining.plan(walk, space, ratio_of)
        return walk(self.chains.outcomes(space))

    def for_ratio(self, target: float) -> Chain | None:
        """Return the chain of the smallest divergence, else drop, whose ratio is at least the target's."""
        chosen = self._reaching(target)
        self.chains.remaining.plan(lambda measure: measure(chosen), self.space)
        candidates = [self.space.candidate(point) for point in chosen]
        self.chains.ahead(candidates, True)
        chains = [self.chains.chain(one, to_the_end=True) for one in candidates]
        return min((one for one in chains if one.ratio_weights >= target), key=_faithfulness, default=None)

    @abstractmethod
    def _reaching(self, target: float) -> Sequence[Point]:
        """Return the finest points of which one may reach a ratio, without the evaluator."""


class _LineSearch(ChainSearch[float]):
    """Searches the number of a `Line`, and with it factors of the layer types."""

    space: Line
    start: float

    def _cleverly(self, name: str, budget: int | None, *, informative: bool) -> Outcome[float] | None:
        """Search the global spacing; then, for an allocation, once more with factors of the layer types."""
        limit = budget or _BRACKET_CHAINS
        bracket = Bracket(start=self.start) if informative else Bracket(start=self.start, most=self.start)
        explored = self._explored(bracket, limit)
        best = explored.best
        left = limit if budget is None else budget - len(explored.outcomes)
        if best is None or left < 1 or name != "allocation" or not informative or self.space.factors:
            return best
        factors = self.chains.factors(self.space, best.point)
        if not factors:
            return best
        again = Bracket(start=best.point)
        other = self._explored(again, left, replace(self.space, factors=factors)).best
        return max((one for one in (best, other) if one is not None), key=lambda one: one.ratio)

    def _reaching(self, target: float) -> Sequence[float]:
        """Close in on the finest spacing that reaches the ratio."""

        def outcomes(points: Sequence[float]) -> list[Outcome[float]]:
            ratios = [self.chains.whole_ratio(self.space.candidate(point)) for point in points]
            pairs = zip(points, ratios, strict=True)
            return [Outcome(point, ratio < target, ratio, ratio / target) for point, ratio in pairs]

        closing = Bracket(start=self.start, enough=1.0, power=1.0, tolerance=1.02, aim=1.005)
        explored = explore(closing, outcomes, budget=2 * _BRACKET_CHAINS)
        return sorted(one.point for one in explored.outcomes if not one.kept)[:1]


class _CubeSearch(ChainSearch[CubePoint]):
    """Searches a `Cube` in the order of estimated ratios."""

    space: Cube

    def _ratio_of(self, point: CubePoint) -> float:
        return self.chains.ratio(self.space.candidate(point))

    def _cleverly(self, name: str, budget: int | None, *, informative: bool) -> Outcome[CubePoint] | None:
        """Search as published."""
        ratio_of = cache(self._ratio_of)  # A remaining time asks for them again and again.
        replicas = self.chains.runner.judge.replicas
        guided = GuidedExhaustive(cube=self.space, ratio_of=ratio_of, replicas=replicas)
        return self._explored(guided, budget, ratio_of=ratio_of).best

    def _reaching(self, target: float) -> Sequence[CubePoint]:
        """Take the points than which none finer is estimated to reach it."""
        ratios = {point: self._ratio_of(point) for point in self.space.points()}
        reaching = [point for point, ratio in ratios.items() if ratio * _SLACK >= target]
        frontier = [p for p in reaching if not any(_is_finer(other, p) for other in reaching)]
        return sorted(frontier, key=ratios.__getitem__)[:_FRONTIER]


def chain_search(chains: ChainTrials, space: Cube | Line, config: AnyCodec) -> ChainSearch[Any]:
    """Return what searches a space, beginning at a configuration."""
    if isinstance(space, Line):
        return _LineSearch(chains, space, space.point_of(config))
    return _CubeSearch(chains, space, space.point_of(config))


def _chain_of(outcome: Outcome[Any] | None) -> Chain | None:
    return None if outcome is None else outcome.result


def _is_finer(point: CubePoint, than: CubePoint) -> bool:
    """Whether a point is at least as fine on every axis, and another one, under the same word."""
    same = point.word == than.word
    finer = all(a <= b for a, b in zip(point.place, than.place, strict=True))
    return same and finer and point.place != than.place


def _faithfulness(chain: Chain) -> tuple[float, float]:
    """Order chains by divergence, or by drop where nothing diverges."""
    divergence, drop = (math.inf if one is None else one for one in (chain.divergence, chain.drop))
    return divergence, drop
