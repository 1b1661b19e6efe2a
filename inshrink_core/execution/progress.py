"""How far a long action has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["OnProgress", "Progress"]


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
        The training step at hand.
    detail
        The tensor or file at hand.
    """

    stage: str
    done: int
    total: int
    step: int
    detail: str = ""


OnProgress = Callable[[Progress], None]
"""Called often; raising from it cancels the action and leaves what was committed."""
