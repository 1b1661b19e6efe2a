"""Requests: one frozen dataclass per verb.

The class defines type, default and range of each field; the ``Parameters`` section of its docstring is the
help text. The command line, the Python call, JSON documents and the commands shown in the explorer are
derived from them. Options that several verbs share are dataclasses that requests inherit.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from inshrink_core.errors import InputError
from inshrink_core.plugins import VERBS, plugin, plugins
from inshrink_core.report import Report, plain_value

P = ParamSpec("P")
R = TypeVar("R", bound="Report | None")
R_co = TypeVar("R_co", bound="Report | None", covariant=True)

_HEADING = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Option:
    """Presentation of a field on the command line, in addition to its type and default.

    Parameters
    ----------
    names
        Names of the option, the displayed one first; by default the field's. A field that is not keyword-only
        and has no names is a positional argument.
    metavar
        Name of its value.
    least, most
        Range of a number, both ends included.
    many
        Whether the option may be repeated; among positional arguments, only the last one may.
    read
        Converts a text to the value. Without it, a field with a `metavar` whose type is not a plain one is a
        text.
    needs
        Name of a field that must be given, too.
    hidden
        Whether the field exists only in Python.
    name, text, type, default, by_place
        Filled in from the field by `fields_of`: `inspect.Parameter.empty` is no default, and `by_place` marks
        a positional argument.
    """

    names: tuple[str, ...] = ()
    metavar: str = ""
    least: float | None = None
    most: float | None = None
    many: bool = False
    read: Callable[[str], Any] | None = None
    needs: str = ""
    hidden: bool = False
    name: str = ""
    text: str = ""
    type: Any = None
    default: Any = inspect.Parameter.empty
    by_place: bool = False

    @property
    def off(self) -> str:
        """Name of the option that switches off a flag that is on by default; else empty."""
        return f"--no-{self.names[0][2:]}" if self.default is True else ""

    def check(self, value: Any) -> None:
        """Refuse NaN, and a number out of range.

        Raises
        ------
        InputError
            The value is NaN or out of range.
        """
        if type(value) not in (int, float):
            return
        name = self.names[0]
        if value != value:
            raise InputError(f"{name} nan is no number")
        low, high = self.least, self.most
        if (low is not None and value < low) or (high is not None and value > high):
            within = [f"≥ {low:g}"] if low is not None else []
            within += [f"≤ {high:g}"] if high is not None else []
            found = f"{value:g}" if isinstance(value, float) else _short(str(value))
            raise InputError(f"{name} {found}", expected=", ".join(within), found=found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Generic[R_co]):
    """Arguments of a verb.

    Parameters
    ----------
    progress
        Called as the verb proceeds, after each tensor; an exception from it cancels the verb.
    """

    progress: Annotated[Callable[[Any], None] | None, Option(hidden=True)] = dataclasses.field(
        default=None, compare=False, repr=False
    )

    COMMAND: ClassVar[str] = ""
    """Name of the verb, if not derived from the class's."""
    EXAMPLES: ClassVar[tuple[str, ...]] = ()
    """Typical commands for the help."""
    INTERRUPTED: ClassVar[str] = "the archive is as it was"
    """State after Ctrl-C, for the message."""
    THREADED: ClassVar[bool] = False
    """Whether the verb's threads may take all processors of the command's process."""
    UNIT: ClassVar[str] = "bytes"
    """Unit of progress: bytes, steps or trials."""
    STAGE: ClassVar[str] = ""
    """For a verb with several stages, the stage whose progress is shown."""
    REPORTS: ClassVar[bool] = True
    """Whether the verb has a report, and options to print it."""

    def __post_init__(self) -> None:
        check_fields(self)

    def perform(self) -> R_co:
        """Perform the request and return its report."""
        raise NotImplementedError

    def meant(self) -> Request[Any]:
        """Return the request to perform: this one, or the one in the file that it names."""
        return self

    @property
    def events(self) -> str:
        """The progress stage whose details are printed as lines on stderr; empty for none."""
        return ""

    @classmethod
    def verb(cls) -> str:
        """Return the verb's name.

        Examples
        --------
        >>> class MakeCoffee(Request): ...
        >>> MakeCoffee.verb()
        'make-coffee'
        """
        return cls.COMMAND or re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the class's docstring."""
        return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON data; runs and archives as paths."""
        found = ((field.name, field.default, getattr(self, field.name)) for field in fields_of(type(self)))
        return {
            name: _plain(value) for name, default, value in found if value is not default and value != default
        }

    def exclude(self, option: str, names: Iterable[str]) -> None:
        """Refuse fields that an option excludes.

        Raises
        ------
        InputError
            One of the fields is given.
        """
        given = self.given()
        for field in fields_of(type(self)):
            if field.name in given and field.name in names:
                raise InputError(
                    f"{option} and {field.names[0]} exclude each other", remedy="leave out one of them"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the document that `request_from_json` reads: the verb, and the given fields.

        Examples
        --------
        >>> request_from_json({"verb": "restore", "fields": {"archive": "a", "output": "b"}}).to_json()
        {'verb': 'restore', 'fields': {'archive': 'a', 'output': 'b'}}
        """
        fields = {name: "inf" if value == math.inf else value for name, value in self.given().items()}
        return {"verb": self.verb(), "fields": fields}

    def words(self) -> list[str]:
        """Return the command line of the request, as words after ``inshrink``."""
        given = self.given()
        words = (_words(field, given[field.name]) for field in fields_of(type(self)) if field.name in given)
        return [self.verb(), *(word for some in words for word in some)]


def check_fields(request: Any) -> None:
    """Refuse numbers out of range, and fields without the field that they need.

    A single value of a repeatable field is replaced by a tuple.

    Raises
    ------
    InputError
        A number is out of range or NaN, or a required field is missing.
    """
    for field in fields_of(type(request)):
        value = getattr(request, field.name)
        field.check(value)
        if field.needs and value not in (field.default, []) and not getattr(request, field.needs):
            needed = f"--{field.needs.replace('_', '-')}"
            raise InputError(f"{field.names[0]} goes with {needed}", remedy=f"add {needed}")
        if field.many:
            object.__setattr__(request, field.name, listed(value))


def listed(value: Any) -> Any:
    """Return a value of a repeatable field; a single value as a tuple of one.

    Examples
    --------
    >>> listed(3), listed("a"), listed(["a", "b"]), listed(None)
    ((3,), ('a',), ['a', 'b'], None)
    """
    single = isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable)
    return (value,) if single and value is not None else value


def _words(field: Option, value: Any) -> list[str]:
    name, many = field.names[0], field.many
    values = value if isinstance(value, list) else [value]
    if field.by_place:
        # Without "./" a name that begins with a hyphen would be parsed as an option.
        return [f"./{text}" if text.startswith("-") else text for text in map(str, values)]
    if isinstance(value, bool):
        return [name if value else field.off]
    if isinstance(value, Mapping):
        name = "--set"
        values = [
            f"{key}={item if isinstance(item, str) else json.dumps(item)}" for key, item in value.items()
        ]
    elif isinstance(value, list) and not many:
        return [name, *map(str, value)]
    elif many and all(type(item) is int for item in values):
        values = [",".join(map(str, values))]
    pairs = ([f"{name}={text}"] if text.startswith("-") else [name, text] for text in map(str, values))
    return [word for pair in pairs for word in pair]


def _plain(value: Any) -> Any:
    """Return a value as JSON data."""
    if hasattr(value, "path"):
        return os.fspath(value.path)
    if hasattr(value, "settings"):
        value = value.settings()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str) and isinstance(value, Iterable):
        return [_plain(item) for item in value]
    return plain_value(value)


def _sections(cls: type) -> dict[str, str]:
    """Return the sections of a class's docstring by heading; the text before them under ''."""
    first, *rest = _HEADING.split(inspect.cleandoc(cls.__dict__.get("__doc__") or ""))
    bodies = (body.strip("\n") for body in rest[1::2])
    return {"": first.strip(), **dict(zip(rest[::2], bodies, strict=True))}


def fields_of(request: type) -> tuple[Option, ...]:
    """Return the fields of a request or a group: positional ones, then its own, then those of its groups."""
    return tuple(field for field in _known_fields(request) if not field.hidden)


@cache
def _known_fields(request: type) -> tuple[Option, ...]:
    owners = [item for item in request.__mro__ if dataclasses.is_dataclass(item)]
    place = {name: i for i, item in enumerate(owners) for name in inspect.get_annotations(item)}
    hints, texts, found = get_type_hints(request, include_extras=True), dict[str, str](), []
    for owner in reversed(owners):
        names: list[str] = []
        for line in _sections(owner).get("Parameters", "").splitlines():
            if line and not line.startswith(" "):
                names = [name.strip() for name in line.split(",")]
                texts |= dict.fromkeys(names, "")
            else:
                texts |= {name: f"{texts[name]} {line.strip()}".strip() for name in names}
    for field in sorted(
        dataclasses.fields(request), key=lambda item: (item.kw_only, item.kw_only and place[item.name])
    ):
        hint = hints[field.name]
        hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        option = next((note for note in notes if isinstance(note, Option)), Option())
        found.append(
            dataclasses.replace(
                option,
                names=option.names or (f"--{field.name.replace('_', '-')}",),
                text=texts.get(field.name, ""),
                name=field.name,
                type=hint,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                by_place=not field.kw_only and not option.names,
            )
        )
    return tuple(found)


def _docstring(request: type) -> str:
    """Return a request's docstring, with the parameters of all its groups."""
    sections = _sections(request)
    sections["Parameters"] = "\n".join(f"{field.name}\n    {field.text}" for field in _known_fields(request))
    head = sections.pop("")
    return "\n\n".join([head, *(f"{name}\n{'-' * len(name)}\n{body}" for name, body in sections.items())])


_CALLS: dict[type, Callable[..., Any]] = {}


def python_call(request: Callable[P, Request[R]]) -> Callable[P, R]:
    """Return a verb as a function of the fields of its request; the same function at every call."""

    def call(*args: P.args, **fields: P.kwargs) -> R:
        return request(*args, **fields).perform()

    cls = cast("type[Request[R]]", request)
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
    call.__name__ = call.__qualname__ = name
    call.__module__, call.__doc__ = cls.__module__, _docstring(cls)
    signature = inspect.signature(cls).replace(return_annotation=_report_of(cls))
    call.__signature__ = signature  # type: ignore[attr-defined]
    return _CALLS.setdefault(cls, call)


def _report_of(request: type) -> Any:
    """Return the report of a request, as a class or as its name."""
    for base in getattr(request, "__orig_bases__", ()):
        if issubclass(get_origin(base) or object, Request):
            report = get_args(base)[0]
            return getattr(report, "__forward_arg__", report)
    return inspect.Signature.empty


def request_of(verb: str) -> type[Request[Any]] | None:
    """Return the request of a verb, importing only its module; None for an unknown verb.

    Raises
    ------
    InputError
        The registered object cannot be loaded, or is no request.

    Examples
    --------
    >>> request_of("restore").__name__, request_of("none-such")
    ('Restore', None)
    """
    point = plugin(VERBS, verb)
    if point is None:
        return None
    reason = "is no request (inshrink_core.request.Request)"
    try:
        found = point.load()
    except Exception as error:
        found, reason = error, f"cannot be loaded ({type(error).__name__}: {error})"
    if isinstance(found, type) and issubclass(found, Request):
        return found
    raise InputError(
        f"the verb '{point.name}' {reason}",
        where=point.value,
        remedy="update or remove the package that registers it",
    ) from (found if isinstance(found, Exception) else None)


MAX_REQUEST_BYTES = 1_000_000
"""Largest document that is read, bytes: 10,000 steps and as many overrides need less."""

_DEEPEST = 16
"""Largest nesting of lists and objects in a field."""

_LONGEST = 60
"""Most characters of an untrusted text in an error."""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    verb: str
    fields: dict[str, Any]


def read_document(content: bytes, where: str = "") -> Request[Any]:
    """Return the request in a file, which is untrusted.

    Raises
    ------
    InputError
        The file is too large, is no JSON, or `request_from_json` refuses it.
    """
    if len(content) > MAX_REQUEST_BYTES:
        raise InputError(
            "the request is too large", where=where, expected=f"at most {MAX_REQUEST_BYTES:,} bytes"
        )
    try:
        # Not msgspec.json: file names may contain lone surrogates.
        document = json.loads(content, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"the request is not a JSON document: {reason}", where=where) from error
    return request_from_json(document, where)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number; infinity is written as 'inf'")


def request_from_json(document: Any, where: str = "") -> Request[Any]:
    """Return the request in a document, which is untrusted, without performing it.

    Parameters
    ----------
    document
        ``verb``, the name of a registered verb; ``fields`` by name, as JSON data of the types in the request,
        with infinity as ``inf``.
    where
        The document's file, for errors.

    Raises
    ------
    InputError
        The verb or a field is unknown, a field is missing, or a value has another type or is out of range.

    Examples
    --------
    >>> request_from_json({"verb": "restore", "fields": {"archive": "a", "output": "b", "step": 4}})
    Traceback (most recent call last):
        ...
    inshrink_core.errors.InputError: restore has no field 'step'; did you mean 'steps'?
    """

    def refuse(what: str, unknown: str = "", known: Iterable[str] = ()) -> InputError:
        close = difflib.get_close_matches(unknown[:_LONGEST], list(known), n=1)
        meant = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}" if known else ""
        return InputError(what + (f" '{_short(unknown)}'" if unknown else ""), where=where, remedy=meant)

    try:
        asked = msgspec.convert(document, _Document)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise refuse(f"this is no request: {_short(str(error))}") from error
    verb, request = asked.verb, request_of(asked.verb)
    if request is None or not request.REPORTS or request.meant is not Request.meant:
        raise refuse("no request is of the verb", verb, [name for name in plugins(VERBS) if name != verb])
    fields, read = {field.name: field for field in fields_of(request)}, dict[str, Any]()
    for name, value in asked.fields.items():
        if name not in fields:
            raise refuse(f"{verb} has no field", name, fields)
        if not _is_plain(value, _DEEPEST):
            raise refuse(
                f"{verb}: {name} cannot be used: it is nested too deeply, infinite, or not valid text"
            )
        try:
            hint = fields[name].type
            value = math.inf if value == "inf" and float in (hint, *get_args(hint)) else value
            converted = msgspec.convert(value, hint)
            read[name] = tuple(converted) if isinstance(converted, list) else converted
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise refuse(f"{verb}: {name} is of another type: {_short(str(error))}") from error
    for name, field in fields.items():
        if name not in read and field.default is inspect.Parameter.empty:
            raise refuse(f"{verb} needs '{name}'")
    return request(**read)


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a value is finite and not too deep, and its texts are valid file names."""
    if isinstance(value, str):
        try:
            return b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            return False
    if not isinstance(value, dict | list):
        return not isinstance(value, float) or math.isfinite(value)
    parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
    return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)


def _short(text: str) -> str:
    """Return an untrusted text as one short line."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
