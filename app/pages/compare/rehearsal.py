"""The failure rehearsal: training that is restored from the archive, against training that never fails."""

from __future__ import annotations

import shlex
from typing import Any

import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.job import Job
from inshrink_app.pages.compare import rehearsal_result
from inshrink_app.services import Training
from inshrink_app.widgets import job_card
from inshrink_app.widgets.formatting import counted, markdown_text
from inshrink_app.widgets.tables import Subject

__all__ = ["show"]

_CODECS = {"lattice": "Lattice", "inshrinkerator": "Inshrinkerator", "lossless": "Lossless, the control"}


def show(original: Subject, training: Training) -> None:
    """Draw the card of a sample's training."""
    with st.container(border=True):
        st.header("Failure rehearsal", anchor=False)
        training = _choose(training)
        st.write(
            f"Trains {markdown_text(training.name)} anew, with failures after which it goes on from what the "
            "archive restores, and without. The difference at the end is what compression costs a training "
            "that fails."
        )
        settings = _settings(training)
        job = services.rehearsal_job(training, settings)
        if job is not None and job.is_running:
            _live(job)
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


def _choose(own: Training) -> Training:
    """Let the reader rehearse another of the shipped trainings than the sample's own."""
    names = list(services.trainings())
    picked = st.selectbox(
        "Training",
        names,
        index=names.index(own.name),
        key="rehearse.training",
        help="The sample's own, or another that comes with Inshrink. Some take many minutes a pair.",
    )
    if picked == own.name:
        return own
    chosen = services.training_named(str(picked))
    if chosen is None:
        st.warning("This training needs a package that is not installed.", icon=":material/warning:")
    return chosen or own


def _settings(training: Training) -> dict[str, Any]:
    """Draw the controls."""
    first, second, third, fourth = st.columns(4)
    own = f"rehearse.{training.name}"
    codec = first.selectbox("Codec", list(_CODECS), format_func=_CODECS.__getitem__, key="rehearse.codec")
    restores = second.number_input(
        "Failures", 1, training.n_saves - 1, training.n_restores, key=f"{own}.restores"
    )
    seeds = third.number_input(
        "Seeds", 1, 20, 3, key="rehearse.seeds", help="Pairs of trainings; one says little."
    )
    steps = fourth.number_input(
        "Steps",
        training.n_saves,
        100_000,
        training.n_steps,
        training.n_saves,
        key=f"{own}.steps",
    )
    return {
        "codec": str(codec),
        "config": None,
        "optimizer": None,
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
    rehearsal_result.show(services.rehearsal(document), job.job_id)


@st.fragment(run_every=job_card.POLL_SECONDS)
def _live(job: Job) -> None:
    """Draw a rehearsal that runs: how far it is, and the pairs of trainings that are done."""
    current = services.find_job(job.job_id)
    if current is None or not current.is_running:
        st.rerun()
    job_card.progress(current)
    job_card.cancel_button(current)
    found = services.rehearsal_so_far(current)
    if found is None:
        st.caption("Curves appear here as soon as the first pair of trainings is done.")
        return
    st.caption(f"{counted(len(found.curves), 'pair')} of trainings so far.")
    rehearsal_result.chart(found, "live")


def _command(training: Training, settings: dict[str, Any]) -> None:
    """Show the command of the rehearsal, which is another one than the page's."""
    st.code(
        f"inshrink rehearse {shlex.quote(training.name)} --codec {settings['codec']} "
        f"--restores {settings['restores']} --seeds {settings['seeds']} --steps {settings['n_steps']} "
        "-o rehearsal",
        language=None,
        wrap_lines=True,
    )
