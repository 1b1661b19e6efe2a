"""Searching one configuration for a whole run: the smallest archive whose every step keeps the bounds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.chain import ChainConfig
from inshrink_core.checkpoint import MODEL_ROLES
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
from inshrink_core.search.trials import TrialLog, checkpoint_digest
from inshrink_core.search.walk import TrialRunner
from inshrink_core.session.config import factors_of, make_chain_config
from inshrink_core.session.search_progress import OnSearch, SearchProgress, TrialCount
from inshrink_core.session.search_report import SearchReport
from inshrink_core.session.search_request import check_request, choose_steps, trial_log_of
from inshrink_core.session.strategy import look_for_bounds, look_for_ratio

if TYPE_CHECKING:
    import os

    from inshrink_core.codec import CodecConfig

__all__ = ["OnSearch", "SearchProgress", "SearchReport", "choose_steps", "search", "trial_log_of"]

_NO_ARCHIVE: Final = ""
"""A search begins without an archive, whatever lies in the working directory."""


def search(
    run: Run | str | os.PathLike[str],
    *,
    max_drop: float | None = None,
    max_divergence: float | None = None,
    target_ratio: float | None = None,
    codec: str | None = None,
    config: Mapping[str, Any] | CodecConfig | None = None,
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
