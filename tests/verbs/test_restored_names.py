"""What restored folders are called, and that none is written through a link."""

import pytest
import torch
from safetensors.torch import save_file

import inshrink_core
from inshrink_core.errors import UnsafePathError


def _write_folders(root, names):
    for at, name in enumerate(names):
        (root / name).mkdir(parents=True)
        save_file({"fc.weight": torch.full((4, 4), float(at))}, root / name / "model.safetensors")
        (root / name / "config.json").write_text("{}")
    return root


@pytest.mark.parametrize(
    "names",
    [
        ["Feb01_00-10-00", "Feb01_13-45-58", "Mar02_00-00-07"],
        ["epoch_1", "epoch_2"],
        ["checkpoint-10", "checkpoint-20"],
        ["iter_0000010", "iter_0000020"],
    ],
)
def test_restored_folders_bear_their_names_and_are_the_same_run(tmp_path, names):
    run = inshrink_core.open(_write_folders(tmp_path / "run", names))
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", every=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    again = inshrink_core.open(tmp_path / "out")
    assert again.steps == run.steps
    for step in run.steps:
        assert again.path_of(step).name == run.path_of(step).name
        assert torch.equal(again[step]["fc.weight"], run[step]["fc.weight"])


def test_folders_of_one_name_are_restored_by_their_steps(tmp_path):
    names = ["version_0/step_10", "version_1/step_10"]
    inshrink_core.compress(_write_folders(tmp_path / "run", names), tmp_path / "a.inshrink", codec="lossless")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", every=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_no_folder_is_written_through_a_link(tmp_path):
    run = _write_folders(tmp_path / "run", ["epoch_1", "epoch_2"])
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "epoch_2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", every=True)
    assert not list((tmp_path / "elsewhere").iterdir())
