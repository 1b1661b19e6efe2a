"""Bits and damage of every tensor at every coarseness, to estimate a manual allocation.

A codec with one tunable parameter is encoded once from fine to coarse (`inshrink_core.verbs.estimate`
by tensor). The bits and damage of a tensor depend only on its step size, so those of any allocation are sums
of measured values. The quality of an allocation is that of the uniform setting with the same total damage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codecs.fallback import LOSSY_DTYPES
from inshrink_core.errors import InputError
from inshrink_core.search.quadratic import Curve

_LEAST: Final = 1e-300
"""Stand-in for a damage of zero, which has no logarithm."""

_MAX_LOG: Final = 700.0
"""Exponent beyond which the exponential function counts as infinite."""

_HALVINGS: Final = 60
"""Number of bisections of the logarithm of the price between `_LEAST` and its inverse: relative error
1e-15."""


class Predicted(NamedTuple):
    """Predicted size and quality of an allocation.

    Parameters
    ----------
    bits : Float[ndarray, "n"]
        Bits per weight of each tensor.
    damage : Float[ndarray, "n"]
        Damage of each tensor; NaN where its h is unknown.
    nbytes
        Mean size of the weights per frame.
    ratio_weights, ratio_total
        Raw bytes over stored bytes; the total is None if unknown.
    drop, divergence
        Figures of the worst step, from the damage of all tensors; None if the levels lack them.
    """

    bits: NDArray[np.float64]
    damage: NDArray[np.float64]
    nbytes: float
    ratio_weights: float
    ratio_total: float | None
    drop: float | None
    divergence: float | None


class MeasuredAllocation(NamedTuple):
    """Figures of an allocation, measured by the evaluator.

    Parameters
    ----------
    values
        Value of the parameter for each tensor, positive.
    drop, divergence
        Figures of the worst step; None if unknown.
    """

    values: Sequence[float]
    drop: float | None
    divergence: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rates:
    """Effect of a codec with one tunable parameter on each tensor, from fine to coarse.

    Parameters
    ----------
    codec, settings
        The codec, and the settings that the parameter changes.
    levels : Float[ndarray, "levels"]
        Values of the parameter, ascending.
    keys
        Keys of the tensors.
    sizes : Float[ndarray, "n"]
        Number of elements of each tensor.
    is_sampled : Bool[ndarray, "n"]
        Whether the tensor was encoded; other tensors get the values of their layer type.
    sensitivities : Float[ndarray, "n"]
        Mean h; NaN if unknown.
    bits, damages : Float[ndarray, "n levels"]
        Bits per weight, and damage; NaN if unknown.
    ratios_weights, ratios_total : Float[ndarray, "levels"]
        Compression ratios of the uniform settings; NaN if unknown.
    figures : dict of Float[ndarray, "levels"]
        ``drop`` and ``divergence`` of the uniform settings; NaN if unknown.
    raw_nbytes
        Raw bytes of the weights of a step.
    is_calibrated
        Whether trials of this run calibrate the figures; otherwise they follow rules of thumb.
    corrections
        Measured figures divided by predicted ones, by figure.
    n_measured
        Number of measurements behind the corrections.
    """

    codec: str
    settings: tuple[str, ...]
    levels: NDArray[np.float64]
    keys: tuple[str, ...]
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
    corrections: Mapping[str, Curve] = field(default_factory=dict)
    n_measured: int = 0

    def calibrated(self, measured: Sequence[MeasuredAllocation]) -> Rates:
        """Return these rates with figures that pass through the measurements.

        Parameters
        ----------
        measured
            Allocations with this codec. Allocations without a measured figure, or without a positive
            predicted one, are ignored.
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
        corrections = {name: Curve.through(pairs) for name, pairs in factors.items() if pairs}
        return replace(plain, corrections=corrections, n_measured=used)

    def curve(self, figure: str) -> NDArray[np.float64]:
        """Return the calibrated ``drop`` or ``divergence`` of the uniform settings; NaN if unknown."""
        factors = [self._correction(figure, total) for total in np.nansum(self.damages, axis=0)]
        found: NDArray[np.float64] = self.figures[figure] * np.array(factors)
        return found

    def predict(self, values: Sequence[float]) -> Predicted:
        """Predict the size and quality of an allocation.

        Parameters
        ----------
        values
            Value of the parameter for each tensor, positive.

        Raises
        ------
        InputError
            The number of values differs from that of tensors, or a value is not positive.

        Notes
        -----
        Between two levels, bits and the logarithm of the damage are linear in the logarithm of the parameter.
        Beyond the last level both are extrapolated; bits are at least zero. O(n).
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
        # The overhead of all tensors together comes from the uniform settings.
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
        """Return the allocation of least damage that fits a number of bytes.

        Parameters
        ----------
        nbytes
            Maximum size of the weights of a frame, as in `Predicted.nbytes`.
        values
            Current value of the parameter for each tensor. Locked tensors and those with unknown damage keep
            it.
        locked
            Whether each tensor is locked.

        Notes
        -----
        Every tensor gets the same exchange rate of bytes for damage, λ, which bisection finds: each tensor
        minimizes ``damage + λ bytes``. Values are on the levels, half way between them, or up to one level
        beyond (Shoham and Gersho 1988). If even the coarsest allocation is too large, it is returned. O(60 ·
        n · levels).
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
        """Return the total ratio for a ratio of the weights; NaN if unknown.

        Everything but the weights takes as much as with the uniform settings. In units of all raw bytes, the
        inverse of the total ratio is the sum of the stored weights and the rest.
        """
        if not (self.ratios_total > 0).all() or not 0 < ratio_weights < math.inf:
            return math.nan
        shares = 1 / self.ratios_weights
        order = np.argsort(shares)
        return 1 / max(_value_at(shares[order], 1 / self.ratios_total[order], 1 / ratio_weights), 1e-12)

    def _correction(self, figure: str, damage: float) -> float:
        return self.corrections[figure].at(damage) if figure in self.corrections else 1.0

    def _at(self, line: NDArray[np.float64], damage: float) -> float:
        """Return a figure of the uniform settings at a total damage."""
        totals = np.nansum(self.damages, axis=0)
        if not np.isfinite(line).all():
            return math.nan
        if damage <= 0 or not (totals > 0).all():
            return float(line[0])
        order = np.argsort(totals, kind="stable")
        logs, wanted = np.log(totals[order]), math.log(damage)
        if (line > 0).all():
            return math.exp(min(_value_at(logs, np.log(line[order]), wanted), _MAX_LOG))
        return _value_at(logs, line[order], wanted)


def rates_of(rows: Sequence[Mapping[str, Any]], setting: str, specs: Sequence[TensorSpec]) -> Rates:
    """Return the rates from estimates at several levels.

    Parameters
    ----------
    rows
        Estimates by tensor, rows of the document of ``inshrink estimate --each --by-tensor --json``.
    setting
        The setting that the levels change.
    specs
        Weights and buffers of a step. A tensor outside the sample gets the mean values of its layer type, or
        is omitted if that has none. Tensors that are always exact, such as counters, are omitted too.

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
    """Interpolate each line at its position; extrapolate along the last slope."""
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
