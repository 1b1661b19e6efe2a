"""A job on a page: its progress while it runs, and what to say when it did not finish."""

from __future__ import annotations

from typing import Any, Literal

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import measured
from inshrink_app.widgets import fmt, problem
from inshrink_app.widgets.layout import answer, section

POLL_SECONDS = 0.5

_ITEM_WIDTH = 60
_TRIALS = ("estimate", "evaluate", "sensitivity")
"""Verbs that begin anew: nothing of what they had done is kept."""

Colour = Literal["blue", "green", "red", "gray", "orange"]
STATES: dict[str, tuple[str, Colour, str]] = {
    "queued": ("Queued", "gray", ":material/schedule:"),
    "running": ("Running", "blue", ":material/progress_activity:"),
    "finished": ("Finished", "green", ":material/check_circle:"),
    "failed": ("Failed", "red", ":material/error:"),
    "cancelled": ("Cancelled", "gray", ":material/cancel:"),
    "interrupted": ("Interrupted", "orange", ":material/pause_circle:"),
}
"""What each state is called, its colour and its icon."""


def current(job: Job) -> Job:
    """Return a job that a fragment draws as it is now; the page is drawn anew once it has ended."""
    now = services.find_job(job.job_id)
    if now is None or not now.is_running:
        st.rerun()
    return now


@st.fragment(run_every=POLL_SECONDS)
def running(job: Job, title: str = "") -> None:
    """Draw a job that runs, in one line where it has no title; the page is drawn anew once it has ended."""
    now = current(job)
    with section(title) if title else st.container(horizontal=True, vertical_alignment="center"):
        progress(now)
        cancel_button(now)


def settled(job: Job | None, title: str) -> bool:
    """Draw a job that runs or did not finish; return whether there is nothing of that kind to draw.

    Parameters
    ----------
    job
        A job, or None where none was asked for.
    title
        What it is at.
    """
    if job is None or job.state == "finished":
        return True
    if job.is_running:
        running(job, title)
    else:
        stopped(job, primary=False)
    return False


def progress(job: Job) -> None:
    """Draw how far a running job is, or what goes before it."""
    if job.state == "queued":
        st.progress(0.0, text=_queued_text(job))
        return
    if job.is_watching:
        at = job.item.rpartition("step ")[2]
        st.caption(fmt.markdown(f"Beside the training, at step {at}" if at else "Beside the training"))
        return
    if not job.total:
        st.progress(0.0, text="Starting…")
        return
    parts = [fmt.share(job.fraction), fmt.remaining(job.seconds, job.seconds_left)]
    if job.item:
        parts.insert(0, fmt.markdown(fmt.elided(job.item, _ITEM_WIDTH)))
    st.progress(job.fraction, text=" · ".join(parts))


def _queued_text(job: Job) -> str:
    """Say how long the queue is before a job."""
    place = services.place_in_queue(job)
    if place is None:
        return "Queued" if not job.is_elsewhere else "Queued by another explorer"
    before = f"{fmt.counted(place - 1, 'job')} before it, after" if place > 1 else "next, after"
    return f"Queued: {before} what runs now"


def start_button(label: str, work: Work, icon: str, *, again: bool = True, **look: Any) -> None:
    """Draw a button that starts some work.

    Parameters
    ----------
    label, icon
        What stands on it.
    work
        What it starts.
    again
        Start it also where it is known (`JobRegistry.start`).
    **look
        For `st.button`.
    """
    if st.button(label, icon=f":material/{icon}:", **look):
        state.clicked()
        services.start_job(work, again=again)
        st.rerun()


def cancel_button(job: Job) -> None:
    """Offer to cancel, where this explorer can."""
    if job.is_elsewhere:
        st.caption("Another explorer works on this; cancel it there.")
    elif st.button(
        "End it" if job.is_watching else "Cancel",
        icon=":material/close:",
        key=f"cancel.{job.job_id}",
    ):
        services.stop_job(job)
        st.rerun()


def resume_button(job: Job, *, primary: bool = True) -> None:
    """Offer to go on with a job that did not finish."""
    label = "Try again" if job.state == "failed" or job.verb in _TRIALS else "Resume"
    look: Literal["primary", "secondary"] = "primary" if primary else "secondary"
    pressed = st.button(label, icon=":material/resume:", key=f"resume.{job.job_id}", type=look)
    if pressed and answer(lambda: services.resume_job(job)) is not None:
        st.rerun()


def stopped(job: Job, *, primary: bool = True) -> None:
    """Say why a job did not finish, and offer to go on with it."""
    if job.problem is not None:
        problem.show(job.problem)
    elif job.state == "interrupted":
        said = "Nothing is lost: resume, and what is done already is not repeated."
        said = "It begins anew." if job.verb in _TRIALS else said
        st.warning(
            f"The explorer was closed while this was running. {said}",
            icon=":material/pause_circle:",
        )
    elif job.is_watching:
        st.info("This was ended. What was archived stays; resume, and it goes on.", icon=":material/info:")
    else:
        st.info("This was cancelled. What was done already stays done.", icon=":material/info:")
    resume_button(job, primary=primary)


def log(job: Job, *, expanded: bool = False) -> None:
    """Draw what a job told, folded."""
    text = job.log_text()
    if text:
        with st.expander("Log", icon=":material/notes:", expanded=expanded):
            st.code(text, language=None, wrap_lines=True)


def when(job: Job) -> str:
    """Say when a job began and how long it took."""
    begun = measured.when(job.started_at)
    return begun if job.is_running else f"{begun} · {fmt.duration(job.seconds)}"


def lead_to(job: Job) -> None:
    """Show the result of a job on the page that it belongs to."""
    text = services.describe(job)
    run = text.query.get("run")
    if run:
        state.set_run(run)
    state.remember(**{key: value for key, value in text.query.items() if key != "run"})
    state.go_to(text.page)
