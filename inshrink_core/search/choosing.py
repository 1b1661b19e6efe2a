"""Choosing the settings of a step: the smallest frame whose restored state keeps the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inshrink_core.chain import ChainConfig, ChainState, PreparedFrame, stored_view
from inshrink_core.chain.append import WORTHWHILE
from inshrink_core.checkpoint import Checkpoint, LayerType
from inshrink_core.codec import FALLBACK_CODEC, get_codec
from inshrink_core.search.bounds import Bounds, Figures, Verdict
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import frame_overhead, step_ratio
from inshrink_core.search.space import Candidate, Cube, CubePoint, Line, space_of
from inshrink_core.search.trials import Measurer, OnTrial, Trial, TriedFrame
from inshrink_core.search.walk import Outcome, Walk, follow_line, walk_cube, walk_line

if TYPE_CHECKING:
    from inshrink_core.archive.index import FrameIndex
    from inshrink_core.chain import ChainWriter

MOST_TRIALS: Final = 10
"""Trials of a step that is searched on a line, at most: the walk, the last configuration, a keyframe."""

# Share of what a step may cost, that leaves room for a coarser candidate.
_ROOM: Final = 1 / 2


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


class Decision(NamedTuple):
    """A measured candidate, or none where nothing keeps the bounds and the step is stored exactly."""

    keyframe: bool
    candidate: Candidate | None = None
    trial: Trial | None = None
    verdict: Verdict = Verdict(kept=True, usage=0.0)
    tried: TriedFrame | None = None
    prepared: PreparedFrame | None = None

    @property
    def figures(self) -> Figures:
        """The measured figures; a step that is stored exactly drops nothing."""
        return self.trial or Figures(drop=0.0)


@dataclass(kw_only=True)
class StepTrials(Measurer):
    """Candidates for the next frame of a chain, each encoded in memory and evaluated.

    Parameters
    ----------
    chain, checkpoint, keyframe
        The chain, the next checkpoint, and whether its frame is a keyframe.
    target
        The bounds of the step.
    state, index
        What it is encoded against, and the index it inherits from.
    on_trial
        Called after each trial.
    """

    chain: ChainWriter
    checkpoint: Checkpoint
    keyframe: bool
    target: Bounds
    state: ChainState
    index: FrameIndex | None
    on_trial: OnTrial | None
    _best: tuple[float, str, PreparedFrame] | None = None

    def outcome(self, point: Any, candidate: Candidate) -> Outcome[Any]:
        """Encode a candidate, evaluate it, and hold its frame if it is the best so far."""
        trial, encoded, tried = self.measured(candidate, self.checkpoint, self.state, self.index)
        if self.on_trial is not None:
            self.on_trial(trial)
        verdict = self.target.judge(trial)
        ratio = trial.ratio_weights if verdict.kept else -math.inf
        if self._best is None or self._best[0] < ratio:
            frame = PreparedFrame(encoded.chain, self.checkpoint, self.state, encoded.plan, encoded.results)
            self._best = ratio, candidate.digest, frame
        return Outcome(point, verdict.kept, trial.ratio_weights, verdict.usage, (candidate, trial, tried))

    def decision(self, outcome: Outcome[Any]) -> Decision:
        """Return a measured candidate as a decision."""
        candidate, trial, tried = outcome.result
        held = self._best is not None and self._best[1] == candidate.digest
        frame = self._best[2] if self._best is not None and held else None
        return Decision(self.keyframe, candidate, trial, self.target.judge(trial), tried, frame)


@dataclass(kw_only=True)
class Chooser:
    """Chooses the settings of each step of a chain, beginning at those of the steps before.

    Parameters
    ----------
    base
        How frames are made, but for what is searched.
    layers
        The layer types of the run.
    judge
        The evaluator.
    on_trial
        Called after each trial.
    follows
        Measure as little as a training leaves time for, instead of searching at every step.
    resumed
        Whether `base` is what an archive was written with so far, and the search goes on from there.

    Attributes
    ----------
    last
        Point of the last step at which the bounds were informative.
    usage
        Share of the bounds that the last step uses; None where nothing was measured of it.

    Raises
    ------
    ConfigError
        The codec has nothing to search.
    """

    base: ChainConfig
    layers: InitVar[Iterable[LayerType | None]]
    judge: Judge
    on_trial: OnTrial | None = None
    follows: bool = False
    resumed: InitVar[bool] = False
    space: Cube | Line = field(init=False)
    last: Any = None
    usage: float | None = None
    _informed: bool = False
    """Whether the bounds were informative at a step; taken for granted of earlier sessions."""
    _last_index: tuple[bytes, FrameIndex] | None = field(default=None, repr=False)
    _keyframe_nbytes: int | None = None

    def __post_init__(self, layers: Iterable[LayerType | None], resumed: bool) -> None:
        self.space = space_of(self.base.codec, layers)
        self._informed = resumed
        self.last = self.at if resumed else None

    @property
    def at(self) -> Any:
        """Where the search is: where the last step ended, or at the base's configuration."""
        return self.space.point_of(self.base.config) if self.last is None else self.last

    def choose(self, chain: ChainWriter, checkpoint: Checkpoint, wanted: StepBounds) -> Decision:
        """Return the settings of the next frame of a chain."""
        step = self._trials(chain, checkpoint, wanted.target, keyframe=chain.keyframe_is_due)
        decision = self._decide(step, wanted)
        if decision.candidate is None and chain.unchanged:
            # What is older breaks the bounds, however fine the rest is.
            chain.unchanged = frozenset()
            step = self._trials(chain, checkpoint, wanted.target, keyframe=step.keyframe)
            decision = self._decide(step, wanted)
        return decision if step.keyframe or self.follows else self._alone(step, decision)

    def wrote(self, decision: Decision, frame_id: bytes, *, based: bool) -> None:
        """Remember a written decision; one upon a base model is no measure of other keyframes."""
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

    def _trials(
        self, chain: ChainWriter, checkpoint: Checkpoint, target: Bounds, *, keyframe: bool
    ) -> StepTrials:
        # Where usage alone decides, sizes are not measured.
        is_sized = not (self.follows and self._informed and isinstance(self.space, Line))
        return StepTrials(
            base=self.base,
            judge=self.judge,
            sized=is_sized,
            chain=chain,
            checkpoint=checkpoint,
            keyframe=keyframe,
            target=target,
            state=chain.state(keyframe=keyframe, specs=checkpoint.specs),
            index=None if keyframe or not is_sized else self._index_of_parent(chain, checkpoint),
            on_trial=self.on_trial,
        )

    def _index_of_parent(self, chain: ChainWriter, checkpoint: Checkpoint) -> FrameIndex:
        """Return the parent's index, about, where it was not chosen here: for the size of a delta."""
        known, parent = self._last_index, chain.parent
        if known is not None and parent is not None and known[0] == parent.frame_id:
            return known[1]
        stored = stored_view(checkpoint, chain.config.optimizer)
        return frame_overhead(stored, {}, chain.config, chain.config.record(), None)[1]

    def _outcome(self, point: Any, step: StepTrials) -> Outcome[Any]:
        return step.outcome(point, self.space.candidate(point))

    def _decide(self, step: StepTrials, wanted: StepBounds) -> Decision:
        """Return the settings of a step, as a keyframe or a delta.

        Without a previous checkpoint to compare with, nothing coarser than the start is tried. Where that
        keeps the bounds, they are not informative, and the last configuration stays if it keeps them. It is
        the start as long as the bounds were informative at no step, and then gives way to a coarser one that
        comes nearer than the previous checkpoint does.
        """
        searched, stale = wanted.informative, wanted.stale
        self._informed = self._informed or (searched and stale is not None)
        coarser = searched and not (stale is None and step.chain.parent is None)
        held = None
        if not searched and self.last is not None:
            held = self._outcome(self.last, step)
            nearer = None if self._informed or not held.kept else _with_room(held, stale, step)
            if nearer is not None:
                self.usage, searched, coarser, held = nearer.usage, True, True, nearer
        best = held
        if held is None or searched or not held.kept:
            best = self._look(step, coarser, [] if held is None else [held])
        self.usage = None if best is None else best.usage
        if best is None:
            return Decision(step.keyframe)
        if searched or self.last is None:
            self.last = best.point
        return step.decision(best)

    def _look(self, step: StepTrials, coarser: bool, known: list[Outcome[Any]]) -> Outcome[Any] | None:
        """Search around the last configuration where there is one."""
        space = self.space

        def outcome(point: Any) -> Outcome[Any]:
            return self._outcome(point, step)

        if isinstance(space, Cube):
            cube = space

            def ratio_of(point: CubePoint) -> float:
                chain = cube.candidate(point).chain_config(self.base)
                return step_ratio(chain, step.checkpoint, step.state, step.index)

            return walk_cube(Walk(outcome, None, known), cube, ratio_of, self.last)
        walk = Walk(outcome, MOST_TRIALS - 2, known)
        if self.follows:
            return follow_line(walk, self.at, self.usage)
        return walk_line(walk, self.at) if coarser else walk_line(walk, self.at, most=self.at)

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


def _with_room(held: Outcome[Any], stale: Figures | None, step: StepTrials) -> Outcome[Any] | None:
    """Aim at coming nearer than the previous checkpoint, where the last configuration leaves room there.

    Returns
    -------
    Outcome or None
        `held`, judged by the new aim; None where the aim stays, and the configuration with it.
    """
    aim = None if stale is None else step.target.nearer_than(stale)
    if aim is None:
        return None
    verdict = aim.judge(held.result[1])
    if verdict.usage >= _ROOM:
        return None
    step.target = aim
    return replace(held, kept=verdict.kept, usage=verdict.usage)
