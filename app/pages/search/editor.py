"""A configuration to change by hand: what a point of the search had, or the default; estimates at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.pages.search import carried as search_carried
from inshrink_app.pages.search import config as search_config
from inshrink_app.pages.search import result as search_result
from inshrink_app.pages.search.config import Edit
from inshrink_app.pages.search.tables import Searched, SearchPoint
from inshrink_app.widgets import problem
from inshrink_app.widgets.formatting import (
    counted,
    elide,
    markdown_text,
    percent_text,
    ratio_text,
    share_text,
    value_text,
)
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

__all__ = ["forget", "show"]

_EDIT = "search.edit"
_LABEL_WIDTH = 90
_MAX_NAMED = 5


def forget() -> None:
    """Begin anew with the best of the next search."""
    st.session_state.pop(_EDIT, None)


def show(
    shown: Subject,
    found: Searched | None,
    compared: Sequence[SearchPoint],
    steps: Sequence[int],
    codec: str,
) -> None:
    """Draw the editor.

    Parameters
    ----------
    shown
        The run.
    found, compared
        What the search found and its baselines: points that can be loaded.
    steps, codec
        What to estimate on without a search, and what to begin with.
    """
    points = (*(found.points if found is not None else ()), *compared)
    edit = _current(shown, found, points, codec)
    used = found.steps if found is not None and found.steps else tuple(steps)
    with st.container(border=True):
        st.header("Configuration", anchor=False)
        loaded = "the default" if edit.origin is None else elide(edit.origin.label, _LABEL_WIDTH)
        st.caption(
            markdown_text(
                f"{edit.config['codec']} · loaded: {loaded}{', changed' if edit.is_changed else ''}"
            )
        )
        left, right = st.columns([3, 2], gap="medium")
        with left:
            _tables(shown, edit)
            _buttons(edit)
        with right:
            _figures(shown, edit, used, sum(one.n_steps for one in points if not one.is_estimated))
            search_carried.offer(shown, edit)


def _current(shown: Subject, found: Searched | None, points: Sequence[SearchPoint], codec: str) -> Edit:
    """Return what is in the editor; a point that was picked goes into it first."""
    edit: Edit | None = st.session_state.get(_EDIT)
    place = search_result.picked(len(points))
    if place is not None and edit is not None and edit.run == str(shown.path):
        edit.load(points[place])
    if edit is None or edit.run != str(shown.path) or (edit.origin is None and not edit.before):
        best = points[place] if place is not None else None if found is None else found.best
        if best is None:
            name, value = services.codec_settings(codec)[0]
            config: dict[str, Any] = {"codec": codec, "settings": {name: value}}
        else:
            config = search_config.plain(best.config)
        if edit is None or edit.run != str(shown.path) or edit.config != config:
            version = 0 if edit is None else edit.version + 1
            edit = Edit(str(shown.path), config, best, version=version)
            st.session_state[_EDIT] = edit
    return edit


def _tables(shown: Subject, edit: Edit) -> None:
    """Draw settings and overrides; they are taken in together."""
    names = [name for name, _ in services.codec_settings(str(edit.config["codec"]))]
    layers = sorted({row.layer for row in shown.tensors if row.role in ("weight", "buffer")})
    text = st.column_config.TextColumn
    with st.form("search.editor", border=False):
        st.caption("Settings of all tensors")
        settings = st.data_editor(
            pd.DataFrame(search_config.setting_rows(edit.config), columns=["setting", "value"], dtype=str),
            key=f"search.settings.{edit.version}",
            alt="Settings of all tensors, to be edited",
            hide_index=True,
            num_rows="dynamic",
            column_config={
                "setting": st.column_config.SelectboxColumn("setting", options=names, required=True),
                "value": text("value", required=True),
            },
        )
        st.caption("Instead of them, for a layer type, for names that match a pattern, or both")
        overrides = st.data_editor(
            pd.DataFrame(
                search_config.override_rows(edit.config),
                columns=list(search_config.OVERRIDE_COLUMNS),
                dtype=str,
            ),
            key=f"search.overrides.{edit.version}",
            alt="Settings of some tensors, by layer type and name, to be edited",
            hide_index=True,
            num_rows="dynamic",
            column_config={
                "layer type": st.column_config.SelectboxColumn("layer type", options=["", *layers]),
                "names": text("names", help="A pattern of parameter names, as *.attn.* or head.?"),
                "setting": st.column_config.SelectboxColumn("setting", options=names),
                "value": text("value"),
            },
        )
        if st.form_submit_button("Estimate", icon=":material/calculate:"):
            _take_in(shown, edit, settings, overrides)


def _take_in(shown: Subject, edit: Edit, settings: pd.DataFrame, overrides: pd.DataFrame) -> None:
    """Make a configuration of what the tables say, or say why it is none."""
    try:
        config = search_config.edited(
            str(edit.config["codec"]), settings.to_numpy().tolist(), overrides.to_numpy().tolist()
        )
        services.check_config(config)
    except ValueError as error:
        problem.show(Problem(str(error), remedy="fill the row, or select and delete it"))
        return
    except ServiceError as error:
        problem.show(error.problem)
        return
    unmatched = services.unmatched_overrides(shown, config)
    if unmatched:
        listed = ", ".join(elide(one, 40) for one in unmatched[:_MAX_NAMED])
        problem.show(
            Problem(f"no tensor of this run is meant by {listed}", remedy="change or delete the row")
        )
        return
    edit.change(config)
    edit.is_estimated = True
    st.rerun()


def _buttons(edit: Edit) -> None:
    """Offer to go back by one change, or to what was loaded."""
    with st.container(horizontal=True):
        if st.button("Undo", icon=":material/undo:", disabled=not edit.before):
            edit.undo()
            st.rerun()
        if st.button(
            "Reset",
            icon=":material/restart_alt:",
            disabled=not edit.is_changed,
            help="Back to what was loaded.",
        ):
            edit.reset()
            st.rerun()


def _figures(shown: Subject, edit: Edit, steps: Sequence[int], known: int) -> None:
    """Draw what was measured of the point that was loaded, and what is estimated of what stands here."""
    origin = edit.origin
    if origin is not None:
        st.caption(f"{origin.basis.capitalize()}, as loaded, on {counted(origin.n_steps, 'step')}")
        _row(origin.ratio, origin.drop, origin.divergence, origin.basis)
    if not edit.is_estimated:
        st.caption("Change the tables and press Estimate: the ratio and the drop that follow, in seconds.")
        return
    try:
        with st.spinner("Estimating…"):
            guess = services.estimated(shown, steps, edit.config, known)
    except ServiceError as error:
        problem.show(error.problem)
        return
    st.caption(f"Estimated, as it stands, on {counted(guess.n_steps, 'step')}")
    _row(
        guess.ratio,
        guess.drop,
        guess.divergence,
        "estimated",
        "" if guess.n_trials else "estimated, uncalibrated",
    )
    words = f"Encoded: {share_text(guess.sampled)} of the weights. "
    if guess.n_trials:
        words += f"The drop is predicted from {counted(guess.n_trials, 'trial')}"
        if guess.rank_correlation is not None:
            words += f"; rank correlation with what was measured {guess.rank_correlation:.2f}"
        words += "."
    else:
        words += " ".join(note[:1].upper() + note[1:].rstrip(".") + "." for note in guess.notes)
    st.caption(markdown_text(words))


def _row(ratio: float, drop: float | None, divergence: float | None, basis: str, caveat: str = "") -> None:
    """Draw the figures of one configuration, and what they are; a caveat is about drop and divergence."""
    with st.container(horizontal=True, gap="small"):
        for label, value, word in (
            ("Ratio", ratio_text(ratio), basis),
            ("Worst drop", percent_text(drop), caveat or basis),
            ("Divergence", "–" if divergence is None else value_text(divergence), caveat or basis),
        ):
            st.metric(label, value, delta=word, delta_color="off", delta_arrow="off", border=True)
