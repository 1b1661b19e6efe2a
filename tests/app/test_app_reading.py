"""A large run shows its newest checkpoints first; a thread reads the others, until the whole is there."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import streamlit as st
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.services import opening
from inshrink_app.services.opening import Reading
from streamlit.testing.v1 import AppTest

import inshrink_core
from tests.app.builders import explorer, linked, texts, write_run
from tests.processes import until

STEPS = tuple(range(10, 130, 10))


@pytest.fixture
def run(root, monkeypatch) -> Path:
    """Return a run with a broken checkpoint, of which two are read at once."""
    monkeypatch.setattr(opening, "_SECONDS_AT_ONCE", (-1.0, -1.0))
    run = write_run(root / "run", STEPS)
    broken = next(run.glob("*40*"))
    broken.write_bytes(broken.read_bytes()[:99])
    return run


@pytest.fixture
def gate(monkeypatch) -> Iterator[Callable[[], None]]:
    """Hold the thread before its third checkpoint until the function that is returned was called."""
    is_open, goes_on = threading.Event(), Reading._goes_on

    def held(self: Reading, n_new: int) -> bool:
        if n_new == 2:
            is_open.wait(60)
        return goes_on(self, n_new)

    monkeypatch.setattr(Reading, "_goes_on", held)
    yield is_open.set
    is_open.set()


def reading_at(run: Path) -> Reading:
    """Return the reading of a run whose thread has read two checkpoints, and waits."""
    reading = services.reading_of(services.load_subject(str(run)))
    reading.start()
    until(lambda: reading.n_read == 4)
    return reading


def test_the_newest_come_first_and_the_whole_is_what_an_ordinary_opening_returns(run, monkeypatch):
    first = services.load_subject(str(run))
    assert (first.steps, first.n_unread) == ((110, 120), 10)
    assert not first.unreadable
    whole = services.load_whole(str(run))
    assert (len(whole.steps), whole.n_unread) == (11, 0)
    assert [Path(name).name for name, _ in whole.unreadable] == [next(run.glob("*40*")).name]
    token = services.opened(str(run)).token

    st.cache_resource.clear()
    monkeypatch.setattr(opening, "_SECONDS_AT_ONCE", (60.0, 600.0))
    ordinary = services.opened(str(run))
    assert ordinary.token == token
    assert ordinary.subject == whole
    assert ordinary.subject.steps == inshrink_core.open(run).steps


def test_files_of_one_step_are_read_together(root):
    names = ["step_2_rank0.pt", "last.pt", "step_10_rank1.pt", "step_2_rank1.pt", "step_10_rank0.pt"]
    found = opening._latest_first([Path(name) for name in names])
    assert [[path.name for path in step] for step in found] == [
        ["step_10_rank1.pt", "step_10_rank0.pt"],
        ["step_2_rank0.pt", "step_2_rank1.pt"],
        ["last.pt"],
    ]


def test_a_stopped_reading_keeps_what_it_has_read_and_goes_on_only_when_asked(run, gate):
    reading = reading_at(run)
    reading.stop()
    gate()
    reading.wait()
    more = services.load_subject(str(run))
    assert (more.steps, more.n_unread) == ((90, 100, 110, 120), 8)
    reading.start()
    assert reading._thread is None
    reading.resume()
    reading.start()
    reading.wait()
    assert len(services.load_subject(str(run)).steps) == 11


@pytest.mark.parametrize("why", ["stopped", "unwanted", "forgotten"])
def test_a_run_that_was_stopped_that_no_page_asks_for_or_that_left_memory_is_read_no_further(
    run, gate, monkeypatch, why
):
    reading = reading_at(run)
    if why == "stopped":
        reading.stop()
        reading.start()  # A page that asks before the thread has noticed does not undo it.
    elif why == "unwanted":
        monkeypatch.setattr(opening.time, "monotonic", lambda now=time.monotonic: now() + 60)
    else:
        st.cache_resource.clear()
    gate()
    reading.wait()
    assert reading.n_read == 4


def test_two_pages_learn_of_the_end_each_by_itself(run):
    first = services.load_subject(str(run))
    reading = services.reading_of(first)
    assert not reading.is_newer(first.n_unread, 0)
    reading.start()
    reading.wait()
    for _ in range(2):
        assert reading.is_newer(first.n_unread, 0)
        assert services.load_subject(str(run)).n_unread == 0
    assert not reading.is_newer(0, 0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_grows_meanwhile_shows_the_new_step_after_the_thread_has_ended(run, gate, asked):
    reading = reading_at(run)
    write_run(run, (130,))
    assert services.load_subject(str(run)).steps == (110, 120)
    if asked:
        services.refresh(run)
        reading.start()
    gate()
    reading.wait()
    found = services.load_subject(str(run))
    assert found.steps[-1] == 130
    assert found.n_unread == (7 if asked else 0)
    assert services.load_whole(str(run)).steps == inshrink_core.open(run).steps


def test_files_that_vanish_meanwhile_are_left_out(run, gate):
    reading = reading_at(run)
    next(run.glob("*50*")).unlink()
    gate()
    reading.wait()
    assert 50 not in services.load_subject(str(run)).steps
    assert services.load_whole(str(run)).steps == inshrink_core.open(run).steps


def test_a_failure_of_the_thread_is_told_once_and_the_run_can_be_opened_again(run, monkeypatch):
    first = services.load_subject(str(run))
    reading = services.reading_of(first)
    with monkeypatch.context() as patched:
        patched.setattr(opening, "run_content", lambda _: 1 / 0)
        reading.start()
        reading.wait()
    assert reading.is_newer(first.n_unread, 0)
    with pytest.raises(ZeroDivisionError):
        services.load_subject(str(run))
    assert services.load_subject(str(run)) == first
    shutil.rmtree(run)
    reading.start()
    reading.wait()
    with pytest.raises(ServiceError, match="nothing at this path"):
        services.load_subject(str(run))


def test_the_page_shows_the_last_step_before_the_rest_is_read_and_the_whole_afterwards(
    run, gate, asked_for, jobs
):
    app = linked("run", run=str(run))
    assert "the newest 2 steps, 10 not read yet" in texts(app)
    assert "Sizes and bits follow" in texts(app)
    shown = services.load_subject(str(run))
    until(lambda: services.latest_measured(shown, "magnitude") is not None)
    assert not jobs.started
    archives = linked("archives", run=str(run))
    assert "The rest of this page follows" in texts(archives)
    gate()
    services.reading_of(shown).wait()
    assert isinstance(app.run(), AppTest)
    assert "11 steps" in texts(app)
    assert "1 checkpoint" in texts(app)
    assert "Sizes and bits follow" not in texts(app)


def test_the_first_picture_waits_for_no_measurement(run, gate, asked_for, jobs, monkeypatch):
    may_measure = threading.Event()
    measure = opening._perform
    monkeypatch.setattr(opening, "_perform", lambda *given: may_measure.wait(60) and measure(*given))
    app = explorer("run", run=str(run))
    assert "Not all steps are measured yet" in texts(app)
    shown = services.load_subject(str(run))
    reading = services.reading_of(shown)
    assert (reading.n_answers, len(reading._answers)) == (0, 1)
    may_measure.set()
    until(lambda: reading.n_answers == 1)
    assert reading.is_newer(shown.n_unread, 0)
    assert isinstance(app.run(), AppTest)
    assert "Largest share of the total" in texts(app)
