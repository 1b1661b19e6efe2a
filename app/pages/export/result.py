"""What an export made: its ratio, its digest, how to restore it, and the file itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.pages.export.form import ExportRequest
from inshrink_app.widgets import download, problem
from inshrink_app.widgets.formatting import (
    bytes_text,
    count_text,
    markdown_text,
    ratio_text,
    steps_text,
    value_text,
)
from inshrink_app.widgets.tables import Problem, Subject

__all__ = ["of", "show"]


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


_SUFFIX = ".inshrink"


def of(shown: Subject, request: ExportRequest, target: str) -> tuple[str, str]:
    """Return the command line and the Python lines that write the same.

    Parameters
    ----------
    shown
        The run or archive on screen.
    request
        What is asked for.
    target
        Where to, as typed.
    """
    if request.kind == "pack":
        command, line = _pack(str(shown.path), target)
        return command, f"import inshrink_core\n\n{line}"
    if request.kind == "step":
        return _step(shown, request, target)
    return _chain(shown, request, target)


def _pack(archive: str, target: str) -> tuple[str, str]:
    """Return how an archive is copied into one file."""
    return (
        f"inshrink export {shlex.quote(archive)} --pack {shlex.quote(target)}",
        f"inshrink_core.verbs.pack({archive!r}, {target!r})",
    )


def _chain(shown: Subject, request: ExportRequest, target: str) -> tuple[str, str]:
    """Return how a chain is written; one file is packed from a folder."""
    path = str(shown.path)
    made = f"{target.removesuffix(_SUFFIX)}-folder{_SUFFIX}" if request.packed else target
    optimizer = "" if request.optimizer is None else f"--optimizer {request.optimizer} "
    settings = "".join(f" {_option(name, value)}" for name, value in request.config.items())
    is_whole = request.steps == shown.steps
    chosen = "" if is_whole else f" --steps {','.join(map(str, request.steps))}"
    command = (
        f"inshrink compress {shlex.quote(path)} -o {shlex.quote(made)} --codec {request.codec}{settings} "
        f"{optimizer}--keyframe-every {request.keyframe_every}{chosen}"
    )
    steps = "" if is_whole else f"    steps={list(request.steps)!r},\n"
    python = (
        f"import inshrink_core\n\nreport = inshrink_core.compress(\n    {path!r},\n    {made!r},\n"
        f"    codec={request.codec!r},\n    config={dict(request.config)!r},\n"
        f"    optimizer={request.optimizer!r},\n    keyframe_every={request.keyframe_every},\n{steps})\n"
        "print(report.size.ratio_total)"
    )
    if request.packed:
        packing, line = _pack(made, target)
        command, python = f"{command}\n{packing}", f"{python}\n{line}"
    return command, python


def _option(name: str, value: Any) -> str:
    """Return a setting as an option of the command line."""
    if name in ("coarseness", "bins"):
        return f"--{name} {value}"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"--set {shlex.quote(f'{name}={text}')}"


def _step(shown: Subject, request: ExportRequest, target: str) -> tuple[str, str]:
    """Return how one step is written; from a run, through an archive that keeps every bit of it."""
    step, archive = request.steps[0] if request.steps else 0, str(shown.path)
    command, python = "", "import inshrink_core\n\n"
    if shown.kind == "run":
        archive = f"{target.removesuffix(_SUFFIX)}-exact{_SUFFIX}"
        optimizer = "drop" if request.weights_only else "exact"
        command = (
            f"inshrink compress {shlex.quote(str(shown.path))} -o {shlex.quote(archive)} --codec lossless "
            f"--optimizer {optimizer} --steps {step}\n"
        )
        python += (
            f"inshrink_core.compress(\n    {str(shown.path)!r},\n    {archive!r},\n    codec='lossless',\n"
            f"    optimizer={optimizer!r},\n    steps=[{step}],\n)\n"
        )
    kept = ""
    if request.weights_only:
        kept = " --weights-only" + (" --exact" if request.exact else f" --ratio {request.ratio:g}")
    command += f"inshrink export {shlex.quote(archive)} --step {step}{kept} -o {shlex.quote(target)}"
    how = f"weights_only={request.weights_only}, exact={request.exact}, ratio={request.ratio:g}"
    python += (
        f"report = inshrink_core.verbs.export({archive!r}, {target!r}, step={step}, {how})\n"
        "print(report.nbytes)"
    )
    return command, python
