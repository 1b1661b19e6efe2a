"""Verbs that are killed, refused and cut off lose nothing, and the harness that says so can say otherwise."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.results import RESULTS

ROOT = Path(__file__).parents[2]
compiled = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="the shim needs a C compiler"
)


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.crash", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@compiled
def test_some_cases_of_every_verb_and_mode_find_nothing():
    done = run("--cases", "1", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert len({row[0] for row in rows}) == 20
    assert all(row[3] == "1" and set(row[4:]) == {"0"} for row in rows), done.stdout


@compiled
def test_every_planted_defect_is_found():
    done = run("--prove")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 13
    assert "NOT FOUND" not in done.stdout


def test_the_pass_that_is_kept_is_whole_and_found_nothing():
    with (RESULTS / "crash.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cases: Counter[str] = Counter()
    for row in rows:
        cases[row["mode"]] += int(row["cases"])
    assert len(rows) == 19 * 4 + 2  # schedules, and ranks, which are killed alone
    assert cases["schedule"] >= 100_000
    assert cases["kill"] >= 1000
    assert cases["power"] + cases["both"] >= 2000
    assert all(
        row[kind] == "0" for row in rows for kind in ("lost", "wrong", "untyped", "refused", "leftover")
    )
    assert all(re.fullmatch(r"[1-9][0-9]*", row["cases"]) for row in rows)
