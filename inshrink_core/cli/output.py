"""What goes where: results to stdout, as text or as one JSON document; progress and errors to stderr."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.report import plain_value
from inshrink_core.text import UNKNOWN, count, duration, printable, rate, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

    from inshrink_core.execution.progress import OnProgress, Progress


_PIPED_WIDTH = 100
"""Columns of a table that goes to a file or a pipe."""

_STDERR = 2
_SECONDS_BETWEEN_LINES = 0.2
_SECONDS_TO_TIDY_UP = 1.5

_lines: ContextVar[bool] = ContextVar("lines", default=False)
"""Whether progress goes to stderr as JSON, one message a line."""


def _console() -> Console:
    """Return a console on stdout; no colour and a fixed width where it is not a terminal."""
    from rich.console import Console

    class Output(Console):
        """A console that leaves it to the command what a reader that went away means."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = Output(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def write_document(document: Mapping[str, Any]) -> None:
    """Write the one document of ``--json`` to stdout."""
    sys.stdout.write(json.dumps(plain_value(document, strict=True), indent=2, allow_nan=False) + "\n")


def write_error(message: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"inshrink: {printable(message)}\n")


def error_document(error: InshrinkError) -> dict[str, Any]:
    """Return the value of the key ``error`` of a document."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": error.where,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


def present(
    document: dict[str, Any],
    *,
    as_json: bool,
    text: Callable[[Console], None],
    quiet: bool = False,
    failure: InshrinkError | None = None,
) -> int:
    """Show a result, as text or as a document; return the exit code of its failure, 0 without one.

    Parameters
    ----------
    document
        The result; gets the key ``error`` where there is a failure.
    as_json
        Write the document instead of text.
    text
        Prints the result for people.
    quiet
        Print no text.
    failure
        Why the command does not end with 0 although it has a result.
    """
    if as_json:
        write_document(document | ({"error": error_document(failure)} if failure else {}))
    elif not quiet:
        text(_console())
    if failure is None:
        return 0
    sys.stdout.flush()
    write_error(str(failure))
    return failure.exit_code


@contextmanager
def progress_in(form: str) -> Iterator[None]:
    """Show the progress of the verb inside as a ``bar``, or as ``jsonl``: one message a line on stderr.

    Whoever reads the messages may end the verb with SIGTERM, or by going away: both are an interruption,
    as Ctrl-C is, and leave what was committed.
    """
    if form not in ("bar", "jsonl"):
        raise InputError(f"--progress {form}", remedy="choose one of bar, jsonl")
    if form == "bar":
        yield
        return
    token = _lines.set(True)
    ended = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if in_main else None
    if hasattr(select, "poll") and stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
        threading.Thread(target=_end_with_reader, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _lines.reset(token)
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: object) -> NoReturn:
    """Do as Ctrl-C does."""
    raise KeyboardInterrupt


def _end_with_reader(ended: threading.Event) -> None:
    """Interrupt this process once nobody reads its stderr any more, and end it where that takes long."""
    poll = select.poll()
    poll.register(_STDERR, 0)
    poll.poll()
    if not ended.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        if not ended.wait(_SECONDS_TO_TIDY_UP):
            os._exit(1)


def _as_lines(verb: str, unit: str) -> OnProgress | None:
    """Return what writes progress as JSON lines; None where that is not asked for.

    Parameters
    ----------
    verb
        What is being done.
    unit
        What is counted: ``bytes``, ``steps`` or ``trials``.
    """
    if not _lines.get():
        return None
    written_at = 0.0

    def write(now: Progress) -> None:
        nonlocal written_at
        at = time.monotonic()
        if now.found is None and now.done < now.total and at - written_at < _SECONDS_BETWEEN_LINES:
            return
        written_at = at
        message = {"verb": verb, "done": now.done, "total": now.total, "unit": unit, "step": now.step}
        if now.found is not None:
            message["found"] = plain_value(now.found, strict=True)
        sys.stderr.write(json.dumps(message, allow_nan=False) + "\n")
        sys.stderr.flush()

    return write


@contextmanager
def progress_bar(verb: str, *, hidden: bool, in_bytes: bool = True) -> Iterator[OnProgress | None]:
    """Show how far a long action has come, with what is done, the speed and the time left.

    Parameters
    ----------
    verb
        What is being done, as a word in front of the bar.
    hidden
        Show no bar, as where the output is for a script.
    in_bytes
        True if progress counts bytes, False if it counts steps.

    Yields
    ------
    OnProgress or None
        To be called as the action proceeds; None where nothing is shown.
    """
    lines = _as_lines(verb, "bytes" if in_bytes else "steps")
    if lines is not None or hidden or not sys.stderr.isatty():
        yield lines
        return
    from rich import progress
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

    class Amounts(progress.ProgressColumn):
        """Done of total, speed and time left, in the words of `inshrink_core.text`."""

        def render(self, task: Task) -> Text:
            return Text(_amounts(task, in_bytes))

    columns = (
        progress.TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
        Amounts(table_column=Column(no_wrap=True)),
    )
    console = Console(stderr=True)
    bar = progress.Progress(*columns, console=console, transient=True, expand=True)
    with bar, _told_above(bar.console):
        shown = bar.add_task(verb, total=None)

        def advance(now: Progress) -> None:
            bar.update(shown, completed=now.done, total=now.total, description=f"{verb} step {now.step}")

        yield advance


@contextmanager
def _told_above(console: Console) -> Iterator[None]:
    """Print above the bar that kernels are compiled, which those who wait for the first call should know."""
    handler, logger = logging.Handler(logging.INFO), logging.getLogger("inshrink_core.ops.cpu.compiled")
    handler.emit = lambda record: console.print(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


@contextmanager
def progress_table(
    verb: str, draw: Callable[[Sequence[Any]], Any], *, hidden: bool
) -> Iterator[OnProgress | None]:
    """Show what is drawn of all events so far, as they come; nothing where no one watches."""
    lines = _as_lines(verb, "trials")
    if lines is not None or hidden or not sys.stderr.isatty():
        yield lines
        return
    from rich.console import Console
    from rich.live import Live

    seen: list[Progress] = []
    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def progress(now: Progress) -> None:
            seen.append(now)
            live.update(draw(seen), refresh=True)

        yield progress


def _amounts(task: Task, in_bytes: bool) -> str:
    """Return the text beside the bar."""
    total = task.total or 0
    left = duration(task.time_remaining) if task.time_remaining is not None else UNKNOWN
    if not in_bytes:
        return f"{count(task.completed)} of {count(total)} steps · {left} left"
    speed = rate(task.speed / 1e6 if task.speed else None)
    return f"{size(task.completed)} of {size(total)} · {speed} · {left} left"
