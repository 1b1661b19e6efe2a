"""Jobs outlive their explorer: what is kept, what is believed of it, and going on."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.jobs.work import Work

from inshrink_core.plugins import VERBS, plugins
from inshrink_core.request import request_of
from tests.app.job_stubs import asked as request_asked
from tests.app.job_stubs import scripted, wait, work_of
from tests.processes import until

ECHO = """
import json, sys
print("at work", file=sys.stderr)
message = {"verb": "verify", "done": 1, "total": 1, "unit": "steps", "step": 10, "found": {"step": 1}}
print(json.dumps(message), file=sys.stderr, flush=True)
print(json.dumps({"text": json.loads(sys.argv[2])}))
"""
STUBBORN = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
message = {"verb": "verify", "done": 0, "total": 9, "unit": "steps", "step": 10}
print(json.dumps(message), file=sys.stderr, flush=True)
time.sleep(60)
"""
CRASHING = "import sys; sys.stderr.write('Segmentation something'); sys.exit(5)"
NAMING = "import json, sys; print(json.dumps({'text': sys.argv[1]}))"
JOB_ID = "00000000deadbeef"


def registry(folder: Path, script: str = ECHO) -> JobRegistry:
    return JobRegistry(scripted(script), folder, load=load)


def load(job: Job) -> object:
    return job.reports()[-1]["text"]


def asked(text: object = "hello", of: tuple[str, ...] = ()) -> Work:
    return work_of(["verify", json.dumps(text)], of=of)


def leave(folder: Path, work: Work | None = None, job_id: str = JOB_ID) -> Job:
    """Leave what an explorer leaves that was killed."""
    job = Job(work or asked(), "running", 3, 9, "step 3", 1e9, job_id=job_id, folder=folder / job_id)
    job.make_folder()
    job.store()
    return job


def test_a_job_whose_explorer_was_killed_is_interrupted_and_goes_on_under_its_id(tmp_path):
    leave(tmp_path)
    jobs = registry(tmp_path)
    (job,) = jobs.jobs()
    assert (job.state, job.done, job.total, job.job_id) == ("interrupted", 3, 9, JOB_ID)
    assert jobs.resume(JOB_ID) is job
    wait(job)
    assert (job.state, job.result, job.job_id) == ("finished", "hello", JOB_ID)
    assert job.rows == [{"step": 1, "of": json.dumps("hello")}]
    assert "at work" in job.log_text()


def test_a_restart_under_every_kind_of_job_interrupts_each_and_loses_none(tmp_path):
    kinds = [kind for verb in plugins(VERBS) if (kind := request_of(verb)) is not None]
    examples = [shlex.split(example)[1:] for kind in kinds for example in kind.EXAMPLES]
    examples = [words for words in examples if words[0] not in ("ui", "run")]
    assert len(examples) > 25
    then = request_asked(["verify", json.dumps("then")])
    for number, words in enumerate(examples):
        requests = [request_asked(words), then][: 1 + number % 2]
        work = work_of(*requests, topic="jobs.all", shown="/runs/a", of=(str(number),))
        leave(tmp_path, work, f"{number:016x}")
    jobs = registry(tmp_path, NAMING)
    assert [job.state for job in jobs.jobs()] == ["interrupted"] * len(examples)
    for job in jobs.jobs():
        jobs.resume(job.job_id)
    for job in jobs.jobs():
        wait(job)
        assert (job.state, job.result) == ("finished", "verify" if len(job.requests) > 1 else job.verb)


def test_a_job_that_no_folder_can_be_made_for_says_so_and_can_be_tried_again(tmp_path, monkeypatch):
    jobs, make = registry(tmp_path / "full"), Job.make_folder
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Job, "make_folder", Mock(side_effect=full))
    job = jobs.start(asked())
    assert job.state == "failed"
    assert "No space left on device" in job.problem.what
    assert "free some space" in job.problem.remedy
    assert jobs.jobs() == (job,)
    monkeypatch.setattr(Job, "make_folder", make)
    jobs.resume(job.job_id)
    assert (wait(job).state, job.result) == ("finished", "hello")


def test_a_finished_job_is_there_after_a_restart_with_its_result(tmp_path):
    wait(registry(tmp_path).start(asked([1, 2])))
    again = registry(tmp_path)
    job = again.get(asked([1, 2]))
    assert (job.state, job.result) == ("finished", [1, 2])
    assert again.start(asked([1, 2])) is job
    assert again.start(asked([1, 2], of=("changed",))) is not job


def test_a_kept_result_that_cannot_be_read_counts_as_none(tmp_path):
    job = wait(registry(tmp_path).start(asked(1)))
    (tmp_path / job.job_id / "result").write_text("cut o")
    assert registry(tmp_path).get(asked(1)) is None


def test_a_job_of_another_explorer_is_seen_at_work_and_left_alone(tmp_path):
    kept = leave(tmp_path)
    assert kept.take_lock()
    jobs = registry(tmp_path)
    (job,) = jobs.jobs()
    assert job.is_running
    assert job.is_elsewhere
    jobs.stop(job)
    jobs.resume(JOB_ID)
    assert job.is_running
    kept.done = 8
    kept.store()
    assert jobs.find(JOB_ID) is job
    assert job.done == 8
    kept.release_lock()
    assert jobs.jobs()[0].state == "interrupted"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"job_id": "x"}',
        json.dumps({"job_id": JOB_ID, "state": "eternal"}).encode(),
        json.dumps({"job_id": JOB_ID, "state": "running", "work": ["task"]}).encode(),
        json.dumps({"job_id": JOB_ID, "state": "running", "work": {"page": "x"}, "started_at": -1}).encode(),
        json.dumps({"job_id": JOB_ID, "work": {"page": "x", "documents": [{"verb": "verify"}]}}).encode(),
        b"[" * 100_000,
    ],
)
def test_a_damaged_record_is_no_job(tmp_path, content):
    kept = leave(tmp_path)
    (kept.folder / "job.json").write_bytes(content)
    assert registry(tmp_path).jobs() == ()


def test_a_worker_that_will_not_end_is_killed_within_two_seconds(tmp_path):
    jobs = registry(tmp_path, STUBBORN)
    job = jobs.start(asked())
    until(lambda: job.total)
    jobs.stop(job)
    assert job.state == "cancelled"
    assert job.process.wait(5) != 0


def test_what_a_worker_wrote_before_it_died_stands_in_the_details(tmp_path):
    job = wait(registry(tmp_path, CRASHING).start(asked()))
    assert "Segmentation something" in job.problem.detail
    kept = registry(tmp_path).jobs()[0]
    assert kept.problem == job.problem


def test_an_ended_job_can_be_removed_with_everything_kept_of_it(tmp_path):
    jobs = registry(tmp_path)
    job = wait(jobs.start(asked(1)))
    jobs.remove(job.job_id)
    assert jobs.jobs() == ()
    assert list(tmp_path.iterdir()) == []


def test_what_was_told_of_a_result_is_there_after_a_restart(tmp_path):
    job = wait(registry(tmp_path).start(asked()))
    (again,) = registry(tmp_path).jobs()
    assert again.told() == job.rows
    (tmp_path / job.job_id / "rows.jsonl").write_text('{"step": 1}\n{"step"')
    assert registry(tmp_path).jobs()[0].told() == [{"step": 1}]


def test_asking_again_makes_a_new_job_and_keeps_the_old(tmp_path):
    jobs = registry(tmp_path)
    first = wait(jobs.start(asked(1)))
    second = wait(jobs.start(asked(1), again=True))
    assert {job.job_id for job in jobs.jobs()} == {first.job_id, second.job_id}
    assert jobs.get(asked(1)) is second
    assert jobs.newest("archives", "verify", "", "finished") is second


def test_the_log_is_bounded_and_on_single_lines(tmp_path):
    kept = leave(tmp_path)
    kept.log("a\nforged line")
    assert len(kept.log_text().splitlines()) == 1
    for _ in range(30):
        kept.log("x" * 20_000)
    assert (kept.folder / "log.txt").stat().st_size < 300_000
