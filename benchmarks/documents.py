"""The JSON documents: tables of their keys for docs/json.md, and docs/documents.schema.json.

`benchmarks.reference` writes both, from the types and docstrings of reports. A key is an attribute, which
*Parameters* of its class or the docstring of its property explains. If `to_json` or a property builds an
object by itself, *Returns* of its docstring lists the keys, each with its type.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import get_annotations
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import inshrink_core.analysis.profile  # noqa: F401 - types that reports name for type checkers alone
from inshrink_core.cli import output
from inshrink_core.cli.application import known_verbs
from inshrink_core.evaluate import Comparison
from inshrink_core.report import Report
from inshrink_core.request import Request, fields_of, request_of
from inshrink_core.verbs.evaluate import EvaluatorReport
from inshrink_core.verbs.shared.compressing import CompressReport
from inshrink_core.verbs.shared.watch import WatchReport
from inshrink_lab.losing import PartialRehearsal

DOCS = Path(__file__).parents[1] / "docs"
PROJECT = ("inshrink_core", "inshrink_lab")
PLAIN = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}

ALSO: dict[str, tuple[type[Report], ...]] = {
    "compare": (Comparison,),
    "compress": (WatchReport,),
    "evaluate": (EvaluatorReport,),
}
"""Reports of verbs that an option makes do something else, or that a report contains as its document."""

Schema = dict[str, Any]


class Row(NamedTuple):
    """A key of a document.

    Parameters
    ----------
    kind
        Its type: ``int``, ``[int]`` for a list, ``{int}`` for an object with any names; ``?`` allows null.
    meaning
        The explanation, in Markdown.
    """

    kind: str
    meaning: str


Rows = dict[str, Row]
"""Rows by key: in a key, ``[]`` is each element of a list and ``{}`` each value of an object."""


def requests() -> dict[str, type[Request[Any]]]:
    """Return the requests of this project by verb, as `inshrink --help` orders them."""
    found = ((verb, request_of(verb)) for verb in known_verbs())
    return {verb: request for verb, request in found if request is not None}


def reports_of(request: type[Request[Any]]) -> list[type[Report]]:
    """Return the reports that a request may make, by the annotation of its `perform`."""
    # Rehearsals of partial failures import the others, which name them for type checkers alone.
    hint = get_type_hints(
        request.perform, localns={"PartialRehearsal": PartialRehearsal, "CompressReport": CompressReport}
    )["return"]
    found = [item for item in get_args(hint) or (hint,) if item is not NoneType]
    return [*found, *ALSO.get(request.verb(), ())]


_SECTION = re.compile(r"^(\w[\w ]*)\n-+\n((?:.*\n?)*?)(?=^\w[\w ]*\n-+$|\Z)", re.MULTILINE)
_ENTRY = re.compile(r"^(\S.*)(?:\n|\Z)((?:(?: +.*)?\n?)*)", re.MULTILINE)


@cache
def _documented(thing: Any, *sections: str) -> dict[str, tuple[str, str]]:
    """Return the names that sections of a docstring explain, each with its type (or "") and the text."""
    found: dict[str, tuple[str, str]] = {}
    for title, body in _SECTION.findall(inspect.getdoc(thing) or ""):
        for head, text in _ENTRY.findall(body) if title in sections else ():
            names, _, kind = head.partition(" : ")
            found |= {name: (kind, " ".join(text.split())) for name in names.split(", ")}
    return found


def _parameters(cls: type) -> dict[str, tuple[str, str]]:
    """Return the attributes that the docstrings of a class and its bases explain."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        if base.__doc__ and "__doc__" in vars(base):
            found |= _documented(base, "Parameters", "Attributes")
    return found


@cache
def _classes() -> dict[str, type]:
    """Return the loaded classes of the project by name; modules import some for type checkers alone."""
    for request in requests().values():
        reports_of(request)  # loads what the request imports
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in PROJECT]
    lazy = [getattr(module, name) for module in modules for name in vars(module).get("__all__", ())]
    values = [*lazy, *(value for module in modules for value in vars(module).values())]
    return {value.__name__: value for value in values if isinstance(value, type)}


def _evaluated(module: str, annotation: Any) -> Any:
    """Return what an annotation or a name means in a module."""
    annotation = getattr(annotation, "__forward_arg__", annotation)
    known = ChainMap(vars(sys.modules[module]), _classes())
    return eval(annotation, {}, known) if isinstance(annotation, str) else annotation


def _hint(cls: type, name: str) -> Any:
    """Return the type of an attribute of a class."""
    member = getattr(cls, name, None)
    getter = member.fget if isinstance(member, property) else getattr(member, "func", None)
    if getter is not None:
        return _evaluated(getter.__module__, getter.__annotations__["return"])
    owner = next(item for item in cls.__mro__ if name in get_annotations(item))
    return _evaluated(owner.__module__, get_annotations(owner)[name])


class _Shape(NamedTuple):
    """A type: the brackets around the innermost type ("", "[]" or "{}"), this type, and where null is."""

    around: str
    inner: Any
    null_inside: bool = False
    null: bool = False


def _shape(hint: Any) -> _Shape:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        others = [item for item in parts if item is not NoneType]
        found = _shape(others[0]) if len(others) == 1 else _Shape("", Any)
        return found._replace(null=len(others) < len(parts))
    if origin in (tuple, list, Sequence):
        inner = _shape(parts[0])
        return _Shape("[]", inner.inner if not inner.around else object, inner.null)
    if origin in (dict, Mapping) and parts[1] is not Any:
        inner = _shape(parts[1])
        return _Shape("{}", inner.inner if not inner.around else object, inner.null)
    return _Shape("", dict if origin in (dict, Mapping) else hint)


def _kind(hint: Any) -> str:
    """Return an annotation as a type of a document: `int`, `[int]`, `{int}`, `object?`; empty if unknown."""
    around, inner, null_inside, null = _shape(hint)
    if get_origin(inner) is Literal:
        inner = type(get_args(inner)[0])
    if not isinstance(inner, type):
        return ""
    plain = next((name for name in PLAIN if inner.__name__ == name), "object")
    name = "str" if issubclass(inner, str | Path) else plain
    if around:
        return f"{around[0]}{_nullable(name, null_inside)}{around[1]}{'?' * null}"
    return _nullable(name, null)


def _nullable(kind: str, null: bool) -> str:
    return f"{kind}?" if null and kind != "float" and not kind.endswith("?") else kind


def rows_of(cls: type) -> Rows:
    """Return the keys of the document of a class."""
    own = vars(cls).get("to_json")
    if issubclass(cls, Report):
        paths = cls.document_paths() if is_certain(cls) else {}
    elif own is not None:
        paths = {}
    else:
        names = [item.name for item in fields(cls)] if is_dataclass(cls) else cls._fields  # type: ignore[attr-defined]
        paths = {name: name for name in names}
    found: Rows = {}
    for key, path in paths.items():
        found |= _member_rows(cls, key, path.split("."))
    returned = {} if own is None else _listed_rows(own)
    replaced = tuple(f"{key}{mark}" for key in returned if key in found for mark in ".[{")
    rows = {key: row for key, row in found.items() if not key.startswith(replaced)} | returned
    order = list(dict.fromkeys(_steps(key)[0] for key in rows))
    return dict(sorted(rows.items(), key=lambda row: order.index(_steps(row[0])[0])))


def is_certain(report: type[Report]) -> bool:
    """Return whether the document of a report always has the keys of its `document_paths`."""
    listed = "KEYS" in vars(report) or any(item.metadata for item in fields(report))  # type: ignore[arg-type]
    return listed or "to_json" not in vars(report)


def _member_rows(cls: type, key: str, path: Sequence[str]) -> Rows:
    """Return the rows of a key that a path of attributes leads to, and those within it."""
    name, *rest = path
    hint, (kind, text) = _hint(cls, name), _parameters(cls).get(name, ("", ""))
    member = getattr(cls, name, None)
    if not text and isinstance(member, property):
        text = (inspect.getdoc(member) or "").split("\n\n", 1)[0]
    if rest:
        around, inner, null, optional = _shape(hint)
        found = _member_rows(inner, key, rest)
        first = found.pop(key)
        if around:
            meaning = text if found else f"{text.rstrip('.')}: `{rest[-1]}`"
            first = Row(f"[{_nullable(first.kind, null)}]", _markdown(meaning))
        elif found:
            first = Row(first.kind, _markdown(text))
        first = first._replace(kind=_nullable(first.kind, optional))
        return {key: first} | {item.replace(key, key + around, 1): row for item, row in found.items()}
    returned = _listed_rows(member.fget) if isinstance(member, property) else {}
    inner = _shape(hint).inner
    documented = isinstance(inner, type) and (is_dataclass(inner) or hasattr(inner, "_fields"))
    return _row(key, kind or _kind(hint), text, returned or (rows_of(inner) if documented else {}))


def _row(key: str, kind: str, text: str, inside: Rows) -> Rows:
    if not kind or not text:
        raise ValueError(f"no docstring gives the {'meaning' if kind else 'type'} of the key {key}")
    around = {"[": "[]", "{": "{}"}.get(kind[0], "")
    return {key: Row(kind, _markdown(text))} | {f"{key}{around}.{name}": row for name, row in inside.items()}


def _listed_rows(function: Any, section: str = "Returns") -> Rows:
    """Return the rows that a section of a docstring lists.

    The name of a class as type adds its keys; a key that is an attribute of this class has its type and
    meaning, to which the text of the list is added.
    """
    found: Rows = {}
    for key, (kind, text) in _documented(function, section).items():
        name = kind.strip("[]{}?")
        if name in PLAIN or name == "object":
            found |= _row(key, kind, text, {})
        elif kind:
            cls = _evaluated(function.__module__, name)
            if (attribute := key.rpartition(".")[2]) in {*_parameters(cls), *vars(cls)}:
                row = _member_rows(cls, attribute, [attribute])[attribute]
                meaning = f"{row.meaning}. {_markdown(text)}" if text else row.meaning
                found[key] = Row(_nullable(row.kind, kind.endswith("?")), meaning)
            else:
                found |= _row(key, kind.replace(name, "object"), text, rows_of(cls))
    return found


def _markdown(text: str) -> str:
    """Return the text of a docstring as a cell of a table."""
    text = re.sub(r"`(?:inshrink_core|inshrink_lab)\.[\w.]*?(\w+)`", r"`\1`", text.replace("``", "`"))
    text = re.sub(r"\bNone\b", "`null`", text).replace("True", "`true`").replace("False", "`false`")
    text = re.sub(r"\s*\(docs/([\w/.#-]+)\)", r" ([more](\1))", text)
    return re.sub(r"(?<!\\)\|", r"\|", text).rstrip(".")


def error_rows() -> Rows:
    """Return the keys of ``error``."""
    inside = _listed_rows(output.error_document)
    return _row("error", "object", "Cause of a nonzero exit status", inside)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = (" | ".join(cells) for cells in (headings, *rows))
    return "\n".join([first, "|".join(["---"] * len(headings)), *others])


def _marked(key: str, kind: str) -> str:
    """Return a key with the marks of its type: ``[]``, ``{}`` and ``?``; the schema has the type."""
    around = {"[": "[]", "{": "{}"}.get(kind[0], "")
    return f"{key}{around}{'?' * (kind == 'float' or kind.endswith('?'))}"


def _key_table(rows: Rows) -> str:
    """Return a table of keys; neighbours of one type and meaning share a line."""
    groups = groupby(rows.items(), key=lambda item: item[1])
    lines = ((code(_marked(key, row.kind) for key, _ in group), row.meaning) for row, group in groups)
    return table(("key", "meaning"), lines)


def code(words: Iterable[str]) -> str:
    """Return words as code."""
    return ", ".join(f"`{word}`" for word in words)


def _renamed() -> Iterator[Sequence[str]]:
    """Yield fields of requests that differ from their option or argument, this, and the verbs."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for verb, request in requests().items():
        for field in fields_of(request) if verb != "run" else ():
            names = (field.metavar or field.name.upper(),) if field.by_place else field.names
            words = {name.lstrip("-").replace("-", "_").lower() for name in names}
            if field.name not in words:
                verbs.setdefault((field.name, names[0].replace("|", r"\|")), []).append(verb)
    return ((f"`{field}`", f"`{name}`", code(found)) for (field, name), found in verbs.items())


class _Unit(NamedTuple):
    """What a key means, wherever it is: its own name, type and meaning, and the keys within it."""

    name: str
    kind: str
    meaning: str
    within: tuple[tuple[str, Row], ...]


def _unit(rows: Rows, key: str) -> _Unit:
    starts, row = _starts(key), rows[key]
    inside = ((name.removeprefix(key), item) for name, item in rows.items() if name.startswith(starts))
    return _Unit(key.rpartition(".")[2], row.kind.rstrip("?"), row.meaning, tuple(inside))


def _starts(key: str) -> tuple[str, ...]:
    """Return how the keys within a key begin."""
    return tuple(f"{key}{around}." for around in ("", "[]", "{}"))


def common_keys(tables: Iterable[Rows]) -> dict[_Unit, str]:
    """Return the keys that several tables have, with their types; of several meanings, the most frequent."""
    found: dict[_Unit, list[str]] = {}
    for rows in tables:
        known: tuple[str, ...] = ()
        for key, row in rows.items():
            if not key.startswith(known):
                unit = _unit(rows, key)
                known += _starts(key) if unit in found else ()
                found.setdefault(unit, []).append(row.kind)
    several = sorted((unit for unit in found if len(found[unit]) > 1), key=lambda unit: len(found[unit]))
    chosen = {unit.name: unit for unit in several}
    return {chosen[name]: max(found[chosen[name]], key=len) for name in sorted(chosen)}


def _described(rows: Rows, common: Collection[_Unit], outermost: int = 1) -> str:
    """Return the table of a document's keys; of common ones from a depth on, only their names."""
    listed, also, hidden = Rows(), dict[str, list[str]](), tuple[str, ...]()
    for key, row in rows.items():
        unit = _unit(rows, key)
        if key.startswith(hidden):
            continue
        if unit in common and key.count(".") >= outermost:
            also.setdefault(key.rpartition(".")[0].rstrip("[]{}"), []).append(unit.name)
            hidden += _starts(key)
        else:
            listed[key] = row
    for key, names in also.items():
        if key:
            listed[key] = listed[key]._replace(meaning=f"{listed[key].meaning}; also {code(sorted(names))}")
    others = f"\n\nAlso {code(sorted(also['']))}." if "" in also else ""
    return (_key_table(listed) if listed else "") + others


def _common_table(common: Mapping[_Unit, str]) -> str:
    """Return the table of the common keys."""
    rows = Rows()
    for unit, kind in common.items():
        rows |= {unit.name: Row(kind, unit.meaning)} | {unit.name + rest: row for rest, row in unit.within}
    return _described(rows, common)


def reference() -> str:
    """Return the tables of docs/json.md."""
    progress = _listed_rows(output.shown_progress, "Notes")
    reporting = [verb for verb, request in requests().items() if request.REPORTS and verb != "run"]
    documents = {
        verb: [(report, rows_of(report)) for report in reports_of(requests()[verb])] for verb in reporting
    }
    common = common_keys(rows for found in documents.values() for _, rows in found)
    parts = ["## Requests\n", table(("field", "option or argument", "verbs"), _renamed())]
    parts += ["\n## Progress lines\n", _key_table(progress), "\n## Errors\n", _key_table(error_rows())]
    parts += ["\n## Common keys\n", _common_table(common)]
    for verb, found in documents.items():
        parts.append(f"\n## {verb}")
        for report, rows in found:
            summary = (inspect.getdoc(report) or "").split("\n\n", 1)[0]
            introduction = f"{' '.join(summary.split())}\n\n" if summary != f"Result of `{verb}`." else ""
            parts.append(f"\n{introduction}{_described(rows, common, 0)}")
    return "\n".join(parts)


def _steps(key: str) -> list[str]:
    """Split a key: ``frames[].bytes`` into ``frames``, ``[]``, ``bytes``."""
    return re.findall(r"[^.\[\]{}]+|\[\]|\{\}", key)


def typed(kind: str) -> Schema:
    """Return the schema of a type as the page has it: `int`, `[int]`, `{int}`, each with `?` for null."""
    if kind.endswith("?"):
        known = typed(kind[:-1])
        return known | {"type": [known["type"], "null"]}
    if kind[0] in "[{":
        inner = typed(kind[1:-1])
        array = {"type": "array", "items": inner}
        return array if kind[0] == "[" else {"type": "object", "additionalProperties": inner}
    return {"type": ["number", "null"] if kind == "float" else PLAIN.get(kind, kind)}


def _place(schema: Schema, path: Iterable[str]) -> Schema:
    """Return the place of a key in a schema; missing parts are made."""
    for name in path:
        if name in ("[]", "{}"):
            schema = schema.setdefault("items" if name == "[]" else "additionalProperties", {})
        else:
            schema = schema.setdefault("properties", {}).setdefault(name, {})
    return schema


def _schema(rows: Rows, required: Collection[str]) -> Schema:
    """Return the schema of an object, without other keys than these."""
    schema: Schema = {"type": "object", "properties": {}}
    for key, row in sorted(rows.items()):
        _place(schema, _steps(key)).update(typed(row.kind) | {"description": _bare(row.meaning)})
    _close(schema)
    return schema | {"required": sorted(required)}


def _bare(text: str) -> str:
    text = re.sub(r" \(\[more\]\([^)]*\)\)", "", text)
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "").replace("\\|", "|")


def _close(schema: Schema) -> None:
    """Allow no other keys than those that are known."""
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for item in inner:
        if isinstance(item, dict):
            _close(item)


def document_schemas(verb: str) -> Iterator[Schema]:
    """Yield the schema of each form of a verb's document, an error without a result last."""
    error = error_rows()
    for report in reports_of(requests()[verb]):
        yield _schema(rows_of(report) | error, report.document_paths() if is_certain(report) else ())
    yield _schema(error, ["error"])


def all_schemas() -> Schema:
    """Return the schema of every verb's document, under ``$defs``."""
    found: dict[str, Schema] = {}
    for verb, request in requests().items():
        if request.REPORTS and verb != "run":
            found[verb] = {"anyOf": list(document_schemas(verb))}
    found["run"] = {"anyOf": [{"$ref": f"#/$defs/{verb}"} for verb in found]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": found}
