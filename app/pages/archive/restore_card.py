"""Restoring the files of a step into a folder, with the digest of each."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.job import Job
from inshrink_app.pages.archive.tables import ArchiveChoice
from inshrink_app.widgets import archive_picker, job_card, listing, problem
from inshrink_app.widgets.formatting import bytes_text, count_text, counted, inked
from inshrink_app.widgets.tables import ServiceError, Subject

__all__ = ["show"]

_LAYOUTS = {"same": "As the run was", "safetensors": "safetensors", "torch": "torch"}


def show(shown: Subject, archives: tuple[ArchiveChoice, ...]) -> None:
    """Draw the card.

    Parameters
    ----------
    shown
        What the page is about.
    archives
        Archives to restore from, at least one.
    """
    with st.container(border=True):
        st.header("Restore files", anchor=False)
        job = services.newest_restore(shown)
        is_running = job is not None and job.is_running
        archive, step, layout = _choices(archives)
        _form(shown, archive, step, layout, is_running=is_running)
        if job is not None and is_running:
            job_card.running(job, "Restoring")
        elif job is not None and job.state == "finished":
            _written(job)
        elif job is not None:
            job_card.stopped(job, primary=False)


def _choices(archives: tuple[ArchiveChoice, ...]) -> tuple[ArchiveChoice, int, str]:
    """Draw what is restored, and as what."""
    names = {str(one.path): one for one in archives}
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        archive = archives[0]
        if len(archives) > 1:
            picked = st.selectbox(
                "From",
                list(names),
                format_func=lambda path: archive_picker.choice_text(names[path]),
                key="restore.archive",
            )
            archive = names.get(str(picked), archive)
        steps = list(archive.steps)
        if st.session_state.get("restore.step") not in steps:
            st.session_state["restore.step"] = steps[-1]
        step = st.selectbox("Step", steps, format_func=count_text, key="restore.step", width=180)
        layout = st.segmented_control(
            "Format",
            list(_LAYOUTS),
            format_func=lambda name: inked(_LAYOUTS[name]),
            default="same",
            key="restore.layout",
        )
    return archive, int(step), str(layout or "same")


def _form(shown: Subject, archive: ArchiveChoice, step: int, layout: str, *, is_running: bool) -> None:
    """Ask for the folder, and begin."""
    suggested = services.suggested_folder(shown, archive.path, step)
    if st.session_state.get("restore.suggested") != suggested and not is_running:
        st.session_state["restore.suggested"] = suggested
        st.session_state["restore.target"] = suggested
    text = st.text_input("Folder", key="restore.target", help="A new folder, or an empty one.")
    if st.button("Restore", icon=":material/settings_backup_restore:", disabled=is_running):
        try:
            target = services.restore_target(text)
        except ServiceError as error:
            problem.show(error.problem)
            return
        services.start_restore(shown, archive.path, step, layout, target)
        st.rerun()


def _written(job: Job) -> None:
    """Say what was written."""
    document = services.read_result(job)
    if not isinstance(document, dict):
        st.caption("What this restore wrote cannot be read any more.")
        return
    found = services.restored(document)
    total = sum(one.nbytes for one in found.files)
    st.success(
        f"Step {count_text(found.step)} restored: {counted(len(found.files), 'file')}, {bytes_text(total)}.",
        icon=":material/check_circle:",
    )
    st.code(found.target, language=None, wrap_lines=True)
    table = pd.DataFrame(found.files, columns=["file", "bytes", "SHA-256"])
    listing.show(table, "restored", alt="Restored files with size and SHA-256", wide=["SHA-256"])
