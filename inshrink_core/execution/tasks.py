"""Work that is shared out: tasks, each of them in one piece, and what is heard of them.

A task is a call of a function of this project with JSON data. It may be begun again where a worker died: what
it does is idempotent. What goes back and forth is what was asked, how far it is and what came of it, never a
tensor.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from inshrink_core.execution.progress import OnProgress, Progress

N_ATTEMPTS: Final = 3
"""A part that has ended so many workers ends the next one, too."""

SECONDS_TO_TIDY_UP: Final = 1.0
"""How long a worker that was told to end may remove what it has half written."""


class Task(NamedTuple):
    """A part of a work.

    Parameters
    ----------
    function
        Called with `argument` and with what takes note of its `Progress`, as ``MODULE:NAME``.
    argument
        JSON data.
    directory
        Where it works: relative paths begin there.
    """

    function: str
    argument: Any
    directory: str


class Heard(NamedTuple):
    """What was heard of a task: how far it is, its result, or the error that it ended with."""

    at: int
    kind: Literal["now", "result", "error"]
    value: Any


Hear = Callable[[Heard], None]


class Work(NamedTuple):
    """What is shared out.

    Parameters
    ----------
    tasks
        Returns the tasks, given about how many there should be, and the threads of each.
    workers
        Tasks at a time; None: as many as there is room for.
    threads
        Of each worker; None: what the engine thinks right.
    progress
        Called with the progress of all tasks together.
    """

    tasks: Callable[[int, int], Sequence[Task]]
    workers: int | None = None
    threads: int | None = None
    progress: OnProgress | None = None


class Told:
    """How far the tasks of a work are, summed up.

    Parameters
    ----------
    n_tasks
        How many there are.
    progress
        Called with the sum; None: nobody wants it.
    """

    def __init__(self, n_tasks: int, progress: OnProgress | None) -> None:
        self._n, self._progress = n_tasks, progress
        self._rows: dict[int, tuple[int, int]] = {}
        self._most = 0

    def hear(self, heard: Heard) -> None:
        """Take in what was heard of a task; of those that have not begun, their size is guessed."""
        if heard.kind != "now" or self._progress is None:
            return
        now: Progress = heard.value
        self._rows[heard.at] = now.done, now.total
        done, total = (sum(column) for column in zip(*self._rows.values(), strict=True))
        # Where a worker died its part begins again; nobody wants to see that all do less than before.
        self._most = max(self._most, done)
        total = max(self._most, total * self._n // len(self._rows))
        self._progress(Progress(now.stage, self._most, total, now.step, now.detail))


def packed(value: Any) -> str:
    """Return a value as a text that goes to or comes from a worker of ours."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    """Return what `packed` made a text of: only from a process that this one has started."""
    return pickle.loads(base64.b64decode(text))
