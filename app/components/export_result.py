"""What an export made: its ratio, its digest, how to restore it, and the file itself."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.components import download, problem
from inshrink_app.formatting import bytes_text, count_text, markdown_text, ratio_text, steps_text, value_text
from inshrink_app.job import Job
from inshrink_app.tables import Problem, Subject

__all__ = ["show"]


def show(shown: Subject, job: Job) -> None:
    """Draw the result of a finished export."""
    made = services.read_result(job)
    with st.container(border=True):
        if not isinstance(made, dict):
            problem.show(Problem("what this export made cannot be told any more", remedy="export again"))
            return
        target = Path(str(made["target"]))
        st.header("Exported", anchor=False)
        st.code(str(target), language=None, wrap_lines=True)
        if not target.exists():
            st.warning("It is not there any more.", icon=":material/warning:")
            return
        _facts(made)
        if made["left_out"]:
            st.caption(markdown_text("Left out: " + ", ".join(map(str, made["left_out"])) + "."))
        what = "SHA-256 of the file" if made["is_packed"] else "SHA-256 of the manifest"
        st.caption(f"{what}, by which a copy is known")
        st.code(str(made["digest"]), language=None, wrap_lines=True)
        st.caption("Restore")
        st.code(_restore_command(made, target), language=None, wrap_lines=True)
        _hand_over(shown, made, target)


def _facts(made: dict[str, Any]) -> None:
    """Draw the figures of the export; all of them measured."""
    steps = [int(step) for step in made["steps"]]
    error = made["relative_error"]
    facts = [
        ("Size", bytes_text(made["nbytes"]), f"of {bytes_text(made['raw_bytes'])} raw"),
        ("Ratio in all", ratio_text(made["ratio_total"]), "measured"),
        ("Ratio, weights", ratio_text(made["ratio_weights"]), "measured"),
        ("Steps", count_text(len(steps)), steps_text(steps)),
        (
            "Relative error",
            "none" if error == 0 else "–" if error is None else value_text(float(error)),
            "of the weights",
        ),
    ]
    with st.container(horizontal=True):
        for label, value, below in facts:
            st.metric(label, value, delta=below, delta_color="off", delta_arrow="off", border=True)


def _restore_command(made: dict[str, Any], target: Path) -> str:
    """Return the command that restores what was exported."""
    archive = shlex.quote(str(target))
    if made["kind"] == "step":
        form = " --format safetensors" if made["weights_only"] else ""
        return f"inshrink restore {archive}{form} -o restored/"
    return f"inshrink restore {archive} --step {made['steps'][-1]} -o restored/"


def _hand_over(shown: Subject, made: dict[str, Any], target: Path) -> None:
    """Offer the file, or to make one of a folder."""
    if not made["is_packed"]:
        with st.container(horizontal=True, vertical_alignment="center"):
            if st.button("Copy as one packed file", icon=":material/folder_zip:"):
                job = services.start_pack(shown, target)
                state.publish(job=job.job_id)
                st.rerun()
            st.caption("A folder cannot be downloaded as it is.")
        return
    offered = services.download_url(str(target))
    if offered is None:
        st.caption("The file lies outside of the folders that the explorer may see.")
        return
    url, nbytes = offered
    download.file_link(f"Download {markdown_text(target.name)}", url, nbytes)
