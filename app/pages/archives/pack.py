"""Export of one step for transfer learning, of one checkpoint, or of the whole archive as one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Subject
from inshrink_app.pages.archives import made
from inshrink_app.services import ExportRequest
from inshrink_app.widgets import choices, ending, fmt, listing, modules
from inshrink_app.widgets.layout import answer

from inshrink_core.chain import ChainReport
from inshrink_core.checkpoint import TensorSpec

LEFT_OUT = "pack.without"
"""Key of the patterns that leave tensors out."""

_PATTERN = "pack.pattern"
_WHAT = {"weights": "Weights of one step", "step": "One checkpoint", "pack": "The archive as one file"}
_LAYOUTS = {"packed": "Packed archive", "safetensors": "safetensors"}
_VALUES = {"ratio": "By ratio", "exact": "Every bit"}
_DTYPES = {"same": "As they are", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def show(shown: Subject, chain: ChainReport | None) -> None:
    """Draw the choice of export, its settings, the button, and the latest result.

    Parameters
    ----------
    shown
        The run or archive on screen.
    chain
        The chosen archive; None for a run without one.
    """
    job, source = made.job_of(shown, "pack"), shown
    if chain is not None and shown.kind == "run":  # Jobs belong to the subject on screen.
        about: dict[str, Any] = {"path": chain.path, "name": chain.name, "steps": tuple(chain.steps)}
        source = dataclasses.replace(shown, kind="archive", archive=chain, **about)
    offered = _WHAT if chain is not None else {name: _WHAT[name] for name in ("weights", "step")}
    what = choices.one_of_few("pack", "What", "pack", offered, "weights")
    launch, result, settings = st.container(), st.container(), st.container()
    with settings:
        request, is_empty = _asked(source, what)
    disabled = is_empty or (job is not None and job.is_running)
    suggestion = services.suggested_name(source, request)
    with launch, st.container(horizontal=True, vertical_alignment="bottom"):
        typed = st.text_input("Write to", value=suggestion, key=f"export.target.{suggestion}")
        replaces = Path(typed).is_file() and st.checkbox("Replace this file")
        pressed = st.button("Write file", type="primary", icon=":material/archive:", disabled=disabled)
    asked = dataclasses.replace(request, replaces=bool(replaces))
    if pressed:
        with launch:
            target = answer(lambda: services.export_target(typed, asked))
        if target is not None:
            state.publish(job=services.start_export(shown, asked, target).job_id)
            st.rerun()
    with result:
        made.show(shown, job)
    ending.requests(request.placed(typed, f"{typed.removesuffix('.inshrink')}-exact.inshrink"))


def _asked(source: Subject, what: str) -> tuple[ExportRequest, bool]:
    """Draw the settings; return the export, and whether no tensor is left to write."""
    if what == "pack":
        n, size = fmt.all_steps(len(source.steps)), fmt.size(source.archive.nbytes if source.archive else 0)
        st.caption(f"{n.capitalize()} in one file of about {size}. Every digest is compared on the way.")
        return services.pack_export(source), False
    step = source.steps[-1]
    if len(source.steps) > 1:
        step = st.select_slider("Step", source.steps, step, format_func=fmt.count, key="export.step")
    if what == "step":
        st.caption(
            f"{fmt.counted(len(source.tensors), 'tensor')} with the optimizer state, every bit of it, in one "
            "file that needs nothing else."
        )
        return services.step_export(source, step), False
    left, right = st.columns(2, gap="large")
    with left:
        tensors = _which(source)
    with right:
        fields = _values()
    request = services.step_export(source, step, weights_only=True, **tensors, **fields)
    names = set(request.keeps(row.name for row in source.model_tensors))
    _listed(source.model_tensors, names, request)
    return request, not names


def _average(source: Subject) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the moving average's tensors beside the main model, and patterns that match exactly these."""
    names = frozenset(services.averages_of(source))
    parts = [name.split(".") for name in names]
    common = [words[0] for words in zip(*parts, strict=False) if len(set(words)) == 1]
    prefix = ".".join(common)
    inside = {row.name for row in source.model_tensors if f"{row.name}.".startswith(f"{prefix}.")}
    return names, (prefix,) if prefix and inside == names else tuple(sorted(names))


def _which(source: Subject) -> dict[str, tuple[str, ...]]:
    """Draw the choice of model and of omitted tensors; every match is listed before it takes effect."""
    every = [row.name for row in source.model_tensors]
    names, (average, patterns) = every, _average(source)
    fields: dict[str, tuple[str, ...]] = {}
    without: tuple[str, ...] = ()
    if average:
        labels = {"main": "Main model", "average": "Moving average", "both": "Both"}
        of = choices.one_of_few("pack", "Model", "model", labels, "main")
        if of != "both":
            names = [name for name in every if (name in average) == (of == "average")]
        fields, without = ({"tensors": patterns}, ()) if of == "average" else ({}, patterns)
        without = without if of == "main" else ()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        tip = modules.PATTERN_HELP
        pattern = st.text_input("Leave out", key=_PATTERN, placeholder="head, *.bias, /bn\\d/", help=tip)
        found = sorted(modules.matching(names, pattern)) if pattern else []
        label = f"Leave {fmt.counted(len(found), 'tensor')} out" if found else "Leave out"
        st.button(label, icon=":material/block:", disabled=not found, on_click=_leave_out, args=(pattern,))
    if pattern:
        st.caption(f"{fmt.counted(len(found), 'tensor')} of {fmt.count(len(names))} would be left out:")
        if found:
            table = pd.DataFrame({"name": found})
            st.dataframe(table, hide_index=True, height=150, alt="Tensors that the pattern matches")
    picked: list[str] = []
    if LEFT_OUT in st.session_state:  # Drawn even if empty, since a widget that is not drawn loses its value.
        patterns = tuple(dict.fromkeys(st.session_state[LEFT_OUT]))
        picked = choices.pick_several("Left out", patterns, key=LEFT_OUT, placeholder="Nothing")
    chosen = [name for pattern in picked for name in _as_listed(pattern, names, every)]
    return fields | {"without": (*without, *chosen)}


def _as_listed(pattern: str, names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return a pattern, or its matches in one model if it matches others in the full checkpoint."""
    found = modules.matching(names, pattern)
    is_same = found == modules.matching(every, pattern).intersection(names)
    return [pattern] if is_same else sorted(found)


def _leave_out(pattern: str) -> None:
    """Add a pattern that leaves tensors out. A callback."""
    state.clicked()
    st.session_state[LEFT_OUT] = list(dict.fromkeys([*st.session_state.get(LEFT_OUT, []), pattern]))
    st.session_state[_PATTERN] = ""


def _values() -> dict[str, Any]:
    """Draw the file format and the precision of its values; return the request's fields."""
    fields: dict[str, Any] = {}
    fields["layout"] = layout = choices.one_of_few("export", "Form", "form", _LAYOUTS, "packed")
    default = "ratio" if layout == "packed" else "exact"
    values = choices.one_of_few("export", "Values", f"values_{layout}", _VALUES, default)
    if values == "ratio":
        label = "Times smaller than float32, at least"
        fields["ratio"] = st.slider(label, 2.0, 32.0, 8.0, 0.5, key="export.ratio")
        if layout != "packed":
            st.caption("Values are rounded as in such a packed file; the plain file is no smaller.")
    else:
        fields["exact"] = True
    if layout != "packed":
        fields["dtype"] = choices.one_of_few("export", "Floats as", "dtype", _DTYPES, "same")
    return fields


def _listed(model: Sequence[TensorSpec], written: set[str], request: ExportRequest) -> None:
    """List every tensor of the model, and whether it is written."""
    rows = [row for row in model if row.name in written]
    n_values, raw = sum(row.numel for row in rows), sum(row.nbytes for row in rows)
    parts = [f"{fmt.count(len(rows))} of {fmt.counted(len(model), 'tensor')}", f"{fmt.size(raw)} raw"]
    if request.file.layout == "packed" and rows and not request.file.exact:
        ratio = request.file.ratio
        parts.append(f"at most {fmt.size(4 * n_values / ratio)}, {fmt.ratio(ratio)} below float32")
    if not rows:
        st.warning("No tensor is left. Change what is left out.", icon=":material/warning:")
        return
    st.caption(f"Written: {', '.join(parts)}.")
    table = pd.DataFrame(
        [(row.name, row.name in written, fmt.shape(row.shape), row.dtype, row.nbytes) for row in model],
        columns=["tensor", "written", "shape", "dtype", "raw bytes"],
    ).sort_values("written", kind="stable")
    table["written"] = table["written"].map({True: "yes", False: "left out"})
    with st.expander("Tensors", icon=":material/table_rows:"):
        listing.show(table, "layers", alt="Tensors of the model, and whether each is written")
