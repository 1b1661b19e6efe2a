"""The header of every place: run, bound, evaluator and jobs, with their choices."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, Final

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.recent import remember_recent
from inshrink_app.server.roots import Address
from inshrink_app.services import BOUNDS, USUAL, Bound
from inshrink_app.services.opening import files_stamp
from inshrink_app.widgets import evaluator, fmt, job_card, layout, listing, problem
from inshrink_app.widgets.layout import answer, section
from inshrink_app.widgets.quality import bound_text

_NAME_WIDTH = 36
_NO_METRIC = "The evaluator's own"


def show(shown: Subject, *, watched: bool = False) -> None:
    """Draw the header; its choices apply to every tab and place.

    Parameters
    ----------
    shown
        The run or archive on screen.
    watched
        Whether a new checkpoint redraws the place.
    """
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="header"):
        _run(shown, watched=watched)
        if not shown.n_unread and (shown.kind == "run" or services.original_of(shown) is not None):
            _bound(shown)
            _evaluator(shown)
        job_card.jobs_drawer()
        if watched:
            watch(shown)
    if shown.n_unread:
        rest(shown)
    for note in shown.notes[1:]:
        st.caption(fmt.markdown(fmt.sentence(note)))


def rest(shown: Subject) -> None:
    """Draw the reading of a run's other checkpoints; rerun the page when there is more to show."""
    _rest(shown, services.reading_of(shown).n_answers)


@st.fragment(run_every=job_card.POLL_SECONDS)
def _rest(shown: Subject, n_answers: int) -> None:
    reading = services.reading_of(shown)
    if reading.is_newer(shown.n_unread, n_answers):
        st.rerun()
    reading.start()
    key = f"rest.{shown.path}"
    with st.container(horizontal=True, vertical_alignment="center", key=key):
        if reading.is_wanted:
            n_all = len(shown.steps) + shown.n_unread
            text = f"Reading checkpoint {fmt.count(reading.n_read)} of {fmt.count(n_all)}, the latest first"
            st.progress(min(1.0, reading.n_read / n_all), text=text)
            st.button("Stop", icon=":material/close:", key=f"{key}.stop", on_click=reading.stop)
        else:
            st.caption(f"{fmt.counted(shown.n_unread, 'checkpoint')} are not read.", width="content")
            st.button("Read them", icon=":material/resume:", key=f"{key}.start", on_click=reading.resume)


def _run(shown: Subject, *, watched: bool) -> None:
    """Draw the run's name and kind, and the link to another run."""
    name = fmt.markdown(fmt.clipped(shown.name, _NAME_WIDTH))
    path = fmt.markdown(str(shown.path))
    panel = layout.panel(f"**{name}**", ":material/folder_open:", "header.run", help=path)
    averages = set(services.averages_of(shown))
    n_tensors = len({row.name for row in shown.tensors if row.role == "weight"} - averages)
    size = shown.raw_nbytes if shown.kind == "run" else shown.total_bytes  # as in every figure of the run
    about = [
        f"the newest {fmt.counted(len(shown.steps), 'step')}, {fmt.count(shown.n_unread)} not read yet"
        if shown.n_unread
        else f"{fmt.counted(len(shown.steps), 'step')} · {fmt.size(size)}",
        f"{fmt.size(shown.n_parameters).rstrip('B')} parameters in {fmt.counted(n_tensors, 'tensor')}",
        *(["with a moving average"] if averages else []),
    ]
    st.caption(" · ".join(about), width="content")
    if not panel.open:
        return
    with panel:
        st.code(str(shown.path), language=None, wrap_lines=True)
        kind = "Archive" if shown.kind == "archive" else f"Run of {shown.format} files"
        st.caption(fmt.markdown(f"{kind}, {fmt.steps(shown.steps)}."))
        for note in shown.notes[:1]:
            st.caption(fmt.markdown(fmt.sentence(note)))
        if services.is_dropped(shown.path):
            st.caption("A copy of the files that you dropped.")
        if shown.skipped:
            left_out = pd.DataFrame(shown.skipped, columns=["file", "why"])
            st.caption(f"{fmt.counted(len(shown.skipped), 'file')} left out")
            listing.show(left_out, "skipped", alt="Files that were left out, and why", wide=["file", "why"])
        if watched and isinstance(shown.place, Address):
            st.caption("New checkpoints at an address appear after Refresh.")
        with st.container(horizontal=True):
            if st.button("Refresh", icon=":material/refresh:", help="Reads the headers again."):
                services.refresh(shown.path)
                st.rerun()
            if st.button("Open another", icon=":material/folder_open:"):
                state.go_to("open")


def _bound(shown: Subject) -> None:
    """Draw the bound and its choices."""
    now = services.chosen(shown).bound
    panel = layout.panel(f"Bound: {bound_text(now)}", ":material/straighten:", "header.bound")
    if not panel.open:
        return
    with panel:
        kind = st.radio(
            "Bound on every restored step",
            list(BOUNDS),
            list(BOUNDS).index(now.kind),
            format_func=BOUNDS.__getitem__,
            captions=[
                "How much the loss is expected to rise after a restore, relative to the loss.",
                "How much worse the evaluator's metric may get, relative to the original.",
                "How far the predictions may move, in nats; 0 is the same.",
                "Every step gets the codec's default settings.",
            ],
        )
        value = now.value if kind == now.kind else USUAL[kind]
        if kind != "none":
            is_nats = kind == "divergence"
            scale, unit, step, form = (1, "nats", 0.001, "%.4f") if is_nats else (100, "%", 0.1, "%.2f")
            look: Any = {"format": form, "key": f"header.{kind}"}
            typed = st.number_input(f"At most, {unit}", 0.0, 100.0, scale * value, step, **look)
            value = round(typed / scale, 9)
        if (kind, value) != now:
            state.clicked()
            services.choose(shown, bound=Bound(kind, value))
            st.rerun()
        (judge, ready), run = services.evaluator_and_trust(shown), services.original_of(shown) or shown
        if judge is not None and not ready and kind != "none":
            evaluator.consent(judge, "bound")
        elif judge is not None and kind == "drop" and evaluator.tried(run, judge):
            _metric(shown)


def _evaluator(shown: Subject) -> None:
    """Draw the evaluator with its state, and the choices of evaluator and metric."""
    subject = services.original_of(shown) or shown
    try:
        judge = services.named_evaluator(shown)
        word, icon = "none", ":material/gavel:"
    except ServiceError:
        judge, word, icon = None, "cannot be read", ":material/error:"
    if judge is not None:
        ready = services.may_run(judge)
        job = services.job_of(services.evaluator_trial(subject, judge))
        failed = job is not None and job.state == "failed"
        icon = ":material/error:" if failed else ":material/check:" if ready else ":material/lock:"
        state_word = "fails" if failed else "" if ready else "not trusted yet"
        word = " ".join(filter(None, [judge.name, state_word]))
        if judge.is_asked:
            word += f", {judge.metric}"
    panel = layout.panel(f"Evaluator: {fmt.markdown(word)}", icon, "header.evaluator")
    if not panel.open:
        return
    with panel:
        evaluator.show(subject, judge)
        if judge is not None:
            _metric(shown)


def _metric(shown: Subject) -> None:
    """Draw the choice of metric among those that a trial of the evaluator returned."""
    now, known = services.chosen(shown), services.metrics_told(shown)
    names = [_NO_METRIC, *dict.fromkeys([*known, *([now.metric] if now.metric else [])])]
    picked = st.radio("Metric", names, names.index(now.metric or _NO_METRIC), horizontal=True)
    metric = "" if picked == _NO_METRIC else str(picked)
    direction = ""
    if metric:
        ways = ["higher", "lower"]
        first = ways.index(now.direction or ("lower" if "loss" in metric.casefold() else "higher"))
        direction = st.radio("Better is", ways, first, horizontal=True, key=f"direction.{metric}")
    if (metric, direction) != (now.metric, now.direction):
        services.choose(shown, metric=metric, direction=direction)
        st.rerun()


_SECONDS: Final = 3.0
"""Time between two checks. A file is finished if it does not change between them."""

_SEEN, _DONE = "watch.seen", "watch.done"
"""Keys of the last stamp of each path, and of the stamps that were read."""


def watch(shown: Subject) -> None:
    """Watch a folder; single files, and folders of too many files, are not watched."""
    found = services.opened(str(shown.path)) if shown.place.is_dir() else None
    if found is not None and found.stamp is not None:
        with st.container(width="content"):
            look(str(shown.path), found.token, found.stamp)


@st.fragment(run_every=_SECONDS)
def look(path: str, token: str, stamp: str) -> None:
    """Check names, sizes and times of the files; rerun the page if a checkpoint is new.

    Parameters
    ----------
    path
        The run or archive.
    token, stamp
        Token and stamp of the displayed subject (`services.Opened`).
    """
    seen: dict[str, str] = st.session_state.setdefault(_SEEN, {})
    done: set[str] = st.session_state.setdefault(_DONE, set())
    now = files_stamp(services.place_of(services.resolve(path)))
    if now is None or now == stamp or now in done:
        return
    if seen.get(path) != now:
        seen[path] = now
        st.badge("new files", icon=":material/hourglass_top:", color="orange")
        return
    done.add(now)
    try:
        services.refresh(services.resolve(path))
        if services.opened(path).token != token:
            st.rerun()
    except ServiceError:  # Files vanish while a trainer cleans up; the next check is conclusive.
        done.discard(now)


def require(
    page: str, rescue: Callable[[str], bool] | None = None, *, watched: bool = False
) -> Subject | None:
    """Draw the header of a page and return its subject; None if the page has nothing more to show.

    Parameters
    ----------
    page
        Title of the page without a run.
    rescue
        Draws the readable parts of a damaged subject, given its path; returns whether any exist.
    watched
        Whether a new checkpoint redraws the page.
    """
    path = state.run_path()
    if path is None:
        _no_run(page)
        return None
    state.publish(run=path)
    try:
        with st.spinner("Reading headers…"):
            subject = services.load_subject(path)
    except ServiceError as error:
        st.title(page, anchor=False)
        problem.show(error.problem)
        if rescue is None or not rescue(path):
            with st.container(horizontal=True):
                _lead_away("Open another run")
                is_archive = path.endswith(".inshrink") and rescue is None
                if is_archive and st.button("See what is left", icon=":material/inventory_2:"):
                    state.go_to("archives")
        return None
    if state.is_given():
        remember_recent(subject.path, subject.kind)
    st.set_page_config(page_title=f"{fmt.printable(subject.name)} · {page}")
    show(subject, watched=watched)
    if text := state.choice_text(state.LOG):
        state.publish(**{state.LOG: text})
        subject = answer(lambda: services.with_log(subject, text)) or subject
    if not subject.steps:
        with section("This archive is empty"):
            st.write("It is intact and holds no steps yet. Add a run to it:")
            st.code(f"inshrink compress RUN -o {shlex.quote(str(subject.path))}", language=None)
            _lead_away("Open another run")
        return None
    if subject.n_unread and not watched:
        st.caption("The rest of this page follows once all checkpoints are read.")
        return None
    return subject


def _lead_away(label: str) -> None:
    """Offer a link to the place that opens runs."""
    if st.button(label, type="primary", icon=":material/folder_open:"):
        state.set_run(None)
        state.go_to("open")


def _no_run(page: str) -> None:
    """Draw that a run must be opened first, with a link."""
    st.title(page, anchor=False)
    with section("No run is open"):
        st.write(
            "Open a training run or an archive first. The bundled sample takes one click. Nothing is "
            "uploaded: the explorer reads files on this computer."
        )
        _lead_away("Choose a run")
