"""A new archive with every setting: steps, codec, optimizer state, and form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app import services
from inshrink_app.model import Subject, config_text, engine_settings
from inshrink_app.pages.archives import made
from inshrink_app.widgets import choices, ending, fmt, job_card, problem
from inshrink_app.widgets.quality import bound_text

_OPTIMIZERS = {"exact": "Exact", "compressed": "Compressed", "compact": "Compact", "drop": "Left out"}
_OPTIMIZER_HELP = (
    "Training resumed from exact state continues bit for bit. Compressed rounds each second moment to a "
    "power of two; compact stores factors of rows and columns. Without state the optimizer has to warm up."
)
_CODEC_HELP = (
    "Lattice is the default: smallest at equal accuracy. Inshrinkerator is the published codec. Uniform "
    "rounds to equal steps. Lossless keeps every bit."
)


def show(shown: Subject) -> None:
    """Draw the settings, the button, and the latest result."""
    job = made.job_of(shown, "write")
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
        typed = made.start_button("Write archive", shown, shown, request, disabled=disabled, trusted=trusted)
        if Path(typed).is_dir() and not packed:
            note += " This archive exists: missing steps are appended, and nothing is replaced."
        st.caption(fmt.markdown(note))
        problem.show_unreadable(shown.unreadable, "The archive will hold all others: keep these files.")
    with result:
        made.show(shown, job)
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
    return codec, choices.ask_for_tunable(codec, "export")


def _optimizer(shown: Subject, codec: str, config: dict[str, Any]) -> str:
    """Draw the codec of the optimizer state; its default depends on the codec of the weights."""
    if len(shown.model_tensors) == len(shown.tensors):
        return "drop"
    default = services.default_optimizer(codec, config)
    key = f"optimizer_{default}"
    return choices.one_of_few("export", "Optimizer state", key, _OPTIMIZERS, default, _OPTIMIZER_HELP)
