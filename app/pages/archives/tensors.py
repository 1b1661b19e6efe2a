"""Tensor by tensor against the original run, the worst first; and restoring the files of a step."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Problem, Subject
from inshrink_app.widgets import ending, fmt, job_card, listing, modules, problem
from inshrink_app.widgets.choices import one_of_few, pick_one
from inshrink_app.widgets.layout import answer

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.restore import Restore
from inshrink_core.verbs.verify import Verify

_LAYOUTS = {"same": "As the run was", "safetensors": "safetensors", "torch": "torch"}

_MAX_ROWS = 2_000
"""Rows of the table on screen; all of them can be downloaded."""

_MEANING = {
    "weight": "The error of the weights decides what a restore costs.",
    "buffer": "Statistics of layers.",
    "exp_avg": (
        "An error of 1 or more does not matter: Adam forgets a first moment within about 10 steps, so a "
        "resumed training replaces it before it counts."
    ),
    "exp_avg_sq": (
        "It scales the steps by its square root, so an error of 40 % changes a step by about 20 % until new "
        "gradients have replaced it."
    ),
    "momentum": "A resumed training replaces it within about 10 steps.",
}
"""What an error means, by the role of a tensor."""


def errors(original: Subject, chain: ChainReport) -> None:
    """Draw the error of every tensor, or offer to measure it."""
    request = Verify(str(chain.path), against=str(original.path))
    of = answer(lambda: (*chain.state, services.opened(str(original.path)).token))
    if of is None:
        return
    work = Work.asking([request], original.path, "archives", "errors", of=of)
    job = services.job_of(work)
    is_running = job is not None and job.is_running
    with st.container(horizontal=True, vertical_alignment="center"):
        look: Any = {"type": "primary" if job is None else "secondary", "disabled": is_running}
        label = "Measure errors" if job is None else "Measure errors again"
        job_card.start_button(label, work, "straighten", **look)
        st.caption(
            f"Decodes every step and compares every tensor. Reads {fmt.size(original.total_bytes)} of "
            f"checkpoints and {fmt.size(chain.nbytes)} of archive; no code of the run is executed."
        )
    if job_card.settled(job, "") and job is not None:
        _found(job.result, original)
    ending.requests([request])


def _found(document: dict[str, Any], original: Subject) -> None:
    """Draw what is wrong, the errors by role with what they mean, and every tensor by falling error."""
    rows = document["errors"]
    for finding in document["problems"][:5]:
        problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    if document["missing_steps"]:
        st.caption(f"{fmt.counted(len(document['missing_steps']), 'step')} of the run not archived.")
    if not rows:
        return
    roles = {row.name: str(row.role) for row in original.tensors}
    frame = pd.DataFrame(rows)
    frame["role"] = [roles.get(name, "other") for name in frame["tensor"]]
    by_role = frame.groupby("role", sort=False)
    summary = pd.DataFrame(
        {
            "tensors": by_role["tensor"].nunique(),
            "bit-exact": by_role["bit_exact"].mean(),
            "median error": by_role["relative_rms"].median(),
            "largest error": by_role["relative_rms"].max(),
        }
    ).reset_index()
    summary["what it means"] = [_MEANING.get(role, "") for role in summary["role"]]
    n_exact = f"{fmt.count(int(frame['bit_exact'].sum()))} of {fmt.count(len(frame))} bit-exact."
    st.caption(f"By role. Errors are relative root mean squares. {n_exact}")
    formats = {"bit-exact": listing.SHARE, "median error": listing.SMALL, "largest error": listing.SMALL}
    looks = listing.looks(summary, formats, wide=["what it means"])
    listing.bare(summary, looks, "Errors by role of the tensors, and what they mean")
    _table(sorted(frame.to_dict("records"), key=_badness, reverse=True))


def _badness(row: dict[str, Any]) -> tuple[bool, float, float]:
    """Order by relative error; if the original is all zero, any error counts as the worst."""
    relative = row["relative_rms"]
    relative = math.inf if relative is None or math.isnan(relative) else relative
    return (not row["bit_exact"], relative, row["max_abs"])


def _table(found: list[dict[str, Any]]) -> None:
    """Draw the filters and the table."""
    steps = sorted({row["step"] for row in found})
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        names = {None: "All steps", **{step: fmt.count(step) for step in steps}}
        step = pick_one("Step", list(names), format_func=names.__getitem__, key="errors.step", width=160)
        look: Any = {"help": modules.PATTERN_HELP, "icon": ":material/search:", "width": 260}
        pattern = st.text_input("Names", key="errors.filter", placeholder="head, *.bias, /bn\\d/", **look)
        lossy = st.toggle("Not bit-exact only", key="errors.lossy")
    matching = modules.matching([row["tensor"] for row in found], pattern)
    rows = [
        row
        for row in found
        if step in (None, row["step"]) and row["tensor"] in matching and not (lossy and row["bit_exact"])
    ]
    if not rows:
        st.caption("No tensor matches.")
        return
    table = pd.DataFrame(rows)[["step", "tensor", "role", "codec", "relative_rms", "max_abs"]]
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


def restore(shown: Subject, chain: ChainReport) -> None:
    """Draw where files of a step are restored to, the progress, and the files."""
    job = services.newest_job("archives", "restore", shown.path)
    is_running = job is not None and job.is_running
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        steps = list(chain.steps)
        if st.session_state.get("restore.step") not in steps:
            st.session_state["restore.step"] = steps[-1]
        step = int(pick_one("Step", steps, key="restore.step", width=160))
        layout = one_of_few("restore", "Format", "layout", _LAYOUTS, "same")
    suggested = services.suggested_path(shown, chain.path.name, f"step-{step}")
    if st.session_state.get("restore.suggested") != suggested and not is_running:
        st.session_state["restore.suggested"] = st.session_state["restore.target"] = suggested
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = st.text_input("Folder", key="restore.target", help="A new folder, or an empty one.")
        look: Any = {"type": "primary", "disabled": is_running}
        if st.button("Restore", icon=":material/settings_backup_restore:", **look):
            target = answer(lambda: services.restore_target(text))
            if target is not None:
                request = Restore(str(chain.path), str(target), steps=(step,), layout=layout)
                services.start_job(Work.asking([request], shown.path, "archives", "restore"))
                st.rerun()
    if job is not None and job_card.settled(job, ""):
        _written(job)
    ending.requests([Restore(str(chain.path), text or "restored/", steps=(step,), layout=layout)])


def _written(job: Job) -> None:
    """List what was written."""
    document = services.read_result(job)
    if not isinstance(document, dict):
        st.caption("The result of this restore cannot be read any more.")
        return
    restored: Any = job.requests[-1]
    files = services.restored_files(document, restored.output)
    total = sum(nbytes for _, nbytes, _ in files)
    step, n = fmt.count(document["steps"][0]), fmt.counted(len(files), "file")
    st.success(f"Step {step} restored: {n}, {fmt.size(total)}.", icon=":material/check_circle:")
    st.code(str(restored.output), language=None, wrap_lines=True)
    table = pd.DataFrame(files, columns=["file", "bytes", "SHA-256"])
    listing.show(table, "restored", alt="Restored files with size and SHA-256", wide=["SHA-256"])
