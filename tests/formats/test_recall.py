"""Checkpoints that are alike are read in a shorter way, and the answer is the one that each gives alone."""

import pickle
import struct

import pytest
import torch

from inshrink_core.errors import DamagedError, InshrinkError, UnsafePickleError
from inshrink_core.formats import open_run
from inshrink_core.formats.assembly import read_directory, read_single_file
from inshrink_core.formats.disk import ByteCounter
from inshrink_core.formats.pickles import recall as pickle_recall
from inshrink_core.formats.pickles.machine import read_pickle
from inshrink_core.formats.pickles.recall import PickleRecall
from inshrink_core.formats.pickles.stack import Machine


def _names(n=900):
    return [f"blocks.{i}.weight" for i in range(n)]


def _alone_and_in_a_row(folder):
    run = open_run(folder)
    counter = ByteCounter()
    alone = {step: read_single_file(run.path_of(step), counter) for step in run.steps}
    return alone, run._parsed, counter.total, run.bytes_read


def _save_run(folder, state_at, steps=(10, 20, 30, 300, 70_000)):
    for step in steps:
        torch.save(state_at(step), folder / f"step_{step}.pt")


def test_a_run_in_a_row_reads_as_each_file_alone(tmp_path):
    weights = {name: torch.full((2, 3), float(i)) for i, name in enumerate(_names(120))}
    weights["tied"] = weights["blocks.0.weight"]
    _save_run(tmp_path, lambda step: {"model": weights, "ema": {"w": torch.ones(2)}, "step": step})
    alone, in_a_row, n_alone, n_in_a_row = _alone_and_in_a_row(tmp_path)
    assert in_a_row == alone
    assert n_in_a_row == n_alone


def test_optimizers_with_another_learning_rate_at_every_step_read_as_each_file_alone(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(40)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()

    def state(step):
        optimizer.param_groups[0]["lr"] = 1.0 / step
        optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}

    _save_run(tmp_path, state)
    alone, in_a_row, *_ = _alone_and_in_a_row(tmp_path)
    assert in_a_row == alone
    rates = {parsed.hyperparameters["0.weight"]["lr"] for parsed in in_a_row.values()}
    assert len(rates) == 5


@pytest.mark.parametrize("change", ["shape", "name", "missing", "tie", "dtype", "storage"])
def test_a_file_that_is_laid_out_otherwise_reads_as_alone(tmp_path, change):
    def state(step):
        weights = {name: torch.zeros(2, 3) for name in _names(120)}
        if step == 30:
            last = "blocks.119.weight"
            if change == "shape":
                weights[last] = torch.zeros(3, 2)
            elif change == "name":
                weights["blocks.x19.weight"] = weights.pop(last)
            elif change == "missing":
                del weights[last]
            elif change == "tie":
                weights[last] = weights["blocks.0.weight"]
            elif change == "dtype":
                weights[last] = torch.zeros(2, 3, dtype=torch.int32)
            else:
                weights[last] = torch.zeros(40, 3)[2:4]
        return {"model": weights, "step": step}

    _save_run(tmp_path, state)
    alone, in_a_row, *_ = _alone_and_in_a_row(tmp_path)
    assert in_a_row == alone
    assert in_a_row[30].specs != in_a_row[10].specs or in_a_row[30].places != in_a_row[20].places


def test_directories_in_a_row_read_as_each_alone(tmp_path):
    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save({name: torch.ones(2, 2) for name in _names(90)}, folder / "model.pt")
        torch.save(
            {"state": {}, "param_groups": [{"lr": 0.1 * step, "params": [0]}]}, folder / "optimizer.pt"
        )
    run = open_run(tmp_path)
    assert run.steps == (1, 2, 3)
    for step in run.steps:
        assert read_directory(run.path_of(step), ByteCounter()) == run._parsed[step]


def test_the_beginning_that_files_share_is_run_once(monkeypatch):
    n_bytes = []
    run = Machine.run

    def counted(machine, table, pause_at=None):
        begun = machine.at
        result = run(machine, table, pause_at)
        n_bytes.append((pause_at or len(machine.data)) - begun)
        return result

    monkeypatch.setattr(Machine, "run", counted)
    recall = PickleRecall()
    for step in range(20):
        recall.read(pickle.dumps({"names": _names(), "step": step}, protocol=2))
    size = len(pickle.dumps({"names": _names(), "step": 0}, protocol=2))
    assert sum(n_bytes) < 3.5 * size


def test_what_one_file_adds_is_not_in_the_next():
    recall = PickleRecall()
    for extra in ({}, {"a": 1}, {"b": [2]}, {}, {"a": 3}):
        state = {"names": _names(), "in": {"x": 1}} | extra
        data = pickle.dumps(state, protocol=2)
        assert recall.read(data) == state == read_pickle(data)


def _program(n_values, *, change):
    """Return a pickle with a long list in its memo, to which its end adds something."""
    values = b"".join(struct.pack("<BH", ord("M"), i) for i in range(n_values))
    tail = b"h\x01K" + bytes([change]) + b"a0" if change else b""
    end = struct.pack("<BH", ord("M"), 300 + change)
    return b"\x80\x02}q\x00(X\x01\x00\x00\x00a]q\x01(" + values + b"eX\x01\x00\x00\x00b" + tail + end + b"u."


def test_a_program_that_changes_what_others_share_is_run_from_its_beginning():
    recall = PickleRecall()
    for change in (0, 0, 7, 0, 9, 0):
        data = _program(3000, change=change)
        assert recall.read(data) == read_pickle(data)
        assert len(recall.read(data)["a"]) == 3000 + bool(change)


def test_a_container_inside_of_itself_reads_as_alone():
    data = [b"\x80\x02]q\x00(" + b"K\x01" * 4000 + b"h\x00K" + bytes([i]) + b"e." for i in (1, 2, 3)]
    recall = PickleRecall()
    for one in data:
        found = recall.read(one)
        assert found[4000] is found
        assert found[-1] == read_pickle(one)[-1]


def test_errors_are_those_of_the_file_alone():
    good = pickle.dumps({"names": _names(), "step": 1}, protocol=2)
    for damaged in (
        good[:-20],
        good[:-1] + b"\xff",
        good[:-1] + b"j\xff\xff\xff\x7f.",
        good[:-1] + b"0cos\nsystem\nX\x01\x00\x00\x00a\x85R.",
        good[: len(good) // 2],
    ):
        recall = PickleRecall()
        for _ in range(2):
            recall.read(good)
        with pytest.raises(InshrinkError) as alone:
            read_pickle(damaged, "file")
        with pytest.raises((DamagedError, UnsafePickleError)) as in_a_row:
            recall.read(damaged, "file")
        assert str(in_a_row.value) == str(alone.value)
        assert recall.read(good) == read_pickle(good)


def test_files_that_are_not_alike_are_given_up_on(monkeypatch):
    tried = []
    paused = pickle_recall._paused
    monkeypatch.setattr(pickle_recall, "_paused", lambda *args: tried.append(1) or paused(*args))
    recall = PickleRecall()
    for i in range(60):
        names = _names()
        names[-5 * i - 1] = "other"
        recall.read(pickle.dumps({"names": names, "step": i}, protocol=2))
    assert len(tried) <= 16


def test_files_that_differ_from_their_beginning_read_as_each_alone(tmp_path):
    for step in (1, 2, 3):
        torch.save({"step": step, "model": {n: torch.ones(1) for n in _names(120)}}, tmp_path / f"{step}.pt")
    alone, in_a_row, *_ = _alone_and_in_a_row(tmp_path)
    assert in_a_row == alone
