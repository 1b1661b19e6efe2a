"""The state of the place Run: the choices for a run, the known figures of its bits, and their cost."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError, Subject, engine_settings
from inshrink_app.pages.run.shrinking import Intent, Written, estimate_result
from inshrink_app.services import Chosen, EvaluatorCode, Searched
from inshrink_app.services.inside import answered, reported
from inshrink_app.services.searching import SearchPoint, codec_settings
from inshrink_app.widgets.layout import archive_colours
from inshrink_app.widgets.quality import COSTS

from inshrink_core.chain.config import assigned, assignments
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.codec import DEFAULT_CODEC, Tunable, get_codec
from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates

MEASURED, ESTIMATED = "measured", "estimated"


class Figures(NamedTuple):
    """Size and cost of an archive.

    Parameters
    ----------
    basis
        `MEASURED` or `ESTIMATED`.
    nbytes, ratio, ratio_weights, bits
        Bytes of the archive; raw bytes divided by them, of everything and of the weights; and stored bits per
        weight. None if unknown.
    restore_cost, drop, divergence
        Figures of the worst step; None if unknown.
    """

    basis: str
    nbytes: float | None = None
    ratio: float | None = None
    ratio_weights: float | None = None
    bits: float | None = None
    restore_cost: float | None = None
    drop: float | None = None
    divergence: float | None = None


@dataclass(frozen=True, kw_only=True)
class Board(Intent):
    """The state of a run and its bits, beside the chosen archive.

    Parameters
    ----------
    codec
        The codec whose bits are edited.
    search, found
        The newest search and its results; without one, the request and empty results.
    points
        All measured and estimated configurations.
    cost_per_nat
        Restore cost per nat of divergence, from points at which both were measured.
    rates
        Calibrated cost of each tensor; None if unknown.
    estimating, trial
        The jobs that estimate levels of bits and try two steps; None before their start.
    tried
        The result of the trial; None before.
    writing, written
        The job that writes an archive, and its result; None without one.
    colours
        The colour of each archive of the run, by its name.
    """

    codec: str
    search: Job | None
    found: Searched
    points: tuple[SearchPoint, ...]
    cost_per_nat: float | None
    rates: Rates | None
    estimating: Job | None
    trial: Job | None
    tried: Mapping[str, Any] | None
    writing: Job | None
    written: Written | None
    colours: Mapping[str, str]

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are searched and estimated."""
        return self.found.steps or self.shown.steps

    @property
    def config(self) -> dict[str, Any]:
        """The configuration being edited; before an edit, all layers alike, as small as the archive."""
        if self.now.config:
            return dict(self.now.config)
        settings, rates = dict(list(codec_settings(self.codec).items())[:1]), self.rates
        if self.is_bounded and rates is not None and self.figures is not None and self.figures.ratio_weights:
            known = np.log(rates.ratios_weights), np.log(rates.levels)
            level = math.exp(np.interp(math.log(self.figures.ratio_weights), *known))
            settings = dict.fromkeys(rates.settings, float(f"{level:.3g}"))
        return {"codec": self.codec, "settings": settings}

    @property
    def figure(self) -> str:
        """The figure that rates configurations: the bounded one, else one that is known."""
        kind = self.now.bound.kind
        if kind == "none" or (kind == "restore_cost" and self.cost_per_nat is None):
            return "divergence"
        return kind

    @property
    def limit(self) -> float | None:
        """The bound on `figure`; None if another figure is bounded."""
        return self.now.bound.value if self.figure == self.now.bound.kind else None

    @functools.cached_property
    def predicted(self) -> Predicted | None:
        """The prediction for the edited bits; None before they are estimated."""
        return predicted(self.shown, self.rates, self.config)

    @functools.cached_property
    def figures(self) -> Figures | None:
        """Size and cost of the chosen archive; None if unknown."""
        return self.figures_of(self.now.config)

    def figures_of(self, config: Mapping[str, Any]) -> Figures | None:
        """Return size and cost of a configuration; an empty one means steps that each keep the bound.

        The figures are measured if the configuration was measured, else estimated. None if unknown.
        """
        intent = replace(self, now=replace(self.now, config=config))
        made = self.written
        if made is not None and made.is_of(intent):
            chain, is_exact = made.chain, self.now.keep == "exact"
            costs = {kind: 0.0 if is_exact else made.cost(kind) for kind in COSTS}
            ratios = chain.ratio_total, chain.ratio_weights
            return Figures(MEASURED, chain.nbytes, *ratios, chain.bits_per_weight, **costs)
        if not intent.is_by_hand:
            row = None if self.tried is None else self.tried["rows"].get(self.now.keep)
            if row is None:
                return None
            costs = {kind: 0.0 if row["basis"] == "exact" else row.get(kind) for kind in COSTS}
            ratio = self.shown.raw_nbytes / row["nbytes"] if row["nbytes"] else None
            ratios = ratio, row["ratio_weights"]
            return Figures(ESTIMATED, row["nbytes"], *ratios, row["bits_per_weight"], **costs)
        full = _with_defaults(config)
        seen = [
            point
            for point in self.points
            if point.is_complete and point.kind != "estimate" and point.config
            if point.config == config or (full and _with_defaults(point.config) == full)
        ]
        judged = [point for point in seen if point.restore_cost is not None]
        point: SearchPoint | Predicted | None = next(iter(judged or seen), None)
        # Trials use the optimizer state, which an archive of weights alone lacks.
        is_measured = any(found.kind == "archive" or self.now.keep != "weights" for found in seen)
        basis = MEASURED if is_measured else ESTIMATED
        point = point or predicted(self.shown, self.rates, config)
        if point is None:
            return None
        ratio = point.ratio if isinstance(point, SearchPoint) else point.ratio_weights
        costs = {kind: getattr(point, kind, None) for kind in COSTS}
        if not isinstance(point, SearchPoint):
            costs["restore_cost"] = _times(self.cost_per_nat, point.divergence)
        n_steps = len(self.shown.steps)
        n_weights = n_steps * sum(row.numel for row in self.shown.model_tensors)
        nbytes = n_steps * weight_bytes(self.shown) / ratio if ratio else None
        bits = 8 * nbytes / n_weights if nbytes and n_weights else None
        if self.now.keep != "weights":
            total = math.nan if self.rates is None else self.rates.ratio_total_of(ratio)
            if made is not None and made.chain.optimizer == "compressed" and self.rates is not None:
                at = self.rates.ratio_total_of(made.chain.ratio_weights or math.nan)
                total *= (made.chain.ratio_total or math.nan) / at  # The optimizer state as it was measured.
            nbytes = self.shown.raw_nbytes / total if math.isfinite(total) else None
        total = self.shown.raw_nbytes / nbytes if nbytes else math.nan
        return Figures(basis, nbytes, total if nbytes else None, ratio, bits, **costs)


def gather(shown: Subject, now: Chosen, evaluator: EvaluatorCode | None) -> Board:
    """Collect the state of a run, and start estimates once the user asked for the run."""
    codec = str(now.config.get("codec", "")) or DEFAULT_CODEC
    linked = services.linked_job(state.choice_text("job"), "run", shown.path)
    search = linked if linked is not None and linked.verb == "search" else None
    search = search or services.newest_job("run", "search", shown.path)
    limits = {} if now.bound.kind == "none" else {now.bound.kind: now.bound.value}
    found = Searched(steps=shown.steps, limits=limits)
    found = found if search is None else services.searched(shown, search)
    trial, tried = _trial(Intent(shown=shown, now=now, evaluator=evaluator))
    if tried is not None and tried.get("evaluator_failed"):  # Known figures stay; it is not tried again.
        evaluator = None
    steps = found.steps or shown.steps
    measured = [*found.points]
    if evaluator is not None:
        measured += services.baselines(services.job_of(services.baselines_work(shown, steps, evaluator)))
    measured += services.measured_archives(shown, evaluator, steps)
    work = services.estimating_work(shown, steps, codec)
    begins = may_begin() and weight_bytes(shown) <= ASK_ABOVE_BYTES
    estimating = begun(work) if begins else services.job_of(work)
    rates = rates_from(shown, estimating, codec)
    rates = None if rates is None else calibrated(shown, rates, measured)
    pairs = [(point.restore_cost, point.divergence) for point in measured]
    factors = [cost / divergence for cost, divergence in pairs if cost and divergence]
    factor = statistics.median(factors) if factors else None
    writing = services.newest_job("run", "shrink", shown.path)
    archives = {str(chain.path): chain.path.name for chain in services.archives_of(shown)}
    colours = archive_colours(str(shown.path), archives)
    return Board(
        shown=shown,
        now=now,
        evaluator=evaluator,
        can_bound=tried is None or not tried.get("not_evaluated"),
        codec=codec,
        search=search,
        found=found,
        points=(*measured, *_estimates(estimating, rates, factor)),
        cost_per_nat=factor,
        rates=rates,
        estimating=estimating,
        trial=trial,
        tried=tried,
        writing=writing,
        written=Written.by(writing),
        colours={archives[path]: colour for path, colour in colours.items()},
    )


def may_begin() -> bool:
    """Return whether trials and estimates may start by themselves: once the user asked for the run."""
    return state.was_asked_for()


def _trial(intent: Intent) -> tuple[Job | None, Mapping[str, Any] | None]:
    """Return the trial of two steps and its result; start it if needed and the user asked for the run."""
    try:
        work = intent.estimate_work()
    except ServiceError:
        return None, None
    trial = begun(work) if may_begin() else services.job_of(work)
    result = services.read_result(trial) if trial is not None and trial.state == "finished" else None
    return trial, estimate_result(result) if result else None


def begun(work: Work) -> Job:
    """Return the job that answers a question; start it if there is none, and resume an interrupted one."""
    job = services.job_of(work)
    if job is None:
        return services.start_job(work)
    return services.resume_job(job) if job.state == "interrupted" else job


def _estimates(job: Job | None, rates: Rates | None, cost_per_nat: float | None) -> list[SearchPoint]:
    """Return the estimated configurations, with the calibrated figures."""
    points = services.estimates(job)
    levels = [] if rates is None else rates.levels.tolist()
    for i, point in enumerate(points):
        level = None if rates is None else point.config["settings"].get(rates.settings[0])
        if rates is not None and level in levels:
            place = levels.index(level)
            known: dict[str, Any] = {name: float(rates.curve(name)[place]) for name in rates.figures}
            points[i] = point._replace(**known, restore_cost=_times(cost_per_nat, known["divergence"]))
    return points


def _times(factor: float | None, value: float | None) -> float | None:
    return None if factor is None or value is None else factor * value


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a configuration with its codec's defaults, like archives; None if the codec is not installed."""
    with contextlib.suppress(ServiceError):
        settings = {**codec_settings(str(config["codec"])), **config.get("settings", {})}
        return {"codec": config["codec"], "settings": settings, "override": list(config.get("override", ()))}
    return None


def number_of(codec: str) -> Tunable | None:
    """Return the parameter that sets a codec's precision; None if the codec has none or several settings."""
    with reported():
        tuning = get_codec(codec).tuning
    return tuning.tunable if tuning is not None and tuning.tunable.within is not None else None


def weight_bytes(shown: Subject) -> int:
    """Return the raw bytes of weights and buffers of the last checkpoint."""
    return sum(row.nbytes for row in shown.model_tensors)


def rates_from(shown: Subject, job: Job | None, codec: str) -> Rates | None:
    """Return the cost of each tensor from fine to coarse, from the estimates of a job so far; else None."""
    number = number_of(codec)
    if job is None or number is None:
        return None
    rows, setting = services.estimate_rows(job), number.settings[0]

    def read() -> Rates | None:
        from inshrink_core.search.rates import rates_of

        # There may be fewer than two levels so far, or estimates of another version, without tensors.
        with contextlib.suppress(InputError):
            return rates_of(rows, setting, shown.model_tensors)
        return None

    return answered(("rates", job.job_id, len(rows), str(shown.path), setting), read)


def calibrated(shown: Subject, rates: Rates, points: Sequence[SearchPoint]) -> Rates:
    """Return rates whose quality passes through the measurements with their codec.

    Abandoned chains, whose worst step is unknown, are ignored.
    """
    from inshrink_core.search.rates import MeasuredAllocation

    measured = []
    for point in points:
        if point.is_complete and point.kind != "estimate" and point.config.get("codec") == rates.codec:
            # An archive may have another codec version, or other tensors.
            with contextlib.suppress(ServiceError, KeyError):
                numbers = numbers_of(shown, point.config)
                values = [numbers[key] for key in rates.keys]
                measured.append(MeasuredAllocation(values, point.drop, point.divergence))
    return rates.calibrated(measured)


def predicted(shown: Subject, rates: Rates | None, config: Mapping[str, Any]) -> Predicted | None:
    """Return the prediction of rates for a configuration.

    None without rates, or if it is of another codec or sets more than the codec's parameter.
    """
    if rates is None or rates.codec != config["codec"]:
        return None
    usual = codec_settings(rates.codec)
    parts = [config.get("settings", {}), *config.get("override", ())]
    changed = {name for part in parts for name, value in part.items() if value != usual.get(name)}
    if changed - {"match", "layer_type", *rates.settings}:
        return None
    numbers = numbers_of(shown, config)
    return rates.predict([numbers[key] for key in rates.keys])


def numbers_of(shown: Subject, config: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the parameter that a configuration gives each weight and buffer, by its key."""
    text, specs = json.dumps(config, sort_keys=True), shown.model_tensors

    def read() -> Mapping[str, float]:
        codec, settings = str(config["codec"]), engine_settings(config)
        chain = make_chain_config("", codec, settings, None, 32, device="cpu", threads=1)
        values = assigned(chain, specs, _settings_of(config)[0])
        return {key: float(value) for key, value in values.items()}

    # Streamlit takes .1 s to hash 300 tensors.
    return answered(("numbers", text, hash(specs)), read)


def _settings_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that the parameter of a configuration's codec changes."""
    number = number_of(str(config["codec"]))
    if number is None:
        raise ValueError("a codec of several settings has no number to allocate")
    return number.settings


def with_allocation(
    shown: Subject, config: Mapping[str, Any], keys: Sequence[str], values: Sequence[float]
) -> dict[str, Any]:
    """Return a configuration with a parameter for each of some tensors, and all else unchanged.

    The most frequent value becomes the common one, and the rest become overrides.
    """
    names = _settings_of(config)
    numbers = dict(numbers_of(shown, config))
    numbers |= {key: float(f"{value:.4g}") for key, value in zip(keys, values, strict=True)}
    counts = Counter(numbers.values())
    base = max(counts, key=lambda value: (counts[value], -value))
    rests = [
        {name: value for name, value in override.items() if name not in names}
        for override in config.get("override", ())
    ]
    overrides = [rest for rest in rests if set(rest) - {"match", "layer_type"}]
    overrides += assignments(shown.model_tensors, numbers, base, names)
    changed = {name: value for name, value in config.items() if name != "override"}
    changed["settings"] = {**config.get("settings", {}), **dict.fromkeys(names, base)}
    return changed | ({"override": overrides} if overrides else {})


def edit_bits(shown: Subject, config: Mapping[str, Any], origin: str = "") -> None:
    """Replace the edited configuration, as the user asked. Also a callback."""
    state.clicked()
    services.change_bits(shown, config, origin)


def undo_bits(shown: Subject) -> None:
    """Undo the last edit. A callback."""
    state.clicked()
    services.undo_bits(shown)
