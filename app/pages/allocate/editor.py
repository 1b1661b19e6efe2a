"""A configuration to change by hand: its way back, its draft, its settings, and the way on to Export."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.model import Problem, ServiceError, Subject, toml_text, when
from inshrink_app.model import config as search_config
from inshrink_app.pages.allocate.allocating import Board
from inshrink_app.services import Edit
from inshrink_app.widgets import fmt, listing, problem

_EDIT = "search.edit"
_KEPT = "search.kept"
_OWNER = "search.owner"
_PICKED = "search.picked"
_LOAD = "search.load"
_LABEL_WIDTH = 60
_MAX_NAMED = 5


def pick(place: object) -> None:
    """Take note that a point was clicked; the next drawing loads it."""
    if isinstance(place, int):
        st.session_state[_PICKED] = place


def current(board: Board, job: Job | None) -> Edit:
    """Return what is in the editor; a point that was picked, or the best of a new search, goes into it first.

    Both are steps that *Undo* takes back. What was made by hand is there again after a reload, and a search
    leaves it as it stands.
    """
    shown, points = board.shown, board.points
    edit: Edit | None = st.session_state.get(_EDIT)
    if edit is None or edit.run != str(shown.path):
        edit = st.session_state[_EDIT] = services.kept_draft(shown)
    if edit is None or (not edit.is_by_hand and edit.config["codec"] != board.codec):
        first = list(services.codec_settings(board.codec).items())[:1]
        edit = Edit(str(shown.path), {"codec": board.codec, "settings": dict(first)})
        st.session_state[_EDIT] = edit
    place = st.session_state.pop(_PICKED, -1)
    point = points[place] if 0 <= place < len(points) else None
    if point is not None and point.config:
        edit.load(point)
        label = fmt.markdown(fmt.elided(point.name or point.label, _LABEL_WIDTH))
        st.toast(f"Loaded: {label}. Undo goes back.", icon=":material/upload:")
    elif point is not None:
        st.toast("Each step of this archive has settings of its own: there is no single configuration.")
    best = board.found.best
    is_new = job is not None and job.state == "finished" and job.job_id != edit.searched
    if best is not None and is_new and not edit.is_changed:
        edit.searched = "" if job is None else job.job_id
        edit.load(best)
    _keep(edit)
    return edit


def _owner() -> str:
    """Return what tells this tab from others."""
    return str(st.session_state.setdefault(_OWNER, uuid4().hex))


def _keep(edit: Edit) -> None:
    """Keep what was made by hand, and forget it once all was undone; what another tab has made stays."""
    now = (edit.run, edit.version, frozenset(edit.locked)) if edit.is_by_hand else None
    last = st.session_state.get(_KEPT)
    if now != last:
        st.session_state[_KEPT] = now
        is_as_kept = last is None and edit.owner not in ("", _owner())
        if not is_as_kept and (now is not None or (last is not None and last[0] == edit.run)):
            services.keep_draft(edit, _owner())


def way_back(board: Board) -> None:
    """Offer to go back by one change, or to what was loaded, or on to the best; say whose draft it is."""
    edit, best = board.edit, board.found.best
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Undo",
            icon=":material/undo:",
            on_click=edit.undo,
            disabled=not edit.before,
            key="allocate.undo",
            help="Takes back the last change: of bits, of settings, or what a search or a click has loaded.",
        )
        st.button(
            "Reset",
            icon=":material/restart_alt:",
            on_click=edit.reset,
            disabled=not edit.is_changed,
            help="Back to what was loaded.",
        )
        if best is not None and edit.config != best.config:
            st.button(
                "Load the best of the search",
                icon=":material/star:",
                on_click=edit.load,
                args=(best,),
                key="allocate.best",
                help=f"{fmt.ratio(best.ratio)} of the weights. Undo goes back to what stands here.",
            )
    loaded = "the default" if edit.origin is None else edit.origin.name or edit.origin.label
    changed = ", changed by hand" if edit.is_changed else ""
    said = f"{edit.config['codec']} · loaded: {fmt.elided(loaded, _LABEL_WIDTH)}{changed}"
    st.caption(fmt.markdown(said))
    _say_whose(board, edit)


def _say_whose(board: Board, edit: Edit) -> None:
    """Say where a draft comes from that this tab did not make, and offer one that was made since."""
    if (edit.is_changed or edit.locked) and edit.owner not in ("", _owner()):
        st.caption(f"Draft of {when(edit.at)}, made in another tab, or in this one before a reload.")
    there = services.kept_draft(board.shown)
    if there is None or there.owner == _owner() or (there.owner, there.at) == (edit.owner, edit.at):
        return
    st.warning(
        f"Another tab has changed the bits of this run since, at {when(there.at)}. What you change here "
        "takes the place of its draft.",
        icon=":material/tab:",
    )

    def take() -> None:
        edit.change(there.config)
        edit.origin, edit.locked = there.origin, set(there.locked)
        edit.owner, edit.at = there.owner, there.at

    st.button("Take over its draft", icon=":material/sync:", on_click=take, key="allocate.take")


def show_settings(board: Board) -> None:
    """Draw the table's other view: settings and overrides, and the configuration as a file."""
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _tables(board.shown, board.edit)
    with right:
        _load(board.shown, board.edit)
        n = fmt.counted(len(board.edit.config.get("override", ())), "override")
        with st.expander(f"As a file ({n})", icon=":material/description:"):
            st.code(toml_text(board.edit.config), language=None, wrap_lines=True)


def _tables(shown: Subject, edit: Edit) -> None:
    """Draw settings and overrides; they are taken in together."""
    names = list(services.codec_settings(str(edit.config["codec"])))
    layers = sorted({str(row.layer) for row in shown.model_tensors if row.layer})
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
        if st.form_submit_button("Use these settings", icon=":material/check:"):
            _take_in(shown, edit, settings, overrides)


def _take_in(shown: Subject, edit: Edit, settings: pd.DataFrame, overrides: pd.DataFrame) -> None:
    """Make a configuration of what the tables say, or say why it is none."""
    config = _usable(
        shown,
        lambda: search_config.edited(
            str(edit.config["codec"]), settings.to_numpy().tolist(), overrides.to_numpy().tolist()
        ),
        "fill the row, or select and delete it",
        "change or delete the row",
    )
    if config is None:
        return
    edit.change(config)
    edit.is_estimated = True
    st.rerun()


def _usable(
    shown: Subject, make: Callable[[], dict[str, Any]], malformed: str, unmeant: str
) -> dict[str, Any] | None:
    """Return a configuration that the run can be written with; else say why not, and what to do."""
    try:
        config = make()
        services.check_config(config)
    except ValueError as error:
        problem.show(Problem(str(error), remedy=malformed))
        return None
    except ServiceError as error:
        problem.show(error.problem)
        return None
    unmatched = services.unmatched_overrides(shown, config)
    if unmatched:
        listed = ", ".join(fmt.elided(one, 40) for one in unmatched[:_MAX_NAMED])
        problem.show(Problem(f"no tensor of this run matches {listed}", remedy=unmeant))
        return None
    return config


def offer(board: Board) -> None:
    """Offer to compress with what stands here; ask first where it breaks a bound."""
    edit, is_meant = board.edit, True
    if board.beyond:
        is_meant = st.checkbox("Apply it all the same", key=f"search.beyond.{json.dumps(edit.config)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button(
            "Apply to compress",
            type="secondary" if board.judge is not None else "primary",
            icon=":material/arrow_forward:",
            disabled=not is_meant,
            help="Carries this configuration on to the Export page.",
        ):
            carried = json.dumps({"run": str(board.shown.path), "config": edit.config})
            state.remember(**{state.CARRIED: carried, "codec": str(edit.config["codec"]), "what": "all"})
            state.go_to("export")
        listing.buttons(
            ("TOML", "inshrink.toml", toml_text(edit.config).encode()),
            ("JSON", "config.json", json.dumps(edit.config, indent=1).encode() + b"\n"),
        )


def _load(shown: Subject, edit: Edit) -> None:
    """Offer to take in a file; what this run or its codec does not know is said, and changes nothing."""
    with st.expander("Load inshrink.toml", icon=":material/upload_file:"):
        file = st.file_uploader(
            "A configuration, as it is saved here or by a search",
            type=["toml", "json"],
            key=f"{_LOAD}.{st.session_state.get(_LOAD, 0)}",
        )
        if file is None:
            return
        config = _usable(
            shown,
            lambda: search_config.loaded(file.getvalue(), file.name),
            "save one with the button TOML to see how it looks",
            "it is for another model",
        )
        if config is None:
            return
        st.session_state[_LOAD] = st.session_state.get(_LOAD, 0) + 1  # An empty box for the next file.
        state.clicked()
        edit.change(config)
        st.rerun()
