"""Every tensor file under a run has one fate, and none is left out in silence."""

import shutil
from pathlib import Path

import pytest
import torch

from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.formats import Fate, open_run
from inshrink_core.formats.discovery import ARCHIVE_MARK

WEIGHTS = {"fc.weight": (8, 8), "fc.bias": (8,)}


def save(path, seed=0, shapes=WEIGHTS, **beside):
    """Save a model with values by seed."""
    generator = torch.Generator().manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    torch.save({"model": model, **beside} if beside else model, path)


def optimizer(path, seed=0):
    """Save the state of AdamW for the same model."""
    params = [torch.nn.Parameter(torch.full(shape, float(seed))) for shape in WEIGHTS.values()]
    adam = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    adam.step()
    torch.save(adam.state_dict(), path)


def fates(folder):
    return {one.path: one.fate.value for one in open_run(folder).fates}


@pytest.fixture
def run(tmp_path):
    """Three epochs, one file each."""
    for epoch in (1, 2, 3):
        save(tmp_path / f"epoch_{epoch}.pth", epoch)
    return tmp_path


def test_a_copy_of_a_step_is_a_duplicate_and_other_values_are_a_branch(run):
    shutil.copy(run / "epoch_3.pth", run / "model.pth")
    save(run / "best.pth", 9)
    found = open_run(run)
    assert found.steps == (1, 2, 3)
    assert {one.path: (one.fate, one.step, one.name) for one in found.fates if one.fate != Fate.STEP} == {
        "best.pth": (Fate.BRANCH, 3, "best"),
        "model.pth": (Fate.DUPLICATE, 3, ""),
    }
    assert list(found.branches) == ["best"]
    assert torch.equal(found.branches["best"]["fc.weight"], torch.load(run / "best.pth")["fc.weight"])


@pytest.mark.parametrize("name", ["model.pth", "optimal.pth", "gradient_boost.pt", "weights.pt", "net.bin"])
def test_one_file_beside_epochs_does_not_make_the_folder_one_checkpoint(run, name):
    save(run / name, 9)
    found = open_run(run)
    assert found.steps == (1, 2, 3)
    assert fates(run)[name] == "branch"


@pytest.mark.parametrize("name", ["optimizer.pth", "optim.pt", "optimizer_state.pt"])
def test_an_optimizer_beside_epochs_is_archived(run, name):
    optimizer(run / name)
    found = open_run(run)
    assert found.steps == (1, 2, 3)
    assert fates(run)[name] == "branch"


@pytest.mark.parametrize(
    ("model", "state"),
    [
        ("model_{:06}.pt", "optimizer_{:06}.pt"),
        ("ckpt-{}.pth", "optim-{}.pth"),
        ("step{}_model.bin", "step{}_optimizer.bin"),
    ],
)
def test_files_with_the_same_number_are_one_step(tmp_path, model, state):
    for step in (100, 200):
        save(tmp_path / model.format(step), step)
        optimizer(tmp_path / state.format(step), step)
    found = open_run(tmp_path)
    assert found.steps == (100, 200)
    assert fates(tmp_path) == {
        name.format(step): fate
        for step in (100, 200)
        for name, fate in ((model, "step"), (state, "auxiliary"))
    }
    assert any(spec.key == "fc.weight@exp_avg" for spec in found[200].specs)


def test_a_generator_and_a_discriminator_of_one_step_are_one_checkpoint(tmp_path):
    for step in (100, 200):
        save(tmp_path / f"G_{step}.pth", step)
        save(tmp_path / f"D_{step}.pth", step, {"conv.weight": (4, 4), "head.weight": (4, 2)})
    found = open_run(tmp_path)
    assert found.steps == (100, 200)
    assert {"g.fc.weight", "d.conv.weight"} <= set(found[100])
    assert set(found[100].models) == {"g", "d"}


def test_models_of_one_step_with_the_same_names_keep_all_of_their_tensors(tmp_path):
    for step in (1, 2):
        save(tmp_path / f"netA_{step}.pth", step)
        save(tmp_path / f"netB_{step}.pth", step, {name: (*shape, 2) for name, shape in WEIGHTS.items()})
    checkpoint = open_run(tmp_path)[2]
    assert {spec.shape for spec in checkpoint.specs} == {(8, 8), (8,), (8, 8, 2), (8, 2)}


def test_another_model_is_named_and_no_step(run):
    save(run / "pretrained" / "resnet.pth", 5, {"stem.weight": (3, 3), "stem.bias": (3,)})
    assert open_run(run).steps == (1, 2, 3)
    assert fates(run)["pretrained/resnet.pth"] == "other model"


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
