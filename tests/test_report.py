"""How a report becomes a document: keys in order, paths as texts, gaps as null."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from inshrink_core.report import Report


class _Part(NamedTuple):
    name: str
    n: int


@dataclass(frozen=True)
class _Whole(Report):
    path: Path
    parts: tuple[_Part, ...]
    last: _Part | None
    values: np.ndarray

    KEYS: ClassVar = "file=path names=parts.name last=last.n parts values"


@dataclass(frozen=True)
class _Plain(Report):
    b: int
    a: tuple[int, ...]


def test_values_become_what_json_has():
    parts = (_Part("x", 1), _Part("y", 2))
    found = _Whole(Path("run"), parts, None, np.array([[1.0, np.nan]])).to_json()
    assert list(found) == ["file", "names", "last", "parts", "values"]
    assert (found["file"], found["names"], found["last"]) == ("run", ["x", "y"], None)
    assert found["parts"] == [{"name": "x", "n": 1}, {"name": "y", "n": 2}]
    assert found["values"] == [[1.0, None]]
    assert _Whole(Path("run"), (), parts[1], np.zeros(0)).to_json()["last"] == 2


def test_a_report_that_does_not_say_otherwise_is_all_of_its_fields():
    assert list(_Plain(1, (2, 3)).to_json().items()) == [("b", 1), ("a", [2, 3])]
