"""The configuration that the Search page carried on to the Export page."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st
from inshrink_app import state
from inshrink_app.search_config import engine_settings, toml_text
from inshrink_app.tables import Subject

__all__ = ["show"]

_CARRIED = "carried"


def show(shown: Subject) -> tuple[str, dict[str, Any]] | None:
    """Draw what was carried on for this run; return codec and settings, None where nothing was."""
    config = _carried(shown)
    if config is None:
        return None
    st.caption("Configuration from the Search page")
    st.code(toml_text(config), language="toml", wrap_lines=True)
    if st.button("Choose settings here instead", icon=":material/close:", type="tertiary"):
        state.retract(_CARRIED)
        st.rerun()
    return str(config["codec"]), engine_settings(config)


def _carried(shown: Subject) -> dict[str, Any] | None:
    """Read what is in the session; a link may say it too, and is not trusted to say sense."""
    try:
        told = json.loads(state.choice_text(_CARRIED))
        config = told["config"]
        if told["run"] != str(shown.path) or not isinstance(config["codec"], str):
            return None
        if not isinstance(config.get("settings", {}), dict):
            return None
        overrides = config.get("override", [])
        if not isinstance(overrides, list) or not all(isinstance(one, dict) for one in overrides):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(config)
