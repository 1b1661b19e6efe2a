"""A measured metric of a run, or what stands in its place: its cost, its progress, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.registry import Job
from inshrink_app.widgets import job_card, problem
from inshrink_app.widgets.formatting import bytes_text, count_text, remaining_text
from inshrink_app.widgets.tables import METRICS, Sensitivity, ServiceError, Subject

__all__ = ["ASK_ABOVE_BYTES", "measured"]

ASK_ABOVE_BYTES = 200_000_000
"""Reading more than this takes long enough that the reader is asked first."""

_POLL_SECONDS = 0.5


def measured(shown: Subject, metric: str, key: str = "") -> Mapping[str, Sensitivity] | None:
    """Return the tables of a metric by grouping; None where the page shows how to come to them instead.

    Parameters
    ----------
    shown
        What is measured.
    metric
        A key of `METRICS`.
    key
        Tells the widgets of several measurements on one page apart.
    """
    path = str(shown.path)
    try:
        job = services.sensitivity_job(path, metric)
        is_wanted = job is None or job.state == "interrupted"
        if is_wanted and state.was_clicked() and services.measuring_cost(shown, metric) <= ASK_ABOVE_BYTES:
            services.forget_sensitivity(path, metric)
            job = services.start_sensitivity(path, metric)
    except (ServiceError, OSError) as error:
        problem.show(error.problem if isinstance(error, ServiceError) else problem.of_os_error(error))
        return None
    if job is None:
        _ask(shown, metric, key)
    elif job.is_running:
        _progress(path, metric, key)
    elif job.state == "finished":
        tables: Mapping[str, Sensitivity] = job.result
        return tables
    else:
        _stopped(path, metric, job, key)
    return None


def _ask(shown: Subject, metric: str, key: str) -> None:
    """Say what the question costs before it is asked."""
    with st.container(border=True):
        st.header("Not measured yet", anchor=False)
        cost = services.measuring_cost(shown, metric)
        st.write(
            f"This reads up to {bytes_text(cost)} from {count_text(len(shown.steps))} checkpoints. The "
            "result is kept on disk; checkpoints measured before are not read again."
        )
        if not state.was_clicked():
            st.caption("A link brought you here, and a link alone starts nothing.")
        if st.button(
            f"Measure {METRICS[metric].label.lower()}",
            type="primary",
            icon=":material/play_arrow:",
            key=f"measure{key}",
        ):
            state.clicked()
            services.start_sensitivity(str(shown.path), metric)
            st.rerun()


@st.fragment(run_every=_POLL_SECONDS)
def _progress(path: str, metric: str, key: str) -> None:
    """Look at the job; the page is drawn anew once it has ended."""
    job = services.sensitivity_job(path, metric)
    if job is None or not job.is_running:
        st.rerun()
    with st.container(border=True):
        st.header(f"Measuring {METRICS[metric].label.lower()}", anchor=False)
        if job.state == "queued":
            job_card.progress(job)
            _cancel(path, metric, key)
            return
        unit = "steps" if METRICS[metric].pooled else "checkpoints"
        text = f"{job.done:,} of {job.total:,} {unit} · {remaining_text(job.seconds, job.seconds_left)}"
        if "compress" in job.item:
            text = f"Compressing the run first · {remaining_text(job.seconds, job.seconds_left)}"
        st.progress(job.fraction, text=text if job.total else "Starting…")
        _cancel(path, metric, key)


def _cancel(path: str, metric: str, key: str) -> None:
    """Offer to end it."""
    if st.button("Cancel", icon=":material/close:", key=f"cancel{key}"):
        services.cancel_sensitivity(path, metric)
        st.rerun()


def _stopped(path: str, metric: str, job: Job, key: str) -> None:
    """Say that there is no measurement, why, and offer to try again."""
    if job.problem is not None:
        problem.show(job.problem)
    elif job.state == "interrupted":
        st.info("The explorer ended while this was measured.", icon=":material/info:")
    else:
        st.info("Measuring was cancelled. Nothing was changed.", icon=":material/info:")
    if st.button("Measure again", type="primary", icon=":material/refresh:", key=f"again{key}"):
        state.clicked()
        services.forget_sensitivity(path, metric)
        services.start_sensitivity(path, metric)
        st.rerun()
