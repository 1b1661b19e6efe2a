"""Pruning an archive: which steps stay, what a dry run says of it, and only then the deed."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.pages.archive.tables import Chain
from inshrink_app.services import PruneRules
from inshrink_app.widgets import job_card, listing
from inshrink_app.widgets.formatting import bytes_text, count_text, counted

__all__ = ["show"]

_FATES = {"kept": "kept", "reference": "kept, others need it", "removed": "removed"}
_WRITTEN = {"rekeyed": ", becomes a keyframe", "rewritten": ", written anew"}


def show(chain: Chain) -> PruneRules:
    """Draw the card and return the rules on screen."""
    with st.container(border=True):
        st.header("Prune", anchor=False)
        if chain.is_packed:
            st.write("A packed archive is read and copied, not changed. Unpack it to prune it.")
            return PruneRules()
        if len(chain.frames) < 2:
            st.write("There is one frame, and the last step of each line of training always stays.")
            return PruneRules()
        st.write(
            "Steps that are not needed go; those that stay keep every bit. A dry run says first what would "
            "happen, and changes nothing."
        )
        rules = _rules(chain)
        at_work = services.prune_job(chain, rules)
        if at_work is not None:
            job_card.running(at_work, "Planning" if at_work.request.get("dry_run") else "Pruning")
            return rules
        _last_pruning(chain)
        _plan(chain, rules)
    return rules


def _rules(chain: Chain) -> PruneRules:
    """Draw the rules; a link or the session does not carry them: pruning is never one click away."""
    first, second, third = st.columns(3)
    last = first.number_input(
        "Keep the last", 0, len(chain.frames), 0, key="prune.last", help="0: no such rule"
    )
    every = second.number_input(
        "Keep multiples of",
        0,
        max(frame.step for frame in chain.frames),
        0,
        key="prune.every",
        help="0: no such rule",
    )
    steps = sorted({frame.step for frame in chain.frames})
    keep = third.multiselect("Keep these steps", steps, format_func=count_text, key="prune.keep")
    with st.container(horizontal=True, gap="medium"):
        drop = chain.n_branches > 1 and st.toggle("Drop older lines of training", key="prune.branches")
        smallest = st.toggle(
            "Keep what costs less to keep",
            key="prune.smallest",
            help="Keeps further steps where making keyframes of those that need them would take more space.",
        )
    return PruneRules(int(every) or None, int(last) or None, tuple(keep), bool(drop), bool(smallest))


def _last_pruning(chain: Chain) -> None:
    """Say how the last pruning ended."""
    job = services.prune_done(chain)
    if job is None:
        return
    if job.state != "finished":
        job_card.stopped(job, primary=False)
        return
    document = job.result
    st.success(
        f"Pruned: {counted(len(document['removed']), 'step')} removed, "
        f"{bytes_text(document['bytes_freed'])} freed.",
        icon=":material/check_circle:",
    )


def _plan(chain: Chain, rules: PruneRules) -> None:
    """Offer a dry run, and after it the pruning."""
    job = services.prune_plan(chain, rules)
    if job is not None and job.state == "finished":
        _show_plan(chain, rules, job.result)
        return
    if job is not None:
        job_card.stopped(job, primary=False)
        return
    if st.button(
        "Dry run",
        icon=":material/rule:",
        disabled=not rules.says_something,
        help="Say first what to keep." if not rules.says_something else None,
    ):
        services.start_prune(chain, rules, dry_run=True)
        st.rerun()


def _show_plan(chain: Chain, rules: PruneRules, document: dict[str, Any]) -> None:
    """Say what pruning would do, and ask for the word."""
    n_removed = len(document["removed"])
    if not n_removed:
        st.info("By these rules every step stays.", icon=":material/info:")
        return
    facts = [
        ("Removed", count_text(n_removed), f"of {counted(len(chain.frames), 'frame')}"),
        ("Become keyframes", count_text(len(document["rekeyed"])), "bit for bit the same"),
        ("Size now", bytes_text(document["bytes_before"]), "measured"),
        (
            "Size after",
            bytes_text(document["bytes_after"]),
            "estimated" if document["rekeyed"] else "measured",
        ),
    ]
    with st.container(horizontal=True):
        for label, value, below in facts:
            st.metric(label, value, delta=below, delta_color="off", delta_arrow="off", border=True)
    table = _fates(document)
    with st.expander(f"What becomes of each frame ({count_text(len(table))})", icon=":material/table_rows:"):
        listing.show(table, "prune-plan", alt="Frames with what pruning would do to each")
    with st.container(horizontal=True, vertical_alignment="center"):
        sure = st.checkbox(f"Remove {counted(n_removed, 'step')} for good", key=f"prune.sure.{hash(rules)}")
        if st.button("Prune", icon=":material/content_cut:", disabled=not sure):
            services.start_prune(chain, rules, dry_run=False)
            st.rerun()


def _fates(document: dict[str, Any]) -> pd.DataFrame:
    """List every frame with what becomes of it."""
    rows = [
        (
            int(row["step"]),
            int(row["branch"]),
            _FATES.get(str(row["fate"]), str(row["fate"])) + _WRITTEN.get(str(row["written"]), ""),
        )
        for row in document["frames"]
    ]
    return pd.DataFrame(rows, columns=["step", "branch", "what becomes of it"])
