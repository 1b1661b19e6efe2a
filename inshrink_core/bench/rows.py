"""Bounds, and for each codec and bound the smallest measured configuration that keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inshrink_core.bench.points import Point
from inshrink_core.errors import InputError

__all__ = ["BOUND_KINDS", "DEFAULT_BOUNDS", "REPEAT", "Bound", "Row", "choose_row", "parse_bounds"]

REPEAT = "repeat"
"""Label of the stale copy: the previous original checkpoint, which stores nothing."""

BOUND_KINDS = ("drop", "divergence")


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit on the worst drop of any step, or on the mean divergence over the steps.

    Parameters
    ----------
    kind
        ``drop`` (a fraction) or ``divergence`` (nats).
    limit
        Inclusive.

    Raises
    ------
    InputError
        No such kind, or a limit that bounds nothing.

    Examples
    --------
    >>> Bound("drop", 0.01)
    Bound(kind='drop', limit=0.01)
    """

    kind: str
    limit: float

    def __post_init__(self) -> None:
        if self.kind not in BOUND_KINDS:
            raise InputError(f"there is no bound '{self.kind}'", remedy="bound drop or divergence")
        if not math.isfinite(self.limit) or self.limit < 0:
            raise InputError(
                f"a bound on the {self.kind} is a number", expected="at least 0", found=str(self.limit)
            )

    def figure(self, point: Point) -> float | None:
        """Return what of a point is bounded."""
        return point.max_drop if self.kind == "drop" else point.mean_divergence

    def holds(self, point: Point) -> bool:
        """Whether a point keeps it; what is not known keeps nothing."""
        figure = self.figure(point)
        return figure is not None and figure <= self.limit


DEFAULT_BOUNDS = (
    *(Bound("drop", limit) for limit in (0.005, 0.01, 0.02)),
    *(Bound("divergence", limit) for limit in (0.003, 0.01, 0.03)),
)


def parse_bounds(text: str) -> tuple[Bound, ...]:
    """Return the bounds of ``drop=0.01,divergence=0.01``; a kind may come more than once.

    Raises
    ------
    InputError
        It does not read as bounds.

    Examples
    --------
    >>> parse_bounds("drop=0.01")
    (Bound(kind='drop', limit=0.01),)
    """
    bounds = []
    for part in text.split(","):
        kind, _, limit = part.partition("=")
        try:
            bounds.append(Bound(kind.strip(), float(limit)))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"'{text}' names no bounds", expected="drop=FRACTION,divergence=NATS", found=part
            ) from error
    return tuple(dict.fromkeys(bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One codec under one bound.

    Parameters
    ----------
    codec
        Label of the variant.
    bound
        What it had to keep.
    point
        The measured configuration of the largest ratio that keeps it, or, out of reach, the one that
        comes nearest; None where not even that is known.
    kept
        Whether the bound is kept.
    """

    codec: str
    bound: Bound
    point: Point | None
    kept: bool

    def to_json(self) -> dict[str, Any]:
        """Return the row of ``inshrink bench --json``."""
        point = self.point
        names = ("max_drop", "mean_divergence", "config", "encode_mb_per_s", "decode_mb_per_s")
        more = ("restore_seconds", "peak_memory_bytes", "restore_gain", "restore_noise")
        return {
            "codec": self.codec,
            "bound_kind": self.bound.kind,
            "bound": self.bound.limit,
            "kept": self.kept,
            "ratio_weights": point.ratio_weights if point is not None and self.kept else None,
            "ratio_total": point.ratio_total if point is not None and self.kept else None,
            **{name: getattr(point, name) if point is not None else None for name in (*names, *more)},
        }


def choose_row(codec: str, points: Sequence[Point], bound: Bound) -> Row:
    """Return the row of one codec: nothing but what was measured."""
    keeping = [point for point in points if bound.holds(point)]
    if keeping:
        return Row(codec=codec, bound=bound, point=max(keeping, key=_size), kept=True)
    measured: Iterable[tuple[float, Point]] = (
        (figure, point) for point in points if (figure := bound.figure(point)) is not None
    )
    nearest = min(measured, key=lambda pair: pair[0], default=None)
    return Row(codec=codec, bound=bound, point=nearest[1] if nearest else None, kept=False)


def _size(point: Point) -> float:
    """Order points by ratio; the stale copy, which has none, stands alone."""
    return point.ratio_weights if point.ratio_weights is not None else 0.0
