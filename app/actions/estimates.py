"""What a codec would do from fine to coarse, estimated without the evaluator: the scatter before a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inshrink_app.jobs.report import Report

if TYPE_CHECKING:
    from inshrink_core import Run
    from inshrink_core.search.space import Candidate

__all__ = ["estimate_all", "ladder"]

_RUNGS = 7
"""Enough to see the course of a curve, and half a minute of work at most."""


def estimate_all(series: Run, request: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Estimate configurations of a codec one after the other, and tell each.

    Parameters
    ----------
    series
        The run.
    request
        ``codec`` and ``steps``.
    report
        Told a row for each.

    Returns
    -------
    dict
        ``rows``: ``config``, ``ratio``, ``drop``, ``divergence``, ``n_steps`` and ``n_trials``.
    """
    from inshrink_core.verbs.estimate import estimate

    rows: list[dict[str, Any]] = []
    chosen = ladder(series, str(request["codec"]))
    for place, candidate in enumerate(chosen):
        report.progress(place, len(chosen), f"configuration {place + 1}")
        found = estimate(
            series,
            codec=candidate.codec,
            config=dict(candidate.settings),
            steps=[int(step) for step in request["steps"]],
        )
        row = {
            "config": candidate.document(),
            "ratio": found.ratio_weights,
            "drop": found.drop,
            "divergence": found.divergence,
            "n_steps": found.n_steps,
            "n_trials": found.n_trials,
        }
        rows.append(row)
        report.row(**row)
    return {"rows": rows}


def ladder(series: Run, codec: str) -> list[Candidate]:
    """Return a few configurations of a codec's space, from the finest to the coarsest."""
    from inshrink_core.search.space import LatticeLine, space_of

    layers = frozenset(spec.layer for spec in series[series.steps[0]].specs if spec.layer is not None)
    space = space_of(codec, layers)
    if isinstance(space, LatticeLine):
        points = space.points()
        return [space.candidate(points[place]) for place in _spread(len(points))]
    # The diagonal of the cube: every setting from its finest to its coarsest at once.
    n = min(_RUNGS, max(space.shape))
    places = [tuple(round(i * (size - 1) / max(1, n - 1)) for size in space.shape) for i in range(n)]
    return [space.candidate(space.point(place)) for place in dict.fromkeys(places)]


def _spread(n: int) -> list[int]:
    """Return places spread over the middle of a line: its ends are there for searches alone."""
    first, last = n // 4, n - 1 - n // 6
    count = min(_RUNGS, last - first + 1)
    return [round(first + i * (last - first) / max(1, count - 1)) for i in range(count)]
