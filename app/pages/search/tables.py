"""What is asked of a search, and what it found: plain values, and the front of the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "CODECS",
    "Estimate",
    "SearchPoint",
    "SearchRequest",
    "Searched",
    "front",
]

CODECS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lattice": ("Lattice", ("auto", "allocation", "bracket", "random", "grid")),
    "inshrinkerator": ("Inshrinkerator", ("auto", "guided", "random", "grid")),
    "uniform": ("Uniform", ("auto", "guided", "random", "grid")),
    "qd": ("QD", ("auto", "guided", "random", "grid")),
    "lc-checkpoint": ("LC-Checkpoint", ("auto", "guided", "random", "grid")),
    "excp": ("ExCP", ("auto", "guided", "random", "grid")),
    "context": ("Context", ("auto", "guided", "random", "grid")),
}
"""Codecs that have something to search: what to call each, and the strategies that search it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What to look for.

    Parameters
    ----------
    goal
        ``drop``, ``divergence`` or ``ratio``: which of the limits below counts.
    max_drop, max_divergence, target_ratio
        A relative drop, nats, and a ratio of the weights.
    beside
        The divergence that a drop is bound together with: None for the engine's own where the evaluator tells
        predictions, infinity for none.
    codec, strategy
        A key of `CODECS`, and one of its strategies.
    budget
        Most configurations tried; None for as many as the strategy wants.
    steps
        Steps of the chain, ascending.
    """

    goal: str = "drop"
    max_drop: float = 0.01
    max_divergence: float = 0.003
    target_ratio: float = 30.0
    beside: float | None = None
    codec: str = "lattice"
    strategy: str = "auto"
    budget: int | None = None
    steps: tuple[int, ...] = ()

    def limits(self) -> dict[str, float]:
        """Return the limits that count, under the names that the engine has for them."""
        name = {"drop": "max_drop", "divergence": "max_divergence"}.get(self.goal, "target_ratio")
        limits = {name: float(getattr(self, name))}
        if self.goal == "drop" and self.beside is not None:
            limits["max_divergence"] = float(self.beside)
        return limits


class SearchPoint(NamedTuple):
    """One configuration over the steps measured with it.

    Parameters
    ----------
    label
        Its settings in a few words. Untrusted text.
    config
        ``codec``, ``settings`` and, where there are, ``override``, as a config file says it.
    ratio, drop, divergence
        Of the weights of these steps together; and of the worst step, None where no step has one.
    n_steps, whole
        Steps measured, and whether these are all.
    keeps
        Whether every step measured keeps the bounds; of a search for a ratio, whether that is reached.
    gain, noise
        Mean restore gain and noise; None where not measured.
    is_best
        Whether the search settled on it.
    baseline
        The name of a baseline; empty for a trial of the search.
    is_estimated
        Whether nothing of it was measured.
    """

    label: str
    config: Mapping[str, Any]
    ratio: float
    drop: float | None
    divergence: float | None
    n_steps: int
    whole: bool
    keeps: bool
    gain: float | None = None
    noise: float | None = None
    is_best: bool = False
    baseline: str = ""
    is_estimated: bool = False

    @property
    def basis(self) -> str:
        """What its figures are."""
        return "estimated" if self.is_estimated else "measured"

    def figure(self, name: str) -> float | None:
        """Return the drop or the divergence; None for one that is no number."""
        value = self.drop if name == "drop" else self.divergence
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What a search has found, or has found so far.

    Parameters
    ----------
    points
        In the order they were begun.
    max_drop, max_divergence, target_ratio
        The limits; a divergence that stands beside a drop by default among them.
    metric, direction, strategy
        What was judged and how was looked; empty while that is not told.
    steps, uninformative
        Steps of the chain, and those where the bounds say nothing.
    evaluations
        Trials measured by this search; others were known from its log.
    rank_correlation
        Between predicted and measured drops; None for too few trials.
    seconds
        Wall time.
    notes
        What should be known.
    """

    points: tuple[SearchPoint, ...]
    max_drop: float | None = None
    max_divergence: float | None = None
    target_ratio: float | None = None
    metric: str = ""
    direction: str = ""
    strategy: str = ""
    steps: tuple[int, ...] = ()
    uninformative: tuple[int, ...] = ()
    evaluations: int = 0
    rank_correlation: float | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> SearchPoint | None:
        """What the search settled on, or the largest ratio so far that keeps the bounds."""
        settled = [point for point in self.points if point.is_best]
        kept = [point for point in self.points if point.keeps and point.whole]
        return settled[0] if settled else max(kept, key=lambda point: point.ratio, default=None)

    def verdict(self, point: SearchPoint) -> str:
        """Say whether a point is what was asked for."""
        if self.target_ratio is not None:
            return "reaches the ratio" if point.keeps else "below the ratio"
        return "keeps the bounds" if point.keeps else "breaks a bound"

    def bound(self, figure: str) -> float | None:
        """Return the limit of the drop or of the divergence."""
        return self.max_drop if figure == "drop" else self.max_divergence


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a configuration would do; nothing of it was measured.

    `drop` and `divergence` are None where no trials tell what an error costs. `sampled` is the share of
    the weights of `n_steps` steps that was encoded.
    """

    ratio: float
    drop: float | None
    divergence: float | None
    rank_correlation: float | None
    n_trials: int
    n_steps: int
    sampled: float
    notes: tuple[str, ...] = ()


def front(points: Sequence[SearchPoint], figure: str) -> tuple[int, ...]:
    """Return which whole points no other beats in ratio and figure at once, by ascending ratio.

    Parameters
    ----------
    points
        Trials and baselines; those with fewer steps than others are passed over, as their ratios are not
        of the same chain, and so are estimates.
    figure
        ``drop`` or ``divergence``.
    """
    places = [
        i
        for i, point in enumerate(points)
        if point.whole and not point.is_estimated and point.figure(figure) is not None
    ]
    # Falling ratio; of equal ratios the better figure first, so that the other is beaten.
    places.sort(key=lambda i: (-points[i].ratio, points[i].figure(figure)))
    found: list[int] = []
    least = math.inf
    for place in places:
        value = points[place].figure(figure)
        if value is not None and value < least:
            found.append(place)
            least = value
    return tuple(reversed(found))
