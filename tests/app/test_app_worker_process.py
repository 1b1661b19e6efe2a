"""The worker as the explorer starts it: nothing of the folder one stands in, and no more than it needs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

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


def work(request: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Have a worker answer a request, and return its exit code and what it told."""
    with (folder / "errors").open("wb") as errors:
        worker = running.start_worker(request, errors)
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdin, worker.stdout:
        worker.stdin.write(json.dumps({**request, "output": str(folder / "out")}) + "\n")
        worker.stdin.flush()
        told = worker.stdout.read()
        return worker.wait(120), told + (folder / "errors").read_text()


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
    code, told = work({"task": "sensitivity", "path": str(run), "metric": "magnitude"}, tmp_path)
    assert (code, executed(tmp_path / "traces")) == (0, []), told


def test_a_comparison_executes_the_evaluator_that_is_trusted_and_nothing_else_of_the_folder(
    archived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = tmp_path / "mine" / "judge.py"
    judge.parent.mkdir()
    judge.write_text(JUDGE)
    stand_in(archived, tmp_path / "traces", monkeypatch)
    monkeypatch.setenv("MY_DATA", "kept")
    request = {
        "task": "compare",
        "path": str(archived),
        "archives": [str(archived.with_name("run.inshrink"))],
        "steps": [10, 20],
        "evaluator": f"{judge}:evaluate",
        "trusted": hashlib.sha256(judge.read_bytes()).hexdigest(),
    }
    code, told = work(request, tmp_path)
    assert (code, executed(tmp_path / "traces")) == (0, []), told
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize(("trusted", "is_given"), [("", False), ("digest", True)])
def test_only_a_worker_that_starts_trusted_code_gets_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: str, is_given: bool
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with (tmp_path / "errors").open("wb") as errors:
        worker = running.start_worker({"task": "compare", "trusted": trusted}, errors)
    process, until = Path(f"/proc/{worker.pid}"), time.monotonic() + 60
    # Until it has become another program, it has nothing, or what its parent has.
    while b"inshrink_app.jobs.worker" not in (process / "cmdline").read_bytes() and time.monotonic() < until:
        time.sleep(0.01)
    given = (process / "environ").read_bytes()
    directory = Path(f"/proc/{worker.pid}/cwd").readlink()
    worker.kill()
    worker.communicate()
    assert b"HOME=" in given
    assert (b"AWS_SECRET_ACCESS_KEY" in given) == is_given
    assert list(directory.iterdir()) == []
