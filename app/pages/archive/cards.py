"""Whether an archive is sound, and what can go: two checks, a dry run of pruning, and only then the deed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.widgets import facts, job_card, listing
from inshrink_app.widgets.formatting import bytes_text, count_text, counted

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport

__all__ = ["PruneRules", "prune", "verify"]

_FATES = {"kept": "kept", "reference": "kept, others need it", "removed": "removed"}
_WRITTEN = {"rekeyed": ", becomes a keyframe", "rewritten": ", written anew"}


class PruneRules(NamedTuple):
    """What stays. The last step of each branch, and where its training was restored from, always do."""

    keep_every: int | None = None
    keep_last: int | None = None
    keep: tuple[int, ...] = ()
    drop_branches: bool = False
    smallest: bool = False

    @property
    def says_something(self) -> bool:
        """Whether any rule says what to keep."""
        return bool(self.keep_every or self.keep_last or self.keep)

    def words(self, chain: ChainReport) -> list[str]:
        """Return the command that plans by these rules."""
        words = ["prune", str(chain.path)]
        words += ["--keep-every", str(self.keep_every)] if self.keep_every else []
        words += ["--keep-last", str(self.keep_last)] if self.keep_last else []
        words += ["--keep", ",".join(map(str, self.keep))] if self.keep else []
        words += ["--drop-branches"] if self.drop_branches else []
        return [*words, "--smallest"] if self.smallest else words


def verify(chain: ChainReport) -> None:
    """Offer to verify the archive, and say what that found."""
    with st.container(border=True):
        st.header("Is it sound?", anchor=False)
        keys = {deep: ("verify", *chain.state, "deep" if deep else "shallow") for deep in (False, True)}
        jobs = [job for job in map(services.job_of, keys.values()) if job is not None]
        at_work = next((job for job in jobs if job.is_running), None)
        if at_work is not None:
            job_card.running(at_work, "Verifying")
            return
        newest = max(jobs, key=lambda job: job.started_at, default=None)
        if newest is None:
            st.write(
                f"Verifying checks the structure and every checksum; it reads {bytes_text(chain.nbytes)}. A "
                "deep check decodes every tensor of every frame too."
            )
        elif job_card.settled(newest, "Verifying"):
            _verdict(newest.result)
        words = ["verify", str(chain.path)]
        with st.container(horizontal=True):
            if st.button("Verify", type="primary", icon=":material/verified:"):
                services.start_job(keys[False], [words], chain.path)
                st.rerun()
            if st.button("Verify deeply", icon=":material/troubleshoot:"):
                services.start_job(keys[True], [[*words, "--deep"]], chain.path)
                st.rerun()


def _verdict(document: dict[str, Any]) -> None:
    """Say whether the archive is sound, and what is wrong with it."""
    looked = "checked and every tensor decoded" if document["deep"] else "checked"
    frames, problems = counted(document["frames"], "frame"), document["problems"]
    if document["ok"]:
        st.success(f"Sound: {frames} {looked}.", icon=":material/check_circle:")
    else:
        st.error(f"{counted(len(problems), 'problem')}; {frames} {looked}.", icon=":material/error:")
        _findings(problems, "problems")
    if document["notes"]:
        st.caption("Left behind by a writer that was cut off; nothing committed is lost by it:")
        _findings(document["notes"], "notes")


def _findings(findings: list[dict[str, Any]], name: str) -> None:
    """List what was found."""
    table = pd.DataFrame(findings)[["where", "what", "remedy"]]
    listing.show(table, name, alt=f"What a verification found: {name}")


def prune(chain: ChainReport) -> PruneRules:
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
        done, plan = services.job_of(("prune", str(chain.path))), services.job_of(_plan_key(chain, rules))
        at_work = next((job for job in (done, plan) if job is not None and job.is_running), None)
        if at_work is not None:
            job_card.running(at_work, "Pruning" if at_work is done else "Planning")
            return rules
        if done is not None and job_card.settled(done, "Pruning"):
            removed, freed = counted(len(done.result["removed"]), "step"), done.result["bytes_freed"]
            st.success(
                f"Pruned: {removed} removed, {bytes_text(freed)} freed.", icon=":material/check_circle:"
            )
        if plan is not None:
            if job_card.settled(plan, "Planning"):
                _show_plan(chain, rules, plan.result)
        elif st.button(
            "Dry run",
            icon=":material/rule:",
            disabled=not rules.says_something,
            help="Say first what to keep." if not rules.says_something else None,
        ):
            services.start_job(_plan_key(chain, rules), [rules.words(chain)], chain.path, again=False)
            st.rerun()
    return rules


def _plan_key(chain: ChainReport, rules: PruneRules) -> tuple[str, ...]:
    """Name a plan: of these rules, and of the archive as it is."""
    return ("plan", *chain.state, *map(str, rules))


def _rules(chain: ChainReport) -> PruneRules:
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


def _show_plan(chain: ChainReport, rules: PruneRules, document: dict[str, Any]) -> None:
    """Say what pruning would do, and ask for the word."""
    n_removed = len(document["removed"])
    if not n_removed:
        st.info("By these rules every step stays.", icon=":material/info:")
        return
    figures = [
        ("Removed", count_text(n_removed), f"of {counted(len(chain.frames), 'frame')}"),
        ("Become keyframes", count_text(len(document["rekeyed"])), "bit for bit the same"),
        ("Size now", bytes_text(document["bytes_before"]), "measured"),
        (
            "Size after",
            bytes_text(document["bytes_after"]),
            "estimated" if document["rekeyed"] else "measured",
        ),
    ]
    facts.row(figures)
    table = _fates(document)
    with st.expander(f"What becomes of each frame ({count_text(len(table))})", icon=":material/table_rows:"):
        listing.show(table, "prune-plan", alt="Frames with what pruning would do to each")
    with st.container(horizontal=True, vertical_alignment="center"):
        sure = st.checkbox(f"Remove {counted(n_removed, 'step')} for good", key=f"prune.sure.{hash(rules)}")
        if st.button("Prune", icon=":material/content_cut:", disabled=not sure):
            key = ("prune", str(chain.path))
            services.start_job(key, [[*rules.words(chain), "--apply"]], chain.path)
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
