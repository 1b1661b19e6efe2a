"""Export of one step for transfer learning, of one checkpoint, or of the whole archive as one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.model import Subject
from inshrink_app.pages.archives import write
from inshrink_app.services import ExportRequest
from inshrink_app.widgets import choices, ending, fmt, job_card, listing, modules

from inshrink_core.chain.report import ChainReport
from inshrink_core.checkpoint import TensorSpec
from inshrink_core.verbs.export import Export, chosen_names

LEFT_OUT = "pack.without"
"""Key of the patterns that leave tensors out."""

_MAX_NAMED = 10
_WHAT = {"weights": "Weights of one step", "pack": "The archive as one file"}
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
    job, source = write.job_of(shown, "pack"), shown
    what = "weights" if chain is None else choices.one_of_few("pack", "What", "pack", _WHAT, "weights")
    if chain is not None and shown.kind == "run":  # Jobs belong to the subject on screen.
        about: dict[str, Any] = {"path": chain.path, "name": chain.name, "steps": tuple(chain.steps)}
        source = dataclasses.replace(shown, kind="archive", archive=chain, step_pattern="", **about)
    launch, result, settings = st.container(), st.container(), st.container()
    with settings:
        request, is_empty = _asked(source, what)
    with launch:
        disabled = is_empty or job_card.is_running(job)
        typed = write.start_button("Write file", shown, source, request, disabled=disabled)
    with result:
        write.show(shown, job)
    ending.requests(request.placed(typed, f"{typed.removesuffix('.inshrink')}-exact.inshrink"))


def _asked(source: Subject, what: str) -> tuple[ExportRequest, bool]:
    """Draw the settings; return the export, and whether no tensor is left to write."""
    if what == "pack":
        n, size = fmt.all_steps(len(source.steps)), fmt.size(source.archive.nbytes if source.archive else 0)
        st.caption(f"{n.capitalize()} in one file of about {size}. Every checksum is verified on the way.")
        return ExportRequest(file=Export(str(source.path), pack="")), False
    step = source.steps[-1]
    if len(source.steps) > 1:
        step = st.select_slider("Step", source.steps, step, format_func=fmt.count, key="export.step")
    left, right = st.columns(2, gap="large")
    with left:
        tensors = _which(source)
    with right:
        fields = _values()
    names = set(chosen_names([row.name for row in source.model_tensors], **tensors))
    _listed(source.model_tensors, names, fields)
    return services.step_export(source, step, **tensors, **fields), not names


def _average(source: Subject) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the moving average's tensors beside the main model, and patterns that match exactly these."""
    names = frozenset(services.averages_of(source))
    parts = [name.split(".") for name in names]
    common = [words[0] for words in zip(*parts, strict=False) if len(set(words)) == 1]
    prefix = ".".join(common)
    inside = {row.name for row in source.model_tensors if f"{row.name}.".startswith(f"{prefix}.")}
    return names, (prefix,) if prefix and inside == names else tuple(sorted(names))


def _which(source: Subject) -> dict[str, tuple[str, ...]]:
    """Draw the choice of model and of omitted tensors, and how many each pattern leaves out."""
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
    picked: list[str] = choices.pick_several(
        "Leave out",
        list(st.session_state.get(LEFT_OUT, ())),
        key=LEFT_OUT,
        accept_new_options=True,
        placeholder="head, *.bias, /bn\\d/",
        help=f"{modules.PATTERN_HELP} Enter adds it.",
    )
    for pattern in picked:
        found = sorted(modules.matching(names, pattern))
        named = f": {', '.join(found)}" if 0 < len(found) <= _MAX_NAMED else ""
        st.caption(fmt.markdown(f"{pattern} leaves out {fmt.counted(len(found), 'tensor')}{named}."))
        if len(found) > _MAX_NAMED:
            alt = "Tensors that the pattern leaves out"
            st.dataframe(pd.DataFrame({"name": found}), hide_index=True, height=150, alt=alt)
    chosen = [name for pattern in picked for name in _as_listed(pattern, names, every)]
    return fields | {"without": (*without, *chosen)}


def _as_listed(pattern: str, names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return a pattern, or its matches in one model if it matches others in the full checkpoint."""
    found = modules.matching(names, pattern)
    is_same = found and found == modules.matching(every, pattern).intersection(names)
    return [pattern] if is_same else sorted(found)


def _values() -> dict[str, Any]:
    """Draw the file format and the precision of its values; return the request's fields."""
    fields: dict[str, Any] = {}
    fields["layout"] = layout = choices.one_of_few("export", "Form", "form", _LAYOUTS, "packed")
    default = "ratio" if layout == "packed" else "exact"
    values = choices.one_of_few("export", "Values", f"values_{layout}", _VALUES, default)
    if values == "ratio":
        label = "Ratio to float32, at least"
        fields["ratio"] = st.slider(label, 2.0, 32.0, 8.0, 0.5, key="export.ratio")
        if layout != "packed":
            st.caption(
                "Values are rounded as in a packed file of this ratio; the safetensors file is no smaller."
            )
    else:
        fields["exact"] = True
    if layout != "packed":
        fields["dtype"] = choices.one_of_few("export", "Floats as", "dtype", _DTYPES, "same")
    return fields


def _listed(model: Sequence[TensorSpec], written: set[str], fields: Mapping[str, Any]) -> None:
    """List every tensor of the model, and whether it is written."""
    rows = [row for row in model if row.name in written]
    n_values, raw = sum(row.numel for row in rows), sum(row.nbytes for row in rows)
    parts = [f"{fmt.count(len(rows))} of {fmt.counted(len(model), 'tensor')}", f"{fmt.size(raw)} raw"]
    if fields["layout"] == "packed" and (ratio := fields.get("ratio")):
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
