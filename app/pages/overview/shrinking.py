"""Shrinking a run in one go: what each goal would take, and exporting, verifying and comparing in a row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Work
from inshrink_app.model.subject import Subject
from inshrink_app.services.comparing import Compared, compared, comparison, spread_of
from inshrink_app.services.evaluating import EvaluatorCode
from inshrink_app.services.exporting import ExportRequest, export_requests
from inshrink_app.services.jobs import documents_of, job_of, newest_job, start_job
from inshrink_app.services.opening import chain_of, opened

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport
    from inshrink_core.request import Request

__all__ = [
    "Shrunk",
    "goal_names",
    "goal_request",
    "goals_job",
    "goals_request",
    "shrink_job",
    "shrink_requests",
    "shrunk_by",
    "start_goals",
    "start_shrink",
]


def goal_names() -> tuple[str, ...]:
    """Return what an archive may be for, in the engine's words."""
    from inshrink_core.verbs.estimate import GOALS

    return tuple(goal.name for goal in GOALS)


def goal_request(shown: Subject, name: str, *, bound: bool = False) -> ExportRequest:
    """Return the export of a whole run for a goal.

    Parameters
    ----------
    shown, name
        The run, and what the archive is for.
    bound
        Whether what a restore costs is bound as by default, which takes an evaluator; an exact one is free.
    """
    from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
    from inshrink_core.verbs.estimate import GOALS

    goal = next(goal for goal in GOALS if goal.name == name)
    return ExportRequest(
        kind="chain",
        steps=shown.steps,
        codec=goal.codec,
        optimizer=goal.optimizer,
        max_restore_cost=DEFAULT_MAX_RESTORE_COST if bound and goal.optimizer != "exact" else None,
    )


def goals_request(shown: Subject) -> Request[Any]:
    """Return the request that tries two steps for every goal."""
    from inshrink_core.verbs.estimate import EstimateGoals

    return EstimateGoals(str(shown.path))


def _goals(shown: Subject) -> Work:
    of, more = (opened(str(shown.path)).token,), {"page": "overview", "topic": "goals"}
    return Work.asking([goals_request(shown)], shown=shown.path, of=of, **more)


def goals_job(shown: Subject) -> Job | None:
    """Return the trial of the goals on this run as it is, if there was one.

    Raises
    ------
    ServiceError
        The run cannot be read any more.
    """
    return job_of(_goals(shown))


def start_goals(shown: Subject) -> Job:
    """Try two steps for every goal; nothing is written, and no code of the run is executed.

    Raises
    ------
    ServiceError
        The run cannot be read any more.
    """
    return start_job(_goals(shown), again=False)


def shrink_requests(
    shown: Subject, goal: str, target: str, judge: EvaluatorCode | None, *, bound: bool = True
) -> list[Request[Any]]:
    """Return the requests that write an archive, decode all of it, and compare it with the run.

    Parameters
    ----------
    shown
        The run.
    goal
        What the archive is for.
    target
        Where it goes.
    judge
        Whose code evaluates a few steps in the end; without it every tensor is compared instead, as it is for
        a goal that keeps every bit.
    bound
        Whether it bounds, too, what a restore of each step costs.
    """
    from inshrink_core.verbs.verify import Verify

    request = goal_request(shown, goal, bound=bound and judge is not None)
    fields = judge.fields if judge is not None and request.max_restore_cost is not None else {}
    written = export_requests(shown, request, target, "", **fields)
    if judge is None or request.optimizer == "exact":
        return [*written, Verify(target, deep=True, against=str(shown.path))]
    compared = comparison(shown, [Path(target)], spread_of(shown.steps), judge)
    return [*written, Verify(target, deep=True), compared]


def shrink_job(shown: Subject) -> Job | None:
    """Return the newest job that did the whole for this run, if there was one."""
    return newest_job("overview", "shrink", shown.path)


def start_shrink(
    shown: Subject, goal: str, target: Path, judge: EvaluatorCode | None, *, bound: bool = True
) -> Job:
    """Do the whole; with an evaluator only after the reader has said that its code may run."""
    requests = shrink_requests(shown, goal, str(target), judge, bound=bound)
    trusted = judge.trusted if judge is not None and requests[-1].verb() == "compare" else ""
    more = {"page": "overview", "topic": "shrink", "trusted": trusted}
    return start_job(Work.asking(requests, shown=shown.path, **more))


class Kept(NamedTuple):
    """The worst of all steps as they were written under a bound, and at which step the metric drops most."""

    n_steps: int
    restore_cost: float | None
    drop: float | None
    step: int | None


def _kept(written: Mapping[str, Any]) -> Kept | None:
    """Return what an export under a bound has measured; None without one."""
    if "bounds" not in written:
        return None
    rows = written["frames"]
    drops = {int(row["step"]): float(row["drop"]) for row in rows if row.get("drop") is not None}
    worst = max(drops, key=drops.__getitem__, default=None)
    return Kept(len(rows), written["max_restore_cost"], written["max_drop"], worst)


class Shrunk(NamedTuple):
    """What doing the whole has made and found.

    `relative_error` is that of the weights; `n_exact` and `n_tensors` count tensors of all steps, None where
    they were not compared one by one; `compared` is None where no evaluator was asked, and so are `bound`,
    what a restore of any step may cost, and `kept`. `unreadable` are the checkpoints of the run that are not
    in the archive, and why; they are among no `problems`.
    """

    chain: ChainReport
    is_sound: bool
    problems: tuple[dict[str, Any], ...]
    relative_error: float | None
    n_exact: int | None
    n_tensors: int | None
    compared: Compared | None
    device: str
    bound: float | None
    kept: Kept | None
    unreadable: tuple[tuple[str, str], ...] = ()


def shrunk_by(job: Job) -> Shrunk | None:
    """Return what a finished job made; None where it is not there any more.

    Raises
    ------
    ServiceError
        What lies there cannot be read.
    """
    target, documents = Path(getattr(job.requests[0], "archive", "")), documents_of(job)
    if not target.exists() or len(documents) < len(job.requests):
        return None
    written, verified = documents[:2]
    errors = verified.get("errors")
    lost = {row["path"]: row["reason"] for one in documents for row in one.get("unreadable", ())}
    problems = tuple(row for row in verified.get("problems", ()) if row["where"] not in lost)
    return Shrunk(
        chain=chain_of(str(target)),
        is_sound=not problems,
        problems=problems,
        unreadable=tuple((Path(path).name, str(reason)) for path, reason in lost.items()),
        relative_error=written.get("relative_error"),
        n_exact=None if errors is None else sum(bool(row["bit_exact"]) for row in errors),
        n_tensors=None if errors is None else len(errors),
        compared=next((one for one in compared(job) if one.steps), None) if job.verb == "compare" else None,
        device=str(written.get("device", "")),
        bound=written.get("bounds", {}).get("restore_cost"),
        kept=_kept(written),
    )
