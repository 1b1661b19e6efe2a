"""Writing a chain under bounds: every restored step keeps them by the evaluator's figures."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from inshrink_core.archive import ArchiveWriter
from inshrink_core.archive.segment import is_sound
from inshrink_core.chain import ArchiveSize, ChainConfig, ChainWriter, archive_size, is_exact
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.codec import EncoderState
from inshrink_core.errors import CheckFailedError, DamagedError, NotFiniteError
from inshrink_core.evaluate.comparison import EvaluatedStep
from inshrink_core.metrics import worse_by
from inshrink_core.search.bounds import FIGURES, Bounds, Figures, Verdict
from inshrink_core.search.choosing import Chooser, Decision, StepBounds
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import restored_from
from inshrink_core.search.promise import Judged, Originals, Promise, StepPromise
from inshrink_core.search.trials import OnTrial, model_digests

if TYPE_CHECKING:
    from inshrink_core.chain import Appended, Archive
    from inshrink_core.chain.append import TensorDone
    from inshrink_core.evaluate import EvaluatorRequest
    from inshrink_core.formats import Run
    from inshrink_core.frame import FrameInfo


_LEAST_SHARE: Final = 1 / 8
"""Of a restore cost's bound, that a step may use however small the learning rate is."""

_PEAK: Final = "peak_learning_rate"


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


class BoundedWriter:
    """Writes each step with the settings chosen for it, and checks what its frame decodes to.

    A `StepWriter`; one writer writes the steps of one chain, in order.

    Parameters
    ----------
    base
        How frames are made, but for what is searched.
    judge
        The evaluator, and the bounds.
    originals
        The originals. One that the judge has evaluated need not be at hand.
    following
        Step of the original that comes after one; None where it is not at hand yet. It decides whether the
        bounds are informative at a chain's first step, which has no previous checkpoint.
    resumed
        Whether `base` is what an archive was written with so far, and the search goes on from there.
    follows
        Measure as little as a training leaves time for: the coarseness follows what the save before used of
        the bounds (`inshrink_core.search.walk.follow_line`), instead of being searched at every step.
    on_trial
        Called after each trial.

    Attributes
    ----------
    appended
        The last step that was written, also where it was then found to break the bounds.
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
        on_trial: OnTrial | None = None,
    ) -> None:
        self._judge, self._originals, self._follows = judge, originals, follows
        self._base = base.as_set()
        self._options: dict[str, Any] = {"resumed": resumed, "follows": follows, "on_trial": on_trial}
        self._chooser: Chooser | None = None
        # Holds the state after the last frame that was decoded, so that the next one is without those before.
        self._view: Archive | None = None
        self._figures = Figures()
        self._following = following or (lambda step: None)
        self._step, self._peak = 0, 0.0
        self._bounds: Bounds | None = None
        self._steps: dict[int, StepPromise] = {}
        self.appended: Appended | None = None

    def begin(self, checkpoint: Checkpoint, chain: ChainWriter | None = None) -> Chooser:
        """Take note of the checkpoint at hand; the layer types of the first one decide what is searched.

        Of a chain that several write together, the layer types are those of all.

        Raises
        ------
        ConfigError
            The codec has nothing to search.
        """
        if self._chooser is None:
            layers = {spec.layer for spec in checkpoint.specs if spec.role in MODEL_ROLES}
            if chain is not None:
                layers = layers.union(*chain.of_all(layers))
            self._chooser = Chooser(base=self._base, layers=layers, judge=self._judge, **self._options)
        self._step = checkpoint.step
        return self._chooser

    @property
    def bounds(self) -> Bounds:
        """The bounds, completed by what the evaluator returns for the first checkpoint.

        Raises
        ------
        EvaluatorError, InputError
            The evaluator fails, changes its mind, or returns nothing that a bound could be checked by.
        """
        if self._bounds is None:
            self._bounds = self._judge.bounds(self._step)
        return self._bounds

    @property
    def promise(self) -> Promise:
        """The bounds, and how the steps so far keep them."""
        judge = self._judge
        return Promise(
            bounds=self.bounds,
            steps=self._steps,
            evaluations=judge.evaluations,
            evaluator_seconds=judge.seconds,
        )

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Write a step with the smallest frame found that keeps the bounds, exactly where there is none.

        Exactly, too, where the original itself has a metric that is not finite, so that nothing can be
        compared with it; but not the first one that is evaluated, for then the evaluator is of no use.

        Raises
        ------
        EvaluatorError
            The evaluator failed; the archive is as it was.
        CheckFailedError
            The frame on disk does not decode to what was measured, and breaks the bounds.
        """
        chooser = self.begin(checkpoint, chain)
        is_judged = self._follows or self._bounds is None
        if not is_judged and (why := self._why_not_judged(checkpoint.step)):
            self.appended = self.append_exactly(chain, checkpoint, done, why)
            self._note_unjudged(checkpoint.step, chain.config.record(), same=True)
            return self.appended
        target, stale = self._target(chain, checkpoint), self._stale(chain.parent, checkpoint.step)
        wanted = StepBounds(target, stale, self._is_informative(stale))
        decision = chooser.choose(chain, checkpoint, wanted)
        # The size of a keyframe upon a base model is no measure of others.
        based = chain.base is not None and chain.parent is None
        if decision.candidate is None:
            chain.config = chooser.exact()
            quality = {"how": "exact", "why": "nothing coarser keeps the bounds"}
        else:
            chain.config = decision.candidate.chain_config(chooser.base)
            quality = self._quality("measured", decision.figures)
        keyframe = decision.keyframe or (None if decision.candidate is None else False)
        appended = self.appended = chain.append(
            checkpoint, done=done, keyframe=keyframe, quality=quality, prepared=decision.prepared
        )
        chooser.wrote(decision, appended.info.frame_id, based=based)
        self._figures, verdict = self._written(chain, checkpoint, decision, appended)
        record, exact = chain.config.record(), decision.trial is None
        how = {"informative": wanted.informative, "exact": exact}
        self._note(checkpoint.step, record, self._figures, verdict.side, **how)
        if not verdict.kept:
            raise CheckFailedError(
                f"step {checkpoint.step} breaks the bounds although it was measured to keep them",
                where=str(chain.archive.path),
                expected="at most all of a bound",
                found=f"{verdict.usage:.3g} of it",
                remedy="the evaluator may change its mind between calls; fix its seed",
            )
        return appended

    def _written(
        self, chain: ChainWriter, checkpoint: Checkpoint, decision: Decision, appended: Appended
    ) -> tuple[Figures, Verdict]:
        """Return the figures of the frame that was appended last, and whether it keeps the bounds.

        Where its blocks are those of the trial, and are on disk as they were written, they decode to what the
        trial returned, by the closed-loop law of codecs. All others are decoded.
        """
        archive, info = chain.archive, appended.info

        def sound() -> bool:
            return is_sound(archive.reader.storage, archive.reader.info(info.frame_id))

        if all(chain.of_all(appended.as_prepared and sound())):
            self._view = None
            return decision.figures, decision.verdict
        if chain.split is not None:  # a frame of which others write parts, too, cannot be read yet
            if not sound():
                raise DamagedError("the part is not on disk as it was written", where=info.path)
            written = restored_from(checkpoint, chain.state(keyframe=False).references)
        else:
            if self._view is None or self._view.reader is not archive.reader:
                self._view = archive.sequential(values=False)
            written = self._view.checkpoint(info)
        tried = decision.tried
        if all(chain.of_all(tried is not None and model_digests(written) == tried.digests)):
            return decision.figures, decision.verdict
        figures = self._judge.figures(info.step, written)
        return figures, self.bounds.judge(figures)

    def append_exactly(
        self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None, why: str
    ) -> Appended:
        """Write a step bit for bit, since it is not known whether a smaller frame keeps the bounds."""
        chooser = self.begin(checkpoint, chain)
        chooser.usage = None  # nothing was measured that the next step could be written alike
        chain.config, chain.unchanged = chooser.exact(), frozenset()
        return chain.append(checkpoint, done=done, quality={"how": "exact", "why": why})

    def can_repeat(self, chain: ChainWriter) -> bool:
        """Whether the next step can be written as the last one was, without being evaluated."""
        chooser = self._chooser
        is_measured = chooser is not None and chooser.last is not None and chooser.usage is not None
        return is_measured and chain.parent is not None

    def repeat(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None) -> Appended:
        """Write a step as the last one was; a restore of it is taken to cost the same."""
        quality = self._quality("predicted", self._figures)
        return chain.append(checkpoint, done=done, quality=quality)

    def check(self, archive: Archive, info: FrameInfo) -> None:
        """Evaluate a step that was archived before."""
        parents = [one for one in archive.frames if one.frame_id == info.parent_id]
        meta = archive.frame(info).meta
        if self._why_not_judged(info.step):
            original, written = self._originals(info.step), archive.checkpoint(info)
            same = original is not None and model_digests(original) == model_digests(written)
            self._note_unjudged(info.step, meta, same=same)
            return
        stale = self._stale(parents[0] if parents else None, info.step)
        figures = self._judge.figures(info.step, archive.checkpoint(info))
        exact = is_exact(str(meta["codec"]), meta["config"])
        how = {"informative": self._is_informative(stale), "exact": exact}
        self._note(info.step, meta, figures, self.bounds.judge(figures).side, **how)

    def saw(self, checkpoint: Checkpoint) -> float:
        """Take note of the learning rate of a checkpoint, whose largest so far counts; return it."""
        rate = max((group.get("lr", 0.0) for group in checkpoint.hyperparameters.values()), default=0.0)
        self._peak = max(self._peak, rate)
        return rate

    def judged(self) -> Judged:
        """Return the evaluated steps so far as a comparison would find them.

        What a frame decodes to was evaluated once, when it was written; here it is put beside its original.
        """
        judge, steps, errors, last = self._judge, [], {}, None
        known = [step for step in sorted(self._steps) if judge.knows(step)]
        for before, step in zip([None, *known], known, strict=False):
            found, first = self._steps[step], judge.original(step)
            if found.drop is None:
                continue
            restored = worse_by(first.value, found.drop, first.direction)
            steps.append(EvaluatedStep.of(step, first.value, restored, found, judge.stale(step, before)))
            errors[step], last = first.standard_errors.get(first.metric), first.log_probs
        n_samples = None if last is None else len(last)
        return Judged(judge, tuple(steps), n_samples, errors)

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
        lasting = 1.0
        if isinstance(codec, EncoderState):
            rows = chain.of_all(codec.shaped(chain.state(keyframe=False).references.values()))
            lasting = codec.lasting(*(sum(counts) for counts in zip(*rows, strict=True)))
        return self.bounds.with_restore_cost(share / lasting)

    def _stale(self, parent: FrameInfo | None, step: int) -> Figures | None:
        """Return the figures of the previous checkpoint in a step's place; of a first step, the next one's.

        None where that is not at hand, or its metric is not finite.
        """
        neighbour = self._following(step) if parent is None else parent.step
        if (
            neighbour is not None
            and not self._judge.knows(neighbour)
            and (self._originals(neighbour) is None or self._why_not_judged(neighbour))
        ):
            neighbour = None
        return self._judge.stale(step, neighbour)

    def _why_not_judged(self, step: int) -> str:
        """Return why nothing can be compared with an original; nothing where it can be judged."""
        try:
            self._judge.original(step)
        except NotFiniteError as error:
            return str(error)
        return ""

    def _quality(self, how: str, figures: Figures) -> dict[str, Any]:
        """Return what a frame says of its own quality: what was found, how, and what was promised."""
        found = {name: value for name in FIGURES if (value := getattr(figures, name)) is not None}
        limits = {name: float(limit) for name, limit in self.bounds.limits.items()}
        peak = {_PEAK: self._peak} if self._peak and self.bounds.max_restore_cost is not None else {}
        return {"how": how, "bounds": limits, **peak} | {name: float(value) for name, value in found.items()}

    def _note(self, step: int, record: Mapping[str, Any], found: Figures, side: str, **how: bool) -> None:
        """Remember how a step keeps the bounds, and the settings that its frame records."""
        config: dict[str, Any] = {"codec": record["codec"], "settings": dict(record["config"])}
        config |= {"override": list(record["overrides"])} if record.get("overrides") else {}
        figures: dict[str, Any] = {name: getattr(found, name) for name in FIGURES}
        self._steps[step] = StepPromise(config=config, side=side, **figures | how)

    def _note_unjudged(self, step: int, record: Mapping[str, Any], *, same: bool) -> None:
        """Remember a step that nothing can be compared with: kept where it is stored bit for bit."""
        side = Verdict(kept=same, usage=0.0).side
        self._note(step, record, Figures(), side, informative=False, exact=same)

    def _is_informative(self, stale: Figures | None) -> bool:
        """Whether the previous checkpoint breaks the bounds; true without one."""
        return stale is None or not self.bounds.judge(stale).kept


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
    """Yield a writer under bounds; its evaluator ends with it.

    Raises
    ------
    UntrustedCodeError, EvaluatorError, InputError
        There is no evaluator that may run, or it is of no use on the first step's original.
    ConfigError
        The codec has nothing to search.
    """
    with Judge(asked.resolve(run), run.__getitem__, bounds) as judge:
        known, following = frozenset(run.steps), dict(pairwise(steps)).get
        writer = BoundedWriter(
            base,
            judge,
            lambda step: run[step] if step in known else None,
            following=following,
            resumed=resumed,
        )
        writer.begin(run[steps[0]])
        # Asked now, before there is an archive, so that an evaluator of no use leaves nothing behind.
        _ = writer.bounds
        yield writer


def written_bounded(
    writer: StepWriter, base: ChainConfig, checkpoints: Iterable[Checkpoint], foreseen: Any
) -> ArchiveSize:
    """Write a chain somewhere temporary, and return its sizes.

    Parameters
    ----------
    writer
        Writes each step.
    base
        How frames are made, but for what is searched.
    checkpoints
        The steps, in order.
    foreseen
        What the first frame is planned with (`inshrink_core.chain.FrameEncoder.look_ahead`).

    Raises
    ------
    CheckFailedError
        The bounds cannot be kept.
    """
    with (
        tempfile.TemporaryDirectory(prefix="inshrink-") as folder,
        ArchiveWriter(Path(folder) / "trial.inshrink", create=True) as archive,
    ):
        chain = ChainWriter(archive, base)
        chain.initial_memory = foreseen
        for checkpoint in checkpoints:
            writer.append(chain, checkpoint)
        return archive_size(chain.archive)
