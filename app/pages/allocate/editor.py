"""A configuration to change by hand, with estimates at once; and what is carried on to the Export page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import config as search_config
from inshrink_app.model.config import toml_text
from inshrink_app.model.problem import Problem, ServiceError
from inshrink_app.model.subject import Subject
from inshrink_app.pages.allocate import allocating
from inshrink_app.pages.allocate.layers import basis
from inshrink_app.services import Edit, Searched, SearchPoint
from inshrink_app.widgets import fmt, problem
from inshrink_app.widgets.layout import answer, facts, section

if TYPE_CHECKING:
    from inshrink_core.search.rates import Rates


_EDIT = "search.edit"
_KEPT = "search.kept"
_PICKED = "search.picked"
_LOAD = "search.load"
_LABEL_WIDTH = 90
_MAX_NAMED = 5


def forget() -> None:
    """Begin anew with the best of the next search, but for what was made by hand: that stays."""
    edit: Edit | None = st.session_state.get(_EDIT)
    if edit is not None and not edit.before:
        edit.origin = None


def pick(place: object) -> None:
    """Take note that a point was clicked; the next drawing loads it."""
    if isinstance(place, int):
        st.session_state[_PICKED] = place


def _picked(n_points: int) -> int | None:
    """Return the point that was picked since this was asked last; None for none."""
    place = st.session_state.pop(_PICKED, None)
    return place if isinstance(place, int) and 0 <= place < n_points else None


def show(
    shown: Subject,
    edit: Edit,
    found: Searched | None,
    points: Sequence[SearchPoint],
    steps: Sequence[int],
    rates: Rates | None,
) -> None:
    """Draw the editor.

    Parameters
    ----------
    shown, edit
        The run, and what is in the editor.
    found, points
        What the search found, and with its baselines: points that can be loaded.
    steps
        What to estimate on without a search.
    rates
        What each tensor costs, calibrated; None while that is not known.
    """
    used = found.steps if found is not None and found.steps else tuple(steps)
    with section("Configuration"):
        loaded = "the default" if edit.origin is None else fmt.elided(edit.origin.label, _LABEL_WIDTH)
        st.caption(
            fmt.markdown(f"{edit.config['codec']} · loaded: {loaded}{', changed' if edit.is_changed else ''}")
        )
        left, right = st.columns([3, 2], gap="medium")
        with left:
            _tables(shown, edit)
        with right:
            known = sum(one.n_steps for one in points if not one.is_estimated)
            beyond = _figures(shown, edit, used, known, found or Searched(points=()), rates)
            _offer(shown, edit, beyond)


def current(shown: Subject, found: Searched | None, points: Sequence[SearchPoint], codec: str) -> Edit:
    """Return what is in the editor; a point that was picked goes into it first.

    What was made by hand is there again after a reload, and is kept as it stands.
    """
    edit: Edit | None = st.session_state.get(_EDIT)
    if edit is None or edit.run != str(shown.path):
        edit = st.session_state[_EDIT] = services.kept_draft(shown)
    place = _picked(len(points))
    if place is not None and edit is not None:
        edit.load(points[place])
        label = fmt.markdown(fmt.elided(points[place].label, _LABEL_WIDTH))
        st.toast(f"Loaded into the configuration above: {label}", icon=":material/upload:")
    if edit is None or (edit.origin is None and not edit.before):
        best = points[place] if place is not None else None if found is None else found.best
        if best is None:
            first = list(services.codec_settings(codec).items())[:1]
            config: dict[str, Any] = {"codec": codec, "settings": dict(first)}
        else:
            config = search_config.plain(best.config)
        if edit is None or edit.config != config:
            version, locked = (0, set()) if edit is None else (edit.version + 1, edit.locked)
            edit = Edit(str(shown.path), config, best, version=version, locked=locked)
            st.session_state[_EDIT] = edit
        edit.origin = best
    _keep(edit)
    return edit


def _keep(edit: Edit) -> None:
    """Keep what was made by hand, and forget it once all was undone; what another tab has made stays."""
    now = (edit.run, edit.version, frozenset(edit.locked)) if edit.is_by_hand else None
    last = st.session_state.get(_KEPT)
    if now != last:
        st.session_state[_KEPT] = now
        if now is not None or (last is not None and last[0] == edit.run):
            services.keep_draft(edit)


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
        if st.form_submit_button("Estimate", icon=":material/calculate:"):
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


def _figures(
    shown: Subject, edit: Edit, steps: Sequence[int], known: int, found: Searched, rates: Rates | None
) -> str:
    """Draw what was measured of the point that was loaded, and what is estimated of what stands here.

    Returns
    -------
    str
        The bounds that the configuration breaks, as far as that is known; empty for none.
    """
    origin, beyond = edit.origin, ""
    if origin is not None:
        st.caption(f"{origin.basis.capitalize()}, as loaded, on {fmt.counted(origin.n_steps, 'step')}")
        _row(origin.ratio, origin.drop, origin.divergence, origin.basis)
        beyond = "" if edit.is_changed else found.beyond(origin.drop, origin.divergence)
    if not edit.is_estimated:
        st.caption("Change the tables and press Estimate: the ratio and the drop that follow, in seconds.")
        return beyond
    guess = answer(lambda: services.estimated(shown, steps, edit.config, known), "Estimating…")
    if guess is None:
        return beyond
    # What stands above of the same configuration is calibrated by all that was measured, trials included.
    same = answer(lambda: allocating.predicted(shown, rates, edit.config))
    drop, divergence = (guess.drop, guess.divergence) if same is None else (same.drop, same.divergence)
    st.caption(f"Estimated, as it stands, on {fmt.counted(guess.n_steps, 'step')}")
    words = f"Encoded: {fmt.share(guess.sampled)} of the weights. "
    is_known = guess.n_trials > 0
    if rates is not None and same is not None:
        words += f"Drop and divergence as above: {basis(rates)}."
        is_known = rates.is_calibrated or rates.n_measured > 0
    elif guess.n_trials:
        words += f"The drop is predicted from {fmt.counted(guess.n_trials, 'trial')}"
        if guess.rank_correlation is not None:
            words += f"; rank correlation with what was measured {guess.rank_correlation:.2f}"
        words += "."
    else:
        words += " ".join(map(fmt.sentence, guess.notes))
    _row(guess.ratio_weights, drop, divergence, "estimated", "" if is_known else "estimated, uncalibrated")
    st.caption(fmt.markdown(words))
    is_new = origin is None or edit.is_changed
    return found.beyond(drop, divergence) if is_new else beyond


def _row(ratio: float, drop: float | None, divergence: float | None, basis: str, caveat: str = "") -> None:
    """Draw the figures of one configuration, and what they are; a caveat is about drop and divergence."""
    nats = "–" if divergence is None else fmt.value(divergence)
    facts(
        [
            ("Ratio", fmt.ratio(ratio), basis),
            ("Worst drop", fmt.percent(drop), caveat or basis),
            ("Divergence", nats, caveat or basis),
        ]
    )


def _offer(shown: Subject, edit: Edit, beyond: str) -> None:
    """Offer the configuration as a file, and to compress with it; ask first where it breaks a bound."""
    is_meant = True
    if beyond:
        st.warning(f"This configuration is beyond the bound on the {beyond}.", icon=":material/warning:")
        is_meant = st.checkbox("Apply it all the same", key=f"search.beyond.{json.dumps(edit.config)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button(
            "Apply to compress",
            icon=":material/arrow_forward:",
            disabled=not is_meant,
            help="Carries this configuration on to the Export page.",
        ):
            carried = json.dumps({"run": str(shown.path), "config": edit.config})
            state.remember(**{state.CARRIED: carried, "codec": str(edit.config["codec"]), "what": "all"})
            state.go_to("export")
        for form, text in (
            ("TOML", toml_text(edit.config)),
            ("JSON", json.dumps(edit.config, indent=1) + "\n"),
        ):
            st.download_button(
                form,
                text.encode(),
                file_name="inshrink.toml" if form == "TOML" else "config.json",
                mime="application/json" if form == "JSON" else "application/toml",
                key=f"search.config.{form}",
                on_click="ignore",
                type="tertiary",
                icon=":material/download:",
                help="For inshrink compress --config",
            )
    _load(shown, edit)
    n = fmt.counted(len(edit.config.get("override", ())), "override")
    with st.expander(f"As a file ({n})", icon=":material/description:"):
        st.code(toml_text(edit.config), language=None, wrap_lines=True)


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
