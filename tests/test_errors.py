"""Messages that a person can read, whatever they quote."""

import pytest

from inshrink_core.errors import DamagedError, InputError, UnsafePickleError

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
