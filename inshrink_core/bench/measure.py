"""Measuring one configuration: compress, decode, evaluate, and the same evaluations for the stale copy."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.analysis.gain import restore_gain
from inshrink_core.bench.memory import PeakMemory
from inshrink_core.bench.points import Point
from inshrink_core.bench.rows import REPEAT
from inshrink_core.bench.variants import Variant
from inshrink_core.chain import Archive
from inshrink_core.errors import EvaluatorError
from inshrink_core.evaluate import Comparison, Evaluator, OriginalEvaluations, compare_steps
from inshrink_core.metrics import drop
from inshrink_core.verbs.compress import compress

if TYPE_CHECKING:
    from inshrink_core.formats import Run

__all__ = ["Bench"]

_MEGA = 1e6

_WARM_STEPS = 2
"""A keyframe and a delta: what is compiled at first use is compiled then."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all measurements of a bench have in common.

    Parameters
    ----------
    run, steps
        What is compressed.
    evaluator, originals
        What judges it, and what that says of the originals.
    optimizer, keyframe_every, device, threads
        As `inshrink_core.verbs.compress` takes them.
    folder
        Where archives stand while they are measured.
    """

    run: Run
    steps: tuple[int, ...]
    evaluator: Evaluator
    originals: OriginalEvaluations
    optimizer: str
    keyframe_every: int
    device: str
    threads: int | None
    folder: Path

    def warm_up(self, variant: Variant, value: float | None) -> None:
        """Compress two steps and decode them, so that no compilation is measured."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            target = Path(scratch) / "warm.inshrink"
            self._compress(variant, value, target, self.steps[:_WARM_STEPS])
            _decode(Archive.open(target), self.steps[:_WARM_STEPS])

    def measure(self, variant: Variant, value: float | None, evaluated: Callable[[int], None]) -> Point:
        """Return the point of one configuration.

        Parameters
        ----------
        variant, value
            The codec, and where its knob stands.
        evaluated
            Called with the number of steps evaluated so far.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            target = Path(scratch) / "bench.inshrink"
            with PeakMemory() as memory:
                report = self._compress(variant, value, target, self.steps)
                begun = time.perf_counter()
                nbytes = _decode(Archive.open(target), self.steps)
                decode_seconds = time.perf_counter() - begun
            begun = time.perf_counter()
            _decode(Archive.open(target), self.steps[-1:])
            restore_seconds = time.perf_counter() - begun
            gain = restore_gain(target, self.run).pooled
            judged, failure = self._judge(target, evaluated)
        first = self.originals(self.steps[0])
        point = Point(
            codec=variant.label,
            config=variant.config(value).settings(),
            knob=value,
            metric=first.metric,
            direction=first.direction.value,
            ratio_weights=report.size.ratio_weights,
            ratio_total=report.size.ratio_total,
            restore_gain=gain.gain,
            restore_noise=gain.noise,
            encode_mb_per_s=report.mb_per_s,
            decode_mb_per_s=nbytes / _MEGA / decode_seconds,
            restore_seconds=restore_seconds,
            peak_memory_bytes=memory.nbytes,
            failure=failure,
        )
        return point if judged is None else _with_figures(point, judged)

    def repeat(self, evaluated: Callable[[int], None]) -> Point:
        """Return the point of the stale copy; evaluates every original step."""
        drops: list[float | None] = [None]
        divergences: list[float | None] = [None]
        for done, (before, step) in enumerate(zip(self.steps, self.steps[1:], strict=False), start=1):
            stale, now = self.originals(before), self.originals(step)
            drops.append(drop(now.value, stale.value, now.direction))
            divergences.append(now.divergence(stale))
            evaluated(done)
        first = self.originals(self.steps[0])
        zeros = [step for step in self.steps if self.originals(step).value == 0]
        return Point(
            codec=REPEAT,
            metric=first.metric,
            direction=first.direction.value,
            max_drop=_worst(drops[1:]),
            max_divergence=_worst(divergences[1:]),
            mean_divergence=_mean(divergences[1:]),
            restore_gain=0.0,
            restore_noise=1.0,
            drops=tuple(drops),
            divergences=tuple(divergences),
            failure=f"the metric is 0 at step {zeros[0]}" if zeros else "",
        )

    def _compress(self, variant: Variant, value: float | None, target: Path, steps: Sequence[int]) -> Any:
        return compress(
            self.run,
            target,
            codec=variant.codec,
            config=variant.config(value),
            optimizer=variant.optimizer(self.optimizer),
            keyframe_every=self.keyframe_every,
            steps=steps,
            device=self.device,
            threads=self.threads,
        )

    def _judge(self, target: Path, evaluated: Callable[[int], None]) -> tuple[Comparison | None, str]:
        """Evaluate what was restored; a state the evaluator refuses keeps no bound, that is all."""
        try:
            comparison = compare_steps(
                self.run,
                Archive.open(target).sequential(),
                self.evaluator,
                steps=self.steps,
                known=self.originals,
                progress=lambda done, total, step: evaluated(done),
            )
        except EvaluatorError as error:
            return None, str(error)
        return comparison, ""


def _decode(archive: Archive, steps: Sequence[int]) -> int:
    """Decode steps in order, each frame once, and return their raw bytes."""
    walk, nbytes = archive.sequential(), 0
    for step in steps:
        checkpoint = walk[step]
        for spec in checkpoint.specs:
            checkpoint.source.read(spec)
        nbytes += checkpoint.raw_bytes()
    return nbytes


def _with_figures(point: Point, judged: Comparison) -> Point:
    """Add what the evaluator said; the worst over steps of which one is not known is not known."""
    drops = tuple(step.drop for step in judged.steps)
    divergences = tuple(step.divergence for step in judged.steps)
    return dataclasses.replace(
        point,
        max_drop=_worst(drops),
        max_divergence=_worst(divergences),
        mean_divergence=_mean(divergences),
        drops=drops,
        divergences=divergences,
    )


def _worst(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None
