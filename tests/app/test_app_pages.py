"""What holds on every page, and what a job shows of its requests asks for the same elsewhere."""

import ast
import importlib
import inspect
import os
import pickle
import shlex
import shutil
import zipfile
from typing import Any

import msgspec
import pytest
from inshrink_app.jobs.work import Work
from inshrink_app.server import roots
from inshrink_app.widgets.ending import python_text, shell_text
from streamlit.testing.v1 import AppTest

from inshrink_core.archive import ArchiveWriter
from inshrink_core.cli.derived import read_request
from inshrink_core.plugins import VERBS, plugins
from inshrink_core.request import Request, request_of
from inshrink_core.verbs.compress import Compress
from tests.app.builders import (
    button,
    explorer,
    header,
    open_panel,
    primary,
    sensitivity_table,
    texts,
    visit,
    write_run,
)
from tests.app.job_stubs import asked

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


def test_an_empty_archive_says_how_to_fill_it(root):
    ArchiveWriter(root / "empty.inshrink", create=True).close()
    for page in ABOUT_A_RUN:
        assert "This archive is empty" in texts(explorer(page, run=str(root / "empty.inshrink")))


@pytest.mark.parametrize("how", ["gone", "one", "cut"])
def test_a_run_whose_files_vanish_or_change_while_it_is_open_is_told_of(run, how):
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


def test_two_tabs_show_two_runs_and_neither_follows_the_other(root, jobs):
    jobs.answers["sensitivity"] = sensitivity_table()
    tabs = [explorer("run", run=str(write_run(root / name))) for name in ("one", "two")]
    tabs[1].query_params.clear()
    visit(tabs[1], "archives").run()
    for _ in range(2):
        for tab, name in zip(tabs, ("one", "two"), strict=True):
            tab.run()
            assert header(tab)[0].startswith(f"**{name}**")
            assert tab.query_params["run"] == str(root / name)


def test_names_from_disk_are_shown_as_text(root, jobs):
    jobs.answers["sensitivity"] = sensitivity_table()
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


EXAMPLES = [
    words
    for verb in sorted(plugins(VERBS))
    if (request := request_of(verb)) is not None and request.REPORTS and verb != "run"
    for words in ([shlex.split(example)[1:] for example in request.EXAMPLES])
] + [
    ["compress", "run", "-o", "a", "--watch", "--until", "40"],
    ["compress", "run", "-o", "a", "--max-divergence", "inf"],
    ["estimate", "run", "--each", "codec=qd,bits=3", "--try", "2"],
    ["evaluate", "run", "--write", "judge.py", "--force"],
    ["prune", "a", "--forget-missing", "--apply"],
]


def kept(*requests: Request[Any]) -> tuple[Request[Any], ...]:
    """Return the requests of a job as another explorer reads them."""
    work = Work.asking(requests, shown="run", page="jobs")
    return msgspec.json.decode(msgspec.json.encode(work), type=Work).requests


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_the_line_and_the_call_of_a_job_ask_for_its_request_again(words):
    (request,) = kept(asked(words))
    assert request == asked(words)
    line = shlex.split(shell_text([request]))
    assert line[0] == "inshrink"
    again = read_request(type(request), line[1:]) if line[1] != words[0] else asked(line[1:])
    assert again == request
    (_, found, *_) = ast.parse(python_text([request])).body
    assert isinstance(found, ast.Assign)
    call = found.value
    assert isinstance(call, ast.Call)
    home, _, name = ast.unparse(call.func).rpartition(".")
    function = getattr(importlib.import_module(home), name)
    evaluated = {"float": float}
    places = [eval(ast.unparse(one), evaluated) for one in call.args]
    named = {str(one.arg): eval(ast.unparse(one.value), evaluated) for one in call.keywords}
    given = inspect.signature(function).bind(*places, **named).arguments
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()} == request.given()


def test_settings_are_options_of_their_own_and_the_same_request_in_python():
    config = {"coarseness": 2.5, "overrides": [{"match": "*.bias", "coarseness": 1.0}]}
    (request,) = kept(Compress("run", "a", codec="lattice", config=config))
    read: Any = read_request(type(request), request.words())
    assert read.chosen() == Compress("run", "a", codec="lattice", config=config).chosen()
    assert f"config={config!r}" in python_text([request])
