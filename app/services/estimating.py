"""Configurations that nobody measured: whether they can be used, and what they would do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import streamlit as st
from inshrink_app.pages.search.config import engine_settings
from inshrink_app.pages.search.tables import Estimate
from inshrink_app.services.failures import reported
from inshrink_app.services.opening import opened
from inshrink_app.widgets.tables import Subject

__all__ = ["check_config", "codec_settings", "default_optimizer", "estimated", "unmatched_overrides"]


@st.cache_data(show_spinner=False, max_entries=32)
def codec_settings(codec: str) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a codec with their defaults."""
    from inshrink_core.codec import get_codec

    with reported():
        kind: Any = get_codec(codec)
    return tuple((one.name, one.default) for one in dataclasses.fields(kind))


def default_optimizer(codec: str, config: Mapping[str, Any]) -> str:
    """Return how the engine stores optimizer state beside such weights where nobody says."""
    from inshrink_core.chain import default_optimizer as of_engine

    with reported():
        return of_engine(codec, config)


def check_config(config: Mapping[str, Any]) -> None:
    """Ask the engine whether a configuration can be used.

    Raises
    ------
    ServiceError
        A setting that the codec does not have, or a value out of its range.
    """
    from inshrink_core.chain.defaults import make_configs

    with reported():
        make_configs(str(config["codec"]), engine_settings(config))


def unmatched_overrides(subject: Subject, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides that mean no weight of a run; writing with them would be refused."""
    rows = [row for row in subject.tensors if row.role in ("weight", "buffer")]
    found = []
    for one in config.get("override", ()):
        layer, match = one.get("layer_type"), str(one.get("match", "*"))
        if not any(layer in (None, row.layer) and fnmatchcase(row.name, match) for row in rows):
            found.append(f"{layer or ''} {match}".strip())
    return tuple(found)


def estimated(subject: Subject, steps: Sequence[int], config: Mapping[str, Any], known: int) -> Estimate:
    """Estimate what a configuration would do, without the evaluator: a few seconds at most.

    Parameters
    ----------
    subject, steps, config
        The run, steps of the chain, and the configuration.
    known
        Trials there are; with more of them an estimate is another one.

    Raises
    ------
    ServiceError
        The configuration asks for what the codec does not have.
    """
    path = str(subject.path)
    return _estimated(path, opened(path).token, tuple(steps), json.dumps(config, sort_keys=True), known)


@st.cache_data(show_spinner=False, max_entries=256)
def _estimated(path: str, token: str, steps: tuple[int, ...], config: str, known: int) -> Estimate:
    from inshrink_core.formats import open_run
    from inshrink_core.verbs.estimate import estimate

    document = json.loads(config)
    with reported():
        found = estimate(
            open_run(path),
            codec=document["codec"],
            config=engine_settings(document),
            steps=steps,
        )
    return Estimate(
        ratio=found.ratio_weights,
        drop=found.drop,
        divergence=found.divergence,
        rank_correlation=found.rank_correlation,
        n_trials=found.n_trials,
        n_steps=found.n_steps,
        sampled=found.sampled,
        notes=found.notes,
    )
