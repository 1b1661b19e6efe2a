"""Pruning an archive, or planning to. The result is the document of ``inshrink prune --json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.jobs.report import Report

if TYPE_CHECKING:
    from inshrink_core.execution.progress import Progress

__all__ = ["run"]


def run(request: Mapping[str, Any], report: Report) -> None:
    """Prune an archive.

    Parameters
    ----------
    request
        ``path``, the rules ``keep_every``, ``keep_last`` (or None), ``keep``, ``drop_branches`` and
        ``smallest``; ``dry_run``, which changes nothing; and ``output``.
    report
        Told after each tensor.
    """
    from inshrink_core.verbs.prune import prune

    def progress(now: Progress) -> None:
        report.progress(now.done, now.total, f"step {now.step:,}")

    found = prune(
        request["path"],
        keep_every=request["keep_every"],
        keep_last=request["keep_last"],
        keep=request["keep"],
        drop_branches=bool(request["drop_branches"]),
        smallest=bool(request["smallest"]),
        apply=not request["dry_run"],
        progress=progress,
    )
    verb = "removed" if found.applied else "would remove"
    report.log(f"{verb} {len(found.plan.removed)} frames, {found.before} bytes become {found.after}")
    Path(request["output"]).write_text(json.dumps(found.to_json()), encoding="utf-8")
