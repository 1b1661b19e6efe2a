"""What the headers of a run told is kept on disk, and counts as long as nothing of the run has changed."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import streamlit as st
from inshrink_app import services
from inshrink_app.model.subject import Subject
from inshrink_app.services import headers, opening

import inshrink_core
from tests.app.builders import write_run


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
