"""Failure rehearsal: training restored from the archive, against training without failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Work
from inshrink_app.model import Subject
from inshrink_app.pages.archives.figures import rehearsal_figure
from inshrink_app.widgets import ending, fmt, job_card
from inshrink_app.widgets.choices import codec_labels, pick_one
from inshrink_app.widgets.layout import chart, facts

from inshrink_core.request import Request, request_from_json


def show(run: Subject, training: Any) -> None:
    """Draw the settings, the button, the progress, and the latest finished rehearsal.

    Parameters
    ----------
    run
        A bundled sample.
    training
        The training task that made it (from the lab).
    """
    request = _request(training)
    work = Work.asking([request], run.path, "archives", "rehearse")
    job = services.job_of(work)
    with st.container(horizontal=True, vertical_alignment="center"):
        tip = "Trainings that were finished with these settings are not repeated."
        look: Any = {"help": tip, "type": "secondary" if job else "primary"}
        label = "Rehearse again" if job else "Rehearse"
        job_card.start_button(label, work, "replay", disabled=bool(job and job.is_running), **look)
        st.caption(
            f"Trains {fmt.markdown(training.name)} with failures and without. After a failure it continues "
            "from a restored step; the difference at the end is the cost of compression."
        )
    if job_card.settled(job, ""):
        finished = job or services.newest_job("archives", "rehearse", run.path, "finished")
        if finished is not None:
            _result(services.read_result(finished))
    ending.requests([request])


def _request(training: Any) -> Request[Any]:
    """Draw the settings and return the request of a verb that the lab registers."""
    first, second, third, fourth = st.columns(4)
    codecs = codec_labels()
    tip = "Lossless is the control: its restores change nothing."
    with first:
        codec = pick_one("Codec", codecs, format_func=codecs.__getitem__, key="rehearse.codec", help=tip)
    most, usual, saves = training.n_saves - 1, training.n_restores, training.n_saves
    restores = second.number_input("Failures", 1, most, usual, key="rehearse.restores")
    tip = "Pairs of trainings. A single pair does not show the influence of chance."
    seeds = third.number_input("Seeds", 1, 20, 3, key="rehearse.seeds", help=tip)
    steps = fourth.number_input("Steps", saves, 100_000, training.n_steps, saves, key="rehearse.steps")
    counts = {"restores": int(restores), "seeds": int(seeds), "steps": int(steps)}
    fields = {"task": training.name, "output": str(services.rehearsals_folder()), "codec": str(codec)}
    return request_from_json({"verb": "rehearse", "fields": {**fields, **counts}})


def _result(rehearsal: Mapping[str, Any]) -> None:
    """Draw the figures and curves of a rehearsal."""
    width, n_pairs = rehearsal["excess_half_width"], len(rehearsal["curves"])
    certainty = "a single pair" if width is None else f"± {fmt.percent(width)} (95 %)"
    facts(
        [
            ("Excess at the end", fmt.percent(rehearsal["excess"]), certainty),
            (
                "Noise of the seeds",
                fmt.percent(rehearsal["noise"]),
                f"{fmt.markdown(rehearsal['metric'])}, uninterrupted",
                "The standard deviation of the end of trainings with other random numbers, as a share of the "
                "mean. An excess within it cannot be told from chance.",
            ),
            ("Failures", fmt.count(len(rehearsal["restored_at"])), "each restored from the archive"),
            (
                "Compression ratio",
                fmt.ratio(rehearsal["ratio_total"]),
                f"weights {fmt.ratio(rehearsal['ratio_weights'])}",
            ),
        ]
    )
    alt = f"{rehearsal['metric']} by step, with restores and without"
    chart(rehearsal_figure(rehearsal), "rehearsal", alt)
    band = "Band: the range of the uninterrupted trainings. " if n_pairs > 1 else ""
    st.caption(f"{band}Dotted: failures, after which training continued from the archive.")
