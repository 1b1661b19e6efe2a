"""The command line of a verb, derived from its request."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, CycloptsError, Group, Parameter

from inshrink_core.cli.output import present, progress_bar, progress_in, progress_table
from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.request import Field, Request, Shown, fields_of

if TYPE_CHECKING:
    from cyclopts import Token
    from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry
    from rich.console import Console, ConsoleOptions

    from inshrink_core.execution.progress import OnProgress, Progress
    from inshrink_core.report import Report


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is shown.

    Parameters
    ----------
    as_json
        Write one JSON document to stdout instead (docs/json.md).
    quiet
        Print nothing but errors.
    shown_as
        What stderr shows: a bar where that is a terminal, or one JSON object a line.
    """

    as_json: Annotated[bool, Parameter(name="--json")] = False
    quiet: Annotated[bool, Parameter(alias="-q")] = False
    shown_as: Annotated[str, Parameter(name="--progress", metavar="bar|jsonl", show_default=True)] = "bar"

    @property
    def hidden(self) -> bool:
        """Whether nothing is for people."""
        return self.as_json or self.quiet

    @contextmanager
    def progress(self, verb: str, shown: Shown) -> Iterator[OnProgress | None]:
        """Show how far a verb has come."""
        if shown.draw is not None:
            with progress_table(verb, shown.draw, hidden=self.hidden) as tell:
                yield tell
            return
        with progress_bar(verb, hidden=self.hidden, in_bytes=shown.in_bytes) as tell:

            def of_stage(now: Progress) -> None:
                if tell is not None and shown.stage in (None, now.stage):
                    tell(now)

            yield None if tell is None else of_stage

    def present(self, report: Report, failure: InshrinkError | None = None) -> int:
        """Show a report; return the exit code of its failure, 0 without one."""
        return present(
            report.to_json(),
            as_json=self.as_json,
            quiet=self.quiet,
            text=report.show,
            failure=failure or getattr(report, "failure", None),
        )


Act = Callable[[Request[Any], Output], Any]
"""What is done with a request that was read."""

_apps: dict[tuple[type[Request[Any]], Act], App] = {}

_OPTIONS = Group("Options", sort_key=1)
_OUTPUT = Group("Output", sort_key=3)


class UsageError(InputError):
    """Words that are not what a verb takes.

    Parameters
    ----------
    what
        What is wrong with them.
    verb
        The verb, whose help tells what it takes.
    """

    def __init__(self, what: str, verb: str) -> None:
        super().__init__(what, remedy=f"see inshrink {verb} --help")


def run_verb(request: type[Request[Any]], words: Sequence[str]) -> int:
    """Read the options of a verb, do it and show the report; return the exit code.

    Parameters
    ----------
    request
        What the verb is asked.
    words
        The verb, and what follows it.

    Raises
    ------
    UsageError
        The words are not what the verb takes.
    """
    code: int | None = _called(request, words, _perform)
    if {"-h", "--help"} & {*words}:  # a command is one line, however long, so that it can be copied
        sys.stdout.write("\n".join(["\nExample:", *(f"  $ {line}" for line in request.EXAMPLES), ""]))
    return code or 0


def read_request(request: type[Request[Any]], words: Sequence[str]) -> Request[Any]:
    """Return what words ask of a verb, and do nothing.

    Raises
    ------
    UsageError
        The words are not what the verb takes.

    Examples
    --------
    >>> from inshrink_core.verbs.restore import Restore
    >>> read_request(Restore, ["restore", "a.inshrink", "-o", "out", "--step", "400"]).steps
    ('400',)
    """
    asked: Request[Any] = _called(request, words, _as_asked)
    return asked


def _called(request: type[Request[Any]], words: Sequence[str], act: Act) -> Any:
    """Read the words of a verb, and return what `act` makes of the request; None after help."""
    try:
        return _app(request, words[0], act)(_joined(words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        text = " ".join(str(error).replace(f'Command "{words[0]}" parameter ', "").split())
        raise UsageError(text.rstrip("."), words[0]) from error


def _app(request: type[Request[Any]], verb: str, act: Act) -> App:
    """Return what reads the words of a verb; making it takes longer than reading them."""
    if (request, act) in _apps:
        return _apps[request, act]
    app = _apps[request, act] = App(
        name="inshrink",
        version_flags=(),
        default_parameter=Parameter(negative="", show_default=False),
        help_format="plaintext",
        help_formatter=_formatter(),
        group_parameters=_OPTIONS,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    app.command(_command(request, act), name=verb, help=request.summary())
    return app


def _as_asked(asked: Request[Any], _: Output) -> Request[Any]:
    return asked


def _perform(asked: Request[Any], out: Output) -> int:
    """Do what is asked, and show the report."""
    asked = asked.meant()
    if not asked.REPORTS:
        asked.perform()
        return 0
    if asked.THREADED:
        from inshrink_core.execution import prepare_process

        prepare_process()
    failure = None
    with progress_in(out.shown_as):
        try:
            with asked.watched(out) as watched:
                report = watched.perform()
        except InshrinkError as error:
            if error.report is None:
                raise
            report, failure = error.report, error
        return out.present(report, failure)


def _joined(words: Sequence[str]) -> list[str]:
    """Return words with ``--option -`` as one: a hyphen by itself is a value, not an option."""
    joined: list[str] = []
    for word in words:
        if word == "-" and joined and joined[-1].startswith("-"):
            joined[-1] += "=-"
        else:
            joined.append(word)
    return joined


def _command(request: type[Request[Any]], act: Act) -> Callable[..., Any]:
    """Return a function that takes the fields of a request, and what is shown."""
    places = [field for field in fields_of(request) if field.by_place]
    n_alone = len(places) - bool(places and places[-1].option.many)

    def command(*given: Any, out: Output | None = None, **fields: Any) -> Any:
        rest = (given[n_alone:],) if n_alone < len(places) else ()
        chosen = _chosen(request, fields)
        try:
            asked = chosen(*given[:n_alone], *rest, **fields)
        except InputError as error:
            raise UsageError(str(error), request.verb()) from error
        return act(asked, out or Output())

    shown = inspect.Parameter(
        "out",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Output | None, Parameter(name="*", group=_OUTPUT)],
    )
    parameters = {field.name: _parameter(field) for field in fields_of(request)}
    for flag, mode in request.modes().items():
        group = Group(f"With {flag}", sort_key=2)
        its = {field.name: field for field in fields_of(mode) if field.name not in parameters}
        asks = its.pop(_key(flag), None)
        parameters[_key(flag)] = (
            _flag(flag, mode.summary()) if asks is None else _parameter(replace(asks, default=None))
        )
        parameters |= {name: _parameter(field, group) for name, field in its.items()}
    if request.REPORTS:
        parameters["out"] = shown
    command.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return command


def _chosen(request: type[Request[Any]], fields: dict[str, Any]) -> type[Request[Any]]:
    """Return the verb, or the mode of it that is asked for; the option that asks leaves the fields.

    Raises
    ------
    InputError
        A field is of another mode.
    """
    modes = {"": request} | request.modes()
    asked = next((flag for flag in modes if fields.get(_key(flag), False) is not False), "")
    own = {flag: [field.name for field in fields_of(mode)] for flag, mode in modes.items()}
    if _key(asked) not in own[asked]:
        fields.pop(_key(asked), None)
    strange = next((name for name in fields if name not in own[asked]), None)
    if strange is None:
        return modes[asked]
    options = {field.name: field.names[0] for mode in modes.values() for field in fields_of(mode)}
    option = options.get(strange) or next(flag for flag in modes if _key(flag) == strange)
    if not asked:
        needed = next(flag for flag in modes if strange in own[flag])
        raise InputError(f"{option} goes with {needed}", remedy=f"add {needed}")
    goes = ", ".join(options[name] for name in own[asked] if name not in (*own[""], _key(asked)))
    remedy = f"{asked} goes with {goes}" if goes else "leave out one of them"
    raise InputError(f"{asked} and {option} exclude each other", remedy=remedy)


def _key(flag: str) -> str:
    """Return what a function calls an option."""
    return flag.removeprefix("--").replace("-", "_")


def _flag(flag: str, text: str) -> inspect.Parameter:
    """Return the option that asks for a mode."""
    return inspect.Parameter(
        _key(flag),
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, Parameter(name=flag, help=text)],
    )


def _parameter(field: Field, group: Group | None = None) -> inspect.Parameter:
    """Return a field of a request as a function takes it that cyclopts calls."""
    option, hint = field.option, field.type
    several = field.by_place and option.many
    note: dict[str, Any] = {"help": field.text.replace("``", "")}
    is_shown = not isinstance(field.default, bool)
    note["show_default"] = is_shown and field.default not in (None, (), inspect.Parameter.empty)
    note["name"] = (option.metavar,) if field.by_place and option.metavar else field.names
    if group is not None:
        note["group"] = group
    if option.metavar:
        note["metavar"] = option.metavar
    if option.off:
        note["negative"] = option.off
    if option.read is not None:
        note |= {"converter": _reading(option.read), "n_tokens": 1}
    elif several:
        hint, note["required"] = str, True
    elif option.many:
        hint = tuple[str, ...] | None if field.default is None else tuple[str, ...]
    elif option.metavar and hint not in _SIMPLE:
        hint = str if field.default is inspect.Parameter.empty else str | None
    kind = inspect.Parameter.POSITIONAL_ONLY if field.by_place else inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(
        field.name,
        inspect.Parameter.VAR_POSITIONAL if several else kind,
        default=field.default,
        annotation=Annotated[hint, Parameter(**note)],
    )


_SIMPLE = (bool, int, float, int | None, float | None, tuple[int, int] | None)
"""Types that are read as what they are, whatever their values are called."""


def _reading(read: Callable[[str], Any]) -> Callable[[object, Sequence[Token]], Any]:
    def convert(_: object, tokens: Sequence[Token]) -> Any:
        return read(tokens[0].value)

    return convert


def _formatter() -> DefaultFormatter:
    """Return how help is laid out: two columns, no boxes."""
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
"""Most that names of options take of a line: at 80 columns, the longest list of choices fits."""
