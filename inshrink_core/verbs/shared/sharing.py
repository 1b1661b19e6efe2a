"""Perform the parts of a request with the workers of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import InputError
from inshrink_core.evaluate import Executing
from inshrink_core.execution.engines import Task, Work, engine_of
from inshrink_core.execution.process import ignore_numba_file
from inshrink_core.execution.progress import OnProgress
from inshrink_core.execution.threads import prepare_process
from inshrink_core.request import request_from_json

_PERFORM: Final = "inshrink_core.verbs.shared.sharing:perform_part"


def shared_out(request: Any, n_parts: Callable[[int], int] = int) -> list[Any]:
    """Perform all parts of a request with its engine; return the result of each part.

    Parameters
    ----------
    request
        Request of a verb, with the fields of `inshrink_core.verbs.shared.groups.InParts`.
    n_parts
        Returns the number of parts for the number that the engine suggests.

    Raises
    ------
    InputError
        The engine is unknown, options exclude each other, or a field holds an object instead of a path.
    EngineError, MissingExtraError
        Workers died, or the engine is not installed.
    """
    engine = engine_of(request.engine)
    if engine is None:
        raise InputError("--workers goes with an engine", remedy="add --engine processes")
    if request.part is not None:
        raise InputError("--engine runs all parts, and --part only one", remedy="leave one of them out")
    asked, trusted = request.to_json(), getattr(request, "trusted", None)
    for name in asked["fields"]:
        value = getattr(request, name)
        if hasattr(value, "settings") or (hasattr(value, "path") and not hasattr(value, "__fspath__")):
            raise InputError(
                f"workers cannot be given the object in '{name}'", remedy="say it by its path or its name"
            )
    fields = {name: value for name, value in asked["fields"].items() if name not in ("engine", "workers")}

    def tasks(about: int, threads: int) -> Sequence[Task]:
        n = n_parts(about)
        more = {"threads": threads} if hasattr(request, "threads") else {}
        parts = (fields | more | {"part": f"{at + 1}/{n}"} for at in range(n))
        about_code = None if trusted is None else sorted(trusted)
        given = ({"request": asked | {"fields": part}, "trusted": about_code} for part in parts)
        return [Task(_PERFORM, argument, str(Path.cwd())) for argument in given]

    threads = getattr(request, "threads", None)
    return engine(Work(tasks, request.workers, threads, request.progress))


def perform_part(asked: Any, progress: OnProgress) -> Any:
    """Perform one part, in a process that does nothing else."""
    ignore_numba_file()
    prepare_process()
    request: Any = replace(request_from_json(asked["request"]), progress=progress)
    if isinstance(request, Executing) and asked["trusted"] is not None:
        request = replace(request, trusted=frozenset(asked["trusted"]))
    return request.perform_part()
