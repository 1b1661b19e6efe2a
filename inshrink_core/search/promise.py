"""How the steps of an archive keep what was promised of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inshrink_core.chain import Archive
from inshrink_core.errors import CheckFailedError
from inshrink_core.search.bounds import Bounds, Verdict

__all__ = ["Promise", "StepPromise", "broken_promise", "document_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPromise:
    """How one restored step keeps the bounds.

    Parameters
    ----------
    config
        What its weights are written with, as a config file says it.
    drop, divergence
        Of the step as its frame decodes.
    informative
        False where the stale copy, which stores nothing, keeps the bounds too: they say nothing there.
    exact
        Whether it is stored bit for bit, because nothing coarser keeps the bounds.
    side
        On which side of the bounds it is, and whether the metric's noise reaches them.
    """

    config: Mapping[str, Any]
    drop: float | None
    divergence: float | None
    informative: bool
    exact: bool
    side: str

    @property
    def kept(self) -> bool:
        """Whether the step keeps the bounds."""
        return self.side.startswith("inside")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What was promised of every restored step of an archive, and how each keeps it.

    Parameters
    ----------
    bounds
        The limits, a divergence bound that was added included.
    steps
        By step, those of the run.
    evaluations
        States that the evaluator judged for it, originals not counted.
    evaluator_seconds
        Time within the evaluator, originals included.
    """

    bounds: Bounds
    steps: Mapping[int, StepPromise]
    evaluations: int
    evaluator_seconds: float = 0.0

    @property
    def broken(self) -> tuple[int, ...]:
        """Steps that break the bounds: they were archived before, without them or with others."""
        return tuple(sorted(step for step, promise in self.steps.items() if not promise.kept))

    def failure(self, archive: Path) -> CheckFailedError | None:
        """Return why the chain does not keep what was asked of it; None where it does."""
        if not self.broken:
            return None
        return CheckFailedError(
            f"{len(self.broken)} steps break the bounds, step {self.broken[0]} first",
            where=str(archive),
            remedy="they were archived before, without these bounds; write to another archive",
        )

    def to_json(self) -> dict[str, Any]:
        """Return what bounds add to the document of ``inshrink compress --json``."""
        rows = self.steps.values()
        divergences = [row.divergence for row in rows if row.divergence is not None]
        return {
            "bounds": self.bounds.to_json(),
            "max_drop": max((row.drop for row in rows if row.drop is not None), default=None),
            "max_divergence": max(divergences, default=None),
            "evaluations": self.evaluations,
        }

    def step_json(self, step: int) -> dict[str, Any]:
        """Return what bounds add to a frame; null where the run does not have the step."""
        names = ("config", "drop", "divergence", "informative", "exact", "side")
        promise = self.steps.get(step)
        return {name: None if promise is None else getattr(promise, name) for name in names}


def document_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a frame says of its weights, as a config file says it."""
    document: dict[str, Any] = {"codec": record["codec"], "settings": dict(record["config"])}
    return document | ({"override": list(record["overrides"])} if record.get("overrides") else {})


def broken_promise(step: int, archive: Archive, verdict: Verdict) -> CheckFailedError:
    """Return the error of a frame that is not what was measured, and breaks the bounds."""
    return CheckFailedError(
        f"step {step} breaks the bounds although it was measured to keep them",
        where=str(archive.path),
        expected="at most all of a bound",
        found=f"{verdict.usage:.3g} of it",
        remedy="the evaluator may change its mind between calls; fix its seed",
    )
