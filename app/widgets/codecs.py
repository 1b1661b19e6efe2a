"""What pages ask of the codecs that are installed: their labels, their knobs, and what searches them."""

from __future__ import annotations

from typing import Any

import streamlit as st

__all__ = ["ask_for_knob", "labels", "strategies"]


def labels(*, searched: bool = False) -> dict[str, str]:
    """Return what each codec of weights is called, by its name; the default comes first.

    Parameters
    ----------
    searched
        Only those that have something to search.
    """
    from inshrink_core.codec import DEFAULT_CODEC, codec_names, get_codec

    kinds = {name: get_codec(name) for name in sorted(codec_names(), key=lambda name: name != DEFAULT_CODEC)}
    return {
        name: kind.label or name
        for name, kind in kinds.items()
        if kind.stores_weights and (kind.tuning is not None or not searched)
    }


def strategies(codec: str) -> tuple[str, ...]:
    """Return the strategies that search a codec."""
    from inshrink_core.search.search import strategies_of
    from inshrink_core.search.space import space_of

    return strategies_of(space_of(codec, frozenset()))


def ask_for_knob(codec: str, page: str) -> dict[str, Any]:
    """Draw the knob of a codec on a page and return its settings; nothing where it has none."""
    from inshrink_core.codec import get_codec

    kind = get_codec(codec)
    if kind.tuning is None:
        return {}
    knob = kind.tuning.knob
    default = getattr(kind(), knob.settings[0])
    value = st.select_slider(
        knob.label or knob.settings[0],
        sorted({*knob.values, default}, reverse=knob.is_coarser(0, 1)),
        default,
        format_func="{:g}".format,
        key=f"{page}.{codec}.{knob.settings[0]}",
        help=f"{knob.unit.capitalize()}. To the right, frames are smaller and errors larger.".removeprefix(
            ". "
        ),
    )
    return kind.tuning.settings(value)
