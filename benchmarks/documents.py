"""The JSON Schema of what ``--json`` writes: docs/documents.schema.json, made by `benchmarks.reference`.

Types and required keys are those of the verbs' reports, and docs/json.md explains the keys. Where a report
makes a part of its document by itself, keys and types are those of the page.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from inshrink_core.report import Report
from inshrink_core.request import Request
from inshrink_core.verbs.evaluate import EvaluatorReport
from inshrink_core.verbs.modes.watch import WatchReport
from inshrink_lab.losing import PartialRehearsal

DOCS = Path(__file__).parents[1] / "docs"
PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}

Schema = dict[str, Any]


def reports_of(request: type[Request[Any]]) -> list[type[Report]]:
    """Return what a request may report, as its `perform` says."""
    # Rehearsals of partial failures import the others, which name them for type checkers alone.
    hint = get_type_hints(request.perform, localns={"PartialRehearsal": PartialRehearsal})["return"]
    return [item for item in get_args(hint) or (hint,) if item is not NoneType]


def _hint(cls: type, path: Sequence[str]) -> Any:
    """Return the type that a dotted path of attributes leads to; `Any` where nothing says."""
    if not path:
        return cls
    if get_origin(cls) in (Union, UnionType):
        hints = [_hint(item, path) for item in get_args(cls) if item is not NoneType]
        return hints[0] | None if len(hints) == 1 and hints[0] is not Any else Any
    if get_origin(cls) is tuple:
        inner = _hint(get_args(cls)[0], path)
        return Any if inner is Any else tuple[inner, ...]  # type: ignore[valid-type]
    found = getattr(cls, path[0], None)
    if isinstance(found, property):
        return _hint(_evaluated(found.fget, found.fget.__annotations__.get("return", Any)), path[1:])
    owner = next((item for item in getattr(cls, "__mro__", ()) if path[0] in get_annotations(item)), None)
    return _hint(_evaluated(owner, get_annotations(owner)[path[0]]) if owner else Any, path[1:])


def _evaluated(owner: Any, annotation: Any) -> Any:
    """Return what an annotation means; `Any` for a name that only type checkers know."""
    try:
        known = vars(sys.modules[owner.__module__])
        return eval(annotation, known) if isinstance(annotation, str) else annotation
    except (NameError, TypeError):
        return Any


def keys_of(cls: type) -> dict[str, Any] | None:
    """Return the keys of a class's document and the type of each; None where the class does not say."""
    given = "to_json" in vars(cls) and cls is not Report
    if issubclass(cls, Report):
        keys = {key: _hint(cls, path.split(".")) if path else Any for key, path in _paths(cls).items()}
        # What it writes by itself may stand in the place of a field.
        return {key: Any if given and not _is_plain(hint) else hint for key, hint in keys.items()}
    if given:
        return None
    names = [item.name for item in fields(cls)] if is_dataclass(cls) else getattr(cls, "_fields", None)
    return None if names is None else {name: _hint(cls, [name]) for name in names}


def _paths(cls: type[Report]) -> dict[str, str]:
    """Return the keys of a report's document, each with the attribute it shows; "" where it is computed."""
    owner = next((item for item in cls.__mro__ if "_document" in vars(item)), Report)
    if owner is Report:
        return cls.document_paths()
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(owner)["_document"])))
    paths = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                said = re.fullmatch(r"self\.(\w+(?:\.\w+)*)", ast.unparse(value))
                paths[str(ast.literal_eval(key))] = said[1] if said else ""
    return paths


def _is_plain(hint: Any) -> bool:
    parts = get_args(hint) or (hint,)
    return all(part in PLAIN or part is Ellipsis or (get_args(part) and _is_plain(part)) for part in parts)


def schema_of(hint: Any) -> Schema:
    """Return the schema of what `plain_value` makes of a value of a type; empty where nothing is certain."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return {"type": PLAIN[hint]} if hint is not float else {"type": ["number", "null"]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, UnionType):
        choices = [schema_of(item) for item in parts]
        return {"anyOf": choices} if all(choices) else {}
    if origin in (tuple, list, Sequence) and (len(parts) == 1 or parts[1:] == (Ellipsis,)):
        return {"type": "array", "items": schema_of(parts[0])}
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": {}}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(parts[1])}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [item.value for item in hint]}
    if isinstance(hint, type) and issubclass(hint, Path):
        return {"type": "string"}
    keys = keys_of(hint) if isinstance(hint, type) and hint is not object else None
    return (
        {} if keys is None else {"type": "object", "properties": {k: schema_of(v) for k, v in keys.items()}}
    )


def _either(item: Schema, other: Schema) -> Schema:
    return {"anyOf": [item, other]} if item and other else {}


def explained(verb: str, text: str) -> dict[str, tuple[str, str]]:
    """Return the keys of a verb's section of docs/json.md, each with its type and what it means.

    Keys that a line of the section names as shared are explained once, in the section of these.
    """
    found = _rows("Shared keys", text)
    shared = {}
    for line in re.findall(r"^.*\[[Ss]hared\]\(#shared-keys\).*$", _section(verb, text), re.MULTILINE):
        for key in re.findall(r"`([\w.\[\]{}]+)`", line):
            prefix, _, last = key.rpartition(".")
            for name in [name for name in found if _steps(name)[0] == last]:
                shared[f"{prefix}.{name}" if prefix else name] = found[name]
    return shared | _rows(verb, text)


def _section(name: str, text: str) -> str:
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return section[1] if section else ""


def _rows(name: str, text: str) -> dict[str, tuple[str, str]]:
    """Return the keys of the tables of a section."""
    rows = re.findall(r"^(`.+?`) \| `(\S+)` \| (.*)$", _section(name, text), re.MULTILINE)
    return {key: (kind, _bare(said)) for names, kind, said in rows for key in re.findall(r"`([^`]+)`", names)}


def _bare(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "").replace("\\|", "|")


def _places(schema: Schema, path: Sequence[str]) -> Iterator[Schema]:
    """Yield where a key of the page is in a schema; what is not there is made."""
    if not path:
        yield schema
        return
    name, *rest = path
    branches = [item for item in schema.get("anyOf", ()) if item.get("type") != "null"]
    if branches:
        for item in branches:
            yield from _places(item, path)
        return
    if name == "[]":
        inner = schema.setdefault("items", {})
    elif name == "{}":
        inner = schema.setdefault("additionalProperties", {})
    else:
        inner = schema.setdefault("properties", {}).setdefault(name, {})
    yield from _places(inner, rest)


def _steps(key: str) -> list[str]:
    """Split a key of the page: ``frames[].bytes`` into ``frames``, ``[]``, ``bytes``."""
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
    plain = {known.__name__: known for known in (bool, int, float, str)}
    return schema_of(plain[kind]) if kind in plain else {"type": kind}


def _fill(schema: Schema, known: Schema) -> None:
    """Add a type where a schema has none."""
    if not schema.keys() & {"type", "enum", "anyOf"}:
        for key, value in known.items():
            if isinstance(value, dict):
                _fill(schema.setdefault(key, {}), value)
            else:
                schema[key] = value


ALSO: dict[str, tuple[type, ...]] = {"compress": (WatchReport,), "evaluate": (EvaluatorReport,)}
"""Reports of verbs that an option makes do something else."""


def _explain(schema: Schema, texts: Mapping[str, tuple[str, str]]) -> None:
    """Add what the page gives: what keys mean, and types where reports have none."""
    for key, (kind, meaning) in sorted(texts.items()):
        for place in _places(schema, _steps(key)):
            place.setdefault("description", meaning)
            _fill(place, typed(kind))


def document_schema(request: type[Request[Any]], verb: str, text: str) -> Schema:
    """Return the schema of a verb's document, in any of its modes."""
    merged: Schema = {"type": "object", "properties": {}}
    required: list[set[str]] = []
    texts = explained(verb, text)
    reports = [*reports_of(request), *ALSO.get(verb, ())]
    for report in reports:
        keys = keys_of(report) or {}
        # Of a document that is not its report's fields, the page alone says what it always has.
        computed = {"KEYS", "_document"} & vars(report).keys()
        chosen = bool(computed) or any(item.metadata for item in fields(report))
        certain = chosen or "to_json" not in vars(report)
        required.append(set(keys) if certain else set())
        for key, hint in keys.items():
            if certain or key in texts:
                schema, known = schema_of(hint), merged["properties"].get(key)
                merged["properties"][key] = schema if known in (None, schema) else _either(known, schema)
    _explain(merged, texts)
    always = sorted(set.intersection(*required))
    return merged | {"anyOf": [{"required": always}, {"required": ["error"]}]}


def _close(schema: Schema) -> None:
    """Allow no other keys than those that are known."""
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    inner = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    for item in [*inner, schema.get("items"), schema.get("additionalProperties")]:
        if isinstance(item, dict):
            _close(item)


def all_schemas(requests: Mapping[str, type[Request[Any]]]) -> Schema:
    """Return the schema of every verb's document, under ``$defs``."""
    text = (DOCS / "json.md").read_text()
    error: Schema = {}
    shared = _rows("Shared keys", text)
    _explain(error, {key: row for key, row in shared.items() if _steps(key)[0] == "error"})
    found = {}
    for verb, request in requests.items():
        if request.REPORTS:
            found[verb] = document_schema(request, verb, text)
            found[verb]["properties"] |= error["properties"]
            _close(found[verb])
    found["run"] = {"anyOf": [{"$ref": f"#/$defs/{verb}"} for verb in found if verb != "run"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": found}
