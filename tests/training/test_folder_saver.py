"""Folders that a trainer writes, archived while it goes on: nothing is lost, nothing stops it."""

import json
import shutil

import pytest

import inshrink_core
from inshrink_core.chain.restoring import LINEAGE_NAME, read_lineage, restore_folder
from inshrink_core.errors import ExistsError, StepConflictError, StorageError
from inshrink_core.training import Saver
from inshrink_core.training import spool as spools
from inshrink_core.training.spool import Spool, spool_folder
from tests.formats.run_builders import content_of
from tests.training.building import EXACT, spoil, write_folder


def contents(folder):
    found = content_of(folder)
    found.pop(LINEAGE_NAME, None)
    return found


def saver(path):
    return Saver(path / "a.inshrink", **EXACT)


def test_a_folder_may_be_deleted_when_save_returns_and_comes_back_byte_for_byte(tmp_path):
    before = {}
    with saver(tmp_path) as saving:
        for step in (1, 2):
            made = write_folder(tmp_path, step)
            before[step] = contents(made)
            saving.save_folder(made, step)
            shutil.rmtree(made)
    assert saving.failures == {}
    assert not spool_folder(tmp_path / "a.inshrink").exists()
    for step in (1, 2):
        restore_folder(tmp_path / "a.inshrink", tmp_path / "back" / str(step), step)
        assert contents(tmp_path / "back" / str(step)) == before[step]


def test_a_linked_save_outlives_the_process_and_not_the_machine_until_it_is_synced(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "a.inshrink.spool")
    spool.link(1, write_folder(tmp_path, 1))
    settled = spool.link(2, write_folder(tmp_path, 2))
    spool.settle(settled)
    assert [save.step for save in Spool(spool.folder).recover()] == [1, 2]
    monkeypatch.setattr(spools, "_boot", lambda: "another")
    assert [save.step for save in Spool(spool.folder).recover()] == [2]
    with saver(tmp_path) as saving:
        saving.flush()
    assert inshrink_core.open(tmp_path / "a.inshrink").steps == (2,)


def test_a_save_that_an_earlier_version_left_under_a_budget_is_archived_whole(tmp_path):
    spool = Spool(tmp_path / "a.inshrink.spool")
    record = spool.link(1, write_folder(tmp_path, 1)).folder / "save.json"
    about = json.loads(record.read_text()) | {"budget": {"nbytes": 7, "max_age": 2}}
    record.write_text(json.dumps(about))
    assert [save.step for save in Spool(spool.folder).recover()] == [1]


def test_saves_that_find_the_disk_full_wait_and_never_block_the_training(tmp_path, monkeypatch):
    saving = saver(tmp_path)
    with monkeypatch.context() as patched:
        spoil(patched)
        for step in (1, 2):
            saving.save_folder(write_folder(tmp_path, step), step)
        with pytest.raises(StorageError, match="cannot be encoded"):
            saving.save_folder(write_folder(tmp_path, 3), 3)
        with pytest.raises(StorageError, match="cannot be encoded"):
            saving.flush()
        assert sorted(saving.failures) == [1, 2]
    saving.close()
    assert saving.failures == {}
    assert inshrink_core.open(tmp_path / "a.inshrink").steps == (1, 2)


def test_training_that_goes_on_from_a_restored_folder_continues_from_its_frame(tmp_path):
    with saver(tmp_path) as saving:
        for step in (1, 2, 3):
            saving.save_folder(write_folder(tmp_path, step), step)
    info = restore_folder(tmp_path / "a.inshrink", tmp_path / "back" / "checkpoint-2", 2)
    assert read_lineage(tmp_path / "back" / "checkpoint-2").frame_id == info.frame_id
    with saver(tmp_path) as saving:
        saving.resume(2, tmp_path / "back" / "checkpoint-2")
        for step in (3, 4):
            saving.save_folder(write_folder(tmp_path / "again", step), step)
        saving.flush()
    archive = inshrink_core.open(tmp_path / "a.inshrink")
    third, fourth = archive.reader.frames[-2:]
    assert [third.parent_id, fourth.parent_id] == [info.frame_id, third.frame_id]
    assert archive.frame(third).meta["restored"] == info.frame_id
    assert archive.steps == (1, 2, 3, 4)


def test_training_that_goes_on_from_its_own_folder_continues_from_that_step(tmp_path):
    with saver(tmp_path) as saving:
        for step in (1, 2):
            saving.save_folder(write_folder(tmp_path, step), step)
    with saver(tmp_path) as saving:
        saving.resume(1, tmp_path / "checkpoint-1")
        saving.save_folder(write_folder(tmp_path / "again", 2), 2)
    archive = inshrink_core.open(tmp_path / "a.inshrink")
    assert [frame.branch for frame in archive.reader.frames] == [0, 0, 1]
    assert "restored" not in archive.frame(archive.reader.frames[-1]).meta


def test_a_training_that_begins_anew_is_refused_an_archive_with_steps(tmp_path):
    with saver(tmp_path) as saving:
        saving.save_folder(write_folder(tmp_path, 5), 5)
    with saver(tmp_path) as saving, pytest.raises(StepConflictError, match="give another archive"):
        saving.resume(0)


def test_a_folder_that_holds_the_step_stays_and_another_one_is_not_touched(tmp_path):
    made = write_folder(tmp_path, 1)
    with saver(tmp_path) as saving:
        saving.save_folder(made, 1)
    restore_folder(tmp_path / "a.inshrink", made)
    assert read_lineage(made) is None
    (made / "pytorch_model.bin").write_bytes(b"another")
    with pytest.raises(ExistsError):
        restore_folder(tmp_path / "a.inshrink", made)
    assert (made / "pytorch_model.bin").read_bytes() == b"another"
