"""The command `inshrink`: its verbs, and what every one of them does with an error."""

from __future__ import annotations

import contextlib
import functools
import inspect as inspection
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from inshrink_core.cli import (
    average,
    bench,
    compare,
    compress,
    diff,
    estimate,
    evaluate,
    export,
    inspect,
    prune,
    rehearse,
    report,
    restore,
    search,
    sensitivity,
    ui,
    verify,
)
from inshrink_core.cli.output import error_document, progress_in, write_document, write_error
from inshrink_core.errors import InshrinkError

__all__ = ["app", "main"]

EXIT_INPUT = 2
EXIT_BUG = 70
"""``EX_SOFTWARE`` of sysexits.h."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""

_VERBS = (
    inspect.inspect,
    compress.compress,
    restore.restore,
    verify.verify,
    compare.compare,
    diff.diff,
    average.average,
    estimate.estimate,
    evaluate.evaluate,
    export.export,
    prune.prune,
    sensitivity.sensitivity,
    bench.bench,
    rehearse.rehearse,
    report.report,
    search.search,
    ui.ui,
)
_EXAMPLES = {
    "inspect": inspect.EXAMPLE,
    "compress": compress.EXAMPLE,
    "restore": restore.EXAMPLE,
    "verify": verify.EXAMPLE,
    "compare": compare.EXAMPLE,
    "diff": diff.EXAMPLE,
    "average": average.EXAMPLE,
    "estimate": estimate.EXAMPLE,
    "evaluate": evaluate.EXAMPLE,
    "export": export.EXAMPLE,
    "prune": prune.EXAMPLE,
    "sensitivity": sensitivity.EXAMPLE,
    "bench": bench.EXAMPLE,
    "rehearse": rehearse.EXAMPLE,
    "report": report.EXAMPLE,
    "search": search.EXAMPLE,
    "ui": ui.EXAMPLE,
}


def _epilog(example: str, *paragraphs: str) -> str:
    """Return the end of a help text; backspace keeps the lines of the example as they are."""
    lines = "\n".join(f"  {line}" for line in example.splitlines())
    return "\n\n".join((f"\b\nExample:\n{lines}", *paragraphs))


def _reporting(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the option ``--progress``."""
    option = Annotated[
        str,
        typer.Option(
            "--progress",
            metavar="bar|jsonl",
            help="What stderr shows: a bar where that is a terminal, or one JSON object a line.",
        ),
    ]

    @functools.wraps(verb)
    def run(*, progress: str = "bar", **options: Any) -> None:
        with progress_in(progress):
            verb(**options)

    given = inspection.signature(verb, eval_str=True)
    shown = inspection.Parameter(
        "progress", inspection.Parameter.KEYWORD_ONLY, default="bar", annotation=option
    )
    run.__signature__ = given.replace(parameters=[*given.parameters.values(), shown])  # type: ignore[attr-defined]
    run.__annotations__ = {**verb.__annotations__, "progress": option}
    return run


app = typer.Typer(
    name="inshrink",
    add_completion=False,
    # Help boxes drawn by rich cost 0.2 s of imports, half of what the whole help may take.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_epilog(
        "$ inshrink compress runs/digits -o digits.inshrink\n"
        "$ inshrink restore digits.inshrink --step 400 -o restored/",
        "Exit codes: 0 done, 1 a check failed, 2 the input, 3 damaged data, 70 a bug, 130 interrupted.",
    ),
)
for _verb in _VERBS:
    _name = _verb.__name__
    app.command(_name, epilog=_epilog(_EXAMPLES[_name]))(_verb if _name == "ui" else _reporting(_verb))


def _show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        from inshrink_core import __version__

        typer.echo(f"inshrink {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Training runs as compressed, verifiable chains of deltas: any step can be restored."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`inshrink_core.cli.main`); the working directory has left the import path."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sign gets its code point, not a UnicodeEncodeError.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _abandon_output()
        write_error(f"the output cannot be written: {_describe_os_error(error)}")
        return EXIT_INPUT
    return code


def _abandon_output() -> None:
    """Send what is left to nowhere, so that the flush at the interpreter's end does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    """Invoke a verb; every error becomes one line and an exit code."""
    command = typer.main.get_command(app)
    as_json = "--json" in words
    try:
        with command.make_context("inshrink", words) as context:
            command.invoke(context)
    except typer.Exit as done:
        return int(done.exit_code)
    except InshrinkError as error:
        _show_traceback()
        return _fail(error_document(error), as_json)
    except KeyboardInterrupt:
        remedy = _interrupted_remedy(words)
        return _fail(_document("Interrupted", f"interrupted; {remedy}", EXIT_INTERRUPTED), as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        _show_traceback()
        return _fail(_document("OSError", _describe_os_error(error), EXIT_INPUT), as_json)
    except MemoryError:
        _show_traceback()
        return _fail(_document("MemoryError", "not enough memory; use fewer --threads", EXIT_INPUT), as_json)
    except Exception as error:
        # Usage errors are known by what they can do: typer moved their class between versions.
        if hasattr(error, "format_message"):
            return _fail(_document("UsageError", _describe_usage(error, words), EXIT_INPUT), as_json)
        _show_traceback()
        return _fail(_document(type(error).__name__, _describe_bug(error), EXIT_BUG), as_json)
    return 0


def _fail(error: dict[str, object], as_json: bool) -> int:
    """Show an error on stderr, and as the document where one was asked for."""
    if as_json:
        write_document({"error": error})
        sys.stdout.flush()
    write_error(str(error["message"]))
    return int(str(error["exit_code"]))


def _document(kind: str, message: str, exit_code: int) -> dict[str, object]:
    """Return the value of the key ``error`` for what is no error of ours."""
    return {"type": kind, "message": message, "where": "", "remedy": "", "exit_code": exit_code}


def _interrupted_remedy(words: list[str]) -> str:
    """Say what an interrupted verb left behind."""
    if words and words[0] == "compress":
        return "committed steps are kept, and the same command continues"
    if words and words[0] == "search":
        return "measured trials are kept, and the same command continues"
    if words and words[0] == "bench":
        return "with --output, measured points are kept, and the same command continues"
    if words and words[0] == "rehearse":
        return "finished trainings are kept, and the same command continues"
    if words and words[0] == "prune":
        return "the archive is as before, or pruned; the same command tells"
    return "the archive is as it was"


def _describe_os_error(error: OSError) -> str:
    """Say which file the system refused, and why."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _describe_usage(error: Exception, words: Sequence[str]) -> str:
    """Return typer's own message on one line, with the way to the help."""
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    # The parser raises some usage errors without a context: then the first word is the verb.
    verb = f"inshrink {words[0]}" if words and words[0].isalpha() else "inshrink"
    path = getattr(context, "command_path", verb)
    return f"{message.rstrip('.')}; see {path} --help"


def _describe_bug(error: Exception) -> str:
    """Own up to an error that no one foresaw."""
    return (
        f"{type(error).__name__}: {error}; this is a bug in Inshrink: please report it, "
        "with the traceback that INSHRINK_TRACEBACK=1 shows"
    )


def _show_traceback() -> None:
    """Print the traceback where the environment asks for it."""
    if os.environ.get("INSHRINK_TRACEBACK"):
        traceback.print_exc()
