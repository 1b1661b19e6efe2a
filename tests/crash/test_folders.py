"""Folders are made so that they last, and working folders leave nothing, whoever dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inshrink_core.archive import ArchiveWriter
from inshrink_core.archive.layout import FRAME_FOLDER
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.execution.files import make_folders, working_folder


def place(descriptor):
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


@pytest.fixture
def syncs(monkeypatch):
    """What was synced, in order."""
    found: list[str] = []

    def fsync(descriptor):
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
    def fsync(descriptor):
        if place(descriptor).endswith("/a"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        make_folders(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


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


def test_a_working_folder_removes_those_of_dead_processes_and_no_one_elses(tmp_path):
    script = (
        "import sys, os, pathlib\n"
        "from inshrink_core.execution.files import working_folder\n"
        f"with working_folder(pathlib.Path({str(tmp_path)!r})) as folder:\n"
        "    (folder / 'half').write_bytes(b'')\n"
        "    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    with working_folder(tmp_path) as first, working_folder(tmp_path) as second:
        assert first.is_dir()
        assert second.is_dir()
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
