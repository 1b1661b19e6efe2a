"""Watching a training: what is finished is archived, what vanishes is told, Ctrl-C ends it cleanly."""

import functools
import shutil
import threading
import time

import pytest

import inshrink_core
from inshrink_core.archive import ArchiveWriter, is_archive
from inshrink_core.chain import Archive
from inshrink_core.errors import InputError, LockedError, NotFoundError, StepConflictError
from inshrink_core.verbs.shared import watch as watching
from tests.runs import write_run
from tests.signals import interrupted

INTERVAL = 0.05
OPTIONS = {"codec": "lossless", "threads": 1}


watch = functools.partial(inshrink_core.compress, watch=True, interval=INTERVAL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "run", n_steps=6)


@pytest.fixture
def folder(tmp_path):
    """Where a trainer saves."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def put(source, target):
    """Write a checkpoint as a trainer does that is not careful: under its own name, in two pieces."""
    content = source.read_bytes()
    with target.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        time.sleep(2 * INTERVAL)
        file.write(content[len(content) // 2 :])


class Trainer(threading.Thread):
    """Saves one checkpoint after the other, once the one before is archived or the time is up."""

    def __init__(self, finished, folder, *, keep=None):
        super().__init__(daemon=True)
        self.finished, self.folder, self.keep = finished, folder, keep
        self.archived = threading.Semaphore(0)

    def run(self):
        for step in range(5, 35, 5):
            put(self.finished / f"step_{step}.pt", self.folder / f"step_{step}.pt")
            self.archived.acquire(timeout=20)
            if self.keep is not None:
                for old in sorted(self.folder.glob("*.pt"), key=lambda p: int(p.stem[5:]))[: -self.keep]:
                    old.unlink()

    def hear(self, event):
        if event.detail.startswith("archived"):
            self.archived.release()


def test_each_checkpoint_is_archived_before_the_trainer_deletes_it(finished, folder, tmp_path):
    trainer = Trainer(finished, folder, keep=1)
    trainer.start()
    report = watch(folder, tmp_path / "a", until=30, idle=60, progress=trainer.hear, **OPTIONS)
    trainer.join()
    assert report.ended == "until"
    assert report.appended == (5, 10, 15, 20, 25, 30)
    assert report.vanished == ()
    assert len(list(folder.iterdir())) == 1
    verification = inshrink_core.verify(tmp_path / "a", deep=True, against=inshrink_core.open(finished))
    assert verification.ok
    assert all(row.error.bit_exact for row in verification.errors)


def test_until_archives_nothing_beyond_the_step(finished, tmp_path):
    report = watch(finished, tmp_path / "a", until=12, **OPTIONS)
    assert report.appended == (5, 10, 15)
    assert Archive.open(tmp_path / "a").steps == (5, 10, 15)


def test_directory_is_finished_when_it_has_what_the_one_before_had(finished, tmp_path):
    folder = tmp_path / "run"

    def save(step, *names):
        (folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
        for name in names:
            if name == "model.pt":
                shutil.copy(finished / f"step_{step}.pt", folder / f"checkpoint-{step}" / name)
            else:
                (folder / f"checkpoint-{step}" / name).write_text("{}")

    save(5, "model.pt", "config.json", "rng.json")
    watch(folder, tmp_path / "a", until=5, **OPTIONS)
    save(10, "model.pt", "config.json")

    def late(event):
        if event.detail.startswith("skipped"):
            threading.Timer(6 * INTERVAL, save, (10, "rng.json")).start()

    report = watch(folder, tmp_path / "a", until=10, progress=late, **OPTIONS)
    assert report.appended == (10,)
    archive = Archive.open(tmp_path / "a")
    assert "rng.json" in {file.path for file in archive[10].files}


def test_checkpoint_that_vanishes_while_it_is_read_is_told_and_left_out(finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    real = watching.write_run

    def deleted_meanwhile(request):
        (folder / "step_10.pt").unlink(missing_ok=True)
        return real(request)

    monkeypatch.setattr(watching, "write_run", deleted_meanwhile)
    report = watch(folder, tmp_path / "a", until=30, **OPTIONS)
    assert report.vanished == (10,)
    assert report.appended == (5, 15, 20, 25, 30)
    assert inshrink_core.verify(tmp_path / "a", deep=True).ok


def test_steps_that_were_pruned_do_not_come_back(finished, tmp_path):
    inshrink_core.compress(finished, tmp_path / "a", steps=[5, 10, 15], codec="lossless")
    inshrink_core.verbs.prune(tmp_path / "a", keep_last=1, apply=True)
    report = watch(finished, tmp_path / "a", until=20)
    assert report.skipped == (5, 10, 15)
    assert Archive.open(tmp_path / "a").steps == (15, 20)


def test_checkpoint_written_again_with_other_values_ends_the_watch(finished, folder, tmp_path):
    shutil.copy(finished / "step_5.pt", folder)

    def overwrite(event):
        if event.detail.startswith("archived"):
            other = write_run(tmp_path / "other", n_steps=1, every=5)
            state = (other / "step_5.pt").read_bytes()
            (folder / "step_5.pt").write_bytes(state[:-1] + state[-1:])
            shutil.copy(finished / "step_10.pt", folder / "step_5.pt")

    with pytest.raises((StepConflictError, InputError)):
        watch(folder, tmp_path / "a", idle=5, step_pattern="step_{step}.pt", progress=overwrite, **OPTIONS)


def test_bad_arguments_and_an_archive_being_written_are_told(finished, tmp_path):
    with pytest.raises(NotFoundError, match="no such directory"):
        watch(tmp_path / "nothing", tmp_path / "a")
    with pytest.raises(NotFoundError, match="no such directory"):
        watch(tmp_path / "nothing" / "ep{step}.pt", tmp_path / "a")
    named = finished / "step_{step}.pt"
    assert watch(named, tmp_path / "b", until=10, **OPTIONS).appended
    for bad in ({"interval": 0.0}, {"idle": -1.0}, {"until": -5}):
        with pytest.raises(InputError):
            watch(finished, tmp_path / "a", **bad)  # type: ignore[arg-type]
    with ArchiveWriter(tmp_path / "a", create=True), pytest.raises(LockedError):
        watch(finished, tmp_path / "a", **OPTIONS)


def test_archive_that_another_process_writes_is_waited_for(finished, tmp_path):
    other = ArchiveWriter(tmp_path / "a", create=True)
    threading.Timer(4 * INTERVAL, other.close).start()
    report = watch(finished, tmp_path / "a", until=5, **OPTIONS)
    assert report.appended == (5,)


def test_ctrl_c_ends_the_watch_with_what_was_committed(finished, tmp_path):
    def is_archived():
        return is_archive(tmp_path / "a") and len(Archive.open(tmp_path / "a")) == 6

    words = ("-o", tmp_path / "a", "--watch", "--poll", "0.1", "--json", "--codec", "lossless")
    code, out, err = interrupted(is_archived, "compress", finished, *words)
    assert code == 0, err
    assert '"ended": "interrupted"' in out
    assert inshrink_core.verify(tmp_path / "a", deep=True, against=inshrink_core.open(finished)).ok
