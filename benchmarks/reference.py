"""The derived parts of docs, and docs/documents.schema.json: ``python -m benchmarks.reference``.

Text between ``<!-- derived: NAME -->`` and ``<!-- end -->`` is derived. In docs/cli.md it is made from the
requests: synopsis, summary, examples and options of each verb, and the options that several verbs have. In
docs/runs.md it is the table of layouts that `tests.formats.layouts` checks, in docs/json.md the keys of all
JSON documents (`benchmarks.documents`), in docs/format.md the words of the dictionary. The rest is written by
hand, and explains what the options mean together.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args, get_type_hints

from benchmarks import documents
from benchmarks.documents import code, requests, table
from inshrink_core.archive.index import WORDS
from inshrink_core.cli.derived import Output
from inshrink_core.request import Option, fields_of
from tests.formats.layouts.layout import Layout
from tests.formats.layouts.table import TABLE

SCHEMA = documents.DOCS / "documents.schema.json"
SHARED = 3
"""An option of as many verbs, with the same explanation, is explained once for all of them."""
SCRIPT = "a training script"
"""What writes files without a framework, in the table of layouts."""
RESULT = "steps, and what comes of other files"
"""Heading of the last column of the tables of layouts."""
GROUPS = {
    "--step-pattern": "Runs",
    "--codec": "Settings",
    "--max-drop": "Bounds",
    "--evaluator": "Evaluation",
    "--part": "Parts",
    "--base": "Decoding",
}
"""Headings of options that the same verbs share, by the first of them."""
MORE = {
    "base": "transfer.md#from-a-base-model",
    "evaluator": "evaluators.md",
    "follow_links": "runs.md#links",
    "max_memory": "archives.md#memory-and-disk",
    "optimizer": "optimizer.md",
    "optimizer_state": "optimizer.md",
    "step_pattern": "runs.md#steps",
}
"""Where more is said of a field, by its name."""

_REGION = re.compile(r"(<!-- derived: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _metavar(field: Option) -> str:
    """Return what the value of an option is called, empty for a flag."""
    if isinstance(field.default, bool):
        return ""
    names = {int: "N", float: "X"}
    kinds = [field.type, *getattr(field.type, "__args__", ())]
    return field.metavar or next((names[kind] for kind in kinds if kind in names), "NAME")


def _head(field: Option) -> str:
    """Return an option's names, with what its value is called."""
    first, *others = field.names
    value = _metavar(field).replace("|", r"\|")
    names = [f"`{first} {value}`" if value else f"`{first}`", *(f"`{name}`" for name in others)]
    names += [f"`{name}`" for name in (field.off,) if name]
    return ", ".join(names)


def _text(field: Option) -> str:
    """Return an option's explanation, its default and where more is said."""
    notes = []
    if field.default is inspect.Parameter.empty:
        notes.append("required")
    elif not isinstance(field.default, bool) and field.default not in (None, (), ""):
        default = f"{field.default:g}" if isinstance(field.default, float) else field.default
        notes.append(f"default {default}")
    if field.least is not None and field.most is not None:
        notes.append(f"{field.least:g} to {field.most:g}")
    elif field.least not in (None, 0, 1):
        notes.append(f"at least {field.least:g}")
    if field.name in MORE:
        notes.append(f"[more]({MORE[field.name]})")
    text = field.text.replace("``", "`").replace("|", r"\|").rstrip(".")
    return f"{text} ({', '.join(notes)})" if notes else text


def _key(field: Option) -> tuple[str, str]:
    return _head(field), _text(field)


def shared() -> dict[tuple[str, str], list[str]]:
    """Return the options that are explained once, with the verbs that have them."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for verb, request in requests().items():
        fields = [field for field in fields_of(request) if not field.by_place]
        for key in dict.fromkeys(map(_key, fields)):
            verbs.setdefault(key, []).append(verb)
    return {key: found for key, found in verbs.items() if len(found) >= SHARED}


def groups() -> dict[str, list[tuple[str, str]]]:
    """Return the options that the same verbs share, by the names of their groups, and the others under ""."""
    by_verbs: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for option, found in shared().items():
        by_verbs.setdefault(tuple(found), []).append(option)
    named: dict[str, list[tuple[str, str]]] = {"": []}
    for options in by_verbs.values():
        named.setdefault(GROUPS.get(_first(options[0]), ""), []).extend(options)
    return named


def _first(option: tuple[str, str]) -> str:
    """Return the first name of an option."""
    return option[0].split("`")[1].split()[0]


def shared_options() -> str:
    """Return the tables of the options that several verbs have."""
    named = groups()
    parts = [table(("option", "meaning"), [*_output(), *named.pop("")])]
    parts += [f"### {name}\n\n{table(('option', 'meaning'), rows)}" for name, rows in named.items()]
    return "\n\n".join(parts)


def _output() -> Iterable[tuple[str, str]]:
    """Yield the options that say how a report is printed, which are no fields of a request."""
    texts = inspect.getdoc(Output) or ""
    for name, hint in get_type_hints(Output, include_extras=True).items():
        note = get_args(hint)[1]
        names = [*(note.name or (f"--{name}",)), *(note.alias or ())]
        value = f" {note.metavar}".replace("|", r"\|") if note.metavar else ""
        first, *others = names
        (text,) = re.findall(rf"^{name}\n((?: +.+\n?)+)", texts, re.MULTILINE)
        head = ", ".join([f"`{first}{value}`", *(f"`{other}`" for other in others)])
        yield head, " ".join(text.split()).replace(" (docs/json.md)", "").rstrip(".")


def verbs() -> str:
    """Return links to the verbs."""
    return "\n".join(textwrap.wrap(", ".join(f"[`{verb}`](#{verb})" for verb in requests()) + ".", 140))


def synopsis(verb: str) -> str:
    """Return how a verb is called, what it does, and its examples."""
    request = requests()[verb]
    words = [f"inshrink {verb}"]
    for field in fields_of(request):
        required = field.default is inspect.Parameter.empty
        if field.by_place:
            word = field.metavar or field.name.upper()
            word += " …" if field.many else ""
            words.append(word if required else f"[{word}]")
        elif required:
            words.append(f"{min(field.names, key=len)} {_metavar(field)}")
    examples = "\n".join(f"    {line}" for line in request.EXAMPLES)
    return f"    {' '.join(words)} [OPTIONS]\n\n{request.summary()}\n\n{examples}"


def options(verb: str) -> str:
    """Return the tables of a verb's own options, and name those that are explained once."""
    request, common, parts = requests()[verb], shared(), []
    listed = [field for field in fields_of(request) if not field.by_place]
    for needed in dict.fromkeys(field.needs for field in listed):
        rows = [_key(field) for field in listed if field.needs == needed and _key(field) not in common]
        head = f"With `--{needed.replace('_', '-')}`:\n\n" if needed else ""
        parts += [head + table(("option", "meaning"), rows)] if rows else []
    keys, named = {_key(field) for field in listed}, groups()
    also = [f"[{name.lower()}](#{name.lower()})" for name in named if name and keys & {*named[name]}]
    also += [f"`{_first(option)}`" for option in named[""] if option in keys]
    if also:
        parts.append(f"Also {', '.join(also)}.")
    return "\n\n".join(parts)


def parts() -> dict[str, dict[str, Callable[[], str]]]:
    """Return what makes each derived part, by page and name."""
    of_verbs: dict[str, Callable[[], str]] = {"verbs": verbs, "shared options": shared_options}
    for verb in requests():
        of_verbs |= {verb: partial(synopsis, verb), f"{verb} options": partial(options, verb)}
    return {
        "cli.md": of_verbs,
        "runs.md": {"layouts": layouts},
        "json.md": {"documents": documents.reference},
        "format.md": {"words": lambda: "\n".join(textwrap.wrap(code(WORDS), 140))},
    }


def page(name: str) -> str:
    """Return a page of docs with its derived parts made anew.

    Raises
    ------
    ValueError
        A part is missing, unknown or there twice, or a key of a document has no docstring.
    """
    text, made = (documents.DOCS / name).read_text(), parts()[name]
    names = Counter(match[2] for match in _REGION.finditer(text))
    if names != Counter(made.keys()):
        raise ValueError(
            f"{name}: parts {sorted(names.keys() ^ made.keys())} are missing, unknown or there twice"
        )
    return _REGION.sub(lambda match: f"{match[1]}{made[match[2]]()}\n{match[3]}", text)


def _result(row: Layout) -> str:
    """Return what comes of a run of a layout."""
    numbers = ", ".join(map(str, row.steps)) or "in this order"
    further = {
        "model": row.models,
        "branch": row.branches,
        "duplicate": row.duplicates,
        "archived, too": row.beside,
        "another model": row.other_models,
        "not read": row.left_out,
    }
    parts = [numbers] if row.is_readable else []
    return "; ".join([*parts, *(f"{label} {code(words)}" for label, words in further.items() if words)])


def layouts() -> str:
    """Return the tables of the layouts that are tested: those of scripts, then those of frameworks."""
    rows = [(row.framework, "<br>".join(map(_shown, row.shown)), _result(row)) for row in TABLE]
    scripts = table(("written by a script", RESULT), (row[1:] for row in rows if row[0] == SCRIPT))
    others = table(("written by", "files", RESULT), (row for row in rows if row[0] != SCRIPT))
    return f"{scripts}\n\n{others}"


def _shown(files: str) -> str:
    """Return files as code, with what is said of them behind it."""
    name, separator, note = files.partition(" (")
    return f"`{name}`{separator}{note}"


def schema() -> str:
    """Return the schema of the documents as its file has it."""
    return json.dumps(documents.all_schemas(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all."""
    for name in parts():
        (documents.DOCS / name).write_text(page(name))
    SCHEMA.write_text(schema())


if __name__ == "__main__":
    main()
