"""The process that measures a sensitivity, so that the explorer's own stays free to answer.

Standard input: one line with the request (``path``, ``metric``, ``output``), and then nothing until the
explorer ends. Standard output: one JSON object a line, ``{"done", "total", "item"}`` or
``{"problem": [what, where, remedy, detail]}``. The result is a line of JSON, and after it, per grouping
and statistic in the order of `tables`, float32 ``[rows, steps]`` in little-endian bytes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from inshrink_app.tables import GROUPINGS, STATISTICS

from inshrink_core.errors import InshrinkError

if TYPE_CHECKING:
    from inshrink_core.profile import Row, SensitivityTable

_SECONDS_BETWEEN_MESSAGES = 0.2


def main() -> int:
    """Measure what the request says; return the exit code."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        measure(request["path"], request["metric"], Path(request["output"]))
    except InshrinkError as error:
        detail = f"expected {error.expected}, found {error.found}" if error.expected or error.found else ""
        _send({"problem": [error.what, error.where, error.remedy, detail]})
        return error.exit_code
    except MemoryError:
        _send({"problem": ["the machine has too little memory for this run", request["path"], "", ""]})
        return 1
    return 0


def _end_with_parent() -> None:
    """Leave when the explorer is gone: its end of our standard input closes with it."""
    sys.stdin.read()
    os._exit(1)


def _send(message: dict[str, Any]) -> None:
    """Write one message; the explorer reads line by line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _Progress:
    """Passes progress on, not more often than a page can show."""

    def __init__(self) -> None:
        self._sent_at = 0.0

    def __call__(self, done: int, total: int, step: int) -> None:
        now = time.monotonic()
        if now - self._sent_at >= _SECONDS_BETWEEN_MESSAGES or done >= total:
            self._sent_at = now
            _send({"done": done, "total": total, "item": f"step {step:,}"})


def measure(path: str, metric: str, output: Path) -> None:
    """Profile a run and write what the pages show.

    Parameters
    ----------
    path
        A run or an archive.
    metric
        ``magnitude``, ``taylor``, ``fisher`` or ``update``.
    output
        The file to write.
    """
    import inshrink_core
    from inshrink_core.chain import Archive
    from inshrink_core.profile import sensitivity

    opened = inshrink_core.open(path)
    series = opened.sequential() if isinstance(opened, Archive) else opened
    measured = sensitivity(series, metric, progress=_Progress())
    tables = {by: measured.by(by) for by in GROUPINGS}
    header = {
        "steps": list(measured.steps),
        "rows": {by: [_row(row) for row in table.details] for by, table in tables.items()},
        "note": _note(tables["tensor"], restored=series is not opened),
    }
    with output.open("wb") as file:
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


if __name__ == "__main__":
    sys.exit(main())
