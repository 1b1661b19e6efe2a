"""Tables of how sensitive the loss is to errors of a run's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.execution.progress import Progress
from inshrink_core.report import Part, Report, Table
from inshrink_core.request import Option, Request, python_call
from inshrink_core.sensitivity import STATISTICS, Grouping, SensitivityMetric
from inshrink_core.text import UNKNOWN, spread, steps_in_short
from inshrink_core.verbs.shared.groups import Opening, RunOrArchive, Stepping
from inshrink_core.verbs.shared.values import chosen_steps

if TYPE_CHECKING:
    from inshrink_core.analysis.profile import SensitivityTable

_SOURCES: Final = {
    "gradient": "recorded gradients",
    "exp_avg": "Adam's first moment, in place of the gradient",
}

_COLUMNS: Final = 6
"""Steps that fit a line of 100 columns beside a name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SensitivityReport(Report):
    """One sensitivity metric of a run, by one grouping.

    Parameters
    ----------
    run
        Path of the run or archive.
    table
        The values.
    bytes_read
        Bytes of tensors read for the measurement; cached tensors count 0.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    """

    run: str
    table: SensitivityTable
    bytes_read: int
    device: str = "cpu"

    KEYS: ClassVar = (
        "run metric=table.metric by=table.grouping steps=table.steps sources=table.sources bytes_read device "
        "rows"
    )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink sensitivity --json``.

        Returns
        -------
        metric : str
            Measure of sensitivity.
        by : str
            ``tensor``, ``block`` or ``layer_type``.
        steps : [int]
            Training steps, ascending.
        sources : [str?]
            Source of ``taylor`` scores at each step: ``gradient``, ``exp_avg`` or ``mixed``.
        bytes_read : int
            Bytes of tensors read; cached tensors count 0.
        rows : [object]
            Tensors, blocks or layer types.
        rows[].name : str
            Name.
        rows[].block : str
            Path of its module; empty for a layer type.
        rows[].layer_type : str?
            Layer type; of a block the most common one by parameters.
        rows[].n_parameters : int
            Number of parameters.
        rows[].shape : [int]?
            Shape; None for a group.
        rows[].mean, rows[].p50, rows[].p99 : [float]
            Mean, median and 99th percentile by step.
        rows[].n_nonfinite : [int]
            Number of NaN and infinite scores left out, by step.
        """
        return Report.to_json(self)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table, with one value per step; NaN if not measured."""
        table = self.table
        arrays = {name: getattr(table, name).tolist() for name in (*STATISTICS, "n_nonfinite")}
        return [
            {
                "name": row.name,
                "block": row.block,
                "layer_type": row.layer_type,
                "n_parameters": row.numel,
                "shape": row.shape,
                **{name: values[position] for name, values in arrays.items()},
            }
            for position, row in enumerate(table.details)
        ]

    def shown(self) -> Iterator[Part]:
        """Yield the means of each row, at as many steps as fit a line."""
        table = self.table
        steps, by = table.steps, table.grouping.replace("_", " ")
        chosen = spread(range(len(steps)), _COLUMNS)
        rows = [(name, *values[chosen]) for name, values in zip(table.rows, table.mean, strict=True)]
        yield Table({by: None, **{f"step {steps[i]}": _short for i in chosen}}, rows)
        yield "metric", f"{table.metric}, mean of each {by}"
        some = f"{len(chosen)} of {len(steps)} shown"
        yield "steps", steps_in_short(steps) if len(chosen) == len(steps) else some
        sources = sorted({source for source in table.sources if source is not None})
        yield "scores from", ", ".join(_SOURCES.get(source, source) for source in sources)
        if note := table.findings().sentence():
            yield f"note: {note}"


def _short(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.3g}"


@dataclass(frozen=True)
class Sensitivity(Stepping, Opening, Request[SensitivityReport]):
    """Show how sensitive the loss is to errors, per tensor and step.

    Parameters
    ----------
    run
        A run, a checkpoint file or an archive.
    metric
        abs(w), abs(g·w), Adam's second moment, or the movement since the previous step.
    by
        Grouping of the rows.

    Raises
    ------
    InputError
        The metric or grouping is unknown.
    NotFoundError
        A step does not exist.

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
    metric: Annotated[str, Option(metavar="|".join(SensitivityMetric))] = "magnitude"
    by: Annotated[str, Option(metavar="|".join(Grouping))] = "tensor"

    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink sensitivity runs/digits --metric fisher --by layer_type",
        "inshrink sensitivity runs/digits --metric update --json",
    )

    def perform(self) -> SensitivityReport:
        """Measure the metric at the chosen steps."""
        from inshrink_core.analysis.profile import sensitivity
        from inshrink_core.chain import Archive

        grouping = Grouping.parse(self.by)
        opened = self.opened(self.run)
        where = str(getattr(self.run, "path", self.run))
        steps = chosen_steps(self.steps, lambda: opened.steps, where)
        read = opened.sequential() if isinstance(opened, Archive) else opened
        found = sensitivity(read, self.metric, steps=steps, device=self.device, progress=self._measured)
        return SensitivityReport(
            run=where,
            table=found.by(grouping),
            bytes_read=found.bytes_read,
            device=found.device,
        )

    def _measured(self, done: int, total: int, step: int) -> None:
        if self.progress is not None:
            self.progress(Progress("sensitivity", done, total, step))


sensitivity = python_call(Sensitivity)
