"""What verbs return: frozen dataclasses with one way to a JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["Report", "plain_value"]


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
    if isinstance(value, Mapping):
        return {name: plain_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name)) for field in fields(value)}
    return value


class Report:
    """A frozen dataclass that is a JSON document.

    Attributes
    ----------
    DOCUMENT
        The document's keys in their order, separated by spaces: each is an attribute's name, or
        ``KEY=ATTRIBUTE`` where the two differ or the attribute is another object's, as in
        ``bytes=size.nbytes``.
    """

    __slots__ = ()

    DOCUMENT: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` writes."""
        pairs = (entry.partition("=") for entry in self.DOCUMENT.split())
        return {key: plain_value(attrgetter(path or key)(self)) for key, _, path in pairs}
