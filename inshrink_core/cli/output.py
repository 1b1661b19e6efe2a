"""Output of the command line: results to stdout, as text or JSON; progress and errors to stderr."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.report import plain_value
from inshrink_core.text import UNKNOWN, count, duration, printable, rate, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

    from inshrink_core.execution.progress import OnProgress, Progress
    from inshrink_core.request import Request


EXIT_INPUT, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130
"""70 is ``EX_SOFTWARE`` of sysexits.h; 130 is 128 + SIGINT, as in shells."""

_PIPED_WIDTH = 120
"""Columns of a table written to a file or a pipe."""

_STDERR = 2
_SECONDS_BETWEEN_LINES = 0.2
_SECONDS_TO_TIDY_UP = 1.5


def console_of_stdout() -> Console:
    """Return a console on stdout; without colour and with a fixed width if stdout is no terminal."""
    from rich.console import Console

    class Output(Console):
        """A console that raises BrokenPipeError, so that the command handles a closed pipe."""

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


def describe_os_error(error: OSError) -> str:
    """Return the file that the system refused, and the reason."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def error_document(error: BaseException, interrupted: str = "") -> dict[str, Any]:
    """Return the value of the key ``error`` of a document; `interrupted` describes the state after Ctrl-C.

    Returns
    -------
    type : str
        Class of the error.
    message : str
        The line on stderr, without ``inshrink:``.
    where : str
        File, frame or tensor; may be empty.
    remedy : str
        Suggested action; may be empty.
    exit_code : int
        Exit status.
    """
    kind, code, where, remedy = type(error).__name__, EXIT_INPUT, "", ""
    match error:
        case InshrinkError():
            message, code, where, remedy = str(error), error.exit_code, error.where, error.remedy
        case KeyboardInterrupt():
            kind, message, code = "Interrupted", f"interrupted; {interrupted}", EXIT_INTERRUPTED
        case OSError():
            kind, message = "OSError", describe_os_error(error)
        case MemoryError():
            message = "not enough memory; use fewer --threads"
        case _:
            code = EXIT_BUG
            message = (
                f"{kind}: {error}; this is a bug in Inshrink: please report it, with the traceback that "
                "INSHRINK_TRACEBACK=1 shows"
            )
    return {"type": kind, "message": message, "where": where, "remedy": remedy, "exit_code": code}


@contextmanager
def shown_progress(asked: Request[Any], form: str, *, hidden: bool) -> Iterator[OnProgress | None]:
    """Show progress as a ``bar`` on a terminal, or as ``jsonl``: one JSON message per line on stderr.

    The reader of the messages may end the verb with SIGTERM or by closing the pipe. Both interrupt it like
    Ctrl-C, and committed data is kept.

    Parameters
    ----------
    asked
        The request, with the unit of progress and the stage to show.
    form
        ``bar`` or ``jsonl``.
    hidden
        Whether to hide the bar and events.

    Yields
    ------
    OnProgress or None
        Callback for the verb; None if nothing is shown.

    Notes
    -----
    A line of ``jsonl`` is an object:

    verb : str
        The verb.
    done : int
        Bytes or items finished.
    total : int
        Their total.
    unit : str
        Their unit: ``bytes``, ``steps`` or ``trials``.
    step : int?
        Current training step.
    found : object
        A part of the result that is already known; absent if nothing is new.
    """
    if form not in ("bar", "jsonl"):
        raise InputError(f"--progress {form}", remedy="choose one of bar, jsonl")
    if form == "bar" and hidden:
        yield None
        return
    verb, unit, events = asked.verb(), asked.UNIT, asked.events
    with _json_lines(verb, unit) if form == "jsonl" else _bar(verb, unit) as advance:

        def show(now: Progress) -> None:
            if now.stage == events:
                if now.detail and not hidden:
                    sys.stderr.write(printable(now.detail) + "\n")
            elif advance is not None and (not asked.STAGE or now.stage == asked.STAGE):
                advance(now)

        yield None if advance is None and not events else show


@contextmanager
def _json_lines(verb: str, unit: str) -> Iterator[OnProgress]:
    """Write progress as JSON lines."""
    from inshrink_core.execution.progress import seldom

    def write(now: Progress) -> None:
        message = {"verb": verb, "done": now.done, "total": now.total, "unit": unit, "step": now.step}
        if now.found is not None:
            message["found"] = plain_value(now.found, strict=True)
        sys.stderr.write(json.dumps(message, allow_nan=False) + "\n")
        sys.stderr.flush()

    ended = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if in_main else None
    if hasattr(select, "poll") and stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
        threading.Thread(target=_end_with_reader, args=(ended,), daemon=True).start()
    try:
        yield seldom(write, _SECONDS_BETWEEN_LINES)
    finally:
        ended.set()
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


def _end_with_reader(ended: threading.Event) -> None:
    """Interrupt this process when the reader closes stderr; exit if the interruption takes long."""
    poll = select.poll()
    poll.register(_STDERR, 0)
    poll.poll()
    if not ended.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        if not ended.wait(_SECONDS_TO_TIDY_UP):
            os._exit(1)


@contextmanager
def _bar(verb: str, unit: str) -> Iterator[OnProgress | None]:
    """Show a bar with progress, speed and remaining time, on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    text = progress.TextColumn("{task.description}", table_column=Column(no_wrap=True), markup=False)
    bar = progress.BarColumn(bar_width=None, table_column=Column(ratio=1))
    done = progress.TextColumn("{task.fields[amounts]}", table_column=Column(no_wrap=True), markup=False)
    console = Console(stderr=True)
    with (
        progress.Progress(text, bar, done, console=console, transient=True, expand=True) as shown,
        _printed_above(shown.console),
    ):
        task = shown.add_task(verb, total=None, amounts="")

        def advance(now: Progress) -> None:
            shown.update(task, completed=now.done, total=now.total, description=f"{verb} step {now.step}")
            shown.update(task, amounts=_amounts(shown.tasks[0], unit, now.detail))

        yield advance


@contextmanager
def _printed_above(console: Console) -> Iterator[None]:
    """Print above the bar that kernels are being compiled, which explains a long first call."""
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


def _amounts(task: Task, unit: str, detail: str) -> str:
    """Return the text beside the bar."""
    total = task.total or 0
    left = duration(task.time_remaining) if task.time_remaining is not None else UNKNOWN
    if unit == "trials":
        since = f"evaluation {count(task.completed)} of at most {count(total)}, {duration(task.elapsed)}"
        return f"{since} · {detail}" if detail else since
    if unit != "bytes":
        return f"{count(task.completed)} of {count(total)} {unit} · {left} left"
    speed = rate(task.speed / 1e6 if task.speed else None)
    return f"{size(task.completed)} of {size(total)} · {speed} · {left} left"
