"""Lightning's sharded strategies with the real library, on two processes."""

import os
import time
from pathlib import Path

import pytest

import inshrink_core
from inshrink_core.errors import InputError

pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from inshrink_core.integrations.lightning import (
    InshrinkFSDPStrategy,
    InshrinkModelParallelStrategy,
    restore_checkpoint,
)
from inshrink_core.training.spool import Spool
from tests.guides import blocks
from tests.integrations.dcp_ranks import same
from tests.integrations.test_lightning import EXACT, loader, trainer
from tests.integrations.test_lightning import Net as Whole

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


class Net(Whole):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def fit(folder, strategy, epochs, resume=None, **options):
    options = {"save_top_k": -1, "monitor": None, "save_last": None} | options
    net = Net()
    trainer(folder, None, epochs, strategy, **options).fit(
        net, loader(), ckpt_path=resume, weights_only=False
    )
    return {name: value.full_tensor().clone() for name, value in net.state_dict().items()}


def sharded(archive, **options):
    two = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return InshrinkModelParallelStrategy(archive, archive_options=options, **two)


def train(folder):
    """What both processes of the test do."""
    folder = Path(folder)
    archive = folder / "run.inshrink"
    plain = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    uninterrupted = fit(folder / "plain", plain, 4)
    first = sharded(archive, **EXACT)
    fit(folder / "ours", first, 3)
    first.close(strict=True)
    torch.distributed.barrier()
    second = sharded(archive)
    resumed = fit(folder / "ours", second, 4, resume=restore_checkpoint(archive, folder / "restored", 4))
    second.close(strict=True)
    assert same(uninterrupted, resumed)
    own = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    assert same(uninterrupted, fit(folder / "own", own, 4, resume=str(folder / "restored")))
    follow_page(folder / "page")
    settle = Spool.settle
    Spool.settle = lambda spool, save: (time.sleep(1), settle(spool, save))
    same_place = sharded(folder / "same.inshrink", **EXACT)
    fit(folder / "same", same_place, 3, filename="same", enable_version_counter=False)
    same_place.close(strict=True)


def follow_page(folder):
    """Run what the page of the documentation says."""
    *_, program, resuming = blocks("lightning", "python", "integrations")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    keeper = ModelCheckpoint(dirpath="checkpoints", save_top_k=-1)
    options = {"accelerator": "cpu", "devices": 2, "logger": False, "callbacks": [keeper]}
    names = {
        "Trainer": pl.Trainer,
        "model": Net(),
        "loader": loader(),
        "options": options | {"max_epochs": 2},
    }
    exec(program, names)
    names["trainer"].fit(names["model"], names["loader"])
    torch.distributed.barrier()
    names |= {"model": Net(), "options": options | {"max_epochs": 3}}
    exec(program, names)
    exec(resuming, names)


@pytest.mark.timeout(600)
def test_two_ranks_resume_from_the_archive_as_if_never_interrupted(tmp_path, on_two_ranks):
    on_two_ranks("tests.integrations.test_lightning_sharded:train", tmp_path)
    archive = inshrink_core.open(tmp_path / "run.inshrink")
    frames = archive.reader.frames
    assert [(frame.step, frame.branch) for frame in frames] == [(2, 0), (4, 0), (6, 0), (6, 1), (8, 1)]
    assert archive.frame(frames[3]).meta["restored"] == archive.reader.find(4).frame_id
    present = {file.path for file in archive.checkpoint(archive.last).files}
    assert {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp"} <= present
    first = next(spec for spec in archive.checkpoint(archive.last).specs if spec.name == "layers.0.weight")
    assert first.shape == (16, 8)
    assert inshrink_core.open(tmp_path / "page" / "run.inshrink").steps == (2, 4, 6)
    written_again = inshrink_core.open(tmp_path / "same.inshrink")
    assert written_again.steps == (2, 4, 6)
    assert same(written_again[2], archive[2])
    assert not list(tmp_path.glob("*.spool"))


def test_checkpoints_in_one_file_are_refused_when_constructed(tmp_path):
    with pytest.raises(InputError, match="one file"):
        InshrinkModelParallelStrategy(tmp_path / "a.inshrink", save_distributed_checkpoint=False)
    with pytest.raises(InputError, match="one file"):
        InshrinkFSDPStrategy(tmp_path / "a.inshrink", state_dict_type="full")
    with pytest.raises(InputError):
        InshrinkFSDPStrategy(tmp_path / "a.inshrink", archive_options={"codec": "no such codec"})
    with InshrinkFSDPStrategy(tmp_path / "a.inshrink", archive_options=EXACT) as strategy:
        assert strategy._state_dict_type == "sharded"
