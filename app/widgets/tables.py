"""What services hand to views and figures beside the engine's own reports; plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport
    from inshrink_core.checkpoint import TensorSpec

__all__ = [
    "ASK_ABOVE_BYTES",
    "METRICS",
    "HeatRow",
    "Metric",
    "Problem",
    "Sensitivity",
    "ServiceError",
    "Subject",
]


ASK_ABOVE_BYTES = 200_000_000
"""Reading more than this takes long enough that the reader is asked first."""


class Problem(NamedTuple):
    """An error a reader can act on: what is wrong, where, and what to do; `detail` is for the curious."""

    what: str
    where: str = ""
    remedy: str = ""
    detail: str = ""


class ServiceError(Exception):
    """A service could not answer; carries what the page shows instead."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.what)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The run or archive on screen, as its headers tell.

    Parameters
    ----------
    path
        Real path, and the step pattern as its last part where there is one: what opens it again.
    name
        What to call it. Untrusted text, as every name here.
    kind
        ``run`` or ``archive``.
    format
        On-disk format, as ``torch``.
    steps
        Steps of its checkpoints, ascending.
    tensors
        Tensors of the last checkpoint, in file order.
    total_bytes
        Bytes of all its checkpoints on disk.
    bytes_read
        Bytes read so far to know all this.
    skipped
        Files that were left out, and why.
    unreadable
        Checkpoints that cannot be read, and why.
    notes
        What a reader should know of how it was read.
    log
        Per training metric, its values by step.
    archive
        Its frames and sizes, where it is an archive or one of it is known.
    step_pattern
        How the names of a run tell its steps; empty where nobody said.
    """

    path: Path
    name: str
    kind: str
    format: str
    steps: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    bytes_read: int
    skipped: tuple[tuple[str, str], ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    log: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    archive: ChainReport | None = None
    step_pattern: str = ""

    @property
    def place(self) -> Path:
        """The folder or file on disk: the path without the step pattern."""
        return self.path.parent if self.step_pattern else self.path

    @property
    def folder(self) -> Path:
        """The folder of a run; of a checkpoint file, the one that it lies in."""
        return self.place if self.place.is_dir() else self.place.parent

    @property
    def model_tensors(self) -> tuple[TensorSpec, ...]:
        """Weights and buffers of the last checkpoint."""
        from inshrink_core.checkpoint import MODEL_ROLES

        return tuple(row for row in self.tensors if row.role in MODEL_ROLES)

    @property
    def n_parameters(self) -> int:
        """Elements of the weights of the last checkpoint."""
        return sum(row.numel for row in self.tensors if row.role == "weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A sensitivity metric in words.

    Parameters
    ----------
    label
        Its name on a button.
    symbol
        Its formula, which is also the unit of the colour scale.
    meaning
        One sentence.
    quantity
        What its values are, as `inshrink_core.sensitivity.SensitivityMetric.quantity` has it.
    pooled
        Whether a row has one figure a step instead of mean, median and percentile.
    scale
        ``log``, or ``linear`` where values lie around one.
    needs
        What a run must hold to tell it, said of one that does not; empty where every run does.
    """

    label: str
    symbol: str
    meaning: str
    quantity: str = "Sensitivity"
    pooled: bool = False
    scale: str = "log"
    needs: str = ""


_NEEDS_CHAIN = "It needs two steps of a chain between which the weights moved."

METRICS: Mapping[str, Metric] = {
    "magnitude": Metric(
        label="Magnitude",
        symbol="|w|",
        meaning="How large the weights are: rounding a large weight costs most.",
        quantity="Magnitude",
    ),
    "taylor": Metric(
        label="Taylor",
        symbol="|g·w|",
        meaning="How much the loss would change, to first order, without a weight: gradient times weight.",
        needs="It needs gradients or Adam's first moment, and the checkpoints hold neither.",
    ),
    "fisher": Metric(
        label="Fisher",
        symbol="v̂",
        meaning="Adam's second moment, bias-corrected: how sharply the loss reacts to a weight.",
        needs="It is read from Adam's second moment, and the checkpoints hold none that is known to be a "
        "weight's.",
    ),
    "update": Metric(
        label="Movement",
        symbol="|Δw|",
        meaning="How far the weights moved since the previous checkpoint; it says nothing of the loss.",
        quantity="Movement",
        needs="Movement needs two checkpoints; there is no earlier one to compare with.",
    ),
    "gain": Metric(
        label="Restore gain",
        symbol="gain",
        meaning="How much of the movement since the previous checkpoint survives a restore there: 1 is "
        "all of it, 0 rolls training back.",
        pooled=True,
        scale="linear",
        needs=_NEEDS_CHAIN,
    ),
    "noise": Metric(
        label="Restore noise",
        symbol="noise",
        meaning="What such a restore adds to the movement: its squared error, as a share of the movement.",
        pooled=True,
        needs=_NEEDS_CHAIN,
    ),
}


class HeatRow(NamedTuple):
    """What one row of the heatmap stands for: a tensor, a block or a layer type."""

    name: str
    layer: str
    n_tensors: int
    numel: int
    shape: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sensitivity:
    """One metric of a run, by one grouping.

    Parameters
    ----------
    metric, by
        A key of `METRICS`; ``tensor``, ``block`` or ``layer_type``.
    rows
        In model order.
    steps
        Ascending.
    values
        Per statistic (``mean``, ``p50``, ``p99``), float32 ``[rows, steps]``; NaN where a tensor is absent
        or the metric is not defined.
    note
        How it was measured, where that needs saying; empty otherwise.
    """

    metric: str
    by: str
    rows: tuple[HeatRow, ...]
    steps: tuple[int, ...]
    values: Mapping[str, NDArray[np.float32]]
    note: str = ""
