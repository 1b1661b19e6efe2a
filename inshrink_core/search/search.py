"""Searching one configuration for a whole run: the smallest archive whose every step keeps the bounds.

A configuration is measured by writing the chain with it, in memory. It is given up at the first step that
breaks a bound, so a hopeless one costs few evaluations.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.chain import FrameEncoder
from inshrink_core.chain.defaults import factors_of, make_chain_config
from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.errors import CheckFailedError, InputError, NotFoundError, StorageError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution import keep_result, load_result, ordered_map, write_whole
from inshrink_core.formats import Run, open_run
from inshrink_core.report import Report
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import encode_chain, following
from inshrink_core.search.quadratic import allocate, calibrate
from inshrink_core.search.remaining import Measure, Remaining
from inshrink_core.search.sampling import estimate_rest, in_proportion, middle_of, sample_keys, scaled_nbytes
from inshrink_core.search.space import Candidate, Cube, CubePoint, LatticeLine, space_of, three_digits
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
    import os

    from inshrink_core.codec import AnyCodec

__all__ = [
    "STRATEGIES",
    "Chain",
    "ChainTrials",
    "OnSearch",
    "SearchProgress",
    "SearchReport",
    "check_request",
    "choose_steps",
    "estimate_ratio",
    "known_trials",
    "last_report",
    "search",
    "strategies_of",
    "trial_log_of",
]

STRATEGIES: Final = ("auto", "allocation", "bracket", "guided", "random", "grid")

# A search begins without an archive, whatever lies in the working directory.
_NO_ARCHIVE: Final = ""

_LOG_NAME: Final = "search.jsonl"
_REPORT_NAME: Final = "search.json"

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


def search(
    run: Run | str | os.PathLike[str],
    *,
    max_drop: float | None = None,
    max_divergence: float | None = None,
    max_restore_cost: float | None = None,
    target_ratio: float | None = None,
    codec: str | None = None,
    config: Mapping[str, Any] | AnyCodec | None = None,
    strategy: str = "auto",
    budget: int | None = None,
    seed: int = 0,
    steps: Iterable[int] | None = None,
    optimizer: str | None = None,
    keyframe_every: int = 32,
    evaluator: str | None = None,
    metric: str | None = None,
    direction: str | None = None,
    trust_run: bool = False,
    timeout: float = 600.0,
    replicas: int = 1,
    gain: bool = True,
    output: str | os.PathLike[str] | None = None,
    device: str = "auto",
    threads: int | None = None,
    progress: OnSearch | None = None,
) -> SearchReport:
    """Find the configuration of largest ratio whose every restored step keeps the bounds.

    Parameters
    ----------
    run
        The run, or its path.
    max_drop, max_divergence, max_restore_cost
        What every step has to keep (`inshrink_core.search.bounds.Bounds`). Beside a bound on the drop
        stands one on the divergence by default, where the evaluator returns ``log_probs``.
    target_ratio
        Instead of bounds: the ratio to reach with the smallest divergence, or drop.
    codec, config
        What is searched, and settings that are held or begun with; by default the default codec.
    strategy
        One of `STRATEGIES`; ``auto`` chooses by the codec.
    budget
        Most configurations tried; by default as many as the strategy wants.
    seed
        Of the strategy ``random``.
    steps
        Steps of the chain; by default all.
    optimizer, keyframe_every
        As `inshrink_core.compress` takes them; they decide sizes, not figures.
    evaluator, metric, direction, trust_run, timeout
        What judges, as `inshrink_core.compare` takes them.
    replicas
        Evaluators asked side by side.
    gain
        Measure restore gain and noise of each trial too.
    output
        Write the report there, and the trials beside it as they are measured: the same call goes on from
        them. Without it, they are kept in ``.inshrink`` inside of the run, where that can be written.
    device, threads
        Where, and how many tensors at a time, are encoded.
    progress
        Called after each trial.

    Returns
    -------
    SearchReport
        Its `best` has the config that `inshrink_core.compress` takes.

    Raises
    ------
    InputError
        Neither bounds nor a target, a codec without anything to search, a log of another run.
    EvaluatorError, UntrustedCodeError
        The evaluator failed, or may not run.

    Notes
    -----
    A trial is one step encoded in memory, in the chain that a configuration makes, and evaluated. A
    configuration is given up at the first step that breaks a bound.

    Examples
    --------
    >>> import inshrink_core, tempfile
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = inshrink_core.search(
    ...     run, max_drop=0.02, steps=run.steps[-2:], output=f"{folder.name}/search.json"
    ... )
    >>> report.best.divergence <= report.bounds.max_divergence
    True
    >>> folder.cleanup()
    """
    begun = time.perf_counter()
    bounds = Bounds(max_drop=max_drop, max_divergence=max_divergence, max_restore_cost=max_restore_cost)
    check_request(bounds, target_ratio, strategy, budget, replicas)
    opened = run if isinstance(run, Run) else open_run(run)
    chosen = choose_steps(opened, steps)
    base = make_chain_config(_NO_ARCHIVE, codec, config, optimizer, keyframe_every, device, threads)
    layers = frozenset(spec.layer for spec in opened[chosen[0]].specs if spec.role in MODEL_ROLES)
    space = space_of(base.codec, layers)
    factors, plain = factors_of(base)
    if isinstance(space, LatticeLine) and factors:
        space = replace(space, factors=factors)
    asked = EvaluatorRequest(
        evaluator=evaluator, metric=metric, direction=direction, trust_run=trust_run, timeout=timeout
    )
    judges = [asked.resolve(opened.settings, opened.directory) for _ in range(replicas)]
    target = None if output is None else Path(output)
    log = TrialLog(trial_log_of(opened, target), checkpoint_digest(opened[opened.steps[0]]))
    with Judge(judges, opened.__getitem__, bounds) as judge:
        runner = TrialRunner(
            checkpoints=opened.__getitem__,
            steps=chosen,
            base=plain,
            judge=judge,
            log=log,
            with_gain=gain,
            foreseen=FrameEncoder(plain).look_ahead(chosen, opened.__getitem__),
        )
        chains = ChainTrials(runner=runner, bounds=judge.bounds(chosen[0]), progress=progress)
        uninformative = tuple(step for step in chosen if chains.says_nothing_at(step))
        looked = _Search(chains, space, three_digits(base.config.knob_value() or 1.0))
        notes: tuple[str, ...] = ()
        if target_ratio is not None:
            name, best = "ratio", looked.for_ratio(target_ratio)
        else:
            name = _named(strategy, space)
            informative = len(uninformative) + 1 < len(chosen) or len(chosen) == 1
            best = looked.for_bounds(name, budget, seed, informative=informative)
            notes = () if informative else (_NOTHING_SAID,)
        trials = tuple({id(one): one for chain in chains.known.values() for one in chain.trials}.values())
        calibration = calibrate(trials)
        report = SearchReport(
            best=best,
            ratio_total=None if best is None else _ratio_total(runner, best),
            bounds=chains.bounds,
            target_ratio=target_ratio,
            strategy=name,
            metric=judge.metric,
            direction=judge.direction,
            steps=chosen,
            uninformative=uninformative,
            evaluations=chains.remaining.evaluations,
            trials=trials,
            rank_correlation=calibration.rank_correlation,
            drop_rank_correlation=calibration.drop_rank_correlation,
            seconds=time.perf_counter() - begun,
            log=log.path,
            notes=notes,
            device=base.device,
        )
    if target is not None:
        write_whole(target, json.dumps(report.to_json(), indent=1) + "\n")
    _keep_report(opened, report)
    return report


_NOTHING_SAID: Final = (
    "the previous checkpoint, in the place of each one, keeps the bounds at every step: they say nothing,"
    " and nothing is coarsened"
)


def _ratio_total(runner: TrialRunner, best: Chain) -> float | None:
    """Estimate the ratio of everything: trials measure the weights alone."""
    checkpoints = [runner.checkpoints(step) for step in middle_of(runner.steps)]
    chain = best.candidate.chain_config(runner.base)
    rest = estimate_rest(chain, checkpoints, len(runner.steps), sample_keys(checkpoints[0]))
    raw = sum(trial.raw_weights for trial in best.trials)
    return rest.ratio_total(raw, sum(trial.weights_nbytes for trial in best.trials))


def trial_log_of(run: Run, output: Path | None, *, make: bool = True) -> Path | None:
    """Return where the trials of a search are kept: beside its output, else inside of the run.

    Parameters
    ----------
    run, output
        What is searched, and where the result goes.
    make
        Make sure that it can be written; None where that is not so.
    """
    if output is not None:
        return output.with_suffix(".trials.jsonl")
    folder = run.directory / ".inshrink"
    if folder.is_symlink():
        return None
    if not make:
        return folder / _LOG_NAME
    try:
        folder.mkdir(exist_ok=True)
        path = folder / _LOG_NAME
        with path.open("ab"):
            return path
    except OSError as error:
        _logger.info("trials are not kept: %s", error)
        return None


def known_trials(run: Run, log: Path | None = None) -> tuple[Trial, ...]:
    """Return the trials at hand, without making a log where there is none.

    Parameters
    ----------
    run
        What was searched.
    log
        The log of a search (`SearchReport.log`); by default the one inside of the run.

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
    return TrialLog(found, checkpoint_digest(run[run.steps[0]]), read_only=True).values()


def _keep_report(run: Run, report: SearchReport) -> None:
    """Keep a finished report beside the trials inside of the run, whatever becomes of the next search."""
    if report.log is None or report.log != trial_log_of(run, None, make=False):
        return
    trials = [trial.to_json() for trial in report.trials]
    try:
        keep_result(
            report.log.with_name(_REPORT_NAME), _run_key(run), "report", report.to_json() | {"trials": trials}
        )
    except StorageError as error:
        _logger.info("the report is not kept: %s", error)


def last_report(run: Run) -> dict[str, Any] | None:
    """Return the document of the last finished search whose trials are kept inside of a run.

    Its ``trials`` are whole (`Trial.to_json`). A search that is interrupted, or still going on, leaves the
    document of the one before; its own trials are those of `known_trials`.

    Parameters
    ----------
    run
        What was searched; None for a run that was written anew since.
    """
    log = trial_log_of(run, None, make=False)
    return None if log is None else load_result(log.with_name(_REPORT_NAME), _run_key(run), "report", dict)


def _run_key(run: Run) -> dict[str, Any]:
    return {"run": run.identity(run.steps[0])}


def check_request(
    bounds: Bounds, target_ratio: float | None, strategy: str, budget: int | None, replicas: int
) -> None:
    """Refuse what cannot be searched for.

    Raises
    ------
    InputError
        Neither bounds nor a target, or both; a strategy that there is not; a number out of range.
    """
    if strategy not in STRATEGIES:
        raise InputError(
            f"there is no strategy '{strategy}'", remedy=f"choose one of {', '.join(STRATEGIES)}"
        )
    for name, number in (("budget", budget), ("replicas", replicas)):
        if number is not None and number < 1:
            raise InputError(f"--{name} is at least 1", expected="≥ 1", found=str(number))
    if target_ratio is None and not bounds.given:
        raise InputError(
            "there is nothing to search for",
            remedy="give --max-drop, --max-divergence, --max-restore-cost or --target-ratio",
        )
    if target_ratio is not None and bounds.given:
        raise InputError(
            "a target ratio and bounds were both given", remedy="give --target-ratio or bounds, not both"
        )
    if target_ratio is not None and not 1 <= target_ratio < float("inf"):
        raise InputError("--target-ratio is no ratio", expected="a number from 1", found=str(target_ratio))


def choose_steps(run: Run, steps: Iterable[int] | None) -> tuple[int, ...]:
    """Return the steps of the chain, ascending; every one must exist.

    Raises
    ------
    NotFoundError
        One does not, or there is none.
    """
    chosen = run.steps if steps is None else tuple(sorted(set(steps)))
    missing = [step for step in chosen if step not in run.steps]
    if missing or not chosen:
        raise NotFoundError(
            f"the run has no step {missing[0]}" if missing else "there is no step to search on",
            where=str(run.path),
            remedy=f"it has {run.steps[0]} to {run.steps[-1]}; `inshrink inspect` lists them",
        )
    return chosen


def strategies_of(space: Cube | LatticeLine) -> tuple[str, ...]:
    """Return which of `STRATEGIES` search a space.

    Examples
    --------
    >>> strategies_of(LatticeLine())
    ('auto', 'allocation', 'bracket', 'random', 'grid')
    """
    others = ("guided",) if isinstance(space, LatticeLine) else ("allocation", "bracket")
    return tuple(name for name in STRATEGIES if name not in others)


def _named(strategy: str, space: Cube | LatticeLine) -> str:
    """Return a strategy that suits the space.

    Raises
    ------
    InputError
        It searches another kind of space.
    """
    _, default, *others = strategies_of(space)
    if strategy == "auto":
        return default
    if strategy not in (default, *others):
        raise InputError(
            f"the strategy '{strategy}' does not search this codec",
            remedy=f"choose one of {', '.join((default, *others))}",
        )
    return strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport(Report):
    """What `search` found.

    Parameters
    ----------
    best
        The chain of the configuration that was found; None where none keeps the bounds.
    ratio_total
        Of everything, with the best configuration; what is not weights is estimated from a sample. None
        without one.
    bounds
        What was promised, a divergence bound that was added included.
    target_ratio
        The ratio that was asked for; None where bounds were.
    strategy
        How was looked.
    metric, direction
        What the drop is of.
    steps
        Steps of the chain.
    uninformative
        Steps at which the previous checkpoint keeps the bounds too.
    evaluations
        Trials measured now; those of the log cost nothing.
    trials
        Everything that is known of this search's chains, in the order of measuring.
    rank_correlation, drop_rank_correlation
        Between the quadratic model's prediction and what was measured, of divergences where there are any
        and of drops; None for too few trials.
    seconds
        Wall time.
    log
        Where the trials are kept; None for nowhere.
    notes
        What should be known.
    device
        Where trials were encoded and decoded.
    """

    best: Chain | None
    ratio_total: float | None
    bounds: Bounds
    target_ratio: float | None
    strategy: str
    metric: str
    direction: str
    steps: tuple[int, ...]
    uninformative: tuple[int, ...]
    evaluations: int
    trials: tuple[Trial, ...]
    rank_correlation: float | None
    drop_rank_correlation: float | None
    seconds: float
    log: Path | None
    notes: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def failure(self) -> CheckFailedError | None:
        """Why there is no best configuration; None where there is one."""
        if self.best is not None:
            return None
        if self.target_ratio is not None:
            return CheckFailedError(
                f"no configuration reaches a ratio of {self.target_ratio:g}",
                found=f"at most {max((trial.ratio_weights for trial in self.trials), default=0.0):.3g}",
                remedy="ask for less, or try another --codec",
            )
        return CheckFailedError(
            "no configuration keeps the bounds at every step",
            remedy="`inshrink compress` with the same bounds stores such steps exactly; or loosen the bounds",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink search --json``."""
        rows = [trial.to_json() for trial in self.trials]
        best = None if self.best is None else {"ratio_total": self.ratio_total, **self.best.to_json()}
        shown = {"best": best, "trials": [{name: row[name] for name in _SHOWN} for row in rows]}
        document = Report.to_json(self) | shown
        del document["ratio_total"]
        return document


_SHOWN: Final = (
    *("step", "config", "ratio_weights", "drop", "divergence", "restore_cost"),
    *("restore_gain", "restore_noise"),
    *("seconds", "failure", "partial"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """How far a search has come, after a trial.

    Parameters
    ----------
    trial
        What was measured last.
    evaluations
        Trials measured so far, those of the log not counted.
    left
        About how many may follow.
    seconds_left
        About how long they take.
    best_ratio
        Ratio of the best chain that keeps the bounds so far; None for none.
    """

    trial: Trial
    evaluations: int
    left: int
    seconds_left: float
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
    known: dict[str, Chain] = field(default_factory=dict)
    remaining: Remaining = field(init=False)
    _ratios: dict[str, float] = field(default_factory=dict)
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.remaining = Remaining(len(self.runner.steps), self.runner.judge.replicas)

    def _told(self, candidate: Candidate, trial: Trial) -> None:
        """Tell of a trial, and of what it foretells."""
        place, usage = self.runner.steps.index(trial.step), self.bounds.judge(trial.figures).usage
        self.remaining.add(candidate, place, usage, None if trial.cached else trial.seconds)
        if self.progress is None or trial.cached:
            return
        left, seconds_left = self.remaining.left()
        kept = [chain.ratio_weights for chain in self.known.values() if self.keeps(chain)]
        self.progress(
            SearchProgress(
                trial=trial,
                evaluations=self.remaining.evaluations,
                left=left,
                seconds_left=seconds_left,
                best_ratio=max(kept, default=None),
            )
        )

    def says_nothing_at(self, step: int) -> bool:
        """Whether the previous checkpoint keeps the bounds at a step, so that they say nothing there."""
        if not self.bounds.given:
            return False
        stale = self.runner.judge.stale(step, self.runner.before(step))
        return stale is not None and self.bounds.judge(stale).kept

    def outcomes(self, space: Cube | LatticeLine) -> Callable[[Sequence[Any]], list[Outcome[Any]]]:
        """Return what `explore` measures points of a space with; side by side where there are replicas."""

        def measure(points: Sequence[Any]) -> list[Outcome[Any]]:
            candidates = [space.candidate(point) for point in points]
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
            with self._telling:
                self._told(candidate, trial)
            return to_the_end or self.bounds.judge(trial.figures).kept

        trials = self.runner.walk(candidate, goes_on)
        chain = Chain(candidate=candidate, trials=tuple(trials), whole=len(trials) == len(self.runner.steps))
        self.known[candidate.digest] = chain
        return chain

    def keeps(self, chain: Chain) -> bool:
        """Whether every step is there, and keeps the bounds."""
        return chain.whole and all(self.bounds.judge(trial.figures).kept for trial in chain.trials)

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

    def factors(self, line: LatticeLine, coarseness: float) -> Mapping[str, float]:
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
        standing, index = following(before, keyframe=False)
        h = runner.h(step)
        return allocate(runner.base, line, coarseness, checkpoint, standing, h, index, keys).factors


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
class _Search:
    """Which strategy searches which space for what, in whole chains."""

    chains: ChainTrials
    space: Cube | LatticeLine
    start: float

    def for_bounds(self, name: str, budget: int | None, seed: int, *, informative: bool) -> Chain | None:
        """Return the best chain that keeps the bounds.

        Where they say nothing at any step, nothing coarser than the start is tried.
        """
        space = self.space
        if isinstance(space, LatticeLine) and name in ("allocation", "bracket"):
            return self._on_line(space, name, budget, informative=informative)
        replicas = self.chains.runner.judge.replicas
        if name == "guided" and isinstance(space, Cube):
            ratio_of = cache(self._ratio_of)  # A remaining time asks for them again and again.
            guided = GuidedExhaustive(cube=space, ratio_of=ratio_of, replicas=replicas)
            return _chain_of(self._best(guided, space, budget, ratio_of).best)
        chosen = seed if name == "random" else None
        everything = Everything(space=space, seed=chosen, replicas=replicas)
        return _chain_of(self._best(everything, space, budget).best)

    def _best(
        self,
        strategy: Strategy[Any],
        space: Cube | LatticeLine,
        budget: int | None,
        ratio_of: Callable[[Any], float] | None = None,
    ) -> Explored[Any]:
        """Measure what a strategy asks for, with the plan of it told before."""

        def walk(measure: Measure) -> Explored[Any]:
            return explore(strategy, measure, budget=budget)

        self.chains.remaining.plan(walk, space, ratio_of)
        return walk(self.chains.outcomes(space))

    def _ratio_of(self, point: CubePoint) -> float:
        return self.chains.ratio(self.space.candidate(point))  # type: ignore[arg-type]

    def _on_line(
        self, line: LatticeLine, name: str, budget: int | None, *, informative: bool
    ) -> Chain | None:
        """Search the global spacing; then, for an allocation, once more with factors of the layer types."""
        limit = budget or _BRACKET_CHAINS
        bracket = Bracket(start=self.start) if informative else Bracket(start=self.start, most=self.start)
        twice = name == "allocation" and informative and not line.factors
        explored = self._best(bracket, line, limit)
        best = explored.best
        left = limit if budget is None else budget - len(explored.outcomes)
        if best is None or not twice or left < 1:
            return _chain_of(best)
        factors = self.chains.factors(line, best.point)
        if not factors:
            return _chain_of(best)
        other = self._best(Bracket(start=best.point), replace(line, factors=factors), left).best
        return _chain_of(max((one for one in (best, other) if one is not None), key=lambda one: one.ratio))

    def for_ratio(self, target: float) -> Chain | None:
        """Return the chain of the smallest divergence, else drop, whose ratio is at least the target's."""
        space = self.space
        if isinstance(space, LatticeLine):
            finest = self._finest_on_line(space, target)
            chosen: list[Any] = [] if finest is None else [finest]
        else:
            ratios = {point: self._ratio_of(point) for point in space.points()}
            reaching = [point for point, ratio in ratios.items() if ratio * _SLACK >= target]
            frontier = [p for p in reaching if not any(_is_finer(other, p) for other in reaching)]
            chosen = sorted(frontier, key=ratios.__getitem__)[:_FRONTIER]
        self.chains.remaining.plan(lambda measure: measure(chosen), space)
        chains = [self.chains.chain(space.candidate(point), to_the_end=True) for point in chosen]
        return min((one for one in chains if one.ratio_weights >= target), key=_faithfulness, default=None)

    def _finest_on_line(self, line: LatticeLine, target: float) -> float | None:
        """Close in on the finest spacing that reaches the ratio, without the evaluator."""

        def outcomes(points: Sequence[float]) -> list[Outcome[float]]:
            ratios = [self.chains.whole_ratio(line.candidate(point)) for point in points]
            pairs = zip(points, ratios, strict=True)
            return [Outcome(point, ratio < target, ratio, ratio / target) for point, ratio in pairs]

        closing = Bracket(start=self.start, enough=1.0, power=1.0, tolerance=1.02, aim=1.005)
        explored = explore(closing, outcomes, budget=2 * _BRACKET_CHAINS)
        reaching = [one.point for one in explored.outcomes if not one.kept]
        return min(reaching, default=None)


def _chain_of(outcome: Outcome[Any] | None) -> Chain | None:
    return None if outcome is None else outcome.result


def _is_finer(point: CubePoint, than: CubePoint) -> bool:
    """Whether a point is at least as fine on every axis, and another one, under the same word."""
    same = point.word == than.word
    finer = all(a <= b for a, b in zip(point.place, than.place, strict=True))
    return same and finer and point.place != than.place


def _faithfulness(chain: Chain) -> tuple[float, float]:
    """Order chains by divergence, or by drop where nothing diverges."""
    figures = (chain.divergence, chain.drop)
    return figures[0] if figures[0] is not None else math.inf, figures[1] if figures[
        1
    ] is not None else math.inf
