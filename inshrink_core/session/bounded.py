"""Writing a chain under a promise: every restored step keeps bounds on the evaluator's figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from inshrink_core.chain import (
    Appended,
    Archive,
    ChainConfig,
    ChainWriter,
    Standing,
    stored_view,
    tensor_digest,
)
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.codec import get_codec
from inshrink_core.evaluate import resolve_evaluator
from inshrink_core.search.allocation import allocate
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import encode_step
from inshrink_core.search.quadratic import sensitivities
from inshrink_core.search.sampling import RatioEstimate, sample_keys
from inshrink_core.search.sizes import frame_overhead
from inshrink_core.search.space import Candidate, LatticeLine, space_of
from inshrink_core.search.step import ChainSearch, Decision
from inshrink_core.search.trials import Trial
from inshrink_core.search.walk import OnTrial, trial_of
from inshrink_core.session.config import factors_of
from inshrink_core.session.promise import Promise, StepPromise, broken_promise, document_of, is_exact

if TYPE_CHECKING:
    from inshrink_core.archive.index import FrameIndex
    from inshrink_core.chain.append import TensorDone
    from inshrink_core.formats import Run
    from inshrink_core.frame import FrameInfo

__all__ = ["BoundedWriter", "open_bounded"]

_WORTHWHILE = 0.99
"""A delta that saves less than a hundredth against a keyframe is not worth its dependence."""


class _Made(NamedTuple):
    """What is remembered of a trial: its states would fill a memory, were there many."""

    frame_index: FrameIndex
    digests: Mapping[str, bytes]


class BoundedWriter:
    """Chooses how each step is written, appends it, and checks what its frame decodes to.

    Parameters
    ----------
    run
        The originals.
    steps
        Steps of the chain, ascending.
    base
        How frames are made, but for what is searched.
    judge
        The evaluator, and what is promised.
    resumed
        Whether `base` is what an archive was written with so far, and the search goes on from there.
    told
        Called after each trial.
    """

    def __init__(
        self,
        run: Run,
        steps: tuple[int, ...],
        base: ChainConfig,
        judge: Judge,
        *,
        resumed: bool = False,
        told: OnTrial | None = None,
    ) -> None:
        self._run, self._steps, self._judge, self._told = run, steps, judge, told
        layers = frozenset(spec.layer for spec in run[steps[0]].specs if spec.role in MODEL_ROLES)
        space = space_of(base.codec, layers)
        factors, self._base = factors_of(base)
        if isinstance(space, LatticeLine):
            space = replace(space, factors=factors)
        self._search = ChainSearch.begin(space, self._base, resumed=resumed)
        self._index: FrameIndex | None = None
        self._keyframe_nbytes: int | None = None
        self.evaluations = 0
        self.promises: dict[int, StepPromise] = {}

    @property
    def bounds(self) -> Bounds:
        """What is promised, as completed by what the evaluator returns."""
        return self._judge.bounds(self._steps[0])

    def require_evaluator(self) -> None:
        """Ask the evaluator about the first original, so that one of no use is known at once.

        Raises
        ------
        EvaluatorError, InputError
            It fails, changes its mind, or returns nothing that a bound could be checked by.
        """
        self._judge.bounds(self._steps[0])

    @property
    def promise(self) -> Promise:
        """What was promised, and how the steps seen so far keep it."""
        return Promise(bounds=self.bounds, steps=self.promises, evaluations=self.evaluations)

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone) -> Appended:
        """Write a step with the smallest frame found that keeps the bounds, exactly where there is none.

        Raises
        ------
        EvaluatorError
            The evaluator failed; the archive is as it was.
        CheckFailedError
            The frame on disk does not decode to what was measured, and breaks the bounds.
        """
        step = checkpoint.step
        keyframe = chain.keyframe_is_due
        standing = chain.standing(checkpoint, keyframe=keyframe)
        index = None if keyframe else self._index or _index_of_parent(chain, checkpoint)
        before = None if chain.parent is None else self._original_step(chain.parent)
        informative = self._is_informative(step, before)
        encoded: dict[str, _Made] = {}

        def measure(candidate: Candidate) -> Trial:
            return self._measure(checkpoint, candidate, standing, index, encoded)

        decision = self._search.decide(
            self.bounds,
            measure,
            RatioEstimate(self._base, checkpoint, standing, index),
            informative=informative,
            first=chain.parent is None,
            factors=self._factors(chain, checkpoint, standing, index) if informative else None,
        )
        if decision.candidate is not None and not keyframe:
            keyframe = self._stands_alone(decision, checkpoint, chain, encoded)
        appended = self._write(chain, checkpoint, decision, keyframe, done)
        chosen = encoded.get(decision.candidate.digest) if decision.candidate is not None else None
        self._index = chosen.frame_index if chosen is not None else None
        self._check_written(chain, checkpoint, decision, chosen, informative)
        return appended

    def check(self, archive: Archive, info: FrameInfo) -> None:
        """Judge a step that was archived before."""
        step = info.step
        parents = [one for one in archive.frames if one.frame_id == info.parent_id]
        before = self._original_step(parents[0]) if parents else None
        figures = self._judge.figures(step, archive.checkpoint(info))
        self.evaluations += 1
        meta = archive.frame(info).meta
        self.promises[step] = StepPromise(
            config=document_of(meta),
            drop=figures.drop,
            divergence=figures.divergence,
            informative=self._is_informative(step, before),
            exact=is_exact(meta),
            side=self.bounds.judge(figures).side,
        )

    def _original_step(self, info: FrameInfo) -> int | None:
        """Return the step of a frame whose original is in the run: the stale copy of what follows it."""
        return info.step if info.step in self._run.steps else None

    def _is_informative(self, step: int, before: int | None) -> bool:
        """Whether the stale copy breaks the bounds; the first step has none, and is taken to be so."""
        stale = self._judge.stale(step, before)
        return stale is None or not self.bounds.judge(stale).kept

    def _measure(
        self,
        checkpoint: Checkpoint,
        candidate: Candidate,
        standing: Standing,
        index: FrameIndex | None,
        encoded: dict[str, _Made],
    ) -> Trial:
        """Encode a candidate in memory and ask the evaluator."""
        begun = time.perf_counter()
        made = encode_step(candidate.chain_config(self._base), checkpoint, standing, index)
        restored = made.restored()
        encoded[candidate.digest] = _Made(made.index, _digests(restored))
        figures = self._judge.figures(checkpoint.step, restored)
        self.evaluations += 1
        trial = trial_of(made, candidate, figures, None, begun)
        if self._told is not None:
            self._told(trial)
        return trial

    def _factors(
        self, chain: ChainWriter, checkpoint: Checkpoint, standing: Standing, index: FrameIndex | None
    ) -> Mapping[str, float] | None:
        """Return factors of the layer types to try: at the 2nd, 4th, 8th … delta, for they cost encodings."""
        space, parent = self._search.space, chain.parent
        if not isinstance(space, LatticeLine) or not standing.references or parent is None:
            return None
        n_frames = len(chain.writer.reader.history(parent.frame_id))
        if n_frames < 2 or n_frames & (n_frames - 1):
            return None
        before = self._original_step(parent)
        h = sensitivities(checkpoint, None if before is None else self._run[before])
        at = self._search.last if self._search.last is not None else self._search.start
        keys = sample_keys(checkpoint)
        return allocate(self._base, space, at, checkpoint, standing, h, index, keys).factors or None

    def _stands_alone(
        self,
        decision: Decision,
        checkpoint: Checkpoint,
        chain: ChainWriter,
        encoded: dict[str, _Made],
    ) -> bool:
        """Whether a step should be a keyframe: a delta saves nothing, and a keyframe keeps the bounds too."""
        if self._keyframe_nbytes is None or decision.trial is None or decision.candidate is None:
            return False
        if decision.trial.weights_nbytes < _WORTHWHILE * self._keyframe_nbytes:
            return False
        standing = chain.standing(checkpoint, keyframe=True)
        alone: dict[str, _Made] = {}
        trial = self._measure(checkpoint, decision.candidate, standing, None, alone)
        smaller = trial.weights_nbytes <= decision.trial.weights_nbytes
        if not smaller or not self.bounds.judge(trial.figures).kept:
            return False
        encoded.update(alone)
        return True

    def _write(
        self,
        chain: ChainWriter,
        checkpoint: Checkpoint,
        decision: Decision,
        keyframe: bool,
        done: TensorDone,
    ) -> Appended:
        """Append the frame that was decided on."""
        if decision.candidate is None:
            chain.config = self._exact()
            return chain.append(checkpoint, done=done, keyframe=keyframe or None)
        chain.config = decision.candidate.chain_config(self._base)
        appended = chain.append(checkpoint, done=done, keyframe=keyframe)
        if keyframe and decision.trial is not None:
            self._keyframe_nbytes = decision.trial.weights_nbytes
        return appended

    def _exact(self) -> ChainConfig:
        """Return how a step is stored bit for bit, with as little harm to what follows as the codec can."""
        space = self._search.space
        if isinstance(space, LatticeLine):
            at = self._search.last if self._search.last is not None else self._search.start
            candidate = space.candidate(at)
            exact = replace(candidate, settings={**candidate.settings, "exact": True})
            return exact.chain_config(self._base)
        lossless = get_codec("lossless")
        return replace(self._base, codec=lossless.name, config=lossless.config_type(), overrides=())

    def _check_written(
        self,
        chain: ChainWriter,
        checkpoint: Checkpoint,
        decision: Decision,
        chosen: _Made | None,
        informative: bool,
    ) -> None:
        """Decode the frame from disk: it must be what was measured; else it is judged by itself."""
        archive, info = Archive(chain.writer.reader), chain.parent
        if info is None:
            raise RuntimeError("a frame was appended, and there is none")
        written = archive.checkpoint(info)
        same = _digests(written) == (_digests(checkpoint) if chosen is None else chosen.digests)
        trial, verdict = decision.trial, decision.verdict
        drop, divergence = (0.0, None) if trial is None else (trial.drop, trial.divergence)
        if trial is None or not same:
            figures = self._judge.figures(checkpoint.step, written)
            self.evaluations += 1
            drop, divergence, verdict = figures.drop, figures.divergence, self.bounds.judge(figures)
        self.promises[checkpoint.step] = StepPromise(
            config=document_of(chain.config.record()),
            drop=drop,
            divergence=divergence,
            informative=informative,
            exact=trial is None,
            side=verdict.side,
        )
        if not verdict.kept:
            raise broken_promise(checkpoint.step, archive, verdict)


def _digests(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the SHA-256 of every weight and buffer."""
    specs = [spec for spec in checkpoint.specs if spec.role in MODEL_ROLES]
    return {spec.key: tensor_digest(checkpoint[spec.key]) for spec in specs}


def _index_of_parent(chain: ChainWriter, checkpoint: Checkpoint) -> FrameIndex:
    """Return about what the parent's index is, for the size of a delta to a frame of another session."""
    stored = stored_view(checkpoint, chain.config.optimizer)
    return frame_overhead(stored, {}, chain.config.record(), None)[1]


@contextmanager
def open_bounded(
    run: Run,
    steps: tuple[int, ...],
    base: ChainConfig,
    bounds: Bounds,
    *,
    evaluator: str | None,
    metric: str | None,
    direction: str | None,
    trust_run: bool,
    timeout: float,
    resumed: bool = False,
    told: OnTrial | None = None,
) -> Iterator[BoundedWriter]:
    """Yield a writer under a promise; its evaluator ends with it.

    Raises
    ------
    UntrustedCodeError, EvaluatorError, InputError
        There is no evaluator that may run.
    """
    asked = resolve_evaluator(
        run.settings,
        run.directory,
        evaluator=evaluator,
        metric=metric,
        direction=direction,
        trust_run=trust_run,
        timeout=timeout,
    )
    with Judge([asked], run.__getitem__, bounds) as judge:
        yield BoundedWriter(run, steps, base, judge, resumed=resumed, told=told)
