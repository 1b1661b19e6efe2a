"""Reports of verbs: frozen dataclasses, written as a JSON document or shown as text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import partial, reduce
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from inshrink_core import text
from inshrink_core.errors import clipped
from inshrink_core.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


OMITTED: Final = {"omitted": True}
"""Metadata of a field that is not part of the document."""


def plain_value(value: Any, *, strict: bool = False) -> Any:
    """Return a value as JSON data: enumerations as their values, paths as text, reports as documents.

    Parameters
    ----------
    value
        Any value.
    strict
        Also convert NaN and infinity to None, bytes to hexadecimal digits and other objects to text.

    Examples
    --------
    >>> plain_value({"path": Path("run"), "steps": (1, 2)})
    {'path': 'run', 'steps': [1, 2]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if hasattr(value, "tolist"):
        value = _without_nan(value.tolist())
    if isinstance(value, float):
        return None if strict and not math.isfinite(value) else value
    if hasattr(value, "to_json"):
        value = value.to_json()
    elif isinstance(value, Enum):
        value = value.value
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key) if strict else key: plain_value(v, strict=strict) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(item, strict=strict) for item in value]
    if isinstance(value, bytes) and strict:
        return value.hex()
    return str(value) if isinstance(value, Path) or (strict and not isinstance(value, int)) else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if value != value else value


Columns = Mapping[str, Callable[[Any], str] | None]
"""Heading of each column of a table, with the function that formats its values; None for text."""


class Table(NamedTuple):
    """Table for the terminal.

    Parameters
    ----------
    columns
        Columns of text are aligned left, others right. A column without any text is hidden.
    rows
        The values of each row, in the order of the columns.
    title
        A line above.
    most
        Number of rows to show; the middle of a longer table is left out.
    """

    columns: Columns
    rows: Iterable[Sequence[Any]]
    title: str = ""
    most: int | None = None


Part = tuple[str, str] | str | Table
"""A fact (name and value), a line, or a table."""


_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    **dict.fromkeys(("bytes", "disk", "memory", "nbytes"), text.size),
    "cost": text.percent,
    "divergence": text.nats,
    "drop": text.percent,
    "error": text.error_size,
    "mb": text.rate,
    "measured": lambda at: time.strftime("%Y-%m-%d %H:%M; --again measures anew", time.localtime(at)),
    "ratio": text.ratio,
    "seconds": text.duration,
    "step": str,
}
"""Formats of numbers, by a word of their key."""

_NAMES: Final = {
    "base": "base model",
    "fates": "tensor files by fate",
    "max_divergence": "max divergence, nats",
    "mb_per_s": "speed",
    "n_parameters": "parameters",
    "originals": "checksums of the originals",
    "ratio_total": "ratio of everything",
    "ratio_weights": "ratio of the weights",
    "seconds": "time",
}
"""Displayed names of keys, if not the key with spaces."""

_GAP: Final = 3
"""Blanks between two columns of a table."""

_LEAST_NAME: Final = 11
"""Least width to which names in a table are shortened."""

_MAX_ROWS: Final = 40
_MAX_LINES: Final = 20
_MAX_WORDS: Final = 20
_MAX_PAIRS: Final = 8
_REASONS: Final = {"what", "reason"}


def value_text(key: str, value: Any) -> str:
    """Return a value of a document as text, in the unit that its key names; empty without a value.

    Examples
    --------
    >>> value_text("raw_bytes", 1_234_567), value_text("steps", [100, 200]), value_text("exact", True)
    ('1.23 MB', '100, 200', 'yes')
    """
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        default = text.count if isinstance(value, int) else text.plain
        return next((_FORMATS[word] for word in key.split("_") if word in _FORMATS), default)(value)
    if isinstance(value, Mapping):
        form = text.limit_text if key == "bounds" else value_text
        pairs = {name.replace("_", " "): form(name, item) for name, item in value.items() if item is not None}
        return ", ".join(f"{name} {shown}" for name, shown in pairs.items() if shown)
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return text.steps_in_short(value)
        rest = [f"… {len(value) - _MAX_WORDS:,} more"] if len(value) > _MAX_WORDS else []
        return ", ".join([*(value_text(key, item) for item in value[:_MAX_WORDS]), *rest])
    return str(value)


def parts_of(key: str, value: Any, most: int | None = _MAX_ROWS) -> Iterator[Part]:
    """Yield a value of a document for display: a fact, a table of records, or a line for each reason."""
    name = _NAMES.get(key, key.replace("_", " "))
    rows = value if isinstance(value, list) else []
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        rows = [{name: label, **row} for label, row in value.items()]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        if isinstance(value, Mapping) and len(value) > _MAX_PAIRS and "text" not in value:
            yield Table({name: None, "": partial(value_text, key)}, list(value.items()), most=_MAX_ROWS)
            return
        if shown := value_text(key, value.get("text", value) if isinstance(value, Mapping) else value):
            yield name, shown
    elif _REASONS & rows[0].keys():
        for row in rows[:_MAX_LINES]:
            words = (f"step {value}" if key == "step" else value for key, value in row.items())
            yield ": ".join([name, *(word for word in words if isinstance(word, str) and word)])
        if len(rows) > _MAX_LINES:
            yield f"… {len(rows) - _MAX_LINES:,} more"
    else:
        keys = dict.fromkeys(key for row in rows for key in row)
        texts = {key for row in rows for key in keys if isinstance(row.get(key), str)}
        columns = {key.replace("_", " "): None if key in texts else partial(value_text, key) for key in keys}
        cells = [["" if row.get(key) is None else row[key] for key in keys] for row in rows]
        yield Table(columns, cells, title="" if name in keys else name, most=most)


class Report:
    """Frozen dataclass with a JSON document, made of its fields or of `KEYS`."""

    __slots__ = ()

    KEYS: ClassVar[str] = ""
    """Keys of the document, if not the fields: attributes, or ``key=path.of.attribute``.

    A path continues through the items of a tuple, and ends at None.
    """

    SHOWS: ClassVar[str] = ""
    """Displayed values, in order: keys of the document, or ``name=path.of.attribute``; by default all."""

    def shown(self) -> Iterator[Part]:
        """Yield the facts, lines and tables to display, in order."""
        document = self.to_json()
        for word in self.SHOWS.split() or document:
            key, _, path = word.partition("=")
            value = plain_value(self._at(path)) if path else document.get(key)
            yield from parts_of(key, value)
        yield from self.remarks()

    def remarks(self) -> Iterator[str]:
        """Yield the lines below the values."""
        return iter(())

    def show(self, console: Console) -> None:
        """Print the report."""
        show_parts(console, self.shown())

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` writes."""
        return {key: plain_value(self._at(path)) for key, path in self.document_paths().items()}

    def _at(self, path: str) -> Any:
        return reduce(_attribute, path.split("."), self)

    @classmethod
    def document_paths(cls) -> dict[str, str]:
        """Return the keys of the document, each with the path of its attribute."""
        if not cls.KEYS:
            known: tuple[Field[Any], ...] = fields(cls) if is_dataclass(cls) else ()
            return {field.name: field.name for field in known if not field.metadata.get("omitted")}
        pairs = (word.partition("=") for word in cls.KEYS.split())
        return {key: path or key for key, _, path in pairs}


def _attribute(value: Any, name: str) -> Any:
    if value is None or hasattr(value, name):
        return getattr(value, name, None)
    return [_attribute(item, name) for item in value]


def show_parts(console: Console, parts: Iterable[Part]) -> None:
    """Print facts with their values in one column, lines, and tables between empty lines."""
    from rich.text import Text

    before: type | None = None
    for kind, group in groupby(parts, key=type):
        if before is not None and Table in (kind, before):
            console.print()
        before = kind
        if kind is tuple:
            facts = [item for item in group if isinstance(item, tuple) and not isinstance(item, Table)]
            width = max((len(name) for name, value in facts if value), default=0)
            for name, value in filter(itemgetter(1), facts):
                line = Text.assemble((printable(name).ljust(width), "dim"), f"  {printable(value)}")
                console.print(line, soft_wrap=True)
            continue
        for at, item in enumerate(group):
            if isinstance(item, Table) and at:
                console.print()
            if isinstance(item, Table) and item.title:
                console.print(Text(printable(item.title), "bold"), soft_wrap=True)
            if isinstance(item, Table):
                console.print(drawn(item, console.width), crop=False)
            else:
                console.print(printable(str(item)), soft_wrap=True)


def drawn(table: Table, width: int) -> RichTable:
    """Return a table for rich, with thin rules; names that do not fit are shortened, numbers never."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    formats = [form or (lambda value: printable(str(value))) for form in table.columns.values()]
    rows = [[form(value) for form, value in zip(formats, row, strict=True)] for row in table.rows]
    shown = [at for at in range(len(formats)) if not rows or any(row[at] for row in rows)]
    if table.most is not None and len(rows) > table.most:
        half = table.most // 2
        rows[half:-half] = [["…", f"{text.count(len(rows) - 2 * half)} more", *[""] * (len(formats) - 2)]]
    forms = list(table.columns.values())
    names = [
        heading if form is None else heading.replace(" ", "\n") for heading, form in table.columns.items()
    ]
    widths = {at: max(map(len, [*names[at].split("\n"), *(row[at] for row in rows)])) for at in shown}
    texts = {at: widths[at] for at in shown if forms[at] is None}
    excess = sum(widths.values()) + _GAP * (len(shown) - 1) - width
    while excess > 0 and max(texts.values(), default=0) > _LEAST_NAME:
        texts[max(texts, key=texts.__getitem__)] -= 1
        excess -= 1
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for at in shown:
        column_width = texts.get(at, widths[at])
        justify: Literal["left", "right"] = "left" if at in texts else "right"
        made.add_column(Text(names[at]), justify=justify, no_wrap=True, min_width=column_width)
    for row in rows:
        made.add_row(*(clipped(row[at], texts.get(at, widths[at])) for at in shown))
    return made
