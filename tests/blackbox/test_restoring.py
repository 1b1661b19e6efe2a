"""Other forms of what is restored: formats, parts of a step, one file, another archive."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.blackbox.conftest import STEPS, contents, document, inshrink


def weights(run: Path, step: int = STEPS[-1]) -> dict[str, torch.Tensor]:
    return torch.load(run / f"step_{step:04d}.pt", weights_only=True)["model"]


def test_a_step_is_chosen_by_number_and_is_the_last_otherwise(
    run: Path, made_exact: Path, tmp_path: Path
) -> None:
    for words, name in (((), "step_0040.pt"), (("--step", "20"), "step_0020.pt")):
        document("restore", made_exact, *words, "-o", tmp_path / name)
        assert contents(tmp_path / name) == {name: (run / name).read_bytes()}
    document("restore", made_exact, "--steps", "10:40:2", "-o", tmp_path / "some")
    assert [*contents(tmp_path / "some")] == ["step_0010.pt", "step_0030.pt"]


def test_safetensors_and_torch_files_hold_the_values_of_the_archive(
    run: Path, made_exact: Path, tmp_path: Path
) -> None:
    document("restore", made_exact, "--format", "safetensors", "-o", tmp_path / "a")
    document("restore", made_exact, "--format", "torch", "-o", tmp_path / "b")
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(run).items())
    (path,) = (tmp_path / "b").iterdir()
    found = torch.load(path, weights_only=True)["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(run).items())


def test_distributed_checkpoints_are_loaded_by_torch(run: Path, made_exact: Path, tmp_path: Path) -> None:
    document("restore", made_exact, "--format", "dcp", "-o", tmp_path / "out")
    (metadata,) = (tmp_path / "out").rglob(".metadata")
    dcp_to_torch_save(metadata.parent, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)
    while "body.weight" not in found:
        found = found["model"]
    assert torch.equal(found["body.weight"], weights(run)["body.weight"])


def test_a_glob_restores_these_tensors_alone(run: Path, made_exact: Path, tmp_path: Path) -> None:
    document("restore", made_exact, "--tensors", "head.*", "--step", "20", "-o", tmp_path / "out")
    (path,) = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    found = load_file(path)
    assert {"head.weight", "head.bias"} <= found.keys()
    assert all(name.startswith("head.") for name in found)
    assert torch.equal(found["head.weight"], weights(run, 20)["head.weight"])


def test_files_that_exist_are_replaced_by_force_alone(run: Path, made_exact: Path, tmp_path: Path) -> None:
    target = tmp_path / "step_0040.pt"
    target.write_bytes(b"mine")
    refused = inshrink("restore", made_exact, "-o", tmp_path, "--json")
    assert refused.code == 2
    assert "step_0040.pt" in refused.document["error"]["message"]
    assert target.read_bytes() == b"mine"
    document("restore", made_exact, "-o", tmp_path, "--force")
    assert target.read_bytes() == (run / "step_0040.pt").read_bytes()


def test_a_packed_archive_is_read_as_the_folder_and_unpacked_again(
    run: Path, made_exact: Path, tmp_path: Path
) -> None:
    packed, unpacked = tmp_path / "packed.inshrink", tmp_path / "unpacked.inshrink"
    made = document("export", made_exact, "--pack", packed)
    assert (made["steps"], made["frames"], made["bytes"]) == (list(STEPS), len(STEPS), packed.stat().st_size)
    assert document("inspect", packed)["steps"] == list(STEPS)
    document("restore", packed, "--step", "30", "-o", tmp_path / "one")
    assert (tmp_path / "one" / "step_0030.pt").read_bytes() == (run / "step_0030.pt").read_bytes()
    document("export", packed, "--unpack", unpacked)
    document("restore", unpacked, "--all", "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(run)


def test_one_step_is_exported_as_a_file_that_needs_nothing_else(
    run: Path, made_exact: Path, tmp_path: Path
) -> None:
    target = tmp_path / "one.inshrink"
    assert document("export", made_exact, "--step", "30", "-o", target)["steps"] == [30]
    document("restore", target, "-o", tmp_path / "out")
    assert (tmp_path / "out" / "step_0030.pt").read_bytes() == (run / "step_0030.pt").read_bytes()


def test_weights_alone_are_exported_exactly_as_safetensors(
    run: Path, made_exact: Path, tmp_path: Path
) -> None:
    target = tmp_path / "weights.safetensors"
    words = ("--weights-only", "--exact", "--without", "head", "--format", "safetensors")
    made = document("export", made_exact, *words, "-o", target)
    assert made["exact"] is True
    found, wanted = load_file(target), weights(run)
    assert made["tensors"] == len(found)
    assert {name for name in wanted if not name.startswith("head.")} == found.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_weights_alone_are_coarsened_to_the_ratio_that_was_asked(made_exact: Path, tmp_path: Path) -> None:
    made = document("export", made_exact, "--weights-only", "--ratio", "6", "-o", tmp_path / "w.inshrink")
    assert made["weights_only"] is True
    assert made["ratio_float32"] >= 6
    assert 0 < made["relative_error"] < 0.2
    assert document("verify", tmp_path / "w.inshrink", "--deep")["ok"] is True
