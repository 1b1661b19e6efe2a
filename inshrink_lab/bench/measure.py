"""Measurement of a configuration: compress, decode, evaluate; and of the previous-checkpoint baseline."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.chain import Archive
from inshrink_core.codec import get_codec
from inshrink_core.codecs.variants import Variant
from inshrink_core.errors import EvaluatorError
from inshrink_core.search.bounds import Figures
from inshrink_core.search.trials import BoundEvaluator
from inshrink_core.verbs.compress import compress
from inshrink_lab.bench.report import REPEAT, Point

if TYPE_CHECKING:
    from inshrink_core.chain.sizes import ArchiveSize
    from inshrink_core.formats import Run


# Version of a point's key and of the measurement.
_VERSION: Final = 4

_SCRATCH: Final = "inshrink-bench-"


@dataclass(frozen=True)
class Measurer:
    """Measures configurations on one run with one evaluator.

    Parameters
    ----------
    request
        The benchmark's request: optimizer, keyframes and threads.
    run, steps
        The run and its compressed steps.
    evaluator
        The evaluator.
    device
        Device that encodes and decodes frames.
    """

    request: Any
    run: Run
    steps: tuple[int, ...]
    evaluator: BoundEvaluator
    device: str

    def key(self, variant: Variant | None, value: float | None) -> dict[str, Any]:
        """Return everything that a measured point depends on, as JSON values.

        Parameters
        ----------
        variant, value
            The codec and the value of its parameter; None for the previous checkpoint.

        Notes
        -----
        The key excludes device and threads, because they do not change the bytes.
        """
        key: dict[str, Any] = {
            "version": _VERSION,
            "run": [self.run.identity(step) for step in self.steps],
            "steps": list(self.steps),
            "evaluator": self.evaluator.digest,
            "codec": REPEAT,
        }
        if variant is not None:
            key |= {
                "codec": variant.label,
                "bitstream": get_codec(variant.codec).bitstream,
                "config": variant.config(value).settings(),
                "tunable": value,
                "optimizer": variant.optimizer(self.request.optimizer),
                "keyframe_every": self.request.keyframe_every,
            }
        return key

    def measure(self, variant: Variant, value: float | None, evaluated: Callable[[int], None]) -> Point:
        """Return the point of one configuration.

        Parameters
        ----------
        variant, value
            The codec, and the value of its parameter.
        evaluated
            Callback with the number of steps evaluated so far.
        """
        with tempfile.TemporaryDirectory(prefix=_SCRATCH) as scratch:
            target = Path(scratch) / "bench.inshrink"
            size = self._compressed(variant, value, target)
            figures, failure = self._evaluated(target, evaluated)
        return Point(
            codec=variant.label,
            config=variant.config(value).settings(),
            tunable=value,
            ratio_weights=size.ratio_weights,
            ratio_total=size.ratio_total,
            failure=failure,
            **self._summary(figures, figures),
        )

    def repeat(self, evaluated: Callable[[int], None]) -> Point:
        """Return the point of the previous checkpoint; evaluates every original step."""
        figures = [Figures()]
        for done, (before, step) in enumerate(pairwise(self.steps), start=1):
            figures.append(self.evaluator.baseline(step, before) or Figures())
            evaluated(done)
        zeros = [step for step in self.steps if self.evaluator.original(step).value == 0]
        return Point(
            codec=REPEAT,
            failure=f"the metric is 0 at step {zeros[0]}" if zeros else "",
            **self._summary(figures, figures[1:]),
        )

    def _summary(self, figures: Sequence[Figures], counted: Sequence[Figures]) -> dict[str, Any]:
        """Return a point's summary of its steps; figures are unknown if one step lacks them."""
        drops, divergences = ([getattr(item, name) for item in counted] for name in ("drop", "divergence"))
        self.evaluator.original(self.steps[0])  # determines the metric
        return {
            "metric": self.evaluator.metric,
            "direction": self.evaluator.direction,
            "max_drop": _all_known(max, drops),
            "max_divergence": _all_known(max, divergences),
            "mean_divergence": _all_known(_mean, divergences),
            "drops": tuple(item.drop for item in figures),
            "divergences": tuple(item.divergence for item in figures),
        }

    def _compressed(self, variant: Variant, value: float | None, target: Path) -> ArchiveSize:
        report: Any = compress(
            self.run,
            target,
            codec=variant.codec,
            config=variant.config(value),
            optimizer=variant.optimizer(self.request.optimizer),
            keyframe_every=self.request.keyframe_every,
            steps=self.steps,
            device=self.device,
            threads=self.request.threads,
        )
        size: ArchiveSize = report.size
        return size

    def _evaluated(self, target: Path, evaluated: Callable[[int], None]) -> tuple[list[Figures], str]:
        """Evaluate the restored steps; a state that the evaluator refuses breaks every bound."""
        walk, figures = Archive.open(target).on(self.device).sequential(), []
        try:
            for done, step in enumerate(self.steps, start=1):
                figures.append(self.evaluator.figures(step, walk[step]))
                if figures[-1].failure:
                    return [], figures[-1].failure
                evaluated(done)
        except EvaluatorError as error:
            return [], str(error)
        return figures, ""


def _all_known(summary: Callable[[Sequence[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return summary(known) if known and len(known) == len(values) else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
