"""Bits and damage of every tensor at every coarseness, from which an allocation by hand is estimated.

A codec of one number is encoded from fine to coarse once (`inshrink_core.verbs.estimate_levels` by tensor). A
tensor's bits and damage depend on its own spacing alone, so those of any mixture are sums of what was seen,
and the mixture's quality is that of the uniform setting whose damage is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inshrink_core.codecs.fallback import LOSSY_DTYPES
from inshrink_core.errors import InputError
from inshrink_core.search.quadratic import Course

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inshrink_core.checkpoint import TensorSpec

_LEAST: Final = 1e-300
"""In the place of a damage of zero, which has no logarithm."""

_MOST_LOG: Final = 700.0
"""Beyond it, an exponential is infinite."""

_HALVINGS: Final = 60
"""Of the logarithm of a price between `_LEAST` and its inverse: to a relative 1e-15."""


class Predicted(NamedTuple):
    """What an allocation does.

    Parameters
    ----------
    bits : Float[ndarray, "n"]
        Per weight, of each tensor.
    damage : Float[ndarray, "n"]
        Of each tensor; NaN where its h is not known.
    nbytes
        Of the weights, a frame in mean.
    ratio_weights, ratio_total
        Raw bytes over stored bytes; the total is None where it is not known.
    drop, divergence
        Of the worst step, by the damage of all tensors; None if the levels lack it.
    """

    bits: NDArray[np.float64]
    damage: NDArray[np.float64]
    nbytes: float
    ratio_weights: float
    ratio_total: float | None
    drop: float | None
    divergence: float | None


class MeasuredAllocation(NamedTuple):
    """Figures of an allocation by the evaluator.

    Parameters
    ----------
    values
        The number for each tensor, positive.
    drop, divergence
        Of the worst step; None if unknown.
    """

    values: Sequence[float]
    drop: float | None
    divergence: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rates:
    """What a codec of one number does to each tensor, from fine to coarse.

    Parameters
    ----------
    codec, settings
        The codec, and the settings that the number turns.
    levels : Float[ndarray, "levels"]
        Values of the number, ascending.
    keys
        Of the tensors.
    layer_types, sizes
        Of each: its layer type, and its number of elements.
    is_sampled : Bool[ndarray, "n"]
        Whether the tensor itself was encoded; others are taken to be like those of their layer type.
    sensitivities : Float[ndarray, "n"]
        Mean h; NaN where not known.
    bits, damages : Float[ndarray, "n levels"]
        Bits per weight, and damage; NaN where not known.
    ratios_weights, ratios_total : Float[ndarray, "levels"]
        Of the uniform settings; NaN where not known.
    figures : dict of Float[ndarray, "levels"]
        The ``drop`` and the ``divergence`` of the uniform settings; NaN where not known.
    raw_nbytes
        Raw bytes of the weights of a step.
    is_calibrated
        Whether trials of this run calibrate the figures; else rules of thumb.
    corrections
        By figure: what was measured over what the levels predict.
    n_measured
        Measurements that these come from.
    """

    codec: str
    settings: tuple[str, ...]
    levels: NDArray[np.float64]
    keys: tuple[str, ...]
    layer_types: tuple[str, ...]
    sizes: NDArray[np.float64]
    is_sampled: NDArray[np.bool_]
    sensitivities: NDArray[np.float64]
    bits: NDArray[np.float64]
    damages: NDArray[np.float64]
    ratios_weights: NDArray[np.float64]
    ratios_total: NDArray[np.float64]
    figures: Mapping[str, NDArray[np.float64]]
    raw_nbytes: float
    is_calibrated: bool
    corrections: Mapping[str, Course] = field(default_factory=dict)
    n_measured: int = 0

    def calibrated(self, measured: Sequence[MeasuredAllocation]) -> Rates:
        """Return the same with figures that pass through what was measured.

        Parameters
        ----------
        measured
            Allocations with this codec; those of which the levels predict no positive figure, or of which
            none was measured, are passed over.
        """
        plain = replace(self, corrections={}, n_measured=0)
        factors: dict[str, list[tuple[float, float]]] = {name: [] for name in self.figures}
        used = 0
        for allocation in measured:
            guess = plain.predict(allocation.values)
            at = float(np.nansum(guess.damage))
            pairs = {name: (getattr(allocation, name), getattr(guess, name)) for name in factors}
            known = {
                name: seen / guessed
                for name, (seen, guessed) in pairs.items()
                if _positive(at, seen, guessed)
            }
            used += bool(known)
            for name, factor in known.items():
                factors[name].append((at, factor))
        corrections = {name: Course.through(pairs) for name, pairs in factors.items() if pairs}
        return replace(plain, corrections=corrections, n_measured=used)

    def course(self, figure: str) -> NDArray[np.float64]:
        """Return the ``drop`` or ``divergence`` of the uniform settings, calibrated; NaN where not known."""
        factors = [self._correction(figure, total) for total in np.nansum(self.damages, axis=0)]
        found: NDArray[np.float64] = self.figures[figure] * np.array(factors)
        return found

    def predict(self, values: Sequence[float]) -> Predicted:
        """Return what an allocation does.

        Parameters
        ----------
        values
            The number for each tensor, positive.

        Raises
        ------
        InputError
            Not one positive number a tensor.

        Notes
        -----
        Between two levels, bits are linear in the logarithm of the number, and so is the logarithm of the
        damage; beyond the last, both go on as before it, bits not below zero. O(n).
        """
        chosen = np.asarray(values, np.float64)
        if chosen.shape != (len(self.keys),) or not (np.isfinite(chosen) & (chosen > 0)).all():
            raise InputError(
                "an allocation has one positive number a tensor",
                expected=str(len(self.keys)),
                found=str(chosen.size),
            )
        logs, places = np.log(self.levels), np.log(chosen)
        bits = np.maximum(_along(logs, self.bits, places), 0.0)
        damage = np.exp(_along(logs, _log(self.damages), places))
        total = float(np.nansum(damage))
        # What holds all tensors together is taken from the uniform settings.
        overheads = self.raw_nbytes / self.ratios_weights - self.sizes @ self.bits / 8
        stored_nbytes = float(bits @ self.sizes) / 8 + self._at(overheads, total)
        figures = {
            name: self._at(line, total) * self._correction(name, total) for name, line in self.figures.items()
        }
        ratio = self.raw_nbytes / stored_nbytes if stored_nbytes > 0 else math.nan
        return Predicted(
            bits=bits,
            damage=damage,
            nbytes=stored_nbytes,
            ratio_weights=ratio,
            ratio_total=_known(self.ratio_total_of(ratio)),
            **{name: _known(value) for name, value in figures.items()},
        )

    def distribute(self, nbytes: float, values: Sequence[float], locked: Sequence[bool]) -> list[float]:
        """Return the allocation of least damage that takes no more than some bytes.

        Parameters
        ----------
        nbytes
            What the weights of a frame may take, as `Predicted.nbytes` counts it.
        values
            The number for each tensor as it is; those that are locked keep it, and so do those whose damage
            is not known.
        locked
            By tensor.

        Notes
        -----
        Every tensor gets the same exchange rate of bytes for damage, which is found by bisection; values lie
        on the levels, half way between them, and up to one beyond (Shoham and Gersho 1988). Where even the
        coarsest takes more, that is returned. O(60 · n · levels).
        """
        logs, n = np.log(self.levels), len(self.keys)
        numbers, places = np.arange(float(logs.size)), np.arange(-1.0, logs.size + 0.5, 0.5)
        beside = np.exp(_along(numbers, np.broadcast_to(logs, (places.size, logs.size)), places))
        grid = np.array([float(f"{value:.3g}") for value in beside])
        each = [self.predict([value] * n) for value in grid.tolist()]
        cost = np.stack([item.damage for item in each], axis=1)
        stored = np.stack([item.bits for item in each], axis=1) * self.sizes[:, None] / 8
        free = ~np.asarray(locked, bool) & np.isfinite(cost).all(axis=1)
        chosen = np.asarray(values, np.float64).copy()
        if not free.any():
            return [float(value) for value in chosen]

        def at(price: float) -> NDArray[np.float64]:
            places = np.argmin(cost[free] + price * stored[free], axis=1)
            found = chosen.copy()
            found[free] = grid[places]
            return found

        low, high = _LEAST, 1e300
        for _ in range(_HALVINGS):
            middle = math.sqrt(low) * math.sqrt(high)
            fits = self.predict(at(middle).tolist()).nbytes <= nbytes
            low, high = (low, middle) if fits else (middle, high)
        return [float(value) for value in at(high)]

    def ratio_total_of(self, ratio_weights: float) -> float:
        """Return the ratio of everything where the weights have some ratio; NaN where that is not known.

        All but the weights is as with the uniform settings: a ratio's inverse is the sum of stored weights
        and of the rest, in units of all raw bytes.
        """
        if not (self.ratios_total > 0).all() or not 0 < ratio_weights < math.inf:
            return math.nan
        shares = 1 / self.ratios_weights
        order = np.argsort(shares)
        return 1 / max(_value_at(shares[order], 1 / self.ratios_total[order], 1 / ratio_weights), 1e-12)

    def _correction(self, figure: str, damage: float) -> float:
        return self.corrections[figure].at(damage) if figure in self.corrections else 1.0

    def _at(self, line: NDArray[np.float64], damage: float) -> float:
        """Return a figure of the uniform settings where all tensors together have some damage."""
        totals = np.nansum(self.damages, axis=0)
        if not np.isfinite(line).all():
            return math.nan
        if damage <= 0 or not (totals > 0).all():
            return float(line[0])
        order = np.argsort(totals, kind="stable")
        logs, wanted = np.log(totals[order]), math.log(damage)
        if (line > 0).all():
            return math.exp(min(_value_at(logs, np.log(line[order]), wanted), _MOST_LOG))
        return _value_at(logs, line[order], wanted)


def rates_of(rows: Sequence[Mapping[str, Any]], setting: str, specs: Sequence[TensorSpec]) -> Rates:
    """Return the rates from estimates of several levels.

    Parameters
    ----------
    rows
        Estimates by tensor, as rows of the document of ``inshrink estimate --levels --by-tensor --json``.
    setting
        The setting that the levels turn.
    specs
        Weights and buffers of a step. One that was not in the sample is taken to be like those of its layer
        type in mean; where there are none, it is left out. So is what is always exact, as counters are.

    Raises
    ------
    InputError
        Fewer than two levels have estimates by tensor.
    """
    estimates = sorted(
        (row for row in rows if row.get("tensors")), key=lambda row: float(row["set"]["settings"][setting])
    )
    if len(estimates) < 2:
        raise InputError("an allocation needs estimates of two levels by tensor", found=str(len(estimates)))
    tables = [{str(item["key"]): item for item in row["tensors"]} for row in estimates]
    seen = set.intersection(*(set(table) for table in tables))
    alike: dict[str, list[str]] = {}
    for key in tables[0]:
        if key in seen:
            alike.setdefault(str(tables[0][key]["layer_type"] or ""), []).append(key)
    lossy = [spec for spec in specs if spec.numel and spec.dtype in LOSSY_DTYPES and not spec.exact]
    sources = {spec.key: [spec.key] if spec.key in seen else alike.get(_layer(spec), []) for spec in lossy}
    covered = [spec for spec in lossy if sources[spec.key]]

    def mean(spec: TensorSpec, table: Mapping[str, Mapping[str, Any]], name: str, total: bool) -> float:
        rows = [table[key] for key in sources[spec.key]]
        found = [_number(row[name]) / (row["n_values"] if total else 1) for row in rows]
        return math.fsum(found) / len(found) * (spec.numel if total else 1)

    def grid(name: str, *, total: bool = False) -> NDArray[np.float64]:
        lines = [[mean(spec, table, name, total) for table in tables] for spec in covered]
        return np.array(lines).reshape(len(covered), len(tables))

    def line(name: str) -> NDArray[np.float64]:
        return np.array([_number(row[name]) for row in estimates])

    turned = estimates[0]["set"]["settings"]
    return Rates(
        codec=str(estimates[0]["codec"]),
        settings=tuple(name for name, value in turned.items() if value == turned[setting]),
        levels=np.array([float(row["set"]["settings"][setting]) for row in estimates]),
        keys=tuple(spec.key for spec in covered),
        layer_types=tuple(map(_layer, covered)),
        sizes=np.array([float(spec.numel) for spec in covered]),
        is_sampled=np.array([spec.key in seen for spec in covered]),
        sensitivities=grid("sensitivity")[:, -1],
        bits=grid("bits_per_weight"),
        damages=grid("damage", total=True),
        ratios_weights=line("ratio_weights"),
        ratios_total=line("ratio_total"),
        figures={name: line(name) for name in ("drop", "divergence")},
        raw_nbytes=float(sum(spec.nbytes for spec in specs)),
        is_calibrated=any(row["n_trials"] for row in estimates),
    )


def _layer(spec: TensorSpec) -> str:
    return "" if spec.layer is None else str(spec.layer)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _positive(*values: float | None) -> bool:
    return all(value is not None and 0 < value < math.inf for value in values)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    logs: NDArray[np.float64] = np.log(np.maximum(values, _LEAST))
    return np.where(np.isfinite(values), logs, np.nan)


def _along(
    places: NDArray[np.float64], lines: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each line's value at its own place: between the known ones, or on along the last slope."""
    right = np.clip(np.searchsorted(places, wanted), 1, places.size - 1)
    left = right - 1
    rows = np.arange(lines.shape[0])
    width = places[right] - places[left]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(width > 0, (wanted - places[left]) / width, 0.0)
    found: NDArray[np.float64] = lines[rows, left] * (1 - share) + lines[rows, right] * share
    return found


def _value_at(places: NDArray[np.float64], line: NDArray[np.float64], wanted: float) -> float:
    return float(_along(places, line[None, :], np.array([wanted]))[0])
