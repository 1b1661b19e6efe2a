"""Writing a chain under a promise: every restored step keeps bounds on the evaluator's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from inshrink_core.chain import (
    Appended,
    Archive,
    ChainConfig,
    ChainWriter,
    Standing,
    is_exact,
    stored_view,
    tensor_digest,
)
from inshrink_core.chain.defaults import factors_of
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.codec import get_codec
from inshrink_core.search.allocation import allocate
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import encode_step, frame_overhead
from inshrink_core.search.promise import Promise, StepPromise, broken_promise, document_of
from inshrink_core.search.quadratic import sensitivities
from inshrink_core.search.sampling import RatioEstimate, sample_keys
from inshrink_core.search.space import Candidate, LatticeLine, space_of
from inshrink_core.search.step import ChainSearch, Decision
from inshrink_core.search.trials import Trial
from inshrink_core.search.walk import OnTrial, trial_of

if TYPE_CHECKING:
    from inshrink_core.archive.index import FrameIndex
    from inshrink_core.chain import Appended, ChainWriter
    from inshrink_core.chain.append import TensorDone
    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.evaluate import EvaluatorRequest
    from inshrink_core.formats import Run
    from inshrink_core.frame import FrameInfo
    from inshrink_core.search.bounds import Figures

__all__ = [
    "AsConfigured",
    "BoundedWriter",
    "Made",
    "StepTrials",
    "StepWriter",
    "model_digests",
    "open_bounded",
]

_WORTHWHILE: Final = 0.99
"""A delta that saves less than a hundredth against a keyframe is not worth its dependence."""

Originals = Callable[[int], Checkpoint | None]
"""Returns the original of a step, None for one that is not at hand."""


class BoundedWriter:
    """Chooses how each step is written, appends it, and checks what its frame decodes to.

    A `inshrink_core.search.bounded.StepWriter`; one writer writes the steps of one chain, in order.

    Parameters
    ----------
    base
        How frames are made, but for what is searched.
    judge
        The evaluator, and what is promised.
    originals
        The originals; a step whose evaluation the judge knows is its successor's stale copy without being
        at hand.
    following
        Step of the original that comes after one; None where it is not at hand yet. It tells whether the
        bounds say anything of a chain's first step, which has no stale copy.
    resumed
        Whether `base` is what an archive was written with so far, and the search goes on from there.
    told
        Called after each trial.
    """

    def __init__(
        self,
        base: ChainConfig,
        judge: Judge,
        originals: Originals,
        *,
        following: Callable[[int], int | None] | None = None,
        resumed: bool = False,
        told: OnTrial | None = None,
    ) -> None:
        self._judge, self._original, self._told = judge, originals, told
        self._factors_given, self._base = factors_of(base)
        self._following = following or (lambda step: None)
        self._resumed = resumed
        self._begun: tuple[int, ChainSearch] | None = None
        self._last: tuple[bytes, FrameIndex] | None = None
        self._keyframe_nbytes: int | None = None
        self.evaluations = 0
        self.promises: dict[int, StepPromise] = {}

    def begin(self, checkpoint: Checkpoint) -> ChainSearch:
        """Return the search; the first checkpoint tells which layers there are.

        Raises
        ------
        ConfigError
            The codec has nothing to search.
        """
        if self._begun is None:
            layers = frozenset(spec.layer for spec in checkpoint.specs if spec.role in MODEL_ROLES)
            space = space_of(self._base.codec, layers)
            if isinstance(space, LatticeLine):
                space = replace(space, factors=self._factors_given)
            self._begun = checkpoint.step, ChainSearch.begin(space, self._base, resumed=self._resumed)
        return self._begun[1]

    @property
    def bounds(self) -> Bounds:
        """What is promised, as completed by what the evaluator returns.

        Raises
        ------
        EvaluatorError, InputError
            The evaluator fails, changes its mind, or returns nothing that a bound could be checked by.
        """
        if self._begun is None:
            raise RuntimeError("bounds are completed by what is said of a first checkpoint")
        return self._judge.bounds(self._begun[0])

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

        Raises
        ------
        EvaluatorError
            The evaluator failed; the archive is as it was.
        CheckFailedError
            The frame on disk does not decode to what was measured, and breaks the bounds.
        """
        search = self.begin(checkpoint)
        keyframe = chain.keyframe_is_due
        trials = self._trials(chain, checkpoint, keyframe=keyframe)
        neighbour = self._neighbour(chain.parent, checkpoint.step)
        informative = self._is_informative(checkpoint.step, neighbour)
        decision = search.decide(
            self.bounds,
            trials,
            trials.ratios(),
            informative=informative,
            unsure=chain.parent is None and neighbour is None,
            factors=self._factors(chain, trials, search) if informative else None,
        )
        self.evaluations += trials.evaluations
        chosen = trials.made(decision.candidate)
        if not keyframe and (alone := self._alone(decision, checkpoint, chain)) is not None:
            keyframe, (decision, chosen) = True, alone
        appended = self._write(chain, checkpoint, decision, keyframe, done)
        self._last = None if chosen is None else (appended.info.frame_id, chosen.frame_index)
        self._check_written(chain, checkpoint, decision, chosen, informative)
        return appended

    def check(self, archive: Archive, info: FrameInfo) -> None:
        """Judge a step that was archived before."""
        parents = [one for one in archive.frames if one.frame_id == info.parent_id]
        neighbour = self._neighbour(parents[0] if parents else None, info.step)
        figures = self._judge.figures(info.step, archive.checkpoint(info))
        self.evaluations += 1
        meta = archive.frame(info).meta
        self.promises[info.step] = StepPromise(
            config=document_of(meta),
            drop=figures.drop,
            divergence=figures.divergence,
            informative=self._is_informative(info.step, neighbour),
            exact=is_exact(str(meta["codec"]), meta["config"]),
            side=self.bounds.judge(figures).side,
        )

    def _neighbour(self, parent: FrameInfo | None, step: int) -> int | None:
        """Return the step whose original is the stale copy; the one after it for a chain's first step."""
        neighbour = self._following(step) if parent is None else parent.step
        if neighbour is None or self._judge.knows(neighbour):
            return neighbour
        return None if self._original(neighbour) is None else neighbour

    def _is_informative(self, step: int, neighbour: int | None) -> bool:
        """Whether the neighbour's original, in this one's place, breaks the bounds; true without one."""
        stale = self._judge.stale(step, neighbour)
        return stale is None or not self.bounds.judge(stale).kept

    def _trials(self, chain: ChainWriter, checkpoint: Checkpoint, *, keyframe: bool) -> StepTrials:
        """Return what measures candidates as the next frame of the chain."""
        standing = chain.standing(keyframe=keyframe)
        index = None if keyframe else self._index_of_parent(chain, checkpoint)
        return StepTrials(self._base, self._judge, checkpoint, standing, index, self._told)

    def _index_of_parent(self, chain: ChainWriter, checkpoint: Checkpoint) -> FrameIndex:
        """Return the parent's index, about, where this writer did not make it: for the size of a delta."""
        if self._last is not None and chain.parent is not None and self._last[0] == chain.parent.frame_id:
            return self._last[1]
        stored = stored_view(checkpoint, chain.config.optimizer)
        return frame_overhead(stored, {}, chain.config, chain.config.record(), None)[1]

    def _factors(
        self, chain: ChainWriter, trials: StepTrials, search: ChainSearch
    ) -> Mapping[str, float] | None:
        """Return factors of the layer types to try: at the 2nd, 4th, 8th … delta, for they cost encodings."""
        space, parent = search.space, chain.parent
        if not isinstance(space, LatticeLine) or not trials.standing.references or parent is None:
            return None
        n_frames = len(chain.writer.reader.history(parent.frame_id))
        if n_frames < 2 or n_frames & (n_frames - 1):
            return None
        at = search.last if search.last is not None else search.start
        return trials.factors(space, at, self._original(parent.step))

    def _alone(
        self, decision: Decision, checkpoint: Checkpoint, chain: ChainWriter
    ) -> tuple[Decision, Made] | None:
        """Return the choice as a keyframe, where a delta saves nothing and that keeps the bounds too."""
        if self._keyframe_nbytes is None or decision.trial is None or decision.candidate is None:
            return None
        if decision.trial.weights_nbytes < _WORTHWHILE * self._keyframe_nbytes:
            return None
        trials = self._trials(chain, checkpoint, keyframe=True)
        alone = trials(decision.candidate)
        self.evaluations += trials.evaluations
        verdict, made = self.bounds.judge(alone.figures), trials.made(decision.candidate)
        if made is None or alone.weights_nbytes > decision.trial.weights_nbytes or not verdict.kept:
            return None
        return replace(decision, trial=alone, verdict=verdict), made

    def _write(
        self,
        chain: ChainWriter,
        checkpoint: Checkpoint,
        decision: Decision,
        keyframe: bool,
        done: TensorDone | None,
    ) -> Appended:
        """Append the frame that was decided on."""
        if decision.candidate is None:
            chain.config = self._exact(self.begin(checkpoint))
            return chain.append(checkpoint, done=done, keyframe=keyframe or None)
        chain.config = decision.candidate.chain_config(self._base)
        appended = chain.append(checkpoint, done=done, keyframe=keyframe)
        if keyframe and decision.trial is not None:
            self._keyframe_nbytes = decision.trial.weights_nbytes
        return appended

    def _exact(self, search: ChainSearch) -> ChainConfig:
        """Return how a step is stored bit for bit, with as little harm to what follows as the codec can.

        Of its optimizer state, too, unless something else than the default was asked for.
        """
        space = search.space
        if isinstance(space, LatticeLine):
            at = search.last if search.last is not None else search.start
            candidate = space.candidate(at)
            exact = replace(candidate, settings={**candidate.settings, "exact": True})
            chain = exact.chain_config(self._base)
            return chain.made_exact(chain.codec, chain.config)
        lossless = get_codec("lossless")
        return replace(self._base, overrides=()).made_exact(lossless.name, lossless())

    def _check_written(
        self,
        chain: ChainWriter,
        checkpoint: Checkpoint,
        decision: Decision,
        chosen: Made | None,
        informative: bool,
    ) -> None:
        """Decode the frame from disk: it must be what was measured; else it is judged by itself."""
        archive, info = Archive(chain.writer.reader), chain.parent
        if info is None:
            raise RuntimeError("a frame was appended, and there is none")
        written = archive.checkpoint(info)
        same = model_digests(written) == (model_digests(checkpoint) if chosen is None else chosen.digests)
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


class Made(NamedTuple):
    """What is remembered of a trial: its states would fill a memory, were there many."""

    frame_index: FrameIndex
    digests: Mapping[str, bytes]


class StepTrials:
    """Measures candidates at one step, against one standing; called with each.

    Parameters
    ----------
    base
        How frames are made, but for what is searched.
    judge
        The evaluator.
    checkpoint
        The step.
    standing, index
        What it is encoded against, and the index it inherits from.
    told
        Called after each trial.
    """

    def __init__(
        self,
        base: ChainConfig,
        judge: Judge,
        checkpoint: Checkpoint,
        standing: Standing,
        index: FrameIndex | None,
        told: OnTrial | None = None,
    ) -> None:
        self._base, self._judge, self._told = base, judge, told
        self.checkpoint, self.standing, self.index = checkpoint, standing, index
        self._made: dict[str, Made] = {}
        self._figures: dict[tuple[tuple[str, bytes], ...], Figures] = {}
        self.evaluations = 0

    def __call__(self, candidate: Candidate) -> Trial:
        """Encode a candidate in memory and ask the evaluator, once about the same restored state."""
        begun = time.perf_counter()
        chain = candidate.chain_config(self._base)
        encoded = encode_step(chain, self.checkpoint, self.standing, self.index)
        restored = encoded.restored()
        made = Made(encoded.index, model_digests(restored))
        state = tuple(made.digests.items())
        if state not in self._figures:
            self._figures[state] = self._judge.figures(self.checkpoint.step, restored, until_broken=True)
            self.evaluations += 1
        self._made[candidate.digest], figures = made, self._figures[state]
        trial = trial_of(encoded, candidate, figures, None, begun)
        if self._told is not None:
            self._told(trial)
        return trial

    def ratios(self) -> RatioEstimate:
        """Return what estimates ratios of candidates at this step, without the evaluator."""
        return RatioEstimate(self._base, self.checkpoint, self.standing, self.index)

    def factors(
        self, line: LatticeLine, coarseness: float, before: Checkpoint | None
    ) -> Mapping[str, float] | None:
        """Return factors of the layer types worth trying around a global step; None for none.

        Parameters
        ----------
        line, coarseness
            What is searched, and where it stands.
        before
            The original of the step before, whose movement stands for second moments where there are none.
        """
        h = sensitivities(self.checkpoint, before)
        keys = sample_keys(self.checkpoint)
        found = allocate(self._base, line, coarseness, self.checkpoint, self.standing, h, self.index, keys)
        return found.factors or None

    def made(self, candidate: Candidate | None) -> Made | None:
        """Return what is remembered of a candidate's trial; None where there was none."""
        return None if candidate is None else self._made.get(candidate.digest)


def model_digests(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the SHA-256 of every weight and buffer."""
    specs = [spec for spec in checkpoint.specs if spec.role in MODEL_ROLES]
    return {spec.key: tensor_digest(checkpoint[spec.key]) for spec in specs}


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
