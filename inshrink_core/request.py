"""What a verb is asked: one frozen dataclass, from which everything else that says so is derived.

A field of a request has its type, default and range in the class, and its explanation in the ``Parameters``
of the docstring: nowhere else. The command line, the Python call, a job's JSON and the lines that the
explorer shows follow from these. Fields that several verbs have are dataclasses of their own, which requests
inherit.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from inshrink_core.errors import InputError
from inshrink_core.plugins import VERBS, plugin, plugins

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from inshrink_core.report import Report

__all__ = [
    "MAX_REQUEST_BYTES",
    "Field",
    "Option",
    "Request",
    "Shown",
    "Watcher",
    "fields_of",
    "python_call",
    "read_document",
    "request_from_json",
    "request_of",
]

P = ParamSpec("P")
R = TypeVar("R", bound="Report | None")
R_co = TypeVar("R_co", bound="Report | None", covariant=True)

_HEADING = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line has to know of a field, beside its type and its default.

    Parameters
    ----------
    names
        Names of the option, the one to show first; by default the field's. A field that is not keyword-only
        and has no names is an argument, given by its place.
    metavar
        What its value is called.
    least, most
        The range of a number, both ends included.
    many
        Whether it may be given several times; of arguments given by their place, the last one alone.
    read
        Makes the value of a text. Otherwise a field with a `metavar` whose type is no plain one is a text.
    off
        Name of the option that switches it off.
    entries
        Name of the option that gives a single entry of it, where it is a mapping.
    hidden
        Whether Python alone can give it.
    """

    names: tuple[str, ...] = ()
    metavar: str = ""
    least: float | None = None
    most: float | None = None
    many: bool = False
    read: Callable[[str], Any] | None = None
    off: str = ""
    entries: str = ""
    hidden: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse what is no number where one is needed, and a number that is out of range.

        Raises
        ------
        InputError
            It is.
        """
        if type(value) in (int, float) and not (
            (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        ):
            within = [f"≥ {self.least:g}"] if self.least is not None else []
            within += [f"≤ {self.most:g}"] if self.most is not None else []
            raise InputError(f"{name} {value:g}", expected=", ".join(within), found=f"{value:g}")
        if type(value) is float and value != value:
            raise InputError(f"{name} nan is no number")


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a request.

    Parameters
    ----------
    name, type, default
        As the class says; no default is `inspect.Parameter.empty`.
    option
        What the command line has to know of it.
    text
        Its explanation, in one line.
    by_place
        Whether it is given by its place, not by an option's name.
    """

    name: str
    type: Any
    default: Any
    option: Option
    text: str
    by_place: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the option; the name that is shown first."""
        return self.option.names or (f"--{self.name.replace('_', '-')}",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """How far a verb has come, as the command line shows it.

    Parameters
    ----------
    stage
        Of a verb with several stages, the one that is shown.
    in_bytes
        Whether progress counts bytes, or steps.
    draw
        Makes what `rich` shows in place of a bar, of every event so far; trials are counted then.
    """

    stage: str | None = None
    in_bytes: bool = True
    draw: Callable[[Sequence[Any]], Any] | None = None


class Watcher(Protocol):
    """Shows on stderr how far a verb has come."""

    @property
    def hidden(self) -> bool:
        """Whether nothing is for people."""

    def progress(self, verb: str, shown: Shown) -> AbstractContextManager[Callable[[Any], None] | None]:
        """Show how far a verb has come; yields what to call, or None where no one watches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Generic[R_co]):
    """What a verb is asked to do.

    Parameters
    ----------
    progress
        Called as the verb proceeds, after each tensor; raising cancels.
    """

    progress: Annotated[Callable[[Any], None] | None, Option(hidden=True)] = dataclasses.field(
        default=None, compare=False, repr=False
    )

    COMMAND: ClassVar[str] = ""
    """What the command line calls it where that is not the class's name: a verb and the option of a mode."""
    MODES: ClassVar[tuple[str, ...]] = ()
    """Requests of the same verb that an option asks for instead of this one, as ``MODULE:CLASS``."""
    EXAMPLES: ClassVar[tuple[str, ...]] = ()
    """Commands that a user would write."""
    INTERRUPTED: ClassVar[str] = "the archive is as it was"
    """What Ctrl-C leaves behind."""
    THREADED: ClassVar[bool] = False
    """Whether its own threads take all processors of a process that is there for it alone."""
    SHOWN: ClassVar[Shown] = Shown()
    REPORTS: ClassVar[bool] = True
    """Whether there is a report, and options that say how it is printed."""

    def __post_init__(self) -> None:
        check_fields(self)

    def perform(self) -> R_co:
        """Do it, and report."""
        raise NotImplementedError

    def meant(self) -> Request[Any]:
        """Return what is to be done: this, or what a file of this name asks for."""
        return self

    @contextmanager
    def watched(self, out: Watcher) -> Iterator[Self]:
        """Yield the same request, whose progress the command line shows."""
        with out.progress(self.verb(), self.SHOWN) as progress:
            yield dataclasses.replace(self, progress=progress)

    @classmethod
    def verb(cls) -> str:
        """Return the verb's name.

        Examples
        --------
        >>> class MakeCoffee(Request): ...
        >>> MakeCoffee.verb()
        'make-coffee'
        """
        return cls.COMMAND.partition(" ")[0] or _kebab(cls.__name__)

    @classmethod
    def modes(cls) -> dict[str, type[Request[Any]]]:
        """Return the modes of the verb by the option that asks for each."""
        modes: Iterator[type[Request[Any]]] = map(pkgutil.resolve_name, cls.MODES)
        return {mode.COMMAND.partition(" ")[2]: mode for mode in modes}

    @classmethod
    def summary(cls) -> str:
        """Return the first line of its docstring."""
        return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]

    def given(self) -> dict[str, Any]:
        """Return the fields that are not as by default, as JSON has them; runs and archives as paths."""
        found = ((field.name, field.default, getattr(self, field.name)) for field in fields_of(type(self)))
        return {
            name: _plain(value) for name, default, value in found if value is not default and value != default
        }

    def to_json(self) -> dict[str, Any]:
        """Return the document that `request_from_json` reads: the verb, its mode, and what is given.

        Examples
        --------
        >>> request_from_json({"verb": "restore", "fields": {"archive": "a", "output": "b"}}).to_json()
        {'verb': 'restore', 'fields': {'archive': 'a', 'output': 'b'}}
        """
        mode = self.COMMAND.partition(" ")[2].removeprefix("--")
        fields = {name: _finite(value) for name, value in self.given().items()}
        return {"verb": self.verb(), **({"mode": mode} if mode else {}), "fields": fields}

    def words(self) -> list[str]:
        """Return what one writes after ``inshrink`` to ask for the same."""
        given, words = self.given(), [self.verb()]
        mode = self.COMMAND.partition(" ")[2]
        for field in fields_of(type(self)):
            if field.name in given or mode in field.names:
                words += _words(field, given.get(field.name, field.default))
        return words if not mode or mode in words else [words[0], mode, *words[1:]]


def check_fields(request: Any) -> None:
    """Refuse numbers that are out of range, and make a tuple of a single value where several may be given.

    Raises
    ------
    InputError
        A number is out of range, or none.
    """
    for field in fields_of(type(request)):
        value = getattr(request, field.name)
        field.option.check(field.names[0], value)
        if field.option.many:
            object.__setattr__(request, field.name, listed(value))


def listed(value: Any) -> Any:
    """Return a value where several may be given: a single one as a tuple of it.

    Examples
    --------
    >>> listed(3), listed("a"), listed(["a", "b"]), listed(None)
    ((3,), ('a',), ['a', 'b'], None)
    """
    single = isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable)
    return (value,) if single and value is not None else value


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def _words(field: Field, value: Any) -> list[str]:
    if field.by_place:
        texts = map(str, value if isinstance(value, list) else [value])
        # A name that begins with a hyphen would be read as an option.
        return [f"./{text}" if text.startswith("-") else text for text in texts]
    if isinstance(value, bool):
        return [field.names[0] if value else field.option.off]
    name = field.names[0]
    if isinstance(value, Mapping):
        name = field.option.entries or name
        values = [f"{key}={one if isinstance(one, str) else json.dumps(one)}" for key, one in value.items()]
    elif isinstance(value, list) and field.option.many:
        integers = all(type(one) is int for one in value)
        values = [",".join(map(str, value))] if integers else [str(one) for one in value]
    elif isinstance(value, list):
        return [name, *map(str, value)]
    else:
        values = [str(value)]
    pairs = ([f"{name}={text}"] if text.startswith("-") else [name, text] for text in values)
    return [word for pair in pairs for word in pair]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping) and not hasattr(value, "path"):
        return {str(key): _plain(one) for key, one in value.items()}
    if hasattr(value, "path"):
        return os.fspath(value.path)
    if hasattr(value, "settings"):
        return _plain(value.settings())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str) and isinstance(value, Iterable):
        return [_plain(one) for one in value]
    return value


def _sections(cls: type) -> dict[str, str]:
    """Return the sections of a class's own docstring by heading; the text before them under ''."""
    first, *rest = _HEADING.split(inspect.cleandoc(cls.__dict__.get("__doc__") or ""))
    bodies = (body.strip("\n") for body in rest[1::2])
    return {"": first.strip(), **dict(zip(rest[::2], bodies, strict=True))}


def _owners(request: type) -> list[type]:
    """Return a request and the dataclasses that it inherits fields from, in the order a reader wants."""
    return [one for one in request.__mro__ if dataclasses.is_dataclass(one)]


def _explanations(request: type) -> dict[str, str]:
    """Return what the docstrings say of each field, in one line each."""
    found: dict[str, list[str]] = {}
    for one in _owners(request):
        names: list[str] = []
        for line in _sections(one).get("Parameters", "").splitlines():
            if line and not line.startswith(" "):
                names = [name.strip() for name in line.split(",")]
            for name in names if line.startswith(" ") else ():
                found.setdefault(name, []).append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


_FIELDS: dict[type, tuple[Field, ...]] = {}


def fields_of(request: type) -> tuple[Field, ...]:
    """Return the fields of a request, or of a group: by place, then its own, then those of its groups."""
    if request not in _FIELDS:
        _FIELDS[request] = tuple(_fields_of(request))
    return _FIELDS[request]


def _fields_of(request: type) -> Iterator[Field]:
    hints, texts = get_type_hints(request, include_extras=True), _explanations(request)
    place = {name: i for i, one in enumerate(_owners(request)) for name in inspect.get_annotations(one)}
    for field in sorted(
        dataclasses.fields(request), key=lambda one: (one.kw_only, place[one.name] if one.kw_only else 0)
    ):
        hint, *notes = (
            get_args(hints[field.name])
            if get_origin(hints[field.name]) is Annotated
            else (hints[field.name],)
        )
        option = Option()
        for note in notes:
            if isinstance(note, Option):
                said = {one.name: (getattr(note, one.name), one.default) for one in dataclasses.fields(note)}
                option = dataclasses.replace(option, **{k: v for k, (v, by) in said.items() if v != by})
        if option.hidden:
            continue
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        by_place = not field.kw_only and not option.names
        yield Field(field.name, hint, default, option, texts.get(field.name, ""), by_place)


def _docstring(request: type) -> str:
    """Return a request's docstring, with the parameters of all its groups."""
    sections = _sections(request)
    parts = (_sections(one).get("Parameters") for one in _owners(request))
    sections["Parameters"] = "\n".join(part for part in parts if part)
    head = sections.pop("")
    return "\n\n".join([head, *(f"{name}\n{'-' * len(name)}\n{body}" for name, body in sections.items())])


_CALLS: dict[type, Callable[..., Any]] = {}


def python_call(request: Callable[P, Request[R]]) -> Callable[P, R]:
    """Return a verb as a function of the fields of its request: always the same one."""

    def call(*args: P.args, **fields: P.kwargs) -> R:
        return request(*args, **fields).perform()

    cls = cast("type[Request[R]]", request)
    call.__name__ = call.__qualname__ = _kebab(cls.__name__).replace("-", "_")
    call.__module__, call.__doc__ = cls.__module__, _docstring(cls)
    signature = inspect.signature(cls).replace(return_annotation=_report_of(cls))
    call.__signature__ = signature  # type: ignore[attr-defined]
    return _CALLS.setdefault(cls, call)


def _report_of(request: type) -> Any:
    """Return what a request says that it reports, a class or its name."""
    for base in getattr(request, "__orig_bases__", ()):
        if issubclass(get_origin(base) or object, Request):
            report = get_args(base)[0]
            return getattr(report, "__forward_arg__", report)
    return inspect.Signature.empty


def request_of(verb: str) -> type[Request[Any]] | None:
    """Return the request of a verb, whose module alone is imported; None where there is no such verb.

    Raises
    ------
    InputError
        What is registered under its name cannot be loaded, or is no request.

    Examples
    --------
    >>> request_of("restore").__name__, request_of("none-such")
    ('Restore', None)
    """
    point = plugin(VERBS, verb)
    if point is None:
        return None
    try:
        found = point.load()
    except Exception as error:
        reason = f"cannot be loaded ({type(error).__name__}: {error})"
        raise _no_verb(point, reason) from error
    if not (isinstance(found, type) and issubclass(found, Request)):
        raise _no_verb(point, "is no request (inshrink_core.request.Request)")
    return found


def _no_verb(point: EntryPoint, reason: str) -> InputError:
    return InputError(
        f"the verb '{point.name}' {reason}",
        where=point.value,
        remedy="update or remove the package that registers it",
    )


MAX_REQUEST_BYTES = 1_000_000
"""A larger document is not read: one of 10,000 steps and as many overrides takes less."""

_DEEPEST = 16
"""Lists in lists that a document may have."""


def read_document(content: bytes, where: str = "") -> Request[Any]:
    """Return the request that a file says, which is untrusted.

    Raises
    ------
    InputError
        It is too large, is no JSON, or is not what `request_from_json` takes.
    """
    if len(content) > MAX_REQUEST_BYTES:
        raise InputError(
            "the request is too large", where=where, expected=f"at most {MAX_REQUEST_BYTES:,} bytes"
        )
    try:
        document = json.loads(content, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"the request is no JSON document: {reason}", where=where) from error
    try:
        return request_from_json(document)
    except InputError as error:
        told = {"expected": error.expected, "found": error.found, "remedy": error.remedy}
        raise InputError(error.what, where=error.where or where, **told) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number; infinity is written as 'inf'")


def request_from_json(document: Any) -> Request[Any]:
    """Return the request that a document says; it is untrusted, and nothing is performed.

    Parameters
    ----------
    document
        ``verb``, the name of a registered verb; ``mode``, for one that an option switches to, as ``watch``;
        ``fields``, by name: JSON data of the types that the request has, infinity as ``inf``.

    Raises
    ------
    InputError
        There is no such verb, mode or field, one is missing, or a value is of another type or out of range.

    Examples
    --------
    >>> request_from_json({"verb": "restore", "fields": {"archive": "a", "output": "b", "step": 4}})
    Traceback (most recent call last):
        ...
    inshrink_core.errors.InputError: restore has no field 'step'; did you mean 'steps'?
    """
    if not isinstance(document, dict) or not {"verb", "fields"} <= set(document) <= {
        "verb",
        "mode",
        "fields",
    }:
        raise InputError("this is no request", remedy="give an object of verb, fields and, where asked, mode")
    verb, mode, given = document["verb"], document.get("mode", ""), document["fields"]
    if not (isinstance(verb, str) and isinstance(mode, str) and isinstance(given, dict)):
        raise InputError("this is no request", expected="two texts and an object of fields")
    request = request_of(verb)
    if request is None or not request.REPORTS or request.meant is not Request.meant:
        others = [name for name in plugins(VERBS) if name != verb]
        raise InputError(f"no request is of the verb '{_short(verb)}'", remedy=_meant(verb, others))
    if mode:
        modes = {flag.removeprefix("--"): one for flag, one in request.modes().items()}
        if mode not in modes:
            raise InputError(f"{verb} has no mode '{_short(mode)}'", remedy=_meant(mode, modes))
        request = modes[mode]
    fields = {field.name: field for field in fields_of(request)}
    unknown = next((name for name in given if name not in fields), None)
    if unknown is not None:
        raise InputError(f"{verb} has no field '{_short(unknown)}'", remedy=_meant(unknown, fields))
    for name, field in fields.items():
        if name not in given and field.default is inspect.Parameter.empty:
            raise InputError(f"{verb} needs '{name}'", remedy="add it to the fields")
    return request(**{name: _value(f"{verb}: {name}", fields[name].type, one) for name, one in given.items()})


def _value(name: str, hint: Any, value: Any) -> Any:
    """Return a value of a document as a field of this type has it, lists as tuples."""
    if not _is_plain(value):
        raise InputError(f"{name} cannot be used", expected="texts of a file system, lists that are not deep")
    for one in _alternatives(hint):
        read = _as(one, value)
        if read is not _NOTHING:
            return read
    raise InputError(f"{name} is of another type", found=_short(json.dumps(value)))


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value is not deep, and its texts can be names of files."""
    if isinstance(value, str):
        try:
            return b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return depth < _DEEPEST and all(_is_plain(one, depth + 1) for pair in value.items() for one in pair)
    return not isinstance(value, list) or (
        depth < _DEEPEST and all(_is_plain(one, depth + 1) for one in value)
    )


_NOTHING = object()


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _as(hint: Any, value: Any) -> Any:
    """Return a JSON value as this type has it; `_NOTHING` where it has none such."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint in (None, type(None)) or value is None:
        return value if hint in (None, type(None), Any) and value is None else _NOTHING
    if hint in (Any, str) or (origin is os.PathLike):
        return value if isinstance(value, str) else _NOTHING
    if hint in (bool, int):
        return value if type(value) is hint else _NOTHING
    if hint is float:
        number = math.inf if value == "inf" else value
        return _NOTHING if type(number) not in (int, float) else _float(number)
    if not isinstance(origin, type):
        return _NOTHING
    if isinstance(value, dict):
        return value if issubclass(Mapping, origin) or origin is dict else _NOTHING
    if not isinstance(value, list) or not (issubclass(origin, tuple) or origin in _LISTS):
        return _NOTHING
    of = [one for one in arguments if one is not Ellipsis]
    if origin is tuple and Ellipsis not in arguments and len(value) != len(of):
        return _NOTHING
    fixed = origin is tuple and Ellipsis not in arguments
    read = [
        next(
            (r for r in (_as(h, one) for h in _alternatives(of[i if fixed else 0])) if r is not _NOTHING),
            _NOTHING,
        )
        for i, one in enumerate(value)
    ]
    return _NOTHING if _NOTHING in read else tuple(read)


_LISTS = (Sequence, Iterable, Collection, list)


def _float(number: float) -> Any:
    try:
        return float(number)
    except OverflowError:
        return _NOTHING


def _finite(value: Any) -> Any:
    """Return a value as strict JSON has it."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _meant(text: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(text[:_LONGEST], list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"


_LONGEST = 60


def _short(text: str) -> str:
    """Return what a stranger has written in one short line."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
