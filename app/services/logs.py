"""Metrics of a training from any file, by columns that the user chooses. The link holds the choice."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import streamlit as st
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.dropping import dropped, keep_dropped
from inshrink_app.services.inside import is_inside, reported
from inshrink_app.services.opening import resolve

from inshrink_core.formats import MetricsFile, read_metrics

_NAMES = re.compile(r"\.(csv|tsv|jsonl|ndjson)\Z|\Atrainer_state\.json\Z|tfevents")
"""Names of files that may hold metrics."""

_MOST_FILES = 50
_MOST_SCANNED = 20_000
_DEEPEST = 3


class LogChoice(NamedTuple):
    """A file of metrics, its step column, and its metric columns."""

    file: str
    step_column: str
    columns: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the choice as text for a link."""
        return json.dumps([self.file, self.step_column, *self.columns], ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> LogChoice:
        """Parse the text of a link.

        Raises
        ------
        ServiceError
            The text is not a choice.
        """
        try:
            file, step_column, *columns = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            file, step_column, columns = None, None, []
        if not all(isinstance(word, str) for word in (file, step_column, *columns)) or not columns:
            raise ServiceError("the link names no metrics", remedy="choose them on the Overview")
        return cls(file, step_column, tuple(columns))


def chosen_log(said: str) -> LogChoice | None:
    """Return the choice in a link, with the real path of its file; None if it is invalid or not allowed."""
    with contextlib.suppress(ServiceError):
        choice = LogChoice.parse(said)
        return choice._replace(file=str(resolve(choice.file)))
    return None


def log_files(shown: Subject) -> tuple[Path, ...]:
    """Return files that may hold metrics: of the run, of its folder, and dropped ones."""
    place = shown.place
    found = [path for path in islice(_below(place), _MOST_SCANNED) if _NAMES.search(path.name)]
    found = [path for path in dict.fromkeys(found) if is_inside(Path(os.path.realpath(path)))]
    return (*found[:_MOST_FILES], *(one.path for one in dropped() if one.is_log))


def _below(place: Path) -> Iterator[Path]:
    """Yield the files of a run, top levels first, then the files beside it."""
    folders = [(place, 0)] if place.is_dir() else []
    while folders:
        folder, depth = folders.pop(0)
        for path in _entries(folder):
            if not path.is_dir():
                yield path
            elif depth < _DEEPEST and not path.is_symlink() and path.suffix != ".inshrink":
                folders.append((path, depth + 1))
    yield from (path for path in _entries(place.parent) if not path.is_dir())


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return []


def metrics_of(text: str) -> MetricsFile:
    """Return the columns of a file of metrics.

    Raises
    ------
    ServiceError
        The file is outside the roots, cannot be read, or has no metrics.
    """
    return _metrics_at(*_state(text))


def _state(text: str) -> tuple[str, int, int]:
    """Return a file's real path, time and size, which are the cache key of its content."""
    path = resolve(text)
    with reported():
        status = path.stat()
    return str(path), status.st_mtime_ns, status.st_size


@st.cache_resource(show_spinner=False, max_entries=2)
def _metrics_at(path: str, mtime_ns: int, size: int) -> MetricsFile:
    """Read a file; cached by its path, time and size."""
    with reported():
        return read_metrics(path)


def keep_log(name: str, content: BinaryIO) -> Path:
    """Store a dropped file of metrics and return its path.

    Raises
    ------
    ServiceError
        The file is too large, or has no metrics.
    """

    def read(place: Path) -> Path:
        metrics_of(str(place))
        return place

    return keep_dropped([(name, content)], read)


def log_of(choice: LogChoice) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return metrics by step.

    Raises
    ------
    ServiceError
        The file cannot be read, or lacks the columns.
    """
    return _log_at(*_state(choice.file), choice.step_column, choice.columns)


@st.cache_resource(show_spinner=False, max_entries=2)
def _log_at(
    path: str, mtime_ns: int, size: int, step_column: str, columns: tuple[str, ...]
) -> dict[str, tuple[tuple[int, float], ...]]:
    """Select columns of a file; a million rows take seconds."""
    found = _metrics_at(path, mtime_ns, size)
    with reported():
        log = found.log(step_column, columns)
    return {name: tuple(series) for name, series in log.items()}


def with_log(shown: Subject, said: str) -> Subject:
    """Return a run with the metrics that a link chooses.

    Raises
    ------
    ServiceError
        The link or its file cannot be read.
    """
    return dataclasses.replace(shown, log=log_of(LogChoice.parse(said)))
