"""The error of every tensor against the original run, the worst first, and which ones are bit-exact."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.pages.archive.tables import ArchiveChoice, TensorErrorRow
from inshrink_app.widgets import job_card, listing, problem
from inshrink_app.widgets.formatting import bytes_text, count_text, counted, elide, inked, markdown_text
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

__all__ = ["show"]

_MAX_ROWS = 2_000
"""Rows of the table on screen; all of them can be downloaded."""


def show(shown: Subject, original: Subject, archives: tuple[ArchiveChoice, ...]) -> None:
    """Draw the card."""
    with st.container(border=True):
        st.header("Tensor by tensor", anchor=False)
        one = archives[0]
        if len(archives) > 1:
            names = {str(choice.path): choice for choice in archives}
            picked = st.segmented_control(
                "Archive",
                list(names),
                default=str(one.path),
                format_func=lambda path: inked(markdown_text(elide(names[path].name, 40))),
                key="errors.archive",
                label_visibility="collapsed",
            )
            one = names.get(str(picked), one)
        try:
            chain = services.chain_of(str(one.path))
            job = services.verify_job(chain, run=str(original.path))
        except ServiceError as error:
            problem.show(error.problem)
            return
        if job is not None and job.is_running:
            job_card.running(job, "Measuring errors")
            return
        if job is not None and job.state == "finished":
            _found(services.verdict(job.result))
        elif job is not None:
            job_card.stopped(job, primary=False)
        else:
            st.write(
                "Decodes every step and compares every tensor with the original: "
                f"{bytes_text(original.total_bytes)} of checkpoints and {bytes_text(chain.nbytes)} of "
                "archive "
                "are read. No code of the run is executed."
            )
        if st.button(
            "Measure errors" if job is None else "Measure errors again", icon=":material/straighten:"
        ):
            services.start_errors(chain, str(original.path), str(shown.path))
            st.rerun()


def _found(verdict: services.Verdict) -> None:
    """Say how many tensors are bit-exact, and list the others by falling error."""
    exact = sum(row.bit_exact for row in verdict.errors)
    total = len(verdict.errors)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(
            f"Bit-exact: {count_text(exact)} of {count_text(total)}",
            color="green" if exact == total else "blue",
            icon=":material/check_circle:" if exact == total else ":material/info:",
        )
        if verdict.problems:
            st.badge(counted(len(verdict.problems), "problem"), color="red", icon=":material/error:")
    for finding in verdict.problems[:5]:
        problem.show(Problem(finding.what, finding.where, finding.remedy))
    if verdict.missing_steps:
        st.caption(f"{counted(len(verdict.missing_steps), 'step')} of the run not archived.")
    if total:
        _table(verdict.errors)


def _table(errors: tuple[TensorErrorRow, ...]) -> None:
    """Draw the filters and the table."""
    steps = sorted({row.step for row in errors})
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        step = st.selectbox(
            "Step",
            [None, *steps],
            format_func=lambda one: "All steps" if one is None else count_text(one),
            key="errors.step",
            width=180,
        )
        pattern = st.text_input(
            "Filter by name",
            placeholder="Filter by name",
            key="errors.filter",
            icon=":material/search:",
            width=260,
        )
        lossy = st.toggle("Not bit-exact only", key="errors.lossy")
    rows = [
        row
        for row in errors
        if step in (None, row.step)
        and (not pattern or pattern.casefold() in row.tensor.casefold())
        and not (lossy and row.bit_exact)
    ]
    if not rows:
        st.caption("No tensor matches.")
        return
    table = pd.DataFrame(
        [
            (
                row.step,
                row.tensor,
                row.codec,
                row.relative_rms,
                row.max_abs,
                "exact" if row.bit_exact else "lossy",
            )
            for row in rows
        ],
        columns=["step", "tensor", "codec", "relative error", "largest error", "bits"],
    )
    listing.show(
        table,
        "tensor-errors",
        alt="Error of every tensor of every step against the original, the worst first",
        formats={"relative error": listing.SMALL, "largest error": listing.SMALL},
        most=_MAX_ROWS,
    )
    if len(rows) > _MAX_ROWS:
        st.caption(
            f"The worst {count_text(_MAX_ROWS)} of {count_text(len(rows))}; the files have all of them."
        )
