"""Entry point of the command `inshrink`: dispatch to a verb, and handling of errors."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inshrink_core import __version__
from inshrink_core.cli.output import (
    EXIT_INPUT,
    describe_os_error,
    error_document,
    write_document,
    write_error,
)
from inshrink_core.errors import InputError
from inshrink_core.plugins import VERBS, plugin, plugins
from inshrink_core.request import Request, request_of

EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""

_FIRST = ("inspect", "compress", "restore", "verify", "compare")
"""Verbs listed first."""

_HELP = """\
Usage: inshrink VERB [OPTIONS] …

Compress the checkpoints of a training run into an archive, and restore any step.

Verbs:
{verbs}

Options of the command itself:
  --version   Print the version.
  -h, --help  Show this, or, after a verb, its options and an example.

Example:
  $ inshrink compress runs/digits -o digits.inshrink
  $ inshrink restore digits.inshrink --step 400 -o restored/

Exit codes: 0 done, 1 a check failed, 2 unusable input, 3 damaged data, 70 a bug,
130 interrupted.
"""


def known_verbs() -> list[str]:
    """Return the names of all verbs, the most used ones first."""
    rest = set(plugins(VERBS)).difference(_FIRST)
    return [*_FIRST, *sorted(rest)]


def _help() -> str:
    lines = (f"  {verb:<11} {_summary(verb)}" for verb in known_verbs())
    return _HELP.format(verbs="\n".join(lines))


def _summary(verb: str) -> str:
    """Return the summary of a verb, from the source text of its module if possible, without an import."""
    point = plugin(VERBS, verb)
    if point is None:
        return ""
    package, *rest = point.module.split(".")
    with contextlib.suppress(OSError, ValueError):
        spec = find_spec(package)
        origin = Path((spec and spec.origin) or "")
        path = origin.parent.joinpath(*rest).with_suffix(".py") if rest else origin
        heading = rf'^class {point.attr}\b[^"]*(?:"[^"]*"[^"]*)?:\n +"""([^"\n]+)'
        if found := re.search(heading, path.read_text(encoding="utf-8"), re.MULTILINE):
            return found[1]
    with contextlib.suppress(InputError):
        request = request_of(verb)
        return request.summary() if request is not None else ""
    return "Cannot be loaded."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; `inshrink_core.cli.main` has removed the working directory from the path."""
    for stream in (sys.stdout, sys.stderr):
        # Replace characters that the terminal cannot encode by escapes, instead of raising
        # UnicodeEncodeError.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(_process_words() if arguments is None else list(arguments))
        sys.stdout.flush()
    except OSError as error:
        # Redirect the remaining output, so that the flush at exit raises no further error.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        write_error(f"the output cannot be written: {describe_os_error(error)}")
        return EXIT_INPUT
    return code


def _process_words() -> list[str]:
    """Return the words of this process; under torchrun, the words agreed on by all processes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return sys.argv[1:]
    from inshrink_core.execution.together import words_together

    return words_together(sys.argv[1:])


def _run(words: list[str]) -> int:
    """Run a verb; print an error as one line, and return the exit code."""
    request = Request
    try:
        if not words or words[0] in ("-h", "--help"):
            sys.stdout.write(_help())
        elif words[0] == "--version":
            sys.stdout.write(f"inshrink {__version__}\n")
        else:
            request = _known_request(words[0])
            from inshrink_core.cli.derived import run_verb

            return run_verb(request, words)
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("INSHRINK_TRACEBACK") and isinstance(error, Exception):
            traceback.print_exc()
        document = error_document(error, request.INTERRUPTED)
        if "--json" in words:
            write_document({"error": document})
            sys.stdout.flush()
        write_error(document["message"])
        return int(document["exit_code"])
    return 0


def _known_request(verb: str) -> type[Request[Any]]:
    """Return the request of a verb; refuse an unknown one."""
    request = request_of(verb)
    if request is None:
        meant = difflib.get_close_matches(verb, known_verbs(), n=1)
        guess = f"did you mean '{meant[0]}'? " if meant else ""
        raise InputError(f"there is no verb '{verb}'", remedy=f"{guess}see inshrink --help")
    return request
