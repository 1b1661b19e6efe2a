"""What verbs return: frozen dataclasses with one way to a JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["UNSAID", "Report", "plain_value"]

UNSAID: Final = {"unsaid": True}
"""Metadata of a field that is no part of the document."""


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it: enumerations as their values, paths as texts, reports as documents.

    Examples
    --------
    >>> plain_value({"path": Path("run"), "steps": (1, 2)})
    {'path': 'run', 'steps': [1, 2]}
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: plain_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if hasattr(value, "tolist"):
        return _listed([value.tolist()])[0]
    if is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name)) for field in fields(value)}
    return value


def _listed(values: list[Any]) -> list[Any]:
    """Return the values of an array, None where there is none."""
    return [_listed(one) if isinstance(one, list) else None if one != one else one for one in values]


class Report:
    """A frozen dataclass that is a JSON document: of fields, of what it `SAYS`, or what `_document` makes."""

    __slots__ = ()

    SAYS: ClassVar[str] = ""
    """Keys of the document, where they are not the fields: attributes, or ``key=path.of.attribute``."""

    def show(self, console: Console) -> None:
        """Print it for people."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` writes."""
        return {key: plain_value(value) for key, value in self._document().items()}

    def _document(self) -> dict[str, Any]:
        """Return the values of the document in their order."""
        return {key: attrgetter(path)(self) for key, path in self.said().items()}

    @classmethod
    def said(cls) -> dict[str, str]:
        """Return the keys of the document, each with the path of the attribute that it shows."""
        if not cls.SAYS:
            own: tuple[Field[Any], ...] = fields(cls) if is_dataclass(cls) else ()
            return {field.name: field.name for field in own if not field.metadata.get("unsaid")}
        pairs = (word.partition("=") for word in cls.SAYS.split())
        return {key: path or key for key, _, path in pairs}
