"""Trainings with the real libraries that save into a bucket, and go on from there on another machine."""

import uuid

import pytest
import torch

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
pytest.importorskip("moto", reason="moto[server] is not installed")

import inshrink_core.archive
from inshrink_core import verbs
from inshrink_core.archive.storage import uploads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("waiting"),
    pytest.mark.filterwarnings("ignore"),
]

EXACT = {"codec": "lossless", "optimizer_state": "exact"}


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Call it to be on another machine, which has nothing of what was written."""
    return lambda: monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / uuid.uuid4().hex))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_hugging_faces_trainer_resumes_from_a_bucket_bit_for_bit(url, elsewhere, tmp_path):
    huggingface = pytest.importorskip("tests.integrations.test_huggingface")
    uninterrupted = huggingface.trainer(tmp_path / "plain", [])
    uninterrupted.train()
    callback = huggingface.InshrinkCallback(url, **EXACT)
    huggingface.trainer(tmp_path / "first", [callback]).train()
    callback.close(strict=True)
    assert inshrink_core.open(url).steps == (2, 4, 6)
    elsewhere()
    folder = huggingface.restore_checkpoint(url, tmp_path / "second", 4)
    callback = huggingface.InshrinkCallback(url)
    second = huggingface.trainer(tmp_path / "second", [callback])
    second.train(resume_from_checkpoint=folder)
    callback.close(strict=True)
    assert same(huggingface.weights(uninterrupted), huggingface.weights(second))
    again = inshrink_core.open(url).reader.frames[-1]
    assert (again.step, again.branch) == (6, 1)
    assert verbs.verify(url, deep=True).problems == ()


def test_lightning_resumes_from_a_bucket_bit_for_bit(url, elsewhere, tmp_path):
    lightning = pytest.importorskip("tests.integrations.test_lightning")
    uninterrupted = lightning.fit(tmp_path / "plain", [], 4)
    first = lightning.InshrinkCheckpointIO(url, **EXACT)
    lightning.fit(tmp_path / "ours", [first], 2)
    first.close(strict=True)
    assert inshrink_core.open(url).steps == (4, 8)
    elsewhere()
    second = lightning.InshrinkCheckpointIO(url)
    resumed = lightning.fit(tmp_path / "ours", [second], 4, resume="last")
    second.close(strict=True)
    assert same(uninterrupted, resumed)
    assert inshrink_core.open(url).steps == (4, 8, 12, 16)


def test_accelerate_resumes_from_a_bucket_bit_for_bit(url, elsewhere):
    used = pytest.importorskip("tests.integrations.test_accelerate")
    accelerator, model, optimizer = used.prepared()
    with used.AcceleratorSaver(accelerator, url, **EXACT) as saver:
        used.train(accelerator, model, optimizer, 3)
        saver.save_state(3)
        uninterrupted = used.train(accelerator, model, optimizer, 3)
        saver.close(strict=True)
    elsewhere()
    accelerator, model, optimizer = used.prepared()
    with used.AcceleratorSaver(accelerator, url) as saver:
        assert saver.load_state(3) == 3
        assert same(used.train(accelerator, model, optimizer, 3), uninterrupted)
        saver.save_state(6)
        saver.close(strict=True)
    assert inshrink_core.open(url).steps == (3, 6)


def test_the_saver_of_a_plain_loop_resumes_from_a_bucket_bit_for_bit(url, elsewhere):
    def begun():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    model, optimizer = begun()
    with inshrink_core.Saver(url, model, optimizer, **EXACT) as saver:
        train(model, optimizer, range(5))
        saver.save(5)
        saver.flush(remote=True)
        uninterrupted = train(model, optimizer, range(5, 10))
    elsewhere()
    model, optimizer = begun()
    with inshrink_core.Saver(url, model, optimizer, **EXACT) as saver:
        assert saver.restore() == 5
        assert same(train(model, optimizer, range(5, 10)), uninterrupted)
