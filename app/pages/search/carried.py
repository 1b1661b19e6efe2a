"""The configuration that the Search page carries on to the Export page: offered there, shown here."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st
from inshrink_app import state
from inshrink_app.pages.search.config import Edit, engine_settings, toml_text
from inshrink_app.widgets.formatting import count_text
from inshrink_app.widgets.tables import Subject

__all__ = ["offer", "show"]

EXPORT_PAGE = "pages/export/view.py"

_CARRIED = "carried"


def show(shown: Subject) -> tuple[str, dict[str, Any]] | None:
    """Draw what was carried on for this run; return codec and settings, None where nothing was."""
    config = _carried(shown)
    if config is None:
        return None
    st.caption("Configuration from the Search page")
    st.code(toml_text(config), language=None, wrap_lines=True)
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


def offer(shown: Subject, edit: Edit) -> None:
    """Offer the configuration as a file, and to compress with it."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button(
            "Apply to compress",
            icon=":material/arrow_forward:",
            help="Carries this configuration on to the Export page.",
        ):
            state.remember(
                carried=json.dumps({"run": str(shown.path), "config": edit.config}),
                codec=str(edit.config["codec"]),
                what="all",
            )
            st.switch_page(EXPORT_PAGE)
        for form, text in (
            ("TOML", toml_text(edit.config)),
            ("JSON", json.dumps(edit.config, indent=1) + "\n"),
        ):
            st.download_button(
                form,
                text.encode(),
                file_name=f"config.{form.lower()}",
                mime="application/json" if form == "JSON" else "application/toml",
                key=f"search.config.{form}",
                on_click="ignore",
                type="tertiary",
                icon=":material/download:",
                help="For inshrink compress --config",
            )
    n = count_text(len(edit.config.get("override", ())))
    with st.expander(f"As a file ({n} overrides)", icon=":material/description:"):
        st.code(toml_text(edit.config), language=None, wrap_lines=True)
