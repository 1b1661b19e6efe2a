"""Bit allocation: how much finer or coarser than the global step each layer type should be.

Of all ways to spend the same bytes, the one with the least ½ Σ h·e² gives every layer type the same exchange
rate: bytes saved for damage done. The rates are measured, by encoding the step a few times at neighbouring
steps, without the evaluator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, Standing
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.search.measure import EncodedStep, encode_step
from inshrink_core.search.space import LatticeLine

__all__ = ["Allocation", "allocate"]

_OCTAVES: Final = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
"""Steps tried, in powers of two of the global one."""

_NEAR: Final = 4.0
"""Allocations whose damage is within this factor of the global step's are compared: rates are measured
around it, and the search of the global step makes up for the difference."""

_WORTHWHILE: Final = 1.01
"""Least gain predicted for which settings of their own are worth their place in every frame."""


class _Rate(NamedTuple):
    """What a layer type costs at one factor: bytes, and damage."""

    nbytes: float
    damage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Factors of the global step by layer type, and what they should be worth.

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
    base: ChainConfig,
    line: LatticeLine,
    coarseness: float,
    checkpoint: Checkpoint,
    standing: Standing,
    h: Mapping[str, float],
    index: FrameIndex | None = None,
    keys: frozenset[str] | None = None,
) -> Allocation:
    """Return the factors of least ½ Σ h·e² for the bytes that one global step would spend.

    Parameters
    ----------
    base, line
        How frames are made, and what candidates set.
    coarseness
        The global step around which to look.
    checkpoint, standing, index
        The step, and what it is encoded against.
    h
        Mean sensitivity of weights, by key (`inshrink_core.search.quadratic.sensitivities`).
    keys
        Look at these tensors only, a sample; by default at all.

    Notes
    -----
    Encodes the step `len(_OCTAVES)` times. Layer types without a known h keep the factor 1.
    """
    tables: dict[str, list[_Rate]] = {}
    plain = LatticeLine(held=line.held)
    for octave in _OCTAVES:
        chain = plain.candidate(coarseness * 2**octave).chain_config(base)
        encoded = encode_step(chain, checkpoint, standing, index, keys)
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
    # Only what differs matters: the search finds the global step anew.
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
    """Return what one global step would take at a damage: between those measured, both in logarithms."""
    line = sorted({rate.damage: rate.nbytes for rate in even}.items())
    below = max((one for one in line if one[0] <= damage), default=line[0])
    above = min((one for one in line if one[0] >= damage), default=line[-1])
    if below[0] == above[0]:
        return below[1]
    share = math.log(damage / below[0]) / math.log(above[0] / below[0])
    return math.exp((1 - share) * math.log(below[1]) + share * math.log(above[1]))


def _rates(encoded: EncodedStep, h: Mapping[str, float]) -> dict[str, _Rate]:
    """Sum bytes and damage by layer type, over tensors that have a step of their own."""
    rates: dict[str, _Rate] = {}
    for spec in encoded.checkpoint.specs:
        if spec.role not in MODEL_ROLES or spec.key not in h or spec.layer is None or len(spec.shape) < 2:
            continue
        old = rates.get(spec.layer.value, _Rate(0.0, 0.0))
        damage = 0.5 * h[spec.key] * encoded.squared_errors[spec.key]
        rates[spec.layer.value] = _Rate(old.nbytes + encoded.nbytes[spec.key], old.damage + damage)
    return rates
