"""A saver that is made again in the same process takes over from one that is no longer in use."""

import copy
import gc
import os
import pickle
import threading

import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.archive import LocalStorage
from inshrink_core.chain import ChainWriter
from inshrink_core.errors import InputError, LockedError, StorageError
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import spool_folder
from tests.training.building import EXACT, Adapter


def begin(path, value=0.0):
    model = nn.Linear(8, 8, bias=False)
    model.weight.data.fill_(value)
    return model, Saver(path, model, **EXACT)


def test_a_cell_that_is_run_again_takes_over_with_all_that_was_saved(path, monkeypatch):
    entered, append = threading.Event(), ChainWriter.append

    def slow(chain, checkpoint, **options):
        entered.wait(0.2)
        return append(chain, checkpoint, **options)

    monkeypatch.setattr(ChainWriter, "append", slow)
    model, saver = begin(path, 1.0)
    for step in (1, 2):
        saver.save(step)
    model.weight.data.fill_(3.0)
    saver.save(3, wait=False)  # interrupted here: nothing is archived yet
    again, other = begin(path)
    assert other.restore() == 3
    assert torch.equal(again.weight, torch.full((8, 8), 3.0))
    for use in (lambda: saver.save(4), saver.flush, saver.restore, lambda: saver.read(1), saver.__enter__):
        with pytest.raises(LockedError, match="made later in this process, has taken over"):
            use()
    saver.close()
    other.save(4)
    other.close()
    assert inshrink_core.open(path).steps == (1, 2, 3, 4)
    assert not spool_folder(path).exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_interruption_within_with_the_archive_is_free(path, error):
    def cell():
        with begin(path)[1] as saver:
            saver.save(1)
            raise error

    with pytest.raises(error):
        cell()
    assert not LocalStorage(path).is_locked()
    with begin(path)[1] as other:
        assert other.restore() == 1


def test_an_interruption_of_closing_itself_is_made_good_by_the_next(path, monkeypatch):
    saver = begin(path)[1]
    saver.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(saver._archiver, "flush", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(saver._archiver._thread, "join", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            saver.close()
    assert LocalStorage(path).is_locked()
    with begin(path)[1] as other:
        assert other.restore() == 1


def test_another_spelling_of_the_path_is_the_same_archive(path, tmp_path, monkeypatch):
    first = begin(path)[1]
    first.save(1)
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for spelling in ("run.inshrink", tmp_path / "link" / "run.inshrink", f"./x/../{path.name}"):
        (tmp_path / "x").mkdir(exist_ok=True)
        second = begin(spelling)[1]
        assert second.restore() == 1
        with pytest.raises(LockedError, match="taken over"):
            first.flush()
        first = second
    first.close()
    assert not LocalStorage(path).is_locked()


def test_one_within_its_with_statement_is_in_use(path):
    with begin(path)[1] as saver:
        for again in (lambda: begin(path), lambda: Saver(path, **EXACT)):
            with pytest.raises(LockedError, match="this process is writing this archive, in its `with`"):
                again()
        saver.save(1)
    assert inshrink_core.open(path).steps == (1,)


def test_one_that_another_thread_used_last_is_in_use_while_that_lives(path):
    made, done, found = threading.Event(), threading.Event(), []

    def train():
        saver = begin(path)[1]
        saver.save(1)
        found.append(saver)
        made.set()
        done.wait(60)
        saver.save(2)

    thread = threading.Thread(target=train, name="training")
    thread.start()
    assert made.wait(60)
    with pytest.raises(LockedError, match="in thread 'training'"):
        begin(path)
    done.set()
    thread.join()
    with begin(path)[1] as other:
        assert other.restore() == 2
    with pytest.raises(LockedError, match="taken over"):
        found[0].save(3)


def test_an_adapter_is_taken_over_unless_it_is_within_its_with_statement(path):
    first = Adapter(path)
    first.save(1)
    with Adapter(path) as second:
        with pytest.raises(LockedError, match="with"):
            Adapter(path)
        assert second.failures == {}
    first.close()
    assert not LocalStorage(path).is_locked()


def test_a_saver_that_nothing_refers_to_lets_go_by_itself(path):
    saver = begin(path)[1]
    saver.save(1)
    del saver
    gc.collect()
    assert not LocalStorage(path).is_locked()
    assert inshrink_core.open(path).steps == (1,)


def in_child(work):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, str(text).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_neither_takes_over_nor_holds_the_lock_nor_ends_the_parents_saver(path):
    saver = begin(path)[1]
    saver.save(1)
    saver.flush()
    spooled = set(spool_folder(path).iterdir())
    assert "another process" in in_child(lambda: begin(path))
    assert "was forked" in in_child(lambda: saver.save(2))
    assert in_child(lambda: (saver.__exit__(), saver._finalizer())[0]) == "None"
    assert set(spool_folder(path).iterdir()) == spooled
    saver.save(2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    saver.close()
    assert not LocalStorage(path).is_locked()  # though a worker is still there
    os.close(writing)
    os.waitpid(child, 0)
    assert inshrink_core.open(path).steps == (1, 2)


@pytest.mark.parametrize("make", [lambda path: begin(path)[1], lambda path: Saver(path, **EXACT)])
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_saver_refuses_to_be_copied_to_another_process(path, make, copied):
    with make(path) as saver, pytest.raises(InputError, match="make it in the process that saves"):
        copied(saver)


@pytest.mark.parametrize("copied", [lambda made: pickle.loads(pickle.dumps(made)), copy.copy, copy.deepcopy])
def test_a_copied_adapter_opens_the_archive_itself(path, copied):
    first = Adapter(path)
    first.save(1)
    second = copied(first)
    first.close(strict=True)
    second.save(2)
    second.close(strict=True)
    assert inshrink_core.open(path).steps == (1, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_adapter_saves_in_a_forked_child_or_counts_why_not(path):
    adapter = Adapter(path)

    def train():
        adapter.save(1)
        adapter.close()
        return dict(adapter.failures)

    assert in_child(train) == "{}"
    adapter.save(2)
    assert "another process is writing this archive" in in_child(train)
    adapter.close(strict=True)
    assert inshrink_core.open(path).steps == (1, 2)


def test_an_adapter_refuses_misuse_at_once_and_holds_nothing(path):
    with Saver(path, **EXACT), pytest.raises(LockedError):
        Adapter(path)
    adapter = Adapter(path)
    assert not LocalStorage(path).is_locked()
    assert not [thread for thread in threading.enumerate() if thread.name == "inshrink-saver"]
    adapter.save(1)
    adapter.save(2)
    adapter.close(strict=True)
    assert inshrink_core.open(path).steps == (1, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_adapter_archives_at_once_what_a_process_left_that_has_died(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ChainWriter, "append", lambda *_, **__: threading.Event().wait())
        adapter = Adapter(path)
        in_child(lambda: adapter.save(1))
    assert not inshrink_core.open(path).steps
    Adapter(path)
    assert inshrink_core.open(path).steps == (1,)
    assert not LocalStorage(path).is_locked()


def test_failures_of_saves_that_found_no_archive_stay_when_it_can_be_opened(path):
    adapter = Adapter(path)
    with Saver(path, **EXACT) as other:
        adapter.save(1)
        other.save_files({"model.pt": {"w": torch.ones(8, 8)}}, 2)
    adapter.save(3)
    assert list(adapter.failures) == [1]
    with pytest.raises(StorageError, match="step 1"):
        adapter.close(strict=True)
    assert inshrink_core.open(path).steps == (2, 3)
