"""Bits for every layer: what a codec of one number costs each tensor, and settings that give each its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st
from inshrink_app.jobs import Job
from inshrink_app.model import ServiceError, Subject, engine_settings
from inshrink_app.services import Edit, EvaluatorCode, Searched
from inshrink_app.services.inside import reported
from inshrink_app.services.searching import SearchPoint, codec_settings, estimated
from inshrink_app.widgets import fmt

from inshrink_core.chain.config import assigned, assignments
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import Knob, get_codec
from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates


class Numbers(NamedTuple):
    """What stands in the editor comes to.

    Parameters
    ----------
    basis
        What the figures are: measured, or estimated.
    ratio_weights, ratio_total
        Of these steps; the total is None where it is not known.
    drop, divergence, restore_cost
        Of the worst step; None where not known.
    values, predicted
        The number that each tensor of the rates has, and what the rates tell; None where they tell nothing.
    """

    basis: str
    ratio_weights: float | None
    ratio_total: float | None
    drop: float | None
    divergence: float | None
    restore_cost: float | None = None
    values: Sequence[float] | None = None
    predicted: Predicted | None = None


class Board(NamedTuple):
    """What the page is about: steps, all that is known of them, and what is edited.

    Parameters
    ----------
    shown, steps, codec
        The run, and which steps and codec are searched.
    points
        Whatever was measured or estimated.
    rates
        What each tensor costs, calibrated; None while that is not known.
    limits
        Bounds on the ``drop`` and the ``divergence``, as far as there are.
    found
        What the search has found; without one, what is asked for.
    n_other_steps
        Trials of a search on other steps.
    judge
        The evaluator, where it may run.
    edit, numbers
        What is edited, and what it comes to.
    """

    shown: Subject
    steps: tuple[int, ...]
    codec: str
    points: tuple[SearchPoint, ...]
    rates: Rates | None
    limits: Mapping[str, float]
    found: Searched
    n_other_steps: int
    judge: EvaluatorCode | None
    edit: Edit
    numbers: Numbers | None = None

    @property
    def beyond(self) -> str:
        """The bounds that what stands here breaks, as far as that is known; empty for none."""
        if self.numbers is None:
            return ""
        limits = {"restore cost": self.found.limits.get("restore_cost"), **self.limits}
        if self.numbers.restore_cost is not None:  # It was measured, so nothing stands in for it.
            limits.pop("divergence", None)
        known = {name: getattr(self.numbers, name.replace(" ", "_")) for name in limits}
        broken = [
            name for name, value in known.items() if value is not None and value > (limits[name] or value)
        ]
        return " and ".join(broken)


def numbers_of(board: Board) -> Numbers | None:
    """Return what stands in the editor comes to: as it was measured, else as it is estimated.

    Raises
    ------
    ServiceError
        The configuration asks for what the codec does not have.
    """
    edit, rates = board.edit, board.rates
    told = predicted(board.shown, rates, edit.config)
    values = None
    if told is not None and rates is not None:
        values = allocation_of(board.shown, edit.config, rates.keys)
    alike = (one for one in board.points if one.whole and not one.is_estimated and one.config == edit.config)
    seen = max(alike, key=lambda one: one.restore_cost is not None, default=None)
    if seen is not None:
        total = None if rates is None else rates.ratio_total_of(seen.ratio)
        figures = (seen.drop, seen.divergence, seen.restore_cost)
        return Numbers("measured", seen.ratio, total, *figures, values, told)
    if told is not None and rates is not None:
        basis = "estimated" if rates.is_calibrated or rates.n_measured else "estimated, uncalibrated"
        figures = (told.drop, told.divergence, None)
        return Numbers(basis, told.ratio_weights, told.ratio_total, *figures, values, told)
    if not edit.is_estimated:
        return None
    n_trials = sum(one.n_steps for one in board.points if not one.is_estimated)
    guess = estimated(board.shown, board.steps, edit.config, n_trials)
    basis = "estimated" if guess.n_trials else "estimated, uncalibrated"
    return Numbers(basis, guess.ratio_weights, guess.ratio_total, guess.drop, guess.divergence)


def calibration(board: Board, rates: Rates) -> str:
    """Say what calibrates the quality that rates tell."""
    if rates.n_measured:
        return f"calibrated by {fmt.counted(rates.n_measured, 'measurement')} of this run"
    if rates.is_calibrated:
        return "calibrated by trials of this run"
    if any(one.archive for one in board.points):
        return (
            "not calibrated, so right to an order of magnitude at best: archives that keep a bound have "
            "settings of their own at each step, and none of this curve's"
        )
    return "not calibrated: nothing was measured of this run, so right to an order of magnitude at best"


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
