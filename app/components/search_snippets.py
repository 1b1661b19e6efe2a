"""A search as a command and as Python lines."""

from __future__ import annotations

import math
import shlex

from inshrink_app.search_tables import SearchRequest
from inshrink_app.services import EvaluatorCode
from inshrink_app.tables import Subject

__all__ = ["of"]

_OPTIONS = {
    "max_drop": "--max-drop",
    "max_divergence": "--max-divergence",
    "target_ratio": "--target-ratio",
}


def of(shown: Subject, request: SearchRequest, judge: EvaluatorCode | None) -> tuple[str, str]:
    """Return the command lines and the Python lines that search the same, and compress with what is found.

    Parameters
    ----------
    shown
        The run on screen.
    request
        What is asked for.
    judge
        Whose code judges; None for the run's own.
    """
    path = str(shown.path)
    made = f"{path.rstrip('/')}-searched.inshrink"
    found = f"{path.rstrip('/')}-search.json"
    limits = request.limits()
    words = [*(f"{_OPTIONS[name]} {limit:g}" for name, limit in limits.items()), f"--codec {request.codec}"]
    lines = [f"{name}={_number(limit)}" for name, limit in limits.items()]
    lines.append(f"codec={request.codec!r}")
    if request.strategy != "auto":
        words.append(f"--strategy {request.strategy}")
        lines.append(f"strategy={request.strategy!r}")
    if request.budget is not None:
        words.append(f"--budget {request.budget}")
        lines.append(f"budget={request.budget}")
    if request.steps and request.steps != shown.steps:
        words.append(f"--steps {','.join(map(str, request.steps))}")
        lines.append(f"steps={list(request.steps)!r}")
    if judge is not None and judge.spec:
        words.append(f"--evaluator {shlex.quote(judge.spec)}")
        lines.append(f"evaluator={judge.spec!r}")
    elif judge is None or not judge.is_bundled:
        words.append("--trust-run")
        lines.append("trust_run=True")
    command = (
        f"inshrink search {shlex.quote(path)} {' '.join(words)} -o {shlex.quote(found)}\n"
        f"inshrink compress {shlex.quote(path)} -o {shlex.quote(made)} --config {shlex.quote(found)}"
    )
    listed = "".join(f"    {line},\n" for line in lines)
    python = (
        f"import inshrink_core\n\nreport = inshrink_core.search(\n    {path!r},\n{listed})\n"
        "print(report.best and report.best.to_json())"
    )
    return command, python


def _number(limit: float) -> str:
    """Return a limit as Python writes it."""
    return f"{limit:g}" if math.isfinite(limit) else "float('inf')"
