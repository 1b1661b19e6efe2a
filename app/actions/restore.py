"""Restoring the files of one step of an archive.

The result is one JSON document: ``step``, ``target``, ``layout``, and ``files``, each with ``name``,
``nbytes`` and ``sha256``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.jobs.report import Report

if TYPE_CHECKING:
    from inshrink_core.execution.progress import Progress

__all__ = ["run"]


def run(request: Mapping[str, Any], report: Report) -> None:
    """Write one step back as the files it was, or as safetensors or torch; nothing is overwritten.

    Parameters
    ----------
    request
        ``path`` of the archive, ``step``, ``layout``, ``target`` and ``output``.
    report
        Told after each tensor.
    """
    import inshrink_core

    def progress(now: Progress) -> None:
        report.progress(now.done, now.total, f"step {now.step:,}")

    target = Path(request["target"])
    found = inshrink_core.restore(
        request["path"], target, steps=[int(request["step"])], layout=request["layout"], progress=progress
    )
    report.log(f"{len(found.paths)} files written to {target}")
    files = []
    for path in found.paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files.append({"name": os.path.relpath(path, target), "nbytes": path.stat().st_size, "sha256": digest})
    document = {"step": request["step"], "target": str(target), "layout": found.layout, "files": files}
    Path(request["output"]).write_text(json.dumps(document), encoding="utf-8")
