"""The registry of long work, which every session shares, and how its workers are started."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import IO, Any

import streamlit as st
from inshrink_app.jobs.files import jobs_folder
from inshrink_app.jobs.registry import JobRegistry

__all__ = ["jobs", "start_worker"]


@st.cache_resource(show_spinner=False)
def jobs() -> JobRegistry:
    """Return the registry that all sessions share; without a state directory it forgets with the explorer."""
    folder = jobs_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return JobRegistry(start_worker)
    return JobRegistry(start_worker, folder)


def start_worker(request: Mapping[str, Any], errors: IO[bytes]) -> subprocess.Popen[str]:
    """Start the process that works on a request, in an empty folder.

    Only code that the reader has trusted, which the request then says, is given the user's environment:
    its worker starts it.
    """
    from inshrink_core.execution.process import minimal_environment, start_python, user_environment

    environment = user_environment() if request.get("trusted") else minimal_environment()
    return start_python(["-m", "inshrink_app.jobs.worker"], errors=errors, environment=environment)
