"""The page on optimizer state shows what was measured."""

from pathlib import Path

import pytest

from benchmarks.optimizer import tables
from benchmarks.results import RESULTS
from inshrink_core.chain import OPTIMIZER_CHOICES

PAGE = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text(encoding="utf-8")


def test_its_tables_are_those_of_the_results() -> None:
    assert tables(RESULTS / "optimizer.csv") in PAGE


@pytest.mark.parametrize("choice", OPTIMIZER_CHOICES)
def test_it_says_what_every_choice_stores(choice: str) -> None:
    assert f"\n| `{choice}`" in PAGE
