"""Trials of a search, measured by the workers of an engine."""

from __future__ import annotations

import atexit
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.execution.progress import OnProgress
from inshrink_core.execution.tasks import Task, Work, at_end
from inshrink_core.verbs.shared.sharing import engine_for, received, sendable, with_fields

if TYPE_CHECKING:
    from inshrink_core.search.search import Ahead
    from inshrink_core.search.space import Candidate
    from inshrink_core.search.trials import Trial, TrialRunner

_PERFORM: Final = "inshrink_core.verbs.modes.trials:perform_trials"

_open: Final[dict[str, TrialRunner]] = {}
"""The search that a worker has open: its evaluator, and what that said of originals, serve the next task."""


@contextlib.contextmanager
def measured_by_workers(request: Any, runner: TrialRunner) -> Iterator[Ahead]:
    """Give what has trials of candidates measured by workers (`inshrink_core.search.search.ChainTrials`).

    Parameters
    ----------
    request
        An `inshrink_core.verbs.search.Search` that names an engine.
    runner
        What is given the trials.

    Raises
    ------
    InputError, EngineError, MissingExtraError
        As `inshrink_core.verbs.shared.sharing.shared_out`.

    Notes
    -----
    Candidates that are asked for together are independent. Of one, each worker evaluates some of the steps,
    and encodes all that lead there: a chain. It ends at the first of its own that breaks the bounds.
    """
    engine, asked = engine_for(request), sendable(request)

    def ahead(candidates: Sequence[Candidate], to_the_end: bool) -> None:
        keys = {one.digest: runner.unknown(one, runner.until_broken(to_the_end)) for one in candidates}
        left = [one for one in candidates if keys[one.digest]]

        def tasks(about: int, threads: int) -> Sequence[Task]:
            each = -(-about // len(left))
            shares = ((one, list(keys[one.digest])[at::each]) for one in left for at in range(each))
            given = with_fields(asked, threads=threads) | {"to_the_end": to_the_end}
            arguments = [given | {"candidate": asdict(one), "steps": steps} for one, steps in shares if steps]
            return [Task(_PERFORM, argument, str(Path.cwd())) for argument in arguments]

        if left:
            for digest, trials in perform(Work(tasks, request.workers, request.threads)):
                runner.measured |= {keys[digest][one.step]: replace(one, cached=False) for one in trials}

    with engine.opened() as perform:
        yield ahead


def perform_trials(asked: Any, progress: OnProgress) -> tuple[str, list[Trial]]:
    """Measure some steps of a candidate, in a worker; return its digest and the trials."""
    from inshrink_core.search.space import Candidate

    search = json.dumps([asked["request"], asked["trusted"]])
    if search not in _open:
        _close()
        _open[search] = at_end.enter_context(received(asked).begun(keeps=False)).runner
        atexit.register(_close)
    candidate = Candidate(**asked["candidate"])
    runner = _open[search]
    return candidate.digest, runner.walk(candidate, runner.until_broken(asked["to_the_end"]), asked["steps"])


def _close() -> None:
    _open.clear()
    at_end.close()
