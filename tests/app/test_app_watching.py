"""A run that grows while it is open: what a look reads, what is kept, and what stays on the page."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.printed import python_text
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.model.subject import Subject
from inshrink_app.services import headers, opening
from inshrink_app.widgets import header as watch

import inshrink_core
from tests.app.builders import charts, explorer, sensitivity_table, texts, write_run
from tests.app.job_stubs import scripted, work_of


@pytest.fixture
def run(root, jobs) -> Path:
    jobs.answers["sensitivity"] = sensitivity_table()
    return write_run(root / "run")


def test_a_look_counts_reruns_only_where_there_is_another_checkpoint(run, monkeypatch):
    reruns: list[bool] = []
    monkeypatch.setattr(watch.st, "session_state", {})
    monkeypatch.setattr(watch.st, "badge", lambda *_, **__: None)
    monkeypatch.setattr(watch.st, "rerun", lambda: reruns.append(True))
    found = services.opened(str(run))
    read = found.subject.bytes_read

    def look() -> int:
        watch.look.__wrapped__(str(run), found.token, found.stamp)
        return len(reruns)

    assert look() == 0, "nothing has changed"
    (run / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n')
    assert look() == look() == look() == 0, "a log that grows is no checkpoint"
    write_run(run, (40,))
    assert look() == 0, "it may still be written"
    assert look() == 1
    grown = services.load_subject(str(run))
    assert grown.steps == (10, 20, 30, 40)
    assert grown.bytes_read - read < read, "headers that are known are not read again"
    found = services.opened(str(run))
    assert look() == 1


def test_what_was_measured_stays_until_the_new_checkpoints_are(run, jobs):
    app = explorer("run", run=str(run), metric="magnitude")
    assert charts(app) == 1
    jobs.state = "running"
    write_run(run, (40,))
    app.run()
    assert [work.topic for work in jobs.started] == ["magnitude", "magnitude"]
    assert any(found.label == "Cancel" for found in app.button)
    assert charts(app) == 1


def test_a_run_is_archived_as_it_grows(root, jobs):
    write_run(root / "run")
    jobs.state = "running"
    app = explorer("archives", run=str(root / "run"), panel="write")
    app.toggle(key="export.watch").set_value(True).run()
    assert not any(found.key == "export.packed" for found in app.toggle)
    next(found for found in app.button if found.label == "Write archive").click().run()
    assert "--watch" in jobs.last
    assert "--steps" not in jobs.last
    assert "Watching the run, at step 30" in texts(app)
    assert services.describe(jobs.kept[-1]).title == "Archive run as it grows, to run-weights.inshrink"
    printed = python_text(jobs.kept[-1].requests)
    assert f"inshrink_core.compress('{root}/run', '{root}/run-weights.inshrink'" in printed
    assert "watch=True" in printed


def test_a_job_beside_a_training_lets_others_begin(tmp_path):
    registry = JobRegistry(scripted("import time; time.sleep(60)"), tmp_path, most=1)
    started = [
        registry.start(work_of(["compress", "run", "-o", key, *words]))
        for key, words in (("a", ["--watch"]), ("b", []), ("c", []))
    ]
    assert [job.state for job in started] == ["running", "running", "queued"]
    for job in started:
        registry.stop(job)


@pytest.fixture
def known(root, monkeypatch) -> Subject:
    """Return a run that was opened before; opening one's headers fails from now on."""
    shown = services.load_subject(str(write_run(root / "run")))
    st.cache_resource.clear()
    return shown


def refuse(*_: object) -> None:
    raise AssertionError("the headers were read again")


def test_a_run_that_did_not_change_is_opened_without_reading_its_headers(known, monkeypatch):
    monkeypatch.setattr(inshrink_core, "open", refuse)
    again = services.load_subject(str(known.path))
    assert dataclasses.replace(again, bytes_read=known.bytes_read) == known


def test_a_changed_file_or_a_refresh_reads_the_headers_again(known):
    write_run(known.path, (40,))
    assert services.load_subject(str(known.path)).steps == (10, 20, 30, 40)
    services.refresh(known.path)
    stamp = headers.files_stamp(known.path)
    assert stamp is not None
    assert headers.stored_headers(known.path, stamp) is None


@pytest.mark.parametrize("damage", [b"", b"0" * 64 + b"\n{}", b"\xff"])
def test_a_damaged_file_is_as_good_as_none(known, damage):
    file = headers.file_of_run("headers", known.path)
    file.write_bytes(damage)
    assert services.load_subject(str(known.path)) == known


def test_only_the_newest_are_kept(known, monkeypatch):
    monkeypatch.setattr(headers, "_MAX_STORED", 2)
    for name in "abc":
        headers.store_headers(dataclasses.replace(known, path=known.path / name), "token", "stamp")
    assert len(list(headers.file_of_run("headers", known.path).parent.iterdir())) == 2


def test_few_runs_are_open_at_a_time_and_each_once(root):
    runs = [str(write_run(root / f"run{i}", (1,))) for i in range(6)]
    with ThreadPoolExecutor(8) as threads:
        first, *others = threads.map(lambda _: opening.engine_at(runs[0], "a"), range(8))
    assert all(other is first for other in others)
    last = [opening.engine_at(run, "a") for run in runs[1:]][-1]
    assert opening.engine_at(runs[0], "a") is not first
    assert opening.engine_at(runs[-1], "a") is last
    assert opening.engine_at(runs[-1], "b") is not last
    assert opening.engine_at(runs[-1], "c", first) is first
