"""Having the parts of a request performed by the workers of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import InputError
from inshrink_core.execution.engines import engine_of
from inshrink_core.execution.process import ignore_numba_file
from inshrink_core.execution.progress import OnProgress
from inshrink_core.execution.threads import prepare_process
from inshrink_core.execution.work import Task, Work
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
    engine = engine_of(request.engine)
    if engine is None:
        raise InputError("--workers goes with an engine", remedy="add --engine processes")
    if request.part is not None:
        raise InputError("an engine takes all parts, and --part one of them", remedy="leave one of them out")
    given = request.to_json()
    for name in given["fields"]:
        value = getattr(request, name)
        if hasattr(value, "settings") or (hasattr(value, "path") and not hasattr(value, "__fspath__")):
            raise InputError(
                f"workers cannot be given the object in '{name}'", remedy="say it by its path or its name"
            )
    known = {field.name for field in fields_of(type(request))}

    def tasks(about: int, threads: int) -> Sequence[Task]:
        n = n_parts(about)
        fields = {k: v for k, v in given["fields"].items() if k not in ("engine", "workers")}
        if "threads" in known:
            fields["threads"] = threads
        documents = (given | {"fields": fields | {"part": f"{at + 1}/{n}"}} for at in range(n))
        return [Task(_PERFORM, document, str(Path.cwd())) for document in documents]

    own = getattr(request, "threads", None)
    return engine.perform(Work(tasks, request.workers, own, request.progress))


def perform_part(document: Any, progress: OnProgress) -> Any:
    """Perform a part, in a process that is there for it alone."""
    ignore_numba_file()
    prepare_process()
    request: Any = replace(request_from_json(document), progress=progress)
    return request.perform_part()
