"""How much the loss minds an error, as tables of a run."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.errors import ExistsError, InputError, StorageError
from inshrink_core.execution.progress import Progress
from inshrink_core.report import Part, Report, Table
from inshrink_core.request import Option, Request, python_call
from inshrink_core.sensitivity import STATISTICS, Grouping, SensitivityMetric
from inshrink_core.text import UNKNOWN, csv_cell, spread, steps_in_short
from inshrink_core.verbs.shared.groups import Opening, PathLike, RunOrArchive, Stepping, chosen_steps

if TYPE_CHECKING:
    from inshrink_core.analysis.profile import SensitivityTable


_METRICS: Final = "|".join(SensitivityMetric)
_GROUPINGS: Final = "|".join(Grouping)
_SOURCES: Final = {
    "gradient": "recorded gradients",
    "exp_avg": "Adam's first moment, in place of the gradient",
}

_COLUMNS: Final = 6
"""Steps that fit a line of 100 columns beside a name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SensitivityReport(Report):
    """A table of a run, as it is shown and written.

    Parameters
    ----------
    run
        The run, as it was named.
    table
        One metric by one grouping.
    bytes_read
        Bytes of tensors read to measure it; those that were cached took none.
    device
        Where the tensors of an archive were decoded.
    statistic
        What of a row's parameters is shown.
    """

    run: str
    table: SensitivityTable
    bytes_read: int
    device: str = "cpu"
    statistic: str = "mean"

    SAYS: ClassVar = (
        "run metric=table.metric by=table.grouping steps=table.steps sources=table.sources bytes_read "
        "device rows"
    )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row has a value a step, NaN where there is none."""
        statistics = {name: getattr(self.table, name).tolist() for name in STATISTICS}
        return [
            {
                "name": row.name,
                "block": row.block,
                "layer_type": row.layer_type,
                "n_parameters": row.numel,
                "shape": None if row.shape is None else list(row.shape),
                **{name: values[position] for name, values in statistics.items()},
                "n_nonfinite": self.table.n_nonfinite[position].tolist(),
            }
            for position, row in enumerate(self.table.details)
        ]

    def write_csv(self, path: Path) -> None:
        """Write a line a row and step; a gap is an empty cell.

        Raises
        ------
        StorageError
            The file cannot be written.
        """
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["metric", self.table.grouping, "step", *STATISTICS])
                for row in self.rows:
                    for position, step in enumerate(self.table.steps):
                        values = [row[statistic][position] for statistic in STATISTICS]
                        cells = ["" if math.isnan(value) else repr(value) for value in values]
                        writer.writerow([self.table.metric, csv_cell(row["name"]), step, *cells])
        except OSError as error:
            raise StorageError(f"the CSV cannot be written ({error.strerror})", where=str(path)) from error

    def shown(self) -> Iterator[Part]:
        """Yield a row a tensor and as many steps as fit."""
        table = self.table
        steps, by = table.steps, str(table.grouping).replace("_", " ")
        chosen = spread(range(len(steps)), _COLUMNS)
        rows = [(row["name"], *(row[self.statistic][i] for i in chosen)) for row in self.rows]
        yield Table({by: None, **{f"step {steps[i]}": _short for i in chosen}}, rows)
        yield "metric", f"{table.metric}, {self.statistic} of each {by}"
        some = f"{len(chosen)} of {len(steps)} shown"
        yield "steps", steps_in_short(steps) if len(chosen) == len(steps) else some
        sources = sorted({str(source) for source in table.sources if source is not None})
        yield "scores from", ", ".join(_SOURCES.get(source, source) for source in sources)
        if note := table.findings().sentence():
            yield f"note: {note}"


def _short(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class SensitivityTablesReport(Report):
    """One metric of a run by several groupings.

    Parameters
    ----------
    run
        The run, as it was named.
    metric
        What was measured.
    restored
        Whether it is an archive, so that values are those of restored tensors.
    device
        Where the tensors of an archive were decoded.
    tables
        A report a grouping.
    """

    run: str
    metric: str
    restored: bool
    device: str
    tables: tuple[SensitivityReport, ...]

    def shown(self) -> Iterator[Part]:
        """Yield one table after another."""
        for table in self.tables:
            yield from table.shown()


@dataclass(frozen=True)
class Sensitivity(Stepping, Opening, Request[SensitivityReport | SensitivityTablesReport]):
    """Show how much the loss minds an error, per tensor and step.

    Parameters
    ----------
    run
        A run, a checkpoint file or an archive.
    metric
        abs(w), abs(g·w), Adam's second moment, or the movement since the step before.
    by
        What a row is; also several, as a list a,b.
    statistic
        What of a row's parameters the table shows.
    csv
        Write every row, step and statistic as CSV.
    force
        Overwrite what exists.

    Raises
    ------
    InputError
        There is no such metric, grouping or statistic, or options exclude each other.
    NotFoundError
        There is no such step.
    ExistsError
        The CSV file exists and `force` is not set.
    StorageError
        It cannot be written.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.sample("digits-cnn")
    >>> report = inshrink_core.verbs.sensitivity(run, metric="fisher", by="layer_type", steps=[400, 800])
    >>> report.table.rows, report.table.mean.shape
    (('convolution', 'vector', 'linear'), (3, 2))
    """

    run: RunOrArchive
    _: KW_ONLY
    metric: Annotated[str, Option(metavar=_METRICS)] = "magnitude"
    by: Annotated[str, Option(metavar=_GROUPINGS)] = "tensor"
    statistic: Annotated[str, Option(metavar="|".join(STATISTICS))] = "mean"
    csv: Annotated[PathLike | None, Option(metavar="FILE")] = None
    force: bool = False

    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink sensitivity runs/digits --metric fisher --by layer_type",
        "inshrink sensitivity runs/digits --metric update --csv update.csv",
    )

    def perform(self) -> SensitivityReport | SensitivityTablesReport:
        """Measure, and write the table."""
        from inshrink_core.analysis.profile import profile
        from inshrink_core.chain import Archive

        self._check()
        opened = self.opened(self.run)
        where = str(getattr(self.run, "path", self.run))
        steps = chosen_steps(self.steps, lambda: opened.steps, where)
        is_archive = isinstance(opened, Archive)
        read = opened.sequential() if isinstance(opened, Archive) else opened
        found = profile(read, (self.metric,), steps=steps, device=self.device, progress=self._measured)
        tables = tuple(
            SensitivityReport(
                run=where,
                table=found.by(grouping),
                bytes_read=found.bytes_read,
                device=found.device,
                statistic=self.statistic,
            )
            for grouping in self._groupings
        )
        if len(tables) > 1:
            return SensitivityTablesReport(
                run=where, metric=self.metric, restored=is_archive, device=found.device, tables=tables
            )
        if self.csv is not None:
            tables[0].write_csv(Path(self.csv))
        return tables[0]

    @property
    def _groupings(self) -> list[str]:
        return self.by.split(",")

    def _measured(self, done: int, total: int, step: int) -> None:
        if self.progress is not None:
            self.progress(Progress("sensitivity", done, total, step))

    def _check(self) -> None:
        """Refuse words that are none, and a file that exists."""
        for option, value, choices in (
            ("--metric", self.metric, tuple(SensitivityMetric)),
            *(("--by", grouping, tuple(Grouping)) for grouping in self._groupings),
            ("--statistic", self.statistic, STATISTICS),
        ):
            if value not in choices:
                raise InputError(f"{option} {value}", remedy=f"choose one of {', '.join(choices)}")
        if self.csv is None:
            return
        if len(self._groupings) > 1:
            raise InputError(
                "--csv holds rows of one kind", remedy="give one grouping --by, or leave out --csv"
            )
        if Path(self.csv).is_file() and not self.force:
            raise ExistsError("the file exists", where=str(self.csv), remedy="give --force to overwrite it")


sensitivity = python_call(Sensitivity)
