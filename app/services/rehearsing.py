"""Rehearsing failures of the shipped trainings as jobs, and what they found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from inshrink_app.comparison_tables import Curve, RehearsalResult
from inshrink_app.job import Job
from inshrink_app.job_files import jobs_folder
from inshrink_app.services import running
from inshrink_app.services.failures import reported
from inshrink_app.services.history import load_json
from inshrink_app.tables import ServiceError, Subject

__all__ = [
    "Training",
    "finished_rehearsals",
    "rehearsal",
    "rehearsal_job",
    "start_rehearsal",
    "training_of",
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
    from inshrink_core.tasks import find_task, task_names

    if subject.kind != "run" or subject.name not in task_names():
        return None
    try:
        with reported():
            if not subject.path.is_dir() or not is_trusted_sample(subject.path):
                return None
            task, _ = find_task(subject.name)
    except ServiceError:
        return None
    return Training(subject.name, task.n_steps, task.n_restores, task.n_saves)


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


def rehearsal(document: Any) -> RehearsalResult:
    """Turn the document of a rehearsal into plain values."""
    return RehearsalResult(
        task=str(document["task"]),
        metric=str(document["metric"]),
        direction=str(document["direction"]),
        codec=str(document["codec"]),
        restored_at=tuple(int(step) for step in document["restored_at"]),
        curves=tuple(
            Curve(
                int(row["seed"]),
                tuple(int(step) for step in row["steps"]),
                tuple(float(value) for value in row["uninterrupted"]),
                tuple(float(value) for value in row["restored"]),
            )
            for row in document["curves"]
        ),
        excess=document["excess"],
        excess_half_width=document["excess_half_width"],
        noise=document["noise"],
        ratio_weights=document["ratio_weights"],
        ratio_total=document["ratio_total"],
    )
