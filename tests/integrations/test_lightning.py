"""Lightning with the real library: pointers, resuming, and what cannot be archived."""

import contextlib
import dataclasses
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core.archive import LocalStorage
from inshrink_core.errors import InputError, LockedError, NotFoundError, StorageError
from inshrink_core.training import Retention, Saver
from inshrink_core.training.spool import spool_folder
from tests.guides import blocks
from tests.integrations.dcp_ranks import same

pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from inshrink_core.integrations.lightning import InshrinkCheckpointIO, restore_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

EXACT = {"codec": "lossless", "optimizer_state": "exact"}


@pytest.fixture(autouse=True)
def importable(tmp_path_factory, monkeypatch):
    """Let started processes import this module, without the checkout that it lies in."""
    folder = tmp_path_factory.mktemp("importable")
    (folder / "tests").symlink_to(Path(__file__).parents[1])
    monkeypatch.syspath_prepend(folder)


@dataclasses.dataclass
class Sizes:
    width: int = 16


class Net(pl.LightningModule):
    def __init__(self, sizes=None, where=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        loss = (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def predict_step(self, batch, index):
        return self.layers(batch[0])


def loader():
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


def trainer(folder, plugins, epochs, strategy="auto", **options):
    options = {"filename": "{step}", "save_top_k": 1, "monitor": "loss", "save_last": "link"} | options
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        strategy=strategy,
        devices=1 if strategy == "auto" else 2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, **options)],
        plugins=plugins,
    )


def fit(folder, plugins, epochs, net=None, resume=None, **options):
    net = net or Net()
    trainer(folder, plugins, epochs, **options).fit(net, loader(), ckpt_path=resume, weights_only=False)
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_a_last_checkpoint_of_the_same_step_points_to_the_same_frame(tmp_path):
    plugin = InshrinkCheckpointIO(tmp_path / "run.inshrink", **EXACT)
    fit(tmp_path / "ours", [plugin], 2, save_last=True)
    plugin.close(strict=True)
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (4, 8)
    last = plugin.load_checkpoint(tmp_path / "ours" / "last.ckpt", weights_only=False)
    step = plugin.load_checkpoint(tmp_path / "ours" / "step=8.ckpt", weights_only=False)
    assert same(last["state_dict"], step["state_dict"])


def test_hyperparameters_that_are_objects_come_back_and_only_when_trusted(tmp_path):
    plugin = InshrinkCheckpointIO(tmp_path / "run.inshrink", **EXACT)
    net = Net(Sizes(3), tmp_path)
    weights = fit(tmp_path / "ours", [plugin], 1, net=net)
    plugin.close(strict=True)
    target = restore_checkpoint(tmp_path / "run.inshrink", tmp_path / "out.ckpt", weights_only=False)
    loaded = Net.load_from_checkpoint(target, weights_only=False)
    assert loaded.hparams.sizes == Sizes(3)
    assert loaded.hparams.where == tmp_path
    assert same(weights, loaded.state_dict())
    with pytest.raises(InputError, match="only on request"):
        restore_checkpoint(tmp_path / "run.inshrink", tmp_path / "no.ckpt")


@pytest.fixture
def in_processes(monkeypatch):
    """As a launcher leaves the environment: its variables end with the test."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def threads():
    return [
        entry.name for entry in threading.enumerate() if entry.name.startswith(("inshrink", "ThreadPool"))
    ]


# A process that is spawned imports Lightning anew, which takes seconds: one of them shows what is the same.
@pytest.mark.parametrize(
    ("strategy", "wrap"),
    [("ddp_fork", lambda plugin: plugin), ("ddp_fork", AsyncCheckpointIO), ("ddp_spawn", AsyncCheckpointIO)],
)
def test_trainings_in_processes_of_their_own_are_archived_and_resumed(tmp_path, in_processes, strategy, wrap):
    options = {"strategy": strategy, "save_last": True}
    with InshrinkCheckpointIO(tmp_path / "run.inshrink", **EXACT) as plugin:
        fit(tmp_path / "ours", [wrap(plugin)], 2, **options)
    plugin.close(strict=True)
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (2, 4)
    resumed = fit(tmp_path / "ours", [wrap(plugin)], 3, resume="last", **options)
    plugin.close(strict=True)
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (2, 4, 6)
    assert same(resumed, fit(tmp_path / "plain", [], 3, strategy="ddp_fork"))
    assert threads() == []


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_failures_of_a_training_in_processes_of_its_own_are_reported(tmp_path, in_processes, strategy):
    plugin = InshrinkCheckpointIO(tmp_path / "run.inshrink", **EXACT)
    with Saver(tmp_path / "run.inshrink", **EXACT):
        fit(tmp_path / "ours", [plugin], 1, strategy=strategy)
    assert list(plugin.failures) == [2]
    with pytest.raises(StorageError, match="another process is writing this archive"):
        plugin.close(strict=True)
    assert "state_dict" in torch.load(tmp_path / "ours" / "step=2.ckpt", weights_only=False)


class Failing(Net):
    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            raise ZeroDivisionError


def test_what_a_process_that_failed_had_saved_is_archived(tmp_path, in_processes):
    plugin = InshrinkCheckpointIO(tmp_path / "run.inshrink", **EXACT)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        fit(tmp_path / "ours", [plugin], 3, net=Failing(), strategy="ddp_fork")
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (2, 4)
    assert not spool_folder(tmp_path / "run.inshrink").exists()


@pytest.mark.parametrize("wrap", [lambda plugin: plugin, AsyncCheckpointIO])
def test_what_saves_nothing_leaves_neither_a_thread_nor_a_lock(tmp_path, wrap):
    archive = tmp_path / "run.inshrink"
    fit(tmp_path / "ours", [InshrinkCheckpointIO(archive, **EXACT)], 1)
    plugin = InshrinkCheckpointIO(archive)
    assert threads() == []
    made = trainer(tmp_path / "ours", [wrap(plugin)], 1)
    made.predict(Net(), loader(), ckpt_path=str(tmp_path / "ours" / "step=4.ckpt"), weights_only=False)
    assert threads() == []
    assert not LocalStorage(archive).is_locked()


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_asynchronous_saves_are_archived_pruned_and_unlocked_when_fit_returns(tmp_path, error):
    class Ending(Net):
        def on_train_epoch_start(self):
            time.sleep(0.2)  # Lightning leaves a file where it is that its thread has not written yet
            if error is not None and self.current_epoch == 3:
                raise error

    archive = tmp_path / "run.inshrink"
    plugin = InshrinkCheckpointIO(archive, retention=Retention(keep_last=1), **EXACT)
    asynchronous = AsyncCheckpointIO(plugin)
    options = {"save_top_k": 1, "monitor": "step", "mode": "max", "save_last": False}
    for epochs in (3, 5):
        with contextlib.ExitStack() as stack:
            if epochs == 5 and error is not None:
                stack.enter_context(pytest.raises(SystemExit if error is KeyboardInterrupt else error))
            fit(tmp_path / "ours", [asynchronous], epochs, net=Ending(), **options)
        assert not LocalStorage(archive).is_locked()
        assert not spool_folder(archive).exists()
        assert plugin.failures == {}
        (last,) = inshrink_core.open(archive).steps
        assert [path.name for path in (tmp_path / "ours").iterdir()] == [f"step={last}.ckpt"]
        shutil.rmtree(archive)
        shutil.rmtree(tmp_path / "ours")
        plugin = InshrinkCheckpointIO(archive, retention=Retention(keep_last=1), **EXACT)
        asynchronous = AsyncCheckpointIO(plugin)


def test_a_pointer_to_what_is_gone_is_an_error_and_so_is_a_locked_archive(tmp_path):
    with Saver(tmp_path / "run.inshrink", **EXACT), pytest.raises(LockedError):
        InshrinkCheckpointIO(tmp_path / "run.inshrink")
    plugin = InshrinkCheckpointIO(tmp_path / "run.inshrink", **EXACT)
    fit(tmp_path / "ours", [plugin], 1)
    shutil.rmtree(tmp_path / "run.inshrink")
    with pytest.raises(NotFoundError):
        plugin.load_checkpoint(tmp_path / "ours" / "step=4.ckpt", weights_only=False)


def test_the_program_of_the_page_runs_and_goes_on(tmp_path, monkeypatch):
    program, loading, *_ = blocks("lightning", "python", "integrations")
    monkeypatch.chdir(tmp_path)
    names = {
        "Net": Net,
        "model": Net(),
        "loader": loader(),
        "options": {"max_epochs": 2, "accelerator": "cpu"},
    }
    exec(program, names)
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (4, 8)
    trained = names["model"]
    exec(loading, names)
    assert names["model"].state_dict().keys() == trained.state_dict().keys()
    names |= {"model": trained, "options": {"max_epochs": 3, "accelerator": "cpu"}}
    exec(program, names)
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (4, 8, 12)
