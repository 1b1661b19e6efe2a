"""Measuring one configuration: compress, decode, evaluate, and the same evaluations for the stale copy."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from inshrink_core.analysis.gain import measure_gain
from inshrink_core.bench.report import REPEAT, Point
from inshrink_core.bench.variants import Variant, as_record
from inshrink_core.chain import Archive
from inshrink_core.codec import get_codec
from inshrink_core.errors import EvaluatorError
from inshrink_core.evaluate import Comparison, Evaluator, OriginalEvaluations, compare_steps
from inshrink_core.metrics import drop
from inshrink_core.search.judge import evaluator_digest
from inshrink_core.verbs.compress import compress

if TYPE_CHECKING:
    from types import TracebackType

    from inshrink_core.formats import Run

__all__ = ["Bench", "PeakMemory"]

# Of the key of a point, and of what is measured.
_VERSION: Final = 2

_MEGA: Final = 1e6

# A keyframe and a delta: what is compiled at first use is compiled then.
_WARM_STEPS: Final = 2

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")

# Sets the high-water mark (``VmHWM``) to what is resident now (proc(5), Linux 4.0).
_RESET_PEAK: Final = "5"

# The unit of the numbers in ``/proc/self/status``, which call it kB.
_KIB: Final = 1024


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

    def key(self, variant: Variant | None, value: float | None) -> dict[str, Any]:
        """Return everything that a measured point depends on, as JSON values.

        Parameters
        ----------
        variant, value
            The codec and where its knob stands; None for the stale copy.

        Notes
        -----
        Device and threads are not in it, as they do not change the bytes. The speeds of a point used again
        are those of the day it was measured.
        """
        key: dict[str, Any] = {
            "version": _VERSION,
            "run": [self.run.identity(step) for step in self.steps],
            "steps": list(self.steps),
            "evaluator": evaluator_digest(self.evaluator),
            "codec": REPEAT,
        }
        if variant is not None:
            key |= {
                "codec": variant.label,
                "bitstream": get_codec(variant.codec).bitstream,
                "config": as_record(variant.config(value)),
                "knob": value,
                "optimizer": variant.optimizer(self.optimizer),
                "keyframe_every": self.keyframe_every,
            }
        return key

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
            gain = measure_gain(Archive.open(target), self.run).pooled
            judged, failure = self._judge(target, evaluated)
        first = self.originals(self.steps[0])
        point = Point(
            codec=variant.label,
            config=as_record(variant.config(value)),
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


class PeakMemory:
    """Measures how far resident memory rises above where it stood.

    What earlier work left in the allocator is given back first, so that it does not hide memory that is
    taken anew.

    Examples
    --------
    >>> with PeakMemory() as memory:
    ...     block = bytearray(8 << 20)
    >>> memory.nbytes is None or memory.nbytes > 7 << 20
    True
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        """Bytes above the start; None where the system does not say, and until it is left."""
        self._before: int | None = None

    def __enter__(self) -> Self:
        gc.collect()
        _give_back()
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
            self._before = _status("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        peak = _status("VmHWM")
        if peak is not None and self._before is not None:
            self.nbytes = max(0, peak - self._before)


def _status(name: str) -> int | None:
    """Return a line of the status, in bytes; None where there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * _KIB
    return None


def _give_back() -> None:
    """Ask the C library to return free memory; others than GNU's have no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
