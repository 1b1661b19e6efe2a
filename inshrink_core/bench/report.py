"""What a bench found, as a document, as CSV and as plots."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from inshrink_core.bench.plots import plots_html
from inshrink_core.bench.points import Point
from inshrink_core.bench.rows import REPEAT, Bound, Row, choose_row
from inshrink_core.errors import MissingExtraError
from inshrink_core.execution import write_whole

__all__ = ["BenchReport"]

ROWS_FILE: Final = "bench.csv"
POINTS_FILE: Final = "points.json"
PLOTS_FILE: Final = "bench.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What a bench found.

    Parameters
    ----------
    run
        Path of the run.
    metric, direction
        What drops are of.
    steps
        The steps of each chain.
    optimizer
        How the optimizer's state was stored by codecs that leave it to others.
    bounds
        What had to be kept.
    points
        Every measured configuration, by label of the variant; the stale copy among them.
    seconds
        Wall time.
    measured, resumed
        Configurations measured now, and those that had been measured before.
    notes
        What a reader should know.
    files
        What was written.
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

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row for each codec and bound; codecs in the order they were asked for."""
        return tuple(
            choose_row(label, points, bound) for label, points in self.points.items() for bound in self.bounds
        )

    @property
    def stale_bounds(self) -> tuple[Bound, ...]:
        """Bounds that the stale copy keeps, so that keeping them proves little."""
        return tuple(bound for bound in self.bounds if any(map(bound.holds, self.points.get(REPEAT, ()))))

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink bench --json``."""
        return {
            "run": self.run,
            "metric": self.metric,
            "direction": self.direction,
            "optimizer": self.optimizer,
            "steps": list(self.steps),
            "rows": [row.to_json() for row in self.rows],
            "measured": self.measured,
            "resumed": self.resumed,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "files": list(self.files),
        }

    def to_csv(self) -> str:
        """Return the rows as CSV; a config is JSON in its cell, what is not known an empty one."""
        text = io.StringIO()
        rows = [row.to_json() for row in self.rows]
        writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["codec"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(row | {"config": json.dumps(row["config"])})
        return text.getvalue()

    def write(self, folder: Path) -> BenchReport:
        """Write rows (CSV), points (JSON) and plots (HTML); return the report that names them.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        texts = {
            ROWS_FILE: self.to_csv(),
            POINTS_FILE: json.dumps(
                {**self.to_json(), "points": [p.to_json() for group in self.points.values() for p in group]},
                indent=1,
            ),
        }
        notes = self.notes
        try:
            texts[PLOTS_FILE] = plots_html(self.points, self.bounds, self.metric)
        except MissingExtraError as error:
            notes = (*notes, f"no plots: {error}")
        for name, text in texts.items():
            write_whole(folder / name, text)
        return replace(self, notes=notes, files=tuple(str(folder / name) for name in texts))
