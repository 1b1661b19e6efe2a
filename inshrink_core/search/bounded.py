"""Writing a chain under a promise: every restored step keeps bounds on the evaluator's figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from inshrink_core.archive.storage import is_sound
from inshrink_core.chain import ChainConfig, ChainWriter, PreparedFrame, is_exact, stored_view
from inshrink_core.chain.defaults import factors_of
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.codec import FALLBACK_CODEC, get_codec
from inshrink_core.errors import CheckFailedError, NotFiniteError
from inshrink_core.search.bounds import FIGURES, Bounds, Figures, Verdict
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import frame_overhead
from inshrink_core.search.quadratic import allocate, sensitivities
from inshrink_core.search.sampling import RatioEstimate, sample_keys
from inshrink_core.search.space import Candidate, Cube, CubePoint, LatticeLine, space_of, three_digits
from inshrink_core.search.strategies import (
    Bracket,
    DeltaNeighbourhood,
    Explored,
    Follow,
    GuidedExhaustive,
    Outcome,
    Strategy,
    explore,
)
from inshrink_core.search.trials import Made, OnTrial, Position, Trial, TrialRunner, model_digests

if TYPE_CHECKING:
    from inshrink_core.archive.index import FrameIndex
    from inshrink_core.chain import Appended, Archive
    from inshrink_core.chain.append import TensorDone
    from inshrink_core.evaluate import EvaluatorRequest
    from inshrink_core.formats import Run
    from inshrink_core.frame import FrameInfo

__all__ = ["AsConfigured", "BoundedWriter", "Promise", "StepPromise", "StepWriter", "open_bounded"]

# A delta that saves less than a hundredth against a keyframe is not worth its dependence.
_WORTHWHILE: Final = 0.99

# Least gain for which factors of layer types are changed.
_BETTER: Final = 1.01

# Trials a step that a lattice's search may take: a bracket is closed to a few percent by then. A cube's
# strategy ends by itself.
_BUDGET: Final = 8

# Share of what a step may cost, that leaves room for a coarser spacing.
_ROOM: Final = 1 / 2

_LEAST_SHARE: Final = 1 / 8
"""Of a restore cost's bound, that a step may use however small the learning rate is."""

_PEAK: Final = "peak_learning_rate"

Originals = Callable[[int], Checkpoint | None]
"""Returns the original of a step, None for one that is not at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPromise:
    """How one restored step keeps the bounds.

    Parameters
    ----------
    config
        What its weights are written with, as a config file says it.
    drop, divergence, restore_cost
        Of the step as its frame decodes.
    informative
        False where the previous checkpoint in this one's place keeps the bounds too: they say nothing there.
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
    restore_cost: float | None = None

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


def _document_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a frame says of its weights, as a config file says it."""
    document: dict[str, Any] = {"codec": record["codec"], "settings": dict(record["config"])}
    return document | ({"override": list(record["overrides"])} if record.get("overrides") else {})


class _Step(NamedTuple):
    """A step that is to be written: what its frame would be encoded against, and what measures candidates."""

    checkpoint: Checkpoint
    runner: TrialRunner
    position: Position

    def trial(self, candidate: Candidate) -> Trial:
        """Encode a candidate in memory and ask the evaluator."""
        return self.runner.trial(self.checkpoint.step, candidate, self.position)

    def decision(self, candidate: Candidate, trial: Trial, verdict: Verdict) -> _Decision:
        """Return a candidate as what is to be written."""
        made, prepared = self.position.made.get(candidate.digest), self.position.frame_of(candidate)
        return _Decision(candidate, trial, verdict, made, prepared)


class _Decision(NamedTuple):
    """What a step is written with, how that was measured, and what is remembered of it.

    Without a candidate, nothing keeps the bounds and the step is stored exactly.
    """

    candidate: Candidate | None = None
    trial: Trial | None = None
    verdict: Verdict = Verdict(kept=True, usage=0.0)
    made: Made | None = None
    prepared: PreparedFrame | None = None


class BoundedWriter:
    """Chooses how each step is written, appends it, and checks what its frame decodes to.

    A `StepWriter`; one writer writes the steps of one chain, in order.

    Parameters
    ----------
    base
        How frames are made, but for what is searched.
    judge
        The evaluator, and what is promised.
    originals
        The originals. One whose evaluation the judge knows stands in its successor's place without being at
        hand.
    following
        Step of the original that comes after one; None where it is not at hand yet. It tells whether the
        bounds say anything of a chain's first step, which has no previous checkpoint.
    resumed
        Whether `base` is what an archive was written with so far, and the search goes on from there.
    follows
        Measure as little as a training leaves time for: the spacing follows what the save before used of the
        bounds (`inshrink_core.search.strategies.Follow`), instead of being searched at every step.
    told
        Called after each trial.

    Attributes
    ----------
    evaluations
        States that the evaluator judged, originals not counted.
    appended
        The last step that was written, also where it was then found to break the bounds.
    promises
        How each step keeps the bounds.
    """

    def __init__(
        self,
        base: ChainConfig,
        judge: Judge,
        originals: Originals,
        *,
        following: Callable[[int], int | None] | None = None,
        resumed: bool = False,
        follows: bool = False,
        told: OnTrial | None = None,
    ) -> None:
        self._follows = follows
        self._usage: float | None = None
        self._bounds: Bounds | None = None
        self._target = Bounds()
        self._peak = 0.0
        self._at_hand: int | None = None
        self._figures = Figures()
        self._judge, self._original, self._told = judge, originals, told
        self._factors_given, self._base = factors_of(base)
        self._following = following or (lambda step: None)
        self._resumed = resumed
        # Whether the bounds have told of a step how coarse it may be; taken for granted of earlier sessions.
        self._informed = resumed
        self._space: Cube | LatticeLine = LatticeLine()
        # Where the lattice's search begins, and where the last informative step ended: a spacing, or a point
        # of the cube.
        self._start = three_digits(base.config.knob_value() or math.nan)
        self._last: Any = None
        self._last_index: tuple[bytes, FrameIndex] | None = None
        # Holds the state after the last frame that was decoded, so that the next one is without those before.
        self._written: Archive | None = None
        self._keyframe_nbytes: int | None = None
        self.evaluations = 0
        self.appended: Appended | None = None
        self.promises: dict[int, StepPromise] = {}

    def begin(self, checkpoint: Checkpoint) -> None:
        """Choose the space; the first checkpoint tells which layers there are.

        Raises
        ------
        ConfigError
            The codec has nothing to search.
        """
        if self._at_hand is None:
            layers = frozenset(spec.layer for spec in checkpoint.specs if spec.role in MODEL_ROLES)
            space = space_of(self._base.codec, layers)
            if isinstance(space, LatticeLine):
                self._space = replace(space, factors=self._factors_given)
                self._last = self._start if self._resumed else None
            else:
                self._space = space
                self._last = _point_of(space, self._base) if self._resumed else None
        self._at_hand = checkpoint.step

    @property
    def bounds(self) -> Bounds:
        """What is promised, as completed by what the evaluator returns.

        Raises
        ------
        EvaluatorError, InputError
            The evaluator fails, changes its mind, or returns nothing that a bound could be checked by.
        """
        if self._at_hand is None:
            raise RuntimeError("bounds are completed by what is said of a first checkpoint")
        if self._bounds is None:
            self._bounds = self._judge.bounds(self._at_hand)
        return self._bounds

    @property
    def promise(self) -> Promise:
        """What was promised, and how the steps seen so far keep it."""
        return Promise(
            bounds=self.bounds,
            steps=self.promises,
            evaluations=self.evaluations,
            evaluator_seconds=self._judge.seconds,
        )

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Write a step with the smallest frame found that keeps the bounds, exactly where there is none.

        Exactly, too, where the original itself has a metric that is not finite, so that nothing can be
        compared with it; but not the first one that is judged, for then the evaluator is of no use.

        Raises
        ------
        EvaluatorError
            The evaluator failed; the archive is as it was.
        CheckFailedError
            The frame on disk does not decode to what was measured, and breaks the bounds.
        """
        self.begin(checkpoint)
        why = "" if self._follows or self._bounds is None else self._why_not_judged(checkpoint.step)
        if why:
            self.appended = self.append_exactly(chain, checkpoint, done, why)
            self.promises[checkpoint.step] = _unjudged(chain.config.record(), same=True)
            return self.appended
        self._target = self._aimed_at(chain, checkpoint)
        keyframe = chain.keyframe_is_due
        step = self._step(chain, checkpoint, keyframe=keyframe)
        neighbour = self._neighbour(chain.parent, checkpoint.step)
        stale = self._judge.stale(checkpoint.step, neighbour)
        decision = self._decide(chain, step, stale)
        if decision.candidate is None and chain.unchanged:
            # What is older breaks the bounds, however fine the rest is.
            chain.unchanged = frozenset()
            step = self._step(chain, checkpoint, keyframe=keyframe)
            decision = self._decide(chain, step, stale)
        if not keyframe and not self._follows:
            alone = self._alone(decision, checkpoint, chain)
            keyframe, decision = (False, decision) if alone is None else (True, alone)
        appended = self.appended = self._write(chain, checkpoint, decision, keyframe, done)
        made = decision.made
        self._last_index = None if made is None else (appended.info.frame_id, made.frame_index)
        self._check_written(chain, checkpoint, decision, appended, self._is_informative(stale))
        return appended

    def _aimed_at(self, chain: ChainWriter, checkpoint: Checkpoint) -> Bounds:
        """Return what a step is searched for: a restore may cost the less, the less is learned after it.

        What a restore costs is forgotten as training goes on, at a pace in proportion to the learning rate.
        Late in a training it would stay.
        """
        if not self._peak and chain.parent is not None:
            quality = chain.archive.frame(chain.parent).meta.get("quality")
            known = quality.get(_PEAK) if isinstance(quality, Mapping) else None
            self._peak = float(known) if isinstance(known, int | float) and 0 < known < math.inf else 0.0
        rate = max((group.get("lr", 0.0) for group in checkpoint.hyperparameters.values()), default=0.0)
        self._peak = max(self._peak, rate)
        share = max(rate / self._peak, _LEAST_SHARE) if self._peak else 1.0
        return self.bounds.with_restore_cost(share)

    def append_exactly(
        self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None, why: str
    ) -> Appended:
        """Write a step bit for bit, since nothing tells whether a smaller frame keeps the bounds."""
        self.begin(checkpoint)
        self._usage = None  # nothing was measured that the next step could be written alike
        chain.config, chain.unchanged = self._exact(), frozenset()
        return chain.append(checkpoint, done=done, quality={"how": "exact", "why": why})

    def _why_not_judged(self, step: int) -> str:
        """Return why nothing can be compared with an original; nothing where it can be judged."""
        try:
            self._judge.original(step)
        except NotFiniteError as error:
            return str(error)
        return ""

    def can_repeat(self, chain: ChainWriter) -> bool:
        """Whether the next step can be written as the last one was, without being judged."""
        return self._last is not None and self._usage is not None and chain.parent is not None

    def repeat(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None) -> Appended:
        """Write a step as the last one was; what a restore of it costs is taken to be the same."""
        return chain.append(checkpoint, done=done, quality=self._quality("predicted", self._figures))

    def check(self, archive: Archive, info: FrameInfo) -> None:
        """Judge a step that was archived before."""
        parents = [one for one in archive.frames if one.frame_id == info.parent_id]
        meta = archive.frame(info).meta
        if self._why_not_judged(info.step):
            original, written = self._original(info.step), archive.checkpoint(info)
            same = original is not None and model_digests(original) == model_digests(written)
            self.promises[info.step] = _unjudged(meta, same=same)
            return
        neighbour = self._neighbour(parents[0] if parents else None, info.step)
        figures = self._judge.figures(info.step, archive.checkpoint(info))
        self.evaluations += 1
        self.promises[info.step] = StepPromise(
            config=_document_of(meta),
            drop=figures.drop,
            divergence=figures.divergence,
            restore_cost=figures.restore_cost,
            informative=self._is_informative(self._judge.stale(info.step, neighbour)),
            exact=is_exact(str(meta["codec"]), meta["config"]),
            side=self.bounds.judge(figures).side,
        )

    def _neighbour(self, parent: FrameInfo | None, step: int) -> int | None:
        """Return the step of the previous checkpoint; of the one after it for a chain's first step.

        None where it is not at hand, or its metric is not finite.
        """
        neighbour = self._following(step) if parent is None else parent.step
        if neighbour is None or self._judge.knows(neighbour):
            return neighbour
        if self._original(neighbour) is None or self._why_not_judged(neighbour):
            return None
        return neighbour

    def _is_informative(self, stale: Figures | None) -> bool:
        """Whether the neighbour's original, in a step's place, breaks the bounds; true without one."""
        return stale is None or not self.bounds.judge(stale).kept

    def _step(self, chain: ChainWriter, checkpoint: Checkpoint, *, keyframe: bool) -> _Step:
        """Return the next frame of the chain, for candidates to be measured as."""
        runner = TrialRunner(
            checkpoints=lambda _: checkpoint,
            steps=(checkpoint.step,),
            base=self._base,
            judge=self._judge,
            log=None,
            sized=not self._is_steered,
            told=self._told,
        )
        standing = chain.standing(keyframe=keyframe, specs=checkpoint.specs)
        index = None if keyframe or self._is_steered else self._index_of_parent(chain, checkpoint)
        return _Step(checkpoint, runner, Position(runner, standing, index))

    def _index_of_parent(self, chain: ChainWriter, checkpoint: Checkpoint) -> FrameIndex:
        """Return the parent's index, about, where this writer did not make it: for the size of a delta."""
        known, parent = self._last_index, chain.parent
        if known is not None and parent is not None and known[0] == parent.frame_id:
            return known[1]
        stored = stored_view(checkpoint, chain.config.optimizer)
        return frame_overhead(stored, {}, chain.config, chain.config.record(), None)[1]

    def _decide(self, chain: ChainWriter, step: _Step, stale: Figures | None) -> _Decision:
        """Return what a step is to be written with.

        Parameters
        ----------
        chain, step
            Where it will stand.
        stale
            Figures of the previous checkpoint in this one's place; None where there is none, and then
            nothing coarser than the start is tried. Where they keep the bounds, these say nothing, and the
            last configuration stays if it keeps them. It is the start as long as the bounds have said
            nothing of any step, and then gives way to a coarser one that comes nearer than the previous
            checkpoint does.
        """

        def outcomes(points: Sequence[Any]) -> list[Outcome[Any]]:
            return [self._outcome(point, step) for point in points]

        searched = self._is_informative(stale)
        self._informed = self._informed or (searched and stale is not None)
        coarser = searched and not (stale is None and chain.parent is None)
        explored: Explored[Any] = Explored(())
        if searched and not self._follows and (factors := self._factors(chain, step)):
            explored = Explored((self._with_better_factors(factors, step),))
        elif stale is not None and not searched and self._last is not None:
            held = self._outcome(self._last, step)
            nearer = None if self._informed or not held.kept else self._with_room(held, stale)
            if nearer is not None:
                self._usage, searched, coarser, held = nearer.usage, True, True, nearer
            explored = Explored((held,))
        if explored.best is None or searched:
            strategy = self._strategy(step, coarser=coarser)
            budget = _BUDGET if isinstance(self._space, LatticeLine) else None
            explored = explore(strategy, outcomes, budget=budget, known=explored.outcomes)
        self.evaluations += step.runner.evaluations
        best = explored.best
        self._usage = None if best is None else best.usage
        if best is None:
            return _Decision()
        if searched or self._last is None:
            self._last = best.point
        candidate, trial = best.result
        return step.decision(candidate, trial, self._target.judge(trial.figures))

    def _with_room(self, held: Outcome[Any], stale: Figures) -> Outcome[Any] | None:
        """Aim at coming nearer than the previous checkpoint, where the last configuration leaves room there.

        Returns
        -------
        Outcome or None
            `held`, judged by what is aimed at now; None where the aim stays, and the configuration with it.
        """
        aim = self._target.nearer_than(stale)
        if aim is None:
            return None
        verdict = aim.judge(held.result[1].figures)
        if verdict.usage >= _ROOM:
            return None
        self._target = aim
        return replace(held, kept=verdict.kept, usage=verdict.usage)

    def _outcome(self, point: Any, step: _Step) -> Outcome[Any]:
        """Measure a point of the space as it is now."""
        candidate = self._space.candidate(point)
        trial = step.trial(candidate)
        verdict = self._target.judge(trial.figures)
        step.position.keep(candidate, trial.ratio_weights if verdict.kept else -math.inf)
        return Outcome(point, verdict.kept, trial.ratio_weights, verdict.usage, (candidate, trial))

    @property
    def _is_steered(self) -> bool:
        """Whether what was used of the bounds alone chooses spacings, so that nobody asks for sizes."""
        return self._follows and self._informed and isinstance(self._space, LatticeLine)

    @property
    def _at(self) -> float:
        """The spacing where the lattice's search stands."""
        return self._start if self._last is None else float(self._last)

    def _strategy(self, step: _Step, *, coarser: bool) -> Strategy[Any]:
        """Choose how to look: around the last configuration where there is one."""
        if isinstance(self._space, LatticeLine) and self._follows:
            return Follow(start=self._at, usage=self._usage)
        if isinstance(self._space, LatticeLine):
            return Bracket(start=self._at) if coarser else Bracket(start=self._at, most=self._at)
        cube = self._space
        ratios = RatioEstimate(self._base, step.checkpoint, *step.position.standing())

        def ratio_of(point: CubePoint) -> float:
            return ratios(cube.candidate(point))

        if self._last is None:
            return GuidedExhaustive(cube=cube, ratio_of=ratio_of)
        return DeltaNeighbourhood(cube=cube, last=self._last, ratio_of=ratio_of)

    def _factors(self, chain: ChainWriter, step: _Step) -> Mapping[str, float]:
        """Return factors of the layer types to try: at the 2nd, 4th, 8th … delta, for they cost encodings."""
        space, parent = self._space, chain.parent
        standing, index = step.position.standing()
        if not isinstance(space, LatticeLine) or not standing.references or parent is None:
            return {}
        n_frames = len(chain.writer.reader.history(parent.frame_id))
        if n_frames < 2 or n_frames & (n_frames - 1):
            return {}
        checkpoint = step.checkpoint
        # Movement since the original before stands for second moments where there are none.
        h = sensitivities(checkpoint, self._original(parent.step))
        keys = sample_keys(checkpoint)
        return allocate(self._base, space, self._at, checkpoint, standing, h, index, keys).factors

    def _with_better_factors(self, factors: Mapping[str, float], step: _Step) -> Outcome[Any]:
        """Keep the factors that make more of a bound: the ratio over the root of what it uses.

        Figures grow with the square of the spacing, bytes fall about in proportion to it.
        """
        before = self._space
        at = three_digits(self._at)
        first = self._outcome(at, step)
        self._space = LatticeLine(held=before.held, factors=factors)
        second = self._outcome(at, step)
        if _merit(second) > _BETTER * _merit(first):
            return second
        self._space = before
        return first

    def _alone(self, decision: _Decision, checkpoint: Checkpoint, chain: ChainWriter) -> _Decision | None:
        """Return the choice as a keyframe, where a delta saves nothing and that keeps the bounds too."""
        candidate, delta = decision.candidate, decision.trial
        if self._keyframe_nbytes is None or delta is None or candidate is None:
            return None
        if delta.weights_nbytes < _WORTHWHILE * self._keyframe_nbytes:
            return None
        step = self._step(chain, checkpoint, keyframe=True)
        trial = step.trial(candidate)
        step.position.keep(candidate, trial.ratio_weights)
        self.evaluations += step.runner.evaluations
        verdict = self._target.judge(trial.figures)
        if trial.weights_nbytes > delta.weights_nbytes or not verdict.kept:
            return None
        return step.decision(candidate, trial, verdict)

    def _write(
        self,
        chain: ChainWriter,
        checkpoint: Checkpoint,
        decision: _Decision,
        keyframe: bool,
        done: TensorDone | None,
    ) -> Appended:
        """Append the frame that was decided on."""
        if decision.candidate is None:
            chain.config = self._exact()
            quality = {"how": "exact", "why": "nothing coarser keeps the bounds"}
            return chain.append(checkpoint, done=done, keyframe=keyframe or None, quality=quality)
        chain.config = decision.candidate.chain_config(self._base)
        # A keyframe upon a base model says nothing of what another would take.
        based = chain.base is not None and chain.parent is None
        quality = self._quality("measured", Figures() if decision.trial is None else decision.trial.figures)
        appended = chain.append(
            checkpoint, done=done, keyframe=keyframe, quality=quality, prepared=decision.prepared
        )
        if keyframe and decision.trial is not None:
            self._keyframe_nbytes = None if based else decision.trial.weights_nbytes
        return appended

    def _quality(self, how: str, figures: Figures) -> dict[str, Any]:
        """Return what a frame says of its own quality: what was found, how, and what was promised."""
        found = {name: value for name in FIGURES if (value := getattr(figures, name)) is not None}
        limits = {name: float(limit) for name, limit in self.bounds.limits.items()}
        peak = {_PEAK: self._peak} if self._peak and self.bounds.max_restore_cost is not None else {}
        return {"how": how, "bounds": limits, **peak} | {name: float(value) for name, value in found.items()}

    def _exact(self) -> ChainConfig:
        """Return how a step is stored bit for bit, with as little harm to what follows as the codec can.

        Of its optimizer state, too, unless something else than the default was asked for.
        """
        if isinstance(self._space, LatticeLine):
            chain = self._space.candidate(self._at).chain_config(self._base)
            exact = chain.config.made_exact()
            if exact is not None:
                return chain.made_exact(exact)
        return replace(self._base, overrides=()).made_exact(get_codec(FALLBACK_CODEC)())

    def _check_written(
        self,
        chain: ChainWriter,
        checkpoint: Checkpoint,
        decision: _Decision,
        appended: Appended,
        informative: bool,
    ) -> None:
        """Read the frame from disk: it must be what was measured; else it is judged by itself.

        Where the blocks are those of the trial, and lie there as they were written, they decode to what the
        trial returned, by the closed-loop law of codecs. All others are decoded.
        """
        archive, info = chain.archive, chain.parent
        if info is None:
            raise RuntimeError("a frame was appended, and there is none")
        made, trial, verdict = decision.made, decision.trial, decision.verdict
        figures = Figures(drop=0.0) if trial is None else trial.figures
        if appended.as_prepared and is_sound(archive.reader.storage, archive.reader.info(info.frame_id)):
            self._written = None
        else:
            if self._written is None or self._written.reader is not archive.reader:
                self._written = archive.sequential(values=False)
            written = self._written.checkpoint(info)
            if trial is None or made is None or model_digests(written) != made.digests:
                figures = self._judge.figures(checkpoint.step, written)
                self.evaluations += 1
                verdict = self.bounds.judge(figures)
        self._figures = figures
        self.promises[checkpoint.step] = StepPromise(
            config=_document_of(chain.config.record()),
            drop=figures.drop,
            divergence=figures.divergence,
            restore_cost=figures.restore_cost,
            informative=informative,
            exact=trial is None,
            side=verdict.side,
        )
        if not verdict.kept:
            raise CheckFailedError(
                f"step {checkpoint.step} breaks the bounds although it was measured to keep them",
                where=str(archive.path),
                expected="at most all of a bound",
                found=f"{verdict.usage:.3g} of it",
                remedy="the evaluator may change its mind between calls; fix its seed",
            )


def _unjudged(record: Mapping[str, Any], *, same: bool) -> StepPromise:
    """Return the promise of a step that nothing can be compared with: kept where it is stored bit for bit."""
    side = Verdict(kept=same, usage=0.0 if same else math.inf).side
    return StepPromise(
        config=_document_of(record), drop=None, divergence=None, informative=False, exact=same, side=side
    )


def _merit(outcome: Outcome[Any]) -> float:
    """Return a ratio over the root of the bound's share it takes; 0 where nothing can be said."""
    return outcome.ratio / math.sqrt(outcome.usage) if 0 < outcome.usage < math.inf else 0.0


def _point_of(cube: Cube, chain: ChainConfig) -> CubePoint | None:
    """Return the point of a configuration; None where it lies on none."""
    values = [getattr(chain.config, axis.settings[0], None) for axis in cube.axes]
    if any(value not in axis.values for axis, value in zip(cube.axes, values, strict=True)):
        return None
    word = str(getattr(chain.config, cube.switch[0])) if cube.switch is not None else ""
    return cube.point([axis.values.index(v) for axis, v in zip(cube.axes, values, strict=True)], word)


@contextmanager
def open_bounded(
    run: Run,
    steps: tuple[int, ...],
    base: ChainConfig,
    bounds: Bounds,
    asked: EvaluatorRequest,
    *,
    resumed: bool = False,
    told: OnTrial | None = None,
) -> Iterator[BoundedWriter]:
    """Yield a writer under a promise; its evaluator ends with it.

    Raises
    ------
    UntrustedCodeError, EvaluatorError, InputError
        There is no evaluator that may run, or it is of no use on the first step's original.
    ConfigError
        The codec has nothing to search.
    """
    evaluator = asked.resolve(run.settings, run.directory)
    with Judge([evaluator], run.__getitem__, bounds) as judge:
        known = frozenset(run.steps)
        writer = BoundedWriter(
            base,
            judge,
            lambda step: run[step] if step in known else None,
            following=dict(pairwise(steps)).get,
            resumed=resumed,
            told=told,
        )
        writer.begin(run[steps[0]])
        # Asked now, before there is an archive, so that an evaluator of no use leaves nothing behind.
        _ = writer.bounds
        yield writer


class StepWriter(Protocol):
    """Writes the next step of a chain."""

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Append a step; may set the chain's config first."""
        ...


class AsConfigured:
    """Writes every step as the chain's config says."""

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Append a step."""
        return chain.append(checkpoint, done=done)
