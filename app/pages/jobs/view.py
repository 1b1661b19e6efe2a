"""Jobs: everything long that runs or ran, from every page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.model import Page, moment
from inshrink_app.widgets import ending, fmt, job_card, listing, modules, problem, subject
from inshrink_app.widgets.layout import section

_NAME_WIDTH = 72
_SECONDS = 1.0
"""Between two looks at the table while a job runs."""

_FILTERS = {
    "all": "All",
    "running": "Running or queued",
    "finished": "Finished",
    "unfinished": "Not finished",
}


def render() -> None:
    """Draw the page."""
    current = state.run_path()
    if current is not None:
        state.publish(run=current)
    st.title("Jobs", anchor=False)
    st.write(
        "Everything that takes long runs in a process of its own. It goes on when you leave a page, reload "
        "it or close the tab; when the explorer itself ends, its jobs stop and can be resumed here. "
        f"At most {services.MOST_AT_WORK} run at a time; the others wait their turn."
    )
    jobs = services.all_jobs()
    if not jobs:
        _nothing_yet()
        return
    shown = _filtered(jobs)
    if shown:
        chosen = _chosen(shown)
        ids, poll = tuple(job.job_id for job in shown), any(job.is_running for job in shown)
        st.fragment(_table, run_every=_SECONDS if poll else None)(ids, chosen.job_id, poll)
        seconds = job_card.POLL_SECONDS if chosen.is_running else None
        st.fragment(_card, run_every=seconds)(chosen.job_id, chosen.state)
    ending.requests((chosen if shown else max(jobs, key=lambda job: job.started_at)).requests)


def _nothing_yet() -> None:
    """Say what will stand here."""
    with section("No jobs yet"):
        st.write(
            "Measuring a sensitivity, exporting, verifying, comparing and rehearsing appear here, with their "
            "progress, log and result."
        )
        subject.choose_run()
    ending.snippets("inshrink --help", "import inshrink_core\n\nprint(inshrink_core.__all__)")


def _filtered(jobs: tuple[Job, ...]) -> list[Job]:
    """Draw the filter and return the jobs that pass, the newest first."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        chosen = st.segmented_control(
            "Show",
            list(_FILTERS),
            format_func=lambda name: fmt.inked(_FILTERS[name]),
            default="all",
            key="jobs.filter",
            label_visibility="collapsed",
        )
        ended = [job for job in jobs if not job.is_running]
        if st.button(
            "Clear ended jobs",
            icon=":material/delete_sweep:",
            type="tertiary",
            disabled=not ended,
            help="Their logs and kept results go; files they made stay.",
        ):
            for job in ended:
                services.forget_job(job)
            st.rerun()
    kept = [
        job
        for job in jobs
        if chosen in (None, "all", job.state)
        or (chosen == "running" and job.is_running)
        or (chosen == "unfinished" and job.state in ("failed", "cancelled", "interrupted"))
    ]
    if not kept:
        st.caption("No job is in this state.")
    return kept


def _chosen(jobs: Sequence[Job]) -> Job:
    """Return the job whose row was chosen, or that of the link; else one at work, or the newest."""
    by_id = {job.job_id: job for job in jobs}
    at_work = (job.job_id for job in jobs if job.state == "running")
    chosen = state.choice("job", list(by_id), next(at_work, jobs[0].job_id))
    state.publish(job=chosen)
    return by_id[chosen]


def _table(job_ids: tuple[str, ...], chosen: str, was_running: bool) -> None:
    """List the jobs; the page is drawn anew once a row is chosen, or none runs any more."""
    jobs = [job for job in map(services.find_job, job_ids) if job is not None]
    is_other = state.choice("job", job_ids, chosen) != chosen
    if len(jobs) < len(job_ids) or is_other or (was_running and not any(job.is_running for job in jobs)):
        st.rerun()
    table = pd.DataFrame(
        [_row(job) for job in jobs], columns=["Job", "State", "Done", "Started", "Seconds", "Path"]
    )
    modules.table(
        table,
        job_ids,
        f"jobs.table.{hash(job_ids)}",  # A row that is chosen is another job's in another list.
        (chosen,),
        lambda ids: state.publish(job=ids[0]) if ids else None,
        alt="Jobs with their state, progress, start, duration and path",
        columns={
            "Job": st.column_config.Column(width="medium"),
            "Done": listing.share_column(),
            "Started": st.column_config.DatetimeColumn(format="DD MMM YYYY, HH:mm"),
            "Seconds": st.column_config.NumberColumn(format="%.1f"),
        },
    )
    listing.table_buttons(table, "jobs")


def _row(job: Job) -> tuple[Any, ...]:
    """Return what stands in the table of a job."""
    text = services.describe(job)
    return (
        text.title,
        job_card.STATES[job.state][0],
        job.fraction if job.is_running else float(job.state == "finished"),
        moment(job.started_at).replace(tzinfo=None, microsecond=0),
        round(job.seconds, 1),
        text.about,
    )


def _card(job_id: str, was: str) -> None:
    """Draw a job; the page is drawn anew once its state is another."""
    job = services.find_job(job_id)
    if job is None or job.state != was:
        st.rerun()
    text = services.describe(job)
    label, colour, icon = job_card.STATES[job.state]
    with st.container(border=True):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            st.markdown(f"**{fmt.markdown(fmt.elided(text.title, _NAME_WIDTH))}**", width="content")
            st.badge(label, color=colour, icon=icon)
        st.caption(fmt.markdown(f"{job_card.when(job)} · {text.about}"))
        if job.is_running:
            job_card.progress(job)
        elif job.problem is not None:
            problem.show(job.problem)
        with st.container(horizontal=True):
            _actions(job, text)
        job_card.log(job, expanded=not job.is_running)


def _actions(job: Job, text: services.JobText) -> None:
    """Offer what can be done with a job in its state."""
    if job.is_running:
        job_card.cancel_button(job)
        return
    if job.state == "finished":
        if st.button("Show the result", icon=":material/arrow_forward:", key=f"go.{job.job_id}"):
            job_card.lead_to(job)
    else:
        job_card.resume_button(job, primary=False)
    if st.button("Remove", icon=":material/delete:", type="tertiary", key=f"remove.{job.job_id}"):
        services.forget_job(job)
        st.rerun()


PAGE = Page("Jobs", ":material/work_history:", render)
