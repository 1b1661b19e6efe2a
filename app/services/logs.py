"""Metrics of a training from a file that the user chooses. The link holds the choice."""

from __future__ import annotations

import dataclasses

import streamlit as st
from inshrink_app.model import Subject
from inshrink_app.services.inside import reported
from inshrink_app.services.opening import resolve

from inshrink_core.formats import read_metrics


def with_log(shown: Subject, text: str) -> Subject:
    """Return a run with the metrics of another file, by its untrusted path.

    Raises
    ------
    ServiceError
        The file is outside the roots, cannot be read, or has no metrics or steps.
    """
    path = resolve(text)
    with reported():
        status = path.stat()
    return dataclasses.replace(shown, log=_log_at(str(path), status.st_mtime_ns, status.st_size))


@st.cache_resource(show_spinner=False, max_entries=2)
def _log_at(path: str, mtime_ns: int, size: int) -> dict[str, tuple[tuple[int, float], ...]]:
    """Read a file; a million rows take seconds."""
    with reported():
        return {name: tuple(series) for name, series in read_metrics(path).log().items()}
