"""Lightning's sharded strategies with the real library, on two processes."""

import os
import re
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
from tests.integrations.dcp_ranks import same

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

EXACT = {"codec": "lossless", "optimizer_state": "exact"}


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader():
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


def fit(folder, strategy, epochs, resume=None, **options):
    options = {"save_top_k": -1, "filename": "{step}"} | options
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, **options)],
    )
    net = Net()
    trainer.fit(net, loader(), ckpt_path=resume, weights_only=False)
    return {name: value.full_tensor().clone() for name, value in net.state_dict().items()}


def weights(archive, step):
    checkpoint = archive.checkpoint(archive.reader.find(step))
    return {spec.key: checkpoint.source.read(spec) for spec in checkpoint.specs}


def sharded(archive, **options):
    two = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return InshrinkModelParallelStrategy(archive, archive_options=options, **two)


def train(folder):
    """What both processes of the test do."""
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
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "lightning.md").read_text()
    *_, program, resuming = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
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
    script = tmp_path / "train.py"
    body = "import sys, pathlib\nsys.path.append({!r})\n"
    body += "from tests.integrations.test_lightning_sharded import *\ntrain(pathlib.Path(sys.argv[1]))\n"
    # Else threads of gloo may outlive the interpreter, which aborts.
    end = "torch.distributed.barrier()\ntorch.distributed.destroy_process_group()\n"
    end += "print('nothing is left to do', flush=True)\n"
    script.write_text(body.format(str(Path(__file__).parents[2])) + end)
    on_two_ranks(script, tmp_path)
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
    assert same(weights(written_again, 2), weights(archive, 2))
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
