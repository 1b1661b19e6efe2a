"""The one estimator of the place: what the bits that are edited take and cost, from all that is known."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError, Subject, engine_settings
from inshrink_app.pages.run import shrinking
from inshrink_app.pages.run.shrinking import Written
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


class Figures(NamedTuple):
    """What an archive takes and costs.

    Parameters
    ----------
    basis
        `MEASURED` or `ESTIMATED`.
    nbytes, ratio, bits
        Bytes of the archive, raw bytes over them, and stored bits of a weight; None where not known.
    restore_cost, drop, divergence
        Of the worst step; None where not known.
    """

    basis: str
    nbytes: float | None = None
    ratio: float | None = None
    bits: float | None = None
    restore_cost: float | None = None
    drop: float | None = None
    divergence: float | None = None


class Board(NamedTuple):
    """What is known of a run and its bits.

    Parameters
    ----------
    shown, now, judge
        The run, what is chosen for it, and the evaluator that may run.
    codec
        Whose bits are edited.
    search, found
        The newest search, and what it has found; without one, what is asked for.
    points
        Whatever was measured or estimated.
    rates
        What each tensor costs, calibrated; None while that is not known.
    estimating, trial
        The jobs that estimate levels of bits, and that try two steps; None where they were not begun.
    tried
        What the trial has told; None while it has not.
    writing, written
        The job that writes an archive, and what it made; None without one.
    """

    shown: Subject
    now: Chosen
    judge: EvaluatorCode | None
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
    def config(self) -> dict[str, Any]:
        """The configuration that is edited, or the default of the codec."""
        if self.now.config:
            return dict(self.now.config)
        return {"codec": self.codec, "settings": dict(list(codec_settings(self.codec).items())[:1])}

    @property
    def raw_nbytes(self) -> int:
        """Raw bytes of all tensors of all steps."""
        return len(self.shown.steps) * sum(row.nbytes for row in self.shown.tensors)

    @property
    def figure(self) -> str:
        """The figure by which bits are judged: the bounded one, else what is known of them."""
        kind = self.now.bound.kind
        if kind == "restore_cost":
            return kind if cost_per_nat(self.points) is not None else "divergence"
        return "divergence" if kind == "none" else kind

    @property
    def can_bound(self) -> bool:
        """Whether the evaluator tells what is bounded, as far as is known."""
        return self.tried is None or not self.tried.get("not_judged")

    @property
    def limit(self) -> float | None:
        """The bound on `figure`; None where another figure is bounded."""
        return self.now.bound.value if self.figure == self.now.bound.kind else None


def gather(shown: Subject, now: Chosen, judge: EvaluatorCode | None, device: str) -> Board:
    """Gather what is known, and begin what is estimated by itself once the reader asked for the run."""
    codec = str(now.config.get("codec", "")) or DEFAULT_CODEC
    linked = services.linked_job(state.choice_text("job"), "run", shown.path)
    search = linked if linked is not None and linked.verb == "search" else None
    search = search or services.newest_job("run", "search", shown.path)
    found = Searched(points=(), steps=shown.steps, limits=_limits(now))
    if search is not None:
        before = services.searched_before(shown, search)
        found = before or services.searched(search, services.steps_of(search, shown))
    steps = found.steps or shown.steps
    trial, tried = _trial(shown, now, judge, device)
    if tried is not None and tried.get("evaluator_failed"):  # What was known stays; it is not asked again.
        judge = None
    measured = _measured(shown, steps, judge, found)
    rates, estimating = _rates_of(shown, steps, codec, measured)
    points = (*measured, *services.estimates(estimating))
    writing = services.newest_job("run", "shrink", shown.path)
    written = None
    if writing is not None and writing.state == "finished":
        try:
            written = shrinking.written_by(writing)
        except ServiceError:
            written = None
    return Board(
        shown=shown,
        now=now,
        judge=judge,
        codec=codec,
        search=search,
        found=found,
        points=points,
        rates=None if rates is None else calibrated(shown, rates, points),
        estimating=estimating,
        trial=trial,
        tried=tried,
        writing=writing,
        written=written,
    )


def may_begin() -> bool:
    """Whether trials and estimates begin by themselves: once the reader asked for the run."""
    return state.was_asked_for()


def _limits(now: Chosen) -> dict[str, float]:
    return {} if now.bound.kind == "none" else {now.bound.kind: now.bound.value}


def _trial(
    shown: Subject, now: Chosen, judge: EvaluatorCode | None, device: str
) -> tuple[Job | None, Mapping[str, Any] | None]:
    """Return the trial of two steps, begun where nothing is known and the reader asked for the run."""
    known = shrinking.known_estimate(shown, now, judge)
    if known is not None:
        return None, known
    try:
        work = shrinking.estimate_work(shown, now, judge, device)
    except ServiceError:
        return None, None
    trial = services.job_of(work)
    if trial is not None and trial.state == "interrupted" and may_begin():
        services.resume_job(trial)
    if trial is None and may_begin():
        trial = services.start_job(work, again=False)
    if trial is None:
        return None, None
    result = services.read_result(trial) if trial.state == "finished" else None
    return trial, shrinking.told(result) if result else None


def _measured(
    shown: Subject, steps: Sequence[int], judge: EvaluatorCode | None, found: Searched
) -> tuple[SearchPoint, ...]:
    """Return everything that was measured of these steps."""
    own: tuple[SearchPoint, ...] = ()
    published: tuple[SearchPoint, ...] = ()
    if judge is not None:
        own = services.measured_configs(shown, steps, judge, found)
        published = services.baselines(services.job_of(services.baselines_work(shown, steps, judge)))
    archives = services.measured_archives(shown, judge, steps)
    return (*found.points, *own, *published, *archives)


def _rates_of(
    shown: Subject, steps: Sequence[int], codec: str, measured: Sequence[SearchPoint]
) -> tuple[Rates | None, Job | None]:
    """Return what each tensor costs, and the job that tells it; estimates are made anew once trials are."""
    work = services.estimating_work(shown, steps, codec, is_calibrated=bool(measured))
    job = services.job_of(work)
    is_wanted = may_begin() and weight_bytes(shown) <= ASK_ABOVE_BYTES
    if job is None and is_wanted:
        job = services.start_job(work)
    elif job is not None and job.state == "interrupted" and is_wanted:
        job = services.resume_job(job)
    found = rates(shown, job, codec)
    if found is None and measured:  # Those from before anything was measured, while they are made anew.
        earlier = services.job_of(services.estimating_work(shown, steps, codec, is_calibrated=False))
        found, job = rates(shown, earlier, codec), job or earlier
    return found, job


def figures(board: Board, config: Mapping[str, Any]) -> Figures | None:
    """Return what a configuration takes and costs; of an empty one, of steps that keep the bound each.

    A configuration that was measured is measured; else it is estimated. None where nothing is known.
    """
    now = replace(board.now, config=config)
    if board.written is not None and board.written.is_of(now):
        return _written(board.written, now)
    if not config or now.keep == "exact":
        return _automatic(board)
    asked = _full(config)
    measured = [one for one in board.points if one.whole and not one.is_estimated and one.config]
    seen = [one for one in measured if one.config == config or (asked and _full(one.config) == asked)]
    point = max(seen, key=lambda one: one.restore_cost is not None, default=None)
    told = predicted(board.shown, board.rates, config)
    if point is not None:
        total = None if board.rates is None else board.rates.ratio_total_of(point.ratio)
        return _of_weights(board, MEASURED, point.ratio, total, point)
    if told is None:
        return _guessed(board, config)
    factor = cost_per_nat(board.points)
    costs = {
        "drop": told.drop,
        "divergence": told.divergence,
        "restore_cost": None if factor is None or told.divergence is None else factor * told.divergence,
    }
    return _of_weights(board, ESTIMATED, told.ratio_weights, told.ratio_total, costs)


def _written(made: Written, now: Chosen) -> Figures:
    """Return what was measured of an archive that has just what is chosen."""
    chain, found = made.chain, made.comparison
    costs = {name: getattr(found, f"max_{name}", None) for name in ("restore_cost", "drop", "divergence")}
    if now.keep == "exact":
        costs = dict.fromkeys(costs, 0.0)
    return Figures(MEASURED, chain.nbytes, chain.ratio_total, chain.bits_per_weight, **costs)


def _automatic(board: Board) -> Figures | None:
    """Return what is known of an archive whose steps keep the bound each, as two steps were tried."""
    row = None if board.tried is None else board.tried["rows"].get(board.now.keep)
    if row is None:
        return None
    nbytes = float(row["nbytes"])
    exact = 0.0 if row["basis"] == "exact" else None
    judged = row["basis"] in ("judged", "predicted")
    return Figures(
        ESTIMATED,
        nbytes,
        board.raw_nbytes / nbytes if nbytes else None,
        row["bits_per_weight"],
        restore_cost=row["restore_cost"] if judged else exact,
        drop=row.get("drop") if judged else exact,
        divergence=row.get("divergence") if judged else exact,
    )


def _of_weights(board: Board, basis: str, ratio: float, total: float | None, costs: Any) -> Figures:
    """Return figures from the ratio of the weights, and of everything where that is stored."""
    costs = costs if isinstance(costs, Mapping) else costs._asdict()
    worst = {name: costs[name] for name in ("restore_cost", "drop", "divergence")}
    weights = len(board.shown.steps) * weight_bytes(board.shown)
    n_weights = len(board.shown.steps) * sum(row.numel for row in board.shown.model_tensors)
    bits = 8 * weights / ratio / n_weights if ratio and n_weights else None
    if board.now.keep == "weights":
        nbytes = weights / ratio if ratio else None
    else:
        nbytes = board.raw_nbytes / total if total and math.isfinite(total) else None
    every = board.raw_nbytes / nbytes if nbytes else None
    return Figures(basis, nbytes, every, bits, **worst)


def _full(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a configuration with the defaults of its codec, as archives have it; None of no codec here."""
    with contextlib.suppress(ServiceError):
        usual = codec_settings(str(config["codec"]))
        settings = {**usual, **config.get("settings", {})}
        return {"codec": config["codec"], "settings": settings, "override": list(config.get("override", ()))}
    return None


def _guessed(board: Board, config: Mapping[str, Any]) -> Figures | None:
    """Return the estimate of settings that are no single number a layer; None while layers are estimated."""
    if board.rates is None and number_of(str(config["codec"])) is not None:
        return None
    n_trials = sum(one.n_steps for one in board.points if not one.is_estimated)
    with contextlib.suppress(ServiceError):
        guess = services.estimated(board.shown, board.found.steps, config, n_trials)
        costs = {"restore_cost": None, "drop": guess.drop, "divergence": guess.divergence}
        return _of_weights(board, ESTIMATED, guess.ratio_weights, guess.ratio_total, costs)
    return None


def cost_per_nat(points: Sequence[SearchPoint]) -> float | None:
    """Return the restore cost of a nat of divergence, as points tell where both were measured."""
    known = [(one.restore_cost, one.divergence) for one in points if not one.is_estimated]
    shares = [cost / divergence for cost, divergence in known if cost and divergence]
    return statistics.median(shares) if shares else None


def course(board: Board, figure: str) -> list[float]:
    """Return a figure of the uniform settings along the curve; NaN where it is not known."""
    if board.rates is None:
        return []
    if figure != "restore_cost":
        return [float(value) for value in board.rates.course(figure)]
    factor = cost_per_nat(board.points) or math.nan
    return [factor * float(value) for value in board.rates.course("divergence")]


def number_of(codec: str) -> Knob | None:
    """Return the one number that a codec is turned by; None of a codec without, or with several settings."""
    with reported():
        tuning = get_codec(codec).tuning
    return tuning.knob if tuning is not None and tuning.knob.within is not None else None


def weight_bytes(shown: Subject) -> int:
    """Return the raw bytes of weights and buffers of the last checkpoint."""
    return sum(row.nbytes for row in shown.model_tensors)


def rates(shown: Subject, job: Job | None, codec: str) -> Rates | None:
    """Return what each tensor costs from fine to coarse, as a finished job's estimates tell; else None."""
    number = number_of(codec)
    if job is None or job.state != "finished" or number is None:
        return None
    return _rates(job.job_id, str(shown.path), number.settings[0], job, shown.model_tensors)


@st.cache_resource(show_spinner=False, max_entries=8)
def _rates(job_id: str, path: str, setting: str, _job: Job, _specs: Sequence[TensorSpec]) -> Rates | None:
    from inshrink_core.search.rates import rates_of

    try:
        return rates_of(list(_job.told()), setting, _specs)
    except InputError:  # Estimates of another version, that tell of no tensors.
        return None


def calibrated(shown: Subject, found: Rates, points: Sequence[SearchPoint]) -> Rates:
    """Return rates whose quality passes through what was measured with their codec.

    Parameters
    ----------
    shown, found
        The run, and what its tensors cost.
    points
        Measured and estimated ones; of a chain that was given up, the worst step is not known.
    """
    from inshrink_core.search.rates import MeasuredAllocation

    measured = []
    for one in points:
        if one.whole and not one.is_estimated and one.config.get("codec") == found.codec:
            try:
                values = _allocation(shown, json.dumps(one.config, sort_keys=True), found.keys)
            except ServiceError:  # An archive may be of another codec version, or of other tensors.
                continue
            measured.append(MeasuredAllocation(values, one.drop, one.divergence))
    return found.calibrated(measured)


def predicted(shown: Subject, found: Rates | None, config: Mapping[str, Any]) -> Predicted | None:
    """Return what rates tell of a configuration.

    Parameters
    ----------
    shown, found
        The run, and what its tensors cost, if that is known.
    config
        The configuration.

    Returns
    -------
    Predicted or None
        None where it is of another codec, or sets what the codec's one number does not.

    Raises
    ------
    ServiceError
        The configuration asks for what the codec does not have.
    """
    if found is None or found.codec != config["codec"]:
        return None
    usual = codec_settings(found.codec)
    told = [config.get("settings", {}), *config.get("override", ())]
    set_there = {name: value for one in told for name, value in one.items() if value != usual.get(name)}
    if set(set_there) - {"match", "layer_type", *found.settings}:
        return None
    return found.predict(allocation_of(shown, config, found.keys))


@st.cache_data(show_spinner=False, max_entries=64, hash_funcs={Subject: lambda shown: str(shown.path)})
def _allocation(shown: Subject, config: str, keys: tuple[str, ...]) -> list[float]:
    return allocation_of(shown, json.loads(config), keys)


def allocation_of(shown: Subject, config: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
    """Return the number that a configuration gives each of some tensors.

    Raises
    ------
    ServiceError
        The configuration asks for what the codec does not have.
    """
    number = number_of(str(config["codec"]))
    if number is None:
        raise ValueError("a codec of several settings has no number to allocate")
    with reported():
        chain = make_chain_config(
            "", str(config["codec"]), engine_settings(config), None, 32, device="cpu", threads=1
        )
        values = assigned(chain, shown.model_tensors, number.settings[0])
    return [float(values[key]) for key in keys]


def with_allocation(
    shown: Subject, config: Mapping[str, Any], keys: Sequence[str], values: Sequence[float]
) -> dict[str, Any]:
    """Return a configuration that gives each tensor its number, and is otherwise as it was.

    Parameters
    ----------
    shown, config
        The run, and the configuration.
    keys, values
        Tensors and their numbers; others keep what the configuration gives them.

    Notes
    -----
    The number that most of the values have becomes that of all, and the rest are overrides.
    """
    number = number_of(str(config["codec"]))
    if number is None:
        raise ValueError("a codec of several settings has no number to allocate")
    specs = shown.model_tensors
    now = dict(
        zip((spec.key for spec in specs), allocation_of(shown, config, [s.key for s in specs]), strict=True)
    )
    now |= {key: float(f"{value:.4g}") for key, value in zip(keys, values, strict=True)}
    shares: dict[float, int] = {}
    for value in now.values():
        shares[value] = shares.get(value, 0) + 1
    base = max(shares, key=lambda value: (shares[value], -value))
    kept = [
        rest
        for one in config.get("override", ())
        if set(rest := {name: value for name, value in one.items() if name not in number.settings})
        - {"match", "layer_type"}
    ]
    overrides = [*kept, *assignments(specs, now, base, number.settings)]
    changed = {
        **config,
        "settings": {**config.get("settings", {}), **dict.fromkeys(number.settings, base)},
        "override": overrides,
    }
    if not overrides:
        del changed["override"]
    return changed
