"""Folders are made so that they last, and working folders leave nothing, whoever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inshrink_core.archive import ArchiveWriter
from inshrink_core.archive.layout import FRAME_FOLDER
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.execution import make_folders, working_folder
from inshrink_core.training.spool import Spool

SAVED = {"checkpoint": {"model": {"w": torch.ones(3)}, "step": 1}}


def place(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


@pytest.fixture
def syncs(monkeypatch) -> list[str]:
    """What was synced, in order."""
    found: list[str] = []

    def fsync(descriptor: int) -> None:
        found.append(place(descriptor))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_the_name_of_every_new_folder_is_synced_before_anything_is_made_in_it(tmp_path, syncs):
    made = make_folders(tmp_path / "a" / "b")
    assert made == [tmp_path / "a", tmp_path / "a" / "b"]
    assert syncs == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a")]


def test_a_folder_that_is_there_may_be_left_by_a_process_that_died_before_it_synced(tmp_path, syncs):
    assert make_folders(tmp_path) == []
    assert syncs == [str(tmp_path.parent)]


def test_folders_that_cannot_be_made_durable_are_taken_back(tmp_path, monkeypatch):
    def fsync(descriptor: int) -> None:
        if place(descriptor).endswith("/a"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        make_folders(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_new_archive_syncs_the_parents_it_makes_before_its_first_frame(tmp_path, syncs):
    ArchiveWriter(tmp_path / "new" / "deep" / "a.inshrink", create=True).close()
    for parent in (tmp_path, tmp_path / "new", tmp_path / "new" / "deep"):
        assert syncs.index(str(parent)) < syncs.index(str(tmp_path / "new" / "deep" / "a.inshrink"))


def test_what_a_writer_that_died_renamed_is_synced_before_the_next_one_acts_upon_it(tmp_path, syncs):
    root = tmp_path / "a.inshrink"
    with ArchiveWriter(root, create=True) as writer:
        before = (root / MANIFEST_NAME).read_bytes()
        with writer.begin(step=1, kind="keyframe", parent_id=None) as frame:
            frame.commit({})
    (root / MANIFEST_NAME).write_bytes(before)
    syncs.clear()
    with ArchiveWriter(root) as writer:
        assert [info.step for info in writer.manifest.frames] == [1]
    assert syncs[:2] == [str(root / FRAME_FOLDER), str(root)]


def test_a_spooled_save_is_synced_before_put_returns_and_before_it_has_its_name(tmp_path, syncs):
    save = Spool(tmp_path / "a.spool").put(1, SAVED)
    inside = [path for path in syncs if ".tmp" in path]
    assert {Path(path).name for path in inside} == {"step_000001.pt", "save.json", ".00000001.tmp"}
    assert syncs[-1] == str(save.folder.parent)


def test_a_dropped_save_is_renamed_for_good_before_its_files_go(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "a.spool")
    save = spool.put(1, SAVED)
    there: list[set[str]] = []

    def fsync(descriptor: int) -> None:
        there.append({path.name for path in spool.folder.rglob("*")})

    monkeypatch.setattr(os, "fsync", fsync)
    spool.drop(save.folder)
    assert there == [{".00000001.tmp", "step_000001.pt", "save.json"}]
    assert list(spool.folder.iterdir()) == []


def test_what_a_saver_that_died_was_dropping_is_renamed_for_good_before_it_goes(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "a.spool")
    save = spool.put(1, SAVED)
    doomed = save.folder.rename(save.folder.with_name(".00000001.tmp"))
    there: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: there.append((doomed / "save.json").exists()))
    assert spool.recover() == []
    assert there == [True]
    assert not doomed.exists()


def test_a_working_folder_removes_those_of_dead_processes_and_no_one_elses(tmp_path):
    script = (
        "import sys, os, pathlib\n"
        "from inshrink_core.execution import working_folder\n"
        f"with working_folder(pathlib.Path({str(tmp_path)!r})) as folder:\n"
        "    (folder / 'half').write_bytes(b'')\n"
        "    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    with working_folder(tmp_path) as held, working_folder(tmp_path) as second:
        assert held.is_dir()
        assert second.is_dir()
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
