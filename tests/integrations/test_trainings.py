"""Promises of every framework: trainings resume bit for bit, wherever the archive is, and none is stopped."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

import inshrink_core.archive
from inshrink_core import verbs
from inshrink_core.archive.storage import uploads
from inshrink_core.errors import StorageError
from inshrink_core.training import Retention
from inshrink_core.training.spool import Spool, spool_folder
from tests.integrations.dcp_ranks import same

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

EXACT = {"codec": "lossless", "optimizer_state": "exact"}


class HuggingFace:
    steps, at = (2, 4, 6), 4

    def __init__(self, kind=""):
        self.library = pytest.importorskip("tests.integrations.test_huggingface")
        self.kind = kind

    def _run(self, folder, callbacks, resume=None):
        net, options = self.library.model(), {}
        if self.kind == "lora":
            peft = pytest.importorskip("peft", reason="needs peft: make test-integrations")
            net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        if self.kind == "8 bits":
            pytest.importorskip("torchao")
            options = {"optim": "adamw_torch_8bit"}
        training = self.library.trainer(folder, callbacks, net=net, **options)
        training.train(resume_from_checkpoint=resume)
        return self.library.weights(training)

    def plain(self, folder):
        return self._run(folder, [])

    def train(self, place, folder, **options):
        callback = self.library.InshrinkCallback(place, **options)
        return callback, self._run(folder, [callback])

    def resume(self, place, folder, **options):
        callback = self.library.InshrinkCallback(place, **options)
        restored = self.library.restore_checkpoint(place, f"{folder}-again", self.at)
        return callback, self._run(f"{folder}-again", [callback], restored)


class Lightning:
    steps, at = (4, 8, 12, 16), 8

    def __init__(self, kind=""):
        self.library = pytest.importorskip("tests.integrations.test_lightning")
        self.kind = kind

    def _run(self, folder, plugins, resume=None):
        net = self.library.Net()
        if self.kind == "8 bits":
            adamw = pytest.importorskip("torchao.optim").AdamW8bit
            net.layers = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.Linear(1024, 1))
            net.configure_optimizers = lambda: adamw(net.parameters(), lr=0.01)
        options = {"save_top_k": -1, "save_last": False}
        return self.library.fit(Path(folder), plugins, 4, net, resume, **options)

    def plain(self, folder):
        return self._run(folder, [])

    def train(self, place, folder, **options):
        plugin = self.library.InshrinkCheckpointIO(place, **options)
        outer = self.library.AsyncCheckpointIO(plugin) if self.kind == "asynchronous" else plugin
        return plugin, self._run(folder, [outer])

    def resume(self, place, folder, **options):
        plugin = self.library.InshrinkCheckpointIO(place, **options)
        return plugin, self._run(folder, [plugin], str(Path(folder) / "step=8.ckpt"))


class Accelerate:
    steps, at = (3, 6), 3

    def __init__(self):
        self.library = pytest.importorskip("tests.integrations.test_accelerate")

    def plain(self, folder):
        return self.library.train(*self.library.prepared(), 6)

    def train(self, place, folder, **options):
        prepared = self.library.prepared()
        with self.library.AcceleratorSaver(prepared[0], place, **options) as saver:
            assert saver.load_state() is None
            for step in self.steps:
                weights = self.library.train(*prepared, 3)
                saver.save_state(step)
        return saver, weights

    def resume(self, place, folder, **options):
        prepared = self.library.prepared()
        with self.library.AcceleratorSaver(prepared[0], place, **options) as saver:
            assert saver.load_state(self.at) == self.at
            weights = self.library.train(*prepared, 3)
            saver.save_state(self.steps[-1])
        return saver, weights


FRAMEWORKS = {"huggingface": HuggingFace, "lightning": Lightning, "accelerate": Accelerate}
KINDS = {
    **FRAMEWORKS,
    "lora": lambda: HuggingFace("lora"),
    "huggingface, 8 bits": lambda: HuggingFace("8 bits"),
    "lightning, 8 bits": lambda: Lightning("8 bits"),
    "lightning, asynchronous": lambda: Lightning("asynchronous"),
}


def require_resumed(training, place, folder, expected, **options):
    """Resume in the middle; what is trained and archived then is what it was."""
    adapter, resumed = training.resume(place, folder, **options)
    adapter.close(strict=True)
    assert same(resumed, expected)
    archive = inshrink_core.open(place)
    assert archive.steps == training.steps
    assert archive.frame(archive.reader.frames[-1]).meta.get("codec") == "lossless"
    assert verbs.verify(place, deep=True).problems == ()
    return archive


@pytest.mark.parametrize("name", KINDS)
def test_a_training_goes_on_from_the_archive_to_the_same_bits(name, tmp_path):
    training, place = KINDS[name](), tmp_path / "run.inshrink"
    expected = training.plain(tmp_path / "plain")
    adapter, weights = training.train(place, tmp_path / "ours", **EXACT)
    adapter.close(strict=True)
    assert same(weights, expected)
    archive = require_resumed(training, place, tmp_path / "ours", expected)
    first = next(frame for frame in archive.reader.frames if frame.branch == 1)
    assert archive.frame(first).meta["restored"] == archive.reader.find(training.at).frame_id
    assert not spool_folder(place).exists()


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_another_machine_goes_on_from_a_bucket_to_the_same_bits(name, url, tmp_path, monkeypatch):
    training = FRAMEWORKS[name]()
    adapter, expected = training.train(url, tmp_path / "ours", **EXACT)
    adapter.close(strict=True)
    monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / uuid.uuid4().hex))
    require_resumed(training, url, tmp_path / "ours", expected)


KILLED = """
import os, signal, sys
sys.path.append(sys.argv[1])
from tests.integrations.test_trainings import EXACT, FRAMEWORKS, Spool
training, add, saves = FRAMEWORKS[sys.argv[2]](), Spool._add, []
def dies(*args, **options):
    if len(saves) > training.steps.index(training.at):
        os.kill(os.getpid(), signal.SIGKILL)
    saves.append(add(*args, **options))
    return saves[-1]
Spool._add = dies
training.train(sys.argv[3], sys.argv[4], **EXACT)
"""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_training_that_is_killed_loses_no_save(name, tmp_path):
    training, place = FRAMEWORKS[name](), tmp_path / "run.inshrink"
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "ignore", "-c", KILLED, root, name, str(place), str(tmp_path / "ours")]
    assert subprocess.run(command, capture_output=True, env=os.environ).returncode == -signal.SIGKILL
    # Nothing may be in the archive yet that tells how saves are stored.
    require_resumed(training, place, tmp_path / "ours", training.plain(tmp_path / "plain"), **EXACT)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_saves_that_cannot_be_archived_never_stop_a_training(name, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise StorageError("the disk is full")

    training = FRAMEWORKS[name]()
    monkeypatch.setattr(Spool, "_add", refuse)
    adapter, weights = training.train(tmp_path / "run.inshrink", tmp_path / "ours", **EXACT)
    assert same(weights, training.plain(tmp_path / "plain"))
    assert tuple(sorted(adapter.failures)) == training.steps
    with pytest.raises(StorageError, match="not in the archive"):
        adapter.close(strict=True)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_policy_prunes_when_the_training_ends(name, tmp_path):
    training, place = FRAMEWORKS[name](), tmp_path / "run.inshrink"
    adapter, weights = training.train(place, tmp_path / "ours", retention=Retention(keep_last=1), **EXACT)
    adapter.close(strict=True)
    archive = inshrink_core.open(place)
    assert archive.steps == training.steps[-1:]
    last = archive[archive.steps[0]].state_dict()
    assert all(any(torch.equal(value, other) for other in last.values()) for value in weights.values())
