"""Every tensor file under a run has one fate, and none is left out in silence."""

import shutil
from pathlib import Path

import pytest
import torch

from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.formats import open_run
from inshrink_core.formats.discovery import ARCHIVE_MARK

WEIGHTS = {"fc.weight": (8, 8), "fc.bias": (8,)}


def save(path, seed=0, shapes=WEIGHTS, **beside):
    """Save a model with values by seed."""
    generator = torch.Generator().manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    torch.save({"model": model, **beside} if beside else model, path)


def fates(folder):
    return {one.path: one.fate.value for one in open_run(folder).fates}


@pytest.fixture
def run(tmp_path):
    """Three epochs, one file each."""
    for epoch in (1, 2, 3):
        save(tmp_path / f"epoch_{epoch}.pth", epoch)
    return tmp_path


def test_restored_copies_below_the_run_are_no_steps(run):
    for epoch in (1, 2):
        save(run / "restored" / f"epoch_{epoch}.pth", 10 + epoch)
    shutil.copy(run / "epoch_3.pth", run / "restored" / "epoch_3.pth")
    assert open_run(run).steps == (1, 2, 3)
    found = fates(run)
    assert [found[f"restored/epoch_{epoch}.pth"] for epoch in (1, 2, 3)] == [
        "other model",
        "other model",
        "duplicate",
    ]


@pytest.mark.parametrize("folder", ["a/b/c/d/e", "epoch=4-val", "lightning_logs/version_0/checkpoints"])
def test_no_depth_hides_a_checkpoint(run, folder):
    save(run / folder / "epoch_4.pth", 4)
    assert open_run(run).steps == (1, 2, 3, 4)


def test_archives_and_hidden_folders_are_not_searched(run):
    save(run / "x.inshrink" / "epoch_4.pth", 4)
    save(run / ".cache" / "epoch_5.pth", 5)
    save(run / "archive" / "epoch_6.pth", 6)
    (run / "archive" / ARCHIVE_MARK).write_bytes(b"")
    assert open_run(run).steps == (1, 2, 3)


def test_the_mark_of_an_archive_is_its_manifest():
    assert ARCHIVE_MARK == MANIFEST_NAME


@pytest.mark.parametrize(
    "name", ["epoch_4.pth.tar", "epoch_4.PTH", "epoch_4.pkl", "epoch_4", "epoch_4.model"]
)
def test_a_torch_file_is_a_step_under_any_suffix(run, name):
    save(run / name, 4)
    assert open_run(run).steps == (1, 2, 3, 4)


def test_the_search_has_a_budget_and_says_where_it_ended(run, monkeypatch):
    monkeypatch.setattr("inshrink_core.formats.discovery.MAX_ENTRIES", 5)
    for number in range(5):
        (run / "data").mkdir(exist_ok=True)
        (run / "data" / f"{number}.txt").touch()
    found = open_run(run)
    assert [Path(row.path).name for row in found.unreadable] == ["data"]
    assert fates(run)["data"] == "left out"


def test_a_link_above_itself_ends(run):
    (run / "inner").mkdir()
    (run / "inner" / "up").symlink_to(run)
    assert open_run(run).steps == (1, 2, 3)


def test_files_that_are_being_written_are_pending(run):
    (run / "epoch_4.pth.tmp").write_bytes(b"PK")
    assert fates(run)["epoch_4.pth.tmp"] == "pending"
