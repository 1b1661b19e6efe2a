"""Shrinking a run in one go: what each goal would take, and exporting, verifying and comparing in a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.jobs import Job, Work
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError, Subject, known_of
from inshrink_app.services.comparing import comparison, spread_of
from inshrink_app.services.evaluating import EvaluatorCode
from inshrink_app.services.exporting import ExportRequest, chain_export
from inshrink_app.services.jobs import documents_of, start_job
from inshrink_app.services.opening import chain_of, opened

from inshrink_core.chain import ChainReport
from inshrink_core.codec import DEFAULT_CODEC
from inshrink_core.request import Request
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_core.verbs.estimate import Estimate
from inshrink_core.verbs.shared.measured import Measurements
from inshrink_core.verbs.verify import Verify


class Goal(NamedTuple):
    """What an archive may be for, and how a run is written for it."""

    name: str
    codec: str
    optimizer: str


GOALS = (
    Goal("exact", "lossless", "exact"),
    Goal("resume", DEFAULT_CODEC, "compressed"),
    Goal("weights", DEFAULT_CODEC, "drop"),
)
GOAL_NAMES = tuple(goal.name for goal in GOALS)


def goal_request(shown: Subject, name: str, *, bound: bool = False, device: str = "auto") -> ExportRequest:
    """Return the export of a whole run for a goal.

    Parameters
    ----------
    shown, name
        The run, and what the archive is for.
    bound
        Whether what a restore costs is bound as by default, which takes an evaluator; an exact one is free.
    device
        Where it is written.
    """
    goal = next(goal for goal in GOALS if goal.name == name)
    return chain_export(
        shown,
        shown.steps,
        codec=goal.codec,
        optimizer=goal.optimizer,
        device=device,
        max_restore_cost=DEFAULT_MAX_RESTORE_COST if bound and goal.optimizer != "exact" else None,
    )


def goals_request(shown: Subject, judge: EvaluatorCode | None, device: str = "auto") -> Estimate:
    """Return the request that tries two steps for every goal, and has them judged where code may run."""
    # Judged are whole steps, written several times: of a large model that takes too long to begin with.
    is_judged = judge is not None and sum(row.nbytes for row in shown.model_tensors) <= ASK_ABOVE_BYTES
    judging: dict[str, Any] = {}
    if judge is not None and is_judged:
        judging = {"max_restore_cost": DEFAULT_MAX_RESTORE_COST, **judge.fields}
    exact, resume, weights = GOALS
    each = [f"optimizer={resume.optimizer}", f"codec={exact.codec},optimizer={exact.optimizer}"]
    asked: dict[str, Any] = {"codec": weights.codec, "optimizer": weights.optimizer, "each": each}
    return Estimate(str(shown.path), **asked, tried=2, device=device, **judging)


def told_goals(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trial of the goals has told: of all, and a row a goal by its name."""
    rows = goal_rows((document, *document["each"]))
    return {**document, **document["archive"], "goals": rows}


def goal_rows(told: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows by goal from estimates of them."""
    names = {(goal.codec, goal.optimizer): goal.name for goal in GOALS}
    return {
        names[one["set"]["codec"], one["set"]["optimizer"]]: {
            **one, **one["archive"], "archive_bytes": one["archive"]["nbytes"]
        }
        for one in told
    }  # fmt: skip


def goals_work(shown: Subject, judge: EvaluatorCode | None, device: str) -> Work:
    """Return what a trial of the goals on this run as it is asks.

    Raises
    ------
    ServiceError
        The run cannot be read any more.
    """
    request = goals_request(shown, judge, device)
    of = (opened(str(shown.path)).token, "" if judge is None else judge.digest)
    trusted = "" if judge is None else judge.trusted
    return Work.asking([request], shown.path, "overview", "goals", of=of, trusted=trusted)


class KnownGoals(NamedTuple):
    """What a trial of the goals has told, when, and whether it was of the run as it is."""

    document: Mapping[str, Any]
    at: float
    is_current: bool


def known_goals(shown: Subject, judge: EvaluatorCode | None) -> KnownGoals | None:
    """Return what the newest trial of the goals has told, whoever asked for it; None without one."""
    try:
        found = Measurements.of_content(opened(str(shown.path)).token, shown.directory)
    except ServiceError:  # What cannot be opened any more is said where it is asked for.
        return None
    for earlier in (False, True):
        for one in found.rows("estimate", earlier=earlier):
            asked, document = one.question, one.document
            is_asked = asked.get("tried") == 2 and (asked.get("steps") == list(shown.steps) or earlier)
            if is_asked and ("bound" in asked) is (judge is not None) and document.get("each"):
                return KnownGoals(told_goals(document), one.at, not earlier)
    return None


def shrink_requests(
    shown: Subject,
    goal: str,
    target: str,
    judge: EvaluatorCode | None,
    device: str = "auto",
    *,
    bound: bool = True,
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
        Whose code says what a restore costs, which is bound then; without it every tensor is compared
        instead, as it is for a goal that keeps every bit.
    device
        Where it is written, decoded and compared.
    bound
        Whether what the evaluator returns tells what a restore costs.
    """
    request = goal_request(shown, goal, bound=bound and judge is not None, device=device)
    fields = judge.fields if judge is not None and request.chain.max_restore_cost is not None else {}
    written = request.placed(target, **fields)
    if judge is None or request.chain.optimizer == "exact":
        return [*written, Verify(target, deep=True, against=str(shown.path), device=device)]
    # Under a bound every step was measured when it was written: the comparison is known then.
    steps = shown.steps if bound else spread_of(shown.steps)
    compared = comparison(shown, [Path(target)], steps, judge, device=device)
    return [*written, Verify(target, deep=True, device=device), compared]


def start_shrink(shown: Subject, requests: Sequence[Request[Any]], judge: EvaluatorCode | None) -> Job:
    """Do the whole; with an evaluator only after the reader has said that its code may run."""
    trusted = judge.trusted if judge is not None and requests[-1].verb() == "compare" else ""
    return start_job(Work.asking(requests, shown.path, "overview", "shrink", trusted=trusted))


class Shrunk(NamedTuple):
    """What doing the whole has made, as the archive lies there, and the reports that tell of it.

    Parameters
    ----------
    goal
        What it was written for.
    chain
        The archive.
    written, verified
        What writing and decoding it has told.
    unreadable
        The checkpoints of the run that are not in the archive, and why; they are among no problems.
    """

    goal: str
    chain: ChainReport
    written: Mapping[str, Any]
    verified: Mapping[str, Any]
    unreadable: Mapping[str, str]

    @property
    def problems(self) -> list[Mapping[str, Any]]:
        """What verifying it has found."""
        return [row for row in self.verified.get("problems", ()) if row["where"] not in self.unreadable]

    def row(self) -> dict[str, Any]:
        """Return what the archive is, as an estimate of its goal would tell it."""
        known, chain = known_of(self.chain), self.chain
        found = None if known is None else known.comparison
        return {
            "archive_bytes": chain.nbytes,
            "bits_per_weight": chain.bits_per_weight,
            "ratio_total": chain.ratio_total,
            "restore_cost": None if found is None else found.max_restore_cost,
            "drop": None if found is None else found.max_drop,
            "relative_error": self.written.get("relative_error"),
            "basis": "exact" if chain.optimizer == "exact" else "written",
            "written": True,
        }


def shrunk_by(job: Job) -> Shrunk | None:
    """Return what a finished job made; None where it is not there any more.

    Raises
    ------
    ServiceError
        What lies there cannot be read.
    """
    asked: Any = job.requests[0]
    target, documents = Path(getattr(asked, "archive", "")), documents_of(job)
    if not target.exists() or len(documents) < len(job.requests):
        return None
    fields = (asked.codec, asked.optimizer)
    return Shrunk(
        next((goal.name for goal in GOALS if (goal.codec, goal.optimizer) == fields), ""),
        chain_of(str(target)),
        documents[0],
        documents[1],
        {row["path"]: row["reason"] for one in documents for row in one.get("unreadable", ())},
    )
