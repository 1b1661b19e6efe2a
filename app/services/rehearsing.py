"""Failure rehearsals: the shipped trainings, and what was found, as ``inshrink rehearse --json`` has it."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app.jobs import Job
from inshrink_app.jobs.files import jobs_folder
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.inside import reported
from inshrink_app.services.jobs import all_jobs
from inshrink_app.services.opening import resolve

from inshrink_core.execution import ResultStore
from inshrink_core.plugins import plugin, plugins
from inshrink_core.samples import is_trusted_sample

_log = logging.getLogger(__name__)

_MAX_BYTES = 8_000_000
"""A rehearsal of 20 seeds and 100 saves takes about 200 kB."""

_MOST_KEPT = 1_000
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError)
_FIGURES = ("excess", "excess_half_width", "noise", "ratio_weights", "ratio_total")


def training_of(subject: Subject) -> Any:
    """Return the shipped training of a run: of a bundled sample, known by its digest; None of others.

    It is a task of the laboratory.
    """
    with contextlib.suppress(ServiceError), reported():
        is_named = subject.kind == "run" and subject.name in trainings() and subject.path.is_dir()
        if is_named and is_trusted_sample(subject.path):
            return training_named(subject.name)
    return None


def trainings() -> tuple[str, ...]:
    """Return the names of the shipped trainings."""
    return tuple(plugins("inshrink.tasks"))


@st.cache_resource(show_spinner=False, max_entries=32)
def training_named(name: str) -> Any:
    """Return a shipped training; None where it cannot be made here, as without an extra package."""
    point = plugin("inshrink.tasks", name)
    try:
        return None if point is None else point.load()()
    except Exception as error:
        _log.info("the training %s cannot be made: %s", name, error)
    return None


def rehearsals_folder() -> Path:
    """Return where finished trainings are kept, for all codecs."""
    return jobs_folder().with_name("rehearsals")


def finished_rehearsals(training: str) -> tuple[Job, ...]:
    """Return the rehearsals of a training that were finished, the newest first."""
    return tuple(
        job
        for job in all_jobs()
        if job.work.topic == "rehearse" and job.state == "finished" and _asked(job).task == training
    )


def rehearsal_so_far(job: Job) -> dict[str, Any] | None:
    """Return the pairs of trainings that a running rehearsal has finished; None before the first.

    Its report so far is in the folder of the rehearsal, with the pairs of earlier rehearsals among its own.
    """
    asked = _asked(job)
    wanted = (asked.task, asked.codec, asked.restores, asked.steps)
    for one in _kept(rehearsals_folder()):
        if (one["task"], one["codec"], len(one["restored_at"]), one.get("steps")) == wanted:
            return {**one, "curves": [row for row in one["curves"] if row["seed"] < asked.seeds]}
    return None


def _asked(job: Job) -> Any:
    """Return the request of a rehearsal, which is of the laboratory."""
    return job.requests[-1]


def _kept(folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the reports in the folder of `inshrink rehearse -o`; what cannot be read is passed over."""

    def parse(document: Any) -> dict[str, Any]:
        try:
            return checked(document)
        except OverflowError as error:
            raise ValueError(str(error)) from error

    return tuple(one for _, one in ResultStore(folder / "reports", "rehearsal", parse).results(_MOST_KEPT))


def checked(document: Any) -> dict[str, Any]:
    """Return the document of a rehearsal, which is untrusted, where a page can show it.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is none.
    """
    curves: list[dict[str, Any]] = [
        {
            **row,
            "seed": int(row["seed"]),
            "steps": [int(step) for step in row["steps"]],
            **{name: [float(value) for value in row[name]] for name in ("uninterrupted", "restored")},
        }
        for row in document["curves"]
    ]
    if any(one["steps"] != curves[0]["steps"] or not one["steps"] for one in curves):
        raise ValueError("its curves are of different steps")
    if any(not len(one["steps"]) == len(one["uninterrupted"]) == len(one["restored"]) for one in curves):
        raise ValueError("its curves differ in length")
    figures = {name: None if document[name] is None else float(document[name]) for name in _FIGURES}
    words = {name: str(document[name]) for name in ("task", "metric", "direction", "codec")}
    restored_at = [int(step) for step in document["restored_at"]]
    return {**document, **words, **figures, "restored_at": restored_at, "curves": curves}


def saved_rehearsals(text: str) -> tuple[dict[str, Any], ...]:
    """Return the rehearsals at a path, inside of the roots.

    Parameters
    ----------
    text
        What ``inshrink rehearse --json`` printed, as a file; or the folder of ``inshrink rehearse -o``,
        with a report for each way of storing.

    Raises
    ------
    ServiceError
        There is no rehearsal.
    """
    path = resolve(text)
    if path.is_dir():
        found = _kept(path)
        if not found:
            raise ServiceError(
                "there is no finished pair of trainings of a shipped task in this folder",
                str(path),
                "give the folder that `inshrink rehearse -o` was given, or a file of its --json",
            )
        return found
    if not path.is_file():
        raise ServiceError("there is nothing at this path", str(path), "give a file or a folder")
    try:
        return (checked(_read(path)),)
    except OSError as error:
        raise ServiceError(f"it cannot be read: {error.strerror or error}", str(path)) from error
    except _MALFORMED as error:
        raise ServiceError(
            "this is no rehearsal",
            str(path),
            "save one: inshrink rehearse TASK --json > rehearsal.json",
            f"{type(error).__name__}: {error}",
        ) from error


def _read(path: Path) -> Any:
    """Read a JSON document of a size that a rehearsal can have."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError("it is too large")
    return json.loads(content)
