"""Jobs: everything long that runs or ran, from every page."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.model.page import Page
from inshrink_app.widgets import ending, fmt, job_card, listing, problem
from inshrink_app.widgets.layout import section

_NAME_WIDTH = 72
_SECONDS = 1.0
"""Between two looks at the table while a job runs."""

_TABLE, _DETAILS, _PICKED, _FOLLOWED = "jobs.table", "jobs.details", "jobs.picked", "jobs.followed"
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
        _follow(shown)
        _list(tuple(job.job_id for job in shown), poll=any(job.is_running for job in shown))
        chosen = _chosen(shown)
        _details(chosen)
    ending.requests((chosen if shown else max(jobs, key=lambda job: job.started_at)).requests)


def _nothing_yet() -> None:
    """Say what will stand here."""
    with section("No jobs yet"):
        st.write(
            "Measuring a sensitivity, exporting, verifying, comparing and rehearsing appear here, with their "
            "progress, log and result."
        )
        if st.button("Choose a run", type="primary", icon=":material/folder_open:"):
            state.go_to("open")
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


def _list(job_ids: tuple[str, ...], *, poll: bool) -> None:
    """Draw the table, looking again and again only while one of its jobs runs."""
    st.fragment(_table, run_every=_SECONDS if poll else None)(job_ids, poll)


def _table(job_ids: tuple[str, ...], was_running: bool) -> None:
    """List the jobs; the page is drawn anew once a row is chosen, or none runs any more."""
    jobs = [job for job in map(services.find_job, job_ids) if job is not None]
    if (
        len(jobs) < len(job_ids)
        or _PICKED in st.session_state
        or (was_running and not any(job.is_running for job in jobs))
    ):
        st.rerun()
    key = f"{_TABLE}.{hash(job_ids)}"  # A row that is chosen is another job's in another list.
    columns = ["job", "state", "done", "started (UTC)", "seconds", "path", "id"]
    table = pd.DataFrame([_row(job) for job in jobs], columns=columns)
    listing.show(
        table,
        "jobs",
        alt="Jobs with their state, progress, start, duration and path",
        formats={"seconds": "%.1f"},
        columns={"done": listing.share_column(label="Done")},
        wide=["job"],
        hidden=["id"],
        key=key,
        on_select=functools.partial(_row_chosen, key, job_ids),
        selection_mode="single-row",
    )


def _row(job: Job) -> tuple[Any, ...]:
    """Return what stands in the table of a job."""
    text = services.describe(job)
    return (
        text.title,
        job_card.STATES[job.state][0],
        job.fraction if job.is_running else float(job.state == "finished"),
        datetime.fromtimestamp(job.started_at, UTC).isoformat(timespec="seconds"),
        round(job.seconds, 1),
        text.about,
        job.job_id,
    )


def _row_chosen(key: str, job_ids: Sequence[str]) -> None:
    """Take in a click on a row."""
    rows = st.session_state[key]["selection"]["rows"]
    if rows:
        st.session_state[_PICKED] = job_ids[int(rows[0])]


def _follow(jobs: Sequence[Job]) -> None:
    """Choose the job whose row was clicked, else that of the link, once; else one at work, or the newest."""
    known = [job.job_id for job in jobs]
    wanted = st.session_state.pop(_PICKED, None) or state.choice_text("job")
    if wanted in known and wanted != st.session_state.get(_FOLLOWED):
        st.session_state[_DETAILS] = st.session_state[_FOLLOWED] = wanted
    if st.session_state.get(_DETAILS) not in known:
        at_work = (job.job_id for job in jobs if job.state == "running")
        st.session_state[_DETAILS] = next(at_work, known[0])


def _chosen(jobs: Sequence[Job]) -> Job:
    """Draw the choice of a job, which is also the way without a mouse."""
    by_id = {job.job_id: job for job in jobs}
    chosen = str(
        st.selectbox(
            "Details of",
            list(by_id),
            format_func=lambda job_id: fmt.elided(services.describe(by_id[job_id]).title, _NAME_WIDTH),
            key=_DETAILS,
        )
    )
    st.session_state[_FOLLOWED] = chosen
    if st.query_params.get("job") != chosen:
        st.query_params["job"] = chosen
    return by_id[chosen]


def _details(job: Job) -> None:
    """Draw one job, looking again and again only while it runs."""
    st.fragment(_card, run_every=job_card.POLL_SECONDS if job.is_running else None)(job.job_id, job.state)


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
        label = "Show the result"
        if text.page != "jobs" and st.button(label, icon=":material/arrow_forward:", key=f"go.{job.job_id}"):
            job_card.lead_to(job)
    else:
        job_card.resume_button(job, primary=False)
    if st.button("Remove", icon=":material/delete:", type="tertiary", key=f"remove.{job.job_id}"):
        services.forget_job(job)
        st.rerun()


PAGE = Page("Jobs", ":material/work_history:", render)
