"""Open: choose the run or archive that the other pages are about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Page, Problem, ServiceError, Subject, when
from inshrink_app.pages.open import runs
from inshrink_app.server.recent import forget_recent, load_recent
from inshrink_app.server.roots import CHECKPOINT_SUFFIXES, Address, settings
from inshrink_app.widgets import ending, fmt, job_card, problem
from inshrink_app.widgets.layout import answer, section

from inshrink_core.verbs.inspect import Inspect

_PROBLEM = "inshrink.open_problem"
_DROPS = "inshrink.drops"
_RECENT_SHOWN = 5
_MOST_LISTED = 20

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
        st.title("Open a run", anchor=False, width="content")
        job_card.jobs_drawer()
    st.write(
        "Choose a folder of checkpoints or an `.inshrink` archive. Opening reads headers only: names, shapes "
        "and sizes, never the weights."
    )
    failure = st.session_state.pop(_PROBLEM, None)
    if failure is not None:
        problem.show(failure)
    runs.show(_open)
    left, right = st.columns(2, gap="medium")
    with left:
        _sample_card()
        _recent_card()
    with right:
        with section("By its path"):
            _path_form()
        _address_card()
        _drop_card()

    ending.requests([Inspect(current or "RUN")])


def _open(path: Path | str) -> None:
    """Open a path and go to its overview; stay here and say why where that fails."""
    _show(lambda: services.load_subject(str(path)))


def _show(load: Callable[[], Subject]) -> None:
    """Go to the overview of what is opened; stay here and say why where that fails."""
    try:
        with st.spinner("Reading headers…"):
            subject = load()
    except ServiceError as error:
        st.session_state[_PROBLEM] = error.problem
        st.rerun()
    services.remember(subject)
    state.set_run(str(subject.path))
    state.go_to("run")


def _address_card() -> None:
    """Offer the addresses that may be opened, and what lies in them; reads names alone."""
    if not settings().addresses:
        return
    with section("In buckets"):
        for address in settings().addresses:
            below = answer(partial(services.listed_at, address), "Listing…") or ()
            names = [one for one in below if one.suffix in ("", ".inshrink", *CHECKPOINT_SUFFIXES)]
            for one in (address, *names[:_MOST_LISTED]):
                label = str(one) if one == address else one.name
                if st.button(fmt.markdown(label), icon=_ICONS["folder"], type="tertiary", key=f"at.{one}"):
                    _open(one)
            if len(names) > _MOST_LISTED:
                st.caption(f"{fmt.count(len(names) - _MOST_LISTED)} more are not listed; type the address.")
        st.caption("What lies deeper is opened by its address, typed as a path.")


def _sample_card() -> None:
    """Offer the bundled run."""
    with section("Sample run"):
        offered = services.samples()
        if not offered:
            st.write("This installation came without sample runs.")
        for position, sample in enumerate(offered):
            st.write(_sample_text(sample))
            if st.button(
                f"Open {fmt.markdown(sample.name)}",
                type="primary" if position == 0 else "secondary",
                icon=":material/play_arrow:",
                key=f"sample.{sample.name}",
            ):
                _open(sample)


def _sample_text(sample: Path) -> str:
    """Say what a sample is; its headers are read once and cached."""
    try:
        subject = services.load_subject(str(sample))
    except ServiceError as error:
        return f"It cannot be read: {fmt.markdown(error.problem.what)}."
    return (
        f"A real training with its optimizer state: {len(subject.steps)} checkpoints, "
        f"{fmt.steps(subject.steps)}, {fmt.size(subject.total_bytes)}."
    )


def _drop_card() -> None:
    """Take files that are dropped, and list those that were."""
    with section("Drop a file"):
        # Another key empties the area: what was written need not stay in memory.
        turn = st.session_state.setdefault(_DROPS, 0)
        files = st.file_uploader(
            "A packed archive, or the checkpoints of one run",
            accept_multiple_files=True,
            key=f"drop.{turn}",
        )
        st.caption(
            "They are copied. Larger files, and those on this computer, are better opened by their path."
        )
        if files:
            st.session_state[_DROPS] += 1
            _show(lambda: services.open_dropped([(file.name, file) for file in files]))
        kept = services.dropped()
        if not kept:
            return
        st.caption("Copies of what was dropped lie here, until you remove them:")
        st.code(str(kept[0].folder.parent), language=None, wrap_lines=True)
        for one in kept:
            with st.container(
                horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"
            ):
                label = f"{fmt.markdown(fmt.elided(one.path.name, 40))} · {fmt.size(one.nbytes)}"
                key = one.folder.name
                if st.button(
                    label,
                    icon=_ICONS["file"],
                    type="tertiary",
                    key=f"dropped.{key}",
                    disabled=one.is_log,
                    help="Metrics of a run, which its Overview reads." if one.is_log else None,
                ):
                    _open(one.path)
                if st.button("Remove", key=f"remove.{key}"):
                    _remove(one.folder)


def _remove(folder: Path) -> None:
    """Remove what was dropped; the page begins again, since its list was drawn."""
    try:
        services.forget_dropped(folder)
    except ServiceError as error:
        st.session_state[_PROBLEM] = error.problem
    st.rerun()


def _recent_card() -> None:
    """Offer what was opened lately and can still be opened."""
    with section("Recent"):
        rows = [row for row in load_recent() if _is_openable(row.path)][:_RECENT_SHOWN]
        if not rows:
            st.caption("Runs and archives you open appear here.")
        for row in rows:
            path = Path(row.path)
            with st.container(gap=None):
                chosen = st.button(
                    fmt.markdown(fmt.elided(path.name, 40)),
                    icon=_ICONS[row.kind],
                    type="tertiary",
                    key=f"recent.{row.path}",
                    help=fmt.markdown(row.path),
                )
                st.caption(f"{row.kind.capitalize()} · opened {when(row.opened_at)}")
            if chosen:
                _open(row.path)
        if rows and st.button("Clear this list", help="No run is touched."):
            forget_recent()
            st.rerun()


def _is_openable(path: str) -> bool:
    """Return whether a remembered path still exists inside of the roots; an address is not asked."""
    try:
        found = services.resolve(path)
        return isinstance(found, Address) or services.place_of(found).exists()
    except ServiceError:
        return False


def _path_form() -> None:
    """Take a typed path; a form, so that nothing is opened while it is being typed."""
    with st.form("path", border=False, enter_to_submit=True):
        with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
            label = "Path of a run, checkpoint or archive"
            text = st.text_input(label, placeholder="runs/my-training", key="typed_path")
            pressed = st.form_submit_button("Open")
        if pressed:
            if text.strip():
                _open(text)
            st.session_state[_PROBLEM] = Problem(
                "no path was typed", remedy="type one, or choose a folder above"
            )
            st.rerun()


PAGE = Page("Open", ":material/folder_open:", render, address="start", former=("open", "jobs"))
