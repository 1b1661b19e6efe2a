"""The failure rehearsal: training that is restored from the archive, against training that never fails."""

from __future__ import annotations

import shlex
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import comparison_figures, figures, services
from inshrink_app.comparison_tables import RehearsalResult
from inshrink_app.components import download, job_card
from inshrink_app.formatting import count_text, counted, markdown_text, percent_text, ratio_text
from inshrink_app.job import Job
from inshrink_app.services import Training
from inshrink_app.tables import Subject

__all__ = ["show"]

_CODECS = {"lattice": "Lattice", "inshrinkerator": "Inshrinkerator", "lossless": "Lossless, the control"}


def show(original: Subject, training: Training) -> None:
    """Draw the card of a sample's training."""
    with st.container(border=True):
        st.subheader("Failure rehearsal", anchor=False)
        st.write(
            f"Trains {markdown_text(training.name)} anew, with failures after which it goes on from what the "
            "archive restores, and without. The difference at the end is what compression costs a training "
            "that fails."
        )
        settings = _settings(training)
        job = services.rehearsal_job(training, settings)
        if job is not None and job.is_running:
            job_card.running(job, "Rehearsing")
            return
        finished = services.finished_rehearsals(training)
        if job is not None and job.state == "finished":
            _result(job)
        elif job is not None:
            job_card.stopped(job, primary=False)
        elif finished:
            _earlier(finished)
        if (job is None or job.state == "finished") and st.button(
            "Rehearse" if job is None else "Rehearse again",
            icon=":material/replay:",
            help="Trainings that were finished with these settings are not repeated.",
        ):
            services.start_rehearsal(original, training, settings)
            st.rerun()
        _command(training, settings)


def _settings(training: Training) -> dict[str, Any]:
    """Draw the controls."""
    first, second, third, fourth = st.columns(4)
    codec = first.selectbox("Codec", list(_CODECS), format_func=_CODECS.__getitem__, key="rehearse.codec")
    restores = second.number_input(
        "Failures", 1, training.n_saves - 1, training.n_restores, key="rehearse.restores"
    )
    seeds = third.number_input(
        "Seeds", 1, 20, 3, key="rehearse.seeds", help="Pairs of trainings; one says little."
    )
    steps = fourth.number_input(
        "Steps", training.n_saves, 100_000, training.n_steps, training.n_saves, key="rehearse.steps"
    )
    return {
        "codec": str(codec),
        "config": None,
        "optimizer": "lossless",
        "restores": int(restores),
        "seeds": int(seeds),
        "n_steps": int(steps),
    }


def _earlier(finished: tuple[Job, ...]) -> None:
    """Offer what was rehearsed before with other settings."""
    titles = {job.job_id: _title(job) for job in finished}
    chosen = st.selectbox(
        "Earlier rehearsals", list(titles), format_func=titles.__getitem__, key="rehearse.old"
    )
    job = next((job for job in finished if job.job_id == chosen), finished[0])
    _result(job)


def _title(job: Job) -> str:
    """Name a rehearsal by its settings."""
    request = job.request
    return (
        f"{request.get('codec')} · {counted(int(request.get('restores', 0)), 'failure')} · "
        f"{counted(int(request.get('seeds', 0)), 'seed')} · {counted(int(request.get('n_steps', 0)), 'step')}"
    )


def _result(job: Job) -> None:
    """Draw a finished rehearsal."""
    document = services.read_result(job)
    if not isinstance(document, dict):
        st.caption("What this rehearsal found cannot be read any more.")
        return
    found = services.rehearsal(document)
    _facts(found)
    st.plotly_chart(
        comparison_figures.rehearsal_figure(found),
        config=dict(figures.CONFIG),
        key=f"rehearsal.{job.job_id}",
        alt=f"{found.metric} by step, with {len(found.restored_at)} restores and without",
    )
    st.caption(
        "The band is the range of the uninterrupted trainings: what the seed alone does. Dotted: failures, "
        "after which training went on from the archive."
    )
    table = pd.DataFrame(
        [
            (curve.seed, step, before, after)
            for curve in found.curves
            for step, before, after in zip(curve.steps, curve.uninterrupted, curve.restored, strict=True)
        ],
        columns=["seed", "step", "uninterrupted", "restored"],
    )
    with st.expander(f"Curves ({counted(len(found.curves), 'pair')})", icon=":material/table_rows:"):
        st.dataframe(table, hide_index=True, alt="Metric of every training at every save")
        download.table_buttons(table, "rehearsal")


def _facts(found: RehearsalResult) -> None:
    """Draw the figures of a rehearsal."""
    width = found.excess_half_width
    facts = [
        (
            "Excess at the end",
            percent_text(found.excess),
            "a single seed says little" if width is None else f"± {percent_text(width)} (95 %)",
        ),
        ("Noise of the seeds", percent_text(found.noise), f"{markdown_text(found.metric)}, uninterrupted"),
        ("Failures", count_text(len(found.restored_at)), "each restored from the archive"),
        ("Ratio, weights", ratio_text(found.ratio_weights), f"{ratio_text(found.ratio_total)} in all"),
    ]
    with st.container(horizontal=True):
        for label, value, below in facts:
            st.metric(label, value, delta=below, delta_color="off", delta_arrow="off", border=True)


def _command(training: Training, settings: dict[str, Any]) -> None:
    """Show the command of the rehearsal, which is another one than the page's."""
    st.code(
        f"inshrink rehearse {shlex.quote(training.name)} --codec {settings['codec']} "
        f"--restores {settings['restores']} --seeds {settings['seeds']} --steps {settings['n_steps']} "
        "-o rehearsal",
        language="bash",
        wrap_lines=True,
    )
