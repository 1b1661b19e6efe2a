"""How far a long action has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long action has come.

    Parameters
    ----------
    stage
        What is being done, one word.
    done, total
        Bytes or items finished, and in all.
    step
        The training step at hand; None where there is none.
    detail
        The tensor or file at hand.
    found
        A part of the result that is known already, as JSON values; None where nothing new is.
    """

    stage: str
    done: int
    total: int
    step: int | None
    detail: str = ""
    found: Mapping[str, Any] | None = None


OnProgress = Callable[[Progress], None]
"""Called often; raising from it cancels the action and leaves what was committed."""


class Counter:
    """Counts what is done of a stage, and reports each part of it.

    Parameters
    ----------
    progress
        Called after each part; None reports nothing.
    stage, total
        As `Progress` has them.
    """

    def __init__(self, progress: OnProgress | None, stage: str, total: int) -> None:
        self.progress, self.stage, self.total, self.done = progress, stage, total, 0

    def add(self, n: int, step: int, detail: str = "") -> None:
        """Count a part, and report it."""
        self.done += n
        if self.progress is not None:
            self.progress(Progress(self.stage, self.done, self.total, step, detail))
