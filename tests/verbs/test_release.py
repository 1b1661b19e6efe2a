"""Release: what the archive is proven to hold goes, and nothing else, whenever it is cut off."""

import os
from importlib import import_module

import pytest

import inshrink_core
from benchmarks.crash.verbs import write_run_of_folders
from inshrink_core.chain import Archive
from inshrink_core.errors import InputError, StorageError
from inshrink_core.verbs import prune, release
from tests.formats.run_builders import content_of
from tests.runs import write_run


@pytest.fixture
def run(tmp_path):
    write_run_of_folders(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def archive(run, tmp_path):
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless", optimizer="exact")
    return tmp_path / "a.inshrink"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def why(report):
    return {row.step: row.why for row in report.steps}


@pytest.mark.parametrize(
    "given", ["optimizer", "pruned", "extra", "link", "changed", "unreadable", "missing"]
)
def test_what_the_archive_does_not_hold_stays(run, tmp_path, given):
    target = tmp_path / "a"
    options = {"optimizer": "drop" if given == "optimizer" else "exact", "codec": "lossless"}
    steps = [1, 3, 4] if given == "missing" else [1, 2, 3, 4]
    if given == "unreadable":
        (run / "checkpoint-2" / "model.safetensors").write_bytes(b"cut off")
    inshrink_core.compress(
        run, target, steps=steps if given != "unreadable" else None, skip_damaged=True, **options
    )  # type: ignore[arg-type]
    if given == "pruned":
        prune(target, optimizer_last=2, apply=True)
    elif given == "extra":
        (run / "checkpoint-2" / "notes.sock").symlink_to("/dev/null")
    elif given == "link":
        (run / "checkpoint-2").rename(tmp_path / "elsewhere")
        (run / "checkpoint-2").symlink_to(tmp_path / "elsewhere")
    elif given == "changed":
        (run / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2, "more": 1}')
    before = content_of(run), content_of(tmp_path / "elsewhere")
    report = release(run, target, apply=True, follow_links=True)
    assert 2 not in report.released
    after = content_of(run), content_of(tmp_path / "elsewhere")
    remaining = [name for name in before[0] if name.startswith("checkpoint-2/")]
    assert all(after[0][name] == before[0][name] for name in remaining)
    assert after[1] == before[1]
    assert (report.failure is not None) == (given == "changed")


def test_a_file_that_is_written_meanwhile_stays(run, archive, monkeypatch):
    module = import_module("inshrink_core.verbs.verify")
    genuine = module.verified_step

    def compared(view, info, originals):
        found = genuine(view, info, originals)
        path = run / f"checkpoint-{info.step}" / "trainer_state.json"
        path.write_text(path.read_text())  # the same bytes at another time
        return found

    monkeypatch.setattr(module, "verified_step", compared)
    before = content_of(run)
    report = release(run, archive, apply=True)
    assert why(report)[1] == "it changed while it was compared" or "cannot be read" in why(report)[1]
    assert content_of(run) == before


def test_a_deletion_that_was_cut_off_is_seen_by_no_reader_and_finished(run, archive, monkeypatch):
    genuine, calls = os.unlink, []

    def dying(path, **options):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        genuine(path, **options)

    monkeypatch.setattr(os, "unlink", dying)
    with pytest.raises(KeyboardInterrupt):
        release(run, archive, apply=True)
    monkeypatch.undo()
    (hidden,) = run.glob(".checkpoint-1.*.inshrink-released")
    assert len(content_of(hidden)) == 2
    assert inshrink_core.open(run).steps == (2, 3, 4)
    report = release(run, archive, apply=True)
    assert report.finished == (1,)
    assert report.released == (2,)
    assert names(run) == ["checkpoint-3", "checkpoint-4"]
    assert inshrink_core.compress(run, archive).appended == ()
    assert release(run, archive, apply=True).released == ()


def test_a_cut_off_deletion_is_not_finished_where_another_archive_is_given(run, archive):
    hidden = (run / "checkpoint-1").rename(run / f".checkpoint-1.{'00' * 16}.inshrink-released")
    with pytest.raises(InputError, match="this archive does not hold the checkpoint"):
        release(run, archive, apply=True)
    assert len(content_of(hidden)) == 3


@pytest.mark.parametrize("is_taken", [False, True])
def test_what_was_hidden_and_not_compared_again_gets_its_name_back(run, archive, is_taken):
    before = content_of(run)
    hidden = (run / "checkpoint-3").rename(run / ".checkpoint-3.inshrink-releasing")
    if is_taken:
        (run / "checkpoint-3").mkdir()
        with pytest.raises(StorageError, match="a new file has its name"):
            release(run, archive, apply=True)
        assert len(content_of(hidden)) == 3
    else:
        assert release(run, archive, steps=[3], keep_newest=2, apply=True).released == ()
        assert content_of(run) == before


def test_the_base_model_of_the_archive_stays(tmp_path):
    flat = write_run(tmp_path / "run", n_steps=5)
    inshrink_core.compress(flat, tmp_path / "a", codec="lossless", optimizer="exact", base=flat / "step_5.pt")
    report = release(flat, tmp_path / "a", apply=True)
    assert why(report)[5] == "the archive has it as its base model"
    assert (flat / "step_5.pt").exists()
    assert report.released == (10, 15)


def test_a_watch_releases_what_it_has_archived(tmp_path):
    flat = write_run(tmp_path / "run", n_steps=4)
    output = []
    report = inshrink_core.compress(
        flat,
        tmp_path / "a",
        interval=0.001,
        until=20,
        codec="lossless",
        optimizer="exact",
        release=True,
        progress=output.append,
        watch=True,
    )
    assert report.released == (5, 10)
    assert report.freed > 0
    assert names(flat) == ["step_15.pt", "step_20.pt"]
    assert Archive.open(tmp_path / "a").steps == (5, 10, 15, 20)
