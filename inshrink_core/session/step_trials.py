"""Trials of one step that is about to be written: encoded in memory, judged, and remembered by digests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from inshrink_core.chain import ChainConfig, Standing, tensor_digest
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.search.allocation import allocate
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import encode_step
from inshrink_core.search.quadratic import sensitivities
from inshrink_core.search.sampling import RatioEstimate, sample_keys
from inshrink_core.search.space import Candidate, LatticeLine
from inshrink_core.search.trials import Trial
from inshrink_core.search.walk import OnTrial, trial_of

if TYPE_CHECKING:
    from inshrink_core.archive.index import FrameIndex
    from inshrink_core.search.bounds import Figures

__all__ = ["Made", "StepTrials", "model_digests"]


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
