"""A job on a page: its progress while it runs, and what to say when it did not finish."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.commands import is_watching
from inshrink_app.jobs.job import Job
from inshrink_app.widgets import problem
from inshrink_app.widgets.formatting import counted, elide, markdown_text, remaining_text, share_text
from inshrink_app.widgets.tables import ServiceError

__all__ = [
    "POLL_SECONDS",
    "cancel_button",
    "current",
    "log",
    "progress",
    "resume_button",
    "running",
    "settled",
    "stopped",
]

POLL_SECONDS = 0.5

_ITEM_WIDTH = 60


def current(job: Job) -> Job:
    """Return a job that a fragment draws as it is now; the page is drawn anew once it has ended."""
    now = services.find_job(job.job_id)
    if now is None or not now.is_running:
        st.rerun()
    return now


@st.fragment(run_every=POLL_SECONDS)
def running(job: Job, title: str) -> None:
    """Draw a job that runs; the page is drawn anew once it has ended."""
    now = current(job)
    with st.container(border=True):
        st.header(title, anchor=False)
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
    if is_watching(job.commands):
        at = job.item.rpartition("step ")[2]
        st.caption(markdown_text(f"Beside the training, at step {at}" if at else "Beside the training"))
        return
    if not job.total:
        st.progress(0.0, text="Starting…")
        return
    parts = [share_text(job.fraction), remaining_text(job.seconds, job.seconds_left)]
    if job.item:
        parts.insert(0, markdown_text(elide(job.item, _ITEM_WIDTH)))
    st.progress(job.fraction, text=" · ".join(parts))


def _queued_text(job: Job) -> str:
    """Say how long the queue is before a job."""
    place = services.place_in_queue(job)
    if place is None:
        return "Queued" if not job.is_elsewhere else "Queued by another explorer"
    before = f"{counted(place - 1, 'job')} before it, after" if place > 1 else "next, after"
    return f"Queued: {before} what runs now"


def cancel_button(job: Job) -> None:
    """Offer to cancel, where this explorer can."""
    if job.is_elsewhere:
        st.caption("Another explorer works on this; cancel it there.")
    elif st.button(
        "End it" if is_watching(job.commands) else "Cancel",
        icon=":material/close:",
        key=f"cancel.{job.job_id}",
    ):
        services.stop_job(job)
        st.rerun()


def resume_button(job: Job, *, primary: bool = True) -> None:
    """Offer to go on with a job that did not finish."""
    label = "Try again" if job.state == "failed" else "Resume"
    if st.button(
        label,
        icon=":material/resume:",
        key=f"resume.{job.job_id}",
        type="primary" if primary else "secondary",
    ):
        try:
            services.resume_job(job)
        except ServiceError as error:
            problem.show(error.problem)
            return
        st.rerun()


def stopped(job: Job, *, primary: bool = True) -> None:
    """Say why a job did not finish, and offer to go on with it."""
    if job.problem is not None:
        problem.show(job.problem)
    elif job.state == "interrupted":
        st.warning(
            "The explorer ended while this was at work. Nothing is lost: resume, and what is done already is "
            "not done again.",
            icon=":material/pause_circle:",
        )
    elif is_watching(job.commands):
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
