"""Inspection of a finished run before its first frame: movement of weights and sensitivity of tensors.

One step size for a whole chain is best if it is known from the start: coarser frames lose the precision of a
finer one, and halving a step size costs a bit a weight. ``docs/design.md`` has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import LookAheadStep, TensorInput
from inshrink_core.codecs.lattice.block import is_matrix, is_statistic
from inshrink_core.codecs.lattice.plan import (
    LatticePlanner,
    codes_apart,
    mean_square,
    settled_factors,
)
from inshrink_core.codecs.lattice.step_size import Memory, codes_of, exact_mean, geometric_mean
from inshrink_core.ops.flat import as_float32
from inshrink_core.ops.sample import SAMPLE_RUN, SAMPLE_RUNS, sample_sums

_PAIRS = 8
"""Pairs of neighbouring steps. Movements vary tenfold along a schedule; the root mean square over the pairs
is within a tenth of that over all steps."""

_MOMENTS = 5
"""Steps whose second moments are read; the ranking of tensors is stable along a run."""

_MAX_MOVED = 16.0
"""Limit on a pair's squared movement, in medians, so that one step of an exploding training does not dominate
the step size."""


def _spread(n: int, of: int) -> list[int]:
    """Return `n` distinct numbers below `of`, including the first and the last if n is at least two."""
    return [round(at * (of - 1) / max(1, n - 1)) for at in range(n)]


class LookAheadStatistics(NamedTuple):
    """Measurements of one tensor along a run.

    Parameters
    ----------
    changed
        Whether any value ever changed.
    moved
        Mean squared movement between neighbouring steps, by the later step's index.
    second_moments, momenta
        Means of Adam's second moment and of squared momentum, if the run has them.
    """

    changed: bool
    moved: Mapping[int, float]
    second_moments: tuple[float, ...]
    momenta: tuple[float, ...]


_Seen: TypeAlias = tuple[TensorSpec, LookAheadStatistics]


class LookAhead(LatticePlanner):
    """The part of the codec that inspects a run before its first frame."""

    __slots__ = ()

    def look_ahead_steps(self, n_steps: int) -> tuple[LookAheadStep, ...]:
        """Return evenly spread pairs of neighbouring steps, some of them with auxiliary tensors.

        Examples
        --------
        >>> from inshrink_core.codec import make_codec
        >>> codec = make_codec("lattice", {})
        >>> [tuple(look) for look in codec.look_ahead_steps(3)], codec.look_ahead_steps(1)
        ([(0, False), (1, True), (2, True)], ())
        """
        n_pairs = min(_PAIRS, n_steps - 1)
        if n_pairs < 1:
            return ()
        begins = _spread(n_pairs, n_steps - 1)
        places = sorted({place for begin in begins for place in (begin, begin + 1)})
        read = {begins[at] + 1 for at in _spread(min(_MOMENTS, n_pairs), n_pairs)}
        return tuple(LookAheadStep(place, place in read) for place in places)

    def look_ahead(
        self, spec: TensorSpec, inputs: Iterator[tuple[int, TensorInput]]
    ) -> LookAheadStatistics | None:
        """Measure a tensor at each step; holds two samples of it at a time."""
        if not self.covers(spec):
            return None
        n_seen = min(spec.numel, SAMPLE_RUN * SAMPLE_RUNS)
        changed, moved = False, {}
        second_moments, momenta = [], []
        before: tuple[int, Tensor] | None = None
        for place, item in inputs:
            now = as_float32(item.sample)
            if before is not None and not torch.equal(now, before[1]):
                changed = True
            if before is not None and before[0] == place - 1:
                moved[place] = mean_square(now - before[1])
            moments = item.auxiliary(TensorRole.EXP_AVG_SQ, sampled=True)
            if moments is not None:
                second_moments.append(exact_mean(sample_sums(moments, None, moments)[2], n_seen))
            momentum = item.auxiliary(TensorRole.MOMENTUM, sampled=True)
            if momentum is not None:
                momenta.append(mean_square(momentum))
            before = place, now
        return LookAheadStatistics(changed, moved, tuple(second_moments), tuple(momenta))

    def initial_memory(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], rates: Sequence[Mapping[str, float]]
    ) -> dict[str, Any] | None:
        """Return the run's movement and the tensors' sensitivities; None if nothing moves."""
        known = [(spec, seen) for spec, seen in zip(specs, statistics, strict=True) if seen is not None]
        matrices = [(spec, seen) for spec, seen in known if is_matrix(spec)]
        movement = _movement(matrices)
        if movement == 0:
            return None
        moving = {spec.key: 0 for spec, seen in known if is_statistic(spec) and seen.changed}
        squares = _squares({spec.key: seen for spec, seen in matrices})
        codes = codes_of(squares, geometric_mean(list(squares.values())))
        memory = Memory(movement=movement, rate=_rate(matrices, rates), settled=moving | codes)
        moved = {spec.key: _mean_moved(seen) for spec, seen in known if not is_statistic(spec)}
        factors = settled_factors(memory, self.sensitivity)
        return replace(memory, apart=codes_apart(moved, movement, factors)).to_values()


def _movement(matrices: Sequence[_Seen]) -> float:
    """Return ``sqrt(mean of min(M, 16 median(M)))`` over the pairs, M being their mean squared movements."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for spec, seen in matrices:
        for place, square in seen.moved.items():
            if math.isfinite(square):
                sums[place] = sums.get(place, 0.0) + spec.numel * square
                counts[place] = counts.get(place, 0) + spec.numel
    pairs = [sums[place] / counts[place] for place in sums if sums[place] > 0]
    if not pairs:
        return 0.0
    most = _MAX_MOVED * median(pairs)
    return math.sqrt(math.fsum(min(pair, most) for pair in pairs) / len(pairs))


def _mean_moved(seen: LookAheadStatistics) -> float:
    """Return the mean squared movement over the pairs in which a tensor moved; 0 if there are none."""
    squares = [square for square in _finite(seen.moved.values()) if square > 0]
    return math.fsum(squares) / len(squares) if squares else 0.0


def _squares(tensors: Mapping[str, LookAheadStatistics]) -> dict[str, float]:
    """Return squared gradients by tensor in one common measure: second moments, momenta, or movements."""
    of_all = (
        {key: seen.second_moments for key, seen in tensors.items()},
        {key: seen.momenta for key, seen in tensors.items()},
        {key: tuple(seen.moved.values()) for key, seen in tensors.items()},
    )
    for values in of_all:
        means = {key: geometric_mean(_finite(means_of_tensor)) for key, means_of_tensor in values.items()}
        if any(values.values()):
            return {key: mean for key, mean in means.items() if mean > 0}
    return {}


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _rate(matrices: Sequence[_Seen], rates: Sequence[Mapping[str, float]]) -> float:
    """Return the root mean square of the learning rate, which movement is proportional to; 0 if unknown."""
    means = []
    for by_name in rates:
        given = [by_name[spec.name] for spec, _ in matrices if by_name.get(spec.name, 0.0) > 0]
        means += [math.fsum(given) / len(given)] if given else []
    squares = _finite(mean * mean for mean in means)
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0
