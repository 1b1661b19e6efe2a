"""Jobs: everything long that runs or ran, from every page."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.widgets import job_card, listing, problem, snippets
from inshrink_app.widgets.formatting import count_text, duration_text, elide, inked, markdown_text

OPEN_PAGE = "pages/open/view.py"

_SHOWN = 20
_NAME_WIDTH = 72
_Colour = Literal["blue", "green", "red", "gray", "orange"]
_STATES: dict[str, tuple[str, _Colour, str]] = {
    "queued": ("Queued", "gray", ":material/schedule:"),
    "running": ("Running", "blue", ":material/progress_activity:"),
    "finished": ("Finished", "green", ":material/check_circle:"),
    "failed": ("Failed", "red", ":material/error:"),
    "cancelled": ("Cancelled", "gray", ":material/cancel:"),
    "interrupted": ("Interrupted", "orange", ":material/pause_circle:"),
}
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
    _list(tuple(job.job_id for job in shown), poll=any(job.is_running for job in shown))
    _table(jobs)
    snippets.of(max(shown or list(jobs), key=lambda job: job.started_at).commands)


def _nothing_yet() -> None:
    """Say what will stand here."""
    with st.container(border=True):
        st.header("No jobs yet", anchor=False)
        st.write(
            "Measuring a sensitivity, exporting, verifying, comparing and rehearsing appear here, with their "
            "progress, log and result."
        )
        if st.button("Choose a run", type="primary", icon=":material/folder_open:"):
            st.switch_page(OPEN_PAGE)
    snippets.show("inshrink --help", "import inshrink_core\n\nprint(inshrink_core.__all__)")


def _filtered(jobs: tuple[Job, ...]) -> list[Job]:
    """Draw the filter and return the jobs that pass; the one of the link comes first."""
    linked = st.query_params.get("job")
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        chosen = st.segmented_control(
            "Show",
            list(_FILTERS),
            format_func=lambda name: inked(_FILTERS[name]),
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
    kept.sort(key=lambda job: (job.job_id != linked, not job.is_running, job.state == "queued"))
    if not kept:
        st.caption("No job is in this state.")
    if len(kept) > _SHOWN:
        st.caption(f"The newest {_SHOWN} of {len(kept)}; the table below has all of them.")
    return kept[:_SHOWN]


def _list(job_ids: tuple[str, ...], *, poll: bool) -> None:
    """Draw the jobs, looking again and again only while one of them runs."""
    st.fragment(_cards, run_every=job_card.POLL_SECONDS if poll else None)(job_ids, poll)


def _cards(job_ids: tuple[str, ...], was_running: bool) -> None:
    """Draw one card a job; the page is drawn anew once none runs any more."""
    found = [services.find_job(job_id) for job_id in job_ids]
    jobs = [job for job in found if job is not None]
    if was_running and not any(job.is_running for job in jobs):
        st.rerun()
    for job in jobs:
        _card(job)


def _card(job: Job) -> None:
    """Draw one job."""
    text = services.describe(job)
    label, colour, icon = _STATES[job.state]
    with st.container(border=True):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            st.markdown(f"**{markdown_text(elide(text.title, _NAME_WIDTH))}**", width="content")
            st.badge(label, color=colour, icon=icon)
        st.caption(markdown_text(f"{_when(job)} · {text.about}"))
        if job.is_running:
            job_card.progress(job)
        elif job.problem is not None:
            problem.show(job.problem)
        with st.container(horizontal=True):
            _actions(job, text)
        job_card.log(job, expanded=st.query_params.get("job") == job.job_id and not job.is_running)


def _when(job: Job) -> str:
    """Say when it began and how long it took."""
    begun = datetime.fromtimestamp(job.started_at, UTC).astimezone()
    return f"{begun:%d %b %Y, %H:%M}" + ("" if job.is_running else f" · {duration_text(job.seconds)}")


def _actions(job: Job, text: services.JobText) -> None:
    """Offer what can be done with a job in its state."""
    if job.is_running:
        job_card.cancel_button(job)
        return
    if job.state == "finished":
        label = "Show the result"
        if text.page != "jobs" and st.button(label, icon=":material/arrow_forward:", key=f"go.{job.job_id}"):
            _go(text)
    else:
        job_card.resume_button(job, primary=False)
    if st.button("Remove", icon=":material/delete:", type="tertiary", key=f"remove.{job.job_id}"):
        services.forget_job(job)
        st.rerun()


def _go(text: services.JobText) -> None:
    """Show the result on the page it belongs to."""
    run = text.query.get("run")
    if run:
        state.set_run(run)
    state.remember(**{key: value for key, value in text.query.items() if key != "run"})
    st.switch_page(f"pages/{text.page}/view.py")


def _table(jobs: tuple[Job, ...]) -> None:
    """List all jobs."""
    rows = [
        (
            services.describe(job).title,
            _STATES[job.state][0],
            job.fraction if job.is_running else float(job.state == "finished"),
            datetime.fromtimestamp(job.started_at, UTC).isoformat(timespec="seconds"),
            round(job.seconds, 1),
            services.describe(job).about,
            job.job_id,
        )
        for job in jobs
    ]
    columns = ["job", "state", "done", "started (UTC)", "seconds", "path", "id"]
    table = pd.DataFrame(rows, columns=columns)
    with st.expander(f"As a table ({count_text(len(jobs))})", icon=":material/table_rows:"):
        done = st.column_config.ProgressColumn("Done", format="percent", min_value=0, max_value=1)
        listing.show(
            table,
            "jobs",
            alt="Jobs with their state, progress, start, duration and path",
            formats={"seconds": "%.1f"},
            columns={"done": done},
        )


render()
