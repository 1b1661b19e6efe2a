"""Findings in a table of sensitivities: the rows with the largest shares, and those that changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inshrink_core.errors import clipped
from inshrink_core.sensitivity import SensitivityMetric
from inshrink_core.text import count

if TYPE_CHECKING:
    from numpy.typing import NDArray

CARRIED: Final = 0.8
"""Share of the sensitivity that the reported rows carry: the customary four fifths (Pareto)."""

_LEAST_CHANGE: Final = 2.0
"""Factor from which a change counts: smaller changes are within the noise of a batch."""

_CHANGED: Final = {
    "sensitivity": ("become {} times more sensitive", "become {} times less sensitive"),
    "movement": ("sped up {} times", "slowed down {} times"),
    "magnitude": ("become {} times larger", "become {} times smaller"),
}
"""Words for more and less, by metric."""

_CURVED: Final = "fisher"
"""The metric that is proportional to curvature and gives the worth of a bit."""


class Stretch(NamedTuple):
    """Neighbouring rows whose sensitivity has changed in one direction.

    Parameters
    ----------
    first, last
        Indices of the first and the last row.
    step
        Step at which the change starts.
    factor
        Geometric mean of later over earlier values; below 1 if sensitivity fell. For movement, the factor of
        the speed per training step.
    """

    first: int
    last: int
    step: int
    factor: float

    @property
    def bits(self) -> float:
        """Bits per weight that the change is worth if an error e costs ½ h·e².

        Another bit halves e, so a quarter of h is worth one bit.
        """
        return 0.5 * math.log2(self.factor)


class Findings(NamedTuple):
    """Result of `findings`.

    Parameters
    ----------
    metric, by
        The metric, and the kind of row: ``tensor``, ``block`` or ``layer_type``.
    names
        Names of the rows.
    step
        The last step, which `few` refers to.
    few
        Indices of the fewest rows that together carry `CARRIED` of the sensitivity, the largest first; empty
        without any sensitivity.
    n_rows
        Number of rows with a value at that step.
    stretch
        The stretch with the largest change; None without a notable one.
    """

    metric: str
    by: str
    names: tuple[str, ...]
    step: int
    few: tuple[int, ...]
    n_rows: int
    stretch: Stretch | None

    def sentence(self, width: int = 48) -> str:
        """Return the findings in words; empty if nothing was found. Names in it are untrusted.

        Parameters
        ----------
        width
            Maximum length of a name that is written in full.

        Examples
        --------
        >>> import numpy as np
        >>> values = np.array([[8.0, 4.0], [8.0, 1.0], [1.0, 96.0]])
        >>> findings("taylor", "block", ["a", "b", "c"], [1, 1, 1], (10, 20), values[:, 1:]).sentence()
        '1 of 3 blocks carries at least 80 % of the sensitivity: c.'
        """
        if not self.few:
            return ""
        names = [clipped(name, width) for name in self.names]
        is_single, kind = len(self.few) == 1, self._kind(self.n_rows)
        carried = f"{len(self.few)} of {self.n_rows} {kind} {'carries' if is_single else 'carry'}"
        text = f"{carried} at least {round(100 * CARRIED)} % of the {SensitivityMetric(self.metric).quantity}"
        if len(self.few) <= _MAX_NAMED:
            text += f": {_listed([names[place] for place in self.few])}"
        return f"{text}. {self._changed(names)}".strip()

    def _kind(self, n: int) -> str:
        word = self.by.replace("_", " ")
        return word if n == 1 else f"{word}s"

    def _changed(self, names: Sequence[str]) -> str:
        found = self.stretch
        if found is None:
            return ""
        factor = max(found.factor, 1 / found.factor)
        n = found.last - found.first + 1
        if n == 1:
            alone = self.few == (found.first,) and len(self.few) <= _MAX_NAMED
            who = "It has" if alone else f"{names[found.first]} has"
        elif n == len(names):
            who = f"All {n} {self._kind(n)} have"
        else:
            who = f"{n} {self._kind(n)}, {names[found.first]} to {names[found.last]}, have"
        changed = _CHANGED[SensitivityMetric(self.metric).quantity][found.factor < 1].format(_times(factor))
        text = f"{who} {changed} since step {count(found.step)}"
        worth = "more" if found.factor > 1 else "fewer"
        if self.metric == _CURVED and abs(found.bits) >= _LEAST_BITS and factor < _TOO_LARGE:
            text += f": a weight needs {abs(found.bits):.2g} bits {worth}".replace(" 1 bits", " 1 bit")
        return f"{text}."


_MAX_NAMED: Final = 3
"""Maximum number of names in a sentence."""

_LEAST_BITS: Final = 0.5
"""Minimum number of bits that is reported."""

_TOO_LARGE: Final = 10_000
"""Quotients of small numbers beyond this are not reported."""


def _times(factor: float) -> str:
    return f"{float(f'{factor:.2g}'):,.15g}" if factor < _TOO_LARGE else f"more than {_TOO_LARGE:,}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def weighted(values: NDArray[np.floating], sizes: Sequence[int] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of sensitivities from their means.

    Parameters
    ----------
    values : Float[ndarray, "rows steps"]
        Means; values that are not finite become NaN.
    sizes
        Measured parameters of each row, or of each row at each step.
    """
    sums = np.asarray(values, np.float64) * np.atleast_2d(np.asarray(sizes, np.float64).T).T
    return np.where(np.isfinite(sums), sums, np.nan)


def findings(
    metric: str,
    by: str,
    names: Sequence[str],
    sizes: Sequence[int] | NDArray[np.float64],
    steps: Sequence[int],
    means: NDArray[np.floating],
) -> Findings:
    """Return the rows that carry the sensitivity, and the neighbouring rows that changed most.

    Parameters
    ----------
    metric, by
        The metric, and the kind of row.
    names, sizes
        Names and numbers of parameters of the rows, in model order.
    steps
        Ascending, at least one.
    means : Float[ndarray, "rows steps"]
        Mean sensitivity of a row's parameters; NaN if unknown.

    Notes
    -----
    A row carries its mean times its size; on a tie the earlier row comes first. Its change is the last value
    over the first; zero and values that are not finite count as no change. A stretch is a run of neighbouring
    rows that have all doubled, or all halved. The function returns the stretch with the largest sum of
    logarithms. O(rows · (steps + log rows)).

    Examples
    --------
    >>> import numpy as np
    >>> found = findings("update", "tensor", ["a", "b"], [10, 1], (5,), np.array([[1.0], [1.0]]))
    >>> found.few, found.stretch
    ((0,), None)
    """
    sums, extents = weighted(means, sizes), np.atleast_2d(np.asarray(sizes, np.float64).T).T[:, -1]
    now = np.nan_to_num(sums[:, -1], nan=0.0)
    order = np.argsort(-now, kind="stable")
    total = float(now.sum())
    few: tuple[int, ...] = ()
    if total > 0 and math.isfinite(total):
        cumulative = np.cumsum(now[order])
        # The tolerance keeps rounding errors from adding a row.
        n_few = int(np.searchsorted(cumulative, CARRIED * total * (1 - 1e-12))) + 1
        few = tuple(int(place) for place in order[:n_few])
    is_speed = metric == SensitivityMetric.UPDATE
    n_steps = np.diff(np.asarray(steps, np.float64), prepend=np.nan)
    return Findings(
        metric=metric,
        by=by,
        names=tuple(names),
        step=steps[-1],
        few=few,
        n_rows=int((np.isfinite(sums[:, -1]) & (extents > 0)).sum()),
        stretch=_stretch(steps, sums / n_steps if is_speed else sums),
    )


def _stretch(steps: Sequence[int], sums: NDArray[np.float64]) -> Stretch | None:
    """Return the stretch of neighbouring rows with the largest change."""
    best, most = None, 0.0
    for kind, group in itertools.groupby(enumerate(map(_change, sums)), lambda pair: _kind_of(pair[1])):
        places = list(group)
        logs = [math.log(change[1]) for _, change in places if change is not None]
        if kind is not None and abs(math.fsum(logs)) > most:
            most = abs(math.fsum(logs))
            factor = math.exp(math.fsum(logs) / len(logs))
            best = Stretch(places[0][0], places[-1][0], steps[kind[0]], factor)
    return best


def _change(row: NDArray[np.float64]) -> tuple[int, float] | None:
    """Return the index of the first value, and the ratio of the last to it; None if either is unusable."""
    there = np.flatnonzero(np.isfinite(row) & (row > 0))
    if there.size < 2 or there[-1] != row.size - 1:
        return None
    quotient = float(row[there[-1]]) / float(row[there[0]])
    return (int(there[0]), quotient) if 0 < quotient < math.inf else None


def _kind_of(change: tuple[int, float] | None) -> tuple[int, bool] | None:
    """Return the start of a row's change and whether the row has grown; None without a notable change."""
    if change is None or 1 / _LEAST_CHANGE < change[1] < _LEAST_CHANGE:
        return None
    return change[0], change[1] > 1
