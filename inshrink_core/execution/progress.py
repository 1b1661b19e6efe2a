"""Progress of long operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long operation.

    Parameters
    ----------
    stage
        Name of the current activity, one word.
    done, total
        Bytes or items finished, and their total.
    step
        The current training step, or None.
    detail
        The current tensor or file.
    found
        A part of the result that is available already, as JSON values; None if nothing is new.
    """

    stage: str
    done: int
    total: int
    step: int | None
    detail: str = ""
    found: Mapping[str, Any] | None = None


OnProgress = Callable[[Progress], None]
"""Called often; an exception from it cancels the operation and leaves committed data."""


def seldom(report: OnProgress, seconds: float) -> OnProgress:
    """Return a callback that reports at intervals, and always what was found and the end of a task."""
    reported_at = 0.0

    def reported(now: Progress) -> None:
        nonlocal reported_at
        is_due = time.monotonic() - reported_at >= seconds
        if is_due or now.found is not None or now.done >= now.total:
            reported_at = time.monotonic()
            report(now)

    return reported


class Counter:
    """Counts the progress of a stage and reports each part.

    Parameters
    ----------
    progress
        Called after each part; None reports nothing.
    stage, total
        As in `Progress`.
    """

    def __init__(self, progress: OnProgress | None, stage: str, total: int) -> None:
        self.progress, self.stage, self.total, self.done = progress, stage, total, 0

    def add(self, n: int, step: int, detail: str = "", found: Mapping[str, Any] | None = None) -> None:
        """Count a part, and report it."""
        self.done += n
        if self.progress is not None:
            self.progress(Progress(self.stage, self.done, self.total, step, detail, found))
