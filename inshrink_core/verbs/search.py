"""Search one configuration for a whole run: the coarsest that keeps the metric within a bound."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.errors import CheckFailedError, InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.results import write_atomic
from inshrink_core.report import OMITTED, Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import ratio
from inshrink_core.verbs.shared.groups import (
    Bounding,
    Computing,
    PathLike,
    Reading,
    RunLike,
    Stepping,
    Writing,
    steps_of,
)
from inshrink_core.verbs.shared.measured import Measurements, read_as

if TYPE_CHECKING:
    from inshrink_core.formats import Run
    from inshrink_core.search.bounds import Bounds
    from inshrink_core.search.search import Chain, ChainTrials
    from inshrink_core.search.space import Cube, Line
    from inshrink_core.search.trials import Trial


_logger = logging.getLogger(__name__)


_FIGURES: Final = ("ratio_weights", "drop", "divergence", "restore_cost")
_SHOWN: Final = ("step", "config", *_FIGURES, "seconds", "failure")

_NOTHING_BETTER: Final = "the default keeps the bounds, and no configuration that was tried is smaller"

_BY_STEP: Final = (
    "separate settings for each step reach a higher ratio than any single configuration: {ratio} of the"
    " weights; an archive written under these bounds uses them{but}"
)

_IN_FILE: Final = "; {file} can hold only one configuration for all steps: {best}"

_NO_EVIDENCE: Final = (
    "at every step the previous checkpoint would keep the bounds too: the steps prove nothing, so no coarser"
    " setting is chosen"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByStep:
    """Figures of the chain that `inshrink compress` writes under the same bounds, with settings per step.

    Parameters
    ----------
    ratio_weights
        Raw bytes over stored bytes of weights and buffers, including headers and indexes.
    ratio_total
        Raw bytes over stored bytes of everything; None for an empty archive.
    drop
        Relative change of the metric for the worse, signed; None if the original's metric is 0.
    divergence
        Divergence of the predictions (docs/evaluators.md#the-function); None if the evaluator returns none.
    restore_cost
        Expected rise of the loss, as a share of it; None if unknown.
    evaluations
        States evaluated; originals are not counted.
    """

    ratio_weights: float | None
    ratio_total: float | None
    drop: float | None
    divergence: float | None
    restore_cost: float | None
    evaluations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport(Report):
    """Result of `search`.

    Parameters
    ----------
    best
        Best configuration; None if none keeps the bounds.
    ratio_total
        Total ratio with the best configuration, with data other than weights estimated from a sample; None
        without a best configuration.
    default, default_keeps
        The chain of the codec's defaults, and whether it keeps the bounds.
    by_step
        Result of ``compress`` under the same bounds, with settings per step; None for a budget, and codecs
        other than the lattice.
    bounds
        Limits asked for. Without bounds this key, ``evaluations``, ``decided`` and ``max_…`` are absent.
    metric
        Metric that is compared.
    direction
        Better direction of the metric: ``higher`` or ``lower``.
    steps
        Training steps, ascending.
    not_discriminative
        Steps whose previous checkpoint keeps the bounds, too.
    evaluations
        Number of trials measured now; trials from the log are not counted.
    trials
        All known trials of this search's chains, in the order of measuring.
    seconds
        Wall time.
    notes
        Remarks.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    output
        File of the report; None if it is not written.
    """

    best: Chain | None
    ratio_total: float | None = field(metadata=OMITTED)
    default: Chain
    default_keeps: bool = field(metadata=OMITTED)
    by_step: ByStep | None
    bounds: Bounds
    metric: str
    direction: str
    steps: tuple[int, ...]
    not_discriminative: tuple[int, ...]
    evaluations: int
    trials: tuple[Trial, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    output: Path | None = field(default=None, metadata=OMITTED)

    SHOWS: ClassVar = (
        "bounds best ratio_by_default=default.ratio_weights default_keeps_the_bounds=default_keeps "
        "ratio_by_step=by_step.ratio_weights metric direction steps "
        "where_the_previous_checkpoint_keeps_them_too=not_discriminative evaluations "
        "seconds device"
    )

    @property
    def is_best_by_step(self) -> bool:
        """Whether settings per step store more than the best single configuration."""
        found = None if self.by_step is None else self.by_step.ratio_weights
        return found is not None and (self.best is None or found > self.best.ratio_weights)

    @property
    def failure(self) -> CheckFailedError | None:
        """The error without a best configuration; None with one."""
        if self.best is not None:
            return None
        return CheckFailedError(
            "no configuration keeps the bounds at every step",
            remedy="`inshrink compress` with the same bounds stores such steps exactly; or loosen the bounds",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink search --json``.

        Returns
        -------
        best : Chain?
            Configuration found, with the figures of its worst step; None if none keeps the bounds.
        best.ratio_total : float
            Raw bytes over stored bytes of everything; data other than weights is estimated from a sample.
        default : object
            The codec's defaults, with the figures of their worst step.
        default.ratio_weights : float
            Raw bytes over stored bytes of weights and buffers, including headers and indexes.
        default.drop : float
            Relative change of the metric for the worse, signed; None if the original's metric is 0.
        default.divergence : float
            Divergence of the predictions (docs/evaluators.md#the-function); None if the evaluator returns
            none.
        default.restore_cost : float
            Expected rise of the loss, as a share of it; None if unknown.
        default.keeps : bool
            Whether it keeps the bounds.
        trials : [object]
            Known trials: one configuration at one step.
        trials[].step, trials[].config, trials[].ratio_weights, trials[].drop, trials[].divergence : Trial
        trials[].restore_cost, trials[].seconds, trials[].failure : Trial
        """
        rows = [trial.to_json() for trial in self.trials]
        best = None if self.best is None else {"ratio_total": self.ratio_total, **self.best.to_json()}
        default = {**self.default.to_json(), "keeps": self.default_keeps}
        del default["config"]
        shown = {
            "best": best,
            "default": default,
            "trials": [{name: row[name] for name in _SHOWN} for row in rows],
        }
        return Report.to_json(self) | shown

    def remarks(self) -> Iterator[str]:
        """Yield the next command, and the notes."""
        from inshrink_core.search.bounds import option_of

        if self.is_best_by_step:
            limits = (f"{option_of(name)} {limit:g}" for name, limit in self.bounds.limits.items())
            yield f"next: inshrink compress RUN -o ARCHIVE {' '.join(limits)}"
        elif self.best is not None and self.output is not None:
            yield f"next: inshrink compress RUN -o ARCHIVE --config {self.output}"
        yield from (f"note: {note}" for note in self.notes)


@dataclass(frozen=True)
class Search(Stepping, Bounding, Writing, EvaluatorRequest, Computing, Reading, Request[SearchReport]):
    """Find the configuration with the largest ratio whose restored steps keep a bound.

    Parameters
    ----------
    run
        The run to search on.
    output
        File of the result, for compress --config.
    budget
        Maximum number of configurations to try.

    Raises
    ------
    InputError
        No bound is finite, or the codec has no tunable parameter.
    EvaluatorError, UntrustedCodeError
        The evaluator failed, or lacks consent to run.

    Notes
    -----
    A trial encodes one step in memory, as part of the chain that a configuration makes, and evaluates it.
    Trials are stored with the run's results, and the same search continues from them. A
    configuration is rejected at the first step that breaks a bound. The codec's defaults are measured, too,
    at every step; if they keep the bounds, the result is never larger. The search also measures the chain
    that `inshrink compress` writes under the same bounds, with settings per step; if that stores more than
    any single configuration, the report shows it (`SearchReport.by_step`). The report's `best` has the config
    for `inshrink_core.compress`. Other options of writing affect sizes, not figures.

    Examples
    --------
    >>> import inshrink_core, tempfile
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = inshrink_core.search(
    ...     run, max_drop=0.02, steps=run.steps[-2:], output=f"{folder.name}/search.json"
    ... )
    >>> report.failure is None
    True
    >>> folder.cleanup()
    """

    run: RunLike
    _: KW_ONLY
    output: Annotated[PathLike | None, Option(("--output", "-o"), metavar="FILE")] = None
    budget: Annotated[int | None, Option(least=1)] = None

    EXAMPLES: ClassVar = ("inshrink search runs/digits --trust-run --max-drop 0.01 -o search.json",)
    INTERRUPTED: ClassVar = "measured trials are kept, and the same command continues"
    UNIT: ClassVar = "trials"

    def perform(self) -> SearchReport:
        """Run the search."""
        from inshrink_core.chain import look_ahead
        from inshrink_core.search.search import ChainTrials, choose_steps, trial_log_of
        from inshrink_core.search.space import space_of
        from inshrink_core.search.trials import BoundEvaluator

        started = time.perf_counter()
        if not self.bounds.limits:
            raise InputError("there is nothing to search for", remedy="give a bound that is finite")
        opened = self.opened_run(self.run).matched()
        chosen = choose_steps(opened, steps_of(opened, self.steps))
        base = self.chain_config(device=self.device, threads=self.threads)
        layers = {spec.layer for spec in opened[chosen[0]].specs if spec.role in MODEL_ROLES}
        space = space_of(base.codec, layers)
        log = trial_log_of(opened, make=True)
        with BoundEvaluator(self.resolve(opened), opened.__getitem__, self.bounds) as evaluator:
            chains = ChainTrials(
                base=base,
                evaluator=evaluator,
                checkpoints=opened.__getitem__,
                steps=chosen,
                log=log,
                initial=look_ahead(base, chosen, opened.__getitem__),
                progress=self.progress,
            )
            report = self._searched(opened, chains, space, started)
        if report.output is not None:
            write_atomic(report.output, json.dumps(report.to_json(), indent=1) + "\n")
        return report

    def _searched(self, run: Run, chains: ChainTrials, space: Cube | Line, started: float) -> SearchReport:
        """Find the best chain, measure those of the defaults and of settings by step, and report on them."""
        from inshrink_core.search.bounded import MAX_TRIALS
        from inshrink_core.search.search import best_within
        from inshrink_core.search.space import Line

        notes: list[str] = []
        not_discriminative = tuple(step for step in chains.steps if chains.is_not_discriminative(step))
        discriminative = len(not_discriminative) + 1 < len(chains.steps) or len(chains.steps) == 1
        is_by_step = self.budget is None and isinstance(space, Line)
        chains.after = MAX_TRIALS * len(chains.steps) if is_by_step else 0
        best = best_within(chains, space, self.budget, discriminative=discriminative)
        notes += [] if discriminative else [_NO_EVIDENCE]
        point: Any = space.point_of(chains.base.config)
        default = chains.chain({} if point is None else space.settings(point), to_the_end=True)
        is_kept = chains.keeps(default)
        is_smaller = best is None or best.ratio_weights < default.ratio_weights
        if is_kept and is_smaller:
            best = default
            notes.append(_NOTHING_BETTER)
        by_step = self._by_step(run, chains) if is_by_step else None
        known = (trial for chain in chains.known.values() for trial in chain.trials)
        trials = tuple({id(trial): trial for trial in known}.values())
        report = SearchReport(
            best=best,
            ratio_total=None if best is None else chains.ratio_total(best),
            default=default,
            default_keeps=is_kept,
            by_step=by_step,
            bounds=chains.bounds,
            metric=chains.evaluator.metric,
            direction=chains.evaluator.direction,
            steps=chains.steps,
            not_discriminative=not_discriminative,
            evaluations=chains.evaluations,
            trials=trials,
            seconds=time.perf_counter() - started,
            notes=tuple(notes),
            device=chains.base.device,
            output=None if self.output is None else Path(self.output),
        )
        if by_step is not None and report.is_best_by_step:
            found = "none" if best is None else f"the best, {ratio(best.ratio_weights)}"
            but = "" if report.output is None else _IN_FILE.format(file=report.output.name, best=found)
            note = _BY_STEP.format(ratio=ratio(by_step.ratio_weights), but=but)
            report = replace(report, notes=(*report.notes, note))
        return report

    def _by_step(self, run: Run, chains: ChainTrials) -> ByStep | None:
        """Write the chain under the bounds to a temporary place, with settings found for each step.

        The result is stored with the run's measurements and reused. None if the bounds cannot be kept this
        way.
        """
        from inshrink_core.search.bounded import MAX_TRIALS, BoundedWriter, written_bounded
        from inshrink_core.search.bounds import FIGURES

        evaluator, steps, base = chains.evaluator, chains.steps, chains.base
        known = Measurements.of_run(run, make=True)
        bounds = evaluator.bounds(steps[0])
        question = {"steps": list(steps), "chain": base.record() | {"keyframe_every": base.keyframe_every}}
        question |= {"bounds": bounds.to_json(), "evaluator": evaluator.digest}
        found = known.find("by_step", question)
        if found is not None and (by_step := read_as(ByStep, found.document)) is not None:
            return by_step
        before, tried = evaluator.evaluations, Counter[int]()
        places = {step: place for place, step in enumerate(steps)}

        def report(trial: Trial) -> None:
            tried[trial.step] += 1
            left = MAX_TRIALS * (len(steps) - places[trial.step]) - tried[trial.step]
            chains.report(trial, chains.evaluations + tried.total(), left)

        following = dict(pairwise(steps)).get
        bounded = BoundedWriter(base, evaluator, run.__getitem__, following=following, on_trial=report)
        try:
            size = written_bounded(bounded, base, map(run.__getitem__, steps), chains.initial)
        except CheckFailedError as error:
            _logger.info("nothing is known of settings by step: %s", error)
            return None
        bound_record = bounded.bound_record.to_json()
        by_step = ByStep(
            ratio_weights=size.ratio_weights,
            ratio_total=size.ratio_total,
            evaluations=evaluator.evaluations - before,
            **{name: bound_record[f"max_{name}"] for name in FIGURES},
        )
        known.add("by_step", question, asdict(by_step))
        return by_step

    @property
    def bounds(self) -> Bounds:
        """The bounds; without any, the default of `inshrink compress`."""
        from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds

        asked = super().bounds
        return Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST) if asked == Bounds() else asked


search = python_call(Search)
