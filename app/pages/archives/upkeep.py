"""Verification of archives, and pruning, which is planned first and runs after confirmation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Work
from inshrink_app.model import verified, when
from inshrink_app.widgets import ending, fmt, job_card, listing
from inshrink_app.widgets.choices import pick_several
from inshrink_app.widgets.layout import facts

from inshrink_core.chain.report import ChainReport
from inshrink_core.verbs.prune import Prune
from inshrink_core.verbs.verify import Verify

_FATES = {"kept": "stays", "reference": "stays, others need it", "removed": "removed"}
_WRITTEN = {"rekeyed": ", becomes a keyframe", "rewritten": ", written anew"}


def verify(chain: ChainReport) -> None:
    """Offer to verify an archive, and show the result."""
    asked = [Verify(str(chain.path), deep=deep) for deep in (False, True)]
    of = tuple(chain.state)
    work = [Work.asking([request], chain.path, "archives", "verify", of=of) for request in asked]
    jobs = [job for job in map(services.job_of, work) if job is not None]
    newest = max(jobs, key=lambda job: (job.is_running, job.started_at), default=None)
    with st.container(horizontal=True, vertical_alignment="center"):
        tip = "Checks the structure and every checksum."
        job_card.start_button("Verify", work[False], "verified", job=newest, type="primary", help=tip)
        tip += " Decodes every tensor too."
        job_card.start_button("Verify and decode", work[True], "troubleshoot", job=newest, help=tip)
        st.caption(f"Reads {fmt.size(chain.nbytes)}.")
    if job_card.settled(newest):
        known = next(verified(chain), None)
        if known is not None:
            _check(known.document)
            device = fmt.markdown(str(known.document.get("device", "")).upper())
            st.caption(f"Verified {when(known.at)}, on {device}.")
        elif newest is not None:
            _check(newest.result)
    ending.requests(asked[1:])


def _check(document: Mapping[str, Any]) -> None:
    """Draw whether the archive is sound, and its problems."""
    looked = "checked, every tensor decoded" if document["deep"] else "checked"
    frames, problems = fmt.counted(document["frames"], "frame"), document["problems"]
    if document["ok"]:
        st.success(f"Sound: {frames} {looked}.", icon=":material/check_circle:")
    else:
        st.error(f"{fmt.counted(len(problems), 'problem')}; {frames} {looked}.", icon=":material/error:")
    for name in ("problems", "notes"):
        if name == "notes" and document["notes"]:
            st.caption("An interrupted writer left these; no committed step is lost:")
        if document[name]:
            table = pd.DataFrame(document[name])[["where", "what", "remedy"]]
            listing.show(table, name, alt=f"What a verification found: {name}")


def prune(chain: ChainReport) -> None:
    """Draw the rules, their effect, and the button that applies them."""
    if chain.is_packed:
        st.write("A packed archive cannot be changed. Unpack it to prune it.")
        return
    if len(chain.frames) < 2:
        st.write("The archive has a single step, and the last step always stays.")
        return
    rules = _rules(chain)
    done = services.newest_job("archives", "prune", chain.path)
    # The plan applies to the present state of the archive.
    work = Work.asking([rules], chain.path, "archives", "plan", of=tuple(chain.state))
    plan = services.job_of(work)
    has_rule = bool(rules.keep_every or rules.keep_last or rules.keep)
    if done is not None and not job_card.settled(done):
        if done.is_running:
            return
    elif done is not None:
        removed, freed = fmt.counted(len(done.result["removed"]), "step"), done.result["bytes_freed"]
        st.success(f"Removed {removed}; {fmt.size(freed)} freed.", icon=":material/check_circle:")
    if plan is None:
        tip = None if has_rule else "First choose which steps to keep."
        label = "Show what would be removed"
        job_card.start_button(label, work, "rule", again=False, disabled=not has_rule, help=tip)
    elif job_card.settled(plan):
        _planned(chain, rules, plan.result)
    if has_rule:
        ending.requests([rules])


def _rules(chain: ChainReport) -> Prune:
    """Draw the rules. No link carries them, so pruning always takes more than one click."""
    first, second, third, fourth = st.columns([1, 1, 2, 1], vertical_alignment="bottom")
    none = "0 turns this rule off"
    steps = sorted({frame.step for frame in chain.frames})
    last = first.number_input("Keep the last", 0, len(chain.frames), 0, key="prune.last", help=none)
    every = second.number_input("Keep multiples of", 0, steps[-1], 0, key="prune.every", help=none)
    with third:
        keep = pick_several("Keep these steps", steps, format_func=fmt.count, key="prune.keep")
    drop = chain.n_branches > 1 and fourth.toggle("Drop older branches", key="prune.branches")
    return Prune(
        str(chain.path),
        keep_every=int(every) or None,
        keep_last=int(last) or None,
        keep=tuple(keep),
        drop_branches=bool(drop),
    )


def _planned(chain: ChainReport, rules: Prune, document: dict[str, Any]) -> None:
    """Draw the effect of pruning, and ask for confirmation."""
    n_removed = len(document["removed"])
    if not n_removed:
        st.info("These rules keep every step.", icon=":material/info:")
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        label = f"Remove {fmt.counted(n_removed, 'step')} for good"
        sure = st.checkbox(label, key=f"prune.sure.{rules.words()}")
        work = Work.asking([dataclasses.replace(rules, apply=True)], chain.path, "archives", "prune")
        job_card.start_button("Prune", work, "content_cut", disabled=not sure)
    rekeyed = fmt.count(len(document["rekeyed"]))
    facts(
        [
            ("Removed", fmt.count(n_removed), f"of {fmt.counted(len(chain.frames), 'frame')}"),
            ("New keyframes", rekeyed, "they restore the same bits"),
            ("Size now", fmt.size(document["bytes_before"]), "measured"),
            ("Size after", fmt.size(document["bytes_after"]), "estimated" if document["rekeyed"] else ""),
        ]
    )
    results = [_FATES[row["fate"]] + _WRITTEN.get(str(row["written"]), "") for row in document["frames"]]
    table = pd.DataFrame(document["frames"])[["step", "branch"]].assign(result=results)
    listing.show(table, "prune-plan", alt="Frames with what pruning would do to each")
