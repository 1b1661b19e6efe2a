"""What pages call the codecs, and the setting of each that they offer first: the one table of codecs here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import streamlit as st

__all__ = ["BASELINES", "KNOBS", "LABELS", "STRATEGIES", "ask_for_knob"]

LABELS: Mapping[str, str] = {
    "lattice": "Lattice",
    "inshrinkerator": "Inshrinkerator",
    "uniform": "Uniform",
    "qd": "QD",
    "lc-checkpoint": "LC-Checkpoint",
    "excp": "ExCP",
    "context": "Context",
    "lossless": "Lossless",
}

_GRID = ("auto", "guided", "random", "grid")
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    name: ("auto", "allocation", "bracket", "random", "grid") if name == "lattice" else _GRID
    for name in LABELS
    if name != "lossless"
}
"""Codecs that have something to search, and the strategies that search each."""

BASELINES: Mapping[str, tuple[str, str]] = {
    "Lossless": ("lossless", ""),
    "Uniform, 8 bit": ("uniform", "bits=8"),
    "Uniform, 4 bit": ("uniform", "bits=4"),
    "Inshrinkerator": ("inshrinkerator", "bins"),
    "QD": ("qd", "bits"),
    "LC-Checkpoint": ("lc-checkpoint", "bits"),
    "ExCP": ("excp", "alpha"),
    "Context": ("context", "alpha"),
}
"""What a search is compared with: codec, and the setting that is held; without a value, as published."""


class Knob(NamedTuple):
    """The setting of a codec that trades size for accuracy, and the values that a page offers.

    `first` is the one it begins with; None for the codec's default.
    """

    setting: str
    label: str
    least: float
    most: float
    spacing: float
    tip: str
    first: float | None = None


KNOBS: Mapping[str, Knob] = {
    "lattice": Knob(
        "coarseness", "Coarseness", 0.25, 10.0, 0.25, "Larger makes smaller frames and larger errors."
    ),
    "inshrinkerator": Knob("bins", "Bins", 4, 64, 4, "Values a tensor is rounded to.", 32),
    "uniform": Knob("bits", "Bits", 2, 8, 1, "Width of a rounded weight.", 8),
}


def ask_for_knob(codec: str, defaults: Mapping[str, Any], page: str) -> dict[str, Any]:
    """Draw the setting of a codec on a page and return it; nothing where it has none."""
    knob = KNOBS.get(codec)
    if knob is None:
        return {}
    first = knob.first if knob.first is not None else type(knob.least)(defaults[knob.setting])
    key = f"{page}.{knob.setting}"
    value = st.slider(knob.label, knob.least, knob.most, first, knob.spacing, key=key, help=knob.tip)
    return {knob.setting: value}
