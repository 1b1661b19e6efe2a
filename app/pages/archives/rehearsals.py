"""The failure rehearsal: training that is restored from the archive, against training that never fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Subject
from inshrink_app.pages.archives.figures import rehearsal_figure
from inshrink_app.widgets import ending, fmt, job_card, listing
from inshrink_app.widgets.choices import codec_labels, pick_one
from inshrink_app.widgets.layout import answer, chart, facts

from inshrink_core.request import Request, request_from_json


def rehearse(original: Subject) -> None:
    """Draw the rehearsal of a sample's training, and those that were saved elsewhere."""
    training = services.training_of(original)
    if training is not None:
        _rehearse(original, _choose(training))
    saved()


def _rehearse(original: Subject, training: Any) -> None:
    request = _request(training)
    work = Work.asking([request], original.path, "archives", "rehearse")
    job = services.job_of(work)
    is_done = job is not None and job.state == "finished"
    with st.container(horizontal=True, vertical_alignment="center"):
        if job is None or is_done:
            label = "Rehearse" if job is None else "Rehearse again"
            tip = "Trainings that were finished with these settings are not repeated."
            job_card.start_button(label, work, "replay", help=tip, type="secondary" if is_done else "primary")
        st.caption(
            f"Trains {fmt.markdown(training.name)} with failures and without. After a failure it continues "
            "from a restored step; the difference at the end is the cost of compression."
        )
    if job is not None and job.is_running:
        _live(job)
        return
    jobs = (job,) if job is not None and is_done else services.finished_rehearsals(training.name)
    finished = [one for one in map(services.read_result, jobs) if isinstance(one, dict)]
    if job is not None and not is_done:
        job_card.stopped(job, primary=False)
    elif finished:
        _show(finished[0] if is_done else _chosen(finished, "Earlier rehearsals", "rehearse.old"), "found")
    elif is_done:
        st.caption("The result of this rehearsal cannot be read any more.")
    ending.requests([request], "rehearse.snippets")


def _choose(own: Any) -> Any:
    """Let the reader rehearse another of the shipped trainings than the sample's own."""
    names = list(services.trainings())
    picked = pick_one(
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


def _request(training: Any) -> Request[Any]:
    """Draw the controls and return the request that rehearses."""
    first, second, third, fourth = st.columns(4)
    own = f"rehearse.{training.name}"
    codecs = codec_labels()
    tip = "Lossless is the control: its restores change nothing."
    with first:
        codec = pick_one("Codec", codecs, format_func=codecs.__getitem__, key="rehearse.codec", help=tip)
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
    # The laboratory's verb is found by its name, as every verb that another package registers.
    counts = {"restores": int(restores), "seeds": int(seeds), "steps": int(steps)}
    fields = {"task": training.name, "output": str(services.rehearsals_folder()), "codec": str(codec)}
    return request_from_json({"verb": "rehearse", "fields": {**fields, **counts}})


def _chosen(found: Sequence[Mapping[str, Any]], label: str, key: str) -> Mapping[str, Any]:
    """Draw which rehearsals there are, and return the one that is chosen."""
    place = int(pick_one(label, range(len(found)), format_func=lambda i: _title(found[i]), key=key))
    return found[place]


def _title(found: Mapping[str, Any]) -> str:
    """Tell rehearsals apart, by what was asked and by what came of it."""
    counts = fmt.counted(len(found["restored_at"]), "failure"), fmt.counted(len(found["curves"]), "seed")
    return " · ".join([found["task"], found["codec"], *counts, fmt.ratio(found["ratio_total"])])


@st.fragment(run_every=job_card.POLL_SECONDS)
def _live(job: Job) -> None:
    """Draw a rehearsal that runs: how far it is, and the pairs of trainings that are done."""
    now = job_card.current(job)
    job_card.progress(now)
    job_card.cancel_button(now)
    found = services.rehearsal_so_far(now)
    if found is None:
        st.caption("Curves appear here as soon as the first pair of trainings is done.")
        return
    st.caption(f"{fmt.counted(len(found['curves']), 'pair')} of trainings so far.")
    _chart(found, "live")


def _show(found: Mapping[str, Any], key: str) -> None:
    """Draw a finished rehearsal.

    Parameters
    ----------
    found
        The rehearsal.
    key
        Tells its widgets from those of another one on the page.
    """
    _facts(found)
    _chart(found, key)
    table = pd.DataFrame(
        [
            (curve["seed"], step, before, after)
            for curve in found["curves"]
            for step, before, after in zip(
                *(curve[name] for name in ("steps", "uninterrupted", "restored")), strict=True
            )
        ],
        columns=["seed", "step", "uninterrupted", "restored"],
    )
    with st.expander(f"Curves ({fmt.counted(len(found['curves']), 'pair')})", icon=":material/table_rows:"):
        metric = fmt.fixed_format([*table["uninterrupted"], *table["restored"]])
        listing.show(
            table,
            f"rehearsal-{key}",
            alt="Metric of every training at every save",
            formats={"uninterrupted": metric, "restored": metric},
        )


def _chart(found: Mapping[str, Any], key: str) -> None:
    """Draw the curves, and say how to read them."""
    chart(
        rehearsal_figure(found),
        f"rehearsal.chart.{key}",
        f"{found['metric']} by step, with {len(found['restored_at'])} restores and without",
    )
    band = (
        "The band is the range of the uninterrupted trainings: what the seed alone does."
        if len(found["curves"]) > 1
        else "A single pair: how far chance alone moves the curve needs more seeds."
    )
    st.caption(f"{band} Dotted: failures, after which training went on from the archive.")


def _facts(found: Mapping[str, Any]) -> None:
    """Draw the figures of a rehearsal."""
    width, metric = found["excess_half_width"], fmt.markdown(found["metric"])
    certainty = "a single seed says little" if width is None else f"± {fmt.percent(width)} (95 %)"
    weights = fmt.ratio(found["ratio_weights"])
    facts(
        [
            ("Excess at the end", fmt.percent(found["excess"]), certainty),
            (
                "Noise of the seeds",
                fmt.percent(found["noise"]),
                f"{metric}, uninterrupted",
                "How far trainings with other random numbers end from each other: their standard deviation, "
                "as a share of the mean. An excess within it cannot be told from chance.",
            ),
            ("Failures", fmt.count(len(found["restored_at"])), "each restored from the archive"),
            ("Compression ratio", fmt.ratio(found["ratio_total"]), f"weights {weights}"),
        ]
    )


def saved() -> None:
    """Draw the field for its path, and what is there."""
    with st.expander("Open a saved rehearsal", icon=":material/folder_open:"):
        text = st.text_input(
            "File or folder",
            key="rehearsal.saved",
            placeholder="rehearsal.json",
            help="What `inshrink rehearse --json` printed, or the folder where `inshrink rehearse -o` kept "
            "its trainings.",
        )
        if not text.strip():
            st.caption(
                "The curves of a rehearsal of the command line, of your own training too, beside the noise "
                "of its seeds."
            )
            return
        found = answer(lambda: services.saved_rehearsals(text.strip()))
        if found is not None:
            _show(_chosen(found, "Rehearsal", "rehearsal.which"), "saved")
