"""Files dropped onto the page Open: stored under safe names, and only where they can be opened."""

import io
import zipfile
from pathlib import Path

import pytest
import streamlit as st
import torch
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.model.subject import Subject
from inshrink_app.services import dropping
from inshrink_app.services.inside import dropped_folder

from inshrink_core.verbs.export import export
from tests.app.builders import button, explorer, texts, visit, write_run


def drop(*files: tuple[str, bytes]) -> Subject:
    return services.open_dropped([(name, io.BytesIO(content)) for name, content in files])


def refused(*files: tuple[str, bytes]) -> str:
    with pytest.raises(ServiceError) as caught:
        drop(*files)
    return " ".join(caught.value.problem)


def kept() -> list[Path]:
    return list(dropped_folder().iterdir()) if dropped_folder().exists() else []


@pytest.fixture
def checkpoints(tmp_path, root) -> list[tuple[str, bytes]]:
    run = write_run(tmp_path / "away")
    return [(path.name, path.read_bytes()) for path in sorted(run.iterdir())]


def test_dropped_files_become_a_run_outside_of_the_roots_that_opens_by_its_path(root, checkpoints):
    found = drop(*checkpoints)
    assert found.steps == (10, 20, 30)
    assert found.name == "step-3-files"
    assert found.path.is_relative_to(dropped_folder())
    assert services.load_subject(str(found.path)).steps == found.steps
    assert services.is_dropped(found.path)
    assert not services.is_dropped(dropped_folder())
    # Files of the same name are stored beside each other.
    (name, content), (_, other) = checkpoints[:2]
    first, second = drop((name, content)), drop((name, other))
    assert (first.path.read_bytes(), second.path.read_bytes()) == (content, other)


def test_a_dropped_archive_opens_as_one(archived, tmp_path):
    packed = tmp_path / "small.inshrink"
    export(f"{archived}.inshrink", pack=packed)
    found = drop(("small.inshrink", packed.read_bytes()))
    assert found.kind == "archive"
    assert found.steps == services.load_subject(f"{archived}.inshrink").steps
    cut = packed.read_bytes()[:-7]
    assert "small.inshrink" in refused(("small.inshrink", cut))
    assert len(kept()) == 1


@pytest.mark.parametrize(
    "name", ["../../evil.pt", "/etc/evil.pt", "C:\\evil.pt", "..\\..\\evil.pt", "a\0b/evil.pt", "...evil.pt"]
)
def test_no_part_of_a_name_leads_out_of_the_folder(checkpoints, name):
    found = drop((name, checkpoints[0][1]))
    assert found.path.name == "evil.pt"
    assert found.path.parent.parent == dropped_folder()


def _bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb/data.pkl", bytes(20_000_000))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("step_1.pt", b"", "is empty"),
        ("step_1.pt", b"only text\n" * 9, "step_1.pt"),
        ("step_1.safetensors", b"\xff" * 64, "step_1.safetensors"),
        ("step_1.pt", _bomb(), "step_1.pt"),
        ("run.inshrink", b"no archive", "run.inshrink"),
        ("notes.txt", b"text", "neither an archive nor a checkpoint"),
        (".pt", b"x", "neither an archive nor a checkpoint"),
        ("ü" * 120 + ".pt", b"x", "too long"),
    ],
)
def test_what_cannot_be_opened_is_answered_and_not_kept(root, name, content, said):
    answer = refused((name, content))
    assert said in answer
    assert str(dropped_folder()) not in answer
    assert not kept()


def test_files_that_do_not_make_one_run_are_answered_and_not_kept(checkpoints):
    (first, content), (_, other) = checkpoints[:2]
    model = io.BytesIO()
    torch.save({"other.weight": torch.ones(2), "other.bias": torch.ones(1)}, model)
    assert "another model" in refused((first, content), ("other.pt", model.getvalue()))
    assert "the same name" in refused((first, content), (f"other/{first}", other))
    assert "opened alone" in refused((first, content), ("a.inshrink", b"x"))
    assert not kept()


def test_too_much_is_answered_before_it_is_written(checkpoints, monkeypatch):
    monkeypatch.setattr(st, "get_option", lambda name: 0)
    assert "too much to drop" in refused(checkpoints[0])
    monkeypatch.undo()
    monkeypatch.setattr(dropping, "_MAX_STORED_BYTES", 10)
    assert "remove some" in refused(checkpoints[0])
    assert not kept()


def test_the_page_opens_what_is_dropped_and_removes_it(root, checkpoints):
    app = explorer()
    app.session_state["open.drop"] = True
    app.run()
    app.file_uploader[0].set_value([(name, content, "") for name, content in checkpoints]).run()
    assert "**step\\-3\\-files**" in texts(app)
    app.session_state["header.run"] = True
    assert "A copy of the files that you dropped" in texts(app.run())
    visit(app, "open").run()
    assert str(dropped_folder()) in texts(app)
    button(app, "Remove").click().run()
    assert not kept()
    run = write_run(root / "run")
    with pytest.raises(ServiceError, match="nothing was dropped"):
        services.forget_dropped(run)
    assert run.exists()
