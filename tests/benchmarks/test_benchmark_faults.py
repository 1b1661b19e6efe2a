"""Mutants of the engine: chosen by a seed, found again, and different from the text they replace."""

import ast
import csv

from benchmarks import faults

SOURCE = '''
LIMIT = 3


def first(values):
    """Say é."""
    if not values:
        raise ValueError(f"{len(values) == 0}")
    values.sort()
    return "é", values[0] < LIMIT
'''


def test_every_kind_of_mutant_replaces_its_text_alone():
    found = faults.faults_in("a.py", SOURCE)
    assert [(fault.kind, fault.before, fault.after) for fault in found] == [
        ("condition", "not values", "(not not values)"),
        ("call", "values.sort()", "(None)"),
        ("comparison", "values[0] < LIMIT", "(values[0] >= LIMIT)"),
        ("constant", "0", "(1)"),
    ]
    for fault in found:
        text = faults.apply(SOURCE, fault)
        assert fault.after in text
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))
    assert 'return "é", (values[0] >= LIMIT)' in faults.apply(SOURCE, found[2])


def test_recorded_mutants_are_fifty_and_have_names_of_their_own():
    with faults.LIST.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == faults.N_FAULTS
    assert len({tuple(row[name] for name in faults.Fault._fields[:6]) for row in rows}) == len(rows)
    assert {row["result"] for row in rows} <= {"caught", "not caught", "not run", "gone"}
    assert all(bool(row["test"]) == (row["result"] == "caught") for row in rows)
    assert {row["file"].split("/")[1] for row in rows} == {
        "formats", "archive", "chain", "codecs", "coding", "verbs",
    }  # fmt: skip


def test_tests_of_every_package_are_there():
    for package in ("formats", "archive", "chain", "codecs", "coding", "verbs"):
        assert not [path for path in faults.tests_of(package) if not (faults.ROOT / path).exists()]
