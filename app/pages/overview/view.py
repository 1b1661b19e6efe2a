"""Overview: what a run holds, how its training went, and what takes the space."""

from __future__ import annotations

import shlex
from collections import Counter

import pandas as pd
import streamlit as st
from inshrink_app.widgets import download, figures, listing, run_facts, snippets, subject
from inshrink_app.widgets.formatting import bytes_text, count_text, markdown_text, shape_text
from inshrink_app.widgets.tables import ArchiveFacts, Subject

_MAX_PANELS = 4


def render() -> None:
    """Draw the page."""
    shown = subject.require("Overview")
    if shown is None:
        return
    run_facts.show(shown)
    for note in shown.notes[1:]:
        st.caption(markdown_text(note[:1].upper() + note[1:] + "."))
    if len(shown.steps) == 1 and shown.kind == "run":
        st.info(
            "This run has one checkpoint. Curves over time and movement between checkpoints need two.",
            icon=":material/info:",
        )
    if shown.skipped:
        _skipped(shown)
    if shown.kind == "archive" and shown.archive is not None:
        _frames(shown.archive)
    if shown.log:
        _training(shown)
    _sizes(shown)
    _tensors(shown)
    path = str(shown.path)
    snippets.show(
        f"inshrink inspect {shlex.quote(path)}",
        f"import inshrink_core\n\n{shown.kind} = inshrink_core.open({path!r})\n"
        f"checkpoint = {shown.kind}[{shown.steps[-1]}]\n"
        "for spec in checkpoint.specs:\n    print(spec.key, spec.dtype, spec.shape, spec.nbytes)",
    )


def _skipped(shown: Subject) -> None:
    """List the files that were left out, with the reason of each."""
    n = len(shown.skipped)
    st.warning(
        f"{n} file{'s were' if n > 1 else ' was'} left out. The rest of the run is fine to use.",
        icon=":material/warning:",
    )
    with st.expander(f"Files left out ({n})", expanded=n <= 3):
        table = pd.DataFrame(shown.skipped, columns=["file", "why"])
        listing.show(table, "skipped", alt="Files that were left out, and why", wide=["file", "why"])


def _training(shown: Subject) -> None:
    """Draw the metrics that the run logged."""
    with st.container(border=True):
        st.header("Training", anchor=False)
        groups = figures.log_groups(list(shown.log))
        names = list(groups)
        chosen = names[:_MAX_PANELS]
        if len(names) > _MAX_PANELS:
            picked = st.multiselect(
                "Metrics",
                names,
                default=chosen,
                max_selections=_MAX_PANELS,
                key="log_groups",
                label_visibility="collapsed",
            )
            chosen = picked or chosen
        st.plotly_chart(
            figures.log_figure(shown.log, {name: groups[name] for name in chosen}),
            config=dict(figures.CONFIG),
            key="log",
            alt="Training metrics by step: " + ", ".join(chosen),
        )
        table = pd.DataFrame(
            [(name, step, value) for name, series in shown.log.items() for step, value in series],
            columns=["metric", "step", "value"],
        )
        download.table_buttons(table, "training")


def _sizes(shown: Subject) -> None:
    """Draw what the bytes of the last checkpoint are, two ways."""
    by_role: Counter[str] = Counter()
    by_layer: Counter[str] = Counter()
    for row in shown.tensors:
        by_role[row.role] += row.nbytes
        if row.role == "weight":
            by_layer[row.layer] += row.nbytes
    left, right = st.columns(2, gap="medium")
    for column, title, kind, sizes, colour in (
        (left, "Size by role", "role", by_role, 0),
        (right, "Weights by layer type", "layer type", by_layer, 2),
    ):
        with column, st.container(border=True, height="stretch"):
            st.header(title, anchor=False)
            if not sizes:
                st.caption("Nothing of this kind in the last checkpoint.")
                continue
            st.plotly_chart(
                figures.sizes_figure(sizes, colour),
                config={"displayModeBar": False},
                key=title,
                alt=f"{title}: " + ", ".join(f"{name} {bytes_text(n)}" for name, n in sizes.most_common()),
            )
            st.caption(f"Uncompressed, in the checkpoint of step {count_text(shown.steps[-1])}.")
            table = pd.DataFrame(sizes.most_common(), columns=[kind, "bytes"])
            download.table_buttons(table, title.casefold().replace(" ", "-"))


def _frames(archive: ArchiveFacts) -> None:
    """Draw the size of every frame."""
    with st.container(border=True):
        st.header("Frames", anchor=False)
        n_keyframes = sum(frame.kind == "keyframe" for frame in archive.frames)
        st.plotly_chart(
            figures.frames_figure(archive.frames),
            config=dict(figures.CONFIG),
            key="frames",
            alt=f"Bytes of each of {len(archive.frames)} frames, {n_keyframes} of them keyframes",
        )
        st.caption("A keyframe stands alone; a delta frame holds what changed since the step before it.")
        table = pd.DataFrame(
            archive.frames, columns=["step", "kind", "bytes", "ratio_total", "ratio_weights"]
        )
        download.table_buttons(table, "frames")


def _tensors(shown: Subject) -> None:
    """List the tensors of the last checkpoint."""
    with st.expander(f"Tensors of step {count_text(shown.steps[-1])} ({len(shown.tensors)})"):
        pattern = st.text_input("Filter by name", placeholder="conv", key="tensor_filter")
        rows = [row for row in shown.tensors if not pattern or pattern.casefold() in row.name.casefold()]
        table = pd.DataFrame(
            [
                (row.name, row.role, row.layer, row.dtype, shape_text(row.shape), row.numel, row.nbytes)
                for row in rows
            ],
            columns=["name", "role", "layer type", "dtype", "shape", "values", "bytes"],
        )
        if rows:
            listing.show(table, "tensors", alt="Tensors with role, layer type, dtype, shape and size")
        else:
            st.caption("No tensor has this in its name.")


render()
