"""What a profile gives: one table per metric and grouping, rows × steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from inshrink_core.errors import InputError
from inshrink_core.sensitivity import SensitivityMetric, Summary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Grouping", "Measured", "Profile", "Row", "SensitivityTable", "StepRecord", "build_table"]


class Grouping(StrEnum):
    """What a row stands for."""

    TENSOR = "tensor"
    BLOCK = "block"
    LAYER_TYPE = "layer_type"

    @classmethod
    def parse(cls, name: str) -> Grouping:
        """Return the grouping of a name.

        Raises
        ------
        InputError
            There is no such grouping.
        """
        try:
            return cls(name)
        except ValueError:
            raise InputError(
                f"there is no grouping '{name}'", remedy=f"choose one of {', '.join(cls)}"
            ) from None


class Row(NamedTuple):
    """One tensor, block or layer type.

    Parameters
    ----------
    name
        Of the tensor, of the block, or of the layer type.
    block
        Path of the module that holds it: the name without its last component; empty for a layer type.
    layer_type
        Layer type; of a block, the one most of its parameters have.
    role
        Role of its tensors in the training.
    n_tensors, numel
        How many tensors it holds, and how many parameters.
    shape
        Of a tensor; None for a group.
    """

    name: str
    block: str
    layer_type: str
    role: str
    n_tensors: int
    numel: int
    shape: tuple[int, ...] | None


class Measured(NamedTuple):
    """A row and what was measured of it at one step."""

    row: Row
    summary: Summary


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One metric of one checkpoint: what the cache keeps.

    Parameters
    ----------
    source
        What the scores came from, where there is a choice (`Scores.source`); None if there is none,
        ``mixed`` if tensors differ.
    rows
        Per grouping, in model order.
    """

    source: str | None
    rows: Mapping[Grouping, tuple[Measured, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SensitivityTable:
    """One metric of a run by one grouping.

    Parameters
    ----------
    metric, grouping
        What the values are, and what a row is.
    rows
        Names, in model order.
    details
        The rows with all that is known of them, as at the last step that has them.
    steps
        Ascending.
    mean, p50, p99
        float32 ``[rows, steps]``; NaN where a row is absent or the metric is not defined.
    n, n_nonfinite
        int64 ``[rows, steps]``: finite scores, and those that are NaN or infinite and left out.
    sources
        Per step, what the scores came from, where there is a choice (`Scores.source`).
    """

    metric: SensitivityMetric
    grouping: Grouping
    rows: tuple[str, ...]
    details: tuple[Row, ...]
    steps: tuple[int, ...]
    mean: NDArray[np.float32]
    p50: NDArray[np.float32]
    p99: NDArray[np.float32]
    n: NDArray[np.int64]
    n_nonfinite: NDArray[np.int64]
    sources: tuple[str | None, ...]


def build_table(
    metric: SensitivityMetric, grouping: Grouping, steps: tuple[int, ...], records: Sequence[StepRecord]
) -> SensitivityTable:
    """Lay the records of the steps side by side; rows that come later stand after those before."""
    import numpy as np

    details: dict[str, Row] = {}
    for record in records:
        details.update({measured.row.name: measured.row for measured in record.rows[grouping]})
    position = {name: index for index, name in enumerate(details)}
    values = np.full((3, len(details), len(steps)), np.nan, np.float32)
    counts = np.zeros((2, len(details), len(steps)), np.int64)
    # A mean beyond float32 becomes infinite, as the scores themselves would.
    with np.errstate(over="ignore"):
        for column, record in enumerate(records):
            for measured in record.rows[grouping]:
                row = position[measured.row.name]
                values[:, row, column] = measured.summary[:3]
                counts[:, row, column] = measured.summary[3:]
    return SensitivityTable(
        metric=metric,
        grouping=grouping,
        rows=tuple(details),
        details=tuple(details.values()),
        steps=steps,
        mean=values[0],
        p50=values[1],
        p99=values[2],
        n=counts[0],
        n_nonfinite=counts[1],
        sources=tuple(record.source for record in records),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """Sensitivities of a run.

    Parameters
    ----------
    metrics
        What was measured.
    steps
        Ascending.
    bytes_read
        Bytes of tensors read to measure; 0 when everything came from the cache.
    """

    metrics: tuple[SensitivityMetric, ...]
    steps: tuple[int, ...]
    bytes_read: int
    records: Mapping[SensitivityMetric, tuple[StepRecord, ...]] = field(repr=False)

    def by(self, grouping: Grouping | str = "tensor", metric: str | None = None) -> SensitivityTable:
        """Return one metric as a table, rows by tensor, block or layer type.

        Parameters
        ----------
        grouping
            ``tensor``, ``block`` or ``layer_type``.
        metric
            One of `metrics`; by default the first.

        Raises
        ------
        InputError
            No such grouping, or the metric was not measured.
        """
        chosen = self.metrics[0] if metric is None else SensitivityMetric.parse(metric)
        if chosen not in self.metrics:
            raise InputError(
                f"the profile does not hold '{chosen}'", remedy=f"it holds {', '.join(self.metrics)}"
            )
        return build_table(chosen, Grouping.parse(grouping), self.steps, self.records[chosen])
