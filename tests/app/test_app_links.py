"""Links: what a run leads to lies inside of the roots, or the run is not opened; and paths that are none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.server import roots
from inshrink_app.services import archives, opening

from tests.app.builders import linked, texts, write_run


@pytest.fixture
def outside(tmp_path) -> Path:
    return write_run(tmp_path / "elsewhere", (40,))


def refused(path: Path) -> str:
    with pytest.raises(ServiceError) as caught:
        services.load_subject(str(path))
    return " ".join(caught.value.problem)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("step_000040.pt", "step_000040.pt"),
        *(
            (name, "secret")
            for name in ("config.json", "metrics.jsonl", "inshrink.toml", "deep/er/notes.txt")
        ),
        *((name, "") for name in ("checkpoint-40", ".inshrink")),
    ],
)
def test_a_run_with_a_link_out_of_the_roots_is_not_opened(root, outside, name, target):
    (outside / "secret").write_text('{"step": 10, "secret": 1}\n')
    link = write_run(root / "run") / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / target)
    said = refused(root / "run")
    assert str(link) in said
    assert str(outside / target) in said
    assert "--root" in said


def test_a_checkpoint_file_is_not_opened_beside_a_log_that_leads_out(root, outside):
    run = write_run(root / "run")
    (run / "metrics.csv").symlink_to(outside / "secret.csv")
    assert "metrics.csv" in refused(run / "step_000010.pt")


def test_links_inside_of_the_roots_are_followed(root):
    other = write_run(root / "other", (40,))
    run = write_run(root / "run")
    (run / "latest.pt").symlink_to(run / "step_000030.pt")
    (run / "notes").symlink_to(other)
    assert set(services.load_subject(str(run)).steps) >= {10, 20, 30}


def test_the_log_above_the_roots_is_not_shown(tmp_path, root):
    run = write_run(tmp_path / "outer" / "checkpoints")
    (run.parent / "metrics.csv").write_text("step,loss\n10,1.5\n20,1.25\n")
    roots.configure([run])
    assert services.load_subject(str(run)).log == {}
    roots.configure([run.parent])
    services.refresh(run)
    assert set(services.load_subject(str(run)).log) == {"loss"}


@pytest.mark.parametrize("name", ["inshrink-manifest", "frames", "frame"])
def test_an_archive_whose_parts_are_links_out_of_the_roots_is_not_opened(archived, tmp_path, name):
    archive = archived.with_name("run.inshrink")
    part = next((archive / "frames").iterdir()) if name == "frame" else archive / name
    moved = tmp_path / "moved"
    shutil.move(part, moved)
    part.symlink_to(moved)
    assert part.name in refused(archive)
    with pytest.raises(ServiceError):
        archives.chain_of(str(archive))
    with pytest.raises(ServiceError):
        opening.opened(str(archive))
    # The run beside it is shown, without it.
    assert services.load_subject(str(archived)).archive is None


@pytest.mark.parametrize("path", ["a" * 300, "a" * 5_000, "a/" * 3_000, "\0", "\ud800", "~nobody-at-all/x"])
def test_a_path_that_is_none_is_refused_in_words(root, path):
    with pytest.raises(ServiceError) as caught:
        services.load_subject(path)
    assert caught.value.problem.what
    assert len(caught.value.problem.where) < 1_000


@pytest.mark.parametrize("page", ["run", "archives", "open"])
def test_a_link_with_too_long_a_path_shows_a_page_that_says_so(root, page):
    app = linked(page, run="/" + "a" * 3_000)
    assert page == "open" or "not a path on this computer" in texts(app).casefold()


def test_a_run_of_more_files_than_can_be_looked_at_is_refused(root, monkeypatch):
    monkeypatch.setattr(roots, "_MAX_LOOKED_AT", 2)
    assert "more than 2 files" in refused(write_run(root / "run"))
