"""Estimates of what configurations do to a run: seconds each, without measuring one."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Unseen
from inshrink_core.errors import EvaluatorError, InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.progress import Counter, Progress
from inshrink_core.report import UNSAID, Report, plain_value
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import (
    Computing,
    PathLike,
    Reading,
    RunLike,
    Stepping,
    Writing,
    steps_of,
)
from inshrink_core.verbs.shared.measured import Asking, EvaluatorId, Measurements, read_as
from inshrink_core.verbs.shared.values import given_settings, parse_settings

if TYPE_CHECKING:
    from inshrink_core.chain import ArchiveSize, ChainConfig, FrameSize
    from inshrink_core.checkpoint import TensorSpec
    from inshrink_core.formats import Run
    from inshrink_core.search.quadratic import Calibration
    from inshrink_core.search.trials import Trial


_NUMEL: Final = 1 << 23
"""Elements encoded in all: a few seconds."""

_LEAST_NUMEL: Final = 1 << 17
"""Elements of a step below which its ratio says little."""

_TENSORS: Final = 4000
"""Tensors encoded in all, some milliseconds each, however small they are."""

_LEAST_TENSORS: Final = 64
"""Tensors of a step, where it has so many."""

_RUN_LENGTH: Final = 16
"""Steps of a stretch, where a run has more steps than can be encoded."""

_STRETCHES: Final = 3
"""Begin, middle and end: movement changes over a training."""


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
        uncalibrated (`inshrink_core.search.quadratic`).
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
    archive
        What an archive takes and costs, where so many steps were tried.
    set
        Of one of several: codec, settings and optimizer that were asked for.
    each
        The other configurations, in their order.
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
    archive: ArchiveEstimate | None = field(default=None, metadata=UNSAID)
    set: Mapping[str, Any] = field(default_factory=dict, metadata=UNSAID)
    each: tuple[EstimateReport, ...] = field(default=(), metadata=UNSAID)
    measured_at: float | None = None

    SHOWS: ClassVar = (
        "estimated=estimated basis n_trials rank_correlation n_steps sampled tried=archive.tried "
        "not_judged=archive.not_judged seconds device measured_at tensors"
    )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink estimate --json``; parts only where they were asked for."""
        parts = {name: getattr(self, name) for name in ("tensors", "archive", "set", "each")}
        there = {name: plain_value(value) for name, value in parts.items() if value}
        return {"estimate": True} | Report.to_json(self) | there

    @property
    def estimated(self) -> list[dict[str, Any]]:
        """A row for each configuration; one alone has a name, too."""
        figures = ("ratio_total", "ratio_weights", "drop", "divergence")
        rows = []
        for row in (self, *self.each):
            asked = {**row.set, **row.set.get("settings", {})}
            words = [f"{k}={v}" for k, v in asked.items() if k not in ("codec", "settings")]
            found: dict[str, Any] = {"estimated": " ".join([row.codec, *words])}
            found |= {name: getattr(row, name) for name in figures}
            if row.archive is not None:
                found |= {name: getattr(row.archive, name) for name in ("nbytes", "restore_cost", "basis")}
            rows.append(found)
        return rows

    def remarks(self) -> Iterator[str]:
        """Yield the notes."""
        yield from (f"note: {note}" for note in self.notes)


@dataclass(frozen=True, slots=True)
class TensorEstimate:
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
class ArchiveEstimate:
    """What an archive of the chain takes, and what a restore from it costs.

    Parameters
    ----------
    run_bytes
        Raw bytes of every tensor of the chosen steps.
    tried
        The steps that were encoded.
    raw_bytes, nbytes
        Raw bytes of what the archive holds, and its size.
    bits_per_weight
        Stored bits of the weights for each weight of each step.
    relative_error
        Root of squared error over squared norm of the weights, the largest of the steps that were tried.
    restore_cost
        Of the worst step; None where nothing tells it.
    basis
        What the restore cost rests on: ``exact``, nothing is lost; ``judged``, the evaluator at the steps
        that were tried, written as small as the bound allows; ``predicted``, by trials of a search;
        ``unknown``, no trials are at hand.
    bound
        What a restore may cost at most; None: the settings decide.
    not_judged
        Why the evaluator tells no restore cost; empty where it does, or was not asked.
    evaluator_failed
        Whether that is because the evaluator itself failed, and not because of what it returns.
    """

    run_bytes: int
    tried: tuple[int, ...]
    raw_bytes: int
    nbytes: int
    bits_per_weight: float | None
    relative_error: float
    restore_cost: float | None
    basis: str
    bound: float | None = None
    not_judged: str = ""
    evaluator_failed: bool = False


@dataclass(frozen=True)
class Estimate(Stepping, Asking, EvaluatorRequest, Writing, Computing, Reading, Request[EstimateReport]):
    """Estimate the ratio and the drop of a configuration, or of several; nothing is measured.

    Parameters
    ----------
    run
        The run it would be of.
    each
        Estimate another configuration too: settings, a codec or an optimizer that replace those given, as
        codec=uniform,bits=4; may be repeated.
    tried
        Encode so many steps in the middle of the run alone, and tell what an archive takes.
    max_restore_cost
        With --try and an evaluator: judge these steps, each written as small as keeps this bound.
    by_tensor
        Also report bits, sensitivity and damage of every tensor that was encoded.
    trials
        Trials of a search, which say what an error costs; by default the run's own.

    Raises
    ------
    InputError
        The log is one of another run, or the configuration cannot be used.
    UntrustedCodeError
        The evaluator may not run.

    Notes
    -----
    Encodes a sample of the tensors, of every layer type, in closed loop; at most `_NUMEL` elements, unless
    the steps are large. Drop and divergence come from ½ Σ h·e² and trials of the same steps, of the same
    codec where there are any (`inshrink_core.search.quadratic.Calibration`): near the measurement where a
    configuration was measured, and corrected in the same way beside it. Without trials they are
    rules of thumb, right to an order of magnitude at best. Of several configurations, progress has the
    document of each.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> fine = inshrink_core.verbs.estimate(
    ...     run, config={"coarseness": 1}, each=["coarseness=4"], steps=run.steps[-3:]
    ... )
    >>> 5 < fine.ratio_weights < fine.each[0].ratio_weights
    True
    """

    run: RunLike
    _: KW_ONLY
    each: Annotated[Sequence[str], Option(metavar="NAME=VALUE,…", many=True)] = ()
    tried: Annotated[int | None, Option(("--try",), metavar="N", least=1)] = None
    max_restore_cost: Annotated[float | None, Option(metavar="FRACTION", least=0)] = None
    by_tensor: bool = False
    trials: Annotated[PathLike | None, Option(metavar="FILE")] = None

    EXAMPLES: ClassVar = (
        "inshrink estimate runs/digits --config my.toml",
        "inshrink estimate runs/digits --set coarseness=4 --trials search.trials.jsonl",
        "inshrink estimate runs/digits --codec uniform --set bits=8 --each bits=4 --each bits=2",
        "inshrink estimate runs/digits --try 2 --each codec=lossless,optimizer=exact --each optimizer=drop",
    )
    UNIT: ClassVar = "steps"

    def perform(self) -> EstimateReport:
        """Estimate each."""
        from inshrink_core.search.search import choose_steps, known_trials

        begun = time.perf_counter()
        if self.max_restore_cost is not None and self.tried is None:
            raise InputError("--max-restore-cost goes with --try", remedy="add --try 2")
        opened = self.opened_run(self.run).attributed()
        chosen = choose_steps(opened, steps_of(opened, self.steps))
        known = known_trials(opened, None if self.trials is None else Path(self.trials))
        writings = [_Asked.of(self, text) for text in (("", *self.each) if self.each else ("",))]
        store, question = (
            Measurements.of_run(opened, make=True),
            self._question(opened, chosen, writings, known),
        )
        found = None if self.again else store.find("estimate", question)
        known_at = {} if found is None else found.document | {"measured_at": found.at}
        report = read_as(EstimateReport, known_at) if known_at else None
        if report is None:
            sample = _Sample.of(opened, chosen, self.tried, known, len(writings))
            first, *others = self._estimated(sample, writings)
            seconds = time.perf_counter() - begun
            report = replace(first, each=tuple(others), seconds=seconds if others else first.seconds)
            store.add("estimate", question, report.to_json())
        return report

    def _estimated(self, sample: _Sample, writings: Sequence[_Asked]) -> list[EstimateReport]:
        """Estimate each configuration, then have those judged that lose something."""
        found: list[EstimateReport] = []
        n = sum(map(len, sample.stretches))
        total = n * len(writings) * (1 if self.max_restore_cost is None else 2)

        def tell(row: EstimateReport, done: int) -> None:
            if self.progress is not None and len(writings) > 1:
                found = row.to_json()
                self.progress(Progress("estimate", done * n, total, sample.steps[-1], found=found))

        for writing in writings:
            found.append(_estimate(sample, writing, self))
            tell(found[-1], len(found))
        if self.max_restore_cost is None:
            return found
        # Weights are written alike, whatever becomes of the optimizer's state.
        alike = [at for at, row in enumerate(found) if _weights(row) == _weights(found[0])]
        lossy = [at for at in alike if _tried(found[at]).basis != "exact"]
        chains = sorted((writings[at].chain for at in lossy), key=lambda entry: entry.optimizer == "drop")
        about: dict[str, Any] = {"bound": self.max_restore_cost}
        try:
            judged = _judged(sample, chains[0], self, self.max_restore_cost) if chains else None
        except InputError as error:  # What it returns tells no cost.
            judged = None
            about = {"not_judged": str(error), "evaluator_failed": isinstance(error, EvaluatorError)}
        found = [replace(row, archive=replace(_tried(row), **about)) for row in found]
        if judged is not None:
            for done, at in enumerate(lossy, start=len(found) + 1):
                found[at] = _with_judged(found[at], judged, sample, writings[at].chain)
                tell(found[at], done)
        return found

    def _question(
        self, run: Run, steps: Sequence[int], writings: Sequence[_Asked], known: Sequence[Trial]
    ) -> dict[str, Any]:
        """Return what the estimates depend on, beside the run."""
        from importlib.metadata import version

        from inshrink_core.execution import key_digest

        first, *others = (
            {"config": writing.chain.record(), "keyframe_every": writing.chain.keyframe_every}
            for writing in writings
        )
        question = first | {"steps": list(steps), "by_tensor": self.by_tensor, "version": version("inshrink")}
        question["trials"] = key_digest({"trials": [trial.to_json() for trial in known]})
        if others or self.tried is not None:
            question |= {"each": others, "tried": self.tried}
        if self.max_restore_cost is not None:
            with self.resolve(run) as judge:
                asked = EvaluatorId.of(judge)
            question |= {"bound": self.max_restore_cost, "evaluator": asked.digest, "name": asked.name}
        return question


estimate = python_call(Estimate)


class _Asked(NamedTuple):
    """How a chain would be written, and what of it was asked for as one of several."""

    chain: ChainConfig
    set: Mapping[str, Any]

    @classmethod
    def of(cls, asked: Estimate, text: str) -> _Asked:
        """Return what a request asks with some of its settings replaced."""
        given = parse_settings(text.split(",") if text else ())
        codec, optimizer = given.pop("codec", None), given.pop("optimizer", asked.optimizer)
        settings = given if codec else {**given_settings({}, asked.settings), **given}
        config = None if codec else asked.config
        written = replace(
            asked, codec=codec or asked.codec, config=config, settings=settings, optimizer=optimizer
        )
        chain, chosen = (
            written.chain_config(device=asked.device, threads=asked.threads),
            written.chosen().config,
        )
        settings = (
            {k: v for k, v in chosen.items() if k != "overrides"} if isinstance(chosen, Mapping) else {}
        )
        words: dict[str, Any] = {"codec": chain.codec, "settings": settings}
        return cls(chain, (words | ({"optimizer": optimizer} if optimizer else {})) if asked.each else {})


class _Sample(NamedTuple):
    """What of a run is encoded: stretches of its steps, tensors of each, and the trials that are known."""

    run: Run
    steps: tuple[int, ...]
    stretches: list[Sequence[int]]
    keys: frozenset[str]
    known: tuple[Trial, ...]
    foreseen: dict[str, Any]

    @classmethod
    def of(
        cls, run: Run, steps: tuple[int, ...], tried: int | None, known: tuple[Trial, ...], n_settings: int
    ) -> _Sample:
        from inshrink_core.search.measure import middle_of, sample_keys

        stretches = _stretches(steps) if tried is None else [middle_of(steps, tried)]
        n_steps = sum(map(len, stretches))
        numel = max(_LEAST_NUMEL, _NUMEL // n_steps)
        n_tensors = max(_LEAST_TENSORS, _TENSORS // (n_steps * n_settings))
        return cls(run, steps, stretches, sample_keys(run[stretches[0][0]], numel, n_tensors), known, {})

    def ahead(self, chain: ChainConfig) -> Any:
        """Return what the encoder knows of later steps; what the knob turns does not change it."""
        from inshrink_core.chain import FrameEncoder

        tuning = chain.config.tuning
        turned = () if tuning is None else tuning.knob.settings
        settings = {k: v for k, v in chain.config.settings().items() if k not in turned}
        key = json.dumps([chain.codec, settings], sort_keys=True, default=str)
        if key not in self.foreseen:
            keys = self.keys if len(self.stretches[0]) < len(self.steps) else None
            self.foreseen[key] = FrameEncoder(chain).look_ahead(self.steps, self.run.__getitem__, keys)
        return self.foreseen[key]

    def model(self) -> list[TensorSpec]:
        """Return the weights and buffers of the first step."""
        return [spec for spec in self.run[self.steps[0]].specs if spec.role in MODEL_ROLES]

    @property
    def share(self) -> float:
        """Share of the model's elements that is encoded."""
        numel = {spec.key: spec.numel for spec in self.model()}
        return sum(numel[key] for key in numel.keys() & self.keys) / max(1, sum(numel.values()))


def _tried(row: EstimateReport) -> ArchiveEstimate:
    if row.archive is None:
        raise RuntimeError("no archive was estimated")
    return row.archive


def _weights(row: EstimateReport) -> str:
    """Return what decides how weights are written, as a key."""
    return json.dumps([row.codec, row.config, row.overrides], sort_keys=True)


def _judged(
    sample: _Sample, chain: ChainConfig, judging: EvaluatorRequest, most: float
) -> tuple[ArchiveSize, Mapping[str, Any]]:
    """Write the steps that are tried under a bound; return their sizes, and the worst figures."""
    from inshrink_core.search.bounded import open_bounded, written_bounded
    from inshrink_core.search.bounds import Bounds

    (tried,), run = sample.stretches, sample.run
    with open_bounded(run, tuple(tried), chain, Bounds(max_restore_cost=most), judging) as bounded:
        # What a restore may cost follows the learning rate, of which these steps do not tell the largest.
        for step in sample.steps[: sample.steps.index(tried[0])]:
            bounded.saw(run[step])
        sizes = written_bounded(bounded, chain, [run[step] for step in tried], sample.ahead(chain))
        return sizes, bounded.promise.to_json()


def _with_judged(
    found: EstimateReport, judged: tuple[ArchiveSize, Mapping[str, Any]], sample: _Sample, chain: ChainConfig
) -> EstimateReport:
    """Return what a configuration takes where its weights are written as they were judged.

    How coarse weights are decides how coarse optimizer state is: what the judged frames hold of it counts.
    """
    from inshrink_core.metrics import bits_per_parameter
    from inshrink_core.search.measure import Rest, in_proportion

    n_steps, tried, (sizes, worst) = len(sample.steps), _tried(found), judged

    def of_chain(nbytes: Callable[[FrameSize], int]) -> float:
        first, *deltas = map(nbytes, sizes.frames)
        return in_proportion([first], deltas, n_steps, chain.keyframe_every)

    nbytes = of_chain(lambda frame: frame.weights_nbytes)
    raw = sum(spec.nbytes for spec in sample.model()) * n_steps
    if chain.optimizer != "drop":
        stored = of_chain(lambda frame: frame.info.nbytes - frame.weights_nbytes)
    else:
        stored = tried.nbytes - raw / found.ratio_weights if found.ratio_weights else 0.0
    rest = Rest(tried.raw_bytes - raw, stored)
    archive = replace(
        tried,
        nbytes=round(nbytes + rest.nbytes),
        bits_per_weight=bits_per_parameter(round(nbytes), n_steps * sizes.frames[0].n_weights),
        restore_cost=worst["max_restore_cost"],
        basis="judged",
    )
    return replace(
        found,
        ratio_total=rest.ratio_total(raw, nbytes),
        ratio_weights=raw / nbytes if nbytes else 0.0,
        drop=worst["max_drop"],
        divergence=worst["max_divergence"],
        archive=archive,
    )


def _estimate(sample: _Sample, asked: _Asked, request: Estimate) -> EstimateReport:
    """Return what a configuration does to a chain: steps that are encoded, and what follows of them."""
    from inshrink_core.metrics import bits_per_parameter
    from inshrink_core.search.measure import estimate_rest, in_proportion, middle_of
    from inshrink_core.search.quadratic import calibrate

    begun, chain, run, steps = time.perf_counter(), asked.chain, sample.run, sample.steps
    is_tried, specs = request.tried is not None, sample.model()
    count = Counter(None if request.each else request.progress, "estimate", sum(map(len, sample.stretches)))
    rows: list[_Row] = []
    for row in itertools.chain.from_iterable(_encode(sample, chain, stretch) for stretch in sample.stretches):
        rows.append(row)
        count.add(1, row.step)
    calibration = calibrate([entry for entry in sample.known if entry.config.get("codec") == chain.codec])
    calibration = calibration if calibration.n_trials else calibrate(sample.known)
    most = max(row.relative_error for row in rows)
    drop, divergence = _figures(calibration, chain, rows)
    raw = len(steps) * sum(row.raw for row in rows) / len(rows)
    keyframes, deltas = ([row.nbytes for row in rows if row.keyframe is kind] for kind in (True, False))
    nbytes = in_proportion(keyframes, deltas, len(steps), chain.keyframe_every)
    few = sample.stretches[0] if is_tried else middle_of(steps)
    rest = estimate_rest(chain, [run[step] for step in few], len(steps), sample.keys, sample.ahead(chain))
    archive = None
    if is_tried:
        basis, cost = _cost(sample.known, chain, calibration, divergence)
        n_weights = len(steps) * sum(spec.numel for spec in specs)
        archive = ArchiveEstimate(
            run_bytes=sum(run[step].raw_bytes() for step in steps),
            tried=tuple(few),
            raw_bytes=round(raw + rest.raw),
            nbytes=round(nbytes + rest.nbytes),
            bits_per_weight=bits_per_parameter(round(nbytes), n_weights),
            relative_error=most,
            restore_cost=cost,
            basis=basis,
        )
    unseen = Unseen.of(layout for step in steps for layout in run[step].files)
    n_trials = calibration.n_trials
    tensors = _by_tensor(specs, rows, len(steps), chain.keyframe_every) if request.by_tensor else ()
    return EstimateReport(
        codec=chain.codec,
        config=chain.record()["config"],
        overrides=tuple(override.to_json() for override in chain.overrides),
        ratio_total=rest.ratio_total(raw, nbytes),
        ratio_weights=raw / nbytes if nbytes else 0.0,
        drop=drop,
        divergence=divergence,
        basis="trials" if n_trials else "rule of thumb",
        rank_correlation=calibration.rank_correlation,
        n_trials=n_trials,
        n_steps=len(rows),
        sampled=sample.share,
        seconds=time.perf_counter() - begun,
        notes=tuple(note for note in ("" if n_trials else _UNCALIBRATED, unseen.text) if note),
        unseen=unseen,
        device=chain.device,
        tensors=tuple(tensors),
        archive=archive,
        set=asked.set,
    )


def _figures(calibration: Calibration, chain: ChainConfig, rows: Sequence[_Row]) -> tuple[float | None, ...]:
    """Return drop and divergence of the worst step, by trials where there are any."""
    from inshrink_core.search.quadratic import prior_of

    if not calibration.n_trials:
        return prior_of(chain, max(row.relative_error for row in rows))
    found = (
        [calibration.predict(figure, row.step, row.damage) for row in rows]
        for figure in ("drop", "divergence")
    )
    return tuple(max((value for value in values if value is not None), default=None) for values in found)


def _cost(
    known: Sequence[Trial], chain: ChainConfig, calibration: Calibration, divergence: float | None
) -> tuple[str, float | None]:
    """Return the basis of the restore cost, and the cost: what trials paid for a divergence."""
    from inshrink_core.chain import is_exact

    if chain.optimizer == "exact" and is_exact(chain.codec, {}):
        return "exact", 0.0
    if not calibration.n_trials:
        return "unknown", None
    prices = [
        trial.restore_cost / trial.divergence
        for trial in known
        if trial.restore_cost is not None and trial.divergence
    ]
    is_known = prices and divergence is not None
    return "predicted", statistics.median(prices) * (divergence or 0.0) if is_known else None


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
            (0.5 * row.sensitivities[spec.key] if weighed else 1) * row.squared_errors[spec.key]
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


def _encode(sample: _Sample, chain: ChainConfig, steps: Sequence[int]) -> Iterator[_Row]:
    """Encode a stretch of a run in closed loop."""
    from inshrink_core.search.measure import encode_chain
    from inshrink_core.search.quadratic import sensitivities

    run, keys = sample.run, sample.keys
    encoded = encode_chain(chain, (run[step] for step in steps), keys, sample.ahead(chain))
    before = None
    for number, (step, row) in enumerate(zip(steps, encoded, strict=True)):
        checkpoint = run[step]
        h = sensitivities(checkpoint, before, keys)
        yield _Row(
            step,
            checkpoint.raw_bytes(MODEL_ROLES),
            row.scaled_nbytes,
            row.scaled_damage(h),
            row.relative_error,
            number % chain.keyframe_every == 0,
            row.nbytes,
            row.squared_errors,
            h,
        )
        before = checkpoint
