"""Results of a benchmark: points, bounds, a row per codec and bound, and the tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from inshrink_core.errors import InputError
from inshrink_core.execution.results import write_atomic
from inshrink_core.report import Part, Report, Table
from inshrink_core.text import UNKNOWN, duration, limit_text, nats, percent, ratio, steps_in_short

REPEAT: Final = "repeat"
"""Label of the previous-checkpoint baseline, which stores nothing."""

POINTS_FILE: Final = "points.json"

_FIGURES: Final = {"drop": "max_drop", "divergence": "mean_divergence"}
"""Figure of a point by kind of bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Report):
    """Measured effect of one codec configuration on a run; None means unknown.

    Parameters
    ----------
    codec
        Label of the variant; ``repeat`` for the previous checkpoint.
    config
        All settings of the codec.
    tunable
        Value of the swept parameter; None without one.
    metric
        Metric of `max_drop`.
    direction
        Better direction of the metric.
    ratio_weights
        Raw bytes over stored bytes of weights and buffers, including headers and indexes.
    ratio_total
        Raw bytes over stored bytes of everything; None for an empty archive.
    max_drop
        Largest value of any step.
    max_divergence
        Largest value of any step.
    mean_divergence
        Mean divergence over the steps, in nats.
    drops, divergences
        A value per step.
    failure
        Reason why a restored state could not be evaluated; empty on success.
    """

    codec: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tunable: float | None = None
    metric: str
    direction: str
    ratio_weights: float | None = None
    ratio_total: float | None = None
    max_drop: float | None = None
    max_divergence: float | None = None
    mean_divergence: float | None = None
    drops: tuple[float | None, ...] = ()
    divergences: tuple[float | None, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit on the worst drop of any step, or on the mean divergence over the steps.

    Parameters
    ----------
    kind
        ``drop`` (a fraction) or ``divergence`` (nats).
    limit
        The limit, inclusive.

    Raises
    ------
    InputError
        The kind is unknown, or the limit bounds nothing.

    Examples
    --------
    >>> Bound("drop", 0.01)
    Bound(kind='drop', limit=0.01)
    """

    kind: str
    limit: float

    def __post_init__(self) -> None:
        if self.kind not in _FIGURES:
            raise InputError(f"there is no bound '{self.kind}'", remedy="bound drop or divergence")
        if not math.isfinite(self.limit) or self.limit < 0:
            raise InputError(
                f"a bound on the {self.kind} is a number", expected="at least 0", found=str(self.limit)
            )

    def figure(self, point: Point) -> float | None:
        """Return the bounded figure of a point."""
        figure: float | None = getattr(point, _FIGURES[self.kind])
        return figure

    def holds(self, point: Point) -> bool:
        """Return whether a point is within the bound; unknown values are not."""
        figure = self.figure(point)
        return figure is not None and figure <= self.limit


DEFAULT_BOUNDS = (
    *(Bound("drop", limit) for limit in (0.005, 0.01, 0.02)),
    *(Bound("divergence", limit) for limit in (0.003, 0.01, 0.03)),
)


def parse_bounds(text: str) -> tuple[Bound, ...]:
    """Return the bounds of ``drop=0.01,divergence=0.01``; a kind may occur more than once.

    Raises
    ------
    InputError
        The text is not a list of bounds.

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
class BoundRow(Report):
    """Result of one codec under one bound.

    Parameters
    ----------
    codec
        Codec with its fixed settings; ``repeat`` is the previous checkpoint.
    bound
        The bound.
    point
        Measured configuration of the largest ratio that keeps the bound. If none keeps it, the one that comes
        nearest, or None if that is unknown.
    kept
        Whether the point keeps the bound.
    """

    codec: str
    bound: Bound
    point: Point | None
    kept: bool

    KEYS: ClassVar = (
        "codec bound_kind=bound.kind bound=bound.limit kept ratio_weights=keeping.ratio_weights "
        "ratio_total=keeping.ratio_total max_drop=point.max_drop mean_divergence=point.mean_divergence "
        "config=point.config"
    )

    @property
    def keeping(self) -> Point | None:
        """The point, if it keeps the bound."""
        return self.point if self.kept else None


def choose_row(codec: str, points: Sequence[Point], bound: Bound) -> BoundRow:
    """Return the row of one codec, chosen among its measured points."""
    keeping = [point for point in points if bound.holds(point)]
    if keeping:
        # The previous checkpoint has no ratio, only a single point.
        return BoundRow(
            codec=codec,
            bound=bound,
            point=max(keeping, key=lambda item: item.ratio_weights or 0.0),
            kept=True,
        )
    known = [(figure, point) for point in points if (figure := bound.figure(point)) is not None]
    nearest = min(known, key=lambda pair: pair[0], default=(None, None))[1]
    return BoundRow(codec=codec, bound=bound, point=nearest, kept=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Report):
    """Result of a benchmark.

    Parameters
    ----------
    run
        Path of the run.
    metric
        Metric that is compared.
    direction
        Better direction of the metric: ``higher`` or ``lower``.
    steps
        Training steps, ascending.
    optimizer
        How optimizer state is stored: ``exact``, ``compressed``, ``compact`` or ``drop``.
    bounds
        The bounds.
    points
        All measured configurations by label of the variant, including the previous checkpoint.
    seconds
        Wall time.
    measured
        Number of configurations measured now, ``repeat`` included.
    resumed
        Number of configurations taken from the folder.
    notes
        Remarks.
    files
        Paths written.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    """

    run: str
    metric: str
    direction: str
    steps: tuple[int, ...]
    optimizer: str
    bounds: tuple[Bound, ...]
    points: Mapping[str, tuple[Point, ...]]
    seconds: float = 0.0
    measured: int = 0
    resumed: int = 0
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    device: str = "cpu"

    KEYS: ClassVar = "run metric direction optimizer measured resumed seconds device steps rows notes files"

    @property
    def rows(self) -> tuple[BoundRow, ...]:
        """Rows for each codec and bound, in the order of the request."""
        return tuple(
            choose_row(label, points, bound) for label, points in self.points.items() for bound in self.bounds
        )

    def shown(self) -> Iterator[Part]:
        """Yield the ratios, their sources, and the notes."""
        headings = [limit_text(bound.kind, bound.limit) for bound in self.bounds]
        yield Table(
            {"codec": None, **dict.fromkeys(headings, str)},
            [(item, *(_ratios(row) for row in self.rows if row.codec == item)) for item in self.points],
        )
        yield "ratio of everything that is stored / of the weights"
        if any(bound.holds(item) for bound in self.bounds for item in self.points.get(REPEAT, ())):
            yield "≈ the previous checkpoint keeps this bound without storing anything, so it proves little"
        # The baseline is equal under every bound, so one row is enough.
        rows = [row for place, row in enumerate(self.rows) if not place or row.codec != REPEAT]
        yield Table(_ROW_COLUMNS, map(_cells, rows))
        yield "metric", f"{self.metric}, {self.direction} is better"
        yield "steps", steps_in_short(self.steps)
        yield "optimizer", self.optimizer
        yield "measured", f"{self.measured} configurations, {self.resumed} were there already"
        yield "time", f"{duration(self.seconds)} on {self.device}"
        yield "files", ", ".join(self.files) or "none (--output DIR keeps what is measured)"
        yield from (f"note: {note}" for note in self.notes)

    def write(self, folder: Path) -> BenchReport:
        """Write rows and points as JSON; return the report that names the file.

        Raises
        ------
        StorageError
            The report cannot be written, for example because the disk is full.
        """
        points = [point.to_json() for group in self.points.values() for point in group]
        write_atomic(folder / POINTS_FILE, json.dumps({**self.to_json(), "points": points}, indent=1))
        return replace(self, files=(str(folder / POINTS_FILE),))


_ROW_COLUMNS: Final = {
    "codec": None,
    "bound": str,
    "of all": ratio,
    "of weights": ratio,
    "drop": percent,
    "divergence": nats,
    "tunable": None,
}


def _cells(row: BoundRow) -> tuple[Any, ...]:
    """Return the source of a ratio as table cells."""
    keeping, point = row.keeping, row.point
    return (
        row.codec,
        "" if row.codec == REPEAT else limit_text(row.bound.kind, row.bound.limit),
        None if keeping is None else keeping.ratio_total,
        None if keeping is None else keeping.ratio_weights,
        None if point is None else point.max_drop,
        None if point is None else point.mean_divergence,
        _tunable(row),
    )


def _ratios(row: BoundRow) -> str:
    """Return the ratios of a row: a dash if no point keeps the bound, a sign if nothing is stored."""
    if not row.kept or row.point is None:
        return UNKNOWN
    if row.codec == REPEAT:
        return "≈"
    return f"{ratio(row.point.ratio_total)} / {ratio(row.point.ratio_weights)}"


def _tunable(row: BoundRow) -> str:
    """Return the value of the parameter, in brackets if it breaks the bound."""
    if row.point is None or row.point.tunable is None:
        return ""
    text = json.dumps(row.point.tunable)
    return text if row.kept else f"({text})"
