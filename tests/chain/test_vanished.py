"""Readers that are open while frames are replaced find the new ones, or say what is gone."""

from __future__ import annotations

import threading

import pytest
import torch

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.errors import MissingFrameError
from tests.runs import write_run


def test_a_reader_goes_on_with_the_frames_that_a_prune_put_in_place(archive_path):
    fresh, used = Archive.open(archive_path), Archive.open(archive_path)
    info = fresh.last
    wanted = {key: tensor.clone() for key, tensor in used.checkpoint(info).items()}
    checkpoint = used.checkpoint(info)
    inshrink_core.verbs.prune(archive_path, keep_last=1, apply=True)
    assert not (archive_path / info.path).exists()
    for archive in (fresh, used):
        for key, tensor in archive.checkpoint(info).items():
            assert torch.equal(tensor, wanted[key])
    assert torch.equal(checkpoint["0.weight"], wanted["0.weight"])
    assert checkpoint.source.skeleton(checkpoint.files[0])


def test_a_step_that_a_prune_removed_is_reported_as_gone_but_for_what_was_read_with_its_index(
    tmp_path,
):
    run = inshrink_core.open(write_run(tmp_path / "run"))
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    archive = Archive.open(tmp_path / "a.inshrink")
    checkpoint = archive[10]
    inshrink_core.verbs.prune(tmp_path / "a.inshrink", keep_last=1, apply=True)
    assert torch.equal(checkpoint["0.weight"], run[10]["0.weight"])
    with pytest.raises(MissingFrameError, match=r"step 10.*removed"):
        _ = checkpoint["4.weight"]


def test_a_reader_goes_on_where_small_files_were_put_together(tmp_path, monkeypatch):
    run = inshrink_core.open(write_run(tmp_path / "run"))
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless", steps=run.steps[:3])
    fresh, used = Archive.open(tmp_path / "a.inshrink"), Archive.open(tmp_path / "a.inshrink")
    checkpoint = used[10]
    assert torch.equal(checkpoint["0.weight"], run[10]["0.weight"])
    monkeypatch.setattr("inshrink_core.archive.segment.MAX_SMALL_FILES", 3)
    inshrink_core.compress(run, tmp_path / "a.inshrink")
    assert [file.suffix for file in (tmp_path / "a.inshrink" / "frames").iterdir()] == [".segment"]
    for step in run.steps[:3]:
        for archive in (fresh, used):
            assert all(torch.equal(archive[step][key], run[step][key]) for key in run[step])
    assert torch.equal(checkpoint["4.weight"], run[10]["4.weight"])
    assert used[10].source.skeleton(used[10].files[0])


def test_readers_that_open_while_prunes_run_find_every_step_that_stays(archive_path):
    errors: list[BaseException] = []
    done = threading.Event()

    def read():
        while not done.is_set():
            try:
                archive = Archive.open(archive_path)
                _ = archive.checkpoint(archive.last)["0.weight"]
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for keep in (3, 2, 1):
        inshrink_core.verbs.prune(archive_path, keep_last=keep, apply=True)
    done.set()
    for reader in readers:
        reader.join()
    assert errors == []
