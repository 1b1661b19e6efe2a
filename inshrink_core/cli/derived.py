"""Command line of a verb, derived from its request."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

from cyclopts import App, CycloptsError, Group, Parameter

from inshrink_core.cli.output import (
    console_of_stdout,
    error_document,
    shown_progress,
    write_document,
    write_error,
)
from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, fields_of

if TYPE_CHECKING:
    from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry
    from rich.console import Console, ConsoleOptions


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options for printing the report and progress.

    Parameters
    ----------
    as_json
        Write one JSON document to stdout instead (docs/json.md).
    quiet
        Print nothing but errors.
    shown_as
        Progress on stderr: a bar (on a terminal only), or one JSON object per line.
    """

    as_json: Annotated[bool, Parameter(name="--json")] = False
    quiet: Annotated[bool, Parameter(alias="-q")] = False
    shown_as: Annotated[str, Parameter(name="--progress", metavar="bar|jsonl", show_default=True)] = "bar"

    def present(self, report: Report, failure: InshrinkError | None = None) -> int:
        """Print a report; return the exit code of its failure, 0 without one."""
        failure = failure or getattr(report, "failure", None)
        if self.as_json:
            write_document(report.to_json() | ({"error": error_document(failure)} if failure else {}))
        elif not self.quiet:
            report.show(console_of_stdout())
        if failure is None:
            return 0
        sys.stdout.flush()
        write_error(str(failure))
        return failure.exit_code


class UsageError(InputError):
    """Invalid options or arguments of a verb.

    Parameters
    ----------
    what
        The problem.
    verb
        The verb; the message refers to its help.
    """

    def __init__(self, what: str, verb: str) -> None:
        super().__init__(what, remedy=f"see inshrink {verb} --help")


def run_verb(request: type[Request[Any]], words: Sequence[str]) -> int:
    """Parse the options of a verb, perform it and print the report; return the exit code.

    Parameters
    ----------
    request
        The request of the verb.
    words
        The verb, and the words after it.

    Raises
    ------
    UsageError
        The words are invalid for the verb.
    """
    read = _read(request, words)
    if read is None:  # a command is one line of any length, so that it can be copied
        sys.stdout.write("\n".join(["\nExample:", *(f"  $ {line}" for line in request.EXAMPLES), ""]))
        return 0
    asked, out = read
    asked = asked.meant()
    if not asked.REPORTS:
        asked.perform()
        return 0
    failure = None
    if asked.THREADED:
        from inshrink_core.execution.threads import prepare_process

        prepare_process()
    with shown_progress(asked, out.shown_as, hidden=out.as_json or out.quiet) as progress:
        try:
            report = replace(asked, progress=progress).perform()
        except InshrinkError as error:
            if error.report is None:
                raise
            report, failure = error.report, error
        return out.present(report, failure)


def read_request(request: type[Request[Any]], words: Sequence[str]) -> Request[Any]:
    """Return the request that words describe, without performing it.

    Raises
    ------
    UsageError
        The words are invalid for the verb.

    Examples
    --------
    >>> from inshrink_core.verbs.restore import Restore
    >>> read_request(Restore, ["restore", "a.inshrink", "-o", "out", "--step", "400"]).steps
    ('400',)
    """
    read = _read(request, words)
    if read is None:
        raise UsageError("this asks for help", words[0])
    return read[0]


def _read(request: Any, words: Sequence[str]) -> tuple[Request[Any], Output] | None:
    """Return the request that words describe, and the output options; None after help."""
    joined: list[str] = []
    for word in words:
        if word == "-" and joined and joined[-1].startswith("-"):
            joined[-1] += "=-"  # a single hyphen is a value, not an option
        else:
            joined.append(word)
    try:
        read: tuple[Request[Any], Output] | None = _app(request, words[0])(joined)
    except CycloptsError as error:
        text = " ".join(str(error).replace(f'Command "{words[0]}" parameter ', "").split())
        raise UsageError(text.rstrip("."), words[0]) from error
    return read


@cache
def _app(request: Any, verb: str) -> App:
    """Return the parser of a verb's words, cached: making it takes longer than parsing."""
    app = App(
        name="inshrink",
        version_flags=(),
        default_parameter=Parameter(negative="", show_default=False),
        help_format="plaintext",
        help_formatter=_formatter(),
        group_parameters=Group("Options", sort_key=1),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        exit_on_error=False,
        print_error=False,
    )

    def command(*places: Any, out: Output | None = None, **fields: Any) -> tuple[Request[Any], Output]:
        several = (places[n_single:],) if places[n_single:] else ()
        try:
            return request(*places[:n_single], *several, **fields), out or Output()
        except InputError as error:
            raise UsageError(str(error), request.verb()) from error

    n_single = sum(field.by_place and not field.many for field in fields_of(request))
    parameters = {field.name: _parameter(field) for field in fields_of(request)}
    if request.REPORTS:
        note = Parameter(name="*", group=Group("Output", sort_key=3))
        kind, hint = inspect.Parameter.KEYWORD_ONLY, Annotated[Output | None, note]
        parameters["out"] = inspect.Parameter("out", kind, default=None, annotation=hint)
    command.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    app.command(command, name=verb, help=request.summary())
    return app


def _parameter(field: Option) -> inspect.Parameter:
    """Return the parameter of a field, for a function that cyclopts calls."""
    hint, is_optional, note = field.type, field.default is None, dict[str, Any]()
    kind: Any = inspect.Parameter.POSITIONAL_ONLY if field.by_place else inspect.Parameter.KEYWORD_ONLY
    if field.by_place and field.many:
        kind, hint, note["required"] = inspect.Parameter.VAR_POSITIONAL, str, True
    elif field.many:
        hint = tuple[str, ...] | None if is_optional else tuple[str, ...]
    elif str in get_args(hint):
        hint = str | None if is_optional else str
    if field.read is not None:
        read = field.read
        note |= {"converter": lambda _, tokens: read(tokens[0].value), "n_tokens": 1}
    note["name"] = (field.metavar,) if field.by_place and field.metavar else field.names
    if field.needs:
        note["group"] = Group(f"With --{field.needs.replace('_', '-')}", sort_key=2)
    note["help"] = field.text.replace("``", "")
    is_shown = not isinstance(field.default, bool)
    note["show_default"] = is_shown and field.default not in (None, (), inspect.Parameter.empty)
    shown = Parameter(**note, metavar=field.metavar or None, negative=field.off)
    return inspect.Parameter(field.name, kind, default=field.default, annotation=Annotated[hint, shown])


def _formatter() -> DefaultFormatter:
    """Return the format of help: two columns without boxes."""
    from cyclopts.help import DefaultFormatter, PanelSpec
    from cyclopts.help.specs import NameRenderer, get_default_parameter_columns
    from rich.box import Box

    def columns(
        console: Console, options: ConsoleOptions, entries: list[HelpEntry]
    ) -> tuple[ColumnSpec, ...]:
        width = int(_NAMES * console.width)
        *marks, names, texts = get_default_parameter_columns(console, options, entries)
        return (*marks, names.copy(renderer=NameRenderer(max_width=width), max_width=width), texts)

    blank = Box("\n".join(["    "] * 8) + "\n")
    panel = PanelSpec(box=blank, padding=(0, 0), title_align="left")
    return DefaultFormatter(panel_spec=panel, column_specs=columns)


_NAMES: Final = 0.42
"""Largest share of a line for option names: at 80 columns, the longest list of choices fits."""
