"""Work in another process: progress, results, problems, cancelling, and no orphans."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from inshrink_app.jobs.registry import Job, JobRegistry
from inshrink_app.widgets.tables import Problem

from tests.app.builders import write_run
from tests.app.job_stubs import scripted

WELL_BEHAVED = """
import json, sys
request = json.loads(sys.stdin.readline())
print(json.dumps({"done": 1, "total": 2, "item": "step 10"}), flush=True)
open(request["output"], "w").write(request["text"])
"""
STUCK = 'import sys; print(\'{"done": 0, "total": 9}\', flush=True); sys.stdin.read(); sys.exit(1)'
REFUSING = """
import json, sys
print(json.dumps({"problem": ["a", "b", "c", "d"]}), flush=True)
sys.exit(3)
"""
DYING = "import os; os._exit(9)"
BABBLING = "print('this is no JSON', flush=True)"
EMPTY_HANDED = "pass"


def registry(script: str) -> JobRegistry:
    """Return a registry whose worker is a few lines of Python."""
    return JobRegistry(scripted(script))


def start_worker() -> subprocess.Popen[str]:
    """Start the real worker."""
    command = [sys.executable, "-m", "inshrink_app.jobs.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait(job: Job, seconds: float = 60) -> Job:
    """Wait until a job has ended."""
    deadline = time.monotonic() + seconds
    while job.is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    return job


def start(jobs: JobRegistry, key: str = "key", **request: Any) -> Job:
    """Start a job whose result is the text of its output."""
    return jobs.start(key, {"text": "result", **request}, Path.read_text)


def test_a_finished_job_has_its_result_and_its_progress() -> None:
    job = wait(start(registry(WELL_BEHAVED)))
    assert (job.state, job.result, job.problem) == ("finished", "result", None)
    assert (job.done, job.total, job.item) == (1, 2, "step 10")
    assert job.ended_at is not None


def test_the_same_question_is_worked_on_once() -> None:
    jobs = registry(WELL_BEHAVED)
    first = start(jobs)
    assert start(jobs) is first
    wait(first)
    assert start(jobs) is first
    assert jobs.get("key") is first
    assert jobs.get("other") is None


def test_a_problem_of_the_worker_is_passed_on() -> None:
    job = wait(start(registry(REFUSING)))
    assert (job.state, job.problem) == ("failed", Problem("a", "b", "c", "d"))


@pytest.mark.parametrize("script", [DYING, BABBLING, EMPTY_HANDED])
def test_a_worker_that_ends_without_a_result_fails_in_words(script: str) -> None:
    job = wait(start(registry(script)))
    assert job.state == "failed"
    assert job.problem is not None
    assert "ended before it was done" in job.problem.what
    assert job.problem.remedy


def test_a_result_that_cannot_be_loaded_fails_in_words() -> None:
    jobs = registry(WELL_BEHAVED)
    job = wait(jobs.start("key", {"text": "no JSON"}, lambda path: json.loads(path.read_text())))
    assert job.state == "failed"


def test_a_cancelled_job_ends_its_process_within_two_seconds() -> None:
    jobs = registry(STUCK)
    job = start(jobs)
    jobs.cancel("key")
    assert job.state == "cancelled"
    assert job.process.wait(2) != 0
    jobs.forget("key")
    assert jobs.get("key") is None


def test_a_failed_job_can_be_started_anew() -> None:
    jobs = registry(DYING)
    first = wait(start(jobs))
    assert start(jobs) is not first


def test_the_worker_leaves_when_the_explorer_does(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tuple(range(1, 9)))
    worker = start_worker()
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdin, worker.stdout:
        request = {"path": str(run), "metric": "magnitude", "output": str(tmp_path / "result")}
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.close()
        assert worker.wait(60) != 0
    assert not (tmp_path / "result").exists()


def test_the_worker_reports_what_the_engine_refuses(tmp_path: Path) -> None:
    request = {"path": str(tmp_path / "nothing"), "metric": "magnitude", "output": str(tmp_path / "out")}
    worker = start_worker()
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdin, worker.stdout:
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        message = json.loads(worker.stdout.readline())
        assert worker.wait(60) == 2
    assert "nothing" in " ".join(message["problem"])


def test_results_of_older_jobs_leave_memory_and_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inshrink_app.jobs.registry._MAX_RESULTS", 1)
    jobs = registry(WELL_BEHAVED)
    first = wait(start(jobs, "a"))
    wait(start(jobs, "b"))
    wait(start(jobs, "c"))
    assert first.result is None
    again = jobs.get(json.loads(first.key), Path.read_text)
    assert again is first
    assert again.result == "result"


def test_jobs_beyond_the_bound_wait_their_turn_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    jobs = JobRegistry(scripted(STUCK), tmp_path, most=2)
    first, second, third, fourth = (start(jobs, key) for key in "abcd")
    assert [job.state for job in (first, second, third, fourth)] == ["running", "running", "queued", "queued"]
    assert [jobs.place(job) for job in (first, second, third, fourth)] == [None, None, 1, 2]
    assert third.process is None
    assert third.is_running
    assert not third.is_elsewhere
    assert start(jobs, "c") is third
    jobs.stop(first)
    wait_until(lambda: third.state == "running")
    assert jobs.place(fourth) == 1
    jobs.stop(second)
    wait_until(lambda: fourth.state == "running")
    for job in (third, fourth):
        jobs.stop(job)


def test_a_queued_job_can_be_cancelled_before_it_begins_and_asked_for_again(tmp_path: Path) -> None:
    jobs = JobRegistry(scripted(STUCK), tmp_path, most=1)
    first, second, third = (start(jobs, key) for key in "abc")
    jobs.cancel("b")
    assert (second.state, second.process, jobs.place(second)) == ("cancelled", None, None)
    assert json.loads((tmp_path / second.job_id / "job.json").read_text())["state"] == "cancelled"
    assert jobs.place(third) == 1
    assert jobs.resume(second.job_id, Path.read_text) is second
    assert (second.state, jobs.place(second)) == ("queued", 2)
    for job in (second, third, first):
        jobs.stop(job)


def test_a_queued_job_is_interrupted_by_the_end_of_its_explorer(tmp_path: Path) -> None:
    jobs = JobRegistry(scripted(STUCK), tmp_path, most=1)
    first, second = start(jobs, "a", task="verify"), start(jobs, "b", task="verify")
    other = JobRegistry(scripted(STUCK), tmp_path, most=1)
    seen = other.find(second.job_id)
    assert seen is not None
    assert (seen.state, seen.is_elsewhere, other.place(seen)) == ("queued", True, None)
    # Nothing goes on in an explorer that has ended, and its locks go with its process.
    jobs._waiting.clear()
    assert second.folder is not None
    second.folder.release_lock()
    assert other.find(second.job_id) is seen
    assert seen.state == "interrupted"
    assert other.resume(second.job_id, Path.read_text) is seen
    assert seen.state == "running"
    other.stop(seen)
    jobs.stop(first)


def test_a_job_that_the_system_does_not_start_fails_in_words_and_lets_the_next_one_in(tmp_path: Path) -> None:
    def refuse(request: object, errors: object) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    jobs = JobRegistry(refuse, tmp_path, most=1)
    for key in "ab":
        job = start(jobs, key)
        assert job.state == "failed"
        assert job.problem is not None
        assert "no process could be started" in job.problem.what


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
