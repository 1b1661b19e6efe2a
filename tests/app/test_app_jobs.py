"""Jobs: what the explorer keeps of them, whoever dies, and their drawer in every state."""

import errno
import json
import shlex
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from inshrink_app.jobs import job as job_module
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.jobs.work import Work
from inshrink_app.model.problem import Problem

from inshrink_core.plugins import VERBS, plugins
from inshrink_core.request import request_of
from tests.app.builders import button, drawer, texts
from tests.app.job_stubs import asked as request_asked
from tests.app.job_stubs import scripted, wait, work_of
from tests.processes import until

TELL = """
import json, os, signal, sys, time
def tell(done, total, **more):
    message = {"verb": "verify", "done": done, "total": total, "unit": "steps", "step": 10, **more}
    print(json.dumps(message), file=sys.stderr, flush=True)
"""
ECHO = (
    TELL
    + """
print("at work", file=sys.stderr)
tell(1, 2, found={"step": 1})
print(json.dumps({"text": json.loads(sys.argv[2])}))
"""
)
WRITING = TELL + "open(sys.argv[2], 'a').write('x'); tell(1, 2); print(json.dumps({'text': sys.argv[2]}))"
STUCK = TELL + "tell(0, 9); time.sleep(600)"
STUBBORN = TELL + "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(0, 9); time.sleep(60)"
REFUSING = """
import json, sys
print(json.dumps({"error": {"message": "b: a; c", "where": "b", "remedy": "c", "exit_code": 3}}))
sys.exit(3)
"""
FINDING = TELL + "print(json.dumps({'text': 'found', 'error': {'message': 'a check failed'}})); sys.exit(1)"
CRASHING = "import sys; sys.stderr.write('Segmentation something'); sys.exit(5)"
DYING = "import os; os._exit(9)"
BABBLING = "print('this is no JSON', flush=True)"
EMPTY_HANDED = "pass"
NAMING = "import json, sys; print(json.dumps({'text': sys.argv[1]}))"
JOB_ID = "00000000deadbeef"


def registry(folder: Path, script: str = ECHO, **more: Any) -> JobRegistry:
    """Return a registry whose commands are a few lines of Python."""
    return JobRegistry(scripted(script), folder, load=text_of, **more)


def text_of(job: Job) -> Any:
    return job.reports()[-1]["text"]


def asked(text: object = "hello", of: tuple[str, ...] = ()) -> Work:
    return work_of(["verify", json.dumps(text)], of=of)


def leave(folder: Path, work: Work | None = None, job_id: str = JOB_ID) -> Job:
    """Leave what an explorer leaves that was killed."""
    job = Job(work or asked(), "running", 3, 9, "step 3", 1e9, job_id=job_id, folder=folder / job_id)
    job.make_folder()
    job.store()
    return job


def test_a_finished_job_has_its_result_and_its_progress_and_the_same_question_is_worked_on_once(tmp_path):
    jobs = registry(tmp_path)
    job = jobs.start(asked())
    assert jobs.start(asked()) is job
    wait(job)
    assert (job.state, job.result, job.problem) == ("finished", "hello", None)
    assert (job.done, job.total, job.item) == (1, 2, "verifying step 10")
    assert job.ended_at is not None
    assert jobs.start(asked()) is jobs.get(asked()) is job
    assert jobs.get(asked("other")) is None
    # Asking again makes a new job, and keeps the old one.
    second = wait(jobs.start(asked(), again=True))
    assert {one.job_id for one in jobs.jobs()} == {job.job_id, second.job_id}
    assert jobs.get(asked()) is second
    assert jobs.newest("archives", "verify", "", "finished") is second


def test_the_progress_of_a_search_counts_evaluations(tmp_path):
    tell = "tell(14, 380, verb='search', unit='trials', step=700); print('{}')"
    job = wait(registry(tmp_path, TELL + tell).start(asked()))
    assert (job.item, job.fraction) == ("evaluation 14, step 700", 14 / 380)


def test_a_finished_job_is_there_after_a_restart_with_what_was_told_of_its_result(tmp_path):
    job = wait(registry(tmp_path).start(asked([1, 2])))
    again = registry(tmp_path)
    (kept,) = again.jobs()
    assert again.get(asked([1, 2])) is kept
    assert (kept.state, kept.result, kept.partial_rows()) == ("finished", [1, 2], job.rows)
    assert again.start(asked([1, 2])) is kept
    assert again.start(asked([1, 2], of=("changed",))) is not kept
    (tmp_path / job.job_id / "rows.jsonl").write_text('{"step": 1}\n{"step"')
    (tmp_path / job.job_id / "result").write_text("cut o")
    assert registry(tmp_path).find(job.job_id).partial_rows() == [{"step": 1}]
    assert registry(tmp_path).get(asked([1, 2])) is None, "a result that cannot be read"


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


def test_an_end_shows_once_it_is_stored(tmp_path, monkeypatch):
    write = job_module.write_atomic
    monkeypatch.setattr(job_module, "write_atomic", lambda *given: (time.sleep(0.1), write(*given)))
    job = registry(tmp_path).start(asked())
    until(lambda: not job.is_running)
    assert json.loads((tmp_path / job.job_id / "job.json").read_text())["state"] == job.state == "finished"
    wait(job)


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


def test_what_a_worker_wrote_before_it_died_stands_in_the_details_and_its_files_go_with_the_job(tmp_path):
    building, folder = tmp_path / "building", tmp_path / "jobs"
    building.mkdir()
    jobs = registry(folder, CRASHING)
    job = wait(jobs.start(work_of(["verify", "a"], scratch=(str(building),))))
    assert "Segmentation something" in job.problem.detail
    assert registry(folder).jobs()[0].problem == job.problem
    assert building.exists(), "to go on with"
    jobs.remove(job.job_id)
    assert jobs.jobs() == ()
    assert not building.exists()
    assert list(folder.iterdir()) == []


def test_the_log_is_bounded_and_on_single_lines(tmp_path):
    kept = leave(tmp_path)
    kept.log("a\nforged line")
    assert len(kept.log_text().splitlines()) == 1
    for _ in range(30):
        kept.log("x" * 20_000)
    assert (kept.folder / "log.txt").stat().st_size < 300_000


def test_commands_run_one_after_the_other_and_what_they_made_for_each_other_goes(tmp_path):
    between, target = tmp_path / "between", tmp_path / "target"
    words = [["verify", str(between)], ["verify", str(target)]]
    job = wait(registry(tmp_path / "jobs", WRITING).start(work_of(*words, scratch=(str(between),))))
    assert (job.state, job.result, job.fraction) == ("finished", str(target), 1.0)
    assert (between.exists(), target.exists()) == (False, True)


def test_names_of_scratch_files_make_no_other_question(tmp_path):
    first, second = (
        work_of(["verify", str(tmp_path / name)], scratch=(str(tmp_path / name),)) for name in "ab"
    )
    assert first.key == second.key != work_of(["verify", str(tmp_path / "a")]).key


def test_a_problem_of_a_command_is_passed_on_and_a_check_that_failed_is_a_result(tmp_path):
    job = wait(registry(tmp_path, REFUSING).start(asked()))
    assert (job.state, job.problem) == ("failed", Problem("a", "b", "c"))
    job = wait(registry(tmp_path / "other", FINDING).start(asked()))
    assert (job.state, job.result) == ("finished", "found")


@pytest.mark.parametrize("script", [DYING, BABBLING, EMPTY_HANDED])
def test_a_worker_that_ends_without_a_result_fails_in_words_and_can_be_started_anew(tmp_path, script):
    jobs = registry(tmp_path, script)
    job = wait(jobs.start(asked()))
    assert job.state == "failed"
    assert "ended before it was done" in job.problem.what
    assert job.problem.remedy
    assert wait(jobs.start(asked())) is not job


def test_a_result_that_cannot_be_loaded_fails_in_words(tmp_path):
    job = wait(JobRegistry(scripted(ECHO), tmp_path, load=lambda _: json.loads("no JSON")).start(asked()))
    assert job.state == "failed"


def test_results_of_older_jobs_leave_memory_and_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("inshrink_app.jobs.registry._MAX_RESULTS", 1)
    jobs = registry(tmp_path)
    first, *_ = [wait(jobs.start(asked(key))) for key in "abc"]
    assert first.result is None
    assert jobs.get(asked("a")) is first
    assert first.result == "a"


def test_jobs_beyond_the_bound_wait_their_turn_in_the_order_they_were_asked_for(tmp_path):
    jobs = registry(tmp_path, STUCK, most=2)
    first, second, third, fourth = (jobs.start(asked(key)) for key in "abcd")
    assert [job.state for job in (first, second, third, fourth)] == ["running", "running", "queued", "queued"]
    assert [jobs.place(job) for job in (first, second, third, fourth)] == [None, None, 1, 2]
    assert third.process is None
    assert third.is_running
    assert not third.is_elsewhere
    assert jobs.start(asked("c")) is third
    jobs.stop(first)
    until(lambda: third.state == "running")
    assert jobs.place(fourth) == 1
    jobs.stop(second)
    until(lambda: fourth.state == "running")
    for job in (third, fourth):
        jobs.stop(job)


def test_a_queued_job_can_be_cancelled_before_it_begins_and_asked_for_again(tmp_path):
    jobs = registry(tmp_path, STUCK, most=1)
    first, second, third = (jobs.start(asked(key)) for key in "abc")
    jobs.stop(second)
    assert (second.state, second.process, jobs.place(second)) == ("cancelled", None, None)
    assert json.loads((tmp_path / second.job_id / "job.json").read_text())["state"] == "cancelled"
    assert jobs.place(third) == 1
    assert jobs.resume(second.job_id) is second
    assert (second.state, jobs.place(second)) == ("queued", 2)
    for job in (second, third, first):
        jobs.stop(job)


def test_a_job_that_the_system_does_not_start_fails_in_words_and_lets_the_next_one_in(tmp_path):
    refuse = Mock(side_effect=OSError(11, "Resource temporarily unavailable"))
    jobs = JobRegistry(refuse, tmp_path, most=1)
    for key in "ab":
        job = jobs.start(asked(key))
        assert job.state == "failed"
        assert "no process could be started" in job.problem.what


def labels(app: object) -> list[str]:
    return [found.label for found in app.button]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("state", "offered"),
    [
        ("queued", "Cancel"),
        ("running", "Cancel"),
        ("finished", "Show"),
        ("failed", "Try again"),
        ("cancelled", "Resume"),
        ("interrupted", "Resume"),
    ],
)
def test_every_state_is_named_and_offers_what_can_be_done(root, jobs, state, offered):
    job = jobs.put(["verify", str(root / "run.inshrink")], state=state)
    if state == "failed":
        job.problem = Problem("a frame is damaged", "frame 3", "restore a backup")
    app = drawer()
    assert state.capitalize() in texts(app)
    assert offered in labels(app)
    assert ("Cancel" in labels(app)) == (state in ("queued", "running"))
    assert ("A frame is damaged" in texts(app)) == (state == "failed")


def test_the_result_is_shown_where_it_belongs(archived, jobs):
    jobs.put(["sensitivity", str(archived), "--metric", "fisher"], shown=str(archived))
    app = drawer()
    assert "Measure Fisher of run" in texts(app)
    button(app, "Show").click().run()
    assert app.session_state["inshrink.run"] == str(archived)


def test_jobs_about_files_outside_of_the_roots_are_not_shown(root, jobs):
    jobs.put(["verify", "/etc/secret.inshrink"])
    jobs.put(["compare", str(root / "a"), "--against", "/etc/secret.inshrink"], state="interrupted")
    run, code = str(root / "run"), "/etc/secret.py:evaluate"
    jobs.put(["compare", str(root / "a"), "--against", run, "--evaluator", code], state="interrupted")
    jobs.put(["export", str(root / "a"), "--pack", str(root / "b")], scratch=("/etc/secret",))
    app = drawer()
    assert "secret" not in texts(app)
    assert "appear here" in texts(app)


def test_names_in_the_drawer_are_shown_as_text(root, jobs):
    job = jobs.put(["verify", str(root / "**b** [x](javascript:1).inshrink")], state="running")
    job.item = "<script>alert(1)</script>"
    app = drawer()
    assert "\\*\\*b\\*\\*" in texts(app)
    assert "\\<script\\>" in app.get("progress")[0].proto.text


def test_ended_jobs_can_be_cleared_and_running_ones_stay(root, jobs):
    jobs.put(["verify", str(root / "a.inshrink")], state="finished")
    jobs.put(["verify", str(root / "b.inshrink")], state="running")
    app = drawer()
    button(app, "Clear ended jobs").click().run()
    assert [job.state for job in jobs.kept] == ["running"]
