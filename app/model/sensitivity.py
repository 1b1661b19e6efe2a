"""Sensitivities of a run: the metrics in words, and one metric as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inshrink_core.analysis.findings import weighted
from inshrink_core.analysis.profile import Row
from inshrink_core.sensitivity import SensitivityMetric


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A sensitivity metric in words.

    Parameters
    ----------
    label
        Its name on a button.
    symbol, unit
        Its formula, and the unit of its values.
    meaning
        One sentence.
    quantity
        Its quantity, in one word.
    needs
        Reason why a run lacks the metric; empty if every run has it.
    """

    label: str
    symbol: str
    meaning: str
    unit: str
    quantity: str = "Sensitivity"
    needs: str = ""

    @property
    def word(self) -> str:
        """Return its name within a sentence; names of people keep their capital."""
        return self.label if self.label in ("Fisher", "Taylor") else self.label.lower()


def _quantity(metric: SensitivityMetric) -> str:
    return metric.quantity.capitalize()


METRICS: Mapping[str, Metric] = {
    "magnitude": Metric(
        label="Magnitude",
        symbol="|w|",
        unit="of the weight",
        meaning="How large the weights are: rounding a large weight costs most.",
        quantity=_quantity(SensitivityMetric.MAGNITUDE),
    ),
    "taylor": Metric(
        label="Taylor",
        symbol="|g·w|",
        unit="of the loss",
        meaning="How much the loss would change, to first order, without a weight: gradient times weight.",
        needs="It needs gradients or Adam's first moment, and the checkpoints hold neither.",
    ),
    "fisher": Metric(
        label="Fisher",
        symbol="v̂",
        unit="gradient²",
        meaning="Adam's second moment, bias-corrected: how sharply the loss reacts to a weight.",
        needs="It is read from Adam's second moment, and the checkpoints hold none that is known to be a "
        "weight's.",
    ),
    "update": Metric(
        label="Movement",
        symbol="|Δw|",
        unit="of the weight",
        meaning="How far the weights moved since the previous checkpoint; it says nothing of the loss.",
        quantity=_quantity(SensitivityMetric.UPDATE),
        needs="Movement needs two checkpoints; there is no earlier one to compare with.",
    ),
    "ratio": Metric(
        label="Update / weight",
        symbol="|Δw| / |w|",
        unit="a step of the map",
        meaning="How far the weights moved since the previous checkpoint, relative to their size.",
        quantity="Movement",
        needs="Movement needs two checkpoints; there is no earlier one to compare with.",
    ),
    "bits": Metric(
        label="Bits",
        symbol="bits",
        unit="per weight",
        meaning="What a weight takes in the archive.",
        quantity="Size",
        needs="The bits of a layer are known once its sizes are estimated, or an archive is written.",
    ),
    "error": Metric(
        label="Error",
        symbol="error",
        unit="relative",
        meaning="How far a restored weight is from the original, relative to its size.",
        quantity="Error",
        needs="Errors are known once an archive was compared tensor by tensor (Archives).",
    ),
}
"""The first four come from the engine; the others are derived from them, from an archive, or from estimates.
"""


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
        Remark on the measurement; may be empty.
    sizes
        Number of parameters in each mean, ``[rows, steps]``; None if it is always all of a row's.
    """

    metric: str
    by: str
    rows: tuple[Row, ...]
    steps: tuple[int, ...]
    values: Mapping[str, NDArray[np.float32]]
    note: str = ""
    sizes: NDArray[np.float64] | None = None

    def carried(self) -> NDArray[np.float64]:
        """Return the total over the parameters of a row: mean times size, NaN where not measured."""
        return weighted(self.values["mean"], self.extents())

    def extents(self) -> NDArray[np.float64]:
        """Return the number of parameters in each mean."""
        if self.sizes is not None:
            return self.sizes
        return np.asarray([[row.numel] for row in self.rows], np.float64).reshape(-1, 1)
