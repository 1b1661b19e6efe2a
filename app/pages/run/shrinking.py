"""The size of a run's archive, and the requests that write, decode and compare it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.jobs import Job, Work
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError, Subject, engine_settings, known_of
from inshrink_app.services import Chosen, ExportRequest
from inshrink_app.services.evaluating import MAX_COMPARED, EvaluatorCode, comparison, consent_to
from inshrink_app.services.exporting import chain_export
from inshrink_app.services.jobs import documents_of
from inshrink_app.services.opening import chain_of, opened

from inshrink_core.chain.report import ChainReport
from inshrink_core.codec import DEFAULT_CODEC
from inshrink_core.request import Request
from inshrink_core.text import spread
from inshrink_core.verbs.estimate import Estimate
from inshrink_core.verbs.verify import Verify


class Keep(NamedTuple):
    """Contents of an archive: the codecs of weights and optimizer state, and their purpose."""

    codec: str
    optimizer: str
    label: str
    price: str


KEEPS: Mapping[str, Keep] = {
    "exact": Keep("lossless", "exact", "Exact", "Every bit is kept. Training resumes bit for bit."),
    "resume": Keep(
        DEFAULT_CODEC,
        "compressed",
        "Resume",
        "Weights and optimizer state, compressed. Training resumes, but not bit for bit.",
    ),
    "weights": Keep(
        DEFAULT_CODEC, "drop", "Weights", "Without optimizer state, for evaluation and transfer learning."
    ),
}
"""Contents by the stored word (`Chosen.keep`)."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """The chosen archive of a run.

    Parameters
    ----------
    shown, now
        The run, and its choices.
    evaluator
        The evaluator that may run; None without one.
    can_bound
        Whether the evaluator measures the bounded figure, as far as is known.
    """

    shown: Subject
    now: Chosen
    evaluator: EvaluatorCode | None = None
    can_bound: bool = True

    @property
    def is_by_hand(self) -> bool:
        """Whether bits were chosen by hand or by a search; else every step is written within the bound."""
        return bool(self.now.config) and self.now.keep != "exact"

    @property
    def is_bounded(self) -> bool:
        """Whether every step is written as small as the bound allows."""
        is_evaluated = self.can_bound and self.evaluator is not None and self.now.bound.kind != "none"
        return is_evaluated and self.now.keep != "exact" and not self.is_by_hand

    @property
    def archive(self) -> ExportRequest:
        """The export of the archive, without a target."""
        keep, config = KEEPS[self.now.keep], self.now.config
        fields: dict[str, Any] = {"codec": keep.codec, "optimizer": keep.optimizer}
        if self.is_by_hand:
            fields |= {"codec": str(config["codec"]), "config": engine_settings(config) or None}
        elif self.is_bounded and self.evaluator is not None:
            fields |= self.now.bound.fields | self.evaluator.fields
        return chain_export(self.shown, self.shown.steps, **fields)

    def requests(self, target: str) -> list[Request[Any]]:
        """Return the requests that write the archive, decode all of it, and compare it with the run.

        Without an evaluator, and for exact archives, the comparison is tensor by tensor.
        """
        evaluator, path = self.evaluator, str(self.shown.path)
        written = self.archive.placed(target)
        if evaluator is None or self.now.keep == "exact":
            return [*written, Verify(target, deep=True, against=path)]
        # With a bound, every step is measured while it is written, so the comparison is already known.
        steps = self.shown.steps if self.is_bounded else spread(self.shown.steps, MAX_COMPARED)
        compared = comparison(self.shown, [Path(target)], steps, evaluator)
        return [*written, Verify(target, deep=True), compared]

    def work(self, target: str) -> Work:
        """Return the work of the requests; an evaluator runs only with the user's consent."""
        requests = self.requests(target)
        trusted = consent_to(self.evaluator) if requests[-1].verb() == "compare" else ""
        return Work.asking(requests, self.shown.path, "run", "shrink", trusted=trusted)

    @property
    def estimate(self) -> Estimate:
        """The request that tries two steps with all contents; it runs the evaluator if that is allowed."""
        # Evaluation writes whole steps several times, which takes too long for a large model.
        is_small = sum(row.nbytes for row in self.shown.model_tensors) <= ASK_ABOVE_BYTES
        judging: dict[str, Any] = {}
        if self.evaluator is not None and is_small and self.now.bound.fields:
            judging = {**self.now.bound.fields, **self.evaluator.fields}
        exact, resume, weights = KEEPS.values()
        each = [f"optimizer={resume.optimizer}", f"codec={exact.codec},optimizer={exact.optimizer}"]
        first: dict[str, Any] = {"codec": weights.codec, "optimizer": weights.optimizer, "each": each}
        return Estimate(str(self.shown.path), **first, tried=2, **judging)

    def estimate_work(self) -> Work:
        """Return the trial of two steps of the run in its present state.

        Raises
        ------
        ServiceError
            The run cannot be read any more.
        """
        trusted = consent_to(self.evaluator)
        of = (opened(str(self.shown.path)).token, "" if self.evaluator is None else self.evaluator.digest)
        return Work.asking([self.estimate], self.shown.path, "run", "goals", of=of, trusted=trusted)


def estimate_result(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a trial of two steps, with a row for each of `KEEPS`."""
    names = {(keep.codec, keep.optimizer): name for name, keep in KEEPS.items()}
    rows = {
        names[row["set"]["codec"], row["set"]["optimizer"]]: {**row, **row["archive"]}
        for row in (document, *document["each"])
    }
    return {**document["archive"], "rows": rows}


class Written(NamedTuple):
    """A written archive, and the reports of its job.

    Parameters
    ----------
    chain, asked
        The archive, and the document of the request that wrote it.
    verified
        The report of decoding it.
    unreadable
        Checkpoints of the run that the archive lacks, with reasons; they do not count as problems.
    is_new
        Whether the job wrote any step; the archive may have held all of them.
    """

    chain: ChainReport
    asked: Mapping[str, Any]
    verified: Mapping[str, Any]
    unreadable: Mapping[str, str]
    is_new: bool = True

    @classmethod
    def by(cls, job: Job | None) -> Written | None:
        """Return the archive of a finished job; None if it is missing or cannot be read."""
        if job is None or job.state != "finished":
            return None
        target, documents = Path(getattr(job.requests[0], "archive", "")), documents_of(job)
        if not target.exists() or len(documents) < len(job.requests):
            return None
        rows = (row for document in documents for row in document.get("unreadable", ()))
        unreadable = {row["path"]: row["reason"] for row in rows}
        try:
            chain, is_new = chain_of(str(target)), bool(documents[0].get("appended", True))
            return cls(chain, job.work.documents[0], documents[1], unreadable, is_new)
        except ServiceError:
            return None

    @property
    def problems(self) -> Sequence[Mapping[str, Any]]:
        """The problems that verification found."""
        return [row for row in self.verified.get("problems", ()) if row["where"] not in self.unreadable]

    @property
    def comparison(self) -> Any:
        """The evaluator's measurement of the archive; None without one."""
        known = known_of(self.chain)
        return None if known is None else known.comparison

    def cost(self, kind: str) -> float | None:
        """Return the worst figure of the comparison, by the name of a bound; None if unknown."""
        return getattr(self.comparison, f"max_{kind}", None)

    def is_of(self, intent: Intent) -> bool:
        """Return whether it is the chosen archive: written by the request that would write it now."""
        return intent.requests(self.asked["fields"]["archive"])[0].to_json() == self.asked
