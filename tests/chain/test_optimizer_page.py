"""The page on optimizer state explains every choice."""

from pathlib import Path

import pytest

from inshrink_core.chain.config import OPTIMIZER_CHOICES

PAGE = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("choice", OPTIMIZER_CHOICES)
def test_every_choice_has_a_row(choice):
    assert f"\n| `{choice}`" in PAGE
