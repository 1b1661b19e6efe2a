"""Messages that a person can read, whatever they quote, and text of strangers that no terminal obeys."""

import csv

import pandas as pd
import pytest
from inshrink_app.widgets.listing import csv_bytes

from inshrink_core.errors import DamagedError, EvaluatorError, InputError, InshrinkError, UnsafePickleError
from inshrink_core.text import csv_cell, described
from inshrink_core.training import Saver
from inshrink_core.training.check import ModelEvaluator
from tests.runs import model

FLOOD = "n" * 100_000


@pytest.mark.parametrize(
    "error",
    [
        InputError(FLOOD),
        InputError("x", where=FLOOD),
        DamagedError(FLOOD, where=FLOOD, expected=FLOOD, found=FLOOD, remedy=FLOOD),
        UnsafePickleError("the pickle wants to import", wanted=(FLOOD,) * 200),
    ],
    ids=["what", "where", "every part", "names"],
)
def test_a_message_fits_a_screen_whatever_it_quotes(error):
    assert len(str(error)) < 4096
    assert "…" in str(error)


def test_a_message_of_usual_length_is_as_it_was():
    error = DamagedError("w", where="p" * 1000, expected="1", found="2", remedy="r")
    assert str(error) == f"{'p' * 1000}: w (expected 1, found 2); r"


FORMULAS = (
    "a\n=1",
    "a\r=1",
    "=1+1",
    "+cmd",
    "-cmd|' /C calc'!A0",
    "@SUM(A1)",
    "\tx",
    "\rx",
    " =1",
    "\uff1d1",
)


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_of_a_table_is_a_formula(text):
    assert str(csv_cell(text)).startswith(("'", "\\", "a"))
    table = pd.DataFrame({text: [1.5, -2.0], "name": [text, "-2.0"]})
    rows = list(csv.reader(csv_bytes(table).decode().splitlines(keepends=True)))
    assert not any(str(cell).startswith(("=", "+", "@", "\t", "\r")) for row in rows for cell in row)
    assert [row[0] for row in rows[1:]] == ["1.5", "-2.0"]
    assert rows[-1][1] == "-2.0"


class SilentError(Exception):
    """Its text is code, too."""

    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [ValueError("a\n\x1b[31mb\r" * 10**6), SilentError(), ValueError("\u2028" * 10**6)]
)
def test_an_error_of_others_is_told_on_one_short_line(error):
    told = described(error)
    assert told.isprintable()
    assert len(told) <= 300
    assert told.startswith(type(error).__name__)


def test_the_message_of_a_failed_check_is_clipped(tmp_path, caplog):
    checks = iter([1.0, 1.0, 1.0])

    def check(network):
        for value in checks:
            return {"loss": value}
        raise ValueError("\x1b[2J no batch\n" * 10**5)

    with Saver(tmp_path / "a.inshrink", model(), check=check) as saver:
        saver.save(1)
        saver.save(2)
        saver.flush()
        failures = dict(saver.check_failures)
    assert failures
    for text in (*failures.values(), *(record.getMessage() for record in caplog.records)):
        assert text.isprintable()
        assert len(text) < 1000


def test_what_a_check_returned_instead_is_clipped():
    evaluator = ModelEvaluator(model(), lambda network: {"\x1b" * 10**6: 1, "b\n": 2})
    with pytest.raises(EvaluatorError) as caught:
        evaluator.evaluate(evaluator.state_of(model()))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert isinstance(caught.value, InshrinkError)
