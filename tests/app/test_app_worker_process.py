"""The worker as the explorer starts it: nothing of the folder one stands in, and no more than it needs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from inshrink_app.services import running

from tests.app.builders import write_run
from tests.app.job_stubs import archived, archived_template
from tests.hostile import executed, lay_traps

__all__ = ["archived", "archived_template"]

JUDGE = """
import os
assert os.environ["MY_DATA"] == "kept"


def evaluate(state):
    return {"loss": float(sum(value.float().abs().sum() for value in state.values()))}
"""


def work(words: list[str], is_trusted: bool) -> tuple[int, str, str]:
    """Have a command run as the explorer starts it; return exit code, document and what else it told."""
    process = running.start_command(words, is_trusted)
    output, told = process.communicate(timeout=120)
    return process.returncode, output, told


def stand_in(folder: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder full of traps, with an environment that leads into it."""
    lay_traps(folder, traces)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}.{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_a_worker_executes_nothing_of_the_folder_that_the_explorer_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "downloaded")
    stand_in(run, tmp_path / "traces", monkeypatch)
    code, _, told = work(["sensitivity", str(run), "--metric", "magnitude"], is_trusted=False)
    assert (code, executed(tmp_path / "traces")) == (0, []), told


def test_a_comparison_executes_the_evaluator_that_is_trusted_and_nothing_else_of_the_folder(
    archived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = tmp_path / "mine" / "judge.py"
    judge.parent.mkdir()
    judge.write_text(JUDGE)
    stand_in(archived, tmp_path / "traces", monkeypatch)
    monkeypatch.setenv("MY_DATA", "kept")
    archive = str(archived.with_name("run.inshrink"))
    words = ["compare", archive, "--against", str(archived), "--steps", "10,20"]
    code, output, told = work([*words, "--evaluator", f"{judge}:evaluate"], is_trusted=True)
    assert (code, executed(tmp_path / "traces")) == (0, []), told
    assert [row["step"] for row in json.loads(output)["steps"]] == [10, 20]


@pytest.mark.parametrize(("trusted", "is_given"), [(False, False), (True, True)])
def test_only_a_worker_that_starts_trusted_code_gets_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool, is_given: bool
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    worker = running.start_command(["verify", str(tmp_path)], trusted)
    process, until = Path(f"/proc/{worker.pid}"), time.monotonic() + 60
    # Until it has become another program, it has nothing, or what its parent has.
    while b"inshrink_core.cli" not in (process / "cmdline").read_bytes() and time.monotonic() < until:
        time.sleep(0.01)
    given = (process / "environ").read_bytes()
    directory = Path(f"/proc/{worker.pid}/cwd").readlink()
    worker.kill()
    worker.communicate()
    assert b"HOME=" in given
    assert (b"AWS_SECRET_ACCESS_KEY" in given) == is_given
    assert list(directory.iterdir()) == []
