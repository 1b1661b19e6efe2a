"""The search benchmark's table: a run measured anew replaces its own rows and no others."""

import csv

import pytest

from benchmarks import results, search


def row(run, figure, value, **more):
    return {"run": run, "codec": "lattice", "figure": figure, "value": value, "target": None, **more}


def read(path):
    with path.open(newline="") as file:
        return [(one["run"], one["figure"], one["value"], one["date"]) for one in csv.DictReader(file)]


def test_rows_of_other_runs_and_figures_stay_with_their_date(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    old = "2001-01-01"
    search.keep("search", [row("a", "ratio", 1.0, date=old), row("a", "drop", 2.0, date=old)])
    search.keep("search", [row("b", "ratio", 3.0, date=old)])
    rows = read(search.keep("search", [row("a", "ratio", 4.0)]))
    assert rows[:2] == [("a", "drop", "2", old), ("b", "ratio", "3", old)]
    assert rows[2][:3] == ("a", "ratio", "4")
    assert rows[2][3] != old


def test_a_run_is_written_when_it_ends_so_that_the_next_one_may_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def measure(name, parts, codecs, n_steps):
        if name == "b":
            raise KeyboardInterrupt
        return [row(name, "ratio", 1.0)]

    monkeypatch.setattr(search, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        search.main(names=("a", "b"))
    assert [one[0] for one in read(tmp_path / "search.csv")] == ["a"]
