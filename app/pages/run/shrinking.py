"""What an archive of a run would take, and the requests that write it, decode it again and compare it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.jobs import Job, Work
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError, Subject, engine_settings, known_of
from inshrink_app.services import Chosen, ExportRequest
from inshrink_app.services.comparing import comparison, spread_of
from inshrink_app.services.evaluating import EvaluatorCode
from inshrink_app.services.exporting import chain_export
from inshrink_app.services.jobs import documents_of, start_job
from inshrink_app.services.opening import chain_of, opened

from inshrink_core.chain import ChainReport
from inshrink_core.codec import DEFAULT_CODEC
from inshrink_core.request import Request
from inshrink_core.verbs.estimate import Estimate
from inshrink_core.verbs.shared.measured import Measurements
from inshrink_core.verbs.verify import Verify


class Keep(NamedTuple):
    """What an archive may keep: how weights and optimizer state are written for it, and what it is for."""

    codec: str
    optimizer: str
    label: str
    price: str


KEEPS: Mapping[str, Keep] = {
    "exact": Keep("lossless", "exact", "Exact", "Every bit. Training resumes bit for bit."),
    "resume": Keep(DEFAULT_CODEC, "compressed", "Resume", "Compressed. Training resumes, not bit for bit."),
    "weights": Keep(
        DEFAULT_CODEC, "drop", "Weights", "For evaluation and transfer. Optimizer state is left out."
    ),
}
"""By the word that is stored (`Chosen.keep`)."""


def is_by_hand(now: Chosen) -> bool:
    """Whether bits were chosen by hand or by a search; else every step is written within the bound."""
    return bool(now.config) and now.keep != "exact"


def is_bounded(now: Chosen, judge: EvaluatorCode | None, *, can_bound: bool = True) -> bool:
    """Whether every step is written as small as the bound allows, where the evaluator can tell that."""
    return (
        can_bound
        and judge is not None
        and now.keep != "exact"
        and now.bound.kind != "none"
        and not is_by_hand(now)
    )


def chain_request(
    shown: Subject,
    now: Chosen,
    judge: EvaluatorCode | None,
    device: str = "auto",
    *,
    can_bound: bool = True,
) -> ExportRequest:
    """Return the archive that is chosen for a run, not yet told where to."""
    keep = KEEPS[now.keep]
    fields: dict[str, Any] = {"codec": keep.codec, "optimizer": keep.optimizer, "device": device}
    if is_by_hand(now):
        fields |= {"codec": str(now.config["codec"]), "config": engine_settings(now.config) or None}
    elif is_bounded(now, judge, can_bound=can_bound):
        fields |= now.bound.fields
    return chain_export(shown, shown.steps, **fields)


def write_requests(
    shown: Subject,
    now: Chosen,
    target: str,
    judge: EvaluatorCode | None,
    device: str = "auto",
    *,
    can_bound: bool = True,
) -> list[Request[Any]]:
    """Return the requests that write an archive, decode all of it, and compare it with the run.

    Without an evaluator, and where every bit is kept, every tensor is compared instead.
    """
    request = chain_request(shown, now, judge, device, can_bound=can_bound)
    is_judged = judge is not None and is_bounded(now, judge, can_bound=can_bound)
    judging = judge.fields if judge is not None and is_judged else {}
    written = request.placed(target, **judging)
    if judge is None or now.keep == "exact":
        return [*written, Verify(target, deep=True, against=str(shown.path), device=device)]
    # Under a bound every step was measured when it was written: the comparison is known then.
    steps = shown.steps if is_judged else spread_of(shown.steps)
    compared = comparison(shown, [Path(target)], steps, judge, device=device)
    return [*written, Verify(target, deep=True, device=device), compared]


def start_writing(shown: Subject, requests: Sequence[Request[Any]], judge: EvaluatorCode | None) -> Job:
    """Start the requests; code of an evaluator runs only under the reader's consent."""
    trusted = judge.trusted if judge is not None and requests[-1].verb() == "compare" else ""
    return start_job(Work.asking(requests, shown.path, "run", "shrink", trusted=trusted))


def estimate_request(
    shown: Subject, now: Chosen, judge: EvaluatorCode | None, device: str = "auto"
) -> Estimate:
    """Return the request that tries two steps of everything that may be kept; judged where code may run."""
    # Judged are whole steps, written several times: of a large model that takes too long to begin with.
    is_small = sum(row.nbytes for row in shown.model_tensors) <= ASK_ABOVE_BYTES
    judging: dict[str, Any] = {}
    if judge is not None and is_small and now.bound.kind == "restore_cost":
        judging = {"max_restore_cost": now.bound.value, **judge.fields}
    exact, resume, weights = KEEPS.values()
    each = [f"optimizer={resume.optimizer}", f"codec={exact.codec},optimizer={exact.optimizer}"]
    asked: dict[str, Any] = {"codec": weights.codec, "optimizer": weights.optimizer, "each": each}
    return Estimate(str(shown.path), **asked, tried=2, device=device, **judging)


def estimate_work(shown: Subject, now: Chosen, judge: EvaluatorCode | None, device: str) -> Work:
    """Return the trial of two steps of this run as it is.

    Raises
    ------
    ServiceError
        The run cannot be read any more.
    """
    request = estimate_request(shown, now, judge, device)
    of = (opened(str(shown.path)).token, "" if judge is None else judge.digest)
    trusted = "" if judge is None else judge.trusted
    return Work.asking([request], shown.path, "run", "goals", of=of, trusted=trusted)


def told(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trial of two steps has told: of all, and a row for each of `KEEPS`."""
    return {**document, **document["archive"], "rows": keep_rows((document, *document["each"]))}


def keep_rows(found: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows by what is kept, from estimates of them."""
    names = {(keep.codec, keep.optimizer): name for name, keep in KEEPS.items()}
    return {names[one["set"]["codec"], one["set"]["optimizer"]]: {**one, **one["archive"]} for one in found}


def known_estimate(shown: Subject, now: Chosen, judge: EvaluatorCode | None) -> dict[str, Any] | None:
    """Return what the newest trial of this run has told, whoever asked for it; None without one."""
    try:
        found = Measurements.of_content(opened(str(shown.path)).token, shown.directory)
    except ServiceError:  # What cannot be opened any more is said where it is asked for.
        return None
    judging = estimate_request(shown, now, judge).max_restore_cost
    for one in found.rows("estimate"):
        asked, document = one.question, one.document
        is_asked = asked.get("tried") == 2 and asked.get("steps") == list(shown.steps)
        if is_asked and document.get("each") and document["archive"].get("bound") == judging:
            return told(document)
    return None


class Written(NamedTuple):
    """What writing an archive has made, as it lies there, and the reports that tell of it.

    Parameters
    ----------
    chain
        The archive.
    written, verified
        What writing and decoding it has told.
    unreadable
        The checkpoints of the run that are not in the archive, and why; they are among no problems.
    """

    chain: ChainReport
    written: Mapping[str, Any]
    verified: Mapping[str, Any]
    unreadable: Mapping[str, str]

    @property
    def problems(self) -> list[Mapping[str, Any]]:
        """What verifying it has found."""
        return [row for row in self.verified.get("problems", ()) if row["where"] not in self.unreadable]

    @property
    def comparison(self) -> Any:
        """What the evaluator measured of it; None where nothing did."""
        known = known_of(self.chain)
        return None if known is None else known.comparison

    def is_of(self, now: Chosen) -> bool:
        """Whether it is what is chosen."""
        keep = KEEPS[now.keep]
        if is_by_hand(now):
            config = {"codec": self.chain.codec, "settings": dict(self.chain.config)}
            settings = now.config.get("settings", {})
            return (
                self.chain.is_uniform
                and config["codec"] == now.config["codec"]
                and settings.items() <= dict(self.chain.config).items()
                and [dict(one) for one in self.chain.overrides] == list(now.config.get("override", ()))
            )
        return (self.chain.codec, self.chain.optimizer) == (keep.codec, keep.optimizer) and (
            now.keep == "exact" or self.written.get("bounds", {}).get(now.bound.kind) == now.bound.value
        )


def written_by(job: Job) -> Written | None:
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
    unreadable = {row["path"]: row["reason"] for one in documents for row in one.get("unreadable", ())}
    return Written(chain_of(str(target)), documents[0], documents[1], unreadable)
