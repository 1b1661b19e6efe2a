"""Measuring restore gain and noise of a run or an archive, in the form of a sensitivity's result.

A row has one figure a step, so mean, median and percentile are all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from inshrink_app.jobs.report import Report
from inshrink_app.widgets.tables import STATISTICS

if TYPE_CHECKING:
    from inshrink_core.analysis.gain import RestoreGain
    from inshrink_core.checkpoint import TensorSpec

__all__ = ["run"]


def run(request: Mapping[str, Any], report: Report) -> None:
    """Measure gain and write it as a table by tensor, block and layer type.

    Parameters
    ----------
    request
        ``path`` of a run or an archive; ``archive`` of that run or ``run`` of that archive, where there is
        one; ``metric``, ``gain`` or ``noise``; and ``output``, the file to write.
    report
        Told after each step, and after each tensor that is compressed first.
    """
    import inshrink_core
    from inshrink_core.analysis.gain import restore_gain, restore_gain_of_run
    from inshrink_core.chain import Archive
    from inshrink_core.errors import NotFoundError
    from inshrink_core.execution.progress import Progress

    def progress(now: Progress) -> None:
        report.progress(now.done, now.total, f"{now.stage}, step {now.step:,}")

    opened = inshrink_core.open(request["path"])
    if isinstance(opened, Archive):
        if not request.get("run"):
            raise NotFoundError(
                "the original run of this archive is not beside it",
                where=str(opened.path),
                remedy="a gain compares with the originals: put the run's folder next to the archive",
            )
        measured = restore_gain(opened, request["run"], progress=progress)
    elif request.get("archive"):
        measured = restore_gain(request["archive"], opened, progress=progress)
    else:
        measured = restore_gain_of_run(opened, progress=progress)
    specs = {spec.key: spec for step in reversed(opened.steps) for spec in opened[step].specs}
    _write(request, tuple(opened.steps), measured, specs)


def _write(
    request: Mapping[str, Any],
    steps: tuple[int, ...],
    measured: RestoreGain,
    specs: Mapping[str, TensorSpec],
) -> None:
    """Pool tensors into blocks and layer types, and write all three tables."""
    keys = [spec.key for spec in specs.values() if spec.key in measured.by_tensor]
    rows: dict[str, list[Any]] = {}
    values: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for by, groups in _groups([specs[key] for key in keys]).items():
        rows[by] = [_row(name, members, by) for name, members in groups.items()]
        values.append(_table(groups.values(), steps, measured, str(request["metric"])))
    note = f"With the codec {measured.codec}; a step without a step before it in the chain has no value."
    with Path(request["output"]).open("wb") as file:
        header = {"steps": list(steps), "rows": rows, "note": note}
        file.write(json.dumps(header).encode() + b"\n")
        for table in values:
            for _ in STATISTICS:
                file.write(np.ascontiguousarray(table, "<f4").tobytes())


def _groups(specs: Sequence[TensorSpec]) -> dict[str, dict[str, list[TensorSpec]]]:
    """Return the members of every row, by grouping."""
    groups: dict[str, dict[str, list[TensorSpec]]] = {"tensor": {}, "block": {}, "layer_type": {}}
    for spec in specs:
        groups["tensor"][spec.key] = [spec]
        groups["block"].setdefault(spec.name.rpartition(".")[0] or spec.name, []).append(spec)
        groups["layer_type"].setdefault(str(spec.layer), []).append(spec)
    return groups


def _row(name: str, members: Sequence[TensorSpec], by: str) -> list[Any]:
    """Return what a page shows of a row."""
    largest = max(members, key=lambda spec: spec.numel)
    layer = name if by == "layer_type" else str(largest.layer)
    shape = list(largest.shape) if by == "tensor" else None
    return [name, layer, len(members), sum(spec.numel for spec in members), shape]


def _table(
    groups: Iterable[Sequence[TensorSpec]], steps: tuple[int, ...], measured: RestoreGain, metric: str
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return gain or noise of every row at every step; sums are pooled before they are divided."""
    from inshrink_core.chain import pool

    found = {step.step: {row.key: row for row in step.tensors} for step in measured.steps}
    lines = []
    for members in groups:
        line = []
        for step in steps:
            at = found.get(step, {})
            pooled = pool(at[spec.key] for spec in members if spec.key in at)
            value = getattr(pooled, metric)
            line.append(np.nan if value is None else value)
        lines.append(line)
    return np.asarray(lines, np.float32).reshape(-1, len(steps))
