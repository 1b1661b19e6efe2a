"""Work in another process: progress, results, problems, cancelling, and no orphans."""

from __future__ import annotations

import json
from typing import Any

import pytest
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.jobs.work import Work
from inshrink_app.model.problem import Problem

from tests.app.job_stubs import scripted, wait, work_of
from tests.processes import until

TELL = """
import json, os, sys, time
def tell(done, total, **more):
    message = {"verb": "verify", "done": done, "total": total, "unit": "steps", "step": 10, **more}
    print(json.dumps(message), file=sys.stderr, flush=True)
"""
WELL_BEHAVED = TELL + "tell(1, 2); print(json.dumps({'text': sys.argv[2]}))"
STUCK = TELL + "tell(0, 9); time.sleep(600)"
REFUSING = (
    TELL
    + """
print(json.dumps({"error": {"message": "b: a; c", "where": "b", "remedy": "c", "exit_code": 3}}))
sys.exit(3)
"""
)
FINDING = TELL + "print(json.dumps({'text': 'found', 'error': {'message': 'a check failed'}})); sys.exit(1)"
DYING = "import os; os._exit(9)"
BABBLING = "print('this is no JSON', flush=True)"
EMPTY_HANDED = "pass"


def registry(script: str) -> JobRegistry:
    """Return a registry whose commands are a few lines of Python."""
    return JobRegistry(scripted(script), load=text_of)


def text_of(job: Job) -> str:
    return str(job.reports()[-1]["text"])


def asking(key: str = "key") -> Work:
    """Return work whose result is the text of its last request."""
    return work_of(["verify", "result"], of=(key,))


def start(jobs: JobRegistry, key: str = "key") -> Job:
    return jobs.start(asking(key))


def test_a_finished_job_has_its_result_and_its_progress():
    job = wait(start(registry(WELL_BEHAVED)))
    assert (job.state, job.result, job.problem) == ("finished", "result", None)
    assert (job.done, job.total, job.item) == (1, 2, "verifying step 10")
    assert job.ended_at is not None


def test_the_same_question_is_worked_on_once():
    jobs = registry(WELL_BEHAVED)
    first = start(jobs)
    assert start(jobs) is first
    wait(first)
    assert start(jobs) is first
    assert jobs.get(asking()) is first
    assert jobs.get(asking("other")) is None


def test_a_check_that_failed_is_a_result():
    job = wait(start(registry(FINDING)))
    assert (job.state, job.result) == ("finished", "found")


def test_commands_run_one_after_the_other_and_what_they_made_for_each_other_goes(tmp_path):
    script = TELL + "open(sys.argv[2], 'a').write('x'); tell(1, 2); print(json.dumps({'text': sys.argv[2]}))"
    between, target = tmp_path / "between", tmp_path / "target"
    words = [["verify", str(between)], ["verify", str(target)]]
    job = wait(registry(script).start(work_of(*words, scratch=(str(between),))))
    assert (job.state, job.result, job.fraction) == ("finished", str(target), 1.0)
    assert (between.exists(), target.exists()) == (False, True)


def test_names_of_scratch_files_make_no_other_question(tmp_path):
    first, second = (
        work_of(["verify", str(tmp_path / name)], scratch=(str(tmp_path / name),)) for name in "ab"
    )
    assert first.key == second.key != work_of(["verify", str(tmp_path / "a")]).key


def test_a_problem_of_a_command_is_passed_on():
    job = wait(start(registry(REFUSING)))
    assert (job.state, job.problem) == ("failed", Problem("a", "b", "c"))


@pytest.mark.parametrize("script", [DYING, BABBLING, EMPTY_HANDED])
def test_a_worker_that_ends_without_a_result_fails_in_words(script):
    job = wait(start(registry(script)))
    assert job.state == "failed"
    assert "ended before it was done" in job.problem.what
    assert job.problem.remedy


def test_a_result_that_cannot_be_loaded_fails_in_words():
    job = wait(start(JobRegistry(scripted(WELL_BEHAVED), load=lambda _: json.loads("no JSON"))))
    assert job.state == "failed"


def test_a_cancelled_job_ends_its_process_within_two_seconds():
    jobs = registry(STUCK)
    job = start(jobs)
    jobs.stop(job)
    assert job.state == "cancelled"
    assert job.process.wait(2) != 0
    jobs.remove(job.job_id)
    assert jobs.get(asking()) is None


def test_a_failed_job_can_be_started_anew():
    jobs = registry(DYING)
    first = wait(start(jobs))
    assert start(jobs) is not first


def test_results_of_older_jobs_leave_memory_and_are_read_again(monkeypatch):
    monkeypatch.setattr("inshrink_app.jobs.registry._MAX_RESULTS", 1)
    jobs = registry(WELL_BEHAVED)
    first = wait(start(jobs, "a"))
    wait(start(jobs, "b"))
    wait(start(jobs, "c"))
    assert first.result is None
    again = jobs.get(asking("a"))
    assert again is first
    assert again.result == "result"


def test_jobs_beyond_the_bound_wait_their_turn_in_the_order_they_were_asked_for(tmp_path):
    jobs = JobRegistry(scripted(STUCK), tmp_path, most=2)
    first, second, third, fourth = (start(jobs, key) for key in "abcd")
    assert [job.state for job in (first, second, third, fourth)] == ["running", "running", "queued", "queued"]
    assert [jobs.place(job) for job in (first, second, third, fourth)] == [None, None, 1, 2]
    assert third.process is None
    assert third.is_running
    assert not third.is_elsewhere
    assert start(jobs, "c") is third
    jobs.stop(first)
    until(lambda: third.state == "running")
    assert jobs.place(fourth) == 1
    jobs.stop(second)
    until(lambda: fourth.state == "running")
    for job in (third, fourth):
        jobs.stop(job)


def test_a_queued_job_can_be_cancelled_before_it_begins_and_asked_for_again(tmp_path):
    jobs = JobRegistry(scripted(STUCK), tmp_path, most=1)
    first, second, third = (start(jobs, key) for key in "abc")
    jobs.stop(second)
    assert (second.state, second.process, jobs.place(second)) == ("cancelled", None, None)
    assert json.loads((tmp_path / second.job_id / "job.json").read_text())["state"] == "cancelled"
    assert jobs.place(third) == 1
    assert jobs.resume(second.job_id) is second
    assert (second.state, jobs.place(second)) == ("queued", 2)
    for job in (second, third, first):
        jobs.stop(job)


def test_a_queued_job_is_interrupted_by_the_end_of_its_explorer(tmp_path):
    jobs = JobRegistry(scripted(STUCK), tmp_path, most=1)
    first, second = start(jobs, "a"), start(jobs, "b")
    other = JobRegistry(scripted(STUCK), tmp_path, most=1)
    seen = other.find(second.job_id)
    assert (seen.state, seen.is_elsewhere, other.place(seen)) == ("queued", True, None)
    # Nothing goes on in an explorer that has ended, and its locks go with its process.
    jobs._waiting.clear()
    second.release_lock()
    assert other.find(second.job_id) is seen
    assert seen.state == "interrupted"
    assert other.resume(second.job_id) is seen
    assert seen.state == "running"
    other.stop(seen)
    jobs.stop(first)


def test_a_job_that_the_system_does_not_start_fails_in_words_and_lets_the_next_one_in(tmp_path):
    def refuse(job: Job) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    jobs = JobRegistry(refuse, tmp_path, most=1)
    for key in "ab":
        job = start(jobs, key)
        assert job.state == "failed"
        assert "no process could be started" in job.problem.what
