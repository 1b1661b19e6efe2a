"""Prefetch: load in the background the code and files that the first look at a tensor needs."""

from __future__ import annotations

import logging
import threading

import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.inside import samples
from inshrink_app.services.opening import engine_of

import inshrink_core
from inshrink_core.analysis.anatomy import anatomy
from inshrink_core.errors import InshrinkError

_log = logging.getLogger(__name__)

_DELAY_SECONDS = 3.0
"""Delay until the page is drawn."""


def warm_up(subject: Subject) -> None:
    """Load the slow parts of the engine in the background, so that the first look at a tensor is quick.

    Only headers of the run are read; the codecs are tried on a bundled sample.
    """
    _warm_up(str(subject.path), subject)


@st.cache_resource(show_spinner=False, max_entries=16)
def _warm_up(path: str, _subject: Subject) -> threading.Timer:
    """Start once for each run."""
    timer = threading.Timer(_DELAY_SECONDS, _load_ahead, [_subject])
    timer.daemon = True
    timer.start()
    return timer


def _load_ahead(subject: Subject) -> None:
    """Open the run, and load and compile the codecs."""
    try:
        engine_of(subject)
        for sample in samples()[:1]:
            _try_codecs(str(sample))
    except (InshrinkError, ServiceError, OSError, RuntimeError) as error:
        # RuntimeError: the explorer is ending and starts no more threads.
        _log.info("nothing was loaded ahead: %s", error)


def _try_codecs(path: str) -> None:
    """Encode the smallest matrix of a run with the codecs that take long to load."""
    run = inshrink_core.open(path)
    step = run.steps[-1]
    matrices = (spec for spec in run[step].specs if spec.role == "weight" and len(spec.shape) >= 2)
    smallest = min(matrices, key=lambda spec: spec.numel)
    for codec in ("lattice", "inshrinkerator"):
        anatomy(run, step, smallest.key, codec)
