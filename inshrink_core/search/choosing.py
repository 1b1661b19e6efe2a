"""Choosing what a step is written with: the smallest frame whose restored state keeps the bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple

from inshrink_core.chain import ChainConfig, PreparedFrame, stored_view
from inshrink_core.chain.append import WORTHWHILE
from inshrink_core.chain.defaults import factors_of
from inshrink_core.checkpoint import Checkpoint, LayerType
from inshrink_core.codec import FALLBACK_CODEC, get_codec
from inshrink_core.search.bounds import Bounds, Figures, Verdict
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import EncodedStep, RatioEstimate, encode_step, frame_overhead, sample_keys
from inshrink_core.search.promise import Originals, StepBounds
from inshrink_core.search.quadratic import allocate, sensitivities
from inshrink_core.search.space import Candidate, Cube, CubePoint, Line, Point, Space, space_of
from inshrink_core.search.strategies import Bracket, Explored, Follow, Outcome, Strategy, Walk, explore
from inshrink_core.search.trials import OnTrial, Position, Trial, TrialRunner, TriedFrame

if TYPE_CHECKING:
    from inshrink_core.archive.index import FrameIndex
    from inshrink_core.chain import ChainWriter


# Least gain for which factors of layer types are changed.
_BETTER: Final = 1.01

# Share of what a step may cost, that leaves room for a coarser spacing.
_ROOM: Final = 1 / 2


class Decision(NamedTuple):
    """What a step is written with, how that was measured, and what is remembered of it.

    Without a candidate, nothing keeps the bounds and the step is stored exactly.
    """

    keyframe: bool
    candidate: Candidate | None = None
    trial: Trial | None = None
    verdict: Verdict = Verdict(kept=True, usage=0.0)
    tried: TriedFrame | None = None
    prepared: PreparedFrame | None = None

    @property
    def figures(self) -> Figures:
        """What was measured; a step that is stored exactly drops nothing."""
        return Figures(drop=0.0) if self.trial is None else self.trial.figures


@dataclass(kw_only=True)
class StepTrials:
    """Candidates for the next frame of a chain, each encoded in memory and judged.

    Parameters
    ----------
    chain, checkpoint, keyframe
        What the frame is of, and which sort it is.
    target
        What it is to keep.
    runner, position
        What measures a candidate, and what it is encoded relative to.
    """

    chain: ChainWriter
    checkpoint: Checkpoint
    keyframe: bool
    target: Bounds
    runner: TrialRunner
    position: Position

    def outcome(self, point: Point, candidate: Candidate) -> Outcome[Point]:
        """Encode a candidate, ask the evaluator, and hold its frame if it is the best so far."""
        trial = self.runner.trial(self.checkpoint.step, candidate, self.position)
        verdict = self.target.judge(trial.figures)
        self.position.keep(candidate, trial.ratio_weights if verdict.kept else -math.inf)
        return Outcome(point, verdict.kept, trial.ratio_weights, verdict.usage, (candidate, trial))

    def decision(self, outcome: Outcome[Any]) -> Decision:
        """Return a candidate that was measured as what is to be written."""
        candidate, trial = outcome.result
        return Decision(
            self.keyframe,
            candidate,
            trial,
            self.target.judge(trial.figures),
            self.position.tried.get(candidate.digest),
            self.position.frame_of(candidate),
        )


@dataclass(kw_only=True)
class Chooser(ABC, Generic[Point]):
    """Chooses what each step of a chain is written with; remembers what the steps before were written with.

    Parameters
    ----------
    base
        How frames are made, but for what is searched.
    space
        What is searched.
    judge, originals
        The evaluator, and the originals.
    on_trial
        Called after each trial.
    follows
        Measure as little as a training leaves time for, instead of searching at every step.
    resumed
        Whether `base` is what an archive was written with so far, and the search goes on from there.

    Attributes
    ----------
    last
        Point of the last step of which the bounds said something.
    usage
        Share of the bounds that the last step uses; None where nothing was measured of it.
    """

    base: ChainConfig
    space: Space[Point]
    judge: Judge
    originals: Originals
    on_trial: OnTrial | None = None
    follows: bool = False
    resumed: InitVar[bool] = False
    last: Point | None = None
    usage: float | None = None
    _informed: bool = False
    """Whether the bounds have told of a step how coarse it may be; taken for granted of earlier sessions."""
    _last_index: tuple[bytes, FrameIndex] | None = field(default=None, repr=False)
    _keyframe_nbytes: int | None = None

    BUDGET: ClassVar[int | None] = None
    """Trials a step that a search may take; None for as many as its strategy wants."""

    def __post_init__(self, resumed: bool) -> None:
        self._informed = resumed
        self.last = self.at if resumed else None

    @property
    def at(self) -> Point | None:
        """Where the search is: where the last step ended, or at the base's own configuration."""
        return self.space.point_of(self.base.config) if self.last is None else self.last

    def choose(self, chain: ChainWriter, checkpoint: Checkpoint, wanted: StepBounds) -> Decision:
        """Return what the next frame of a chain is to be written with."""
        step = self._trials(chain, checkpoint, wanted.target, keyframe=chain.keyframe_is_due)
        decision = self._decide(step, wanted)
        if decision.candidate is None and chain.unchanged:
            # What is older breaks the bounds, however fine the rest is.
            chain.unchanged = frozenset()
            step = self._trials(chain, checkpoint, wanted.target, keyframe=step.keyframe)
            decision = self._decide(step, wanted)
        return decision if step.keyframe or self.follows else self._alone(step, decision)

    def wrote(self, decision: Decision, frame_id: bytes, *, based: bool) -> None:
        """Take note that a decision was written; one upon a base model says nothing of other keyframes."""
        tried, trial = decision.tried, decision.trial
        self._last_index = None if tried is None else (frame_id, tried.frame_index)
        if decision.keyframe and trial is not None:
            self._keyframe_nbytes = None if based else trial.weights_nbytes

    def exact(self) -> ChainConfig:
        """Return how a step is stored bit for bit, with as little harm to what follows as the codec can.

        Of its optimizer state, too, unless something else than the default was asked for.
        """
        at = self.at
        chain = self.base if at is None else self.space.candidate(at).chain_config(self.base)
        exact = chain.config.made_exact()
        if exact is not None:
            return chain.made_exact(exact)
        return replace(self.base, overrides=()).made_exact(get_codec(FALLBACK_CODEC)())

    @property
    def _asks_for_sizes(self) -> bool:
        """Whether sizes of frames decide."""
        return True

    @abstractmethod
    def _strategy(self, step: StepTrials, *, coarser: bool) -> Strategy[Point]:
        """Choose how to look: around the last configuration where there is one."""

    def _adapted(self, step: StepTrials) -> Sequence[Outcome[Point]]:
        """Adapt the space to a step that is searched, where that pays; return what was measured for it."""
        return ()

    def _trials(
        self, chain: ChainWriter, checkpoint: Checkpoint, target: Bounds, *, keyframe: bool
    ) -> StepTrials:
        runner = TrialRunner(
            checkpoints=lambda _: checkpoint,
            steps=(checkpoint.step,),
            base=self.base,
            judge=self.judge,
            log=None,
            sized=self._asks_for_sizes,
            on_trial=self.on_trial,
        )
        state = chain.state(keyframe=keyframe, specs=checkpoint.specs)
        index = None if keyframe or not self._asks_for_sizes else self._index_of_parent(chain, checkpoint)
        return StepTrials(
            chain=chain,
            checkpoint=checkpoint,
            keyframe=keyframe,
            target=target,
            runner=runner,
            position=Position(runner, state, index),
        )

    def _index_of_parent(self, chain: ChainWriter, checkpoint: Checkpoint) -> FrameIndex:
        """Return the parent's index, about, where it was not chosen here: for the size of a delta."""
        known, parent = self._last_index, chain.parent
        if known is not None and parent is not None and known[0] == parent.frame_id:
            return known[1]
        stored = stored_view(checkpoint, chain.config.optimizer)
        return frame_overhead(stored, {}, chain.config, chain.config.record(), None)[1]

    def _outcome(self, point: Point, step: StepTrials) -> Outcome[Point]:
        """Measure a point of the space as it is now."""
        return step.outcome(point, self.space.candidate(point))

    def _decide(self, step: StepTrials, wanted: StepBounds) -> Decision:
        """Return what a step is to be written with, as the sort of frame that it is.

        Without a previous checkpoint to compare with, nothing coarser than the start is tried. Where that
        keeps the bounds, these say nothing, and the last configuration stays if it keeps them. It is the
        start as long as the bounds have said nothing of any step, and then gives way to a coarser one that
        comes nearer than the previous checkpoint does.
        """
        searched, stale = wanted.informative, wanted.stale
        self._informed = self._informed or (searched and stale is not None)
        coarser = searched and not (stale is None and step.chain.parent is None)
        known: Sequence[Outcome[Point]] = ()
        if searched:
            known = self._adapted(step)
        elif self.last is not None:
            held = self._outcome(self.last, step)
            nearer = None if self._informed or not held.kept else _with_room(held, stale, step)
            if nearer is not None:
                self.usage, searched, coarser, held = nearer.usage, True, True, nearer
            known = (held,)
        best = Explored(tuple(known)).best
        if best is None or searched:

            def outcomes(points: Sequence[Point]) -> list[Outcome[Point]]:
                return [self._outcome(point, step) for point in points]

            strategy = self._strategy(step, coarser=coarser)
            best = explore(strategy, outcomes, budget=self.BUDGET, known=known).best
        self.usage = None if best is None else best.usage
        if best is None:
            return Decision(step.keyframe)
        if searched or self.last is None:
            self.last = best.point
        return step.decision(best)

    def _alone(self, step: StepTrials, decision: Decision) -> Decision:
        """Return the choice as a keyframe where a delta saves nothing and that keeps the bounds too."""
        candidate, delta = decision.candidate, decision.trial
        if self._keyframe_nbytes is None or delta is None or candidate is None:
            return decision
        if delta.weights_nbytes < WORTHWHILE * self._keyframe_nbytes:
            return decision
        alone = self._trials(step.chain, step.checkpoint, step.target, keyframe=True)
        outcome = alone.outcome(None, candidate)
        trial: Trial = outcome.result[1]
        keeps = outcome.kept and trial.weights_nbytes <= delta.weights_nbytes
        return alone.decision(outcome) if keeps else decision


def _with_room(held: Outcome[Point], stale: Figures | None, step: StepTrials) -> Outcome[Point] | None:
    """Aim at coming nearer than the previous checkpoint, where the last configuration leaves room there.

    Returns
    -------
    Outcome or None
        `held`, judged by what is aimed at now; None where the aim stays, and the configuration with it.
    """
    aim = None if stale is None else step.target.nearer_than(stale)
    if aim is None:
        return None
    verdict = aim.judge(held.result[1].figures)
    if verdict.usage >= _ROOM:
        return None
    step.target = aim
    return replace(held, kept=verdict.kept, usage=verdict.usage)


class _LineChooser(Chooser[float]):
    """Chooses a spacing: searched at every step, or following what the step before used of the bounds."""

    space: Line

    # A bracket is closed to a few percent by then.
    BUDGET = 8

    @property
    def at(self) -> float:
        """The spacing where the search is."""
        return self.space.point_of(self.base.config) if self.last is None else float(self.last)

    @property
    def _asks_for_sizes(self) -> bool:
        """False where what was used of the bounds alone chooses spacings."""
        return not (self.follows and self._informed)

    def _strategy(self, step: StepTrials, *, coarser: bool) -> Strategy[float]:
        if self.follows:
            return Follow(start=self.at, usage=self.usage)
        return Bracket(start=self.at) if coarser else Bracket(start=self.at, most=self.at)

    def _adapted(self, step: StepTrials) -> Sequence[Outcome[float]]:
        """Keep the factors that make more of a bound: the ratio over the root of what it uses.

        Figures grow with the square of the spacing, bytes fall about in proportion to it.
        """
        factors = {} if self.follows else self._factors(step)
        if not factors:
            return ()
        before, at = self.space, self.at
        first = self._outcome(at, step)
        self.space = replace(before, factors=factors)
        second = self._outcome(at, step)
        if _merit(second) > _BETTER * _merit(first):
            return (second,)
        self.space = before
        return (first,)

    def _factors(self, step: StepTrials) -> Mapping[str, float]:
        """Return factors of the layer types to try: at the 2nd, 4th, 8th … delta, for they cost encodings."""
        chain, checkpoint, parent = step.chain, step.checkpoint, step.chain.parent
        state, index = step.position.state()
        if not state.references or parent is None:
            return {}
        n_frames = len(chain.writer.reader.history(parent.frame_id))
        if n_frames < 2 or n_frames & (n_frames - 1):
            return {}
        # Where there are no second moments, movement since the original before takes their place.
        h = sensitivities(checkpoint, self.originals(parent.step))
        keys = sample_keys(checkpoint)

        def encode(candidate: Candidate) -> EncodedStep:
            return encode_step(candidate.chain_config(self.base), checkpoint, state, index, keys)

        return allocate(self.space, self.at, h, encode).factors


class _CubeChooser(Chooser[CubePoint]):
    """Chooses a point of a cube as published: near the last one, or anywhere for the first."""

    space: Cube

    def _strategy(self, step: StepTrials, *, coarser: bool) -> Strategy[CubePoint]:
        cube, ratios = self.space, RatioEstimate(self.base, step.checkpoint, *step.position.state())

        def ratio_of(point: CubePoint) -> float:
            return ratios(cube.candidate(point))

        return Walk(cube=cube, ratio_of=ratio_of, last=self.last)


def chooser_of(base: ChainConfig, layers: Iterable[LayerType | None], **options: Any) -> Chooser[Any]:
    """Return what chooses settings of the codec of a chain.

    Parameters
    ----------
    base
        How frames are made; factors of layer types that it has are where a search of them begins.
    layers
        The layer types of the run.
    **options
        The other fields of `Chooser`.

    Raises
    ------
    ConfigError
        The codec has nothing to search.
    """
    factors, bare = factors_of(base)
    space = space_of(base.codec, layers, factors)
    if isinstance(space, Line):
        return _LineChooser(base=bare, space=space, **options)
    return _CubeChooser(base=bare, space=space, **options)


def _merit(outcome: Outcome[Any]) -> float:
    """Return a ratio over the root of the bound's share it takes; 0 where nothing can be said."""
    return outcome.ratio / math.sqrt(outcome.usage) if 0 < outcome.usage < math.inf else 0.0
