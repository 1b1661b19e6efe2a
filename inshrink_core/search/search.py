"""Search of one configuration for a complete run: chains as trials, and the trial log.

A trial writes the chain with a configuration in memory. It stops at the first step that breaks a bound, so a
poor configuration costs few evaluations.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from inshrink_core.archive.document import pack_value
from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainState
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.errors import NotFoundError
from inshrink_core.evaluate.comparison import largest
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.execution.results import results_folder
from inshrink_core.formats import Run, unreadable_error
from inshrink_core.search.bounds import FIGURES, Bounds
from inshrink_core.search.measure import (
    EncodedStep,
    attachment_sizes,
    encode_chain,
    encode_step,
    estimate_rest,
    following,
    in_proportion,
    middle_of,
    sample_keys,
)
from inshrink_core.search.quadratic import damage_of, sensitivities
from inshrink_core.search.space import Cube, Line, Settings, with_settings
from inshrink_core.search.trials import Measurer, Trial, TrialLog, checkpoint_digest
from inshrink_core.search.walk import Outcome, Walk, walk_cube, walk_line

_LOG_NAME: Final = "search.jsonl"

# Maximum number of values of a line that one search tries.
_MAX_CHAINS: Final = 8


def trial_log_of(run: Run, *, make: bool) -> TrialLog:
    """Return the log of all searches on a run, among the run's results; `make` creates its folder."""
    folder = results_folder(run.directory, make=make)
    path = None if folder is None else folder / _LOG_NAME
    if path is None or not (make or path.is_file()):
        return TrialLog(None, "")
    return TrialLog(path, checkpoint_digest(run[run.steps[0]]))


def choose_steps(run: Run, steps: Iterable[int] | None) -> tuple[int, ...]:
    """Return the steps of the chain, ascending; each of them must exist.

    Raises
    ------
    NotFoundError
        A step does not exist, or the run has none.
    """
    chosen = run.steps if steps is None else tuple(sorted(set(steps)))
    missing = [step for step in chosen if step not in run.steps]
    if error := unreadable_error(run.unreadable, run.address, missing):
        raise error
    if missing or not chosen:
        raise NotFoundError(
            f"the run has no step {missing[0]}" if missing else "there is no step to search on",
            where=run.address,
            remedy=f"it has {run.steps[0]} to {run.steps[-1]}; `inshrink inspect` lists them",
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A run written with one configuration.

    Parameters
    ----------
    settings
        The candidate's settings.
    trials
        One trial per step; fewer if the chain was abandoned.
    complete
        Whether all steps are present.
    """

    settings: Settings
    trials: tuple[Trial, ...]
    complete: bool

    @property
    def ratio_weights(self) -> float:
        """Raw bytes of the weights over their stored bytes, for all frames together."""
        nbytes = sum(trial.weights_nbytes for trial in self.trials)
        return sum(trial.raw_weights for trial in self.trials) / nbytes if nbytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``best`` in ``inshrink search --json``.

        Returns
        -------
        config : object
            Settings, as in a config file.
        ratio_weights : float
            Raw bytes over stored bytes of weights and buffers, including headers and indexes.
        drop : float
            Relative change of the metric for the worse, signed; None if the original's metric is 0.
        divergence : float
            Divergence of the predictions (docs/evaluators.md#the-function); None if the evaluator returns
            none.
        restore_cost : float
            Expected rise of the loss, as a share of it; None if unknown.
        """
        worst = {name: largest(self.trials, name) for name in FIGURES}
        return {"config": self.trials[0].config, "ratio_weights": self.ratio_weights, **worst}


@dataclass(kw_only=True)
class ChainTrials(Measurer):
    """Measures points of a space by complete chains.

    Parameters
    ----------
    checkpoints
        The originals, by step.
    steps
        Training steps, ascending.
    log
        Known trials, and log of new ones.
    initial
        Encoder memory before the first frame (`inshrink_core.chain.look_ahead`).
    progress
        Callback after each trial; an exception cancels the search, and the log keeps all measurements.

    Attributes
    ----------
    bounds
        The bounds of every step, completed by the evaluator.
    known
        Chains measured so far, by the candidate's settings as JSON.
    evaluations
        Trials measured, without those of the log.
    most
        Chains that are measured at most.
    after
        Trials that follow these chains at most.
    """

    checkpoints: Callable[[int], Checkpoint]
    steps: tuple[int, ...]
    log: TrialLog
    initial: Any = None
    progress: OnProgress | None = None
    bounds: Bounds = field(init=False)
    known: dict[str, Chain] = field(default_factory=dict)
    evaluations: int = 0
    most: int = 1
    after: int = 0

    def __post_init__(self) -> None:
        self.bounds = self.evaluator.bounds(self.steps[0])
        self._before = dict(zip(self.steps[1:], self.steps, strict=False))
        self._digest = functools.cache(lambda step: checkpoint_digest(self.checkpoints(step)))
        self._h = functools.cache(self._sensitivities)

    def _sensitivities(self, step: int) -> Mapping[str, float]:
        previous = self.checkpoints(self._before[step]) if step in self._before else None
        return sensitivities(self.checkpoints(step), previous)

    def document(self, candidate: Settings, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
        """Return the configuration of a candidate for the first step, by which its trials belong together."""
        return super().document(candidate, self.checkpoints(self.steps[0]))

    def report(self, trial: Trial, done: int, left: int, found: Mapping[str, Any] | None = None) -> None:
        """Report a trial, the number of measured trials, and the maximum number left."""
        if self.progress is not None:
            self.progress(Progress("search", done, done + left, trial.step, found=found))

    def is_not_discriminative(self, step: int) -> bool:
        """Return whether the previous checkpoint keeps the bounds at a step too."""
        if not self.bounds.limits:
            return False
        baseline = self.evaluator.baseline(step, self._before.get(step))
        return baseline is not None and self.bounds.check(baseline).within

    def walk(self, space: Cube | Line, budget: int | None) -> Walk[Any]:
        """Return a walk over a space that measures chains."""

        def measure(point: Any) -> Outcome[Any]:
            chain = self.chain(space.settings(point))
            usage = max((self.bounds.check(trial).usage for trial in chain.trials), default=0.0)
            return Outcome(point, self.keeps(chain), chain.ratio_weights, usage, chain)

        return Walk(measure, budget)

    def chain(self, candidate: Settings, *, to_the_end: bool = False) -> Chain:
        """Return a chain with one configuration; stop at the first step that breaks the bounds."""
        key = json.dumps(candidate, sort_keys=True)
        known = self.known.get(key)
        if known is not None and (known.complete or not to_the_end):
            return known
        n_steps = len(self.steps)
        others = n_steps * max(0, self.most - 1 - len(self.known)) + self.after
        trials: list[Trial] = []
        for place, trial in enumerate(self._trials(candidate), 1):
            trials.append(trial)
            if not trial.cached:
                self.evaluations += 1
                self.report(trial, self.evaluations, n_steps - place + others, found=trial.to_json())
            if not (to_the_end or self.bounds.check(trial).within):
                break
        chain = Chain(settings=candidate, trials=tuple(trials), complete=len(trials) == n_steps)
        self.known[key] = chain
        return chain

    def _trials(self, candidate: Settings) -> Iterator[Trial]:
        """Yield the trials of a chain with one configuration, from the log or newly measured.

        A trial depends on all earlier checkpoints. Steps with a logged trial are encoded only if a later step
        is measured.
        """
        chain = self.config(candidate, self.checkpoints(self.steps[0]))
        every, before, n_encoded = chain.keyframe_every, None, 0
        record = json.dumps(chain.record() | {"keyframe_every": every}, sort_keys=True)
        key = hashlib.sha256(pack_value([record, self.initial, self.evaluator.digest]))

        def against(before: EncodedStep | None, place: int) -> tuple[ChainState, FrameIndex | None]:
            return following(before, keyframe=place % every == 0, initial=self.initial)

        for place, step in enumerate(self.steps):
            key.update(self._digest(step).encode())
            known = self.log.get(key.hexdigest()[:32])
            if known is not None:
                yield replace(known, config=self.document(candidate), cached=True)
                continue
            for missing in range(n_encoded, place):
                checkpoint = self.checkpoints(self.steps[missing])
                config = self.config(candidate, checkpoint)
                before = encode_step(config, checkpoint, *against(before, missing))
            state, index = against(before, place)
            trial, before, _ = self.measured(candidate, self.checkpoints(step), state, index)
            n_encoded = place + 1
            trial = replace(trial, damage=damage_of(before.squared_errors, self._h(step)))
            self.log.add(key.hexdigest()[:32], trial)
            yield trial

    def keeps(self, chain: Chain) -> bool:
        """Return whether all steps are present and keep the bounds."""
        return chain.complete and all(self.bounds.check(trial).within for trial in chain.trials)

    def ratio_total(self, best: Chain) -> float | None:
        """Estimate the total ratio; trials measure only the weights."""
        checkpoints = [self.checkpoints(step) for step in middle_of(self.steps)]
        chain = with_settings(self.base, best.settings)
        files = attachment_sizes(checkpoints, chain.optimizer)
        rest = estimate_rest(chain, checkpoints, len(self.steps), sample_keys(checkpoints[0]), files)
        raw = sum(trial.raw_weights for trial in best.trials)
        return rest.ratio_total(raw, sum(trial.weights_nbytes for trial in best.trials))

    def ratio(self, candidate: Settings) -> float:
        """Estimate the ratio of a chain from a sample of its tensors, without the evaluator.

        The estimate encodes consecutive steps from the middle of the run, a keyframe and two deltas.
        """
        checkpoints = [self.checkpoints(step) for step in middle_of(self.steps)]
        chain = with_settings(self.base, candidate)
        encoded = encode_chain(chain, checkpoints, sample_keys(checkpoints[0]), self.initial)
        sizes = [item.scaled_nbytes for item in encoded]
        raw = sum(checkpoint.raw_bytes(MODEL_ROLES) for checkpoint in checkpoints) / len(checkpoints)
        total = in_proportion(sizes[:1], sizes[1:], len(self.steps), chain.keyframe_every)
        return len(self.steps) * raw / total if total else 0.0


def best_within(
    chains: ChainTrials, space: Cube | Line, budget: int | None, *, discriminative: bool
) -> Chain | None:
    """Return the best chain that keeps the bounds.

    Parameters
    ----------
    chains, space
        Measurement of chains, and search space. A search on a line starts at the settings of the base.
    budget
        Maximum number of chains to measure.
    discriminative
        False if the bounds are discriminative at no step: nothing coarser than the start is tried.
    """
    best: Outcome[Any] | None
    if isinstance(space, Line):
        start, limit = space.point_of(chains.base.config), budget or _MAX_CHAINS
        chains.most = 1 + limit
        walk = chains.walk(space, limit)
        best = walk_line(walk, start) if discriminative else walk_line(walk, start, most=start)
    else:
        n_points = len(space.points())
        chains.most = 1 + min(budget or n_points, n_points)
        best = walk_cube(chains.walk(space, budget), space, lambda point: chains.ratio(space.settings(point)))
    chains.most = len(chains.known) + 1  # the default's chain is the last one
    return None if best is None else best.result
