"""Bits for every layer: what a codec of one number costs each tensor, and settings that give each its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st
from inshrink_app.jobs.job import Job
from inshrink_app.model.config import engine_settings
from inshrink_app.model.problem import ServiceError
from inshrink_app.model.subject import Subject
from inshrink_app.services.inside import reported
from inshrink_app.services.searching import SearchPoint, codec_settings

if TYPE_CHECKING:
    from inshrink_core.checkpoint import TensorSpec
    from inshrink_core.codec import Knob
    from inshrink_core.search.rates import Predicted, Rates

__all__ = ["allocation_of", "calibrated", "number_of", "predicted", "rates", "raw_bytes", "with_allocation"]


def number_of(codec: str) -> Knob | None:
    """Return the one number that a codec is turned by; None of a codec without, or with several settings."""
    from inshrink_core.codec import get_codec

    with reported():
        tuning = get_codec(codec).tuning
    return tuning.knob if tuning is not None and tuning.knob.within is not None else None


def raw_bytes(shown: Subject) -> int:
    """Return the raw bytes of all tensors of the last checkpoint."""
    return sum(row.nbytes for row in shown.tensors)


def rates(shown: Subject, job: Job | None, codec: str) -> Rates | None:
    """Return what each tensor costs from fine to coarse, as a finished job's estimates tell; else None."""
    number = number_of(codec)
    if job is None or job.state != "finished" or number is None:
        return None
    return _rates(job.job_id, str(shown.path), number.settings[0], job, shown.model_tensors)


@st.cache_resource(show_spinner=False, max_entries=8)
def _rates(job_id: str, path: str, setting: str, _job: Job, _specs: Sequence[TensorSpec]) -> Rates | None:
    from inshrink_core.errors import InputError
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
    from inshrink_core.chain.config import assigned
    from inshrink_core.chain.defaults import make_chain_config

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
    from inshrink_core.chain.config import assignments

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
