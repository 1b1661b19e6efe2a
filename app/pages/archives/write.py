"""Writing of an archive or a file: its target, its progress, its figures, and the code that loads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.model import ServiceError, Subject, config_text, engine_settings
from inshrink_app.services import ExportRequest, Made
from inshrink_app.widgets import choices, ending, fmt, job_card, listing, problem, quality
from inshrink_app.widgets.ending import shell_text
from inshrink_app.widgets.layout import Fact, answer, facts
from inshrink_app.widgets.quality import bound_text

from inshrink_core.codec import get_codec
from inshrink_core.verbs.restore import Restore

_MAX_NAMED = 10


def job_of(shown: Subject, topic: str) -> Job | None:
    """Return the writing job of a topic that the link names, else the newest."""
    linked = services.linked_job(state.choice_text("job"), "archives", shown.path)
    if linked is not None and linked.work.topic == topic:
        return linked
    return services.newest_job("archives", topic, shown.path)


def start_button(
    label: str, shown: Subject, source: Subject, request: ExportRequest, *, disabled: bool, trusted: str = ""
) -> str:
    """Draw the target of an export and the button that writes it; return the target as typed.

    Parameters
    ----------
    label
        Text of the button.
    shown, source
        The run or archive on screen, and the one that is exported.
    request
        The export.
    disabled
        Whether it cannot be written now.
    trusted
        SHA-256 of its evaluator, if that needs consent.
    """
    suggestion = services.suggested_name(source, request)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        typed = st.text_input("Write to", value=suggestion, key=f"export.target.{suggestion}")
        if request.file is not None and Path(typed).is_file() and st.checkbox("Replace this file"):
            request = replace(request, file=replace(request.file, force=True))
        pressed = st.button(label, type="primary", icon=":material/archive:", disabled=disabled)
    if pressed and (target := answer(lambda: services.export_target(typed, request))) is not None:
        state.publish(job=services.start_export(shown, request, target, trusted=trusted).job_id)
        st.rerun()
    return typed


def show(shown: Subject, job: Job | None) -> None:
    """Draw the latest writing job: its progress, its error, or its result."""
    if job is None or not job_card.settled(job):
        return
    target = services.export_made_at(job)
    st.code(str(target), language=None, wrap_lines=True)
    try:
        made = services.made_by(job)
    except ServiceError as error:
        problem.show(error.problem)
        listing.download(target)
        return
    if made is None:
        st.warning("The file was moved or deleted.", icon=":material/warning:")
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        if target.is_file():
            listing.download(target)
        elif st.button("Compare with the run", icon=":material/compare_arrows:"):
            state.go_to("archives", panel="compare", **{state.ARCHIVE: str(target)})
    facts(_figures(made))
    problem.show_unreadable(made.unreadable, "They are not in the archive: do not delete their files.")
    if left_out := made.reports[-1].get("left_out", ()):
        more = f" and {len(left_out) - _MAX_NAMED} more" if len(left_out) > _MAX_NAMED else ""
        st.caption(fmt.markdown(f"Left out: {', '.join(left_out[:_MAX_NAMED])}{more}."))
    if made.loading:
        _code("Load it into a model" + ("" if made.chain else ", without Inshrink"), made.loading)
    if made.chain is not None:
        steps = None if made.request.kind == "step" else (made.chain.steps[-1],)
        layout = "safetensors" if made.loading else "same"
        _code("Restore it", shell_text([Restore(str(target), "restored/", steps=steps, layout=layout)]))
    _code(f"SHA-256 of the {'file' if target.is_file() else 'manifest'}", made.digest)


def _code(caption: str, text: str) -> None:
    st.caption(caption)
    st.code(text, language=None, wrap_lines=True)


def _figures(made: Made) -> list[Fact]:
    """Return the figures of the written file; all of them are measured."""
    is_copy, error = made.request.kind == "pack", made.relative_error
    about = "against the archive it copies" if is_copy else "of the weights, root mean square"
    relative: Fact = ("Relative error", "none" if error == 0 else fmt.percent(error), about)
    chain, first, last = made.chain, made.reports[0], made.reports[-1]
    if chain is None:
        size = ("Size", fmt.size(last["bytes"]), "plain safetensors")
        return [size, ("Tensors", fmt.count(last["tensors"]), "weights and buffers"), relative]
    steps: Fact = ("Steps", fmt.count(len(chain.steps)), fmt.steps(chain.steps))
    figures = quality.size_facts(chain, first.get("device", ""))
    return [*figures, steps, *quality.archive_facts(chain), relative]


_OPTIMIZERS = {"exact": "Exact", "compressed": "Compressed", "compact": "Compact", "drop": "Left out"}
_OPTIMIZER_HELP = (
    "Training resumed from exact state continues bit for bit. Compressed rounds each second moment to a "
    "power of two; compact stores factors of rows and columns. Without state the optimizer has to warm up."
)
_CODEC_HELP = (
    "Lattice is the default: smallest at equal accuracy. Inshrinkerator is the published codec. Uniform "
    "rounds to equal steps. Lossless keeps every bit."
)


def new_archive(shown: Subject) -> None:
    """Draw the settings, the button, and the latest result."""
    job = job_of(shown, "write")
    launch, result, settings = st.container(), st.container(), st.container()
    with settings:
        steps, fields, packed, watch = _settings(shown)
    evaluator, bound = services.trusted_evaluator(shown), services.chosen(shown).bound
    trusted, note = "", "No bound: every step is written with the settings below."
    if evaluator is not None and bound.fields and not watch:
        fields |= bound.fields | evaluator.fields
        trusted, note = evaluator.trusted, f"Each step is as small as the bound allows: {bound_text(bound)}."
    request = services.chain_export(shown, steps, packed=packed, watch=watch, **fields)
    with launch:
        disabled = not steps or job_card.is_running(job)
        typed = start_button("Write archive", shown, shown, request, disabled=disabled, trusted=trusted)
        if Path(typed).is_dir() and not packed:
            note += " This archive exists: missing steps are appended, and nothing is replaced."
        st.caption(fmt.markdown(note))
        problem.show_unreadable(shown.unreadable, "The archive will hold all others: keep these files.")
    with result:
        show(shown, job)
    ending.requests(request.placed(typed, f"{typed.removesuffix('.inshrink')}-folder.inshrink"))


def _settings(shown: Subject) -> tuple[tuple[int, ...], dict[str, Any], bool, bool]:
    """Draw the settings; return the steps, the request's fields, and whether to pack or to watch."""
    left, right = st.columns(2, gap="medium")
    with left:
        steps = _steps(shown)
        codec, config = _codec(shown)
    with right:
        optimizer = _optimizer(shown, codec, config)
        with st.container(horizontal=True, vertical_alignment="bottom"):
            tip = "A restore decodes at most this many frames. Keyframes are larger than delta frames."
            keyframes = st.number_input("Keyframe every", 1, 1000, 32, key="export.keyframe_every", help=tip)
        tip = "Archives each checkpoint as it is finished, until you end the job or the explorer."
        is_all = steps == shown.steps
        watch = is_all and st.toggle("Archive while the run grows", key="export.watch", help=tip)
        packed = not watch and st.toggle("As one packed file", key="export.packed")
        fields: dict[str, Any] = {"codec": codec, "config": config or None, "optimizer": optimizer}
        fields |= {"keyframe_every": int(keyframes)}
    return steps, fields, bool(packed), bool(watch)


def _steps(shown: Subject) -> tuple[int, ...]:
    """Draw the choice of steps."""
    what = choices.one_of_few("export", "Steps", "what", {"all": "All steps", "range": "A range"}, "all")
    if what == "all" or len(shown.steps) < 2:
        return shown.steps
    first, last = choices.ends_of_range("export", shown.steps)
    return tuple(step for step in shown.steps if first <= step <= last)


def _codec(shown: Subject) -> tuple[str, dict[str, Any]]:
    """Draw the codec with its main setting, or use the configuration edited in Run."""
    edited = services.chosen(shown).config
    if edited and st.toggle("Use the settings edited in Run", value=True, key="export.edited"):
        st.code(config_text(edited), language="json", wrap_lines=True)
        return str(edited["codec"]), engine_settings(edited)
    names = choices.codec_labels()
    codec = choices.one_of_many("export", "Codec", "codec", names, next(iter(names)), _CODEC_HELP)
    kind = get_codec(codec)
    if kind.tuning is None:
        return codec, {}
    tunable = kind.tuning.tunable
    default = getattr(kind(), tunable.settings[0])
    tip = "To the right, frames are smaller and errors larger."
    value = st.select_slider(
        tunable.label or tunable.settings[0],
        sorted({*tunable.values, default}, reverse=tunable.is_coarser(0, 1)),
        default,
        format_func="{:g}".format,
        key=f"export.{codec}.{tunable.settings[0]}",
        help=f"{tunable.unit.capitalize()}. {tip}" if tunable.unit else tip,
    )
    return codec, kind.tuning.settings(value)


def _optimizer(shown: Subject, codec: str, config: dict[str, Any]) -> str:
    """Draw the codec of the optimizer state; its default depends on the codec of the weights."""
    if len(shown.model_tensors) == len(shown.tensors):
        return "drop"
    default = services.default_optimizer(codec, config)
    key = f"optimizer_{default}"
    return choices.one_of_few("export", "Optimizer state", key, _OPTIMIZERS, default, _OPTIMIZER_HELP)
