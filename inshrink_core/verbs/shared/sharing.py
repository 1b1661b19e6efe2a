"""Having the parts of a request performed by the workers of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import InputError
from inshrink_core.evaluate import Executing
from inshrink_core.execution.engines import Engine, Task, Work, engine_of
from inshrink_core.execution.process import ignore_numba_file
from inshrink_core.execution.progress import OnProgress
from inshrink_core.execution.threads import prepare_process
from inshrink_core.request import fields_of, request_from_json

_PERFORM: Final = "inshrink_core.verbs.shared.sharing:perform_part"


def shared_out(request: Any, n_parts: Callable[[int], int] = int) -> list[Any]:
    """Have all parts of a request performed, and return what came of each.

    Parameters
    ----------
    request
        A verb's, with the fields of `inshrink_core.verbs.shared.groups.OnEngine` and `part`.
    n_parts
        Returns how many parts there are, given how many the engine would have.

    Raises
    ------
    InputError
        There is no such engine, options exclude each other, or a field is no path that workers could open.
    EngineError, MissingExtraError
        Workers died, or there are none.
    """
    engine, asked = engine_for(request), sendable(request)
    known = {field.name for field in fields_of(type(request))}

    def tasks(about: int, threads: int) -> Sequence[Task]:
        n = n_parts(about)
        fields = {"threads": threads} if "threads" in known else {}
        parts = (with_fields(asked, **fields, part=f"{at + 1}/{n}") for at in range(n))
        return [Task(_PERFORM, one, str(Path.cwd())) for one in parts]

    own = getattr(request, "threads", None)
    return engine.perform(Work(tasks, request.workers, own, request.progress))


def engine_for(request: Any) -> Engine:
    """Return the engine that a request names (`shared_out`)."""
    engine = engine_of(request.engine)
    if engine is None:
        raise InputError("--workers goes with an engine", remedy="add --engine processes")
    if getattr(request, "part", None) is not None:
        raise InputError("an engine takes all parts, and --part one of them", remedy="leave one of them out")
    return engine


def sendable(request: Any) -> dict[str, Any]:
    """Return a request as workers are given it, and what of its code is trusted (`shared_out`)."""
    given = request.to_json()
    for name in given["fields"]:
        value = getattr(request, name)
        if hasattr(value, "settings") or (hasattr(value, "path") and not hasattr(value, "__fspath__")):
            raise InputError(
                f"workers cannot be given the object in '{name}'", remedy="say it by its path or its name"
            )
    trusted = getattr(request, "trusted", None)
    fields = {name: value for name, value in given["fields"].items() if name not in ("engine", "workers")}
    return {"request": given | {"fields": fields}, "trusted": None if trusted is None else sorted(trusted)}


def with_fields(asked: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return what workers are given, with other values of some fields."""
    request = asked["request"]
    return asked | {"request": request | {"fields": request["fields"] | fields}}


def received(asked: Any, progress: OnProgress | None = None) -> Any:
    """Return the request that a worker was given, in a process that is there for it alone."""
    ignore_numba_file()
    prepare_process()
    request: Any = replace(request_from_json(asked["request"]), progress=progress)
    if isinstance(request, Executing) and asked["trusted"] is not None:
        request = replace(request, trusted=frozenset(asked["trusted"]))
    return request


def perform_part(asked: Any, progress: OnProgress) -> Any:
    """Perform a part."""
    return received(asked, progress).perform_part()
