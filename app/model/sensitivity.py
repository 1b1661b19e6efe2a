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
    symbol
        Its formula.
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
    quantity: str = "Sensitivity"
    needs: str = ""

    @property
    def word(self) -> str:
        """Return its name within a sentence; names of people keep their capital."""
        return self.label if self.label in ("Fisher", "Taylor") else self.label.lower()


METRICS: Mapping[str, Metric] = {
    "magnitude": Metric(
        label="Magnitude",
        symbol="|w|",
        meaning="The size of the weights; rounding errors grow with it.",
        quantity=SensitivityMetric.MAGNITUDE.quantity.capitalize(),
    ),
    "taylor": Metric(
        label="Taylor",
        symbol="|g·w|",
        meaning="Gradient times weight: a first-order estimate of the change of the loss without a weight.",
        needs="It needs gradients or Adam's first moment, and the checkpoints hold neither.",
    ),
    "fisher": Metric(
        label="Fisher",
        symbol="v̂",
        meaning="How sharply the loss reacts to a weight, from Adam's bias-corrected second moment.",
        needs="It needs Adam's second moment, and the checkpoints hold none that is matched to a weight.",
    ),
    "update": Metric(
        label="Movement",
        symbol="|Δw|",
        meaning="How far the weights moved since the previous checkpoint. It does not depend on the loss.",
        quantity=SensitivityMetric.UPDATE.quantity.capitalize(),
        needs="Movement needs two checkpoints, and there is only one.",
    ),
    "ratio": Metric(
        label="Update / weight",
        symbol="|Δw| / |w|",
        meaning="How far the weights moved since the previous checkpoint, relative to their size.",
        quantity="Movement",
        needs="Movement needs two checkpoints, and there is only one.",
    ),
    "bits": Metric(
        label="Bits",
        symbol="bits",
        meaning="Stored bits per weight.",
        quantity="Size",
        needs="Bits appear once layers are estimated, or an archive is written.",
    ),
    "error": Metric(
        label="Error",
        symbol="relative error",
        meaning="How far a restored weight is from the original, relative to its size.",
        quantity="Error",
        needs="Errors appear once an archive was compared with the run, tensor by tensor (Archives).",
    ),
}
"""The first four come from the engine; the others are derived from them, from an archive, or from estimates.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sensitivity:
    """One metric of a run.

    Parameters
    ----------
    metric
        A key of `METRICS`.
    rows
        Tensors in model order, or groups of them.
    steps
        Ascending.
    values
        Per statistic (``mean``, ``p50``, ``p99``), float32 ``[rows, steps]``; NaN where a tensor is absent
        or the metric is not defined.
    note
        Remark on the measurement; may be empty.
    sizes
        Number of parameters in each mean, ``[rows, steps]`` or ``[rows, 1]``; None if it is always all of a
        row's.
    """

    metric: str
    rows: tuple[Row, ...]
    steps: tuple[int, ...]
    values: Mapping[str, NDArray[np.float32]]
    note: str = ""
    sizes: NDArray[np.float64] | None = None

    def carried(self) -> NDArray[np.float64]:
        """Return the total over the parameters of a row: mean times size, NaN where not measured."""
        return weighted(self.values["mean"], self.extents())

    def shares(self, whole: Sensitivity | None = None) -> NDArray[np.float64]:
        """Return each row's share of the total of a step: m_i·n_i / Σ_j m_j·n_j, with mean m and size n.

        The total is that of `whole` if this table has only some of the rows.

        Examples
        --------
        >>> rows = tuple(Row(name, "", "linear", "weight", 1, n, (n,)) for name, n in (("a", 3), ("b", 1)))
        >>> values = {"mean": np.array([[1.0, 2.0], [1.0, 2.0]], np.float32)}
        >>> Sensitivity(metric="fisher", rows=rows, steps=(1, 2), values=values).shares()[:, 0].tolist()
        [0.75, 0.25]
        """
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            totals = np.nansum((whole or self).carried(), axis=0)
            return np.where(totals > 0, self.carried() / totals, np.nan)

    def extents(self) -> NDArray[np.float64]:
        """Return the number of parameters in each mean."""
        if self.sizes is not None:
            return self.sizes
        return np.asarray([[row.numel] for row in self.rows], np.float64).reshape(-1, 1)
