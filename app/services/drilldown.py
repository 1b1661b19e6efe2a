"""Details of a run: one tensor at a step or at several, and the change between two steps.

These questions are small, so this process answers them. Each reads only the tensors that it needs. Answers
are cached by the state of the files.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.recent import load_recent
from inshrink_app.server.roots import Address, list_folder, real_path, settings
from inshrink_app.services.archives import original_of
from inshrink_app.services.inside import answered, samples
from inshrink_app.services.opening import engine_of, opened, place_of
from numpy.typing import NDArray

import inshrink_core
from inshrink_core.analysis.anatomy import Anatomy, ValueHistogram, anatomy, value_histogram
from inshrink_core.analysis.movement import Moved
from inshrink_core.analysis.movement import moved_between as movement
from inshrink_core.chain import Archive
from inshrink_core.codec import DEFAULT_CODEC, QUANTIZED, weight_codecs
from inshrink_core.errors import InshrinkError
from inshrink_core.text import spread

_log = logging.getLogger(__name__)

ARCHIVE = "archive"
"""Names the stored form in the archive, in place of a codec."""

_READINGS = 6
"""The tensor, its predecessor, and up to two auxiliary tensors of each."""

_MAX_READ = 200_000_000
"""Largest number of bytes that histograms over time read."""

_MAX_OTHER_RUNS = 50
_MAX_HISTOGRAMS, _BINS_OVER_TIME = 24, 64


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
        Sensitivity to report; None, or one that the checkpoint lacks, for the first available one.

    Raises
    ------
    ServiceError
        The tensor cannot be read.
    """
    archive = subject.archive if subject.kind == "run" and way == ARCHIVE else None

    def look() -> Anatomy:
        engine: Any = engine_of(subject)[0]
        if way != ARCHIVE:
            return anatomy(engine, step, tensor, way, metric=metric)
        original = original_of(subject)
        against: Any = None if original is None else engine_of(original)[0]
        if archive is not None:
            engine = opened(str(archive.path)).engine
        return anatomy(engine, step, tensor, against=against, metric=metric)

    state = (engine_of(subject)[1], archive.nbytes if archive is not None else 0)
    seen = answered(("anatomy", str(subject.path), state, step, tensor, way, metric), look)
    if metric is not None and seen.metric is None:
        return drill_down(subject, step, tensor, way, None)
    return seen


def values_over_time(
    subject: Subject, tensor: str
) -> tuple[tuple[int, ...], NDArray[np.float64], NDArray[np.float64]]:
    """Return histograms of one tensor at up to 24 steps that cost at most 200 MB, with common bins.

    Returns
    -------
    tuple of int, ndarray, ndarray
        The steps; the edges of the bins; and the share of the values in each bin, ``[bins, steps]``.

    Raises
    ------
    ServiceError
        The tensor cannot be read.
    """
    engine, state = engine_of(subject)

    def count(step: int) -> ValueHistogram:
        return value_histogram(engine[step][tensor], QUANTIZED)

    most = min(_MAX_HISTOGRAMS, max(2, _MAX_READ // max(1, _nbytes_of(subject, tensor))))
    counted = {}
    for step in spread(subject.steps, most):
        with contextlib.suppress(ServiceError):  # The tensor may be absent at some steps.
            found = answered(("values", str(subject.path), state, step, tensor), partial(count, step))
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


def moved_since(subject: Subject, tensor: str, step: int) -> float | None:
    """Return the movement of a tensor since the previous step, relative to its size; None if unknown.

    Raises
    ------
    ServiceError
        The tensor cannot be read.
    """
    place = subject.steps.index(step)
    before = subject.steps[max(0, place - 1)]
    found = moved_between(subject, before, step, (tensor,)).tensors.get(tensor) if place else None
    return None if found is None else found[1].relative


def diff_cost(subject: Subject) -> int:
    """Return the number of bytes that `moved_between` reads."""
    return 2 * _nbytes_of(subject)


def moved_between(subject: Subject, first: int, second: int, only: tuple[str, ...] | None = None) -> Moved:
    """Return the change of every tensor, or of some, between two steps.

    Raises
    ------
    ServiceError
        The steps cannot be read.
    """

    def measure() -> Moved:
        engine: Any = engine_of(subject)[0]
        view = engine.sequential() if isinstance(engine, Archive) else engine
        return movement(view[first], view[second], only)

    return answered(("moved", str(subject.path), engine_of(subject)[1], first, second, only), measure)


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
    return tuple(known)[:_MAX_OTHER_RUNS]


@st.cache_resource(show_spinner=False)
def warm_up() -> None:
    """Load the slow parts of the engine once, in a thread."""
    threading.Thread(target=load_ahead, daemon=True).start()


def load_ahead() -> None:
    """Encode the smallest matrix of a bundled sample with the default codec, which takes long to load."""
    time.sleep(3.0)  # Until the page is drawn.
    try:
        for sample in samples()[:1]:
            run = inshrink_core.open(sample)
            specs = (spec for spec in run[run.steps[-1]].specs if len(spec.shape) > 1)
            anatomy(run, run.steps[-1], min(specs, key=lambda spec: spec.numel).key, DEFAULT_CODEC)
    except (InshrinkError, OSError, RuntimeError) as error:
        # RuntimeError: the explorer is ending and starts no more threads.
        _log.info("nothing was loaded ahead: %s", error)
