"""What every restored step of a chain is promised, and how the steps so far keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.errors import CheckFailedError
from inshrink_core.evaluate.comparison import EvaluatedStep
from inshrink_core.search.bounds import FIGURES, Bounds, Figures

if TYPE_CHECKING:
    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.search.judge import Judge


Originals = Callable[[int], "Checkpoint | None"]
"""Returns the original of a step, None for one that is not at hand."""


class Judged(NamedTuple):
    """Evaluated steps of a chain as a comparison has them, and the evaluator."""

    judge: Judge
    steps: tuple[EvaluatedStep, ...]
    n_samples: int | None
    standard_errors: Mapping[int, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPromise(Figures):
    """How one restored step keeps the bounds, by the figures of what its frame decodes to.

    Parameters
    ----------
    config
        What its weights are written with, as in a config file.
    informative
        False where the previous checkpoint in this one's place keeps the bounds too: they say nothing there.
    exact
        Whether it is stored bit for bit, because nothing coarser keeps the bounds.
    side
        On which side of the bounds it is, and whether the metric's noise reaches them.
    """

    config: Mapping[str, Any]
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

    def failure(self, archive: Path | str) -> CheckFailedError | None:
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
        largest = {
            f"max_{name}": max((v for row in rows if (v := getattr(row, name)) is not None), default=None)
            for name in FIGURES
        }
        return {"bounds": self.bounds.to_json(), **largest, "evaluations": self.evaluations}

    def step_json(self, step: int) -> dict[str, Any]:
        """Return what bounds add to a frame; null where the run does not have the step."""
        names = ("config", *FIGURES, "informative", "exact", "side")
        promise = self.steps.get(step)
        return {name: None if promise is None else getattr(promise, name) for name in names}
