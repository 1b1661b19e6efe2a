"""A job on a page: its progress, and actions if it did not finish; and the drawer of all jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import measured
from inshrink_app.widgets import fmt, problem
from inshrink_app.widgets.layout import answer, panel, section

POLL_SECONDS = 0.5

_ITEM_WIDTH = 60
_TITLE_WIDTH = 56
_SHOWN = 8
DRAWER = "header.jobs"
"""Key of the drawer, which is open if it is true."""
_TRIALS = ("estimate", "evaluate", "sensitivity")
"""Verbs that start again from the beginning, since they store no partial work."""

Colour = Literal["blue", "green", "red", "gray", "orange"]
STATES: dict[str, tuple[str, Colour, str]] = {
    "queued": ("Queued", "gray", ":material/schedule:"),
    "running": ("Running", "blue", ":material/progress_activity:"),
    "finished": ("Finished", "green", ":material/check_circle:"),
    "failed": ("Failed", "red", ":material/error:"),
    "cancelled": ("Cancelled", "gray", ":material/cancel:"),
    "interrupted": ("Interrupted", "orange", ":material/pause_circle:"),
}
"""Name, colour and icon of each state."""


def is_running(job: Job | None) -> bool:
    """Return whether there is a job that runs or is queued."""
    return job is not None and job.is_running


def n_rows(job: Job) -> int:
    """Return the number of partial results of a job so far."""
    return len(job.partial_rows())


@st.fragment(run_every=POLL_SECONDS)
def _running(job: Job, title: str, parts: Callable[[Job], int], n_parts: int) -> None:
    """Draw a running job; rerun the page once it has ended, or has a further part of its result."""
    now = services.find_job(job.job_id)
    if now is None or not now.is_running or parts(now) != n_parts:
        st.rerun()
    with section(title) if title else st.container(horizontal=True, vertical_alignment="center"):
        progress(now)
        cancel_button(now)


def settled(job: Job | None, title: str = "", parts: Callable[[Job], int] | None = None) -> bool:
    """Draw a running or unfinished job; return whether neither exists.

    Parameters
    ----------
    job
        A job, or None.
    title
        Its title; without one its progress takes one line.
    parts
        Counts the parts of its result, by default its finished requests; the page is redrawn for each
        further part.
    """
    if job is None or job.state == "finished":
        return True
    if job.is_running:
        parts = parts or (lambda job: len(job.documents))
        _running(job, title, parts, parts(job))
    else:
        stopped(job)
    return False


def progress(job: Job) -> None:
    """Draw the progress of a running job, or its position in the queue."""
    if job.state == "queued":
        st.progress(0.0, text=_queued_text(job))
    elif job.is_watching:
        at = job.item.rpartition("step ")[2]
        st.caption(fmt.markdown(f"Watching the run, at step {at}" if at else "Watching the run"))
    elif not job.total and not job.place:
        st.progress(0.0, text="Starting…")
    else:
        parts = [fmt.percent(job.fraction), f"{fmt.duration(job.seconds)} elapsed"]
        if job.item:
            parts.insert(0, fmt.markdown(fmt.clipped(job.item, _ITEM_WIDTH)))
        st.progress(job.fraction, text=" · ".join(parts))


def _queued_text(job: Job) -> str:
    place = services.registry().place(job)
    if place is None:
        return "Queued" if not job.is_elsewhere else "Queued by another explorer"
    before = f"after {fmt.counted(place - 1, 'other job')}" if place > 1 else "next"
    return f"Queued: {before}, once a running job has ended"


def start_button(
    label: str,
    work: Work | Callable[[], Work],
    icon: str,
    *,
    job: Job | None = None,
    again: bool = True,
    disabled: bool = False,
    **look: Any,
) -> None:
    """Draw a button that starts some work.

    Parameters
    ----------
    label, icon
        Its text and icon.
    work
        The work to start, or a function that returns it or raises a `ServiceError` to show.
    job
        The last job of this button, which disables it while it runs.
    again
        Start even if an answer exists (`JobRegistry.start`).
    disabled
        Whether the work cannot be started now.
    **look
        Passed to `st.button`.
    """
    if st.button(label, icon=f":material/{icon}:", disabled=disabled or is_running(job), **look):
        asked = answer(work) if callable(work) else work
        if asked is not None:
            state.clicked()
            state.publish(job=services.start_job(asked, again=again).job_id)
            st.rerun()


def cancel_button(job: Job, place: str = "page") -> None:
    """Draw the cancel button, if this explorer can cancel the job."""
    if job.is_elsewhere:
        st.caption("Another explorer runs this; cancel it there.")
        return
    label, key = "End it" if job.is_watching else "Cancel", f"{place}.cancel.{job.job_id}"
    # A callback, since a fragment that reruns the page for a new part of the result draws no button.
    st.button(label, icon=":material/close:", key=key, on_click=services.stop_job, args=(job,))


def _resume_button(job: Job, place: str = "page") -> None:
    """Draw the button that resumes an unfinished job."""
    label = "Try again" if job.state == "failed" or job.verb in _TRIALS else "Resume"
    pressed = st.button(label, icon=":material/resume:", key=f"{place}.resume.{job.job_id}")
    if pressed and answer(lambda: services.resume_job(job)) is not None:
        st.rerun()


def stopped(job: Job) -> None:
    """Draw why a job did not finish, and the button that resumes it."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if job.problem is not None:
            problem.show(job.problem)
        elif job.state == "interrupted":
            again = job.verb in _TRIALS
            rest = "It starts from the beginning." if again else "Resume it: finished work is not repeated."
            st.warning(f"The explorer was closed while this ran. {rest}", icon=":material/pause_circle:")
        elif job.is_watching:
            st.info("Ended. Archived steps are kept; resume to continue.", icon=":material/info:")
        else:
            st.info("Cancelled. Finished work is kept.", icon=":material/info:")
        _resume_button(job)


def jobs_drawer() -> None:
    """Draw the header's button that opens the jobs, with the number of running ones."""
    jobs = services.all_jobs()
    n_running = sum(job.is_running for job in jobs)
    label = fmt.counted(n_running, "job") if n_running else "Jobs"
    icon = ":material/progress_activity:" if n_running else ":material/checklist:"
    drawer = panel(label, icon, DRAWER, width="content")
    every = 2 * POLL_SECONDS if n_running else None
    with drawer:
        st.fragment(_drawer, run_every=every)(n_running, is_open=bool(drawer.open))


def _drawer(n_running: int, *, is_open: bool) -> None:
    """Draw the jobs in an open drawer, running ones first; rerun the page once fewer run."""
    jobs = services.all_jobs()
    if sum(job.is_running for job in jobs) != n_running:
        st.rerun()
    if not is_open:
        return
    if not jobs:
        st.caption("Measuring, writing, verifying and comparing appear here with their progress and log.")
        return
    st.caption(f"At most {services.MAX_AT_WORK} jobs run at a time. They continue when you close the tab.")
    shown = sorted(jobs, key=lambda job: not job.is_running)
    more = len(shown) > _SHOWN and not st.toggle(f"All {len(shown)} jobs", key="jobs.all")
    for job in shown[:_SHOWN] if more else shown:
        with st.container(border=True, gap="small"):
            _row(job)
    ended = [job for job in jobs if not job.is_running]
    tip = "Removes their logs and stored results; files that they wrote stay."
    if ended and st.button("Clear ended jobs", icon=":material/delete_sweep:", type="tertiary", help=tip):
        for job in ended:
            services.forget_job(job)
        st.rerun()


def _row(job: Job) -> None:
    """Draw one job with the actions of its state."""
    text, (word, colour, icon) = services.describe(job), STATES[job.state]
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.markdown(f"**{fmt.markdown(fmt.clipped(text.title, _TITLE_WIDTH))}**", width="content")
        st.badge(word, color=colour, icon=icon)
    ran = "" if job.is_running else f" · {fmt.duration(job.seconds)}"
    st.caption(fmt.markdown(f"{measured.when(job.started_at)}{ran} · {fmt.clipped(text.about, _ITEM_WIDTH)}"))
    if job.is_running:
        progress(job)
    elif job.problem is not None:
        st.caption(fmt.markdown(fmt.sentence(job.problem.what)))
    with st.container(horizontal=True, vertical_alignment="center"):
        if job.is_running:
            cancel_button(job, "drawer")
        elif job.state != "finished":
            _resume_button(job, "drawer")
        if job.state != "queued" and st.button("Show", key=f"drawer.show.{job.job_id}", type="tertiary"):
            if run := text.query.pop("run"):
                state.set_run(run)
            state.go_to(text.page, **text.query)
    if job.log_text() and st.toggle("Log", key=f"drawer.log.{job.job_id}"):
        st.code(job.log_text(), language=None, wrap_lines=True)
