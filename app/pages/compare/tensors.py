"""Tensor by tensor against the original run, the worst first; and restoring the files of a step."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Problem, Subject
from inshrink_app.widgets import archive_picker, fmt, job_card, listing, modules, problem
from inshrink_app.widgets.choices import pick_one
from inshrink_app.widgets.layout import answer, section

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.restore import Restore
from inshrink_core.verbs.verify import Verify

_LAYOUTS = {"same": "As the run was", "safetensors": "safetensors", "torch": "torch"}

_MAX_ROWS = 2_000
"""Rows of the table on screen; all of them can be downloaded."""


def errors(shown: Subject, original: Subject, archives: tuple[ChainReport, ...]) -> None:
    """Draw the error of every tensor, or offer to measure it."""
    with section("Tensor by tensor"):
        one = _one_of(archives, "Archive", "errors.archive")
        work = answer(lambda: _errors(shown, original, one))
        if work is None:
            return
        job = services.job_of(work)
        if job is not None and job.is_running:
            job_card.running(job, "Measuring errors")
            return
        if job is not None and job_card.settled(job, "Measuring errors"):
            _found(job.result)
        elif job is None:
            st.write(
                "Decodes every step and compares every tensor with the original: "
                f"{fmt.size(original.total_bytes)} of checkpoints and {fmt.size(one.nbytes)} of archive "
                "are read. No code of the run is executed."
            )
        label = "Measure errors" if job is None else "Measure errors again"
        job_card.start_button(label, work, "straighten")


def _one_of(archives: tuple[ChainReport, ...], label: str, key: str) -> ChainReport:
    """Return one of the archives, which the reader chooses where there are several."""
    names = {str(one.path): one for one in archives}
    picked = str(archives[0].path)
    if len(archives) > 1:
        picked = pick_one(
            label, list(names), format_func=lambda path: archive_picker.choice_text(names[path]), key=key
        )
    return names.get(picked, archives[0])


def _errors(shown: Subject, original: Subject, chain: ChainReport) -> Work:
    """Return what measures the errors of an archive: another question once it or the run has changed."""
    request = Verify(str(chain.path), against=str(original.path))
    of = (*chain.state, services.opened(str(original.path)).token)
    return Work.asking([request], shown.path, "compare", "errors", of=of)


def _found(document: dict[str, Any]) -> None:
    """Say how many tensors are bit-exact, and list the others by falling error."""
    rows, problems = document["errors"], document["problems"]
    exact, total = sum(row["bit_exact"] for row in rows), len(rows)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(
            f"Bit-exact: {fmt.count(exact)} of {fmt.count(total)}",
            color="green" if exact == total else "blue",
            icon=":material/check_circle:" if exact == total else ":material/info:",
        )
        if problems:
            st.badge(fmt.counted(len(problems), "problem"), color="red", icon=":material/error:")
    for finding in problems[:5]:
        problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    if document["missing_steps"]:
        st.caption(f"{fmt.counted(len(document['missing_steps']), 'step')} of the run not archived.")
    if total:
        _table(sorted(rows, key=_badness, reverse=True))


def _badness(row: dict[str, Any]) -> tuple[bool, float, float]:
    """Order by relative error; where the original is all zero, any error counts as the worst."""
    relative = math.inf if row["relative_rms"] is None else row["relative_rms"]
    return (not row["bit_exact"], relative, row["max_abs"])


def _table(found: list[dict[str, Any]]) -> None:
    """Draw the filters and the table."""
    steps = sorted({row["step"] for row in found})
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        step = pick_one(
            "Step",
            [None, *steps],
            format_func=lambda one: "All steps" if one is None else str(one),
            key="errors.step",
            width=180,
        )
        pattern = st.text_input(
            "Filter by name",
            placeholder="Filter by name",
            help=modules.PATTERN_HELP,
            key="errors.filter",
            icon=":material/search:",
            width=260,
        )
        lossy = st.toggle("Not bit-exact only", key="errors.lossy")
    names = modules.matching([row["tensor"] for row in found], pattern)
    rows = [
        row
        for row in found
        if step in (None, row["step"]) and row["tensor"] in names and not (lossy and row["bit_exact"])
    ]
    if not rows:
        st.caption("No tensor matches.")
        return
    table = pd.DataFrame(rows)[["step", "tensor", "codec", "relative_rms", "max_abs"]]
    table = table.rename(columns={"relative_rms": "relative error", "max_abs": "largest error"})
    table["bits"] = ["exact" if row["bit_exact"] else "lossy" for row in rows]
    listing.show(
        table,
        "tensor-errors",
        alt="Error of every tensor of every step against the original, the worst first",
        formats={"largest error": listing.SMALL},
        most=_MAX_ROWS,
    )
    if len(rows) > _MAX_ROWS:
        st.caption(f"The worst {fmt.count(_MAX_ROWS)} of {fmt.count(len(rows))}; the files have all of them.")


def restore(shown: Subject, archives: tuple[ChainReport, ...]) -> None:
    """Draw where files of a step are restored to.

    Parameters
    ----------
    shown
        What the page is about.
    archives
        Archives to restore from, at least one.
    """
    with section("Restore files"):
        job = services.newest_job("compare", "restore", shown.path)
        is_running = job is not None and job.is_running
        archive, step, layout = _choices(archives)
        _form(shown, archive, step, layout, is_running=is_running)
        if job is not None and job_card.settled(job, "Restoring"):
            _written(job)


def _choices(archives: tuple[ChainReport, ...]) -> tuple[ChainReport, int, str]:
    """Draw what is restored, and as what."""
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        archive = _one_of(archives, "From", "restore.archive")
        steps = list(archive.steps)
        if st.session_state.get("restore.step") not in steps:
            st.session_state["restore.step"] = steps[-1]
        step = pick_one("Step", steps, key="restore.step", width=180)
        layout = st.segmented_control(
            "Format",
            list(_LAYOUTS),
            format_func=lambda name: fmt.inked(_LAYOUTS[name]),
            default="same",
            key="restore.layout",
        )
    return archive, int(step), str(layout or "same")


def _form(shown: Subject, archive: ChainReport, step: int, layout: str, *, is_running: bool) -> None:
    """Ask for the folder, and begin."""
    suggested = services.suggested_path(shown, archive.path.name, f"step-{step}")
    if st.session_state.get("restore.suggested") != suggested and not is_running:
        st.session_state["restore.suggested"] = suggested
        st.session_state["restore.target"] = suggested
    text = st.text_input("Folder", key="restore.target", help="A new folder, or an empty one.")
    if st.button("Restore", icon=":material/settings_backup_restore:", disabled=is_running):
        target = answer(lambda: services.restore_target(text))
        if target is None:
            return
        request = Restore(str(archive.path), str(target), steps=(step,), layout=layout)
        services.start_job(Work.asking([request], shown.path, "compare", "restore"))
        st.rerun()


def _written(job: Job) -> None:
    """Say what was written."""
    document = services.read_result(job)
    if not isinstance(document, dict):
        st.caption("What this restore wrote cannot be read any more.")
        return
    restored: Any = job.requests[-1]
    files = services.restored_files(document, restored.output)
    total = sum(nbytes for _, nbytes, _ in files)
    step, n = fmt.count(document["steps"][0]), fmt.counted(len(files), "file")
    st.success(f"Step {step} restored: {n}, {fmt.size(total)}.", icon=":material/check_circle:")
    st.code(str(restored.output), language=None, wrap_lines=True)
    table = pd.DataFrame(files, columns=["file", "bytes", "SHA-256"])
    listing.show(table, "restored", alt="Restored files with size and SHA-256", wide=["SHA-256"])
