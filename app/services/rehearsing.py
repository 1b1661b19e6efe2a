"""Rehearsing failures of the shipped trainings as jobs, and what they found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import streamlit as st
from inshrink_app.jobs.files import jobs_folder
from inshrink_app.jobs.job import Job
from inshrink_app.pages.compare.tables import Curve, RehearsalResult
from inshrink_app.services import running
from inshrink_app.services.failures import reported
from inshrink_app.services.history import load_json
from inshrink_app.widgets.tables import ServiceError, Subject

__all__ = [
    "Training",
    "finished_rehearsals",
    "rehearsal",
    "rehearsal_job",
    "rehearsal_so_far",
    "start_rehearsal",
    "training_named",
    "training_of",
    "trainings",
]


class Training(NamedTuple):
    """A shipped training: its name, steps and failures by default, and the saves that failures follow."""

    name: str
    n_steps: int
    n_restores: int
    n_saves: int


def training_of(subject: Subject) -> Training | None:
    """Return the shipped training of a run: of a bundled sample, known by its digest; None of others."""
    from inshrink_core.samples import is_trusted_sample
    from inshrink_core.training.tasks import task_names

    if subject.kind != "run" or subject.name not in task_names():
        return None
    try:
        with reported():
            is_ours = subject.path.is_dir() and is_trusted_sample(subject.path)
    except ServiceError:
        return None
    return training_named(subject.name) if is_ours else None


def trainings() -> tuple[str, ...]:
    """Return the names of the shipped trainings."""
    from inshrink_core.training.tasks import task_names

    return tuple(task_names())


@st.cache_data(show_spinner=False, max_entries=32)
def training_named(name: str) -> Training | None:
    """Return a shipped training; None where it cannot be made here, as without an extra package."""
    from inshrink_core.training.tasks import find_task, task_names

    if name not in task_names():
        return None
    try:
        with reported():
            task, _ = find_task(name)
    except ServiceError:
        return None
    return Training(name, task.n_steps, task.n_restores, task.n_saves)


def _request(subject: Subject, training: Training, settings: Mapping[str, Any]) -> dict[str, Any]:
    folder = jobs_folder().with_name("rehearsals")
    return {
        "task": "rehearse",
        "path": str(subject.path),
        "training": training.name,
        "folder": str(folder),
        **settings,
    }


def _key(training: Training, settings: Mapping[str, Any]) -> tuple[str, ...]:
    return ("rehearse", training.name, json.dumps(dict(settings), sort_keys=True))


def rehearsal_job(training: Training, settings: Mapping[str, Any]) -> Job | None:
    """Return the rehearsal of these settings, if one was started."""
    return running.jobs().get(_key(training, settings), load_json)


def start_rehearsal(subject: Subject, training: Training, settings: Mapping[str, Any]) -> Job:
    """Rehearse; trainings that were finished before are not repeated.

    Parameters
    ----------
    subject
        The sample run.
    training
        Its training.
    settings
        ``codec``, ``config``, ``optimizer``, ``seeds``, ``restores`` and ``n_steps``.
    """
    return running.jobs().start(
        _key(training, settings), _request(subject, training, settings), load_json, again=True
    )


def finished_rehearsals(training: Training) -> tuple[Job, ...]:
    """Return the rehearsals of a training that were finished, the newest first."""
    return tuple(
        job
        for job in running.jobs().jobs()
        if job.task == "rehearse" and job.state == "finished" and job.request.get("training") == training.name
    )


def rehearsal_so_far(job: Job) -> RehearsalResult | None:
    """Return the pairs of trainings that a running rehearsal has finished; None before the first."""
    rows = list(job.rows)
    if not rows:
        return None
    curves = {curve["seed"]: curve for row in rows for curve in row["curves"]}
    return rehearsal({**rows[-1], "curves": list(curves.values())})


def rehearsal(document: Any) -> RehearsalResult:
    """Turn the document of a rehearsal into plain values.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is none: a saved one is untrusted.
    """
    curves = tuple(_curve(row) for row in document["curves"])
    if any(curve.steps != curves[0].steps for curve in curves):
        raise ValueError("its curves are of different steps")
    return RehearsalResult(
        task=str(document["task"]),
        metric=str(document["metric"]),
        direction=str(document["direction"]),
        codec=str(document["codec"]),
        restored_at=tuple(int(step) for step in document["restored_at"]),
        curves=curves,
        **{name: _number(document[name]) for name in _FIGURES},
    )


_FIGURES = ("excess", "excess_half_width", "noise", "ratio_weights", "ratio_total")


def _curve(row: Any) -> Curve:
    curve = Curve(
        int(row["seed"]),
        tuple(int(step) for step in row["steps"]),
        tuple(float(value) for value in row["uninterrupted"]),
        tuple(float(value) for value in row["restored"]),
    )
    if not curve.steps or not len(curve.steps) == len(curve.uninterrupted) == len(curve.restored):
        raise ValueError("its curves differ in length")
    return curve


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
