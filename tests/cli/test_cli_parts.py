"""Numbers, steps and settings as people write and read them."""

import math

import pytest

from inshrink_core import text as formatting
from inshrink_core.cli import output
from inshrink_core.errors import ConfigError, InputError, NotFoundError
from inshrink_core.report import Table, show_parts
from inshrink_core.verbs.shared.values import chosen_steps, parse_settings, read_config_file

FIGURES = {
    "size": {0: "0 B", 999: "999 B", 1000: "1.00 kB", 999_600: "1.00 MB", 12_345_678: "12.3 MB", None: "–"},
    "ratio": {12.345: "12.3×", 1.0: "1.00×", 123.4: "123×", None: "–", math.inf: "–"},
    "percent": {0.0123: "+1.23 %", -0.0123: "−1.23 %", 0.00001: "0.00 %", math.nan: "–"},
    "duration": {0.5: "0.50 s", 59.9: "59.9 s", 60: "1 min 0 s", 3725: "1 h 2 min", None: "–"},
}


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_are_short_and_have_at_most_three_digits(kind):
    write, expected = getattr(formatting, kind), FIGURES[kind]
    assert {value: write(value) for value in expected} == expected


def test_control_characters_are_shown_not_sent():
    assert formatting.printable("a\x1b]0;title\x07\nb") == r"a\x1b]0;title\x07 b"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (None, None),
        ([], ()),
        (["20"], (20,)),
        (["40,20"], (20, 40)),
        (["10:30"], (10, 20, 30)),
        (["15:"], (20, 30, 40)),
        ([":20"], (10, 20)),
        ([":"], (10, 20, 30, 40)),
        (["10:40:2"], (10, 30)),
        (["10", "30:40"], (10, 30, 40)),
        (["99"], (99,)),
    ],
)
def test_steps_are_numbers_lists_and_ranges_with_both_ends(texts, expected):
    assert chosen_steps(texts, lambda: (10, 20, 30, 40), "run") == expected


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "1:2:0", "-5", "1..2", "１", "9" * 5000])
def test_what_is_no_step_is_refused(text):
    with pytest.raises(InputError, match="neither a step nor a range"):
        chosen_steps([text], lambda: (10, 20), "run")


def test_an_empty_range_is_refused():
    with pytest.raises(NotFoundError, match="11:19"):
        chosen_steps(["11:19"], lambda: (10, 20), "run")
    with pytest.raises(NotFoundError, match="no steps"):
        chosen_steps(["1:"], tuple, "run")


def test_settings_are_json_or_words():
    assert parse_settings(["a=1", "b=0.5", "c=word", "d=true", "e=x=y", 'f="1"', "g.h=2"]) == {
        "a": 1,
        "b": 0.5,
        "c": "word",
        "d": True,
        "e": "x=y",
        "f": "1",
        "g": {"h": 2},
    }


@pytest.mark.parametrize("texts", [["a"], ["=1"], ["a=1", "a.b=2"], ["a..b=1"]])
def test_malformed_settings_are_refused(texts):
    with pytest.raises(ConfigError):
        parse_settings(texts)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[1]", b"x" * (2 << 20)])
def test_config_files_of_something_else_are_refused(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError):
        read_config_file(tmp_path / "a.json")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_table_shortens_names_in_their_middle_and_never_cuts_numbers(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    name, numbers = "model." + "layer." * 30 + "weight", [12345678 + at for at in range(6)]
    table = Table({"name": None, "kind": None} | {f"n {at}": str for at in range(6)}, [(name, "x", *numbers)])
    show_parts(output.console_of_stdout(), [table])
    lines = capsys.readouterr().out.splitlines()
    shown, _, *values = lines[-1].split()
    assert values == [str(value) for value in numbers]
    first, last = shown.split("…")
    assert name.startswith(first)
    assert name.endswith(last)
    assert max(map(len, lines)) <= max(columns, 11 + 4 + 6 * 8 + 7 * 3)
