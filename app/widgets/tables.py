"""Tables about a run that several pages share: its bytes, and its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pandas as pd
from inshrink_app.model import Subject
from inshrink_app.widgets import fmt

from inshrink_core.checkpoint import TensorSpec


def sizes(shown: Subject) -> dict[str, pd.DataFrame]:
    """Return the bytes of the last checkpoint by role and by layer type, each under its title."""
    by_role, by_layer = Counter[str](), Counter[str]()
    for row in shown.tensors:
        by_role[row.role] += row.nbytes
        if row.role == "weight":
            by_layer[str(row.layer)] += row.nbytes
    return {
        "Size by role": _shares("role", by_role),
        "Weights by layer type": _shares("layer type", by_layer),
    }


def _shares(kind: str, nbytes: Counter[str]) -> pd.DataFrame:
    total = nbytes.total() or 1
    rows = [(name, n, n / total) for name, n in nbytes.most_common()]
    return pd.DataFrame(rows, columns=[kind, "bytes", "share"])


def tensors(specs: Iterable[TensorSpec]) -> pd.DataFrame:
    """Return tensors with role, layer type, dtype, shape and size."""
    return pd.DataFrame(
        [
            (row.name, row.role, row.layer, row.dtype, fmt.shape(row.shape), row.numel, row.nbytes)
            for row in specs
        ],
        columns=["name", "role", "layer type", "dtype", "shape", "values", "bytes"],
    )
