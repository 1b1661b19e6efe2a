"""A run that grows while it is open: what a look reads, what is kept, and what stays on the page."""

from inshrink_app import services
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.widgets import header as watch

from tests.app.builders import charts, explorer, texts, write_run
from tests.app.job_stubs import scripted, work_of


def test_a_look_counts_reruns_only_where_there_is_another_checkpoint(run, monkeypatch):
    reruns: list[bool] = []
    monkeypatch.setattr(watch.st, "session_state", {})
    monkeypatch.setattr(watch.st, "badge", lambda *_, **__: None)
    monkeypatch.setattr(watch.st, "rerun", lambda: reruns.append(True))
    found = services.opened(str(run))
    read = found.engine.bytes_read

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
    found = services.opened(str(run))
    assert found.engine.bytes_read - read < read, "headers that are known are not read again"
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


def test_a_job_beside_a_training_lets_others_begin(tmp_path):
    registry = JobRegistry(scripted("import time; time.sleep(60)"), tmp_path, most=1)
    started = [
        registry.start(work_of(["compress", "run", "-o", key, *words]))
        for key, words in (("a", ["--watch"]), ("b", []), ("c", []))
    ]
    assert [job.state for job in started] == ["running", "running", "queued"]
    for job in started:
        registry.stop(job)
