"""The registry of long work, which every session shares, and how its commands are started."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app.jobs.commands import PAGES, option
from inshrink_app.jobs.files import jobs_folder
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.widgets.tables import Problem

__all__ = ["jobs", "refusal", "start_command"]


@st.cache_resource(show_spinner=False)
def jobs() -> JobRegistry:
    """Return the registry that all sessions share; without a state directory it forgets with the explorer."""
    folder: Path | None = jobs_folder()
    try:
        jobs_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        folder = None
    return JobRegistry(start_command, folder, refuse=refusal)


def start_command(words: Sequence[str], is_trusted: bool) -> subprocess.Popen[str]:
    """Start `inshrink` in an empty folder.

    Only a command that runs code which the reader has trusted is given the user's environment.
    """
    from inshrink_core.execution.process import minimal_environment, start_python, user_environment

    return start_python(
        ["-m", "inshrink_core.cli", *words, "--json", "--progress", "jsonl"],
        errors=subprocess.PIPE,
        environment=user_environment() if is_trusted else minimal_environment(),
    )


def refusal(request: Mapping[str, Any]) -> Problem | None:
    """Say why a job may not begin: it would execute code that its reader has not seen as it is now."""
    from inshrink_core.plugins import plugin

    trusted = request.get("trusted") or {}
    for words in request["commands"]:
        if words[0] not in PAGES:
            return Problem("the explorer has no such job", words[0])
        if words[0] == "rehearse" and plugin("inshrink.tasks", words[1]) is None:
            # A file of code would be executed; only the command line does that.
            return Problem("the explorer rehearses shipped trainings only", words[1])
        if "--trust-run" not in words and "--evaluator" not in words:
            continue
        file = str(trusted.get("file", ""))
        given = option(words, "--evaluator")
        try:
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
        except OSError:
            digest = ""
        if not digest or digest != trusted.get("digest") or (given and given.rpartition(":")[0] != file):
            return Problem(
                "the evaluator is not the one that was trusted",
                file or words[1],
                "read it again, and say again that you trust it",
            )
    return None
