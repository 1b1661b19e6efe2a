"""Rehearsals that were saved: a document of the command line, or a folder of finished trainings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from inshrink_app.pages.compare.tables import RehearsalResult
from inshrink_app.services.failures import reported
from inshrink_app.services.opening import resolve
from inshrink_app.services.rehearsing import rehearsal
from inshrink_app.widgets.tables import Problem, ServiceError

__all__ = ["saved_rehearsals"]

_MAX_BYTES = 8_000_000
"""A rehearsal of 20 seeds and 100 saves takes about 200 kB."""

_MOST_FILES = 2_000
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError)


def saved_rehearsals(text: str) -> tuple[RehearsalResult, ...]:
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
        return (rehearsal(_read(path)),)
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


def _from_folder(folder: Path) -> Iterator[RehearsalResult]:
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


def _together(pairs: list[tuple[Mapping[str, Any], Any, Any]]) -> RehearsalResult | None:
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
        return rehearsal(made.to_json())
    except _MALFORMED:
        return None
