"""Open: choose the run or archive for the other places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Page, Problem, ServiceError, Subject, when
from inshrink_app.pages.open import runs
from inshrink_app.server.recent import forget_recent, load_recent
from inshrink_app.server.roots import CHECKPOINT_SUFFIXES, Address, settings
from inshrink_app.widgets import ending, fmt, job_card, problem
from inshrink_app.widgets.layout import answer, folded, section

from inshrink_core.verbs.inspect import Inspect

_PROBLEM = "inshrink.open_problem"
_DROPS = "inshrink.drops"
_RECENT_SHOWN = 5
_MOST_LISTED = 20
_NAME_WIDTH = 40
_ICONS = {
    "folder": ":material/folder:",
    "run": ":material/folder_special:",
    "archive": ":material/inventory_2:",
    "file": ":material/description:",
}


def render() -> None:
    """Draw the page."""
    if state.wants_given_run():
        state.run_path()
        state.lead_to("run")
    current = state.run_path()
    if current is not None:
        state.publish(run=current)
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.title("Open a run or an archive", anchor=False, width="content")
        job_card.jobs_drawer()
    failure = st.session_state.pop(_PROBLEM, None)
    if failure is not None:
        problem.show(failure)
    _path_form()
    _at_hand()
    table = st.container()
    _addresses()
    folded("Drop files", ":material/upload_file:", "open.drop", _drop, expanded=bool(services.dropped()))
    ending.requests([Inspect(current or "RUN")])
    with table:  # Last, since reading all headers takes a while.
        runs.show(_open)


def _open(path: Path | str) -> None:
    """Open a path and leave the page; on failure, stay and show the reason."""
    _show(lambda: services.load_subject(str(path)))


def _show(load: Callable[[], Subject]) -> None:
    try:
        with st.spinner("Reading headers…"):
            subject = load()
    except ServiceError as error:
        st.session_state[_PROBLEM] = error.problem
        st.rerun()
    services.remember(subject)
    state.set_run(str(subject.path))
    state.go_to("run")


def _path_form() -> None:
    """Draw the path field as a form, so that nothing opens while the user types."""
    with st.form("path", border=False, enter_to_submit=True):
        with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
            label = "Path of a run, checkpoint or archive"
            text = st.text_input(label, placeholder="runs/my-training", key="typed_path")
            pressed = st.form_submit_button("Open", type="primary")
        if pressed:
            if text.strip():
                _open(text)
            st.session_state[_PROBLEM] = Problem(
                "no path was typed", remedy="type one, or choose a run below"
            )
            st.rerun()


def _at_hand() -> None:
    """Offer the bundled runs, and recent ones that still exist."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        for sample in services.samples():
            label = f"Sample: {fmt.markdown(sample.name)}"
            tip = _sample_text(sample)
            if st.button(label, icon=":material/play_arrow:", key=f"sample.{sample.name}", help=tip):
                _open(sample)
        rows = [row for row in load_recent() if _is_openable(row.path)][:_RECENT_SHOWN]
        if rows:
            st.caption("Recent", width="content")
        for row in rows:
            label = fmt.markdown(fmt.elided(Path(row.path).name, _NAME_WIDTH))
            tip = fmt.markdown(f"{row.path}, opened {when(row.opened_at)}")
            look: Any = {"icon": _ICONS[row.kind], "type": "tertiary", "help": tip}
            if st.button(label, key=f"recent.{row.path}", **look):
                _open(row.path)
        if rows and st.button("Clear", type="tertiary", help="Clears this list. No run is touched."):
            forget_recent()
            st.rerun()


def _sample_text(sample: Path) -> str:
    """Describe a sample from its headers, which are cached."""
    try:
        subject = services.load_subject(str(sample))
    except ServiceError as error:
        return f"It cannot be read: {fmt.markdown(error.problem.what)}."
    size = fmt.size(subject.total_bytes)
    return f"A real training with its optimizer state: {len(subject.steps)} checkpoints, {size}."


def _is_openable(path: str) -> bool:
    """Return whether a recent path still exists inside the roots; an address is not checked."""
    try:
        found = services.resolve(path)
        return isinstance(found, Address) or services.place_of(found).exists()
    except ServiceError:
        return False


def _addresses() -> None:
    """Offer the allowed addresses and their content; only names are read."""
    if not settings().addresses:
        return
    with section("In buckets"):
        for address in settings().addresses:
            below = answer(partial(services.listed_at, address), "Listing…") or ()
            names = [place for place in below if place.suffix in ("", ".inshrink", *CHECKPOINT_SUFFIXES)]
            for place in (address, *names[:_MOST_LISTED]):
                label = str(place) if place == address else place.name
                if st.button(fmt.markdown(label), icon=_ICONS["folder"], type="tertiary", key=f"at.{place}"):
                    _open(place)
            if len(names) > _MOST_LISTED:
                st.caption(f"{fmt.count(len(names) - _MOST_LISTED)} more are not listed; type the address.")
        st.caption("Type the address of a folder below these to open it.")


def _drop() -> None:
    """Accept dropped files, and list earlier ones."""
    # A new key empties the area, so that the written files leave memory.
    turn = st.session_state.setdefault(_DROPS, 0)
    files = st.file_uploader(
        "A packed archive, or the checkpoints of one run", accept_multiple_files=True, key=f"drop.{turn}"
    )
    st.caption("Files are copied. Open larger ones, and those on this computer, by their path.")
    if files:
        st.session_state[_DROPS] += 1
        _show(lambda: services.open_dropped([(file.name, file) for file in files]))
    copies = services.dropped()
    if not copies:
        return
    st.caption("Copies of dropped files stay here until you remove them:")
    st.code(str(copies[0].folder.parent), language=None, wrap_lines=True)
    for copy in copies:
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            label = f"{fmt.markdown(fmt.elided(copy.path.name, _NAME_WIDTH))} · {fmt.size(copy.nbytes)}"
            tip = "Metrics of a run, for its place Run." if copy.is_log else None
            look: Any = {"icon": _ICONS["file"], "type": "tertiary", "disabled": copy.is_log, "help": tip}
            if st.button(label, key=f"dropped.{copy.folder.name}", **look):
                _open(copy.path)
            if st.button("Remove", key=f"remove.{copy.folder.name}"):
                _remove(copy.folder)


def _remove(folder: Path) -> None:
    """Remove dropped files and rerun the page, whose list is already drawn."""
    try:
        services.forget_dropped(folder)
    except ServiceError as error:
        st.session_state[_PROBLEM] = error.problem
    st.rerun()


PAGE = Page("Open", ":material/folder_open:", render, address="start", former=("open", "jobs"))
