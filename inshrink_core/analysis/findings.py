"""Findings in a table of sensitivities: the rows that carry most, and those that changed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from inshrink_core.sensitivity import SensitivityMetric
from inshrink_core.text import count, elided

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Findings", "Stretch", "findings", "learning_rates", "weighted"]

CARRIED: Final = 0.8
"""Share of the sensitivity that "the few" carry: the customary four fifths (Pareto)."""

_NOTABLE: Final = 2.0
"""A row has changed where its sensitivity has doubled or halved: less lies within the noise of a batch."""

_CHANGED: Final = {
    "sensitivity": ("become {} times more sensitive", "become {} times less sensitive"),
    "movement": ("sped up {} times", "slowed down {} times"),
    "magnitude": ("become {} times larger", "become {} times smaller"),
}
"""What more and less are called, by what was measured."""

_RATE: Final = re.compile(r"(^|[^a-z])(lr|learning[_ -]?rate)([^a-z]|$)", re.IGNORECASE)
_PARTS_OF_RATE: Final = 64
"""Places between two checkpoints at which the learning rate is looked up."""

_CURVED: Final = "fisher"
"""The metric in proportion to curvature, from which the worth of a bit follows."""


class Stretch(NamedTuple):
    """Neighbouring rows whose sensitivity has changed in one direction.

    Parameters
    ----------
    first, last
        Places of the first and the last of them.
    step
        Since when.
    factor
        Geometric mean of later over earlier; below 1 where they have become less sensitive. Of movement it is
        that of the speed, per step of training.
    of_rate
        The factor relative to the learning rate, of movement where that was logged; else None.
    """

    first: int
    last: int
    step: int
    factor: float
    of_rate: float | None = None

    @property
    def bits(self) -> float:
        """Bits a weight that the change is worth, where the loss minds an error e by ½ h·e².

        A bit more halves e, so h that falls to a quarter is worth one bit.
        """
        return 0.5 * math.log2(self.factor)


class Findings(NamedTuple):
    """What `findings` finds.

    Parameters
    ----------
    metric, by
        What was measured, and what a row is: ``tensor``, ``block`` or ``layer_type``.
    names
        Of the rows.
    step
        The last step, of which `few` speaks.
    few
        Places of the fewest rows that together carry `CARRIED` of the sensitivity, the largest first; empty
        where none has any.
    n_rows
        Rows that have a value at that step.
    stretch
        The stretch that has changed most; None where nothing notable has.
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
            Longest name that is written in full.

        Examples
        --------
        >>> import numpy as np
        >>> values = np.array([[8.0, 4.0], [8.0, 1.0], [1.0, 96.0]])
        >>> findings("taylor", "block", ["a", "b", "c"], [1, 1, 1], (10, 20), values[:, 1:]).sentence()
        '1 of 3 blocks carries at least 80 % of the sensitivity: c.'
        """
        if not self.few:
            return ""
        named = self._replace(names=tuple(elided(name, width) for name in self.names))
        return named._text()

    def _text(self) -> str:
        is_single, kind = len(self.few) == 1, self._kind(self.n_rows)
        carried = f"{len(self.few)} of {self.n_rows} {kind} {'carries' if is_single else 'carry'}"
        text = f"{carried} at least {round(100 * CARRIED)} % of the {SensitivityMetric(self.metric).quantity}"
        if len(self.few) <= _MOST_NAMED:
            text += f": {_listed([self.names[place] for place in self.few])}"
        return f"{text}. {self._changed()}".strip()

    def _kind(self, n: int) -> str:
        word = self.by.replace("_", " ")
        return word if n == 1 else f"{word}s"

    def _changed(self) -> str:
        found = self.stretch
        if found is None:
            return ""
        factor = max(found.factor, 1 / found.factor)
        n = found.last - found.first + 1
        if n == 1:
            alone = self.few == (found.first,) and len(self.few) <= _MOST_NAMED
            who = "It has" if alone else f"{self.names[found.first]} has"
        elif n == len(self.names):
            who = f"All {n} {self._kind(n)} have"
        else:
            who = f"{n} {self._kind(n)}, {self.names[found.first]} to {self.names[found.last]}, have"
        changed = _CHANGED[SensitivityMetric(self.metric).quantity][found.factor < 1].format(_times(factor))
        text = f"{who} {changed} since step {count(found.step)}"
        if found.of_rate is not None:
            relative = max(found.of_rate, 1 / found.of_rate)
            beside = _CHANGED["movement"][found.of_rate < 1].format(_times(relative))
            is_beside = relative >= _NOTABLE
            text += f", and {beside} beside the learning rate" if is_beside else " with the learning rate"
        worth = "more" if found.factor > 1 else "fewer"
        if self.metric == _CURVED and abs(found.bits) >= _LEAST_BITS and factor < _TOO_LARGE:
            text += f": a weight needs {abs(found.bits):.2g} bits {worth}"
        return f"{text}."


_MOST_NAMED: Final = 3
"""More names than this are no sentence."""

_LEAST_BITS: Final = 0.5
"""Fewer bits than this are not worth a word."""

_TOO_LARGE: Final = 10_000
"""Beyond this a quotient of small numbers is no measurement."""


def _times(factor: float) -> str:
    return f"{float(f'{factor:.2g}'):,.15g}" if factor < _TOO_LARGE else f"more than {_TOO_LARGE:,}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def weighted(values: NDArray[np.floating], sizes: Sequence[int] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of sensitivities from their means.

    Parameters
    ----------
    values : Float[ndarray, "rows steps"]
        Means; what is not finite becomes NaN.
    sizes
        Parameters of each row, or of each row at each step, where not all that a row has were measured.
    """
    import numpy as np

    sums = np.asarray(values, np.float64) * np.atleast_2d(np.asarray(sizes, np.float64).T).T
    return np.where(np.isfinite(sums), sums, np.nan)


def learning_rates(
    log: Mapping[str, Sequence[tuple[int, float]]], steps: Sequence[int]
) -> NDArray[np.float64] | None:
    """Return the learning rate summed over the training steps that lead to each checkpoint.

    Parameters
    ----------
    log
        Logged metrics by name, each as step and value.
    steps
        Of the checkpoints, ascending; the first has no step before it, and NaN.

    Returns
    -------
    Float[ndarray, "steps"] or None
        Linear between the values that were logged, and as the nearest beyond them; None where none was.

    Examples
    --------
    >>> learning_rates({"train/lr": [(0, 0.5), (20, 0.5)]}, (10, 20)).tolist()
    [nan, 5.0]
    """
    import numpy as np

    names = [name for name in log if _RATE.search(name)]
    if not names:
        return None
    series = sorted((step, rate) for step, rate in log[min(names, key=len)] if math.isfinite(rate))
    if not series:
        return None
    found = np.full(len(steps), np.nan)
    for at, (before, step) in enumerate(itertools.pairwise(steps), 1):
        between = np.linspace(before, step, _PARTS_OF_RATE)
        mean = float(np.interp(between, *np.asarray(series, np.float64).T).mean())
        found[at] = mean * (step - before) if mean > 0 else np.nan
    return found


def findings(
    metric: str,
    by: str,
    names: Sequence[str],
    sizes: Sequence[int] | NDArray[np.float64],
    steps: Sequence[int],
    means: NDArray[np.floating],
    rates: NDArray[np.float64] | None = None,
) -> Findings:
    """Return which rows carry the sensitivity, and which neighbouring rows have changed most.

    Parameters
    ----------
    metric, by
        What was measured, and what a row is.
    names, sizes
        Of the rows, in model order: names, and numbers of parameters.
    steps
        Ascending, at least one.
    means : Float[ndarray, "rows steps"]
        Mean sensitivity of a row's parameters; NaN where there is none.
    rates
        What `learning_rates` returns, to which movement is compared.

    Notes
    -----
    What a row carries is its mean times its size. Of rows that carry the same, the earlier counts first. A
    change is the last value over the first that a row has; zero and values that are not finite are no change.
    Neighbouring rows that have doubled, or halved, are a stretch; the stretch returned has the largest sum of
    logarithms. O(rows · (steps + log rows)).

    Examples
    --------
    >>> import numpy as np
    >>> found = findings("update", "tensor", ["a", "b"], [10, 1], (5,), np.array([[1.0], [1.0]]))
    >>> found.few, found.stretch
    ((0,), None)
    """
    import numpy as np

    sums = weighted(means, sizes)
    now = np.nan_to_num(sums[:, -1], nan=0.0)
    order = np.argsort(-now, kind="stable")
    total = float(now.sum())
    few: tuple[int, ...] = ()
    if total > 0 and math.isfinite(total):
        cumulative = np.cumsum(now[order])
        # Rounding must not ask for one more row than it takes.
        n_few = int(np.searchsorted(cumulative, CARRIED * total * (1 - 1e-12))) + 1
        few = tuple(int(place) for place in order[:n_few])
    return Findings(
        metric=metric,
        by=by,
        names=tuple(names),
        step=steps[-1],
        few=few,
        n_rows=int(np.isfinite(sums[:, -1]).sum()),
        stretch=_stretch(steps, sums) if metric != SensitivityMetric.UPDATE else _slowed(steps, sums, rates),
    )


def _slowed(
    steps: Sequence[int], sums: NDArray[np.float64], rates: NDArray[np.float64] | None
) -> Stretch | None:
    """Return the stretch whose speed has changed most, and what of it the learning rate leaves."""
    import numpy as np

    n_steps = np.diff(np.asarray(steps, np.float64), prepend=np.nan)
    found = _stretch(steps, sums / n_steps)
    if found is None or rates is None:
        return found
    relative = [_change(row) for row in sums[found.first : found.last + 1] / rates]
    logs = [math.log(change[1]) for change in relative if change is not None]
    return found._replace(of_rate=math.exp(math.fsum(logs) / len(logs)) if logs else None)


def _stretch(steps: Sequence[int], sums: NDArray[np.float64]) -> Stretch | None:
    """Return the stretch of neighbouring rows that has changed most."""
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
    """Return the place of the first value, and the last over it; None if either is unusable."""
    import numpy as np

    there = np.flatnonzero(np.isfinite(row) & (row > 0))
    if there.size < 2 or there[-1] != row.size - 1:
        return None
    quotient = float(row[there[-1]]) / float(row[there[0]])
    return (int(there[0]), quotient) if 0 < quotient < math.inf else None


def _kind_of(change: tuple[int, float] | None) -> tuple[int, bool] | None:
    """Return since when a row has changed and whether it has grown; None where it has done neither."""
    if change is None or 1 / _NOTABLE < change[1] < _NOTABLE:
        return None
    return change[0], change[1] > 1
