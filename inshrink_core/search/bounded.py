"""Writing a chain under bounds: every restored step keeps them by the evaluator's figures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from inshrink_core.archive import ArchiveWriter
from inshrink_core.archive.digest import is_sound
from inshrink_core.chain import ArchiveSize, ChainConfig, ChainWriter, archive_size, is_exact
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.errors import CheckFailedError, DamagedError
from inshrink_core.search.bounds import Bounds, Figures, Verdict
from inshrink_core.search.choosing import Chooser, Decision
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import restored_from
from inshrink_core.search.promise import Judged, Originals, Promise, Promises
from inshrink_core.search.trials import OnTrial, model_digests

if TYPE_CHECKING:
    from inshrink_core.chain import Appended, Archive
    from inshrink_core.chain.append import TensorDone
    from inshrink_core.evaluate import EvaluatorRequest
    from inshrink_core.formats import Run
    from inshrink_core.frame import FrameInfo


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
        Step of the original that comes after one (`inshrink_core.search.promise.Promises`).
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
    promises
        The bounds, and how each step keeps them.
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
        self.promises = Promises(judge, originals, following or (lambda step: None))
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
        self.promises.begin(checkpoint.step)
        return self._chooser

    @property
    def promise(self) -> Promise:
        """The bounds, and how the steps so far keep them."""
        return self.promises.so_far()

    def judged(self) -> Judged:
        """Return how the steps so far compare with their originals, and by which evaluator."""
        return self.promises.judged()

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
        chooser, promises = self.begin(checkpoint, chain), self.promises
        is_judged = self._follows or not promises.are_known
        if not is_judged and (why := promises.why_not_judged(checkpoint.step)):
            self.appended = self.append_exactly(chain, checkpoint, done, why)
            promises.note_unjudged(checkpoint.step, chain.config.record(), same=True)
            return self.appended
        wanted = promises.of_next(chain, checkpoint)
        decision = chooser.choose(chain, checkpoint, wanted)
        # The size of a keyframe upon a base model is no measure of others.
        based = chain.base is not None and chain.parent is None
        if decision.candidate is None:
            chain.config = chooser.exact()
            quality = {"how": "exact", "why": "nothing coarser keeps the bounds"}
        else:
            chain.config = decision.candidate.chain_config(chooser.base)
            quality = promises.quality("measured", decision.figures)
        keyframe = decision.keyframe or (None if decision.candidate is None else False)
        appended = self.appended = chain.append(
            checkpoint, done=done, keyframe=keyframe, quality=quality, prepared=decision.prepared
        )
        chooser.wrote(decision, appended.info.frame_id, based=based)
        self._figures, verdict = self._written(chain, checkpoint, decision, appended)
        record, exact = chain.config.record(), decision.trial is None
        promises.note(
            checkpoint.step, record, self._figures, verdict, informative=wanted.informative, exact=exact
        )
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
        return figures, self.promises.bounds.judge(figures)

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
        quality = self.promises.quality("predicted", self._figures)
        return chain.append(checkpoint, done=done, quality=quality)

    def check(self, archive: Archive, info: FrameInfo) -> None:
        """Evaluate a step that was archived before."""
        parents = [one for one in archive.frames if one.frame_id == info.parent_id]
        meta, promises = archive.frame(info).meta, self.promises
        if promises.why_not_judged(info.step):
            original, written = self._originals(info.step), archive.checkpoint(info)
            same = original is not None and model_digests(original) == model_digests(written)
            promises.note_unjudged(info.step, meta, same=same)
            return
        stale = promises.stale(parents[0] if parents else None, info.step)
        figures = self._judge.figures(info.step, archive.checkpoint(info))
        promises.note(
            info.step,
            meta,
            figures,
            promises.bounds.judge(figures),
            informative=promises.is_informative(stale),
            exact=is_exact(str(meta["codec"]), meta["config"]),
        )


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
        _ = writer.promises.bounds
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
