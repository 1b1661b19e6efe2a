"""Errors tensor by tensor against the original run, worst first; and the restore of a step's files."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Problem, Subject
from inshrink_app.widgets import ending, fmt, job_card, listing, modules, problem
from inshrink_app.widgets.choices import one_of_few, pick_one
from inshrink_app.widgets.layout import answer

from inshrink_core.chain.report import ChainReport
from inshrink_core.verbs.restore import Restore
from inshrink_core.verbs.verify import Verify

_LAYOUTS = {"same": "As the run was", "safetensors": "safetensors", "torch": "torch"}

_MAX_ROWS = 2_000
"""Number of rows on screen; the download has all of them."""

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
"""Meaning of an error, by the role of the tensor."""


def errors(original: Subject, chain: ChainReport) -> None:
    """Draw the error of every tensor, or offer to measure it."""
    request = Verify(str(chain.path), against=str(original.path))
    of = answer(lambda: (*chain.state, services.opened(str(original.path)).token))
    if of is None:
        return
    work = Work.asking([request], original.path, "archives", "errors", of=of)
    job = services.job_of(work)
    with st.container(horizontal=True, vertical_alignment="center"):
        label = "Measure errors again" if job else "Measure errors"
        job_card.start_button(label, work, "straighten", job=job, type="secondary" if job else "primary")
        st.caption(
            f"Decodes every step and compares every tensor. Reads {fmt.size(original.total_bytes)} of "
            f"checkpoints and {fmt.size(chain.nbytes)} of archive; no code of the run is executed."
        )
    if job_card.settled(job) and job is not None:
        _found(job.result, original)
    ending.requests([request])


def _found(document: dict[str, Any], original: Subject) -> None:
    """Draw problems, errors by role with their meaning, and every tensor by falling error."""
    for finding in document["problems"][:5]:
        problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    if document["missing_steps"]:
        st.caption(f"{fmt.counted(len(document['missing_steps']), 'step')} of the run not archived.")
    if not document["errors"]:
        return
    roles = {row.key: str(row.role) for row in original.tensors}
    table = pd.DataFrame(document["errors"])
    table.insert(2, "role", [roles.get(name, "other") for name in table["tensor"]])
    # If the original is all zero, any error counts as the worst.
    table = table.sort_values(
        ["bit_exact", "relative_rms", "max_abs"], ascending=[True, False, False], na_position="first"
    )
    by_role = table.groupby("role", sort=False)
    summary = pd.DataFrame(
        {
            "tensors": by_role["tensor"].nunique(),
            "bit-exact": by_role["bit_exact"].mean(),
            "median error": by_role["relative_rms"].median(),
            "largest error": by_role["relative_rms"].max(),
        }
    ).reset_index()
    n_exact = f"{fmt.count(int(table['bit_exact'].sum()))} of {fmt.count(len(table))} bit-exact."
    st.caption(f"Errors by role, as relative root mean squares. {n_exact}")
    formats = {"bit-exact": listing.SHARE, "median error": listing.SMALL, "largest error": listing.SMALL}
    listing.bare(*listing.drawn_as(summary, formats), "Errors by role of the tensors")
    for role in filter(_MEANING.__contains__, summary["role"]):
        st.caption(f"`{role}`: {_MEANING[role]}")
    _table(table)


def _table(table: pd.DataFrame) -> None:
    """Draw the filters and the table."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        names = {None: "All steps", **{step: fmt.count(step) for step in sorted(set(table["step"]))}}
        step = pick_one("Step", list(names), format_func=names.__getitem__, key="errors.step", width=160)
        look: Any = {"help": modules.PATTERN_HELP, "icon": ":material/search:", "width": 260}
        pattern = st.text_input("Names", key="errors.filter", placeholder="head, *.bias, /bn\\d/", **look)
        lossy = st.toggle("Only tensors with errors", key="errors.lossy")
    chosen = table["tensor"].isin(modules.matching(list(table["tensor"]), pattern))
    chosen &= (table["step"] == step) | (step is None)
    table = table[chosen & ~(table["bit_exact"] & lossy)]
    if table.empty:
        st.caption("No tensor matches.")
        return
    n_rows = len(table)
    table = table[["step", "tensor", "role", "codec", "relative_rms", "max_abs", "bit_exact"]]
    table.columns = pd.Index(["step", "tensor", "role", "codec", "relative error", "largest error", "bits"])
    listing.show(
        table.assign(bits=table["bits"].map({True: "exact", False: "lossy"})),
        "tensor-errors",
        alt="Error of every tensor of every step against the original, the worst first",
        formats={"largest error": listing.SMALL},
        most=_MAX_ROWS,
    )
    if n_rows > _MAX_ROWS:
        st.caption(f"The worst {fmt.count(_MAX_ROWS)} of {fmt.count(n_rows)}; the files have all of them.")


def restore(shown: Subject, chain: ChainReport) -> None:
    """Draw the target of a restore, its progress, and the restored files."""
    job = services.newest_job("archives", "restore", shown.path)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        steps = list(chain.steps)
        if st.session_state.get("restore.step") not in steps:
            st.session_state["restore.step"] = steps[-1]
        step = int(pick_one("Step", steps, format_func=fmt.count, key="restore.step", width=160))
        layout = one_of_few("restore", "Format", "layout", _LAYOUTS, "same")
    suggested = services.suggested_path(shown, chain.path.name, f"step-{step}")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        tip = "A new folder, or an empty folder."
        text = st.text_input("Folder", suggested, key=f"restore.target.{suggested}", help=tip)
        request = Restore(str(chain.path), text or "restored/", steps=(step,), layout=layout)

        def work() -> Work:
            asked = dataclasses.replace(request, output=str(services.restore_target(text)))
            return Work.asking([asked], shown.path, "archives", "restore")

        job_card.start_button("Restore", work, "settings_backup_restore", job=job, type="primary")
    if job is not None and job_card.settled(job):
        _written(job)
    ending.requests([request])


def _written(job: Job) -> None:
    """List the restored files."""
    document, restored = services.read_result(job), str(getattr(job.requests[-1], "output", ""))
    files = services.restored_files(document, restored)
    step, n = fmt.count(document["steps"][0]), fmt.counted(len(files), "file")
    size = fmt.size(sum(nbytes for _, nbytes, _ in files))
    st.success(f"Step {step} restored: {n}, {size}.", icon=":material/check_circle:")
    st.code(restored, language=None, wrap_lines=True)
    table = pd.DataFrame(files, columns=["file", "bytes", "SHA-256"])
    listing.show(table, "restored", alt="Restored files with size and SHA-256", wide=["SHA-256"])
