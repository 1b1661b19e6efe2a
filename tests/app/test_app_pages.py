"""What holds on every page: without a run, empty, damaged, hostile, and what each must have."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile

import pytest
from inshrink_app import services
from inshrink_app.server import roots
from streamlit.testing.v1 import AppTest

from tests.app.builders import (
    FakeJobs,
    answer,
    button,
    explorer,
    header,
    open_panel,
    primary,
    small_chain,
    subject,
    tables,
    texts,
    visit,
    write_run,
)

ABOUT_A_RUN = ("run", "archives")


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_a_page_without_a_run_leads_to_the_open_page(root, page):
    app = explorer(page)
    assert "No run is open" in texts(app)
    assert primary(app) == ["Choose a run"]
    button(app, "Choose a run").click().run()
    assert app.title[0].value == "Open a run or an archive"


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_an_empty_folder_gets_a_panel_that_says_what_to_do(root, page):
    (root / "empty").mkdir()
    app = explorer(page, run=str(root / "empty"))
    assert "No readable checkpoint" in texts(app).replace("\\", "")
    assert "What to do" in texts(app)
    assert button(app, "Open another run")


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_a_damaged_checkpoint_gets_a_panel_with_details(root, page):
    (root / "bad").mkdir()
    (root / "bad" / "step_1.pt").write_bytes(b"PK\x03\x04 this is no zip")
    app = explorer(page, run=str(root / "bad"))
    assert len(app.error) == 1
    assert "step_1.pt" in texts(app)


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_a_link_to_outside_of_the_roots_is_refused(root, page):
    app = explorer(page, run="/etc")
    assert "outside of the folders" in texts(app)
    assert primary(app) == ["Open another run"]


def test_the_run_survives_a_change_of_page(root):
    write_run(root / "run")
    app = explorer("run", run=str(root / "run"))
    app.query_params.clear()
    visit(app, "open").run()
    assert app.query_params["run"] == str(root / "run")


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_an_empty_archive_says_how_to_fill_it(root, monkeypatch, page):
    empty = subject(0, 0, kind="archive", archive=small_chain(0))
    monkeypatch.setattr(services, "load_subject", lambda _: empty)
    app = explorer(page, run="/runs/huge.inshrink")
    assert "This archive is empty" in texts(app)


ONE = [
    ("run", {}),
    ("archives", {"panel": "pack"}),
    *(("archives", {"panel": "write", "what": one}) for one in ("all", "range")),
]


@pytest.mark.parametrize(("page", "query"), ONE)
def test_a_run_of_one_checkpoint_is_shown(root, jobs, page, query):
    app = explorer(page, run=str(write_run(root / "one", (5,))), **query)
    assert "one" in texts(app)
    assert not app.error


@pytest.mark.parametrize("how", ["gone", "one", "cut"])
def test_a_run_whose_files_vanish_or_change_while_it_is_open_is_told_of(root, how):
    run = write_run(root / "run")
    first, *_, last = sorted(run.iterdir())
    apps = [explorer(page, run=str(run)) for page in ("run", "run")]
    if how == "gone":
        shutil.rmtree(run)
    elif how == "one":
        first.unlink()
    else:
        last.write_bytes(last.read_bytes()[:100])
    for app in apps:
        app.run()
    told = {"gone": "What to do", "one": "2 steps", "cut": "new files"}
    assert told[how] in texts(apps[0]).replace("\u00a0", " ")


def test_two_tabs_show_two_runs_and_neither_follows_the_other(root):
    tabs = [explorer("run", run=str(write_run(root / name))) for name in ("one", "two")]
    visit(tabs[1], "archives").run()
    for _ in range(2):
        for tab, name in zip(tabs, ("one", "two"), strict=True):
            tab.run()
            assert header(tab)[0].startswith(f"**{name}**")
            assert tab.query_params["run"] == str(root / name)


def test_names_from_disk_are_shown_as_text(root):
    name = "**b** [x](javascript:1) <i>"
    write_run(root / name)
    app = explorer("run", run=str(root / name))
    assert header(app)[0].startswith("**\\*\\*b\\*\\* \\[x\\]")
    app = explorer()
    assert list(app.dataframe[0].value["name"]) == [name], "a table shows text as it is"


def test_a_pickle_that_wants_to_run_code_is_refused_and_named(root):
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {root / 'owned'}",)

    (root / "evil").mkdir()
    with zipfile.ZipFile(root / "evil" / "step_1.pt", "w") as archive:
        archive.writestr("step_1/data.pkl", pickle.dumps(Evil()))
        archive.writestr("step_1/version", "3")
    app = explorer("run", run=str(root / "evil"))
    assert "system" in texts(app)
    assert not (root / "owned").exists()


@pytest.mark.parametrize("page", [None, *ABOUT_A_RUN])
def test_every_page_shows_the_command_and_the_python_lines(root, monkeypatch, page):
    write_run(root / "it's a run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer(page, run=str(root / "it's a run"), **({"drawer": "code"} if page == "run" else {}))
    open_panel(app)
    codes = [code.value for code in app.code]
    assert any(code.startswith("inshrink ") and "it'\"'\"'s a run" in code for code in codes)
    assert len(primary(app)) <= 1
    python = next(code for code in codes if code.startswith("import inshrink_core"))
    compile(python, page or "open", "exec")


def test_an_error_of_the_explorer_itself_is_a_panel_without_a_traceback():
    def script() -> None:
        from inshrink_app.widgets import problem

        problem.show_unexpected(KeyError("<secret>"))

    app = AppTest.from_function(script).run()
    assert "KeyError" in texts(app)
    assert "secret" not in texts(app)


def test_the_first_page_is_the_run_given_on_the_command_line(root):
    write_run(root / "run")
    roots.configure([root], str(root / "run"))
    app = explorer("run")
    assert header(app)[0].startswith("**run**")
