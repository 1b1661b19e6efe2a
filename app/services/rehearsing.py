"""Failure rehearsals: the shipped trainings, and what was found, as ``inshrink rehearse --json`` has it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
from inshrink_app.jobs.commands import option
from inshrink_app.jobs.files import jobs_folder
from inshrink_app.jobs.job import Job
from inshrink_app.services.failures import reported
from inshrink_app.services.jobs import all_jobs
from inshrink_app.services.opening import resolve
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

__all__ = [
    "Training",
    "finished_rehearsals",
    "rehearsal_so_far",
    "rehearsals_folder",
    "saved_rehearsals",
    "training_named",
    "training_of",
    "trainings",
]

_MAX_BYTES = 8_000_000
"""A rehearsal of 20 seeds and 100 saves takes about 200 kB."""

_MOST_FILES = 2_000
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError)
_FIGURES = ("excess", "excess_half_width", "noise", "ratio_weights", "ratio_total")


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


def rehearsals_folder() -> Path:
    """Return where finished trainings are kept, for all codecs."""
    return jobs_folder().with_name("rehearsals")


def finished_rehearsals(training: Training) -> tuple[Job, ...]:
    """Return the rehearsals of a training that were finished, the newest first."""
    return tuple(
        job
        for job in all_jobs()
        if job.verb == "rehearse" and job.state == "finished" and job.commands[-1][1] == training.name
    )


def rehearsal_so_far(job: Job) -> dict[str, Any] | None:
    """Return the pairs of trainings that a running rehearsal has finished; None before the first.

    Finished trainings lie in the folder of the rehearsal, those of earlier rehearsals among them.
    """
    words = job.commands[-1]
    wanted = {name: option(words, f"--{name}") for name in ("codec", "restores", "seeds", "steps")}
    for found in _from_folder(rehearsals_folder() / "results"):
        is_same = (found["task"], found["codec"]) == (words[1], wanted["codec"])
        counts = (str(len(found["restored_at"])), str(found["steps"]))
        if is_same and counts == (wanted["restores"], wanted["steps"]):
            n_seeds = int(wanted["seeds"] or 0)
            return {**found, "curves": [one for one in found["curves"] if one["seed"] < n_seeds]}
    return None


def checked(document: Any) -> dict[str, Any]:
    """Return the document of a rehearsal, which is untrusted, where a page can show it.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is none.
    """
    curves: list[dict[str, Any]] = [
        {
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
        whose finished trainings are put together in pairs, one rehearsal for each way of storing.

    Raises
    ------
    ServiceError
        There is no rehearsal.
    """
    path = resolve(text)
    if path.is_dir():
        with reported():
            found = tuple(_from_folder(path / "results" if (path / "results").is_dir() else path))
        if not found:
            raise ServiceError(
                Problem(
                    "there is no finished pair of trainings of a shipped task in this folder",
                    str(path),
                    "give the folder that `inshrink rehearse -o` was given, or a file of its --json",
                )
            )
        return found
    if not path.is_file():
        raise ServiceError(Problem("there is nothing at this path", str(path), "give a file or a folder"))
    try:
        return (checked(_read(path)),)
    except OSError as error:
        raise ServiceError(Problem(f"it cannot be read: {error.strerror or error}", str(path))) from error
    except _MALFORMED as error:
        raise ServiceError(
            Problem(
                "this is no rehearsal",
                str(path),
                "save one: inshrink rehearse TASK --json > rehearsal.json",
                f"{type(error).__name__}: {error}",
            )
        ) from error


def _read(path: Path) -> Any:
    """Read a JSON document of a size that a rehearsal can have."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError("it is too large")
    return json.loads(content)


def _from_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """Put kept trainings together: restored ones of one setting, each with its seed left alone."""
    alone: dict[str, Any] = {}
    restored: dict[str, dict[int, tuple[Mapping[str, Any], Any]]] = {}
    for path in islice(sorted(folder.glob("*-seed*.json")), _MOST_FILES):
        try:
            document = _read(path)
            key, result = document["key"], document["result"]
            if "codec" not in key:
                alone[_text(key)] = result
                continue
            setting = _text({name: value for name, value in key.items() if name != "seed"})
            restored.setdefault(setting, {})[int(key["seed"])] = (key, result)
        except _MALFORMED:
            continue
    names = {name for text in alone for name in json.loads(text)}
    for found in restored.values():
        pairs = []
        for _, (key, after) in sorted(found.items()):
            before = alone.get(_text({name: key[name] for name in names if name in key}))
            if before is not None:
                pairs.append((key, before, after))
        result = _together(pairs)
        if result is not None:
            yield result


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _together(pairs: list[tuple[Mapping[str, Any], Any, Any]]) -> dict[str, Any] | None:
    """Return the rehearsal of some pairs; None of a task that is not shipped: its metric is not kept."""
    from inshrink_core.chain import optimizer_of
    from inshrink_core.training.rehearsal import Rehearsal, parse_training
    from inshrink_core.training.tasks import find_task, task_names

    if not pairs:
        return None
    key = pairs[0][0]
    name = str(key.get("task", "")).partition("/")[0]
    if name not in task_names():
        return None
    task, _ = find_task(name)
    try:
        made = Rehearsal(
            task=task.name,
            metric=task.metric,
            direction=task.direction,
            codec=str(key["codec"]),
            config=dict(key["config"]),
            optimizer=optimizer_of({"optimizer": key["optimizer_state"]}),
            n_steps=int(key["n_steps"]),
            n_saves=len(key["saved_at"]),
            restored_at=tuple(int(step) for step in key["restored_at"]),
            uninterrupted=tuple(parse_training(before) for _, before, _ in pairs),
            restored=tuple(parse_training(after) for _, _, after in pairs),
        )
        return checked(made.to_json())
    except _MALFORMED:
        return None
