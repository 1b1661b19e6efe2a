"""Rehearsing failures of a shipped training. The result is the document of ``inshrink rehearse --json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_app.jobs.report import Report

if TYPE_CHECKING:
    from inshrink_core.execution.progress import Progress

__all__ = ["run"]

_TOLD = (
    *("task", "metric", "direction", "codec", "restored_at"),
    *("excess", "excess_half_width", "noise", "ratio_weights", "ratio_total"),
)
"""What the page shows of a rehearsal beside its curves."""


def run(request: Mapping[str, Any], report: Report) -> None:
    """Train with failures restored from the archive, and without.

    Parameters
    ----------
    request
        ``training``, a shipped task by name; ``folder`` where finished trainings are kept; ``codec``,
        ``config``, ``optimizer``, ``seeds``, ``restores``, ``n_steps`` and ``output``.
    report
        Told after each step of a training, and each finished pair of them.
    """
    import inshrink_core
    from inshrink_core.errors import NotFoundError
    from inshrink_core.training.tasks import task_names

    if request["training"] not in task_names():
        # A file of code would be executed; only the command line does that.
        raise NotFoundError("the explorer rehearses shipped trainings only", where=str(request["training"]))
    last = ""

    def progress(now: Progress) -> None:
        nonlocal last
        if now.detail != last:
            last = now.detail
            report.log(now.detail)
        report.progress(now.done, 2 * int(request["seeds"]) * int(request["n_steps"]), _item(now))

    seeds, n_steps = int(request["seeds"]), int(request["n_steps"])
    document: dict[str, Any] = {}
    # One pair more each time: those before are kept on disk, and what is known is shown at once.
    for n_pairs in range(1, seeds + 1):
        found = inshrink_core.rehearse(
            request["training"],
            request["folder"],
            codec=request["codec"],
            config=request["config"],
            optimizer=request["optimizer"],
            seeds=n_pairs,
            restores=int(request["restores"]),
            steps=n_steps,
            progress=progress,
        )
        document = found.to_json()
        report.row(**{name: document[name] for name in _TOLD}, curves=document["curves"][-1:])
        report.progress(2 * n_pairs * n_steps, 2 * seeds * n_steps, f"{n_pairs} of {seeds} seeds done")
    Path(request["output"]).write_text(json.dumps(document), encoding="utf-8")


def _item(now: Progress) -> str:
    return f"{now.detail}, step {now.step:,}"
