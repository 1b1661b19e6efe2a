"""A large run shows its newest checkpoints first; a thread reads the others, until the whole is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import streamlit as st
from inshrink_app import services
from inshrink_app.services import opening
from streamlit.testing.v1 import AppTest

import inshrink_core
from tests.app.builders import linked, texts, write_run

STEPS = tuple(range(10, 130, 10))


@pytest.fixture
def run(root, monkeypatch) -> Path:
    """Return a run with a broken checkpoint, of which two are read at once."""
    monkeypatch.setattr(opening, "_SECONDS_AT_ONCE", -1.0)
    run = write_run(root / "run", STEPS)
    broken = next(run.glob("*40*"))
    broken.write_bytes(broken.read_bytes()[:99])
    return run


@pytest.fixture
def gate(monkeypatch) -> Iterator[Callable[[], None]]:
    """Hold the thread at its third checkpoint until the function that is returned was called."""
    is_open, order = threading.Event(), opening._latest_first

    def held(paths: list[Path]) -> Iterator[Path]:
        for place, path in enumerate(order(paths)):
            if place > 2 and threading.current_thread() is not threading.main_thread():
                is_open.wait(60)
            yield path

    monkeypatch.setattr(opening, "_latest_first", held)
    yield is_open.set
    is_open.set()


def test_the_newest_come_first_and_the_whole_is_what_an_ordinary_opening_returns(run, monkeypatch):
    first = services.load_subject(str(run))
    assert (first.steps, first.n_unread) == ((110, 120), 10)
    assert not first.unreadable
    whole = services.load_whole(str(run))
    assert (len(whole.steps), whole.n_unread) == (11, 0)
    assert [Path(name).name for name, _ in whole.unreadable] == [next(run.glob("*40*")).name]
    token = services.opened(str(run)).token

    services.refresh(run)
    st.cache_resource.clear()
    monkeypatch.setattr(opening, "_SECONDS_AT_ONCE", 60.0)
    ordinary = services.opened(str(run))
    assert ordinary.token == token
    assert ordinary.subject == whole
    assert ordinary.subject.steps == inshrink_core.open(run).steps


def test_a_stopped_reading_keeps_what_it_has_read_and_goes_on(run, gate):
    first = services.load_subject(str(run))
    reading = services.reading_of(first)
    reading.start()
    while reading.n_read < 2:
        pass
    reading.stop()
    gate()
    reading.wait()
    more = services.load_subject(str(run))
    assert more.steps[-2:] == first.steps
    assert 0 < more.n_unread <= first.n_unread
    assert not reading.is_wanted
    assert len(services.load_whole(str(run)).steps) == 11


def test_the_page_shows_the_last_step_before_the_rest_is_read_and_the_whole_afterwards(
    run, gate, asked_for, jobs
):
    app = linked("run", run=str(run))
    assert "the newest 2 steps, 10 not read yet" in texts(app)
    assert "Sizes and bits follow" in texts(app)
    assert not app.exception
    shown = services.load_subject(str(run))
    assert services.latest_measured(shown, "magnitude") is not None
    assert not jobs.started
    gate()
    services.reading_of(shown).wait()
    assert isinstance(app.run(), AppTest)
    assert "11 steps" in texts(app)
    assert "1 checkpoint" in texts(app)
    assert "Sizes and bits follow" not in texts(app)
