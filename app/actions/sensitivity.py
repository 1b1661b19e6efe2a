"""Measuring a sensitivity metric of a run.

The result is a line of JSON, and after it, per grouping and statistic in the order of `tables`, float32
``[rows, steps]`` in little-endian bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from inshrink_app.actions import gain
from inshrink_app.jobs.report import Report
from inshrink_app.widgets.tables import GROUPINGS, METRICS, STATISTICS

if TYPE_CHECKING:
    from inshrink_core.analysis.profile import Row, SensitivityTable

__all__ = ["run"]


def run(request: Mapping[str, Any], report: Report) -> None:
    """Profile a run and write what the pages show.

    Parameters
    ----------
    request
        ``path`` of a run or an archive, ``metric`` (``magnitude``, ``taylor``, ``fisher`` or ``update``; for
        ``gain`` and ``noise`` see `inshrink_app.actions.gain`), and ``output``, the file to write.
    report
        Told after each checkpoint.
    """
    import inshrink_core
    from inshrink_core.analysis.profile import sensitivity
    from inshrink_core.chain import Archive

    if METRICS[request["metric"]].pooled:
        gain.run(request, report)
        return
    opened = inshrink_core.open(request["path"])
    series = opened.sequential() if isinstance(opened, Archive) else opened

    def progress(done: int, total: int, step: int) -> None:
        report.progress(done, total, f"step {step:,}")

    measured = sensitivity(series, request["metric"], progress=progress)
    tables = {by: measured.by(by) for by in GROUPINGS}
    header = {
        "steps": list(measured.steps),
        "rows": {by: [_row(row) for row in table.details] for by, table in tables.items()},
        "note": _note(tables["tensor"], restored=series is not opened),
    }
    with Path(request["output"]).open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        for table in tables.values():
            for statistic in STATISTICS:
                file.write(np.ascontiguousarray(getattr(table, statistic), "<f4").tobytes())


def _row(row: Row) -> tuple[str, str, int, int, tuple[int, ...] | None]:
    """Return what a page shows of a row."""
    return (row.name, row.layer_type, row.n_tensors, row.numel, row.shape)


def _note(table: SensitivityTable, *, restored: bool) -> str:
    """Say what a reader must know to read the values right."""
    notes = []
    if restored:
        notes.append("Measured on the restored weights, so the error of the compression is part of it.")
    sources = {source for source in table.sources if source is not None}
    if "exp_avg" in sources or "mixed" in sources:
        notes.append(
            "The checkpoints hold no gradients, so Adam's first moment stands for them."
            if sources == {"exp_avg"}
            else "Where a checkpoint holds no gradients, Adam's first moment stands for them."
        )
    n_left_out = int(table.n_nonfinite.sum())
    if n_left_out:
        notes.append(f"{n_left_out:,} values are NaN or infinite and are left out.")
    return " ".join(notes)
