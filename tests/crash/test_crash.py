"""Verbs that are killed, refused and cut off lose nothing, and the harness that says so can say otherwise."""

import csv
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks.crash import schedules
from benchmarks.results import RESULTS
from inshrink_core.archive import catalog, writer
from inshrink_core.archive.manifest import Manifest
from inshrink_core.archive.storage import registry
from inshrink_core.errors import InshrinkError
from tests.processes import ran

ROOT = Path(__file__).parents[2]
compiled = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="the shim needs a C compiler"
)


def run(*words):
    return ran(sys.executable, "-m", "benchmarks.crash", *words, cwd=ROOT, timeout=280)


@pytest.mark.attack
@compiled
def test_a_case_of_every_verb_killed_and_without_power_finds_nothing():
    done = run("--cases", "1", "--seed", "7", "--mode", "both", "--mode", "kill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert len({row[0] for row in rows}) == 20
    assert all(row[3] == "1" and set(row[4:]) == {"0"} for row in rows), done.stdout


@pytest.mark.attack
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


N_SCHEDULES = 500
"""Among so many each protocol that is wrong fails; `make crash` runs more."""


def test_schedules_of_parts_lose_and_double_no_frame():
    schedules.run_schedules(N_SCHEDULES, derandomize=True)


def open_to_all(process_of):
    return lambda storage: schedules.TakenLock(storage._process)


def used_again(_):
    return property(lambda found: max((frame.generation for frame in found.frames), default=0) + 1)


def over_others(create):
    return lambda storage, path, over=False: create(storage, path, over=True)


def without_tombstones(without_frames):
    return lambda manifest, generations: replace(without_frames(manifest, generations), tombstones=())


def fewer_parts(layout):
    def joined(parts):
        frame = layout.joined(parts)
        return replace(frame, n_parts=max(2, frame.n_parts - 1))

    return SimpleNamespace(**{**vars(layout), "joined": joined})


BUGS = {
    "a lock that keeps nobody out": (schedules.Simulated, "lock", open_to_all),
    "a generation given twice": (catalog.Catalog, "next_generation", used_again),
    "a part that takes the place of another": (schedules.Simulated, "create", over_others),
    "removed frames that nothing remembers": (Manifest, "without_frames", without_tombstones),
    "parts that contradict each other listed": (writer, "contradictory", lambda _: lambda *rows: {}),
    "a frame taken for whole one part too early": (catalog, "layout", fewer_parts),
}


@pytest.mark.attack
@pytest.mark.parametrize("bug", BUGS)
def test_schedules_find_a_protocol_that_is_wrong_and_leave_nothing_patched(bug):
    where, name, made = BUGS[bug]
    before = time.sleep, registry._opened
    wrong = mock.patch.object(where, name, made(getattr(where, name)))
    with wrong, pytest.raises((AssertionError, InshrinkError, ValueError)):
        schedules.run_schedules(N_SCHEDULES, derandomize=True, shrink=False)
    assert (time.sleep, registry._opened) == before
