"""Planning of a lattice frame: the step size of each tensor, and the memory for later frames."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import (
    BaseReference,
    EncoderState,
    FrameContext,
    TensorInput,
    TensorReference,
    state_as,
)
from inshrink_core.codecs.fallback import FallbackCodec
from inshrink_core.codecs.lattice.block import LatticeReference, is_matrix, is_statistic, refined, snapped
from inshrink_core.codecs.lattice.step_size import (
    MIN_EXPONENT,
    Memory,
    StepSize,
    codes_of,
    exact_mean,
    geometric_mean,
    lattice_of,
    positive,
    sensitivity_factor,
    steady_width,
    step_size_of,
)
from inshrink_core.codecs.shaping import Feedback
from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.lattice import Lattice, gain_grade
from inshrink_core.ops.sample import SAMPLE_RUN, SAMPLE_RUNS, sample, sample_sums

_PROBES = 32
"""Number of original values stored for each matrix, whose movement until the next frame has no rounding
error. The fourth root of a mean of 32 squares is accurate to 6 %."""

_VECTOR_STEP_SIZE = 2.0**-8
"""Largest step size of vectors, per unit of max(1, rms); norms have weights near 1."""

_VECTOR_SHARE = 0.25
"""Largest step size of a vector relative to a matrix's, so that slow training still moves vectors."""

_FINE_VECTOR_STEP_SIZE = 2.0**-11
"""The same limit if no movement is known."""

_STATISTIC_STEP_SIZE = 2.0**-8
"""Largest step size of running statistics, in root mean squares."""

_STATISTIC_COARSENESS = 2.0
"""Coarseness below which this limit shrinks in proportion, so that statistics contribute little error."""

_LEAST_STEP_SIZES = 8
"""Least number of steps in the smallest value of a non-negative statistic, such as a variance."""

_MOVEMENT_PER_LR = 4.0
"""Movement of a weight between checkpoints in learning rates: about four with Adam (3.7 over 50 steps, 6.7
over 100). This is the estimate for a keyframe, before a movement is observed."""

_GUESS_RANGE = (2.0**-12, 0.17)
"""Bounds of that estimate, in root mean squares of all matrices; early training moves 0.17 of it."""

_MAX_MOVED_SHARE = 0.5
"""Largest plausible movement between checkpoints, in root mean squares of all matrices. More is an explosion,
or the recovery from one, and step sizes derived from it would erase the weights."""

_UNKNOWN_SHARE = 1 / 32
"""Movement estimate without learning rate or second moments, in root mean squares of the tensor."""

_APART = 6.0
"""Largest step size of an ordinary tensor, in movements of the tensor and over the coarseness. Above it, the
error of plain rounding is about the movement, and the tensor is treated apart. Trainings with a single
learning rate stay below it."""

_MAX_MOVEMENTS = 30.0
"""Largest step size of a tensor treated apart, in the same units. Averages of weights move a tenth as far as
the weights, and do as well with the weights' step size."""

_COMMON_SHARE, _FIRST_SHARE, _COMMON_MOVED = 1.6, 3.0, 7.0
"""Largest step sizes over the coarseness: in root mean squares of the tensor, the same in the first frame,
and in movements since the last frame. At the default coarseness the errors are 0.23, 0.43 and 1."""

_APART_SHARE = 0.3
"""The first limit for vectors and tensors treated apart, at any coarseness: an error of 0.09."""

_MIN_MOVED_SHARE = 0.05
"""Least share of movement in a squared distance from rounded values; less is rounding error."""


class LatticeStatistics(NamedTuple):
    """Measurements of one tensor.

    Parameters
    ----------
    mean_square
        Mean square of its values; NaN if a value is not finite.
    second_moment
        Mean of Adam's second moment; None if unknown.
    momentum_square
        Mean square of SGD's momentum; None if unknown.
    moved
        Mean squared movement since the reference, less the rounding error; None if unknown.
    probe
        A few of its values, as float32.
    changed
        Whether it is a running statistic that differs from its decoded reference.
    least
        Smallest value of a running statistic.
    """

    mean_square: float
    second_moment: float | None
    momentum_square: float | None
    moved: float | None
    probe: bytes
    changed: bool = False
    least: float = 0.0


def mean_square(values: Tensor) -> float:
    """Return the mean square of a sample; NaN if a value is not finite."""
    return exact_mean(sample_sums(values)[0], min(values.numel(), SAMPLE_RUN * SAMPLE_RUNS))


def _observe_statistic(item: TensorInput, reference: TensorReference | None) -> LatticeStatistics:
    """Measure a running statistic on all its values."""
    tensor = as_float32(item.tensor)
    changed = reference is not None and not torch.equal(reference.decoded().cpu(), item.tensor.cpu())
    square, least = mean_square(tensor), float(tensor.min())
    return LatticeStatistics(square, None, None, None, b"", changed=changed, least=least)


def _observe_tensor(item: TensorInput, reference: LatticeReference | None) -> LatticeStatistics:
    """Measure one tensor on a sample of its values; O(1) above 2**14 elements."""
    values = item.sample
    n_seen = values.numel()
    integers, unit = None, 1.0
    if reference is not None:
        integers, unit = sample(reference.integers), math.ldexp(1.0, reference.step_size.exponent)
    moments = item.auxiliary(TensorRole.EXP_AVG_SQ, sampled=True)
    sums = sample_sums(values, integers, moments, unit)
    second = None if moments is None else exact_mean(sums[2], n_seen)
    buffer = item.auxiliary(TensorRole.MOMENTUM, sampled=True)
    momentum = None if buffer is None else mean_square(buffer)
    moved = None if reference is None else _beyond_rounding(sums[1], n_seen, reference.step_size.width)
    probe = as_float32(flattened(values)[_probe_places(n_seen).to(values.device)]).cpu().numpy()
    square = exact_mean(sums[0], n_seen)
    return LatticeStatistics(square, second, momentum, moved, probe.astype("<f4").tobytes())


def _beyond_rounding(sums: NDArray[np.int64], n: int, width: float) -> float | None:
    """Return the mean squared movement, less the rounding error; None if that explains the distance."""
    distance = exact_mean(sums, n)
    # The rounding error is uniform over the step size D, with variance D^2 / 12.
    movement = distance - width**2 / 12
    return movement if movement > _MIN_MOVED_SHARE * distance else None


def _moved_since(item: TensorInput, state: LatticeReference) -> float | None:
    values, unit = item.sample, math.ldexp(1.0, state.step_size.exponent)
    sums = sample_sums(values, sample(state.integers), None, unit)
    return _beyond_rounding(sums[1], values.numel(), state.step_size.width)


@functools.lru_cache(maxsize=1024)
def _probe_places(n: int) -> Tensor:
    """Return the probe's positions in a sample of `n` values, spread by the golden ratio over columns."""
    places = (np.arange(min(n, _PROBES)) * 0.6180339887498949 % 1.0 * n).astype(np.int64)
    return torch.from_numpy(np.unique(places))


class TensorPlan(NamedTuple):
    """Limits of a tensor that is not stored exactly.

    Parameters
    ----------
    width
        Its step size by the rule.
    rms
        Root mean square of its values.
    first
        Largest step size without a previous state.
    size
        Largest step size with a previous state, from the tensor's size; 0 for a zero tensor.
    movements
        Alternative limit: a larger step size is allowed up to this many movements since the last frame.
    """

    width: float
    rms: float
    first: float
    size: float
    movements: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LatticePlan:
    """The decisions of one frame for all its tensors.

    Parameters
    ----------
    tensors
        Plan of each tensor by key; other tensors are stored exactly.
    memory
        Memory for planning later frames.
    after_restore
        Whether step sizes may take any value, since the weights start from lattice points.
    """

    tensors: Mapping[str, TensorPlan] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    after_restore: bool = False


class LatticePlanner(EncoderState[LatticePlan], FallbackCodec[LatticePlan]):
    """The part of the codec that observes tensors and plans a frame."""

    __slots__ = ()

    coarseness: float
    gamma: float
    sensitivity: float
    exact: bool

    def observe(self, item: TensorInput, reference: TensorReference | None) -> LatticeStatistics | None:
        """Return the measurements of a tensor that may be on a lattice; None for other tensors."""
        if not self.covers(item.spec):
            return None
        if is_statistic(item.spec):
            return _observe_statistic(item, None if isinstance(reference, BaseReference) else reference)
        return _observe_tensor(item, state_as(LatticeReference, reference, item.spec))

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext | None = None
    ) -> LatticePlan:
        """Return the step size of every tensor, and the memory for planning later frames."""
        context = context or FrameContext()
        known = {spec.key: (spec, o) for spec, o in zip(specs, statistics, strict=True) if o is not None}
        matrices = {key: o for key, (spec, o) in known.items() if is_matrix(spec)}
        before = Memory.parse(context.memory)
        rates = {
            key: positive(context.learning_rates.get(spec.parameter)) for key, (spec, _) in known.items()
        }
        overall = _rms((known[key][0].numel, o.mean_square) for key, o in matrices.items())
        found = {key: _movement(o, before.probes.get(key)) for key, o in matrices.items()}
        moved = {key: square for key, square in found.items() if square is not None}
        now = _rms((known[key][0].numel, m) for key, m in moved.items())
        now = now if now <= _MAX_MOVED_SHARE * overall else 0.0
        memory = _settled(before, known, rates, now)
        factors = _factors(memory, matrices, self.sensitivity)
        if memory.movement and not before.movement:
            memory = replace(memory, apart=self._treated_apart(matrices, moved, now, factors))
        factors = bounded_factors(memory, factors)
        adaptive = any(o.second_moment is not None for o in matrices.values())
        bases = {
            key: _base(memory, now, rate, self.gamma, overall, adaptive=adaptive)
            for key, rate in rates.items()
        }
        plans = {
            key: _tensor_plan(spec, o, bases[key], factors.get(key, 1.0), memory, self.coarseness)
            for key, (spec, o) in known.items()
        }
        exact_rates = bool(_squares(matrices)) and all(rates.values())
        if memory.movement and (exact_rates or self.gamma == 0):
            memory = replace(memory, probes={})
        return LatticePlan(
            tensors={key: plan for key, plan in plans.items() if plan is not None},
            memory=memory.to_values() if known else {},
            after_restore=context.after_restore,
        )

    def _treated_apart(
        self,
        matrices: Mapping[str, LatticeStatistics],
        moved: Mapping[str, float],
        movement: float,
        factors: Mapping[str, float],
    ) -> dict[str, int]:
        """Return the codes of tensors whose common step size is too coarse, once a movement is known."""
        apart = codes_apart(moved, movement, factors)
        for key, o in matrices.items():
            # The future movement of a tensor that has not moved yet is unknown.
            width = self.coarseness * factors.get(key, 1.0) * movement
            if key not in moved and width > _APART_SHARE * math.sqrt(o.mean_square):
                apart[key] = 0
        return apart

    def step_size(self, plan: LatticePlan, spec: TensorSpec) -> float | None:
        """Return the step size, before any change for error feedback; None if the tensor is exact."""
        return None if self.exact or spec.key not in plan.tensors else plan.tensors[spec.key].width

    def remember(self, plan: LatticePlan) -> Any:
        """Return the movement and learning rate at the chain's start, and probes of the weights."""
        return dict(plan.memory)


def codes_apart(moved: Mapping[str, float], movement: float, factors: Mapping[str, float]) -> dict[str, int]:
    """Return `codes_of` the mean squared movements of tensors whose common step size is too coarse."""
    most = {key: _APART * math.sqrt(square) for key, square in moved.items() if square > 0}
    apart = {key: moved[key] for key, bound in most.items() if factors.get(key, 1.0) * movement > bound}
    return codes_of(apart, movement**2)


def bounded_factors(memory: Memory, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the factors of step sizes, each bounded by the tensor's own movement."""
    ratios = {key: memory.movement_ratio(key) or 0.0 for key in memory.apart}
    bounds = {key: _MAX_MOVEMENTS * math.sqrt(ratio) for key, ratio in ratios.items()}
    return {**factors, **{key: min(factors.get(key, 1.0), bound) for key, bound in bounds.items()}}


def _settled(
    before: Memory,
    known: Mapping[str, tuple[TensorSpec, LatticeStatistics]],
    rates: Mapping[str, float],
    now: float,
) -> Memory:
    """Return the memory with the values that this frame settles, such as the first movement."""
    matrices = {key: o for key, (spec, o) in known.items() if is_matrix(spec)}
    moving = [key for key, (spec, o) in known.items() if is_statistic(spec) and o.changed]
    settled = {**dict.fromkeys(moving, 0), **before.settled}
    memory = replace(before, settled=settled, probes={key: o.probe for key, o in matrices.items()})
    if before.movement or not now:
        return memory
    given = [rates[key] for key in matrices if rates[key]]
    squares = {key: square for key, square in _squares(matrices).items() if square > 0}
    settled |= codes_of(squares, geometric_mean(list(squares.values())))
    return replace(
        memory, movement=now, rate=math.fsum(given) / len(given) if given else 0.0, settled=settled
    )


def _factors(
    memory: Memory, matrices: Mapping[str, LatticeStatistics], sensitivity: float
) -> dict[str, float]:
    """Return the factor of each matrix's step size, from settled values if any, else from this frame."""
    settled_on = settled_factors(memory, sensitivity)
    if any(key in settled_on for key in matrices):
        return settled_on
    squares = _squares(matrices)
    middle = geometric_mean(list(squares.values()))
    return {key: sensitivity_factor(square, middle, sensitivity) for key, square in squares.items()}


def settled_factors(memory: Memory, sensitivity: float) -> dict[str, float]:
    """Return the factors of step sizes from the settled mean squared gradients."""
    return {key: sensitivity_factor(memory.ratio(key) or 1.0, 1.0, sensitivity) for key in memory.settled}


def _tensor_plan(
    spec: TensorSpec,
    o: LatticeStatistics,
    base: float,
    factor: float,
    memory: Memory,
    coarseness: float,
) -> TensorPlan | None:
    """Return the step size of one tensor and its limits; None to store it exactly."""
    if not math.isfinite(o.mean_square):
        return None
    rms = math.sqrt(o.mean_square)
    limits = _APART_SHARE * rms, _APART_SHARE * rms, coarseness
    if is_statistic(spec):
        if memory.ratio(spec.key) is None:  # it has never changed
            return None
        width = _STATISTIC_STEP_SIZE * min(1.0, coarseness / _STATISTIC_COARSENESS) * rms
        # A non-negative statistic must not come near zero.
        width = min(width, o.least / _LEAST_STEP_SIZES) if o.least >= 0 else width
    elif not is_matrix(spec):
        most = _FINE_VECTOR_STEP_SIZE if base == 0 else _VECTOR_STEP_SIZE
        width = min(most * max(1.0, rms), _VECTOR_SHARE * coarseness * base or math.inf)
    elif o.second_moment == 0:
        return None
    else:
        width = coarseness * (base or _UNKNOWN_SHARE * rms) * factor
        if spec.key not in memory.apart:
            by_size = coarseness * rms
            limits = _FIRST_SHARE * by_size, _COMMON_SHARE * by_size, _COMMON_MOVED * coarseness
    return TensorPlan(width, rms, *limits) if width > 0 and math.isfinite(width) else None


def _base(memory: Memory, now: float, rate: float, gamma: float, overall: float, *, adaptive: bool) -> float:
    """Return the movement that scales a tensor's step size; 0 if neither it nor Adam's rate is known.

    It is m · (r / r₀)^γ, with the movement m and the learning rate r₀ of the memory, and the tensor's rate r;
    without rates, m · (`now` / m)^γ. Before a movement is known, it is about four learning rates with Adam.
    `overall` is the root mean square of all matrices, which bounds it.
    """
    base = memory.movement
    if base and gamma:
        ratio = rate / memory.rate if rate and memory.rate else now / base
        base *= ratio**gamma if ratio else 1.0
    base = min(base, _MAX_MOVED_SHARE * overall)
    if base == 0 and adaptive and rate:
        low, high = (bound * overall for bound in _GUESS_RANGE)
        return min(max(_MOVEMENT_PER_LR * rate, low), high)
    return base


def _squares(matrices: Mapping[str, LatticeStatistics]) -> dict[str, float]:
    """Return squared gradients by tensor: Adam's second moments, or squares of SGD's momentum.

    Empty if neither is known; all tensors then have one step size.
    """
    known = {key: o.second_moment for key, o in matrices.items() if o.second_moment is not None}
    if not known:
        known = {key: o.momentum_square for key, o in matrices.items() if o.momentum_square is not None}
    return {key: value for key, value in known.items() if math.isfinite(value)}


def _movement(o: LatticeStatistics, before: bytes | None) -> float | None:
    """Return the mean squared movement, from the probe if it moved, else from the sample."""
    if before is not None and len(before) == len(o.probe):
        with np.errstate(invalid="ignore"):
            away = np.frombuffer(o.probe, "<f4").astype(np.float64) - np.frombuffer(before, "<f4")
        mean: float = math.fsum(float(x) * float(x) for x in away.tolist()) / max(int(away.size), 1)
        if mean > 0 and math.isfinite(mean):
            return mean
    return o.moved if o.moved is not None and math.isfinite(o.moved) else None


def _rms(parts: Any) -> float:
    """Return the root of the weighted mean of mean squares, given (number of elements, mean square)."""
    rows = [(n, m) for n, m in parts if math.isfinite(m)]
    total = sum(n for n, _ in rows)
    return math.sqrt(math.fsum(n * m for n, m in rows) / total) if total else 0.0


_MIN_UNITS = 16
"""Units in a step size below which the unit is refined, if the integers have room."""

_MAX_HALVINGS = 12
"""Most halvings; smaller movements than 1/4096 of the rule's are not resolved."""


class Chosen(NamedTuple):
    """The lattice of a frame: refinement of the unit in bits, step size, and the integers in that unit.

    With `snap`, the integers were moved to multiples of a larger step size.
    """

    shift: int
    step_size: StepSize
    lattice: Lattice
    integers: Tensor
    snap: bool = False


def first_width(plan: LatticePlan, key: str, feedback: Feedback | None) -> float:
    """Return the step size of a tensor without a previous state, given its error feedback."""
    width, most = plan.tensors[key].width, plan.tensors[key].first or math.inf
    if feedback is not None:
        width, most = width * feedback.coarser, most / math.sqrt(feedback.variance)
    return min(width, most)


def choose_step_size(
    plan: LatticePlan, item: TensorInput, state: LatticeReference, feedback: Feedback | None
) -> Chosen:
    """Return the planned step size: held up to powers of two, or free after a restore.

    If the step size grows, the integers are snapped to it first. Otherwise all values would be near the
    middle of their larger cells and remain there, and the frame's movement would be lost. After a restore
    they are not snapped, because matched gain preserves the movement.
    """
    spec, width, most = item.spec, state.step_size.width, math.inf
    if (known := plan.tensors.get(spec.key)) is not None:
        width = known.width * (1.0 if feedback is None else feedback.coarser)
        most = known.size / (1.0 if feedback is None else math.sqrt(feedback.variance)) or math.inf
        if max(width, state.step_size.width) > most:
            square = _moved_since(item, state) or 0.0
            most = max(most, known.movements * math.sqrt(square if math.isfinite(square) else 0.0))
        width = min(width, most)
    if plan.after_restore:
        return _at_width(width, spec, state)
    width = steady_width(width, state.step_size, most)
    chosen = _at_width(width, spec, state)
    if width > state.step_size.width:
        moved = snapped(chosen.integers, chosen.lattice)
        if moved is not None:
            return chosen._replace(integers=moved, snap=True)
    return chosen


def _at_width(width: float, spec: TensorSpec, state: LatticeReference) -> Chosen:
    """Return the step size in units of the state, refined if it would have too few units."""
    exponent = state.step_size.exponent
    shift = 0
    while width < math.ldexp(_MIN_UNITS, exponent - shift) and exponent - shift > MIN_EXPONENT and shift < 24:
        shift += 1
    while True:
        step_size = step_size_of(width, exponent - shift)
        lattice = lattice_of(step_size, spec.dtype)
        integers = refined(state, shift, lattice) if shift else state.integers
        if integers is not None:
            return Chosen(shift, step_size, lattice, integers)
        shift -= 1


def choose_gain(
    values: Tensor, base: Tensor, chosen: Chosen, spec: TensorSpec, state: LatticeReference
) -> tuple[int | None, Chosen]:
    """Return the threshold of matched gain, and a finer step size if the movement requires it.

    The threshold is None if nothing moved, since no step size could preserve the movement.
    """
    if torch.equal(values, base):
        return None, chosen
    for _ in range(_MAX_HALVINGS):
        grade = gain_grade(values, base, chosen.integers, chosen.lattice)
        finer = chosen if grade >= 0 else _at_width(chosen.step_size.width / 2, spec, state)
        if finer.step_size.width >= chosen.step_size.width:
            return abs(grade), chosen
        chosen = finer
    return abs(gain_grade(values, base, chosen.integers, chosen.lattice)), chosen
