"""The row of figures that every reader of a run or an archive wants first."""

from __future__ import annotations

from typing import NamedTuple

import streamlit as st
from inshrink_app import services
from inshrink_app.widgets.formatting import (
    bytes_text,
    compact_count,
    count_text,
    counted,
    markdown_text,
    percent_text,
    ratio_text,
    share_text,
    steps_text,
)
from inshrink_app.widgets.tables import ArchiveFacts, Subject

__all__ = ["show"]


class _Fact(NamedTuple):
    """One figure: its name, its value, what stands below it and behind its question mark."""

    label: str
    value: str
    below: str
    tip: str | None = None


def show(shown: Subject) -> None:
    """Draw the row."""
    facts = [
        *_of_any(shown),
        *(_of_run(shown) if shown.archive is None else _of_archive(shown, shown.archive)),
    ]
    with st.container(horizontal=True):
        for fact in facts:
            st.metric(
                fact.label,
                fact.value,
                delta=fact.below,
                delta_color="off",
                delta_arrow="off",
                border=True,
                help=None if fact.tip is None else markdown_text(fact.tip),
            )


def _of_any(shown: Subject) -> list[_Fact]:
    """Say how much there is."""
    n_tensors = len({row.name for row in shown.tensors if row.role == "weight"})
    return [
        _Fact(
            "Checkpoints",
            count_text(len(shown.steps)),
            steps_text(shown.steps),
            # The engine's first note says where the steps come from.
            next((note[:1].upper() + note[1:] + "." for note in shown.notes), None),
        ),
        _Fact(
            "Parameters",
            compact_count(shown.n_parameters),
            counted(n_tensors, "tensor"),
            f"{count_text(shown.n_parameters)} weights in the last checkpoint",
        ),
    ]


def _of_run(shown: Subject) -> list[_Fact]:
    """Say what a run without an archive takes, and how much of it was read."""
    last = sum(row.nbytes for row in shown.tensors)
    # Of tiny files the headers are most, and parts of them are read twice.
    is_all = shown.bytes_read >= shown.total_bytes
    return [
        _Fact("Size on disk", bytes_text(shown.total_bytes), "all checkpoints"),
        _Fact("Last checkpoint", bytes_text(last), f"{counted(len(shown.tensors), 'tensor')} in all"),
        _Fact(
            "Read so far",
            bytes_text(shown.bytes_read),
            "headers only" if is_all else f"of {bytes_text(shown.total_bytes)}",
            "Opening reads headers only; weights are read when a page asks for them.",
        ),
    ]


def _of_archive(shown: Subject, archive: ArchiveFacts) -> list[_Fact]:
    """Say what the archive saves, and what it costs."""
    held = (
        "" if shown.kind == "archive" else f"{counted(len(archive.frames), 'step')} in {archive.path.name}. "
    )
    return [
        _Fact("Raw size", bytes_text(archive.raw_bytes), "uncompressed"),
        _Fact(
            "Archive",
            bytes_text(archive.nbytes),
            _saved(archive),
            f"{held}Saved is what the archive takes less than the steps it holds; the disk is free once the "
            "checkpoints go.",
        ),
        _Fact(
            "Ratio in all",
            ratio_text(archive.ratio_total),
            f"weights {ratio_text(archive.ratio_weights)}",
            "Raw over stored bytes. Headers, tables and the manifest count wholly to the weights.",
        ),
        _worst_drop(archive),
    ]


def _saved(archive: ArchiveFacts) -> str:
    """Say how much disk the archive saves."""
    saved = archive.raw_bytes - archive.nbytes
    if saved <= 0:
        return "saves nothing"
    return f"saves {bytes_text(saved)}, {share_text(saved / archive.raw_bytes)}"


def _worst_drop(archive: ArchiveFacts) -> _Fact:
    """Say what the newest comparison of the archive found, if there is one."""
    found = services.newest_comparison(archive.path, archive.nbytes)
    if found is None or found.worst is None:
        return _Fact("Worst drop", "–", "not measured yet", "Restore & compare measures it.")
    return _Fact(
        "Worst drop",
        percent_text(found.worst.drop),
        f"step {count_text(found.worst.step)}",
        f"Of {found.metric}, as measured on {counted(len(found.steps), 'step')} by the newest comparison.",
    )
