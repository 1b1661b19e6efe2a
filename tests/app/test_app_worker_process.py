"""The worker as the explorer starts it: nothing of the folder one stands in, and no more than it needs."""

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from inshrink_app.jobs.job import Job
from inshrink_app.services import jobs as job_services

from tests.app.builders import write_run
from tests.app.job_stubs import work_of, write_slow_run
from tests.hostile import executed, lay_traps
from tests.processes import descendants, is_at_work, until

JUDGE = """
import os
assert os.environ["MY_DATA"] == "kept"


def evaluate(state):
    return {"loss": float(sum(value.float().abs().sum() for value in state.values()))}
"""


def start(folder: Path, words: list[str], trusted: str = "") -> subprocess.Popen[str]:
    """Start a job as the explorer does."""
    work = work_of(words, trusted=trusted)
    job = Job(work, job_id="job", folder=folder / "job")
    job.make_folder()
    return job_services.start_process(job)


def work(folder: Path, words: list[str], trusted: str = "") -> tuple[dict[str, Any], str]:
    """Have a request performed as the explorer does; return its report and what else was written."""
    _, log = start(folder, words, trusted).communicate(timeout=120)
    return json.loads((folder / "job" / "result").read_text())[-1], log


def stand_in(folder: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder full of traps, with an environment that leads into it."""
    lay_traps(folder, traces)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}.{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_a_worker_executes_nothing_of_the_folder_that_the_explorer_was_started_in(tmp_path, monkeypatch):
    run = write_run(tmp_path / "downloaded")
    stand_in(run, tmp_path / "traces", monkeypatch)
    found, log = work(tmp_path, ["sensitivity", str(run), "--metric", "magnitude"])
    assert ("error" in found, executed(tmp_path / "traces")) == (False, []), log


def test_a_comparison_executes_the_evaluator_that_is_trusted_and_nothing_else_of_the_folder(
    archived, tmp_path, monkeypatch
):
    judge = tmp_path / "mine" / "judge.py"
    judge.parent.mkdir()
    judge.write_text(JUDGE)
    stand_in(archived, tmp_path / "traces", monkeypatch)
    monkeypatch.setenv("MY_DATA", "kept")
    archive = str(archived.with_name("run.inshrink"))
    words = ["compare", archive, "--against", str(archived), "--steps", "10,20"]
    words += ["--evaluator", f"{judge}:evaluate"]
    found, _ = work(tmp_path, words)
    assert (found["error"]["exit_code"], executed(tmp_path / "traces")) == (2, [])
    assert "cannot have code executed" in found["error"]["message"]
    found, _ = work(tmp_path, words, "0" * 64)
    assert (found["error"]["exit_code"], executed(tmp_path / "traces")) == (2, [])
    assert "not what was trusted" in found["error"]["message"]
    digest = hashlib.sha256(judge.read_bytes()).hexdigest()
    found, log = work(tmp_path, words, digest)
    assert ("error" in found, executed(tmp_path / "traces")) == (False, []), log
    assert [row["step"] for row in found["steps"]] == [10, 20]


@pytest.mark.parametrize(("trusted", "is_given"), [("", False), ("0" * 64, True)])
def test_only_a_worker_that_starts_trusted_code_gets_the_users_environment(
    tmp_path, monkeypatch, trusted, is_given
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    worker = start(tmp_path, ["verify", str(tmp_path)], trusted)
    process = Path(f"/proc/{worker.pid}")
    # Until it has become another program, it has nothing, or what its parent has.
    until(lambda: b"inshrink_app.jobs.child" in (process / "cmdline").read_bytes())
    given = (process / "environ").read_bytes()
    directory = Path(f"/proc/{worker.pid}/cwd").readlink()
    worker.kill()
    worker.communicate()
    assert b"HOME=" in given
    assert (b"AWS_SECRET_ACCESS_KEY" in given) == is_given
    assert list(directory.iterdir()) == []


def workers_of(pid: int) -> dict[int, str]:
    return {one: line for one, line in descendants(pid).items() if "execution.worker" in line}


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGKILL"])
def test_cancelling_a_job_ends_every_worker_of_its_engine(tmp_path, sent):
    """With SIGTERM as the registry cancels, or with SIGKILL where that takes too long."""
    run = write_slow_run(tmp_path / "run")
    words = ["compress", str(run), "-o", str(tmp_path / "x"), "--engine", "processes", "--workers", "2"]
    job = start(tmp_path, words)
    workers = until(lambda: found if len(found := workers_of(job.pid)) == 2 else None)
    job.send_signal(getattr(signal, sent))
    job.communicate(timeout=30)
    until(lambda: not any(is_at_work(pid, line) for pid, line in workers.items()))
