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
from inshrink_app.server.recent import forget_recent, load_recent, remember_recent
from inshrink_app.server.roots import CHECKPOINT_SUFFIXES, Address, settings
from inshrink_app.widgets import ending, fmt, job_card, problem
from inshrink_app.widgets.layout import answer, folded, section

from inshrink_core.verbs.inspect import Inspect

_DROPS = "inshrink.drops"
_RECENT_SHOWN = 5
_MAX_LISTED = 20
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
    _path_form()
    _at_hand()
    table = st.container()
    _addresses()
    folded("Drop files", ":material/upload_file:", "open.drop", _drop, expanded=bool(services.dropped()))
    ending.requests([Inspect(current or "RUN")])
    with table:  # Last, since reading all headers takes a while.
        runs.show(_open_path)


def _open(load: Callable[[], Subject]) -> None:
    """Open a run or an archive and leave the page; on failure, show the reason here."""
    subject = answer(load, "Reading headers…")
    if subject is not None:
        remember_recent(subject.path, subject.kind)
        state.set_run(str(subject.path))
        state.go_to("run")


def _open_path(path: Path | str) -> None:
    _open(lambda: services.load_subject(str(path)))


def _path_form() -> None:
    """Draw the path field as a form, so that nothing opens while the user types."""
    look: Any = {"horizontal": True, "vertical_alignment": "bottom", "gap": "small"}
    with st.form("path", border=False, enter_to_submit=True), st.container(**look):
        label = "Path of a run, checkpoint or archive"
        text = st.text_input(label, placeholder="runs/my-training", key="typed_path")
        pressed = st.form_submit_button("Open", type="primary")
    if pressed and text.strip():
        _open_path(text)
    elif pressed:
        problem.show(Problem("no path was typed", remedy="type one, or choose a run below"))


def _at_hand() -> None:
    """Offer the bundled runs, and recent ones that still exist."""
    picked: Path | str = ""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        for sample in services.samples():
            label, tip = f"Sample: {fmt.markdown(sample.name)}", "A real training with its optimizer state."
            if st.button(label, icon=":material/play_arrow:", key=f"sample.{sample.name}", help=tip):
                picked = sample
        rows = [row for row in load_recent() if _is_openable(row.path)][:_RECENT_SHOWN]
        if rows:
            st.caption("Recent", width="content")
        for row in rows:
            tip = fmt.markdown(f"{row.path}, opened {when(row.opened_at)}")
            if _name_button(Path(row.path).name, row.kind, f"recent.{row.path}", help=tip):
                picked = row.path
        if rows and st.button("Clear", type="tertiary", help="Clears this list. No run is touched."):
            forget_recent()
            st.rerun()
    if picked:
        _open_path(picked)


def _name_button(name: str, kind: str, key: str, more: str = "", **look: Any) -> bool:
    label = f"{fmt.markdown(fmt.clipped(name, _NAME_WIDTH))}{more}"
    return st.button(label, icon=_ICONS[kind], type="tertiary", key=key, **look)


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
            for place in (address, *names[:_MAX_LISTED]):
                if _name_button(str(place) if place == address else place.name, "folder", f"at.{place}"):
                    _open_path(place)
            if len(names) > _MAX_LISTED:
                st.caption(f"{fmt.count(len(names) - _MAX_LISTED)} more are not listed; type the address.")
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
        _open(lambda: services.open_dropped([(file.name, file) for file in files]))
    copies = services.dropped()
    if not copies:
        return
    st.caption("Copies of dropped files stay here until you remove them:")
    st.code(str(copies[0].folder.parent), language=None, wrap_lines=True)
    for copy in copies:
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            size, key = f" · {fmt.size(copy.nbytes)}", f"dropped.{copy.folder.name}"
            if _name_button(copy.path.name, "file", key, size):
                _open_path(copy.path)
            is_pressed = st.button("Remove", key=f"remove.{copy.folder.name}")
        if is_pressed and answer(partial(services.forget_dropped, copy.folder)):
            st.rerun()


PAGE = Page("Open", ":material/folder_open:", render, address="home", former=("start", "open", "jobs"))
