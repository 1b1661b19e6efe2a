"""Every test of the explorer has its own roots, recent runs and caches; browser tests share a browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from inshrink_app import services
from inshrink_app.pages.run import board
from inshrink_app.server import roots
from inshrink_app.services import jobs as job_services
from inshrink_app.services import opening
from streamlit.testing.v1 import AppTest

import inshrink_core
from tests.app.browser import ARGUMENTS, CHROMIUM, Server, new_page
from tests.app.builders import sensitivity_table, write_run
from tests.app.job_stubs import StubJobs, write_slow_run

MAY_BEGIN = board.may_begin


@pytest.fixture(autouse=True)
def _no_page_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail at the first run of a page that ends in an exception."""
    run = AppTest._run

    def checked(self: AppTest, *given: Any, **more: Any) -> AppTest:
        app = run(self, *given, **more)
        assert not app.exception
        return app

    monkeypatch.setattr(AppTest, "_run", checked)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder the explorer may see."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(roots._Current, "value", None)
    # What Run tries and estimates by itself are processes; `asked_for` lets it.
    monkeypatch.setattr(board, "may_begin", lambda: False)
    monkeypatch.setattr(services, "warm_up", lambda: None)
    monkeypatch.setattr(opening, "_SECONDS_AT_ONCE", (60.0, 600.0))  # Also where others use the processor.
    st.cache_resource.clear()
    roots.configure([folder])
    return folder


@pytest.fixture
def asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Run try two steps and estimate layers by itself, where it does."""
    monkeypatch.setattr(board, "may_begin", MAY_BEGIN)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> StubJobs:
    """Let the services find a registry without processes."""
    stub = StubJobs()
    monkeypatch.setattr(job_services, "registry", lambda: stub)
    return stub


@pytest.fixture
def run(root: Path, jobs: StubJobs) -> Path:
    """Return a run whose metrics are measured at once."""
    jobs.answers["sensitivity"] = sensitivity_table()
    return write_run(root / "run")


@pytest.fixture(scope="session")
def archived_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small run and its archive once; tests work on copies."""
    folder = tmp_path_factory.mktemp("archived")
    run = write_slow_run(folder / "run")
    inshrink_core.compress(run, folder / "run.inshrink", codec="lossless", keyframe_every=2)
    return folder


@pytest.fixture
def archived(root: Path, archived_template: Path) -> Path:
    """Return a run whose archive lies beside it, inside of the only root."""
    shutil.copytree(archived_template, root, dirs_exist_ok=True)
    return root / "run"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return Chromium, started once a module: Playwright's loop must not meet the loops of other tests."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="install it with: pip install 'inshrink[dev]'"
    )
    with playwright.sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Return a page in a context of its own."""
    opened = new_page(browser)
    yield opened
    opened.context.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the explorer from an unrelated folder, once a module, and return its address."""
    server = Server(tmp_path_factory.mktemp("served") / "root")
    server.folder.mkdir()
    server.start()
    yield server.address
    server.end()
