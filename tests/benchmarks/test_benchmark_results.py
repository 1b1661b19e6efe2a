import csv
from pathlib import Path

import pytest

from benchmarks import results, run


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")


def test_a_row_measured_earlier_keeps_its_date():
    path = results.write("name", [{"a": 1, "date": "2001-01-01"}, {"b": 0.123456789}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["date", "machine", "version", "a", "b"]
    assert rows[0]["date"] == "2001-01-01"
    assert rows[0]["b"] == ""
    assert rows[1]["date"] != "2001-01-01"
    assert rows[1]["b"] == "0.12346"


def test_rows_of_what_was_not_measured_anew_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write("made", [{"verb": "a", "cases": 1}, {"verb": "b", "cases": 2}])
    path = results.renew("made", [{"verb": "b", "cases": 3}, {"verb": "c", "cases": 4}], ("verb",))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["verb"], row["cases"]) for row in rows] == [("a", "1"), ("b", "3"), ("c", "4")]
    assert all(row["machine"] for row in rows)


def test_the_documentation_says_of_every_script_whom_it_is_for():
    home = Path(run.__file__).parent
    users, development = (home.parent / "docs/benchmarks.md").read_text().split("## What development uses")
    scripts = {
        path.stem for path in home.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert all(f"\n| `{name}` |" in users for name in run.BENCHMARKS)
    assert [name for name in scripts - {"__init__", *run.BENCHMARKS} if f"`{name}`" not in development] == []
