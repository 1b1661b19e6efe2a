"""What moved between two steps, in figures worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core.analysis.movement import Movement
from inshrink_core.errors import InputError, NotFoundError
from tests.runs import write_run


def save(folder: Path, step: int, **tensors: torch.Tensor) -> None:
    folder.mkdir(exist_ok=True)
    torch.save({"model": tensors, "step": step}, folder / f"step_{step}.pt")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    still = torch.arange(12.0).reshape(3, 4)
    save(folder, 1, **{
        "attn.weight": torch.tensor([[3.0, 4.0]]), "fc.weight": still, "norm.weight": torch.ones(4),
        "old": torch.ones(2, 2), "other": torch.ones(2, 2), "zero.weight": torch.zeros(2, 2),
    })  # fmt: skip
    save(folder, 2, **{
        "attn.weight": torch.tensor([[3.0, 4.5]]), "fc.weight": still, "norm.weight": -torch.ones(4),
        "new": torch.ones(2, 2), "other": torch.ones(3, 2), "zero.weight": torch.ones(2, 2),
    })  # fmt: skip
    return folder


def test_movement_is_what_arithmetic_says(run: Path) -> None:
    moved = inshrink_core.verbs.diff(run)
    rows = {row.spec.key: row.movement for row in moved.tensors}
    assert moved.steps == (1, 2)
    attention = rows["attn.weight"]
    assert attention.relative == pytest.approx(0.5 / 5)
    assert attention.rms == pytest.approx(0.5 / math.sqrt(2))
    assert attention.max_abs == 0.5
    assert attention.cosine == pytest.approx((9 + 18) / (5 * math.sqrt(9 + 20.25)))
    assert attention.changed == 0.5
    # 4.0 is 0x40800000, 4.5 is 0x40900000: one bit of 64
    assert attention.bits_changed == 1 / 64
    norm = rows["norm.weight"]
    assert (norm.relative, norm.cosine, norm.changed, norm.bits_changed) == (2.0, -1.0, 1.0, 1 / 32)
    still = rows["fc.weight"]
    assert (still.relative, still.changed, still.bits_changed, still.max_abs) == (0.0, 0.0, 0.0, 0.0)
    assert still.cosine == pytest.approx(1.0)


def test_rows_stand_by_falling_movement_and_from_nothing_first(run: Path) -> None:
    moved = inshrink_core.verbs.diff(run)
    assert [row.spec.key for row in moved.tensors] == [
        "zero.weight", "norm.weight", "attn.weight", "fc.weight",
    ]  # fmt: skip
    assert moved.tensors[0].movement.relative is None


def test_counters_stand_last_and_the_total_is_of_weights(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", n_steps=2)
    moved = inshrink_core.verbs.diff(run)
    assert moved.tensors[-1].spec.key == "1.num_batches_tracked"
    weights = [row.spec for row in moved.tensors if row.spec.role.value == "weight"]
    assert moved.total.n_values == sum(spec.numel for spec in weights)
    assert "buffer" in moved.layers


def test_tensors_of_one_step_only_are_named(run: Path) -> None:
    moved = inshrink_core.verbs.diff(run)
    assert (moved.added, moved.removed, moved.reshaped) == (("new",), ("old",), ("other",))


def test_layers_add_up_to_the_total(run: Path) -> None:
    moved = inshrink_core.verbs.diff(run)
    assert set(moved.layers) == {"attention", "linear", "vector"}
    total = Movement()
    for movement in moved.layers.values():
        total += movement
    assert total.to_json() == pytest.approx(moved.total.to_json())
    assert moved.total.n_values == 2 + 12 + 4 + 4


def test_values_that_are_not_finite_count_as_changed_and_break_nothing(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    save(tmp_path / "r", 1, w=torch.tensor([[1.0, nan, inf, -0.0, 2.0]]))
    save(tmp_path / "r", 2, w=torch.tensor([[1.0, nan, 1.0, 0.0, 3.0]]))
    movement = inshrink_core.verbs.diff(tmp_path / "r").tensors[0].movement
    assert movement.n_changed == 3
    assert movement.max_abs == inf
    assert movement.squared == 1.0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_every_dtype_is_measured(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path / "r", 1, w=torch.tensor([[1, 0], [1, 1]]).to(dtype))
    save(tmp_path / "r", 2, w=torch.tensor([[1, 1], [1, 1]]).to(dtype))
    movement = inshrink_core.verbs.diff(tmp_path / "r").tensors[0].movement
    assert movement.n_changed == 1
    assert movement.squared == 1.0
    assert movement.relative == pytest.approx(math.sqrt(1 / 3))


def test_slices_change_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    generator = torch.Generator().manual_seed(3)
    for step in (1, 2):
        save(tmp_path / "r", step, w=torch.randn(50, 7, generator=generator))
    whole = inshrink_core.verbs.diff(tmp_path / "r").total.to_json()
    monkeypatch.setattr(sys.modules["inshrink_core.analysis.movement"], "_CHUNK", 11)
    assert inshrink_core.verbs.diff(tmp_path / "r").total.to_json() == pytest.approx(whole)


def test_archive_is_compared_step_by_step_and_optimizer_only_if_asked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", n_steps=3)
    inshrink_core.compress(run, tmp_path / "a", codec="lossless")
    of_run, of_archive = (inshrink_core.verbs.diff(path, steps=(5, 15)) for path in (run, tmp_path / "a"))
    assert of_run.rows() == of_archive.rows()
    assert not any("@" in row.spec.key for row in of_run.tensors)
    everything = inshrink_core.verbs.diff(run, steps=(5, 15), everything=True)
    assert any(row.spec.key.endswith("@exp_avg") for row in everything.tensors)
    assert "exp_avg" in everything.layers


def test_steps_that_are_not_there_or_not_two_are_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="step 7"):
        inshrink_core.verbs.diff(run, steps=(1, 7))
    with pytest.raises(InputError, match="against itself"):
        inshrink_core.verbs.diff(run, steps=(1, 1))
    save(tmp_path / "one", 1, w=torch.ones(2, 2))
    with pytest.raises(InputError, match="takes two steps"):
        inshrink_core.verbs.diff(tmp_path / "one")


def test_progress_is_told_and_may_cancel(run: Path) -> None:
    def cancel(_now: inshrink_core.execution.progress.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inshrink_core.verbs.diff(run, progress=cancel)
