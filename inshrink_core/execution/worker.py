"""``python -m inshrink_core.execution.worker``: performs tasks that come in on stdin, one a line.

It ends when whoever started it does: with SIGTERM, or once its stdin is closed. Ctrl-C in a terminal goes to
all processes; this one leaves it to the one that started it.
"""

from __future__ import annotations

import json
import os
import pkgutil
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from inshrink_core.errors import EngineError
from inshrink_core.execution.progress import Progress
from inshrink_core.execution.tasks import SECONDS_TO_TIDY_UP, Task, packed

_SECONDS_BETWEEN: Final = 0.1

Tell = Callable[[Progress], None]


def seldom(tell: Tell, seconds: float = _SECONDS_BETWEEN) -> Tell:
    """Return what tells of progress now and then, and of the end of each work."""
    told_at = 0.0

    def told(now: Progress) -> None:
        nonlocal told_at
        if now.done >= now.total or time.monotonic() - told_at >= seconds:
            told_at = time.monotonic()
            tell(now)

    return told


def perform(task: Task, tell: Tell) -> Any:
    """Perform a task in this process, which is there for it alone, and return its result.

    Raises
    ------
    EngineError
        This machine has not the folder where it works.
    """
    try:
        os.chdir(task.directory)
    except OSError as error:
        raise EngineError(
            f"a worker cannot enter the working directory: {error.strerror}",
            where=task.directory,
            remedy="start the command in a folder that all machines see under the same path",
        ) from error
    function = pkgutil.resolve_name(task.function)
    return function(task.argument, tell)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _read(tasks: queue.SimpleQueue[str | None]) -> None:
    """Take in tasks; once there is nobody to send any, end this process, whatever it does."""
    for line in sys.stdin:
        tasks.put(line)
    tasks.put(None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_TIDY_UP)
    os._exit(1)


def main() -> None:
    """Perform tasks until nobody sends any."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    tasks: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks,), daemon=True).start()

    def answer(kind: str, value: Any) -> None:
        answers.write(packed((kind, value)) + "\n")
        answers.flush()

    try:
        while (line := tasks.get()) is not None:
            try:
                result = perform(Task(**json.loads(line)), seldom(lambda now: answer("now", now)))
            except Exception as error:
                answer("error", _sendable(error))
            else:
                answer("result", result)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


def _sendable(error: Exception) -> Exception:
    """Return an error that can be sent."""
    try:
        packed(error)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
