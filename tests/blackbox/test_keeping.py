"""Checks of archives, and what may be deleted: damage is found, and what stays keeps every bit."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.blackbox.conftest import STEPS, contents, document, inshrink, largest_file


def test_an_exact_archive_is_verified_against_its_run(run: Path, made_exact: Path) -> None:
    found = document("verify", made_exact, "--deep", "--against", run)
    assert (found["ok"], found["problems"], found["missing_steps"]) == (True, [], [])
    assert (found["frames"], found["deep"], found["lossy_roles"]) == (len(STEPS), True, [])
    assert {row["step"] for row in found["errors"]} == {*STEPS}
    assert all(row["bit_exact"] and row["max_abs"] == 0 for row in found["errors"])


def test_errors_of_a_lossy_archive_are_measured(run: Path, made_lossy: Path) -> None:
    found = document("verify", made_lossy, "--against", run)
    rows = {row["tensor"]: row for row in found["errors"] if row["step"] == 40}
    assert not rows["body.weight"]["bit_exact"]
    assert 0 < rows["body.weight"]["relative_rms"] < 0.2
    assert rows["norm.num_batches_tracked"]["bit_exact"]


def test_a_flipped_byte_is_found_and_nothing_is_restored_from_it(exact: Path, tmp_path: Path) -> None:
    path = largest_file(exact)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    outcome = inshrink("verify", exact, "--json")
    assert outcome.code == 1
    assert outcome.document["ok"] is False
    assert path.name in "".join(row["where"] for row in outcome.document["problems"])
    refused = inshrink("restore", exact, "--all", "-o", tmp_path / "out", "--json")
    assert (refused.code, refused.document["error"]["exit_code"]) == (3, 3)
    assert not [path for path in contents(tmp_path) if path.startswith("out/") and path.endswith("10.pt")]


def test_a_missing_frame_is_named_and_not_passed_over(exact: Path, tmp_path: Path) -> None:
    largest_file(exact).unlink()
    outcome = inshrink("inspect", exact, "--json")
    assert outcome.code == 1
    assert [row["step"] for row in outcome.document["missing_frames"]] == [10]
    assert set(outcome.document["undecodable_steps"]) >= {20, 30, 40}
    assert inshrink("verify", exact).code == 1
    assert inshrink("restore", exact, "-o", tmp_path / "out").code == 3


def test_steps_that_the_archive_lacks_fail_a_verification_against_the_run(run: Path, tmp_path: Path) -> None:
    document("compress", run, "-o", tmp_path / "a.inshrink", "--steps", "10:20", "--optimizer", "drop")
    outcome = inshrink("verify", tmp_path / "a.inshrink", "--against", run, "--json")
    assert outcome.code == 1
    assert outcome.document["missing_steps"] == [30, 40]


def test_pruning_shows_a_plan_and_what_stays_keeps_every_bit(run: Path, exact: Path, tmp_path: Path) -> None:
    before = contents(exact)
    plan = document("prune", exact, "--keep-last", "1", "--keep", "20")
    assert (plan["applied"], plan["removed"], contents(exact) == before) == (False, [10, 30], True)
    done = document("prune", exact, "--keep-last", "1", "--keep", "20", "--apply")
    assert (done["applied"], done["removed"], done["kept"]) == (True, [10, 30], [20, 40])
    assert document("inspect", exact)["steps"] == [20, 40]
    document("restore", exact, "--all", "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == {
        name: content for name, content in contents(run).items() if name in ("step_0020.pt", "step_0040.pt")
    }
    assert document("compress", run, "-o", exact)["appended"] == []


def test_pruning_the_state_of_older_steps_leaves_their_weights(
    run: Path, exact: Path, tmp_path: Path
) -> None:
    done = document("prune", exact, "--optimizer-last", "1", "--apply")
    assert (done["stripped"], done["removed"]) == ([10, 20, 30], [])
    assert done["bytes_freed"] > 0
    assert document("restore", exact, "--step", "40", "-o", tmp_path / "last")["steps_without_state"] == []
    assert (tmp_path / "last" / "step_0040.pt").read_bytes() == (run / "step_0040.pt").read_bytes()
    found = document("restore", exact, "--step", "20", "-o", tmp_path / "old")
    assert found["steps_without_state"] == [20]
    assert "weight" in found["exact_roles"]


def test_best_steps_by_a_log_are_kept(exact: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("step,val_loss\n10,0.1\n20,0.4\n30,0.3\n40,0.2\n")
    plan = document("prune", exact, "--keep-best", "val_loss:2", "--log", log)
    assert (plan["kept"], plan["removed"]) == ([10, 40], [20, 30])


def test_originals_are_released_when_the_archive_gives_them_back(
    run: Path, exact: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    plan = document("release", copy, exact)
    assert (plan["applied"], plan["released"], contents(copy) == contents(run)) == (False, [10, 20], True)
    assert plan["bytes_freed"] == sum((copy / f"step_00{step}.pt").stat().st_size for step in (10, 20))
    done = document("release", copy, exact, "--apply", "--keep-newest", "1")
    assert (done["applied"], done["released"]) == (True, [10, 20, 30])
    assert [*contents(copy)] == ["step_0040.pt"]
    document("restore", exact, "--steps", "10:30", "-o", copy)
    assert contents(copy) == contents(run)


def test_originals_that_come_back_with_an_error_are_released_only_when_that_is_asked(
    run: Path, made_lossy: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    refused = document("release", copy, made_lossy, "--apply")
    assert (refused["released"], contents(copy) == contents(run)) == ([], True)
    assert all(row["why"] for row in refused["steps"])
    assert document("release", copy, made_lossy, "--apply", "--lossy")["released"] == [10, 20]


def test_a_damaged_archive_releases_nothing(run: Path, exact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    path = largest_file(exact)
    path.write_bytes(path.read_bytes()[:-1000])
    assert inshrink("release", copy, exact, "--apply", "--json").code in (1, 3)
    assert contents(copy) == contents(run)
