"""Prefetch: load in the background the code that the first look at a tensor needs."""

from __future__ import annotations

import logging
import threading

import streamlit as st
from inshrink_app.services.inside import samples

import inshrink_core
from inshrink_core.analysis.anatomy import anatomy
from inshrink_core.codec import DEFAULT_CODEC
from inshrink_core.errors import InshrinkError

_DELAY_SECONDS = 3.0
"""Delay until the page is drawn."""


@st.cache_resource(show_spinner=False)
def warm_up() -> threading.Timer:
    """Load the slow parts of the engine once, by a look at a tensor of a bundled sample."""
    timer = threading.Timer(_DELAY_SECONDS, load)
    timer.daemon = True
    timer.start()
    return timer


def load() -> None:
    """Encode the smallest matrix of the sample with the default codec, which takes long to load."""
    try:
        for sample in samples()[:1]:
            run = inshrink_core.open(sample)
            specs = [
                spec for spec in run[run.steps[-1]].specs if spec.role == "weight" and len(spec.shape) > 1
            ]
            anatomy(run, run.steps[-1], min(specs, key=lambda spec: spec.numel).key, DEFAULT_CODEC)
    except (InshrinkError, OSError, RuntimeError) as error:
        # RuntimeError: the explorer is ending and starts no more threads.
        logging.getLogger(__name__).info("nothing was loaded ahead: %s", error)
