"""The quadratic model of what an error costs: ½ Σ h·e², h from squared gradients or from movement.

Near a minimum, an error e in the weights raises the loss by ½ eᵀHe. The diagonal of H is in proportion to the
mean squared gradient (Fisher information), which Adam keeps as its second moment; a batch's size and the
cross terms make a factor that trials calibrate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSpec
from inshrink_core.search.measure import EncodedStep
from inshrink_core.search.space import Candidate, Line
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor


# Values summed at a time: temporary copies stay small, whatever the tensor.
_SLICE: Final = 1 << 20

# Spacings tried for each layer type, in powers of two of the global one.
_OCTAVES: Final = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)

# Allocations whose damage is within this factor of the global spacing's are compared: rates are measured
# around it, and the search of the global spacing makes up for the difference.
_NEAR: Final = 4.0

# Least gain predicted for which settings of their own are worth their place in every frame.
_WORTHWHILE: Final = 1.01


def sensitivities(
    checkpoint: Checkpoint, before: Checkpoint | None, keys: frozenset[str] | None = None
) -> dict[str, float]:
    """Return the mean h of every weight that has one, by key.

    Parameters
    ----------
    checkpoint
        The step, with optimizer state or without.
    before
        The original a step before. Where no weight has second moments, mean squared movement takes
        their place, which is in proportion under Adam's kind of update.
    keys
        Look at these weights only.

    Returns
    -------
    dict
        Empty where neither is known. Means over the finite values of a tensor.
    """
    weights = [spec for spec in checkpoint.specs if _is_weight(spec) and (keys is None or spec.key in keys)]
    found = {spec.key: _mean(_second_moment(checkpoint, spec)) for spec in weights}
    known = {key: value for key, value in found.items() if value is not None}
    if known or before is None:
        return known
    moved = {spec.key: _movement(checkpoint, before, spec) for spec in weights}
    return {key: value for key, value in moved.items() if value is not None}


def damage_of(squared_errors: Mapping[str, float], h: Mapping[str, float]) -> float | None:
    """Return ½ Σ h·e²; None where no h is known."""
    return 0.5 * math.fsum(h[key] * squared_errors.get(key, 0.0) for key in h) if h else None


def _is_weight(spec: TensorSpec) -> bool:
    return spec.role is TensorRole.WEIGHT and spec.dtype.startswith(("float", "bfloat")) and spec.numel > 0


def _second_moment(checkpoint: Checkpoint, spec: TensorSpec) -> Tensor | None:
    key = f"{spec.name}@{TensorRole.EXP_AVG_SQ.value}"
    if key not in checkpoint or checkpoint.spec(key).shape != spec.shape:
        return None
    return checkpoint[key]


def _movement(checkpoint: Checkpoint, before: Checkpoint, spec: TensorSpec) -> float | None:
    """Mean squared movement since the original before."""
    if spec.key not in before or before.spec(spec.key).shape != spec.shape:
        return None
    import torch

    now, then = (magnitudes(source[spec.key], torch.float64) for source in (checkpoint, before))
    return _mean((now - then).square())


def _mean(values: Tensor | None) -> float | None:
    """Mean of what is finite, in float64."""
    if values is None:
        return None
    import torch

    total, n = 0.0, 0
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _SLICE):
        part = magnitudes(flat[start : start + _SLICE], torch.float64)
        finite = part[torch.isfinite(part)]
        total += float(finite.sum())
        n += finite.numel()
    return total / n if n else None


class _Rate(NamedTuple):
    """What a layer type costs at one factor: bytes, and damage."""

    nbytes: float
    damage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Factors of the global spacing by layer type, and what they should be worth.

    Parameters
    ----------
    factors
        By layer type; the same for all is all 1.
    predicted_gain
        Bytes of the weights at factors of 1 over bytes at these, at equal ½ Σ h·e²; at least 1.
    """

    factors: Mapping[str, float]
    predicted_gain: float


def allocate(
    line: Line, coarseness: float, h: Mapping[str, float], encode: Callable[[Candidate], EncodedStep]
) -> Allocation:
    """Return the factors of least ½ Σ h·e² for the bytes that one global spacing would spend.

    Parameters
    ----------
    line
        What candidates set.
    coarseness
        The global spacing around which to look.
    h
        Mean sensitivity of weights, by key (`sensitivities`).
    encode
        Encodes a step, or a sample of its tensors.

    Notes
    -----
    Encodes the step `len(_OCTAVES)` times. Layer types without a known h keep the factor 1.
    """
    tables: dict[str, list[_Rate]] = {}
    plain = replace(line, factors={})
    for octave in _OCTAVES:
        encoded = encode(plain.candidate(coarseness * 2**octave))
        for layer, rate in _rates(encoded, h).items():
            tables.setdefault(layer, []).append(rate)
    known = {layer: rates for layer, rates in tables.items() if all(rate.damage > 0 for rate in rates)}
    if len(known) < 2:
        return Allocation(factors={}, predicted_gain=1.0)
    even = [_total(known, dict.fromkeys(known, at)) for at in range(len(_OCTAVES))]
    middle = even[_OCTAVES.index(0.0)].damage
    best, gain = dict.fromkeys(known, _OCTAVES.index(0.0)), _WORTHWHILE
    for chosen in _on_hull(known):
        total = _total(known, chosen)
        if middle / _NEAR <= total.damage <= middle * _NEAR:
            found = _nbytes_at(even, total.damage) / total.nbytes
            if found > gain:
                best, gain = chosen, found
    factors = {layer: 2.0 ** _OCTAVES[at] for layer, at in best.items()}
    if len(set(factors.values())) < 2:
        return Allocation(factors={}, predicted_gain=1.0)
    # Only what differs matters: the search finds the global spacing anew.
    common = math.exp(math.fsum(map(math.log, factors.values())) / len(factors))
    return Allocation(
        factors={layer: factor / common for layer, factor in factors.items()}, predicted_gain=gain
    )


def _total(tables: Mapping[str, list[_Rate]], chosen: Mapping[str, int]) -> _Rate:
    rates = [tables[layer][at] for layer, at in chosen.items()]
    return _Rate(math.fsum(rate.nbytes for rate in rates), math.fsum(rate.damage for rate in rates))


def _on_hull(tables: Mapping[str, list[_Rate]]) -> Iterator[dict[str, int]]:
    """Yield the choices that take the fewest bytes for their damage: one for each exchange rate.

    At a price of a byte, each layer type chooses for itself; choices change only at the prices where two of
    one type's cost the same.
    """
    prices = sorted(
        (one.damage - other.damage) / (other.nbytes - one.nbytes)
        for rates in tables.values()
        for one in rates
        for other in rates
        if one.damage > other.damage and one.nbytes < other.nbytes
    )
    seen: set[tuple[int, ...]] = set()
    for low, high in itertools.pairwise([0.0, *prices, 2 * prices[-1] if prices else 1.0]):
        price = (low + high) / 2
        chosen = {layer: _cheapest(rates, price) for layer, rates in tables.items()}
        if tuple(chosen.values()) not in seen:
            seen.add(tuple(chosen.values()))
            yield chosen


def _cheapest(rates: Sequence[_Rate], price: float) -> int:
    """Return the place of the least cost, damage and bytes together; the middle one of equals."""
    costs = [rate.damage + price * rate.nbytes for rate in rates]
    least = [at for at, cost in enumerate(costs) if cost == min(costs)]
    return least[len(least) // 2]


def _nbytes_at(even: Sequence[_Rate], damage: float) -> float:
    """Return what one global spacing would take at a damage: between those measured, both in logarithms."""
    line = sorted({rate.damage: rate.nbytes for rate in even}.items())
    below = max((one for one in line if one[0] <= damage), default=line[0])
    above = min((one for one in line if one[0] >= damage), default=line[-1])
    if below[0] == above[0]:
        return below[1]
    share = math.log(damage / below[0]) / math.log(above[0] / below[0])
    return math.exp((1 - share) * math.log(below[1]) + share * math.log(above[1]))


def _rates(encoded: EncodedStep, h: Mapping[str, float]) -> dict[str, _Rate]:
    """Sum bytes and damage by layer type, over tensors that have a spacing of their own."""
    rates: dict[str, _Rate] = {}
    for spec in encoded.checkpoint.specs:
        if spec.role not in MODEL_ROLES or spec.key not in h or spec.layer is None or len(spec.shape) < 2:
            continue
        old = rates.get(spec.layer.value, _Rate(0.0, 0.0))
        damage = 0.5 * h[spec.key] * encoded.squared_errors[spec.key]
        rates[spec.layer.value] = _Rate(old.nbytes + encoded.nbytes[spec.key], old.damage + damage)
    return rates
