"""Chains under bounds: every restored step keeps the bounds, as the evaluator measures it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from inshrink_core.archive import ArchiveWriter
from inshrink_core.archive.index import FrameIndex
from inshrink_core.archive.segment import is_intact
from inshrink_core.chain import Archive, ChainConfig, ChainState, ChainWriter, PreparedFrame, stored_view
from inshrink_core.chain.append import WORTHWHILE, Appended, TensorDone
from inshrink_core.chain.config import is_exact
from inshrink_core.chain.sizes import ArchiveSize, archive_size
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.codec import FALLBACK_CODEC, EncoderState, get_codec
from inshrink_core.errors import CheckFailedError, DamagedError, NotFiniteError
from inshrink_core.evaluate.comparison import Compared, EvaluatedStep, largest
from inshrink_core.formats import Run
from inshrink_core.frame import FrameInfo
from inshrink_core.metrics import Direction, worse_by
from inshrink_core.search.bounds import FIGURES, BoundCheck, Bounds, Figures
from inshrink_core.search.measure import frame_overhead, restored_from, step_ratio
from inshrink_core.search.space import Cube, CubePoint, Line, Settings, space_of, with_settings
from inshrink_core.search.trials import BoundEvaluator, Measurer, OnTrial, Trial, TriedFrame, model_digests
from inshrink_core.search.walk import Outcome, Walk, follow_line, walk_cube, walk_line

if TYPE_CHECKING:
    from inshrink_core.evaluate import EvaluatorRequest

MAX_TRIALS: Final = 10
"""Maximum number of trials per step on a line: the walk, the last configuration, a keyframe."""

_ROOM: Final = 1 / 2
"""Share of a step's bound below which a coarser candidate is worth a trial."""

_LEAST_SHARE: Final = 1 / 8
"""Minimum share of the restore-cost bound that a step may use, however small the learning rate."""

_PEAK: Final = "peak_learning_rate"

Originals = Callable[[int], "Checkpoint | None"]
"""Function that returns the original of a step, or None if it is not available."""


class StepWriter(Protocol):
    """Writer of the next step of a chain."""

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Append a step; the writer may first set the chain's config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQuality(Figures):
    """Figures of one restored step relative to the bounds, measured on the frame's decoded values.

    Parameters
    ----------
    config
        Settings, as in a config file.
    discriminative
        Whether the previous checkpoint breaks the bounds in place of this one.
    exact
        Whether the weights are stored bit for bit, because nothing coarser keeps the bounds.
    side
        ``inside``, ``outside``, or with ``within noise`` if the metric's standard error reaches the bound.
    """

    config: Mapping[str, Any]
    discriminative: bool
    exact: bool
    side: str

    @property
    def within(self) -> bool:
        """Whether the step keeps the bounds."""
        return self.side.startswith("inside")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRecord:
    """Quality bounds of an archive, and how each restored step keeps them.

    Parameters
    ----------
    bounds
        The limits, including an added divergence bound.
    steps
        Result of each step of the run, by step.
    evaluations
        Number of states that the evaluator evaluated for this, without originals.
    evaluator_seconds
        Time in the evaluator, including originals.
    """

    bounds: Bounds
    steps: Mapping[int, StepQuality]
    evaluations: int
    evaluator_seconds: float = 0.0

    @property
    def broken(self) -> tuple[int, ...]:
        """Steps that break the bounds: they were archived earlier, without bounds or with other ones."""
        return tuple(sorted(step for step, bound_record in self.steps.items() if not bound_record.within))

    def failure(self, archive: Path | str) -> CheckFailedError | None:
        """Return the error if the chain breaks its bounds, otherwise None."""
        if not self.broken:
            return None
        return CheckFailedError(
            f"{len(self.broken)} steps break the bounds, step {self.broken[0]} first",
            where=str(archive),
            remedy="they were archived before, without these bounds; write to another archive",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the bounds' part of the document of ``inshrink compress --json``."""
        worst = {f"max_{name}": largest(self.steps.values(), name) for name in FIGURES}
        return {"bounds": self.bounds.to_json(), **worst, "evaluations": self.evaluations}

    def step_json(self, step: int) -> dict[str, Any]:
        """Return the bounds' part of a frame; null if the run lacks the step."""
        names = ("config", *FIGURES, "discriminative", "exact", "side")
        bound_record = self.steps.get(step)
        return {name: None if bound_record is None else getattr(bound_record, name) for name in names}


class _Decision(NamedTuple):
    """A measured candidate, or none if nothing keeps the bounds and the step is stored exactly."""

    keyframe: bool
    candidate: Settings | None = None
    trial: Trial | None = None
    check: BoundCheck = BoundCheck(within=True, usage=0.0)
    tried: TriedFrame | None = None
    prepared: PreparedFrame | None = None


@dataclass(kw_only=True)
class _StepTrials(Measurer):
    """Candidates for the next frame of a chain, each encoded in memory and evaluated.

    Parameters
    ----------
    checkpoint, keyframe
        The next checkpoint, and whether its frame is a keyframe.
    target
        Bounds of the step.
    state, index
        State that the step is encoded against, and index that it inherits from.
    on_trial
        Callback after each trial.
    """

    checkpoint: Checkpoint
    keyframe: bool
    target: Bounds
    state: ChainState
    index: FrameIndex | None
    on_trial: OnTrial | None
    _best: tuple[float, Settings, PreparedFrame] | None = None

    def outcome(self, point: Any, candidate: Settings) -> Outcome[Any]:
        """Encode and evaluate a candidate; retain the frame of the best one so far in memory."""
        trial, encoded, tried = self.measured(candidate, self.checkpoint, self.state, self.index)
        if self.on_trial is not None:
            self.on_trial(trial)
        check = self.target.check(trial)
        ratio = trial.ratio_weights if check.within else -math.inf
        if self._best is None or self._best[0] < ratio:
            frame = PreparedFrame(encoded.plan, self.state, encoded.results)
            self._best = ratio, candidate, frame
        decision = _Decision(self.keyframe, candidate, trial, check, tried)
        return Outcome(point, check.within, trial.ratio_weights, check.usage, decision)

    def decision(self, outcome: Outcome[Any]) -> _Decision:
        """Return a measured candidate as a decision, with its frame if that is in memory."""
        decision: _Decision = outcome.result
        is_best = self._best is not None and self._best[1] == decision.candidate
        return decision._replace(prepared=self._best[2] if self._best is not None and is_best else None)

    def nearer(self, last: Outcome[Any], previous: Figures | None) -> Outcome[Any] | None:
        """Tighten the aim to less than the previous checkpoint's cost, if the last configuration leaves room.

        Returns
        -------
        Outcome or None
            `last`, evaluated against the new aim; None if the aim and the configuration stay.
        """
        aim = None if previous is None else self.target.nearer_than(previous)
        check = None if aim is None else aim.check(last.result.trial)
        if aim is None or check is None or check.usage >= _ROOM:
            return None
        self.target = aim
        decision = last.result._replace(check=check)
        return replace(last, within=check.within, usage=check.usage, result=decision)


class BoundedWriter:
    """Step writer that chooses the settings of each step and checks the decoded frame.

    A `StepWriter`; one writer writes the steps of one chain, in order. The search of a step starts from the
    settings of the previous step.

    Parameters
    ----------
    base
        Configuration of the frames, except for the searched settings.
    evaluator
        The evaluator and the bounds.
    originals
        The originals. An original that the evaluator has already evaluated may be unavailable.
    following
        Step of the next original, or None if it is not available yet. For the first step of a chain, which
        has no previous checkpoint, it decides whether the bounds are discriminative.
    resumed
        Whether an archive has so far been written with `base`; the search continues from there.
    follows
        Measure as little as a training allows. The coarseness then follows the share of the bounds that the
        previous save used (`inshrink_core.search.walk.follow_line`), instead of a search at every step.
    on_trial
        Callback after each trial.

    Attributes
    ----------
    appended
        Last step that was written, even if it turned out to break the bounds.
    """

    def __init__(
        self,
        base: ChainConfig,
        evaluator: BoundEvaluator,
        originals: Originals,
        *,
        following: Callable[[int], int | None] | None = None,
        resumed: bool = False,
        follows: bool = False,
        on_trial: OnTrial | None = None,
    ) -> None:
        self._base, self.evaluator, self._originals = base, evaluator, originals
        self._follows, self._on_trial = follows, on_trial
        self._following = following or (lambda step: None)
        self._space: Cube | Line | None = None
        # Whether the bounds were discriminative at any step, of this session or earlier ones.
        self._informed = resumed
        # Point of the last step with discriminative bounds, and the last step's share of the bounds.
        self._last: Any = None
        self._usage: float | None = None
        self._last_index: tuple[bytes, FrameIndex] | None = None
        self._keyframe_nbytes: int | None = None
        # State after the last decoded frame, so that decoding the next frame does not need the earlier ones.
        self._view: Archive | None = None
        self._figures = Figures()
        self._step, self._peak = 0, 0.0
        self._bounds: Bounds | None = None
        self._steps: dict[int, StepQuality] = {}
        self.appended: Appended | None = None

    def begin(self, checkpoint: Checkpoint, chain: ChainWriter | None = None) -> Cube | Line:
        """Return the search space for the layer types of the first checkpoint.

        If several processes write a chain together, the layer types of all of them count.

        Raises
        ------
        ConfigError
            The codec has nothing to search.
        """
        self._step = checkpoint.step
        if self._space is None:
            layers = {spec.layer for spec in checkpoint.specs if spec.role in MODEL_ROLES}
            if chain is not None:
                layers = layers.union(*chain.of_all(layers))
            self._space = space_of(self._base.codec, layers)
            self._last = self._space.point_of(self._base.config) if self._informed else None
        return self._space

    @property
    def bounds(self) -> Bounds:
        """The bounds, completed by the evaluator's result for the first checkpoint.

        Raises
        ------
        EvaluatorError, InputError
            The evaluator fails, is not reproducible, or returns nothing that a bound could use.
        """
        if self._bounds is None:
            self._bounds = self.evaluator.bounds(self._step)
        return self._bounds

    @property
    def bound_record(self) -> BoundRecord:
        """The bounds, and how the steps so far keep them."""
        evaluator = self.evaluator
        return BoundRecord(
            bounds=self.bounds,
            steps=self._steps,
            evaluations=evaluator.evaluations,
            evaluator_seconds=evaluator.seconds,
        )

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Write a step with the smallest frame found that keeps the bounds, or exactly.

        A step is also written exactly if the metric of its original is not finite, because then no comparison
        is possible. This does not apply to the first evaluated original: then the evaluator is unusable.

        Raises
        ------
        EvaluatorError
            The evaluator failed; the archive is unchanged.
        CheckFailedError
            The frame on disk decodes to other values than measured, and breaks the bounds.
        """
        space = self.begin(checkpoint, chain)
        is_evaluated = self._follows or self._bounds is None
        if not is_evaluated and (why := self._why_not_evaluated(checkpoint.step)):
            self.appended = self.append_exactly(chain, checkpoint, done, why)
            self._note_unevaluated(checkpoint.step, chain.config.record(), same=True)
            return self.appended
        target, previous = self._target(chain, checkpoint), self._previous(chain.parent, checkpoint.step)
        discriminative = self._is_discriminative(previous)
        decision = self._choose(chain, checkpoint, target, previous, discriminative=discriminative)
        candidate, trial, tried = decision.candidate, decision.trial, decision.tried
        # The size of a keyframe relative to a base model does not predict the size of others.
        is_based = chain.base is not None and chain.parent is None
        if candidate is None:
            chain.config = self._exact(space, checkpoint)
            quality = {"how": "exact", "why": "nothing coarser keeps the bounds"}
        else:
            chain.config = with_settings(self._base, candidate, checkpoint, self.evaluator.which)
            quality = self._quality("measured", trial or Figures())
        keyframe = decision.keyframe or (None if candidate is None else False)
        appended = self.appended = chain.append(
            checkpoint, done=done, keyframe=keyframe, quality=quality, prepared=decision.prepared
        )
        self._last_index = None if tried is None else (appended.info.frame_id, tried.frame_index)
        if decision.keyframe and trial is not None:
            self._keyframe_nbytes = None if is_based else trial.weights_nbytes
        self._figures, check = self._written(chain, checkpoint, decision, appended)
        how = {"discriminative": discriminative, "exact": trial is None}
        self._note(checkpoint.step, chain.config.record(), self._figures, check.side, **how)
        if not check.within:
            raise CheckFailedError(
                f"step {checkpoint.step} breaks the bounds although it was measured to keep them",
                where=str(chain.archive.path),
                expected="at most all of a bound",
                found=f"{check.usage:.3g} of it",
                remedy="the evaluator may not be deterministic; fix its seed",
            )
        return appended

    def _choose(
        self,
        chain: ChainWriter,
        checkpoint: Checkpoint,
        target: Bounds,
        previous: Figures | None,
        *,
        discriminative: bool,
    ) -> _Decision:
        """Return the settings of the next frame of a chain."""
        step = self._trials(chain, checkpoint, target, keyframe=chain.keyframe_is_due)
        is_first = chain.parent is None
        decision = self._decide(step, previous, discriminative=discriminative, is_first=is_first)
        delta = decision.trial
        if step.keyframe or self._follows or self._keyframe_nbytes is None:
            return decision
        if delta is None or delta.weights_nbytes < WORTHWHILE * self._keyframe_nbytes:
            return decision
        # The delta saves nothing: use a keyframe if it keeps the bounds and is no larger.
        alone = self._trials(chain, checkpoint, step.target, keyframe=True)
        outcome = alone.outcome(None, decision.candidate)  # type: ignore[arg-type]
        is_smaller = outcome.within and outcome.result.trial.weights_nbytes <= delta.weights_nbytes
        return alone.decision(outcome) if is_smaller else decision

    def _trials(
        self, chain: ChainWriter, checkpoint: Checkpoint, target: Bounds, *, keyframe: bool
    ) -> _StepTrials:
        # Sizes are not measured if the share of the bounds alone decides.
        is_sized = not (self._follows and self._informed and isinstance(self._space, Line))
        return _StepTrials(
            base=self._base,
            evaluator=self.evaluator,
            sized=is_sized,
            checkpoint=checkpoint,
            keyframe=keyframe,
            target=target,
            state=chain.state(keyframe=keyframe, specs=checkpoint.specs),
            index=None if keyframe or not is_sized else self._index_of_parent(chain, checkpoint),
            on_trial=self._on_trial,
        )

    def _index_of_parent(self, chain: ChainWriter, checkpoint: Checkpoint) -> FrameIndex:
        """Return the parent's index, or an approximation of it, for the size of a delta."""
        known, parent = self._last_index, chain.parent
        if known is not None and parent is not None and known[0] == parent.frame_id:
            return known[1]
        stored = stored_view(checkpoint, chain.config.optimizer)
        return frame_overhead(stored, {}, chain.config, chain.config.record(), None)[1]

    def _outcome(self, point: Any, step: _StepTrials) -> Outcome[Any]:
        return step.outcome(point, self.begin(step.checkpoint).settings(point))

    def _decide(
        self, step: _StepTrials, previous: Figures | None, *, discriminative: bool, is_first: bool
    ) -> _Decision:
        """Return the settings of a step, as a keyframe or a delta.

        Without a previous checkpoint to compare with, nothing coarser than the start is tried. If the
        previous checkpoint keeps the bounds, the bounds are not discriminative; the last configuration then
        stays if it keeps them. As long as no step had discriminative bounds, that configuration is the
        start. It then gives way to a coarser one that comes nearer than the previous checkpoint does.
        """
        searched = discriminative
        self._informed = self._informed or (searched and previous is not None)
        coarser = searched and not (previous is None and is_first)
        last = None
        if not searched and self._last is not None:
            last = self._outcome(self._last, step)
            nearer = None if self._informed or not last.within else step.nearer(last, previous)
            if nearer is not None:
                self._usage, searched, coarser, last = nearer.usage, True, True, nearer
        best = last
        if last is None or searched or not last.within:
            best = self._search(step, coarser, [] if last is None else [last])
        self._usage = None if best is None else best.usage
        if best is None:
            return _Decision(step.keyframe)
        if searched or self._last is None:
            self._last = best.point
        return step.decision(best)

    def _search(self, step: _StepTrials, coarser: bool, known: list[Outcome[Any]]) -> Outcome[Any] | None:
        """Search around the last configuration if it exists."""
        space = self.begin(step.checkpoint)

        def outcome(point: Any) -> Outcome[Any]:
            return self._outcome(point, step)

        if isinstance(space, Cube):

            def ratio_of(point: CubePoint) -> float:
                chain = step.config(space.settings(point), step.checkpoint)
                return step_ratio(chain, step.checkpoint, step.state, step.index)

            return walk_cube(Walk(outcome, None, known), space, ratio_of, self._last)
        walk = Walk(outcome, MAX_TRIALS - 2, known)
        start = self._start(space)
        if self._follows:
            return follow_line(walk, start, self._usage)
        return walk_line(walk, start) if coarser else walk_line(walk, start, most=start)

    def _start(self, space: Cube | Line) -> Any:
        return space.point_of(self._base.config) if self._last is None else self._last

    def _exact(self, space: Cube | Line, checkpoint: Checkpoint) -> ChainConfig:
        """Return the configuration for bit-exact storage that affects later steps as little as possible.

        It stores the optimizer state exactly too, unless the user chose another way.
        """
        start = self._start(space)
        settings = {} if start is None else space.settings(start)
        chain = with_settings(self._base, settings, checkpoint, self.evaluator.which)
        exact = chain.config.made_exact()
        if exact is not None:
            return chain.made_exact(exact)
        return replace(self._base, overrides=()).made_exact(get_codec(FALLBACK_CODEC)())

    def _written(
        self, chain: ChainWriter, checkpoint: Checkpoint, decision: _Decision, appended: Appended
    ) -> tuple[Figures, BoundCheck]:
        """Return the figures of the last appended frame, and whether it keeps the bounds.

        If its blocks equal those of the trial and are on disk as written, they decode to the values of the
        trial, by the closed-loop property of codecs. Other frames are decoded.
        """
        archive, info = chain.archive, appended.info

        def sound() -> bool:
            return is_intact(archive.reader.storage, archive.reader.info(info.frame_id))

        if all(chain.of_all(appended.as_prepared and sound())):
            self._view = None
            return decision.trial or Figures(drop=0.0), decision.check
        if chain.split is not None:  # other processes also write parts of the frame, so it cannot be read yet
            if not sound():
                raise DamagedError("the part is not on disk as it was written", where=info.path)
            written = restored_from(checkpoint, chain.state(keyframe=False).references)
        else:
            if self._view is None or self._view.reader is not archive.reader:
                self._view = archive.sequential(values=False)
            written = self._view.checkpoint(info)
        tried = decision.tried
        if all(chain.of_all(tried is not None and model_digests(written) == tried.digests)):
            return decision.trial or Figures(drop=0.0), decision.check
        figures = self.evaluator.figures(info.step, written)
        return figures, self.bounds.check(figures)

    def append_exactly(
        self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None, why: str
    ) -> Appended:
        """Write a step bit for bit, because no measurement shows that a smaller frame keeps the bounds."""
        self._usage = None  # without a measurement the next step cannot reuse these settings
        chain.config = self._exact(self.begin(checkpoint, chain), checkpoint)
        return chain.append(checkpoint, done=done, quality={"how": "exact", "why": why})

    def can_repeat(self, chain: ChainWriter) -> bool:
        """Return whether the next step can reuse the last settings without an evaluation."""
        return None not in (self._last, self._usage, chain.parent)

    def repeat(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None) -> Appended:
        """Write a step with the last settings; its restore cost is assumed to be the same."""
        quality = self._quality("predicted", self._figures)
        return chain.append(checkpoint, done=done, quality=quality)

    def check(self, archive: Archive, info: FrameInfo) -> None:
        """Evaluate a step that was archived earlier."""
        parents = [frame for frame in archive.frames if frame.frame_id == info.parent_id]
        meta = archive.frame(info).meta
        if self._why_not_evaluated(info.step):
            original, written = self._originals(info.step), archive.checkpoint(info)
            same = original is not None and model_digests(original) == model_digests(written)
            self._note_unevaluated(info.step, meta, same=same)
            return
        previous = self._previous(parents[0] if parents else None, info.step)
        figures = self.evaluator.figures(info.step, archive.checkpoint(info))
        exact = is_exact(str(meta["codec"]), meta["config"])
        how = {"discriminative": self._is_discriminative(previous), "exact": exact}
        self._note(info.step, meta, figures, self.bounds.check(figures).side, **how)

    def saw(self, checkpoint: Checkpoint) -> float:
        """Return the learning rate of a checkpoint, and update the largest one so far."""
        rate = max((group.get("lr", 0.0) for group in checkpoint.hyperparameters.values()), default=0.0)
        self._peak = max(self._peak, rate)
        return rate

    def compared(self) -> Compared:
        """Return the evaluated steps so far as a comparison.

        Each decoded frame was evaluated once, when it was written; this method pairs the result with its
        original.
        """
        evaluator, steps, errors, last = self.evaluator, [], dict[int, float](), None
        known = [step for step in sorted(self._steps) if step in evaluator.original]
        for before, step in zip([None, *known], known, strict=False):
            found, first = self._steps[step], evaluator.original(step)
            if found.drop is None:
                continue
            restored = worse_by(first.value, found.drop, first.direction)
            steps.append(
                EvaluatedStep.of(step, first.value, restored, found, evaluator.baseline(step, before))
            )
            last = first.log_probs
            if (error := first.standard_errors.get(first.metric)) is not None:
                errors[step] = error
        return Compared(
            metric=evaluator.metric,
            direction=Direction(evaluator.direction),
            device=self._base.device,
            steps=tuple(steps),
            n_samples=None if last is None else len(last),
            standard_errors=errors,
        )

    def _target(self, chain: ChainWriter, checkpoint: Checkpoint) -> Bounds:
        """Return the bounds of a step; the restore cost may be smaller the longer it persists.

        Training forgets the cost of a restore at a rate proportional to the learning rate, so late in a
        training the cost persists. A codec may also know that its errors persist longer.
        """
        if not self._peak and chain.parent is not None:
            quality = chain.archive.frame(chain.parent).meta.get("quality")
            known = quality.get(_PEAK) if isinstance(quality, Mapping) else None
            self._peak = float(known) if isinstance(known, int | float) and 0 < known < math.inf else 0.0
        rate = self.saw(checkpoint)
        share = max(rate / self._peak, _LEAST_SHARE) if self._peak else 1.0
        codec = chain.config.config
        persistence = 1.0
        if isinstance(codec, EncoderState):
            rows = chain.of_all(codec.shaped(chain.state(keyframe=False).references.values()))
            persistence = codec.error_persistence(*(sum(counts) for counts in zip(*rows, strict=True)))
        return self.bounds.with_restore_cost(share / persistence)

    def _previous(self, parent: FrameInfo | None, step: int) -> Figures | None:
        """Return the figures of the previous checkpoint in place of a step (of the next one for the first).

        Returns None if that checkpoint is not available or its metric is not finite.
        """
        neighbour = self._following(step) if parent is None else parent.step
        if (
            neighbour is not None
            and neighbour not in self.evaluator.original
            and (self._originals(neighbour) is None or self._why_not_evaluated(neighbour))
        ):
            neighbour = None
        return self.evaluator.baseline(step, neighbour)

    def _why_not_evaluated(self, step: int) -> str:
        """Return why a step cannot be compared with its original; empty if it can."""
        try:
            self.evaluator.original(step)
        except NotFiniteError as error:
            return str(error)
        return ""

    def _quality(self, how: str, figures: Figures) -> dict[str, Any]:
        """Return the quality record of a frame: the figures, their origin, and the bounds."""
        found = {name: value for name in FIGURES if (value := getattr(figures, name)) is not None}
        limits = {name: float(limit) for name, limit in self.bounds.limits.items()}
        peak = {_PEAK: self._peak} if self._peak and self.bounds.max_restore_cost is not None else {}
        return {"how": how, "bounds": limits, **peak} | {name: float(value) for name, value in found.items()}

    def _note(self, step: int, record: Mapping[str, Any], found: Figures, side: str, **how: bool) -> None:
        """Record how a step keeps the bounds, and the settings that its frame records."""
        config: dict[str, Any] = {"codec": record["codec"], "settings": dict(record["config"])}
        config |= {"override": list(record["overrides"])} if record.get("overrides") else {}
        figures: dict[str, Any] = {name: getattr(found, name) for name in FIGURES}
        self._steps[step] = StepQuality(config=config, side=side, **figures | how)

    def _note_unevaluated(self, step: int, record: Mapping[str, Any], *, same: bool) -> None:
        """Record a step without a possible comparison; it keeps the bounds if it is stored bit for bit."""
        side = BoundCheck(within=same, usage=0.0).side
        self._note(step, record, Figures(), side, discriminative=False, exact=same)

    def _is_discriminative(self, previous: Figures | None) -> bool:
        """Return whether the previous checkpoint breaks the bounds; true without a previous checkpoint."""
        return previous is None or not self.bounds.check(previous).within


@contextmanager
def open_bounded(
    run: Run,
    steps: tuple[int, ...],
    base: ChainConfig,
    bounds: Bounds,
    asked: EvaluatorRequest,
    *,
    resumed: bool = False,
) -> Iterator[BoundedWriter]:
    """Yield a writer under bounds; close its evaluator at the end.

    Raises
    ------
    UntrustedCodeError, EvaluatorError, InputError
        No evaluator may run, or it is unusable on the original of the first step.
    ConfigError
        The codec has nothing to search.
    """
    with BoundEvaluator(asked.resolve(run), run.__getitem__, bounds) as evaluator:
        known, following = frozenset(run.steps), dict(pairwise(steps)).get
        writer = BoundedWriter(
            base,
            evaluator,
            lambda step: run[step] if step in known else None,
            following=following,
            resumed=resumed,
        )
        writer.begin(run[steps[0]])
        # Evaluate before the archive exists, so that an unusable evaluator leaves nothing behind.
        _ = writer.bounds
        yield writer


def written_bounded(
    writer: StepWriter, base: ChainConfig, checkpoints: Iterable[Checkpoint], initial: Any
) -> ArchiveSize:
    """Write a chain to a temporary place, and return its sizes.

    Parameters
    ----------
    writer
        Writer of each step.
    base
        Configuration of the frames, except for the searched settings.
    checkpoints
        The steps, in order.
    initial
        Encoder memory before the first frame (`inshrink_core.chain.look_ahead`).

    Raises
    ------
    CheckFailedError
        No frame keeps the bounds.
    """
    with (
        tempfile.TemporaryDirectory(prefix="inshrink-") as folder,
        ArchiveWriter(Path(folder) / "trial.inshrink", create=True) as archive,
    ):
        chain = ChainWriter(archive, base)
        chain.initial_memory = initial
        for checkpoint in checkpoints:
            writer.append(chain, checkpoint)
        return archive_size(chain.archive)
