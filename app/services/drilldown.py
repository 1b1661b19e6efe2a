"""Details of a run: one tensor at a step or over steps, and the change between two steps.

These questions are small, so this process answers them. Each reads only the tensors that it needs. Answers
are cached by the state of the files.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.recent import load_recent
from inshrink_app.server.roots import Address, list_folder, real_path, settings
from inshrink_app.services.archives import original_of
from inshrink_app.services.inside import reported, samples
from inshrink_app.services.opening import engine_at, engine_of, place_of
from numpy.typing import NDArray

from inshrink_core.analysis.anatomy import Anatomy, ValueHistogram, anatomy, value_histogram
from inshrink_core.analysis.movement import Moved
from inshrink_core.analysis.movement import moved_between as movement
from inshrink_core.analysis.trajectory import Trajectory, trajectory
from inshrink_core.codec import QUANTIZED, weight_codecs

_log = logging.getLogger(__name__)

ARCHIVE = "archive"
"""Names the stored form in the archive, in place of a codec."""

_READINGS = 6
"""The tensor, its predecessor, and up to two auxiliary tensors of each."""

_COURSE_BYTES = 200_000_000
"""Largest number of bytes that a course reads by default."""

_MOST_OTHER_RUNS = 50
_MOST_HISTOGRAMS, _BINS_OVER_TIME = 24, 64

_Seen = TypeVar("_Seen")


def stored_ways(subject: Subject, step: int) -> tuple[str, ...]:
    """Return the forms in which a tensor can be shown: the archive's, or that of a codec."""
    if subject.kind == "archive":
        return (ARCHIVE,)
    archived = subject.archive is not None and step in subject.archive.steps
    return (ARCHIVE, *weight_codecs()) if archived else weight_codecs()


def _nbytes_of(subject: Subject, tensor: str | None = None) -> int:
    """Return the raw bytes of one weight or buffer of the last checkpoint, or of all of them."""
    return sum(row.nbytes for row in subject.model_tensors if tensor is None or row.name == tensor)


def drill_cost(subject: Subject, tensor: str) -> int:
    """Return the number of bytes that `drill_down` may read."""
    return _READINGS * _nbytes_of(subject, tensor)


def drill_down(subject: Subject, step: int, tensor: str, way: str, metric: str | None) -> Anatomy:
    """Analyse one tensor of one step.

    Parameters
    ----------
    subject
        A run or an archive.
    step, tensor
        The step and the name of the tensor.
    way
        One of `stored_ways`.
    metric
        Sensitivity to plot against the magnitude; None for the first available one.

    Raises
    ------
    ServiceError
        The tensor cannot be read.
    """
    stamp = _stamp(subject) if way == ARCHIVE else engine_of(subject)[1]

    def look() -> Anatomy:
        engine: Any = engine_of(subject)[0]
        if way != ARCHIVE:
            return anatomy(engine, step, tensor, way, metric=metric)
        original = original_of(subject)
        against: Any = None if original is None else engine_of(original)[0]
        return anatomy(_archive_of(subject) or engine, step, tensor, against=against, metric=metric)

    return _seen((str(subject.path), stamp, step, tensor, way, metric), look)


def _stamp(subject: Subject) -> str:
    """Return a stamp that changes with the run or its archive."""
    return f"{engine_of(subject)[1]}-{subject.archive.nbytes if subject.archive is not None else 0}"


@st.cache_resource(show_spinner=False, max_entries=400)
def _seen(asked: tuple[Hashable, ...], _look: Callable[[], _Seen]) -> _Seen:
    """Compute an answer once for each question; the question includes the stamp of the files."""
    with reported():
        return _look()


def _archive_of(subject: Subject) -> Any:
    """Open the archive beside a run; None for an archive."""
    chain = subject.archive if subject.kind == "run" else None
    return None if chain is None else engine_at(str(chain.path), f"{chain.nbytes}-{len(chain.frames)}")


def values_at(subject: Subject, step: int, tensor: str) -> ValueHistogram:
    """Return the histogram of one tensor at one step, as the run or archive stores it.

    Raises
    ------
    ServiceError
        The tensor cannot be read.
    """

    def count() -> ValueHistogram:
        return value_histogram(engine_of(subject)[0][step][tensor], QUANTIZED)

    return _seen((str(subject.path), engine_of(subject)[1], step, tensor, "values"), count)


def values_over_time(
    subject: Subject, tensor: str
) -> tuple[tuple[int, ...], NDArray[np.float64], NDArray[np.float64]]:
    """Return histograms of one tensor at up to 24 steps, with common bins.

    Returns
    -------
    tuple of int, ndarray, ndarray
        The steps; the edges of the bins; and the share of the values in each bin, ``[bins, steps]``.

    Raises
    ------
    ServiceError
        The tensor cannot be read.
    """
    steps = course_steps(subject, tensor, every=False)
    n = min(len(steps), _MOST_HISTOGRAMS)
    steps = tuple(steps[round(i * (len(steps) - 1) / max(1, n - 1))] for i in range(n))
    counted = {}
    for step in steps:
        with contextlib.suppress(ServiceError):  # The tensor may be absent at some steps.
            found = values_at(subject, step, tensor)
            if found.edges.size > 1:
                counted[step] = found
    if not counted:
        raise ServiceError("no step has finite values of this tensor", tensor)
    low = min(float(histogram.edges[0]) for histogram in counted.values())
    high = max(float(histogram.edges[-1]) for histogram in counted.values())
    edges = np.linspace(low, high, _BINS_OVER_TIME + 1)
    columns = []
    for histogram in counted.values():
        below = np.concatenate([[0.0], np.cumsum(histogram.counts.sum(axis=0))])
        columns.append(np.diff(np.interp(edges, histogram.edges, below)) / max(1.0, below[-1]))
    return tuple(counted), edges, np.stack(columns, axis=1)


def course_steps(subject: Subject, tensor: str, *, every: bool) -> tuple[int, ...]:
    """Return the steps that a course reads: all of them, or evenly spread steps that cost at most 200 MB."""
    most = max(2, _COURSE_BYTES // max(1, _nbytes_of(subject, tensor)))
    n = len(subject.steps)
    if every or n <= most:
        return subject.steps
    return tuple(subject.steps[round(i * (n - 1) / (most - 1))] for i in range(most))


def course(subject: Subject, tensor: str, *, every: bool = False) -> Trajectory:
    """Return statistics of one tensor over the steps.

    Raises
    ------
    ServiceError
        The tensor cannot be read.
    """
    steps = course_steps(subject, tensor, every=every)

    def follow() -> Trajectory:
        return trajectory(engine_of(subject)[0], tensor, steps=steps, archive=_archive_of(subject))

    return _seen((str(subject.path), _stamp(subject), tensor, steps), follow)


def diff_cost(subject: Subject) -> int:
    """Return the number of bytes that `moved_between` reads."""
    return 2 * _nbytes_of(subject)


def moved_between(subject: Subject, first: int, second: int) -> Moved:
    """Return the change of every tensor between two steps.

    Raises
    ------
    ServiceError
        The steps cannot be read.
    """

    def measure() -> Moved:
        engine: Any = engine_of(subject)[0]
        return movement(engine[first], engine[second])

    return _seen((str(subject.path), engine_of(subject)[1], first, second), measure)


def other_runs(subject: Subject) -> tuple[Path, ...]:
    """Return runs and archives to compare a run with: recent ones, its neighbours, and samples."""
    recent = (real_path(row.path) for row in load_recent())
    known = {
        real: None
        for real in recent
        if settings().allows(real) and (isinstance(real, Address) or place_of(real).exists())
    }
    if settings().may_write(subject.place.parent):
        try:
            entries = list_folder(subject.place.parent).entries
            known |= {entry.path: None for entry in entries if entry.kind in ("run", "archive")}
        except OSError as error:
            _log.info("the neighbours of a run cannot be listed: %s", error)
    known |= dict.fromkeys(samples())
    known.pop(subject.path, None)
    return tuple(known)[:_MOST_OTHER_RUNS]
