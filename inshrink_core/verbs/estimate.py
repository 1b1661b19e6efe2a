"""Estimating ratio and drop of a configuration, or of several, in seconds and without the evaluator."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Unseen
from inshrink_core.codec import DEFAULT_CODEC
from inshrink_core.errors import EvaluatorError, InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.report import UNSAID, Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import UNKNOWN, count, duration, nats, percent, plain, printable, ratio, size
from inshrink_core.verbs.shared.groups import (
    Computing,
    PathLike,
    Reading,
    RunLike,
    Stepping,
    Writing,
    steps_of,
)
from inshrink_core.verbs.shared.measured import Asking, EvaluatorId, Measurements, answer_as
from inshrink_core.verbs.shared.showing import known_fact, show_facts, show_notes, show_table

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.chain import ChainConfig
    from inshrink_core.checkpoint import TensorSpec
    from inshrink_core.formats import Run
    from inshrink_core.search.bounds import Bounds
    from inshrink_core.search.calibration import Calibration
    from inshrink_core.search.measure import Rest
    from inshrink_core.search.search import Chain
    from inshrink_core.search.space import Candidate
    from inshrink_core.search.trials import Trial

__all__ = [
    "GOALS",
    "Estimate",
    "EstimateGoals",
    "EstimateLevels",
    "EstimateReport",
    "Estimating",
    "Goal",
    "GoalEstimate",
    "GoalsReport",
    "LevelsReport",
    "TensorEstimate",
    "estimate",
    "estimate_goals",
    "estimate_levels",
]

_NUMEL: Final = 1 << 23
"""Elements encoded in all: a few seconds."""

_LEAST_NUMEL: Final = 1 << 17
"""Elements of a step below which its ratio says little."""

_RUN_LENGTH: Final = 16
"""Steps of a stretch, where a run has more steps than can be encoded."""

_STRETCHES: Final = 3
"""Begin, middle and end: movement changes over a training."""


_N_TRIED: Final = 2
"""Steps of a trial of goals: a keyframe and the delta after it, the least that tells the sizes of both."""


class Goal(NamedTuple):
    """What an archive is for, and how a run is written for it.

    Parameters
    ----------
    name
        What it is called in documents and links.
    codec, optimizer
        As `inshrink_core.compress` takes them.
    """

    name: str
    codec: str
    optimizer: str

    @property
    def is_exact(self) -> bool:
        """Whether every bit comes back."""
        from inshrink_core.chain import is_exact

        return is_exact(self.codec, {}) and self.optimizer == "exact"


GOALS: Final = (
    Goal("exact", "lossless", "exact"),
    Goal("resume", DEFAULT_CODEC, "compressed"),
    Goal("weights", DEFAULT_CODEC, "drop"),
)
"""Going on bit for bit; going on; and weights alone, to evaluate or to begin another training from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateReport(Report):
    """Estimates of what a configuration does to a run; nothing here was measured on decoded states.

    Parameters
    ----------
    codec, config, overrides
        The configuration.
    ratio_total, ratio_weights
        Of the whole chain: of everything that is stored, and of the weights.
    drop, divergence
        Of the worst step; None where the trials at hand do not say.
    basis
        What drop and divergence rest on: ``trials`` of this run, or ``rule of thumb`` from other runs,
        uncalibrated (`inshrink_core.search.calibration`).
    rank_correlation
        Between what the model predicts of those trials and what was measured.
    n_trials
        Trials that the prediction is calibrated on.
    n_steps, sampled
        Steps encoded, and the share of their weights that was.
    seconds
        Wall time.
    notes
        What should be known.
    unseen
        What of the run's steps lies in no tensor, and hardly shrinks.
    device
        Where frames were encoded.
    tensors
        The same tensor by tensor, where that was asked for; those that were encoded.
    measured_at
        When it was estimated (Unix time), where that was known already.
    """

    codec: str
    config: Mapping[str, Any]
    overrides: tuple[Mapping[str, Any], ...]
    ratio_total: float | None
    ratio_weights: float
    drop: float | None
    divergence: float | None
    basis: str
    rank_correlation: float | None
    n_trials: int
    n_steps: int
    sampled: float
    seconds: float
    notes: tuple[str, ...] = ()
    unseen: Unseen
    device: str = "cpu"
    tensors: tuple[TensorEstimate, ...] = field(default=(), metadata=UNSAID)
    measured_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink estimate --json``; ``tensors`` only where they were asked for."""
        tensors = {"tensors": [one._asdict() for one in self.tensors]} if self.tensors else {}
        return {"estimate": True} | Report.to_json(self) | tensors

    def show(self, console: Console) -> None:
        """Print the estimates, and what they rest on."""
        drop, divergence = percent(self.drop), nats(self.divergence)
        known = self.n_trials > 0
        how = "" if known else ", uncalibrated"
        trials = f"{count(self.n_trials)} trials (rank correlation {plain(self.rank_correlation, 2)})"
        facts = [
            ("estimated ratio", f"{ratio(self.ratio_total)}  (of everything)"),
            ("of the weights", f"{ratio(self.ratio_weights)}"),
            ("estimated drop", f"{drop}  (of the worst step{how})"),
            ("estimated divergence", f"{divergence} nats  (of the worst step{how})"),
            ("calibrated on", trials if known else "nothing"),
            ("encoded", f"{self.sampled * 100:.0f} % of {self.n_steps} steps"),
            ("time", f"{duration(self.seconds)} on {self.device}"),
            known_fact(self.measured_at),
        ]
        show_facts(console, facts)
        show_notes(console, self.notes)
        if self.tensors:
            console.print()
            rows = (
                (printable(o.key), count(o.n_values), f"{o.bits_per_weight:.2f}", _short(o.sensitivity))
                for o in self.tensors
            )
            show_table(console, ("tensor", "values", "bits per weight", "sensitivity"), rows)


class TensorEstimate(NamedTuple):
    """What a configuration does to one weight or buffer.

    Parameters
    ----------
    key
        Which one.
    layer_type
        Its layer type; None for other buffers.
    n_values
        Its elements.
    bits_per_weight
        Stored bits of its blocks over its values and frames, keyframes in the proportion that the chain has
        them.
    sensitivity
        Mean squared gradient, or movement, of its values at the last step encoded; None where not known.
    damage
        ½ Σ h·e² at the worst step encoded; its squared error where no tensor has an h, None where others do.
    """

    key: str
    layer_type: str | None
    n_values: int
    bits_per_weight: float
    sensitivity: float | None
    damage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelsReport(Report):
    """Estimates of a codec from fine to coarse.

    Parameters
    ----------
    levels
        Configurations and what is estimated of each.
    """

    levels: tuple[tuple[Candidate, EstimateReport], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink estimate --levels --json``."""
        return {"estimate": True, "levels": [_row_of(*one) for one in self.levels]}

    def show(self, console: Console) -> None:
        """Print a row a configuration, and what the figures rest on."""
        rows = (
            (
                ", ".join(f"{name}={value}" for name, value in candidate.settings.items()),
                ratio(one.ratio_total),
                ratio(one.ratio_weights),
                percent(one.drop),
                nats(one.divergence),
            )
            for candidate, one in self.levels
        )
        headings = ("estimated", "ratio", "of the weights", "drop", "divergence")
        show_table(console, headings, rows, left=(0,))
        console.print()
        show_notes(console, dict.fromkeys(note for _, one in self.levels for note in one.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalEstimate(Report):
    """What a run would take for one goal, from a trial on two steps.

    Parameters
    ----------
    goal, codec, optimizer
        The goal (`Goal`).
    raw_bytes
        Raw bytes of what the archive would hold, over all steps.
    archive_bytes
        Estimated bytes of the archive.
    ratio_total, ratio_weights
        Raw bytes over stored bytes: of all that is held, and of its weights.
    bits_per_weight
        Stored bits of the weights for each weight of each step.
    relative_error
        Root of squared error over squared norm of the weights, the larger of the steps that were tried.
    drop, divergence, restore_cost
        Of the worst step; None where there is nothing but a rule of thumb.
    basis
        What these three rest on: ``exact``, nothing is lost; ``judged``, the evaluator at the steps that were
        tried, written as small as the bound allows; ``measured``, trials of a search with these settings;
        ``predicted``, by trials of other settings; ``unknown``, no trials are at hand.
    """

    goal: str
    codec: str
    optimizer: str
    raw_bytes: int
    archive_bytes: int
    ratio_total: float | None
    ratio_weights: float | None
    bits_per_weight: float | None
    relative_error: float
    drop: float | None
    divergence: float | None
    restore_cost: float | None
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalsReport(Report):
    """What a run would take for each of `GOALS`.

    Parameters
    ----------
    goals
        In their order.
    run_bytes
        Raw bytes of every tensor of the run's chosen steps: what there is before.
    steps
        Steps of the chain.
    tried
        The steps that were encoded.
    sampled
        Share of their weights that was.
    seconds
        Wall time.
    device
        Where they were encoded.
    bound
        What a restore may cost at most, of goals that lose something; None: they are written with the default
        settings.
    not_judged
        Why the evaluator's word says nothing of a restore's cost; empty where it does, or was not asked.
    evaluator_failed
        Whether that is because the evaluator itself failed, and not because of what it returns.
    measured_at
        When it was estimated (Unix time), where that was known already.
    """

    goals: tuple[GoalEstimate, ...]
    run_bytes: int
    steps: tuple[int, ...]
    tried: tuple[int, ...]
    sampled: float
    seconds: float
    device: str
    bound: float | None = None
    not_judged: str = ""
    evaluator_failed: bool = False
    measured_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink estimate --goals --json``."""
        return {"estimate": True} | Report.to_json(self)

    def show(self, console: Console) -> None:
        """Print a row a goal, and what the figures rest on."""
        rows = (
            (
                one.goal,
                size(self.run_bytes),
                size(one.archive_bytes),
                ratio(one.ratio_total),
                plain(one.bits_per_weight, 3),
                percent(one.restore_cost),
                one.basis,
            )
            for one in self.goals
        )
        headings = ("goal", "before", "after", "ratio", "bits per weight", "restore cost", "which is")
        show_table(console, headings, rows, left=(0, 6))
        console.print()
        tried = ", ".join(map(count, self.tried))
        facts = [
            ("estimated from", f"steps {tried}, {self.sampled * 100:.0f} % of their weights"),
            ("not judged", printable(self.not_judged)),
            ("restore cost, at most", "" if self.bound is None else f"{percent(self.bound)} of the loss"),
            ("time", f"{duration(self.seconds)} on {self.device}"),
            known_fact(self.measured_at),
        ]
        show_facts(console, facts)


def _short(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def _row_of(candidate: Candidate, report: EstimateReport) -> dict[str, Any]:
    """Return the document of one estimate of several, with what its configuration alone sets."""
    return {"set": candidate.document(), **report.to_json()}


@dataclass(frozen=True, kw_only=True)
class Estimating(Stepping, Computing, Reading):
    """What an estimate is of.

    Parameters
    ----------
    trials
        Trials of a search, which say what an error costs; by default the run's own.
    """

    trials: Annotated[PathLike | None, Option(metavar="FILE")] = None

    def known(self, run: Run) -> tuple[Trial, ...]:
        """Return the trials at hand."""
        from inshrink_core.search.search import known_trials

        return known_trials(run, None if self.trials is None else Path(self.trials))


@dataclass(frozen=True, kw_only=True)
class _Configured(Writing, Estimating):
    """What an estimate of configurations is of.

    Parameters
    ----------
    by_tensor
        Also report bits, sensitivity and damage of every tensor that was encoded.
    """

    by_tensor: bool = False

    def asked(self, run: Run | PathLike) -> _Asked:
        """Return what it all comes to."""
        from inshrink_core.chain import FrameEncoder
        from inshrink_core.search.measure import sample_keys
        from inshrink_core.search.search import choose_steps

        chain = self.chain_config(device=self.device, threads=self.threads)
        opened = self.opened_run(run).attributed()
        chosen = choose_steps(opened, steps_of(opened, self.steps))
        stretches = _stretches(chosen)
        numel = max(_LEAST_NUMEL, _NUMEL // sum(map(len, stretches)))
        known = self.known(opened)
        keys = sample_keys(opened[chosen[0]], numel)
        # What is seen ahead does not depend on the knob, so that all levels share it.
        foreseen = FrameEncoder(chain).look_ahead(chosen, opened.__getitem__)
        return _Asked(chain, opened, chosen, stretches, keys, known, foreseen)


@dataclass(frozen=True)
class Estimate(Asking, _Configured, Request[EstimateReport]):
    """Estimate the ratio and the drop of a configuration; nothing is measured.

    Parameters
    ----------
    run
        The run it would be of.

    Raises
    ------
    InputError
        The log is one of another run, or the configuration cannot be used.

    Notes
    -----
    Encodes a sample of the tensors, of every layer type, in closed loop; at most `_NUMEL` elements, unless
    the steps are large. Drop and divergence come from ½ Σ h·e² and trials of the same steps, of the same
    codec where there are any (`inshrink_core.search.calibration.Calibration`). They equal the measurement
    where this configuration was measured, and are corrected in the same way near it. Without trials they are
    rules of thumb, right to an order of magnitude at best.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.verbs.estimate(run, config={"coarseness": 4}, steps=run.steps[-3:])
    >>> report.ratio_total > 5
    True
    """

    run: RunLike

    EXAMPLES: ClassVar = (
        "inshrink estimate runs/digits --config my.toml",
        "inshrink estimate runs/digits --set coarseness=4 --trials search.trials.jsonl",
    )
    UNIT: ClassVar = "steps"

    def perform(self) -> EstimateReport:
        """Estimate it."""
        asked = self.asked(self.run)
        store, question = Measurements.of_run(asked.run, make=True), asked.question(self.by_tensor)
        known = None if self.again else store.find("estimate", question)
        report = None if known is None else answer_as(EstimateReport, known, tensors=TensorEstimate)
        if report is None:
            report = _estimated(asked, self.by_tensor, self.progress)
            store.add("estimate", question, report.to_json())
        return report


estimate = python_call(Estimate)


@dataclass(frozen=True)
class EstimateLevels(_Configured, Request[LevelsReport]):
    """Estimate a codec from fine to coarse.

    Parameters
    ----------
    run
        The run it would be of.
    levels
        Estimate the codec from fine to coarse instead, in at most so many configurations; what a level turns
        replaces what is set.

    Raises
    ------
    InputError
        As `estimate`; or the codec has nothing to turn.

    Notes
    -----
    Progress has the row of the document of each.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> fine, coarse = inshrink_core.verbs.estimate_levels(run, levels=2, steps=run.steps[-2:]).levels
    >>> fine[1].ratio_weights < coarse[1].ratio_weights
    True
    """

    run: RunLike
    _: KW_ONLY
    levels: Annotated[int, Option(least=1)] = 7

    UNIT: ClassVar = "steps"

    def perform(self) -> LevelsReport:
        """Estimate each."""
        from inshrink_core.search.space import space_of

        asked = self.asked(self.run)
        layers = frozenset(one.layer for one in asked.run[asked.steps[0]].specs if one.role in MODEL_ROLES)
        candidates = space_of(asked.chain.codec, layers).levels(self.levels)
        found = []
        for done, candidate in enumerate(candidates, start=1):
            one = asked._replace(chain=candidate.chain_config(asked.chain))
            found.append((candidate, _estimated(one, self.by_tensor)))
            if self.progress is not None:
                n = found[-1][1].n_steps
                row = _row_of(*found[-1])
                self.progress(Progress("estimate", done * n, len(candidates) * n, asked.steps[-1], found=row))
        return LevelsReport(levels=tuple(found))


estimate_levels = python_call(EstimateLevels)


@dataclass(frozen=True)
class EstimateGoals(Asking, EvaluatorRequest, Estimating, Request[GoalsReport]):
    """Try two steps for three goals instead: to resume exactly, to resume, weights alone.

    Parameters
    ----------
    run
        The run it would be of.
    keyframe_every
        Frames from one keyframe to the next; by default 32.
    max_restore_cost
        Judge the two steps too, each written as small as keeps this bound, as a share of the loss; 0.003
        where there is an evaluator.

    Raises
    ------
    InputError
        As `estimate`.
    EvaluatorError, UntrustedCodeError
        The evaluator failed, or may not run.

    Notes
    -----
    The goals are `GOALS`; progress has the row of the document of each, the quickest first, and once more of
    those that are judged. Two steps in the middle of the chain are encoded, a keyframe and the delta after
    it; of models of more than `_NUMEL` elements a sample of the tensors, where nothing is judged. Sizes of
    the whole chain are those of the two in the proportion that it has them.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> exact, resume, weights = inshrink_core.verbs.estimate_goals(run).goals
    >>> exact.archive_bytes > resume.archive_bytes > weights.archive_bytes
    True
    """

    run: RunLike
    _: KW_ONLY
    keyframe_every: Annotated[int, Option(least=1)] = 32
    max_restore_cost: Annotated[float | None, Option(metavar="FRACTION", least=0)] = None

    UNIT: ClassVar = "steps"

    def perform(self) -> GoalsReport:
        """Estimate what each goal takes."""
        from inshrink_core.chain import FrameEncoder
        from inshrink_core.search.bounds import Bounds
        from inshrink_core.search.measure import middle_of, sample_keys
        from inshrink_core.search.search import choose_steps

        begun = time.perf_counter()
        opened = self.opened_run(self.run).attributed()
        chosen = choose_steps(opened, steps_of(opened, self.steps))
        tried = tuple(middle_of(chosen, _N_TRIED))
        known, bound = self.known(opened), self._bound()
        store, question = Measurements.of_run(opened, make=True), self._question(opened, chosen, known, bound)
        kept = None if self.again else store.find("goals", question)
        report = None if kept is None else answer_as(GoalsReport, kept)
        if report is not None:
            for done, one in enumerate(report.goals, start=1):
                self._tell(one, done, len(report.goals), tried[-1])
            return report
        keys = sample_keys(opened[tried[0]], _NUMEL // _N_TRIED)
        asked_of: dict[str, _Asked] = {}
        found: dict[str, GoalEstimate] = {}
        judged = [goal for goal in GOALS if not goal.is_exact] if bound is not None else []
        total = len(GOALS) + len(judged)
        for goal in reversed(GOALS):  # The less is kept, the sooner it is known.
            written = Writing(codec=goal.codec, optimizer=goal.optimizer, keyframe_every=self.keyframe_every)
            chain = written.chain_config(device=self.device, threads=self.threads)
            foreseen = FrameEncoder(chain).look_ahead(chosen, opened.__getitem__, keys)
            asked_of[goal.name] = _Asked(chain, opened, chosen, [tried], keys, known, foreseen)
            found[goal.name] = _goal(goal, asked_of[goal.name])
            self._tell(found[goal.name], len(found), total, tried[-1])
        within, not_judged, has_failed = None, "", False
        if judged:
            try:  # Weights are written alike, whatever becomes of the optimizer's state.
                within = _judged(asked_of[judged[0].name], self, Bounds(max_restore_cost=bound))
            except InputError as error:  # What it returns tells no cost.
                bound, not_judged, has_failed = None, str(error), isinstance(error, EvaluatorError)
        if within is not None:
            for done, goal in enumerate(reversed(judged), start=len(GOALS) + 1):
                found[goal.name] = _with_judged(found[goal.name], within, asked_of[goal.name])
                self._tell(found[goal.name], done, total, tried[-1])
        report = GoalsReport(
            goals=tuple(found[goal.name] for goal in GOALS),
            run_bytes=sum(opened[step].raw_bytes() for step in chosen),
            steps=chosen,
            tried=tried,
            sampled=_share(opened[tried[0]].specs, keys),
            seconds=time.perf_counter() - begun,
            device=chain.device,
            bound=bound,
            not_judged=not_judged,
            evaluator_failed=has_failed,
        )
        store.add("goals", question, report.to_json())
        return report

    def _bound(self) -> float | None:
        """Return what a restore may cost, where that is to be judged."""
        from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST

        is_judged = self.evaluator is not None or self.trust_run
        return (
            DEFAULT_MAX_RESTORE_COST if self.max_restore_cost is None and is_judged else self.max_restore_cost
        )

    def _question(
        self, run: Run, steps: Sequence[int], known: Sequence[Trial], bound: float | None
    ) -> dict[str, Any]:
        """Return what the estimates depend on, beside the run."""
        question = {"steps": list(steps), "keyframe_every": self.keyframe_every, **_basis(known)}
        if bound is not None:
            with self.resolve(run) as judge:
                asked = EvaluatorId.of(judge)
            question |= {"bound": bound, "evaluator": asked.digest, "name": asked.name}
        return question

    def _tell(self, found: GoalEstimate, done: int, total: int, step: int) -> None:
        if self.progress is not None:
            self.progress(Progress("estimate", done, total, step, found=found.to_json()))


estimate_goals = python_call(EstimateGoals)


def _goal(goal: Goal, asked: _Asked) -> GoalEstimate:
    """Estimate what a goal takes."""
    from inshrink_core.metrics import bits_per_parameter

    guess = _Guess.of(asked)
    rest = _rest(asked, _N_TRIED)
    specs = [spec for spec in asked.run[asked.steps[0]].specs if spec.role in MODEL_ROLES]
    basis, cost = "unknown", None
    if goal.is_exact:
        basis, cost = "exact", 0.0
    elif guess.calibration.n_trials:
        basis = "predicted" if guess.measured is None else "measured"
        cost = _restore_cost(asked.known, guess)
    lost = 0.0 if goal.is_exact else None
    return GoalEstimate(
        goal=goal.name,
        codec=goal.codec,
        optimizer=goal.optimizer,
        raw_bytes=round(guess.raw + rest.raw),
        archive_bytes=round(guess.nbytes + rest.nbytes),
        ratio_total=rest.ratio_total(guess.raw, guess.nbytes),
        ratio_weights=guess.raw / guess.nbytes if guess.nbytes else None,
        bits_per_weight=bits_per_parameter(
            round(guess.nbytes), len(asked.steps) * sum(spec.numel for spec in specs)
        ),
        relative_error=max(row.relative_error for row in guess.rows),
        drop=lost if basis in ("exact", "unknown") else guess.drop,
        divergence=lost if basis in ("exact", "unknown") else guess.divergence,
        restore_cost=cost,
        basis=basis,
    )


class _Judged(NamedTuple):
    """The steps that were tried, written as small as keeps a bound: their bytes, and the worst.

    `weights` and `rest` have those of the keyframe and of the deltas after it.
    """

    weights: tuple[list[int], list[int]]
    rest: tuple[list[int], list[int]]
    drop: float | None
    divergence: float | None
    restore_cost: float | None
    n_weights: int


def _judged(asked: _Asked, judging: EvaluatorRequest, bounds: Bounds) -> _Judged:
    """Write the steps that are tried under a bound, somewhere temporary, and have them judged."""
    from inshrink_core.archive import ArchiveWriter
    from inshrink_core.chain import ChainWriter, archive_size
    from inshrink_core.frame import FrameKind
    from inshrink_core.search.bounded import open_bounded

    (tried,), run = asked.stretches, asked.run
    steps = tuple(tried)
    with (
        tempfile.TemporaryDirectory(prefix="inshrink-goals-") as folder,
        open_bounded(run, steps, asked.chain, bounds, judging) as bounded,
        ArchiveWriter(Path(folder) / "tried.inshrink", create=True) as writer,
    ):
        # What a restore may cost follows the learning rate, of which these steps do not tell the largest.
        for step in asked.steps[: asked.steps.index(steps[0])]:
            bounded.promises.saw(run[step])
        chain = ChainWriter(writer, asked.chain)
        chain.initial_memory = asked.foreseen
        for step in steps:
            bounded.append(chain, run[step])
        sizes = archive_size(chain.archive)
        told = bounded.promise.to_json()
    weights: tuple[list[int], list[int]] = [], []
    rest: tuple[list[int], list[int]] = [], []
    for frame in sizes.frames:
        is_delta = frame.info.kind is not FrameKind.KEYFRAME
        weights[is_delta].append(frame.weights_nbytes)
        rest[is_delta].append(frame.info.nbytes - frame.weights_nbytes)
    largest = {name: told[f"max_{name}"] for name in ("drop", "divergence", "restore_cost")}
    return _Judged(weights, rest, n_weights=sizes.frames[0].n_weights, **largest)


def _with_judged(found: GoalEstimate, judged: _Judged, asked: _Asked) -> GoalEstimate:
    """Return what a goal takes where its weights are written as they were judged.

    How coarse weights are decides how coarse optimizer state is: what the judged frames hold of it counts.
    """
    from inshrink_core.metrics import bits_per_parameter
    from inshrink_core.search.measure import Rest, in_proportion

    n_steps = len(asked.steps)
    nbytes = in_proportion(*judged.weights, n_steps, asked.chain.keyframe_every)
    raw = sum(one.nbytes for one in asked.run[asked.steps[0]].specs if one.role in MODEL_ROLES) * n_steps
    without = 0.0 if found.ratio_weights is None else found.archive_bytes - raw / found.ratio_weights
    stored = in_proportion(*judged.rest, n_steps, asked.chain.keyframe_every)
    rest = Rest(found.raw_bytes - raw, without if found.optimizer == "drop" else stored)
    return replace(
        found,
        archive_bytes=round(nbytes + rest.nbytes),
        ratio_total=rest.ratio_total(raw, nbytes),
        ratio_weights=raw / nbytes if nbytes else None,
        bits_per_weight=bits_per_parameter(round(nbytes), n_steps * judged.n_weights),
        drop=judged.drop,
        divergence=judged.divergence,
        restore_cost=judged.restore_cost,
        basis="judged",
    )


def _restore_cost(known: Sequence[Trial], guess: _Guess) -> float | None:
    """Return the restore cost of the worst step: as measured, or by what trials paid for a divergence."""
    if guess.measured is not None:
        costs = [trial.restore_cost for trial in guess.measured.trials]
        return max((cost for cost in costs if cost is not None), default=None)
    prices = [
        one.restore_cost / one.divergence for one in known if one.restore_cost is not None and one.divergence
    ]
    return statistics.median(prices) * guess.divergence if prices and guess.divergence is not None else None


class _Asked(NamedTuple):
    """What is estimated: a configuration, on a run, steps, stretches of them and sampled tensors of it.

    `known` are trials, and `foreseen` is what the encoder knows of later steps.
    """

    chain: ChainConfig
    run: Run
    steps: tuple[int, ...]
    stretches: list[Sequence[int]]
    keys: frozenset[str]
    known: tuple[Trial, ...]
    foreseen: Any

    def question(self, by_tensor: bool) -> dict[str, Any]:
        """Return what an estimate depends on, beside the run."""
        chain = {"config": self.chain.record(), "keyframe_every": self.chain.keyframe_every}
        return {**chain, "steps": list(self.steps), "by_tensor": by_tensor, **_basis(self.known)}


def _basis(known: Sequence[Trial]) -> dict[str, Any]:
    """Return what tells estimates of this version, calibrated on these trials, from others."""
    from importlib.metadata import version

    from inshrink_core.execution import key_digest

    return {
        "version": version("inshrink"),
        "trials": key_digest({"trials": [trial.to_json() for trial in known]}),
    }


class _Guess(NamedTuple):
    """What a configuration does to the weights of a chain: steps that were encoded, and what follows of them.

    `measured` is the chain as trials have measured it in full, whose figures these are then.
    """

    rows: list[_Row]
    raw: float
    nbytes: float
    drop: float | None
    divergence: float | None
    calibration: Calibration
    measured: Chain | None

    @classmethod
    def of(cls, asked: _Asked, progress: OnProgress | None = None) -> _Guess:
        from inshrink_core.search.calibration import calibrate
        from inshrink_core.search.measure import in_proportion

        chain, chosen, known = asked.chain, asked.steps, asked.known
        rows: list[_Row] = []
        for row in itertools.chain.from_iterable(_encode(asked, stretch) for stretch in asked.stretches):
            rows.append(row)
            if progress is not None:
                progress(Progress("estimate", len(rows), sum(map(len, asked.stretches)), row.step))
        calibration = calibrate([one for one in known if one.config.get("codec") == chain.codec])
        if not calibration.n_trials:
            calibration = calibrate(known)
        measured = _measured(known, chain, chosen)
        raw: float
        nbytes: float
        if measured is not None:
            drop, divergence = measured.drop, measured.divergence
            raw = sum(trial.raw_weights for trial in measured.trials)
            nbytes = sum(trial.weights_nbytes for trial in measured.trials)
        else:
            drop, divergence = _figures(calibration, chain, rows)
            raw = len(chosen) * sum(row.raw for row in rows) / len(rows)
            keyframes = [row.nbytes for row in rows if row.keyframe]
            deltas = [row.nbytes for row in rows if not row.keyframe]
            nbytes = in_proportion(keyframes, deltas, len(chosen), chain.keyframe_every)
        return cls(rows, raw, nbytes, drop, divergence, calibration, measured)


def _rest(asked: _Asked, n: int | None = None) -> Rest:
    """Estimate what is not weights, from a few steps in the middle of the chain."""
    from inshrink_core.search.measure import estimate_rest, middle_of

    few = middle_of(asked.steps) if n is None else middle_of(asked.steps, n)
    return estimate_rest(
        asked.chain, [asked.run[step] for step in few], len(asked.steps), asked.keys, asked.foreseen
    )


def _share(specs: Sequence[TensorSpec], keys: frozenset[str]) -> float:
    """Return the share of the model's elements that a sample has."""
    model = [spec for spec in specs if spec.role in MODEL_ROLES]
    return sum(spec.numel for spec in model if spec.key in keys) / max(1, sum(spec.numel for spec in model))


def _estimated(asked: _Asked, by_tensor: bool, progress: OnProgress | None = None) -> EstimateReport:
    """Estimate what a configuration does."""
    begun = time.perf_counter()
    chain = asked.chain
    guess = _Guess.of(asked, progress)
    rest = _rest(asked)
    unseen = Unseen.of(layout for step in asked.steps for layout in asked.run[step].files)
    n_trials = guess.calibration.n_trials
    specs = [spec for spec in asked.run[asked.steps[0]].specs if spec.role in MODEL_ROLES]
    return EstimateReport(
        codec=chain.codec,
        config=chain.record()["config"],
        overrides=tuple(one.to_json() for one in chain.overrides),
        ratio_total=rest.ratio_total(guess.raw, guess.nbytes),
        ratio_weights=guess.raw / guess.nbytes if guess.nbytes else 0.0,
        drop=guess.drop,
        divergence=guess.divergence,
        basis="trials" if n_trials else "rule of thumb",
        rank_correlation=guess.calibration.rank_correlation,
        n_trials=n_trials,
        n_steps=len(guess.rows),
        sampled=_share(asked.run[asked.steps[0]].specs, asked.keys),
        seconds=time.perf_counter() - begun,
        notes=(*(() if n_trials else (_UNCALIBRATED,)), *([unseen.text] if unseen.text else [])),
        unseen=unseen,
        device=chain.device,
        tensors=tuple(_by_tensor(specs, guess.rows, len(asked.steps), chain.keyframe_every))
        if by_tensor
        else (),
    )


def _by_tensor(
    specs: Sequence[TensorSpec], rows: Sequence[_Row], n_steps: int, keyframe_every: int
) -> Iterator[TensorEstimate]:
    """Yield what happens to each tensor that was encoded at every step."""
    from inshrink_core.search.measure import in_proportion

    weighed = any(row.sensitivities for row in rows)
    for spec in specs:
        there = [row for row in rows if spec.key in row.nbytes_of]
        if not there or not spec.numel:
            continue
        keyframes, deltas = (
            [row.nbytes_of[spec.key] for row in there if row.keyframe is k] for k in (True, False)
        )
        nbytes = in_proportion(keyframes or deltas, deltas, n_steps, keyframe_every)
        h = [row.sensitivities[spec.key] for row in there if spec.key in row.sensitivities]
        damages = [
            0.5 * row.sensitivities[spec.key] * row.squared_errors[spec.key]
            if weighed
            else row.squared_errors[spec.key]
            for row in there
            if not weighed or spec.key in row.sensitivities
        ]
        yield TensorEstimate(
            key=spec.key,
            layer_type=None if spec.layer is None else str(spec.layer),
            n_values=spec.numel,
            bits_per_weight=8 * nbytes / (spec.numel * n_steps),
            sensitivity=h[-1] if h else None,
            damage=max(damages, default=None),
        )


_UNCALIBRATED: Final = (
    "drop and divergence are estimated, uncalibrated: rules of thumb from other runs, right to an order of"
    " magnitude at best, for no trials tell what an error costs here; `inshrink search` makes some"
)


class _Row(NamedTuple):
    """One step, from its sample."""

    step: int
    raw: int
    nbytes: float
    damage: float | None
    relative_error: float
    keyframe: bool
    nbytes_of: Mapping[str, int]
    squared_errors: Mapping[str, float]
    sensitivities: Mapping[str, float]


def _stretches(steps: Sequence[int]) -> list[Sequence[int]]:
    """Return all steps, or stretches of a long run: its begin, its end, and between."""
    if len(steps) <= _RUN_LENGTH * _STRETCHES:
        return [steps]
    room = len(steps) - _RUN_LENGTH
    begins = [room * number // (_STRETCHES - 1) for number in range(_STRETCHES)]
    return [steps[begin : begin + _RUN_LENGTH] for begin in begins]


def _encode(asked: _Asked, steps: Sequence[int]) -> Iterator[_Row]:
    """Encode a stretch of a run in closed loop."""
    from inshrink_core.search.measure import encode_chain, scaled_damage, scaled_nbytes
    from inshrink_core.search.quadratic import sensitivities

    chain, run, keys = asked.chain, asked.run, asked.keys
    encoded = encode_chain(chain, (run[step] for step in steps), keys, asked.foreseen)
    before = None
    for number, (step, one) in enumerate(zip(steps, encoded, strict=True)):
        checkpoint = run[step]
        h = sensitivities(checkpoint, before, keys)
        yield _Row(
            step,
            checkpoint.raw_bytes(MODEL_ROLES),
            scaled_nbytes(one, checkpoint),
            scaled_damage(one, checkpoint, h),
            one.relative_error,
            number % chain.keyframe_every == 0,
            one.nbytes,
            one.squared_errors,
            h,
        )
        before = checkpoint


def _measured(trials: Sequence[Trial], chain: ChainConfig, steps: Sequence[int]) -> Chain | None:
    """Return the chain of a configuration that was measured in full; None where a step is missing."""
    from inshrink_core.search.search import Chain
    from inshrink_core.search.space import Candidate

    same: dict[str, bool] = {}
    found: dict[int, Trial] = {}
    for one in trials:
        key = json.dumps(one.config, sort_keys=True)
        if key not in same:
            same[key] = one.config.get("codec") == chain.codec and _is_config(one.config, chain)
        if same[key] and not one.failure and one.partial is None:
            found[one.step] = one
    if not set(steps) <= set(found):
        return None
    return Chain(
        candidate=Candidate(codec=chain.codec), trials=tuple(found[step] for step in steps), whole=True
    )


def _is_config(document: Mapping[str, Any], chain: ChainConfig) -> bool:
    """Whether a trial's configuration says what a chain is written with."""
    from inshrink_core.chain.defaults import make_configs

    settings = {**document["settings"], "overrides": document.get("override", [])}
    try:
        return make_configs(chain.codec, settings) == (chain.config, chain.overrides)
    except InputError:  # settings of another version
        return False


def _figures(
    calibration: Calibration, chain: ChainConfig, rows: Sequence[_Row]
) -> tuple[float | None, float | None]:
    """Return drop and divergence of the worst step, by trials where there are any."""
    from inshrink_core.search.calibration import prior_of

    if calibration.n_trials:
        return _worst(calibration, "drop", rows), _worst(calibration, "divergence", rows)
    return prior_of(chain, max(row.relative_error for row in rows))


def _worst(calibration: Calibration, figure: str, rows: Sequence[_Row]) -> float | None:
    predicted = [calibration.predict(figure, row.step, row.damage) for row in rows]
    return max((value for value in predicted if value is not None), default=None)
