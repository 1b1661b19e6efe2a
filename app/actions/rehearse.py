"""Rehearsing failures of a shipped training. The result is the document of ``inshrink rehearse --json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.report import Report

if TYPE_CHECKING:
    from inshrink_core.session import Progress

__all__ = ["run"]


def run(request: Mapping[str, Any], report: Report) -> None:
    """Train with failures restored from the archive, and without.

    Parameters
    ----------
    request
        ``training``, a shipped task by name; ``folder`` where finished trainings are kept; ``codec``,
        ``config``, ``optimizer``, ``seeds``, ``restores``, ``n_steps`` and ``output``.
    report
        Told after each step of a training.
    """
    import inshrink_core
    from inshrink_core.errors import NotFoundError
    from inshrink_core.tasks import task_names

    if request["training"] not in task_names():
        # A file of code would be executed; only the command line does that.
        raise NotFoundError("the explorer rehearses shipped trainings only", where=str(request["training"]))
    last = ""

    def progress(now: Progress) -> None:
        nonlocal last
        if now.detail != last:
            last = now.detail
            report.log(now.detail)
        report.progress(now.done, now.total, f"{now.detail}, step {now.step:,}")

    found = inshrink_core.rehearse(
        request["training"],
        request["folder"],
        codec=request["codec"],
        config=request["config"],
        optimizer=request["optimizer"],
        seeds=int(request["seeds"]),
        restores=int(request["restores"]),
        steps=int(request["n_steps"]),
        progress=progress,
    )
    Path(request["output"]).write_text(json.dumps(found.to_json()), encoding="utf-8")
