"""What holds on every page: without a run, empty, damaged, hostile, and what each must have."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.server import roots
from streamlit.testing.v1 import AppTest

from tests.app.builders import (
    button,
    chain,
    explorer,
    header,
    open_panel,
    primary,
    sensitivity_table,
    subject,
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


@pytest.mark.parametrize(
    ("page", "files", "said"),
    [
        ("run", {}, "No readable checkpoint"),
        ("archives", {"step_1.pt": b"PK\x03\x04 this is no zip"}, "step_1.pt"),
        ("run", None, "outside of the folders"),
    ],
)
def test_what_cannot_be_opened_gets_one_panel_that_says_why_and_what_to_do(root, page, files, said):
    folder = root / "bad" if files is not None else "/etc"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    app = explorer(page, run=str(folder))
    assert len(app.error) == 1
    assert said in texts(app).replace("\\", "")
    assert "What to do" in texts(app)
    assert primary(app) == ["Open another run"]


def test_an_empty_archive_says_how_to_fill_it(root, monkeypatch):
    empty = subject(0, 0, kind="archive", archive=chain(Path("/runs/huge.inshrink"), ()))
    monkeypatch.setattr(services, "load_subject", lambda _: empty)
    for page in ABOUT_A_RUN:
        assert "This archive is empty" in texts(explorer(page, run="/runs/huge.inshrink"))


@pytest.mark.parametrize("how", ["gone", "one", "cut"])
def test_a_run_whose_files_vanish_or_change_while_it_is_open_is_told_of(root, how):
    run = write_run(root / "run")
    first, *_, last = sorted(run.iterdir())
    app = explorer("run", run=str(run))
    if how == "gone":
        shutil.rmtree(run)
    elif how == "one":
        first.unlink()
    else:
        last.write_bytes(last.read_bytes()[:100])
    told = {"gone": "What to do", "one": "2 steps", "cut": "new files"}
    assert told[how] in texts(app.run()).replace("\u00a0", " ")


def test_two_tabs_show_two_runs_and_neither_follows_the_other(root):
    tabs = [explorer("run", run=str(write_run(root / name))) for name in ("one", "two")]
    tabs[1].query_params.clear()
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
def test_every_page_shows_the_command_and_the_python_lines(root, jobs, page):
    write_run(root / "it's a run")
    jobs.answers["sensitivity"] = sensitivity_table()
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


@pytest.mark.usefixtures("asked_for")
def test_the_run_of_the_command_line_is_the_first_page_and_its_size_is_estimated_once(root, jobs):
    roots.configure([root], str(write_run(root / "run")))
    app = explorer()
    assert header(app)[0].startswith("**run**")
    app.run()
    assert [work.topic for work in jobs.started].count("goals") == 1
