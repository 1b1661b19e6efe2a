"""Export: write a run, or one step of it, as an archive to keep, to hand on or to begin from."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.pages.export import figure as export_figure
from inshrink_app.pages.export import form as export_form
from inshrink_app.pages.export import result as export_result
from inshrink_app.pages.export import result as export_snippets
from inshrink_app.pages.export.form import ExportRequest, PlannedFrame
from inshrink_app.widgets import figures, job_card, listing, problem, snippets, subject
from inshrink_app.widgets.formatting import bytes_text, count_text, counted, markdown_text, ratio_text
from inshrink_app.widgets.tables import ServiceError, Subject

_MAX_BARS = 120


def render() -> None:
    """Draw the page."""
    shown = subject.require("Export")
    if shown is None:
        return
    linked = services.linked_job(state.choice_text("job"), "export", shown.path)
    job = linked or services.newest_export(shown)
    is_running = job is not None and job.is_running
    if job is not None:
        _job(shown, job)
    left, right = st.columns([2, 3], gap="medium")
    with left:
        request = export_form.show(shown)
    with right:
        if request.kind == "chain":
            _chain_plan(shown, request)
        else:
            _other_plan(shown, request)
        target = _launch(shown, request, disabled=is_running)
    snippets.show(*export_snippets.of(shown, request, target))


def _job(shown: Subject, job: Job) -> None:
    """Draw the export that runs or ran last."""
    if job.is_running:
        job_card.running(job, "Exporting")
    elif job.state == "finished":
        export_result.show(shown, job)
    else:
        with st.container(border=True):
            st.header("The last export did not finish", anchor=False)
            job_card.stopped(job, primary=False)
    if not job.is_running:
        job_card.log(job)


def _chain_plan(shown: Subject, request: ExportRequest) -> None:
    """Draw the chain as it would be written, and what its sizes are estimated from."""
    with st.container(border=True):
        st.header("As it will be written", anchor=False)
        if not request.steps:
            st.caption("No step is chosen.")
            return
        plan = services.export_plan(shown, request)
        n_keyframes = sum(frame.kind == "keyframe" for frame in plan.frames)
        estimated = plan.nbytes
        ratio = plan.raw_bytes / estimated if estimated else None
        with st.container(horizontal=True):
            _fact("Frames", count_text(len(plan.frames)), counted(n_keyframes, "keyframe"))
            _fact("Raw size", bytes_text(plan.raw_bytes), "uncompressed")
            _fact("Archive", bytes_text(estimated), f"estimated, {ratio_text(ratio)} in all")
        frames = plan.frames[-_MAX_BARS:]
        known = estimated is not None
        st.plotly_chart(
            export_figure.plan_figure(
                [(f.step, f.kind, float(f.nbytes if f.nbytes is not None else f.raw_bytes)) for f in frames],
                "estimated" if known else "uncompressed",
            ),
            config=dict(figures.CONFIG),
            key="plan",
            alt=f"{len(frames)} frames as they would be written, {n_keyframes} of them keyframes",
        )
        cut = "" if len(plan.frames) <= _MAX_BARS else f" The last {_MAX_BARS} frames are drawn."
        if known:
            st.caption(f"Sizes are estimated from {markdown_text(plan.basis)}.{cut}")
        else:
            _offer_trial(shown, request, cut)
        _plan_table(plan.frames)


def _fact(label: str, value: str, below: str) -> None:
    st.metric(label, value, delta=below, delta_color="off", delta_arrow="off", border=True)


def _offer_trial(shown: Subject, request: ExportRequest, cut: str) -> None:
    """Say that nothing tells the sizes yet, and offer to try two steps."""
    st.caption(
        "Sizes are those of the uncompressed steps: no archive of this run with these settings is there to "
        f"estimate from.{cut}"
    )
    job = services.trial_job(shown, request)
    if job is not None and job.is_running:
        job_card.running(job, "Trying two steps")
    elif job is not None and job.state != "finished":
        job_card.stopped(job, primary=False)
    elif st.button("Try two steps", icon=":material/science:", help="Encodes two steps and keeps nothing."):
        services.start_trial(shown, request)
        st.rerun()


def _plan_table(frames: tuple[PlannedFrame, ...]) -> None:
    """List the frames that would be written."""
    with st.expander(f"Frames ({count_text(len(frames))})", icon=":material/table_rows:"):
        table = pd.DataFrame(frames, columns=["step", "kind", "raw bytes", "estimated bytes"])
        table["estimated bytes"] = table["estimated bytes"].astype("Int64")
        listing.show(table, "plan", alt="Frames as they would be written, with step, kind and sizes")


def _other_plan(shown: Subject, request: ExportRequest) -> None:
    """Say what one step, or a copy as one file, would hold."""
    with st.container(border=True):
        st.header("As it will be written", anchor=False)
        if request.kind == "pack":
            nbytes = shown.archive.nbytes if shown.archive is not None else shown.total_bytes
            st.write(
                f"One file with all {count_text(len(shown.steps))} steps, about {bytes_text(nbytes)}. The "
                "frames are copied as they are, and every digest is compared on the way. Everything that "
                "reads archives reads it as it is."
            )
            return
        kept = [row for row in shown.tensors if row.role in ("weight", "buffer") or not request.weights_only]
        raw = sum(row.nbytes for row in kept)
        weights = sum(row.numel for row in kept if row.role in ("weight", "buffer"))
        at_most = 4 * weights / request.ratio
        coarsened = request.weights_only and not request.exact
        with st.container(horizontal=True):
            _fact("Step", count_text(request.steps[0]) if request.steps else "–", "one keyframe")
            _fact("Tensors", count_text(len(kept)), "weights only" if request.weights_only else "everything")
            _fact("Raw size", bytes_text(raw), "uncompressed")
            if coarsened:
                _fact("At most", bytes_text(at_most), f"{request.ratio:g}× below float32")
        st.write(
            "One file of one keyframe, which needs nothing else. It restores to files that "
            "`load_state_dict` or `from_pretrained` takes as they are."
            + (
                " Weights are coarsened until the file is as small as asked, and no further."
                if coarsened
                else " Every bit is kept."
            )
        )


def _launch(shown: Subject, request: ExportRequest, *, disabled: bool) -> str:
    """Ask where to, and begin; return the target as typed."""
    suggestion = services.suggested_name(shown, request)
    with st.container(border=True):
        typed = st.text_input("Write to", value=suggestion, key=f"export.target.{suggestion}")
        if Path(typed).is_dir() and request.kind == "chain" and not request.packed:
            st.caption(
                "This archive is there already: steps that it lacks are appended, nothing is replaced."
            )
        exists = Path(typed).is_file()
        replace = exists and st.checkbox("Replace the file that is there")
        if st.button(
            "Export",
            type="primary",
            icon=":material/archive:",
            disabled=disabled or not request.steps,
            help="An export is running." if disabled else None,
        ):
            _start(shown, request, typed, replace=replace)
    return typed


def _start(shown: Subject, request: ExportRequest, typed: str, *, replace: bool) -> None:
    """Begin the export, or say why not."""
    import dataclasses

    try:
        target = services.export_target(typed)
    except ServiceError as error:
        problem.show(error.problem)
        return
    job = services.start_export(shown, dataclasses.replace(request, replace=replace), target)
    state.publish(job=job.job_id)
    st.rerun()


render()
