"""Patches: bit for bit from one step to another, by whoever has safetensors, zstandard and NumPy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file
from safetensors.torch import load_file

import inshrink_core
from inshrink_core.errors import DamagedError, ExistsError, IncompatibleError, InputError, TooLargeError
from inshrink_core.verbs import apply, export, export_patch

STEPS = (1, 2, 3)
PAGE = Path(__file__).parents[2] / "docs" / "patches.md"


def weights(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights of which one changes nowhere, one in few places, one everywhere, one in shape."""
    few = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    places = torch.Generator().manual_seed(step)
    few.reshape(-1)[torch.randint(0, few.numel(), (40 * step,), generator=places)] *= -1.5
    return {
        "a.same": torch.linspace(-1, 1, 100).to(dtype),
        "b.few": few.to(dtype),
        "c.all": (torch.randn(50, 20, generator=torch.Generator().manual_seed(1)) + 0.01 * step).to(dtype),
        "d.odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-7 * step]).to(dtype),
        "e.grows": torch.ones(3 + step, dtype=dtype),
        f"f.only_at_{step}": torch.full((2,), float(step)).to(dtype),
        "g.count": torch.tensor(step),
        "h.empty": torch.zeros(0, 4, dtype=dtype),
    }


@pytest.fixture(params=["bfloat16", "float16", "float32"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    for step in STEPS:
        torch.save(
            {"model": weights(step, getattr(torch, request.param))}, tmp_path / "run" / f"step_{step}.pt"
        )
    inshrink_core.compress(tmp_path / "run", tmp_path / "a.inshrink", codec="lossless")
    return tmp_path / "a.inshrink"


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (one.dtype, one.shape, one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, one in tensors.items()
    }


@pytest.mark.parametrize("steps", [(1, 2), (1, 3), (3, 1), (2, 2)])
def test_a_patch_leads_from_one_step_to_another_bit_for_bit_by_apply_and_by_the_pages_program(
    archive: Path, tmp_path: Path, steps: tuple[int, int]
) -> None:
    first, last = steps
    patch, out = tmp_path / "patch.safetensors", tmp_path / "out.safetensors"
    report = export_patch(archive, patch, patch=f"{first}:{last}")
    assert report.nbytes == patch.stat().st_size
    assert apply(patch, f"{archive}@{first}", out).step == last
    wanted = bits(inshrink_core.open(archive)[last].state_dict())
    assert bits(load_file(out)) == wanted
    program: dict[str, Any] = {}
    (block,) = re.findall(r"```python title=\"apply_patch.py\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(block, program)
    assert bits(program["applied"](patch, inshrink_core.open(archive)[first].state_dict())) == wanted


def test_a_patch_of_served_weights_fits_what_export_wrote(archive: Path, tmp_path: Path) -> None:
    plain = {"weights_only": True, "exact": True, "layout": "safetensors", "dtype": "bf16"}
    for step in (1, 2):
        export(archive, tmp_path / f"{step}.safetensors", step=step, **plain)  # type: ignore[arg-type]
    export_patch(archive, tmp_path / "patch", patch="1:2", dtype="bf16")
    apply(tmp_path / "patch", tmp_path / "1.safetensors", tmp_path / "out")
    assert bits(load_file(tmp_path / "out")) == bits(load_file(tmp_path / "2.safetensors"))


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    """Return a patch from step 1 to 2 of an archive `a.inshrink`."""
    (tmp_path / "run").mkdir()
    for step in STEPS:
        torch.save({"model": weights(step, torch.bfloat16)}, tmp_path / "run" / f"step_{step}.pt")
    inshrink_core.compress(tmp_path / "run", tmp_path / "a.inshrink", codec="lossless")
    export_patch(tmp_path / "a.inshrink", tmp_path / "patch", patch="1:2")
    return tmp_path / "patch"


def test_another_base_is_refused_and_nothing_is_written(patch: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the base") as refused:
        apply(patch, f"{tmp_path / 'a.inshrink'}@3", tmp_path / "out")
    assert "'f.only_at_1' is missing" in refused.value.found
    changed = weights(1, torch.bfloat16)
    changed["a.same"][3] += 1
    torch.save(changed, tmp_path / "changed.pt")
    with pytest.raises(InputError, match="not the base") as refused:
        apply(patch, tmp_path / "changed.pt", tmp_path / "out")
    assert refused.value.expected.startswith("SHA-256")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_replaced_without_force(patch: Path, tmp_path: Path) -> None:
    base = f"{tmp_path / 'a.inshrink'}@1"
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(ExistsError):
        apply(patch, base, tmp_path / "out")
    with pytest.raises(ExistsError):
        export_patch(tmp_path / "a.inshrink", patch, patch="1:2")
    assert apply(patch, base, tmp_path / "out", force=True).n_tensors == 8


@pytest.mark.parametrize("given", ["1", "1:", "a:b", "1:2:3", "-1:2"])
def test_two_steps_are_named(patch: Path, tmp_path: Path, given: str) -> None:
    with pytest.raises(InputError, match="from which step to which"):
        export_patch(tmp_path / "a.inshrink", tmp_path / "other", patch=given)


def tampered(patch: Path, rows: Any = None, metadata: dict[str, str] | None = None, **streams: bytes) -> None:
    """Write a patch again with another index, header or streams."""
    with safe_open(patch, "numpy") as file:
        said = file.metadata()
    held = load_arrays(patch)
    if rows is not None:
        streams["index"] = json.dumps(rows).encode()
    packed = {name: zstandard.compress(content) for name, content in streams.items()}
    held |= {name: np.frombuffer(content, np.uint8) for name, content in packed.items()}
    save_file(held, patch, metadata=said | (metadata or {}))


HUGE = 1 << 60
ROWS = [["a.same", "bfloat16", [100], "same", 0], ["b.few", "bfloat16", [64, 33], "sparse", 2]]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [["a.same", "bfloat16", [HUGE], "new", HUGE]]},
        {"rows": [["a.same", "bfloat16", [HUGE], "same", 0], *ROWS[1:]]},
        {"rows": [ROWS[0], ["b.few", "bfloat16", [2, 2], "sparse", 2]]},
        {"rows": [["a.same", "bfloat16", [100], "dense", 3]]},
        {"rows": [["a.same", "bfloat16", [-100], "same", 0]]},
        {"rows": [["a.same", "float1", [100], "same", 0]]},
        {"rows": [["a.same"]]},
        {"rows": {"a": 1}},
        {"rows": [[[], [], {}, "new", "n"]]},
        {"gaps": b"\xff" * 100},
        {"gaps": b""},
        {"plane0": b"\x01" * 100_000},
        {"plane1": b""},
        {"metadata": {"result": "0" * 64}},
        {"metadata": {"to": "soon"}},
        {"metadata": {"format": "inshrink-patch/2"}},
        {"metadata": {"format": "?"}},
    ],
)
def test_a_patch_that_is_damaged_or_hostile_is_an_error_and_writes_nothing(
    patch: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    tampered(patch, **change)
    with pytest.raises((DamagedError, IncompatibleError, InputError, TooLargeError)):
        apply(patch, f"{tmp_path / 'a.inshrink'}@1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_patch_is_said_to_be_none(patch: Path, tmp_path: Path) -> None:
    for content in (b"", b"no patch", patch.read_bytes()[:-9]):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(DamagedError, match="this is no safetensors file"):
            apply(tmp_path / "other", f"{tmp_path / 'a.inshrink'}@1", tmp_path / "out")
