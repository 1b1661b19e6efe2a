"""Export: write a run, or one step of it, as an archive to keep, to hand on or to begin from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, shell_text
from inshrink_app.model import Page, ServiceError, Subject
from inshrink_app.pages.export import average, layers
from inshrink_app.pages.export import form as export_form
from inshrink_app.services import ExportRequest, Made, Plan
from inshrink_app.widgets import ending, fmt, job_card, listing, problem, quality, subject
from inshrink_app.widgets.figures import frames_figure
from inshrink_app.widgets.layout import Fact, answer, chart, facts, section

from inshrink_core.chain import ChainReport
from inshrink_core.checkpoint import DTYPE_SIZES
from inshrink_core.verbs.export import CASTABLE, DTYPES
from inshrink_core.verbs.restore import Restore

_MAX_BARS = 120
_SUFFIX = ".inshrink"
_MOST_NAMED = 10
_ALONE = (
    "One file of one keyframe, which needs nothing else. It restores to files that `load_state_dict` or "
    "`from_pretrained` takes as they are."
)


def render() -> None:
    """Draw the page."""
    shown = subject.require("Export")
    if shown is None:
        return
    linked = services.linked_job(state.choice_text("job"), "export", shown.path)
    job = linked or services.newest_job("export", "export", shown.path)
    launch = st.container()
    left, right = st.columns([2, 3], gap="medium")
    with left:
        request = export_form.show(shown)
    with launch:  # Above both columns, so that the button is in view whatever is chosen.
        if job is None or not job.is_running:
            target = _launch(shown, request, again=job is not None and job.state == "finished")
        else:
            target = services.suggested_name(shown, request)
    with right:
        if job is not None:
            _job(shown, job)
        if request.kind == "chain":
            _chain_plan(shown, request)
        else:
            _other_plan(shown, request)
    average.show(shown)
    made = "folder" if request.kind == "chain" else "exact"
    between = f"{target.removesuffix(_SUFFIX)}-{made}{_SUFFIX}"
    ending.requests(request.placed(target, between))
    _next(shown, job)


def _next(shown: Subject, job: Job | None) -> None:
    """Lead on, with the archive that was made."""
    is_made = job is not None and (job.state == "finished" or job.is_watching)
    made = services.export_made_at(job) if job is not None and is_made else None
    made = None if made is None or made.suffix != _SUFFIX else made
    widgets = {} if made is None else {"compare.archives": [str(made)]}
    ending.offer(
        ending.COMPARE._replace(widgets=widgets),
        ending.ARCHIVE._replace(carried={} if made is None else {"archive": str(made)}),
    )


def _job(shown: Subject, job: Job) -> None:
    """Draw the export that runs or ran last."""
    watches = job.is_watching
    if job.is_running:
        job_card.running(job, "Archiving as the run grows" if watches else "Exporting")
    elif job.state == "finished":
        _result(shown, job)
    else:
        with section("Archiving has ended" if watches else "The last export did not finish"):
            job_card.stopped(job, primary=False)
    if not job.is_running:
        job_card.log(job)


def _result(shown: Subject, job: Job) -> None:
    """Draw what a finished export has made."""
    with section("Exported"):
        st.code(str(services.export_made_at(job)), language=None, wrap_lines=True)
        try:
            made = services.made_by(job)
        except ServiceError as error:
            problem.show(error.problem)
            listing.download(services.export_made_at(job))
            return
        if made is None:
            st.warning("It is not there any more.", icon=":material/warning:")
            return
        facts(_plain_figures(made) if made.chain is None else _figures(made, made.chain))
        problem.show_unreadable(made.unreadable, "They are not in it: do not delete their files.")
        if made.left_out:
            named = ", ".join(made.left_out[:_MOST_NAMED])
            more = f" and {len(made.left_out) - _MOST_NAMED} more" if len(made.left_out) > _MOST_NAMED else ""
            st.caption(fmt.markdown(f"Left out: {named}{more}."))
        what = "manifest" if made.path.is_dir() else "file"
        st.caption(f"SHA-256 of the {what}, by which a copy is known")
        st.code(made.digest, language=None, wrap_lines=True)
        if made.weights_only:
            st.caption("Load it into a model" + ("" if made.chain else ", without Inshrink"))
            st.code(made.loading, language=None, wrap_lines=True)
        if made.chain is not None:
            st.caption("Restore")
            steps = (made.chain.steps[-1],) if made.kind != "step" else None
            layout = "safetensors" if made.weights_only else "same"
            restore = Restore(str(made.path), "restored/", steps=steps, layout=layout)
            st.code(shell_text([restore]), language=None, wrap_lines=True)
        _hand_over(shown, made)


def _plain_figures(made: Made) -> list[Fact]:
    """Return the figures of a plain file; all of them measured."""
    return [
        ("Size", fmt.size(made.nbytes), "plain safetensors"),
        ("Tensors", fmt.count(made.n_tensors or 0), "weights and buffers"),
        ("Relative error", _error_text(made.relative_error), "of the weights, root mean square"),
    ]


def _error_text(error: float | None) -> str:
    return "none" if error == 0 else fmt.percent(error)


def _figures(made: Made, chain: ChainReport) -> list[Fact]:
    """Return the figures of an archive; all of them measured."""
    against = "against the archive it copies" if made.kind == "pack" else "of the weights, root mean square"
    return [
        *quality.size_facts(chain, made.device),
        ("Steps", fmt.count(len(chain.steps)), fmt.steps(chain.steps)),
        *quality.archive_facts(chain),
        ("Relative error", _error_text(made.relative_error), against),
    ]


def _hand_over(shown: Subject, made: Made) -> None:
    """Offer the file, or to make one of a folder."""
    path = made.path
    if path.is_dir():
        with st.container(horizontal=True, vertical_alignment="center"):
            if st.button("Copy as one packed file", icon=":material/folder_zip:"):
                job = services.start_pack(shown, path)
                state.publish(job=job.job_id)
                st.rerun()
            st.caption("A folder cannot be downloaded as it is.")
        return
    listing.download(path)


def _chain_plan(shown: Subject, request: ExportRequest) -> None:
    """Draw the chain as it would be written, and what its sizes are estimated from."""
    with section("As it will be written"):
        if not request.steps:
            st.caption("No step is chosen.")
            return
        plan = services.export_plan(shown, request)
        n_keyframes = sum(frame.kind == "keyframe" for frame in plan.frames)
        estimated = plan.nbytes
        ratio = plan.raw_bytes / estimated if estimated else None
        said = "not known yet" if estimated is None else f"estimated, {fmt.ratio(ratio)}"
        facts(
            [
                ("Frames", fmt.count(len(plan.frames)), fmt.counted(n_keyframes, "keyframe")),
                ("Raw size", fmt.size(plan.raw_bytes), "uncompressed"),
                ("Archive", fmt.size(estimated), said),
            ]
        )
        frames = plan.frames[-_MAX_BARS:]
        known = estimated is not None
        unit = " estimated" if known else " uncompressed"
        chart(
            frames_figure([(f.step, f.kind, f.nbytes or f.raw_bytes, unit) for f in frames]),
            "plan",
            f"{len(frames)} frames as they would be written, {n_keyframes} of them keyframes",
        )
        cut = "" if len(plan.frames) <= _MAX_BARS else f" The last {_MAX_BARS} frames are drawn."
        if known:
            st.caption(f"Sizes are estimated from {fmt.markdown(plan.basis)}.{cut}")
        else:
            _offer_trial(shown, request, cut)
        _plan_table(plan)


def _offer_trial(shown: Subject, request: ExportRequest, cut: str) -> None:
    """Say that nothing tells the sizes yet, and offer to try two steps."""
    st.caption(
        "Sizes are those of the uncompressed steps: no archive of this run with these settings is there to "
        f"estimate from.{cut}"
    )
    work = services.trial_work(shown, request)
    job = services.job_of(work)
    if job_card.settled(job, "Trying two steps"):
        tip = "Encodes two steps and keeps nothing."
        job_card.start_button("Try two steps", work, "science", again=False, help=tip)


def _plan_table(plan: Plan) -> None:
    """List the frames that would be written."""
    with st.expander(f"Frames ({fmt.count(len(plan.frames))})", icon=":material/table_rows:"):
        table = pd.DataFrame(plan.frames, columns=["step", "kind", "raw bytes", "estimated bytes"])
        table["estimated bytes"] = table["estimated bytes"].astype("Int64")
        listing.show(table, "plan", alt="Frames as they would be written, with step, kind and sizes")


def _other_plan(shown: Subject, request: ExportRequest) -> None:
    """Say what one step, or a copy as one file, would hold."""
    with section("As it will be written"):
        if request.kind == "pack":
            nbytes = shown.archive.nbytes if shown.archive is not None else shown.total_bytes
            st.write(
                f"One file with {fmt.all_steps(len(shown.steps))}, about {fmt.size(nbytes)}. The "
                "frames are copied as they are, and every digest is compared on the way. Everything that "
                "reads archives reads it as it is."
            )
            return
        if request.file.weights_only:
            _weights_plan(shown, request)
            return
        facts(
            [
                ("Step", fmt.count(request.steps[0]) if request.steps else "–", "one keyframe"),
                ("Tensors", fmt.count(len(shown.tensors)), "everything"),
                ("Raw size", fmt.size(sum(row.nbytes for row in shown.tensors)), "uncompressed"),
            ]
        )
        st.write(f"{_ALONE} Every bit is kept.")


def _weights_plan(shown: Subject, request: ExportRequest) -> None:
    """Say which layers would be written, and how large they become; the list follows the patterns."""
    asked, model = request.file, shown.model_tensors
    names = set(request.keeps(row.name for row in model))
    kept = [row for row in model if row.name in names]
    weights, raw = sum(row.numel for row in kept), sum(row.nbytes for row in kept)
    told: list[Fact] = [
        ("Step", fmt.count(request.steps[0]) if request.steps else "–", "weights only"),
        ("Tensors", fmt.count(len(kept)), f"of {fmt.count(len(model))}"),
        ("Raw size", fmt.size(raw), f"{fmt.compact(weights)} values"),
    ]
    if asked.layout == "safetensors":
        wide = DTYPE_SIZES.get(DTYPES[asked.dtype])
        sizes = (row.numel * wide if wide and row.dtype in CASTABLE else row.nbytes for row in kept)
        told.append(("About", fmt.size(sum(sizes)), "plain safetensors"))
    elif kept and not asked.exact:
        at_most = 4 * weights / asked.ratio if asked.size is None else asked.size
        told.append(("At most", fmt.size(at_most), f"{fmt.ratio(4 * weights / at_most)} below float32"))
    facts(told)
    rounded = "Every bit is kept." if asked.exact else "Weights are coarsened as far as asked, no further."
    if asked.dtype != "same":
        rounded = f"{rounded if not asked.exact else 'Nothing is coarsened.'} Floats become {asked.dtype}."
    plain = "One plain file, which loads without Inshrink."
    if kept:
        st.write(f"{_ALONE if asked.layout == 'packed' else plain} {rounded}")
    else:
        st.warning("No layer is left. Change what is kept or left out.", icon=":material/warning:")
    layers.show(shown, request)


def _launch(shown: Subject, request: ExportRequest, *, again: bool) -> str:
    """Ask where to, and begin; return the target as typed."""
    suggestion = services.suggested_name(shown, request)
    with st.container(border=True):
        field, press = st.columns([5, 1], vertical_alignment="bottom")
        typed = field.text_input("Write to", value=suggestion, key=f"export.target.{suggestion}")
        if Path(typed).is_dir() and request.file is None:
            st.caption(
                "This archive is there already: steps that it lacks are appended, nothing is replaced."
            )
        if request.kind == "chain":
            problem.show_unreadable(
                shown.unreadable, "The archive will hold all others: keep these files, or fetch whole ones."
            )
        exists = Path(typed).is_file()
        is_of_weights = request.kind == "step" and request.file.weights_only
        is_empty = is_of_weights and not request.keeps(row.name for row in shown.model_tensors)
        replace = bool(exists and st.checkbox("Replace the file that is there"))
        if press.button(
            "Export",
            type="secondary" if again else "primary",
            icon=":material/archive:",
            width="stretch",
            disabled=not request.steps or is_empty,
        ):
            asked = dataclasses.replace(request, replaces=replace)
            target = answer(lambda: services.export_target(typed, asked))
            if target is not None:
                state.publish(job=services.start_export(shown, asked, target).job_id)
                st.rerun()
    return typed


PAGE = Page("Export", ":material/archive:", render)
