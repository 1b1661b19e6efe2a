"""The state of the place Run: the choices for a run, the known figures of its bits, and their cost."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError, Subject, engine_settings
from inshrink_app.pages.run.shrinking import Intent, Written, estimate_result
from inshrink_app.services import Chosen, EvaluatorCode, Searched
from inshrink_app.services.inside import reported
from inshrink_app.services.searching import SearchPoint, codec_settings

from inshrink_core.chain.config import assigned, assignments
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import DEFAULT_CODEC, Knob, get_codec
from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates

MEASURED, ESTIMATED = "measured", "estimated"
COSTS: Mapping[str, str] = {
    "restore_cost": "Restore cost",
    "drop": "Largest drop",
    "divergence": "Divergence",
}
"""Figures that may be bounded, and their headings."""


class Figures(NamedTuple):
    """Size and cost of an archive.

    Parameters
    ----------
    basis
        `MEASURED` or `ESTIMATED`.
    nbytes, ratio, bits
        Bytes of the archive, raw bytes divided by them, and stored bits per weight; None if unknown.
    restore_cost, drop, divergence
        Figures of the worst step; None if unknown.
    """

    basis: str
    nbytes: float | None = None
    ratio: float | None = None
    bits: float | None = None
    restore_cost: float | None = None
    drop: float | None = None
    divergence: float | None = None


@dataclass(frozen=True, kw_only=True)
class Board:
    """The state of a run and its bits.

    Parameters
    ----------
    intent
        The run, its choices, and the evaluator that may run.
    codec
        The codec whose bits are edited.
    search, found
        The newest search and its results; without one, the request and empty results.
    points
        All measured and estimated configurations.
    rates
        Calibrated cost of each tensor; None if unknown.
    estimating, trial
        The jobs that estimate levels of bits and try two steps; None before their start.
    tried
        The result of the trial; None before.
    writing, written
        The job that writes an archive, and its result; None without one.
    """

    intent: Intent
    codec: str
    search: Job | None
    found: Searched
    points: tuple[SearchPoint, ...]
    rates: Rates | None
    estimating: Job | None
    trial: Job | None
    tried: Mapping[str, Any] | None
    writing: Job | None
    written: Written | None

    @property
    def shown(self) -> Subject:
        """The run."""
        return self.intent.shown

    @property
    def now(self) -> Chosen:
        """The choices for the run."""
        return self.intent.now

    @property
    def judge(self) -> EvaluatorCode | None:
        """The evaluator that may run."""
        return self.intent.judge

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are searched and estimated."""
        return self.found.steps or self.shown.steps

    @property
    def config(self) -> dict[str, Any]:
        """The configuration being edited, or the codec's default."""
        if self.now.config:
            return dict(self.now.config)
        return {"codec": self.codec, "settings": dict(list(codec_settings(self.codec).items())[:1])}

    @property
    def raw_nbytes(self) -> int:
        """Raw bytes of all tensors of all steps."""
        return len(self.shown.steps) * sum(row.nbytes for row in self.shown.tensors)

    @property
    def figure(self) -> str:
        """The figure that rates configurations: the bounded one, else one that is known."""
        kind = self.now.bound.kind
        if kind == "restore_cost":
            return kind if self.cost_per_nat is not None else "divergence"
        return "divergence" if kind == "none" else kind

    @property
    def limit(self) -> float | None:
        """The bound on `figure`; None if another figure is bounded."""
        return self.now.bound.value if self.figure == self.now.bound.kind else None

    @functools.cached_property
    def cost_per_nat(self) -> float | None:
        """Restore cost per nat of divergence, from points at which both were measured."""
        pairs = [(point.restore_cost, point.divergence) for point in self.points if not point.is_estimated]
        factors = [cost / divergence for cost, divergence in pairs if cost and divergence]
        return statistics.median(factors) if factors else None

    @functools.cached_property
    def layers(self) -> Layers | None:
        """The edited bits of each layer; None before they are estimated."""
        expected = predicted(self.shown, self.rates, self.config)
        if self.rates is None or expected is None:
            return None
        numbers = numbers_of(self.shown, self.config)
        values = tuple(numbers[key] for key in self.rates.keys)
        return Layers(self.shown, self.now, self.config, self.rates, values, expected)

    @functools.cached_property
    def figures(self) -> Figures | None:
        """Size and cost of the chosen archive; None if unknown."""
        return self.figures_of(self.now.config)

    def figures_of(self, config: Mapping[str, Any]) -> Figures | None:
        """Return size and cost of a configuration; an empty one means steps that each keep the bound.

        The figures are measured if the configuration was measured, else estimated. None if unknown.
        """
        intent = self.intent._replace(now=replace(self.now, config=config))
        made = self.written
        if made is not None and made.is_of(intent):
            chain, is_exact = made.chain, self.now.keep == "exact"
            costs = {kind: 0.0 if is_exact else made.cost(kind) for kind in COSTS}
            return Figures(MEASURED, chain.nbytes, chain.ratio_total, chain.bits_per_weight, **costs)
        if not intent.is_by_hand:
            return self._automatic()
        full = _with_defaults(config)
        seen = [
            point
            for point in self.points
            if point.is_complete and not point.is_estimated and point.config
            if point.config == config or (full and _with_defaults(point.config) == full)
        ]
        point = max(seen, key=lambda point: point.restore_cost is not None, default=None)
        if point is not None:
            total = None if self.rates is None else self.rates.ratio_total_of(point.ratio)
            costs = {kind: getattr(point, kind) for kind in COSTS}
            return self._of_weights(MEASURED, point.ratio, total, costs)
        expected = predicted(self.shown, self.rates, config)
        if expected is None:
            return None
        nats = expected.divergence
        factor = self.cost_per_nat
        costs = {"drop": expected.drop, "divergence": nats}
        costs["restore_cost"] = None if nats is None or factor is None else factor * nats
        return self._of_weights(ESTIMATED, expected.ratio_weights, expected.ratio_total, costs)

    def _automatic(self) -> Figures | None:
        """Return the estimate of an archive whose steps each keep the bound, from the trial of two steps."""
        row = None if self.tried is None else self.tried["rows"].get(self.now.keep)
        if row is None:
            return None
        costs = dict.fromkeys(COSTS, 0.0)
        if row["basis"] != "exact":
            costs = {kind: row.get(kind) for kind in COSTS}
        nbytes, bits = float(row["nbytes"]), row["bits_per_weight"]
        return Figures(ESTIMATED, nbytes, self.raw_nbytes / nbytes if nbytes else None, bits, **costs)

    def _of_weights(
        self, basis: str, ratio: float, total: float | None, costs: Mapping[str, float | None]
    ) -> Figures:
        """Return figures from the ratio of the weights, and from the total ratio if it is stored."""
        n_steps = len(self.shown.steps)
        weights = n_steps * weight_bytes(self.shown)
        n_weights = n_steps * sum(row.numel for row in self.shown.model_tensors)
        nbytes = weights / ratio if ratio else None
        bits = 8 * nbytes / n_weights if nbytes and n_weights else None
        if self.now.keep != "weights":
            nbytes = self.raw_nbytes / total if total and math.isfinite(total) else None
        return Figures(basis, nbytes, self.raw_nbytes / nbytes if nbytes else None, bits, **costs)

    def course(self, figure: str) -> list[float]:
        """Return a figure of uniform settings along the curve; NaN where unknown."""
        if self.rates is None:
            return []
        if figure != "restore_cost":
            return [float(value) for value in self.rates.course(figure)]
        factor = self.cost_per_nat or math.nan
        return [factor * float(value) for value in self.rates.course("divergence")]


class Layers(NamedTuple):
    """The edited bits of each layer, and the changes that buttons make.

    Parameters
    ----------
    shown, now, config
        The run, its choices, and the configuration being edited.
    rates, values, predicted
        The cost of the tensors, the tunable parameter of each, and the predicted result.
    """

    shown: Subject
    now: Chosen
    config: Mapping[str, Any]
    rates: Rates
    values: Sequence[float]
    predicted: Predicted

    def scale(self, members: Collection[int], factor: float) -> None:
        """Scale the parameter of unlocked tensors, within the limits of the codec."""
        number = number_of(str(self.config["codec"]))
        low, high = (0.0, math.inf) if number is None or number.within is None else number.within
        changed = list(self.values)
        for place in members:
            if self.rates.keys[place] not in self.now.locked:
                changed[place] = min(max(changed[place] * factor, low), high)
        self.take(changed)

    def take(self, values: Sequence[float]) -> None:
        """Set the parameters of all tensors."""
        state.clicked()
        config = with_allocation(self.shown, self.config, self.rates.keys, values)
        services.change_bits(self.shown, config, "by hand")

    def toggle(self, members: Collection[int]) -> None:
        """Lock tensors, or unlock them if all are locked."""
        state.clicked()
        keys = {self.rates.keys[place] for place in members}
        locked = self.now.locked - keys if keys <= self.now.locked else self.now.locked | keys
        services.choose(self.shown, locked=frozenset(locked))

    def distribute(self) -> None:
        """Give unlocked tensors the best bits for their present total size."""
        is_locked = [key in self.now.locked for key in self.rates.keys]
        self.take(self.rates.distribute(self.predicted.nbytes, self.values, is_locked))


def gather(shown: Subject, now: Chosen, judge: EvaluatorCode | None, device: str) -> Board:
    """Collect the state of a run, and start estimates once the user asked for the run."""
    codec = str(now.config.get("codec", "")) or DEFAULT_CODEC
    linked = services.linked_job(state.choice_text("job"), "run", shown.path)
    search = linked if linked is not None and linked.verb == "search" else None
    search = search or services.newest_job("run", "search", shown.path)
    limits = {} if now.bound.kind == "none" else {now.bound.kind: now.bound.value}
    found = Searched(points=(), steps=shown.steps, limits=limits)
    if search is not None:
        before = services.searched_before(shown, search)
        found = before or services.searched(search, services.steps_of(search, shown))
    trial, tried = _trial(Intent(shown, now, judge, device))
    if tried is not None and tried.get("evaluator_failed"):  # Known figures stay; it is not tried again.
        judge = None
    steps = found.steps or shown.steps
    measured = (*found.points, *_measured(shown, steps, judge, found))
    rates, estimating = _rates_of(shown, steps, codec, is_calibrated=bool(measured))
    points = (*measured, *services.estimates(estimating))
    writing = services.newest_job("run", "shrink", shown.path)
    can_bound = tried is None or not tried.get("not_judged")
    return Board(
        intent=Intent(shown, now, judge, device, can_bound),
        codec=codec,
        search=search,
        found=found,
        points=points,
        rates=None if rates is None else calibrated(shown, rates, points),
        estimating=estimating,
        trial=trial,
        tried=tried,
        writing=writing,
        written=Written.by(writing),
    )


def may_begin() -> bool:
    """Return whether trials and estimates may start by themselves: once the user asked for the run."""
    return state.was_asked_for()


def _trial(intent: Intent) -> tuple[Job | None, Mapping[str, Any] | None]:
    """Return the trial of two steps and its result; start it if needed and the user asked for the run."""
    known = intent.known_estimate()
    if known is not None:
        return None, known
    try:
        work = intent.estimate_work()
    except ServiceError:
        return None, None
    trial = services.job_of(work)
    if may_begin() and trial is None:
        trial = services.start_job(work, again=False)
    elif may_begin() and trial is not None and trial.state == "interrupted":
        services.resume_job(trial)
    result = services.read_result(trial) if trial is not None and trial.state == "finished" else None
    return trial, estimate_result(result) if result else None


def _measured(
    shown: Subject, steps: Sequence[int], judge: EvaluatorCode | None, found: Searched
) -> tuple[SearchPoint, ...]:
    """Return measurements of these steps beyond the search."""
    archives = services.measured_archives(shown, judge, steps)
    if judge is None:
        return archives
    published = services.baselines(services.job_of(services.baselines_work(shown, steps, judge)))
    return (*services.measured_configs(shown, steps, judge, found), *published, *archives)


def _rates_of(
    shown: Subject, steps: Sequence[int], codec: str, *, is_calibrated: bool
) -> tuple[Rates | None, Job | None]:
    """Return the cost of each tensor, and the job that estimates it; repeated once trials calibrate it."""
    work = services.estimating_work(shown, steps, codec, is_calibrated=is_calibrated)
    job = services.job_of(work)
    if may_begin() and weight_bytes(shown) <= ASK_ABOVE_BYTES:
        if job is None:
            job = services.start_job(work)
        elif job.state == "interrupted":
            job = services.resume_job(job)
    found = rates_from(shown, job, codec)
    if found is None and is_calibrated:  # Uncalibrated estimates serve in the meantime.
        earlier = services.job_of(services.estimating_work(shown, steps, codec, is_calibrated=False))
        found, job = rates_from(shown, earlier, codec), job or earlier
    return found, job


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a configuration with its codec's defaults, like archives; None if the codec is not installed."""
    with contextlib.suppress(ServiceError):
        settings = {**codec_settings(str(config["codec"])), **config.get("settings", {})}
        return {"codec": config["codec"], "settings": settings, "override": list(config.get("override", ()))}
    return None


def number_of(codec: str) -> Knob | None:
    """Return the parameter that sets a codec's precision; None if the codec has none or several settings."""
    with reported():
        tuning = get_codec(codec).tuning
    return tuning.knob if tuning is not None and tuning.knob.within is not None else None


def weight_bytes(shown: Subject) -> int:
    """Return the raw bytes of weights and buffers of the last checkpoint."""
    return sum(row.nbytes for row in shown.model_tensors)


def rates_from(shown: Subject, job: Job | None, codec: str) -> Rates | None:
    """Return the cost of each tensor from fine to coarse, from a finished job of estimates; else None."""
    number = number_of(codec)
    if job is None or job.state != "finished" or number is None:
        return None
    return _rates(job.job_id, str(shown.path), number.settings[0], job, shown.model_tensors)


@st.cache_resource(show_spinner=False, max_entries=8)
def _rates(job_id: str, path: str, setting: str, _job: Job, _specs: Sequence[TensorSpec]) -> Rates | None:
    from inshrink_core.search.rates import rates_of

    try:
        return rates_of(list(_job.told()), setting, _specs)
    except InputError:  # Estimates of another version, without tensors.
        return None


def calibrated(shown: Subject, rates: Rates, points: Sequence[SearchPoint]) -> Rates:
    """Return rates whose quality passes through the measurements with their codec.

    Parameters
    ----------
    shown, rates
        The run, and the cost of its tensors.
    points
        Measured and estimated points. The worst step of an abandoned chain is unknown.
    """
    from inshrink_core.search.rates import MeasuredAllocation

    measured = []
    for point in points:
        if point.is_complete and not point.is_estimated and point.config.get("codec") == rates.codec:
            # An archive may have another codec version, or other tensors.
            with contextlib.suppress(ServiceError, KeyError):
                numbers = numbers_of(shown, point.config)
                values = [numbers[key] for key in rates.keys]
                measured.append(MeasuredAllocation(values, point.drop, point.divergence))
    return rates.calibrated(measured)


def predicted(shown: Subject, rates: Rates | None, config: Mapping[str, Any]) -> Predicted | None:
    """Return the prediction of rates for a configuration.

    Parameters
    ----------
    shown, rates
        The run, and the cost of its tensors, if known.
    config
        The configuration.

    Returns
    -------
    Predicted or None
        None if it is of another codec, or sets more than the codec's parameter.

    Raises
    ------
    ServiceError
        The codec has no such setting.
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
    """Return the parameter that a configuration gives each weight and buffer, by its key.

    Raises
    ------
    ServiceError
        The codec has no such setting.
    """
    return _numbers(json.dumps(config, sort_keys=True), shown.model_tensors)


@functools.lru_cache(maxsize=64)
def _numbers(text: str, specs: tuple[TensorSpec, ...]) -> Mapping[str, float]:
    config = json.loads(text)
    codec = str(config["codec"])
    number = number_of(codec)
    if number is None:
        raise ValueError("a codec of several settings has no number to allocate")
    with reported():
        chain = make_chain_config("", codec, engine_settings(config), None, 32, device="cpu", threads=1)
        return {key: float(value) for key, value in assigned(chain, specs, number.settings[0]).items()}


def with_allocation(
    shown: Subject, config: Mapping[str, Any], keys: Sequence[str], values: Sequence[float]
) -> dict[str, Any]:
    """Return a configuration with a parameter for each tensor, and all else unchanged.

    Parameters
    ----------
    shown, config
        The run, and the configuration.
    keys, values
        Tensors and their parameters; others keep theirs.

    Notes
    -----
    The most frequent value becomes the common one, and the rest become overrides.
    """
    number = number_of(str(config["codec"]))
    if number is None:
        raise ValueError("a codec of several settings has no number to allocate")
    numbers = {
        **numbers_of(shown, config),
        **{key: float(f"{value:.4g}") for key, value in zip(keys, values, strict=True)},
    }
    counts = Counter(numbers.values())
    base = max(counts, key=lambda value: (counts[value], -value))
    overrides = [
        rest
        for override in config.get("override", ())
        if set(rest := {name: value for name, value in override.items() if name not in number.settings})
        - {"match", "layer_type"}
    ]
    overrides += assignments(shown.model_tensors, numbers, base, number.settings)
    settings = {**config.get("settings", {}), **dict.fromkeys(number.settings, base)}
    changed = {**config, "settings": settings, "override": overrides}
    return changed if overrides else {name: value for name, value in changed.items() if name != "override"}
