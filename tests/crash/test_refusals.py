"""What the system refuses is told once, in our words, and leaves nothing half done, held or behind."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.errors import StorageError
from inshrink_core.formats.write import write_files
from inshrink_core.training.spool import Spool
from tests.runs import write_run


def saved(step):
    return {"checkpoint": {"model": {"weight": torch.ones(2, 2)}, "step": step}}


refuse = Mock(side_effect=StorageError("the spool cannot be used", where="here", remedy="free some space"))


def test_a_saver_whose_spool_cannot_be_cleared_releases_the_archive(tmp_path, monkeypatch):
    saver = inshrink_core.Saver(tmp_path / "a.inshrink", nn.Linear(2, 2), codec="lossless")
    saver.save(1)
    saver.flush()
    monkeypatch.setattr(Spool, "drop", refuse)
    with pytest.raises(StorageError):
        saver.close()
    ArchiveWriter(tmp_path / "a.inshrink").close()


def test_an_archive_whose_lock_file_cannot_be_closed_well_is_released_all_the_same(tmp_path, monkeypatch):
    writer, close = ArchiveWriter(tmp_path / "a.inshrink", create=True), os.close

    def complaining(descriptor):
        close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", complaining)
        writer.close()
    ArchiveWriter(tmp_path / "a.inshrink").close()


def test_a_save_that_was_archived_and_could_not_be_marked_is_not_archived_twice(tmp_path, monkeypatch):
    saver = inshrink_core.Saver(tmp_path / "a.inshrink", nn.Linear(2, 2), codec="lossless")
    with monkeypatch.context() as patched:
        patched.setattr(Spool, "mark", refuse)
        saver.save(1)
        with pytest.raises(StorageError):
            saver.flush()
        patched.undo()
        saver.close()
    assert [frame.step for frame in inshrink_core.Archive.open(tmp_path / "a.inshrink").frames] == [1]


def test_a_spool_in_which_no_file_can_be_opened_is_told_as_such(tmp_path, monkeypatch):
    spool, make = Spool(tmp_path / "a.spool"), Path.mkdir

    def making(self, *args, **options):
        make(self, *args, **options)
        if self.name.endswith(".tmp"):
            (self / "step_000001.pt").mkdir(exist_ok=True)  # PyTorch's writer cannot open this

    monkeypatch.setattr(Path, "mkdir", making)
    with pytest.raises(StorageError, match="cannot be written to the spool"):
        spool.put(1, saved(1))


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    inshrink_core.compress(write_run(folder / "run", 4), folder / "a.inshrink", codec="lossless")
    return folder / "a.inshrink"


def test_export_says_what_the_system_refused(archive, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="the step cannot be exported"):
        inshrink_core.verbs.export(archive, tmp_path / "file" / "model.inshrink")


def test_an_error_of_the_disk_comes_with_a_remedy(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StorageError) as caught:
        inshrink_core.verbs.export(archive, pack=tmp_path / "packed.inshrink")
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def writers(text):
    return {name: lambda file: file.write(text) for name in ("model.pt", "optimizer.pt", "side/state.json")}


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.read_bytes() for path in files if not path.relative_to(folder).parts[0].startswith(".")}


def test_files_of_two_restores_never_stand_beside_each_other(tmp_path, monkeypatch):
    write_files(tmp_path, writers(b"old"), force=False)
    rename, seen = Path.rename, []

    def renaming(self, target):
        seen.append(contents(tmp_path))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renaming)
    write_files(tmp_path, writers(b"new"), force=True)
    assert contents(tmp_path) == {b"new"}
    assert len(seen) == 6
    assert all(len(side) <= 1 for side in seen)
