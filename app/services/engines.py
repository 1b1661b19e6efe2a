"""The engine's runs and archives that are open: a few, shared by all sessions, each opened once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st
from inshrink_app.services.failures import reported
from inshrink_app.services.inside import require_inside

if TYPE_CHECKING:
    from inshrink_core import Archive, Run

__all__ = ["Engines", "engines"]

_MOST_OPEN = 4
"""Headers of a run of 400 tensors and 200 checkpoints take some 100 MB of memory."""


class Engines:
    """Open runs and archives by path and a token that changes with their files, few enough for memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str], Run | Archive] = OrderedDict()
        self._opening: dict[tuple[str, str], threading.Lock] = {}

    def get(self, path: str, token: str) -> Run | Archive:
        """Return what is open, or open it; of two that ask at once the second waits for the first.

        Raises
        ------
        ServiceError
            It cannot be opened.
        """
        import inshrink_core

        key = (path, token)
        with self._lock:
            waits_for = self._opening.setdefault(key, threading.Lock())
        with waits_for:
            with self._lock:
                known = self._open.get(key)
                if known is not None:
                    self._open.move_to_end(key)
                    return known
            require_inside(Path(path))
            with reported():
                made = inshrink_core.open(path)
            self.put(path, token, made)
            return made

    def put(self, path: str, token: str, engine: Run | Archive) -> None:
        """Take over what somebody has opened; an earlier state of the same files is dropped."""
        with self._lock:
            for key in [key for key in self._open if key[0] == path]:
                del self._open[key]
            self._open[path, token] = engine
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            self._opening = {key: lock for key, lock in self._opening.items() if lock.locked()}

    def has(self, path: str, token: str) -> bool:
        """Return whether it is open already."""
        with self._lock:
            return (path, token) in self._open


@st.cache_resource(show_spinner=False)
def engines() -> Engines:
    """Return what all sessions share."""
    return Engines()
