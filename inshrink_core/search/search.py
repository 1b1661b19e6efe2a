"""Searching one configuration for a whole run: the smallest archive whose every step keeps the bounds."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.chain import ChainConfig
from inshrink_core.chain.defaults import factors_of, make_chain_config
from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.errors import CheckFailedError, InputError, NotFoundError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution import write_whole
from inshrink_core.formats import Run, open_run
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.chains import Chain, ChainBench
from inshrink_core.search.judge import Judge
from inshrink_core.search.quadratic import calibrate
from inshrink_core.search.rest import estimate_rest, middle_of
from inshrink_core.search.sampling import sample_keys
from inshrink_core.search.space import Cube, LatticeLine, space_of
from inshrink_core.search.strategy import STRATEGIES, look_for_bounds, look_for_ratio
from inshrink_core.search.trials import Trial, TrialLog, checkpoint_digest
from inshrink_core.search.walk import TrialRunner

if TYPE_CHECKING:
    import os

    from inshrink_core.codec import AnyCodec

__all__ = [
    "OnSearch",
    "SearchProgress",
    "SearchReport",
    "TrialCount",
    "check_request",
    "choose_steps",
    "search",
    "trial_log_of",
]

_NO_ARCHIVE: Final = ""
"""A search begins without an archive, whatever lies in the working directory."""


def search(
    run: Run | str | os.PathLike[str],
    *,
    max_drop: float | None = None,
    max_divergence: float | None = None,
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
    device: str = "cpu",
    threads: int | None = None,
    progress: OnSearch | None = None,
) -> SearchReport:
    """Find the configuration of largest ratio whose every restored step keeps the bounds.

    Parameters
    ----------
    run
        The run, or its path.
    max_drop, max_divergence
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
    bounds = Bounds(max_drop=max_drop, max_divergence=max_divergence)
    check_request(bounds, target_ratio, strategy, budget, replicas)
    opened = run if isinstance(run, Run) else open_run(run)
    chosen = choose_steps(opened, steps)
    base = make_chain_config(_NO_ARCHIVE, codec, config, optimizer, keyframe_every, device, threads)
    layers = frozenset(spec.layer for spec in opened[chosen[0]].specs if spec.role in MODEL_ROLES)
    space = space_of(base.codec, layers)
    asked = EvaluatorRequest(
        evaluator=evaluator, metric=metric, direction=direction, trust_run=trust_run, timeout=timeout
    )
    judges = [asked.resolve(opened.settings, opened.directory) for _ in range(replicas)]
    target = None if output is None else Path(output)
    log = TrialLog(trial_log_of(opened, target), checkpoint_digest(opened[opened.steps[0]]))
    with Judge(judges, opened.__getitem__, bounds) as judge:
        factors, plain = factors_of(base)
        runner = TrialRunner(
            checkpoints=opened.__getitem__, steps=chosen, base=plain, judge=judge, log=log, with_gain=gain
        )
        bench = ChainBench(runner=runner, bounds=judge.bounds(chosen[0]))
        count = TrialCount(bench, progress)
        runner.told = count.told
        if isinstance(space, LatticeLine) and factors:
            space = LatticeLine(held=space.held, factors=factors)
        report = _search(bench, space, base, target_ratio, strategy, budget, seed, count, begun)
    if target is not None:
        write_whole(target, json.dumps(report.to_json(), indent=1) + "\n")
    return report


def _search(
    bench: ChainBench,
    space: Cube | LatticeLine,
    base: ChainConfig,
    target_ratio: float | None,
    strategy: str,
    budget: int | None,
    seed: int,
    count: TrialCount,
    begun: float,
) -> SearchReport:
    """Look, and put the report together."""
    uninformative = tuple(step for step in bench.runner.steps if _is_stale_enough(bench, step))
    notes: tuple[str, ...] = ()
    if target_ratio is not None:
        name = "ratio"
        best = look_for_ratio(bench, space, base, target_ratio, count.plan)
    else:
        name, best, notes = look_for_bounds(
            bench,
            space,
            base,
            strategy,
            budget,
            seed,
            informative=len(uninformative) + 1 < len(bench.runner.steps) or len(bench.runner.steps) == 1,
            plan=count.plan,
        )
    found = {id(t): t for chain in bench.chains.values() for t in chain.trials}
    trials = tuple(found.values())
    calibration = calibrate(trials)
    return SearchReport(
        best=best,
        ratio_total=None if best is None else _ratio_total(bench, best),
        bounds=bench.bounds,
        target_ratio=target_ratio,
        strategy=name,
        metric=bench.runner.judge.metric,
        direction=bench.runner.judge.direction,
        steps=bench.runner.steps,
        uninformative=uninformative,
        evaluations=count.evaluations,
        trials=trials,
        rank_correlation=calibration.rank_correlation,
        drop_rank_correlation=calibration.drop_rank_correlation,
        seconds=time.perf_counter() - begun,
        log=bench.runner.log.path,
        notes=notes,
    )


def _ratio_total(bench: ChainBench, best: Chain) -> float | None:
    """Estimate the ratio of everything: trials measure the weights alone."""
    runner = bench.runner
    checkpoints = [runner.checkpoints(step) for step in middle_of(runner.steps)]
    chain = best.candidate.chain_config(runner.base)
    rest = estimate_rest(chain, checkpoints, len(runner.steps), sample_keys(checkpoints[0]))
    raw = sum(trial.raw_weights for trial in best.trials)
    return rest.ratio_total(raw, sum(trial.weights_nbytes for trial in best.trials))


def _is_stale_enough(bench: ChainBench, step: int) -> bool:
    """Whether the stale copy keeps the bounds at a step, so that they say nothing there."""
    if not bench.bounds.given:
        return False
    stale = bench.runner.judge.stale(step, bench.runner.before(step))
    return stale is not None and bench.bounds.judge(stale).kept


_LOG_NAME: Final = "search.jsonl"

_logger = logging.getLogger(__name__)


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
            "there is nothing to search for", remedy="give --max-drop, --max-divergence or --target-ratio"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
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
        Steps at which the stale copy keeps the bounds too.
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
        return {
            "best": None if self.best is None else {"ratio_total": self.ratio_total, **self.best.to_json()},
            "bounds": self.bounds.to_json(),
            "target_ratio": self.target_ratio,
            "strategy": self.strategy,
            "metric": self.metric,
            "direction": self.direction,
            "steps": list(self.steps),
            "uninformative": list(self.uninformative),
            "evaluations": self.evaluations,
            "trials": [{name: row[name] for name in _SHOWN} for row in rows],
            "rank_correlation": self.rank_correlation,
            "drop_rank_correlation": self.drop_rank_correlation,
            "seconds": self.seconds,
            "log": None if self.log is None else str(self.log),
            "notes": list(self.notes),
        }


_SHOWN: Final = (
    "step",
    "config",
    "ratio_weights",
    "drop",
    "divergence",
    "restore_gain",
    "restore_noise",
    "seconds",
    "failure",
    "partial",
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


@dataclass
class TrialCount:
    """Counts trials, and says how many may follow."""

    bench: ChainBench
    progress: OnSearch | None
    evaluations: int = 0
    expected: int = 0
    _begun: float = field(default_factory=time.perf_counter)

    def plan(self, n_chains: int) -> None:
        """Expect so many more chains."""
        self.expected = self.evaluations + n_chains * len(self.bench.runner.steps)

    def told(self, trial: Trial) -> None:
        """Pass a trial on."""
        self.evaluations += 1
        if self.progress is None:
            return
        left = max(0, self.expected - self.evaluations)
        each = (time.perf_counter() - self._begun) / self.evaluations
        kept = [chain.ratio_weights for chain in self.bench.chains.values() if self.bench.keeps(chain)]
        self.progress(
            SearchProgress(
                trial=trial,
                evaluations=self.evaluations,
                left=left,
                seconds_left=left * each,
                best_ratio=max(kept, default=None),
            )
        )
