"""The registry of long work, which every session shares."""

from __future__ import annotations

import streamlit as st
from inshrink_app.job_files import jobs_folder
from inshrink_app.jobs import JobRegistry

__all__ = ["jobs"]


@st.cache_resource(show_spinner=False)
def jobs() -> JobRegistry:
    """Return the registry that all sessions share; without a state directory it forgets with the explorer."""
    folder = jobs_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return JobRegistry()
    return JobRegistry(folder=folder)
