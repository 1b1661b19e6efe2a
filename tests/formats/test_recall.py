"""Checkpoints that are alike are read in a shorter way, and the answer is the one that each gives alone."""

import pytest
import torch
from safetensors.torch import save

from inshrink_core.errors import DamagedError
from inshrink_core.formats import assembly, open_run, safetensors_file
from inshrink_core.formats.checkpoints import FileReader
from inshrink_core.formats.disk import Access


def _names(n=900):
    return [f"blocks.{i}.weight" for i in range(n)]


def _alone_and_in_a_row(folder):
    run = open_run(folder)
    access = Access.of(folder)
    alone = {}
    for step in run.steps:
        assembly._last = None, {}
        alone[step] = FileReader().open(run.path_of(step), access)
    return alone, run._parsed, access.counter.total, run.bytes_read


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


def test_where_tensors_lie_is_worked_out_once(tmp_path):
    weights = {name: torch.ones(2) for name in _names(20)}
    group = {"params": list(range(20))}

    def state(step):
        optimizer = {"state": {}, "param_groups": [group | {"lr": 1 / step}]}
        return {"step": step, "model": weights, "optimizer": optimizer}

    _save_run(tmp_path, state, steps=(10, 20, 30))
    run = open_run(tmp_path)
    assert run[10].specs is run[20].specs is run[30].specs
    assert [run[step].hyperparameters["blocks.7.weight"]["lr"] for step in run.steps] == [
        1 / step for step in run.steps
    ]


def test_equal_headers_of_safetensors_are_parsed_once_and_compared_with_each_file(tmp_path):
    content = save({name: torch.ones(2) for name in _names(20)}, metadata={"format": "pt"})
    for step in (1, 2):
        (tmp_path / f"step_{step}.safetensors").write_bytes(content)
    safetensors_file._parse.cache_clear()
    run = open_run(tmp_path)
    assert run[1].specs == run[2].specs
    assert safetensors_file._parse.cache_info().misses == 1
    longer = tmp_path / "step_3.safetensors"
    longer.write_bytes(content + b"x")
    with pytest.raises(DamagedError, match="does not end with its last tensor") as caught:
        FileReader().open(longer, Access.of(tmp_path))
    assert caught.value.where == str(longer)
