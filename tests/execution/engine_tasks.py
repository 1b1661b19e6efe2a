"""What the workers of these tests are given to do."""

import os
import signal
import time
from pathlib import Path

from inshrink_core.errors import TooLargeError
from inshrink_core.execution.progress import Progress


def square(number, tell):
    """Say how far it is, and what is printed by the way is no answer."""
    print("a library says hello")
    for done in range(3):
        tell(Progress("square", done + 1, 3, number))
    return number * number


def place(_, tell):
    return str(Path.cwd())


def die_once(folder, tell):
    """Be killed at the first attempt, after some progress."""
    tell(Progress("die", 1, 1, 0))
    mark = Path(folder) / "was here"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die(_, tell):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(number, tell):
    if number:
        time.sleep(60)
    raise TooLargeError("too much", where="here", remedy="less")


def bug(_, tell):
    class OwnError(Exception):
        """Nobody else knows it."""

    raise OwnError("not foreseen")


def sleep(folder, tell):
    """Sleep until interrupted, and then tidy up."""
    mine = Path(folder) / str(os.getpid())
    mine.touch()
    try:
        tell(Progress("sleep", 0, 1, 0))
        time.sleep(60)
    finally:
        mine.rename(mine.with_suffix(".tidy"))
