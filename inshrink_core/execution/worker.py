"""``python -m inshrink_core.execution.worker``: perform the task on the first line of stdin.

A worker ends with its parent: on SIGTERM, or when its stdin is closed. Ctrl-C in a terminal reaches all
processes; the worker ignores it and leaves it to the parent.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import sys
import threading
import time
from functools import partial
from typing import Any, Final, NoReturn

from inshrink_core.errors import EngineError
from inshrink_core.execution.engines import SECONDS_TO_TIDY_UP, Task, packed
from inshrink_core.execution.progress import OnProgress, seldom

_SECONDS_BETWEEN: Final = 0.1


def perform(task: Task, progress: OnProgress) -> Any:
    """Perform a task in this process, which does nothing else, and return its result.

    Raises
    ------
    EngineError
        The working directory does not exist on this machine.
    """
    try:
        os.chdir(task.directory)
    except OSError as error:
        what = f"a worker cannot enter the working directory: {error.strerror}"
        remedy = "start the command in a folder that all machines see under the same path"
        raise EngineError(what, where=task.directory, remedy=remedy) from error
    return pkgutil.resolve_name(task.function)(task.argument, progress)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _end_with_stdin() -> None:
    """End this process once stdin is closed."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_TIDY_UP)
    os._exit(1)


def main() -> None:
    """Perform a task, and end the process."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)

    def answer(kind: str, value: Any) -> None:
        answers.write(packed((kind, value)) + "\n")
        answers.flush()

    try:
        line = sys.stdin.readline()
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        try:
            result = perform(Task(**json.loads(line)), seldom(partial(answer, "now"), _SECONDS_BETWEEN))
        except Exception as error:
            answer("error", _sendable(error))
        else:
            answer("result", result)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)
    os._exit(0)


def _sendable(error: Exception) -> Exception:
    """Return the error, or a substitute if it cannot be pickled."""
    try:
        packed(error)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
