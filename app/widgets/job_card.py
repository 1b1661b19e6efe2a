"""A job on a page: its progress, and actions if it did not finish; and the drawer of all jobs."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import measured
from inshrink_app.widgets import fmt, problem
from inshrink_app.widgets.layout import answer, section

POLL_SECONDS = 0.5

_ITEM_WIDTH = 60
_TITLE_WIDTH = 56
_SHOWN = 8
_OPEN = "jobs.open"
"""Set before a rerun from the drawer, so that the drawer stays open."""
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


def current(job: Job) -> Job:
    """Return the present state of a job in a fragment; rerun the page once the job has ended."""
    now = services.find_job(job.job_id)
    if now is None or not now.is_running:
        st.rerun()
    return now


@st.fragment(run_every=POLL_SECONDS)
def running(job: Job, title: str = "") -> None:
    """Draw a running job, in one line without a title; the page reruns once it has ended."""
    now = current(job)
    with section(title) if title else st.container(horizontal=True, vertical_alignment="center"):
        progress(now)
        cancel_button(now)


def settled(job: Job | None, title: str) -> bool:
    """Draw a running or unfinished job; return whether neither exists.

    Parameters
    ----------
    job
        A job, or None.
    title
        Its title; without one its progress takes one line.
    """
    if job is None or job.state == "finished":
        return True
    if job.is_running:
        running(job, title)
    else:
        stopped(job, primary=False)
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
        parts = [fmt.share(job.fraction), f"{fmt.duration(job.seconds)} elapsed"]
        if job.item:
            parts.insert(0, fmt.markdown(fmt.elided(job.item, _ITEM_WIDTH)))
        st.progress(job.fraction, text=" · ".join(parts))


def _queued_text(job: Job) -> str:
    place = services.place_in_queue(job)
    if place is None:
        return "Queued" if not job.is_elsewhere else "Queued by another explorer"
    before = f"after {fmt.counted(place - 1, 'other job')}" if place > 1 else "next"
    return f"Queued: {before}, once a running job has ended"


def start_button(label: str, work: Work, icon: str, *, again: bool = True, **look: Any) -> None:
    """Draw a button that starts some work.

    Parameters
    ----------
    label, icon
        Its text and icon.
    work
        The work to start.
    again
        Start even if an answer exists (`JobRegistry.start`).
    **look
        Passed to `st.button`.
    """
    if st.button(label, icon=f":material/{icon}:", **look):
        state.clicked()
        services.start_job(work, again=again)
        st.rerun()


def cancel_button(job: Job, key: str = "cancel") -> None:
    """Draw the cancel button, if this explorer can cancel the job."""
    if job.is_elsewhere:
        st.caption("Another explorer runs this; cancel it there.")
        return
    label = "End it" if job.is_watching else "Cancel"
    if st.button(label, icon=":material/close:", key=f"{key}.{job.job_id}"):
        services.stop_job(job)
        _again(in_drawer=key != "cancel")


def resume_button(job: Job, *, primary: bool = True, key: str = "resume") -> None:
    """Draw the button that resumes an unfinished job."""
    label = "Try again" if job.state == "failed" or job.verb in _TRIALS else "Resume"
    look: Literal["primary", "secondary"] = "primary" if primary else "secondary"
    pressed = st.button(label, icon=":material/resume:", key=f"{key}.{job.job_id}", type=look)
    if pressed and answer(lambda: services.resume_job(job)) is not None:
        _again(in_drawer=key != "resume")


def _again(*, in_drawer: bool) -> NoReturn:
    """Rerun the page; the drawer stays open."""
    st.session_state[_OPEN] = in_drawer
    st.rerun()


def stopped(job: Job, *, primary: bool = True) -> None:
    """Draw why a job did not finish, and the button that resumes it."""
    if job.problem is not None:
        problem.show(job.problem)
    elif job.state == "interrupted":
        rest = "It begins anew." if job.verb in _TRIALS else "Resume it: finished work is not repeated."
        st.warning(f"The explorer was closed while this ran. {rest}", icon=":material/pause_circle:")
    elif job.is_watching:
        st.info("Ended. The archived steps stay; resume to go on.", icon=":material/info:")
    else:
        st.info("Cancelled. Finished work stays.", icon=":material/info:")
    resume_button(job, primary=primary)


def lead_to(job: Job) -> None:
    """Show the result of a job on its page."""
    text = services.describe(job)
    if run := text.query.pop("run"):
        state.set_run(run)
    state.go_to(text.page, **text.query)


def jobs_drawer() -> None:
    """Draw the header's button that opens the jobs, with the number of running ones."""
    jobs = services.all_jobs()
    n_running = sum(job.is_running for job in jobs)
    label = fmt.counted(n_running, "job") if n_running else "Jobs"
    icon = ":material/progress_activity:" if n_running else ":material/checklist:"
    if state.choice_text("panel") == "jobs":  # The former address of the jobs, as a page.
        state.retract("panel")
        st.session_state[_OPEN] = True
    # Another label makes another popover, which would be closed.
    if st.session_state.pop(_OPEN, False):
        st.session_state["header.jobs"] = True
    panel = st.popover(label, icon=icon, key="header.jobs", on_change="rerun", width="content")
    if panel.open:
        with panel:
            st.fragment(_drawer, run_every=2 * POLL_SECONDS if n_running else None)(n_running)
    elif n_running:
        st.fragment(_wait_for_end, run_every=4 * POLL_SECONDS)(n_running)


def _wait_for_end(n_running: int) -> None:
    """Rerun the page once fewer jobs run."""
    if sum(job.is_running for job in services.all_jobs()) != n_running:
        st.rerun()


def _drawer(n_running: int) -> None:
    """Draw the jobs, running ones first; rerun the page once fewer run."""
    jobs = services.all_jobs()
    if sum(job.is_running for job in jobs) != n_running:
        _again(in_drawer=True)
    if not jobs:
        st.caption("Measuring, writing, verifying and comparing appear here with their progress and log.")
        return
    st.caption(
        f"At most {services.MOST_AT_WORK} jobs run at a time. They go on when you leave a page or close the "
        "tab; when the explorer ends, they stop and can be resumed."
    )
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
        _again(in_drawer=True)


def _row(job: Job) -> None:
    """Draw one job with the actions of its state."""
    text, (word, colour, icon) = services.describe(job), STATES[job.state]
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.markdown(f"**{fmt.markdown(fmt.elided(text.title, _TITLE_WIDTH))}**", width="content")
        st.badge(word, color=colour, icon=icon)
    took = "" if job.is_running else f" · {fmt.duration(job.seconds)}"
    st.caption(fmt.markdown(f"{measured.when(job.started_at)}{took} · {fmt.elided(text.about, _ITEM_WIDTH)}"))
    if job.is_running:
        progress(job)
    elif job.problem is not None:
        st.caption(fmt.markdown(fmt.sentence(job.problem.what)))
    with st.container(horizontal=True, vertical_alignment="center"):
        if job.is_running:
            cancel_button(job, "drawer.cancel")
        elif job.state != "finished":
            resume_button(job, primary=False, key="drawer.resume")
        if job.state != "queued" and st.button("Show", key=f"drawer.show.{job.job_id}", type="tertiary"):
            lead_to(job)
        if not job.is_running and st.button("Remove", key=f"drawer.remove.{job.job_id}", type="tertiary"):
            services.forget_job(job)
            _again(in_drawer=True)
    if job.log_text() and st.toggle("Log", key=f"drawer.log.{job.job_id}"):
        st.code(job.log_text(), language=None, wrap_lines=True)
