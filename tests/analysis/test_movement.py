"""What moved between two checkpoints, in figures worked out by hand."""

import math

import pytest
import torch

import inshrink_core
from inshrink_core.analysis import moved_between
from tests.runs import write_run


def moved(path, first=1, second=2):
    opened = inshrink_core.open(path)
    return moved_between(opened[first], opened[second])


def save(folder, step, **tensors):
    folder.mkdir(exist_ok=True)
    torch.save({"model": tensors, "step": step}, folder / f"step_{step}.pt")


def test_movement_is_what_arithmetic_says(tmp_path):
    still = torch.arange(12.0).reshape(3, 4)
    save(tmp_path / "r", 1, **{
        "attn.weight": torch.tensor([[3.0, 4.0]]), "fc.weight": still, "norm.weight": torch.ones(4),
        "old": torch.ones(2, 2), "other": torch.ones(2, 2), "zero.weight": torch.zeros(2, 2),
    })  # fmt: skip
    save(tmp_path / "r", 2, **{
        "attn.weight": torch.tensor([[3.0, 4.5]]), "fc.weight": still, "norm.weight": -torch.ones(4),
        "new": torch.ones(2, 2), "other": torch.ones(3, 2), "zero.weight": torch.ones(2, 2),
    })  # fmt: skip
    found = moved(tmp_path / "r")
    figures = {
        key: (movement.relative, movement.cosine, movement.changed)
        for key, (_, movement) in found.tensors.items()
    }
    assert figures == {
        "attn.weight": (pytest.approx(0.5 / 5), pytest.approx((9 + 18) / (5 * math.sqrt(9 + 20.25))), 0.5),
        "fc.weight": (0.0, pytest.approx(1.0), 0.0),
        "norm.weight": (2.0, -1.0, 1.0),
        "zero.weight": (None, None, 1.0),
    }
    assert found.reshaped == ("other",)
    run = inshrink_core.open(tmp_path / "r")
    assert moved_between(run[1], run[2], ["fc.weight"]).tensors.keys() == {"fc.weight"}


def test_values_that_are_not_finite_count_as_changed_and_break_nothing(tmp_path):
    nan, inf = math.nan, math.inf
    save(tmp_path / "r", 1, w=torch.tensor([[1.0, nan, inf, -0.0, 2.0]]))
    save(tmp_path / "r", 2, w=torch.tensor([[1.0, nan, 1.0, 0.0, 3.0]]))
    _, movement = moved(tmp_path / "r").tensors["w"]
    assert movement.n_changed == 3
    assert movement.squared == 1.0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_every_dtype_is_measured(tmp_path, dtype):
    save(tmp_path / "r", 1, w=torch.tensor([[1, 0], [1, 1]]).to(dtype))
    save(tmp_path / "r", 2, w=torch.tensor([[1, 1], [1, 1]]).to(dtype))
    _, movement = moved(tmp_path / "r").tensors["w"]
    assert movement.n_changed == 1
    assert movement.relative == pytest.approx(math.sqrt(1 / 3))


def test_large_tensors_are_measured_in_pieces(tmp_path):
    n = (1 << 20) + 7
    save(tmp_path / "r", 1, w=torch.ones(n))
    save(tmp_path / "r", 2, w=torch.cat([torch.ones(n - 1), torch.tensor([3.0])]))
    _, movement = moved(tmp_path / "r").tensors["w"]
    assert (movement.n_values, movement.n_changed, movement.squared) == (n, 1, 4.0)


def test_an_archive_moves_as_its_run_does_without_the_optimizer(tmp_path):
    run = write_run(tmp_path / "run", n_steps=3)
    inshrink_core.compress(run, tmp_path / "a", codec="lossless")
    of_run, of_archive = (moved(path, 5, 15) for path in (run, tmp_path / "a"))
    assert {key: movement for key, (_, movement) in of_run.tensors.items()} == {
        key: movement for key, (_, movement) in of_archive.tensors.items()
    }
    assert set(of_run.tensors) == {
        spec.key for spec in inshrink_core.open(run)[5].specs if "@" not in spec.key
    }
