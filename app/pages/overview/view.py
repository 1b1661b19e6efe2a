"""Overview: what a run holds, how its training went, and what takes the space."""

from __future__ import annotations

from functools import partial

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.model import Page, Subject
from inshrink_app.pages.overview import logs, naming, shrink, shrinking
from inshrink_app.server.roots import Address
from inshrink_app.widgets import ending, fmt, layout, listing, quality, subject, tables
from inshrink_app.widgets.choices import pick_several
from inshrink_app.widgets.figures import log_groups
from inshrink_app.widgets.layout import panels, section

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.inspect import Inspect

_MAX_PANELS = 4

_CHARTS = 700
"""Pixels of curves and tables, about."""


def render() -> None:
    """Draw the page."""
    shown = subject.require("Overview", watched=True)
    if shown is None:
        return

    did = shrink.show(shown) if shown.kind == "run" else []
    _facts(shown)
    if services.is_dropped(shown.path):
        st.caption("A copy of what was dropped; the page Open lists such copies and removes them.")
    for note in shown.notes[1:]:
        st.caption(fmt.markdown(fmt.sentence(note)))
    if len(shown.steps) == 1 and shown.kind == "run":
        st.info(
            "This run has one checkpoint. Curves over time and movement between checkpoints need two.",
            icon=":material/info:",
        )
    if shown.skipped:
        _skipped(shown)
    if shown.kind == "run" and shown.place.is_dir():
        naming.show(shown)
    elif isinstance(shown.place, Address):
        st.caption(
            "At an address, other names of steps are told by opening it with `{step}` in its last part, and "
            "metrics are those that lie in the run."
        )
    logs.show(shown)
    layout.below("charts", partial(_charts, shown), height=_CHARTS)
    _tensors(shown)
    ending.requests([Inspect(str(shown.path)), *did])
    _next(shown)


def _next(shown: Subject) -> None:
    """Lead on."""
    if shown.kind == "archive":
        ending.offer(ending.ARCHIVE._replace(label="Is it sound? Archive"), ending.COMPARE)
        return
    goal = shrinking.goal_request(shown, shrink.chosen_goal()).chain
    carried = {"codec": goal.codec, "drop": "yes" if goal.optimizer == "drop" else "no"}
    hurts = "Where would an error hurt? Sensitivity"
    ending.offer(
        ending.Next(hurts, "sensitivity", "Every layer at every step in one picture."),
        ending.Next("Choose every setting yourself: Export", "export", "With the chosen goal.", carried),
    )


def _facts(shown: Subject) -> None:
    """Draw the figures that every reader of a run or an archive wants first."""
    rest = _of_run(shown) if shown.archive is None else _of_archive(shown, shown.archive)
    layout.facts([*_of_any(shown), *rest])


def _of_any(shown: Subject) -> list[layout.Fact]:
    """Say how much there is."""
    n_tensors = len({row.name for row in shown.tensors if row.role == "weight"})
    return [
        (
            "Checkpoints",
            fmt.count(len(shown.steps)),
            fmt.steps(shown.steps),
            # The engine's first note says where the steps come from.
            fmt.markdown(next(map(fmt.sentence, shown.notes), "")),
        ),
        (
            "Parameters",
            fmt.compact(shown.n_parameters),
            fmt.counted(n_tensors, "tensor"),
            f"{fmt.count(shown.n_parameters)} weights in the last checkpoint",
        ),
    ]


def _of_run(shown: Subject) -> list[layout.Fact]:
    """Say what a run without an archive takes, and how much of it was read."""
    last = sum(row.nbytes for row in shown.tensors)
    # Of tiny files the headers are most, and parts of them are read twice.
    is_all = shown.bytes_read >= shown.total_bytes
    return [
        ("Size on disk", fmt.size(shown.total_bytes), "all checkpoints"),
        ("Last checkpoint", fmt.size(last), f"{fmt.counted(len(shown.tensors), 'tensor')} in total"),
        (
            "Read to open",
            fmt.size(shown.bytes_read),
            "headers only" if is_all else f"of {fmt.size(shown.total_bytes)}",
            "Opening reads headers only; a page reads weights when it needs them.",
        ),
    ]


def _of_archive(shown: Subject, archive: ChainReport) -> list[layout.Fact]:
    """Say what the archive saves, and what it costs."""
    held = (
        ""
        if shown.kind == "archive"
        else f"{fmt.counted(len(archive.steps), 'step')} in {archive.path.name}. "
    )
    return [
        ("Raw size", fmt.size(archive.raw_bytes), "uncompressed"),
        (
            "Archive",
            fmt.size(archive.nbytes),
            _saved(archive),
            f"{fmt.markdown(held)}What it saves is their raw size minus its own; the space is free once the "
            "checkpoints are deleted.",
        ),
        *quality.size_facts(archive)[1:],
        *quality.archive_facts(archive),
    ]


def _saved(archive: ChainReport) -> str:
    """Say how much disk the archive saves."""
    saved = archive.raw_bytes - archive.nbytes
    if saved <= 0:
        return "saves nothing"
    return f"saves {fmt.size(saved)}, {fmt.share(saved / archive.raw_bytes)}"


def _skipped(shown: Subject) -> None:
    """List the files that were left out, with the reason of each."""
    n = len(shown.skipped)
    with st.expander(f"{fmt.counted(n, 'file')} left out", icon=":material/info:", expanded=n <= 3):
        table = pd.DataFrame(shown.skipped, columns=["file", "why"])
        listing.show(table, "skipped", alt="Files that were left out, and why", wide=["file", "why"])


def _charts(shown: Subject) -> None:
    """Draw what a reader scrolls down to."""
    if shown.log:
        _training(shown)
    _sizes(shown)


def _training(shown: Subject) -> None:
    """Draw the metrics that the run logged."""
    with section("Training"):
        groups = log_groups(list(shown.log))
        names = list(groups)
        chosen = names[:_MAX_PANELS]
        if len(names) > _MAX_PANELS:
            picked = pick_several(
                "Metrics",
                names,
                default=chosen,
                max_selections=_MAX_PANELS,
                key="log_groups",
                label_visibility="collapsed",
            )
            chosen = picked or chosen
        panels(shown.log, {name: groups[name] for name in chosen}, "log")

        def table() -> pd.DataFrame:
            rows = [(name, step, value) for name, series in shown.log.items() for step, value in series]
            return pd.DataFrame(rows, columns=["metric", "step", "value"])

        listing.table_buttons(table, "training")


def _sizes(shown: Subject) -> None:
    """List what the bytes of the last checkpoint are, two ways."""
    for column, (title, table) in zip(st.columns(2, gap="medium"), tables.sizes(shown).items(), strict=True):
        with column, st.container(border=True, height="stretch"):
            st.header(title, anchor=False)
            told = (f"{name} {fmt.size(nbytes)}" for name, nbytes, _ in table.itertuples(index=False))
            listing.show(
                table,
                title.casefold().replace(" ", "-"),
                alt=f"{title}: " + ", ".join(told),
                columns={"share": listing.share_column(label="Share")},
            )
            st.caption(f"Uncompressed, in the checkpoint of step {fmt.count(shown.steps[-1])}.")


@st.fragment
def _tensors(shown: Subject) -> None:
    """List the tensors of the last checkpoint, once the panel is opened."""
    label = f"Tensors of step {fmt.count(shown.steps[-1])} ({len(shown.tensors)})"
    layout.folded(label, None, "tensors", partial(_listed, shown))


def _listed(shown: Subject) -> None:
    pattern = st.text_input("Filter by name", placeholder="conv", key="tensor_filter")
    rows = [row for row in shown.tensors if not pattern or pattern.casefold() in row.name.casefold()]
    if rows:
        listing.show(
            tables.tensors(rows), "tensors", alt="Tensors with role, layer type, dtype, shape and size"
        )
    else:
        st.caption("No tensor has this text in its name.")


PAGE = Page("Overview", ":material/dashboard:", render)
