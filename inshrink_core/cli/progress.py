"""A progress bar on stderr, where someone is there to see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inshrink_core.cli.formatting import UNKNOWN, count, duration, rate, size

if TYPE_CHECKING:
    from rich.progress import Task
    from rich.text import Text

__all__ = ["Advance", "progress_bar"]


Advance = Callable[[int, int, int], None]
"""Called with (done, total, step)."""


@contextmanager
def progress_bar(verb: str, *, hidden: bool, in_bytes: bool = True) -> Iterator[Advance | None]:
    """Show how far a long action has come, with what is done, the speed and the time left.

    Parameters
    ----------
    verb
        What is being done, as a word in front of the bar.
    hidden
        Show nothing, as where the output is for a script.
    in_bytes
        True if progress counts bytes, False if it counts steps.

    Yields
    ------
    Advance or None
        To be called as the action proceeds; None where nothing is shown.
    """
    if hidden or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Amounts(ProgressColumn):
        """Done of total, speed and time left, in the words of `inshrink_core.cli.formatting`."""

        def render(self, task: Task) -> Text:
            return Text(_amounts(task, in_bytes))

    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        Amounts(table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        shown = bar.add_task(verb, total=None)

        def advance(done: int, total: int, step: int) -> None:
            bar.update(shown, completed=done, total=total, description=f"{verb} step {step}")

        yield advance


def _amounts(task: Task, in_bytes: bool) -> str:
    """Return the text beside the bar."""
    total = task.total or 0
    left = duration(task.time_remaining) if task.time_remaining is not None else UNKNOWN
    if not in_bytes:
        return f"{count(task.completed)} of {count(total)} steps · {left} left"
    speed = rate(task.speed / 1e6 if task.speed else None)
    return f"{size(task.completed)} of {size(total)} · {speed} · {left} left"
