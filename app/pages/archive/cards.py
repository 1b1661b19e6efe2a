"""Whether an archive is sound, and what can go: two checks, a dry run of pruning, and only then the deed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Work
from inshrink_app.model import verified, when
from inshrink_app.widgets import fmt, job_card, listing
from inshrink_app.widgets.choices import pick_several
from inshrink_app.widgets.layout import facts, section

from inshrink_core.chain import ChainReport
from inshrink_core.request import Request
from inshrink_core.verbs.prune import Prune
from inshrink_core.verbs.verify import Verify

_FATES = {"kept": "kept", "reference": "kept, others need it", "removed": "removed"}
_WRITTEN = {"rekeyed": ", becomes a keyframe", "rewritten": ", written anew"}


def says_something(rules: Prune) -> bool:
    """Whether any rule says what to keep; the last step of each branch, and its start, always stay."""
    return bool(rules.keep_every or rules.keep_last or rules.keep)


def _work(rules: Prune, chain: ChainReport) -> Work:
    """Return what plans by rules, for the archive as it is; or prunes by them."""
    topic, of = ("prune", ()) if rules.apply else ("plan", tuple(chain.state))
    return Work.asking([rules], chain.path, "archive", topic, of=of)


def verifying(chain: ChainReport, *, deep: bool) -> Request[Any]:
    """Return the request that checks an archive."""
    return Verify(str(chain.path), deep=deep)


def verify(chain: ChainReport) -> None:
    """Offer to verify the archive, and say what that found."""
    with section("Is it sound?"):
        asked, of = (verifying(chain, deep=deep) for deep in (False, True)), tuple(chain.state)
        work = [Work.asking([one], chain.path, "archive", "verify", of=of) for one in asked]
        jobs = [job for job in map(services.job_of, work) if job is not None]
        at_work = next((job for job in jobs if job.is_running), None)
        if at_work is not None:
            job_card.running(at_work, "Verifying")
            return
        newest = max(jobs, key=lambda job: job.started_at, default=None)
        known = next(verified(chain), None)
        if known is not None and (newest is None or newest.state == "finished"):
            _verdict(known.document)
            st.caption(f"Verified {when(known.at)}, on {fmt.device(known.document.get('device', ''))}.")
        elif newest is None:
            st.write(
                f"Verifying checks the structure and every checksum; it reads {fmt.size(chain.nbytes)}. A "
                "deep check decodes every tensor of every frame too."
            )
        elif job_card.settled(newest, "Verifying"):
            _verdict(newest.result)
        with st.container(horizontal=True):
            job_card.start_button("Verify", work[False], "verified", type="primary")
            job_card.start_button("Verify deeply", work[True], "troubleshoot")


def _verdict(document: Mapping[str, Any]) -> None:
    """Say whether the archive is sound, and what is wrong with it."""
    looked = "checked and every tensor decoded" if document["deep"] else "checked"
    frames, problems = fmt.counted(document["frames"], "frame"), document["problems"]
    if document["ok"]:
        st.success(f"Sound: {frames} {looked}.", icon=":material/check_circle:")
    else:
        st.error(f"{fmt.counted(len(problems), 'problem')}; {frames} {looked}.", icon=":material/error:")
        _findings(problems, "problems")
    if document["notes"]:
        st.caption("Left behind by a writer that was interrupted; nothing that was committed is lost:")
        _findings(document["notes"], "notes")


def _findings(findings: list[dict[str, Any]], name: str) -> None:
    """List what was found."""
    table = pd.DataFrame(findings)[["where", "what", "remedy"]]
    listing.show(table, name, alt=f"What a verification found: {name}")


def prune(chain: ChainReport) -> Prune:
    """Draw the card and return the rules on screen."""
    with section("Prune"):
        if chain.is_packed:
            st.write("A packed archive is read and copied, not changed. Unpack it to prune it.")
            return Prune(str(chain.path))
        if len(chain.frames) < 2:
            st.write("There is one frame, and the last step of each line of training always stays.")
            return Prune(str(chain.path))
        st.write(
            "Removes steps that you do not need; the others keep every bit. A dry run shows what would "
            "happen, and changes nothing."
        )
        rules = _rules(chain)
        done = services.newest_job("archive", "prune", chain.path)
        plan = services.job_of(_work(rules, chain))
        at_work = next((job for job in (done, plan) if job is not None and job.is_running), None)
        if at_work is not None:
            job_card.running(at_work, "Pruning" if at_work is done else "Planning")
            return rules
        if done is not None and job_card.settled(done, "Pruning"):
            removed, freed = fmt.counted(len(done.result["removed"]), "step"), done.result["bytes_freed"]
            st.success(f"Pruned: {removed} removed, {fmt.size(freed)} freed.", icon=":material/check_circle:")
        if plan is not None:
            if job_card.settled(plan, "Planning"):
                _show_plan(chain, rules, plan.result)
        else:
            why = None if says_something(rules) else "Choose first what to keep."
            work = _work(rules, chain)
            job_card.start_button("Dry run", work, "rule", again=False, disabled=why is not None, help=why)
    return rules


def _rules(chain: ChainReport) -> Prune:
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
    with third:
        keep = pick_several("Keep these steps", steps, key="prune.keep")
    drop = chain.n_branches > 1 and st.toggle("Drop older lines of training", key="prune.branches")
    return Prune(
        str(chain.path),
        keep_every=int(every) or None,
        keep_last=int(last) or None,
        keep=tuple(keep),
        drop_branches=bool(drop),
    )


def _show_plan(chain: ChainReport, rules: Prune, document: dict[str, Any]) -> None:
    """Say what pruning would do, and ask for the word."""
    n_removed = len(document["removed"])
    if not n_removed:
        st.info("These rules keep every step.", icon=":material/info:")
        return
    figures = [
        ("Removed", fmt.count(n_removed), f"of {fmt.counted(len(chain.frames), 'frame')}"),
        ("Become keyframes", fmt.count(len(document["rekeyed"])), "bit for bit the same"),
        ("Size now", fmt.size(document["bytes_before"]), "measured"),
        (
            "Size after",
            fmt.size(document["bytes_after"]),
            "estimated" if document["rekeyed"] else "measured",
        ),
    ]
    facts(figures)
    table = _fates(document)
    with st.expander(f"What becomes of each frame ({fmt.count(len(table))})", icon=":material/table_rows:"):
        listing.show(table, "prune-plan", alt="Frames with what pruning would do to each")
    with st.container(horizontal=True, vertical_alignment="center"):
        sure = st.checkbox(
            f"Remove {fmt.counted(n_removed, 'step')} for good", key=f"prune.sure.{rules.words()}"
        )
        work = _work(dataclasses.replace(rules, apply=True), chain)
        job_card.start_button("Prune", work, "content_cut", disabled=not sure)


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
