"""Whether an archive is sound: the two checks, and what they found."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.pages.archive.tables import Chain, Finding, Verdict
from inshrink_app.widgets import job_card, listing
from inshrink_app.widgets.formatting import bytes_text, counted

__all__ = ["show"]


def show(chain: Chain) -> None:
    """Offer to verify the archive, and say what that found."""
    with st.container(border=True):
        st.header("Is it sound?", anchor=False)
        jobs = {deep: services.verify_job(chain, deep=deep) for deep in (False, True)}
        at_work = next((job for job in jobs.values() if job is not None and job.is_running), None)
        if at_work is not None:
            job_card.running(at_work, "Verifying")
            return
        newest = max((job for job in jobs.values() if job), key=lambda job: job.started_at, default=None)
        if newest is None:
            st.write(
                f"Verifying checks the structure and every checksum; it reads {bytes_text(chain.nbytes)}. A "
                "deep check decodes every tensor of every frame too."
            )
        elif newest.state == "finished":
            _show_verdict(services.verdict(newest.result))
        else:
            job_card.stopped(newest, primary=False)
        with st.container(horizontal=True):
            if st.button("Verify", type="primary", icon=":material/verified:"):
                services.start_verify(chain, deep=False)
                st.rerun()
            if st.button("Verify deeply", icon=":material/troubleshoot:"):
                services.start_verify(chain, deep=True)
                st.rerun()


def _show_verdict(verdict: Verdict) -> None:
    """Say whether the archive is sound, and what is wrong with it."""
    looked = "checked and every tensor decoded" if verdict.deep else "checked"
    if verdict.ok:
        st.success(f"Sound: {counted(verdict.n_frames, 'frame')} {looked}.", icon=":material/check_circle:")
    else:
        st.error(
            f"{counted(len(verdict.problems), 'problem')}; {counted(verdict.n_frames, 'frame')} {looked}.",
            icon=":material/error:",
        )
        _findings(verdict.problems, "problems")
    if verdict.notes:
        st.caption("Left behind by a writer that was cut off; nothing committed is lost by it:")
        _findings(verdict.notes, "notes")


def _findings(findings: tuple[Finding, ...], name: str) -> None:
    """List what was found."""
    table = pd.DataFrame(findings, columns=["where", "what", "remedy"])
    listing.show(table, name, alt=f"What a verification found: {name}")
