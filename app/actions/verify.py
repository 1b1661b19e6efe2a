"""Verifying an archive, and measuring the error of every tensor against the original run.

The result is the document of ``inshrink verify --json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inshrink_app.jobs.report import Report

__all__ = ["run"]


def run(request: Mapping[str, Any], report: Report) -> None:
    """Verify an archive.

    Parameters
    ----------
    request
        ``path`` of the archive, ``deep``, ``run`` (the original, or empty), and ``output``.
    report
        Told after each step.
    """
    import inshrink_core

    against = inshrink_core.open(request["run"]) if request.get("run") else None
    report.log("checking structure and checksums")

    def done(position: int, total: int, step: int) -> None:
        report.progress(position, total, f"step {step:,}")

    found = inshrink_core.verify(request["path"], deep=bool(request.get("deep")), against=against, done=done)
    report.log(f"{found.n_frames} frames, {len(found.problems)} problems, {len(found.notes)} notes")
    for problem in found.problems[:20]:
        report.log(f"{problem.where}: {problem.what}")
    Path(request["output"]).write_text(json.dumps(found.to_json()), encoding="utf-8")
