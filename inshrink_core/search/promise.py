"""What every restored step of a chain is promised, and how the steps so far keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inshrink_core.errors import CheckFailedError, NotFiniteError
from inshrink_core.evaluate.comparison import EvaluatedStep
from inshrink_core.metrics import worse_by
from inshrink_core.search.bounds import FIGURES, Bounds, Figures, Verdict
from inshrink_core.search.judge import Judge

if TYPE_CHECKING:
    from inshrink_core.chain import ChainWriter
    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.frame import FrameInfo


_LEAST_SHARE: Final = 1 / 8
"""Of a restore cost's bound, that a step may use however small the learning rate is."""

_PEAK: Final = "peak_learning_rate"

Originals = Callable[[int], "Checkpoint | None"]
"""Returns the original of a step, None for one that is not at hand."""


class Judged(NamedTuple):
    """Evaluated steps of a chain as a comparison has them, and the evaluator (`Judge`)."""

    name: str
    digest: str
    metric: str
    direction: str
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


class StepBounds(NamedTuple):
    """What one step is searched for.

    Parameters
    ----------
    target
        What it is to keep; no more than the bounds allow.
    stale
        Figures of the previous checkpoint in its place; None where there is none.
    informative
        Whether the bounds say anything: the previous checkpoint, where there is one, breaks them.
    """

    target: Bounds
    stale: Figures | None
    informative: bool


class Promises:
    """What the steps of one chain are promised, completed by the evaluator, and a list of how each keeps it.

    Parameters
    ----------
    judge
        The evaluator, and what was asked for.
    originals
        The originals. One whose evaluation the judge knows need not be at hand.
    following
        Step of the original that comes after one; None where it is not at hand yet. It tells whether the
        bounds say anything of a chain's first step, which has no previous checkpoint.

    Attributes
    ----------
    steps
        How each step keeps the bounds.
    """

    def __init__(self, judge: Judge, originals: Originals, following: Callable[[int], int | None]) -> None:
        self._judge, self._original, self._following = judge, originals, following
        self._first: int | None = None
        self._bounds: Bounds | None = None
        self._peak = 0.0
        self.steps: dict[int, StepPromise] = {}

    def begin(self, step: int) -> None:
        """Take note of a step whose original is at hand."""
        self._first = step

    def saw(self, checkpoint: Checkpoint) -> float:
        """Take note of the learning rate of a checkpoint, whose largest so far counts; return it."""
        rate = max((group.get("lr", 0.0) for group in checkpoint.hyperparameters.values()), default=0.0)
        self._peak = max(self._peak, rate)
        return rate

    @property
    def bounds(self) -> Bounds:
        """What is promised, as completed by what the evaluator returns.

        Raises
        ------
        EvaluatorError, InputError
            The evaluator fails, changes its mind, or returns nothing that a bound could be checked by.
        """
        if self._first is None:
            raise RuntimeError("bounds are completed by what is said of a first checkpoint")
        if self._bounds is None:
            self._bounds = self._judge.bounds(self._first)
        return self._bounds

    @property
    def are_known(self) -> bool:
        """Whether the evaluator has completed the bounds."""
        return self._bounds is not None

    def so_far(self) -> Promise:
        """Return what was promised, and how the steps so far keep it."""
        return Promise(
            bounds=self.bounds,
            steps=self.steps,
            evaluations=self._judge.evaluations,
            evaluator_seconds=self._judge.seconds,
        )

    def judged(self) -> Judged:
        """Return the evaluated steps so far as a comparison would find them.

        What a frame decodes to was evaluated once, when it was written; here it is put beside its original.
        """
        judge, steps, errors, last = self._judge, [], {}, None
        known = [step for step in sorted(self.steps) if judge.knows(step)]
        for before, step in zip([None, *known], known, strict=False):
            found, first = self.steps[step], judge.original(step)
            if found.drop is None:
                continue
            restored = worse_by(first.value, found.drop, first.direction)
            steps.append(EvaluatedStep.of(step, first.value, restored, found, judge.stale(step, before)))
            errors[step], last = first.standard_errors.get(first.metric), first.log_probs
        n_samples = None if last is None else len(last)
        about = judge.spec, judge.digest, judge.metric, judge.direction
        return Judged(*about, tuple(steps), n_samples, errors)

    def of_next(self, chain: ChainWriter, checkpoint: Checkpoint) -> StepBounds:
        """Return what the next step of a chain is searched for."""
        target = self._target(chain, checkpoint)
        stale = self.stale(chain.parent, checkpoint.step)
        return StepBounds(target, stale, self.is_informative(stale))

    def _target(self, chain: ChainWriter, checkpoint: Checkpoint) -> Bounds:
        """Return the bounds; a restore may cost the less, the longer that will last.

        What a restore costs is forgotten as training goes on, at a pace in proportion to the learning rate.
        Late in a training it would stay; and a codec may know that its errors are forgotten more slowly.
        """
        if not self._peak and chain.parent is not None:
            quality = chain.archive.frame(chain.parent).meta.get("quality")
            known = quality.get(_PEAK) if isinstance(quality, Mapping) else None
            self._peak = float(known) if isinstance(known, int | float) and 0 < known < math.inf else 0.0
        rate = self.saw(checkpoint)
        share = max(rate / self._peak, _LEAST_SHARE) if self._peak else 1.0
        codec = chain.config.config
        rows = chain.of_all(codec.shaped(chain.state(keyframe=False).references.values()))
        lasting = codec.lasting(*(sum(counts) for counts in zip(*rows, strict=True)))
        return self.bounds.with_restore_cost(share / lasting)

    def stale(self, parent: FrameInfo | None, step: int) -> Figures | None:
        """Return the figures of the previous checkpoint in a step's place; of a first step, the next one's.

        None where that is not at hand, or its metric is not finite.
        """
        neighbour = self._following(step) if parent is None else parent.step
        if (
            neighbour is not None
            and not self._judge.knows(neighbour)
            and (self._original(neighbour) is None or self.why_not_judged(neighbour))
        ):
            neighbour = None
        return self._judge.stale(step, neighbour)

    def why_not_judged(self, step: int) -> str:
        """Return why nothing can be compared with an original; nothing where it can be judged."""
        try:
            self._judge.original(step)
        except NotFiniteError as error:
            return str(error)
        return ""

    def is_informative(self, stale: Figures | None) -> bool:
        """Whether the previous checkpoint breaks the bounds; true without one."""
        return stale is None or not self.bounds.judge(stale).kept

    def quality(self, how: str, figures: Figures) -> dict[str, Any]:
        """Return what a frame says of its own quality: what was found, how, and what was promised."""
        found = {name: value for name in FIGURES if (value := getattr(figures, name)) is not None}
        limits = {name: float(limit) for name, limit in self.bounds.limits.items()}
        peak = {_PEAK: self._peak} if self._peak and self.bounds.max_restore_cost is not None else {}
        return {"how": how, "bounds": limits, **peak} | {name: float(value) for name, value in found.items()}

    def note(
        self,
        step: int,
        record: Mapping[str, Any],
        figures: Figures,
        verdict: Verdict,
        *,
        informative: bool,
        exact: bool,
    ) -> None:
        """Take note of how a step keeps the bounds that is written as a frame's record says."""
        config: dict[str, Any] = {"codec": record["codec"], "settings": dict(record["config"])}
        self.steps[step] = StepPromise(
            config=config | ({"override": list(record["overrides"])} if record.get("overrides") else {}),
            **{name: getattr(figures, name) for name in FIGURES},
            informative=informative,
            exact=exact,
            side=verdict.side,
        )

    def note_unjudged(self, step: int, record: Mapping[str, Any], *, same: bool) -> None:
        """Take note of a step that nothing can be compared with: kept where it is stored bit for bit."""
        verdict = Verdict(kept=same, usage=0.0 if same else math.inf)
        self.note(step, record, Figures(), verdict, informative=False, exact=same)
