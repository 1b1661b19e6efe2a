"""Hugging Face's Trainer with the real library: what is archived, and that a resumed training is the same."""

import os
import signal
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.chain.meta import QUALITY
from inshrink_core.errors import InputError, LockedError, StepConflictError
from inshrink_core.training import Saver
from tests.guides import blocks
from tests.integrations.dcp_ranks import same

pytest.importorskip("transformers", reason="needs the extra 'hf': make test-integrations")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from inshrink_core.integrations.huggingface import InshrinkCallback, restore_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

EXACT = {"codec": "lossless", "optimizer_state": "exact"}


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes))


def data():
    rows = []
    for seed in range(32):
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(seed))
        rows.append({"input_ids": tokens, "labels": tokens})
    return rows


def trainer(folder, callbacks, *, steps=6, net=None, **options):
    options = {"save_steps": 2, "save_total_limit": 1, "report_to": [], "disable_tqdm": True} | options
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, use_cpu=True, **options
    )
    return Trainer(
        net or model(), arguments, train_dataset=data(), eval_dataset=data()[:8], callbacks=callbacks
    )


def weights(of):
    return {name: value.clone() for name, value in of.model.state_dict().items()}


def test_what_a_signal_made_the_trainer_save_is_archived(tmp_path):
    class Ending(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    callback = InshrinkCallback(tmp_path / "run.inshrink", **EXACT)
    options = {"save_strategy": "no", "enable_jit_checkpoint": True}
    before = signal.getsignal(signal.SIGTERM)
    try:
        training = trainer(tmp_path / "one", [callback, Ending()], steps=100_000, **options)
        training.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    (folder,) = (tmp_path / "one").glob("checkpoint-*")
    callback.close(strict=True)
    (step,) = inshrink_core.open(tmp_path / "run.inshrink").steps
    assert folder.name == f"checkpoint-{step}"


def checked_run(folder, callback, net):
    """Train with an evaluation before each save, and return what the frames say of their quality."""
    training = trainer(folder, [callback], net=net, eval_strategy="steps", eval_steps=2)
    training.train()
    callback.close(strict=True)
    archive = Archive.open(callback.path)
    return [archive.frame(info).meta.get(QUALITY) for info in archive.frames]


def test_saves_are_checked_by_the_batch_that_the_trainer_evaluates_on(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes))
    callback = InshrinkCallback(tmp_path / "run.inshrink", max_restore_cost=0.01)
    shown = checked_run(tmp_path / "run", callback, tied)
    assert [one["bounds"] for one in shown] == [{"restore_cost": 0.01}] * 3
    assert all(0 < one["restore_cost"] <= 0.01 for one in shown)


def test_a_check_of_ones_own_begins_with_the_first_save(tmp_path):
    batch = torch.stack([row["input_ids"] for row in data()])
    check = {"check": lambda net: net(input_ids=batch, labels=batch).loss}
    shown = checked_run(tmp_path / "run", InshrinkCallback(tmp_path / "a.inshrink", **check), model())
    assert all(one["restore_cost"] <= 0.003 for one in shown)


def test_a_check_that_is_of_no_use_never_stops_the_training(tmp_path, caplog):
    callback = InshrinkCallback(tmp_path / "a.inshrink", check=lambda net: "a text")
    assert checked_run(tmp_path / "run", callback, model()) == [None] * 3
    assert "saves are not checked" in caplog.text


def test_misuse_is_refused_before_training_begins(tmp_path):
    archive = tmp_path / "run.inshrink"
    with pytest.raises(InputError):
        InshrinkCallback(archive, codec="no such codec")
    assert restore_checkpoint(archive, tmp_path / "one") is None
    with Saver(archive, **EXACT), pytest.raises(LockedError):
        InshrinkCallback(archive, **EXACT)
    trainer(tmp_path / "one", [InshrinkCallback(archive, **EXACT)], steps=2).train()
    with pytest.raises(StepConflictError):
        trainer(tmp_path / "two", [InshrinkCallback(archive)], steps=2).train()


def archive_and_resume(folder):
    """What both ranks do."""
    folder, options = Path(folder), {"steps": 4, "ddp_backend": "gloo"}
    callback = InshrinkCallback(folder / "run.inshrink", **EXACT)
    training = trainer(folder / "one", [callback], **options)
    training.train()
    callback.close(strict=True)
    torch.distributed.barrier()
    resumed = trainer(folder / "two", [InshrinkCallback(folder / "run.inshrink")], **options)
    resumed.train(resume_from_checkpoint=restore_checkpoint(folder / "run.inshrink", folder / "two", 2))
    assert same(weights(training), weights(resumed))


@pytest.mark.timeout(600)
def test_two_ranks_archive_the_files_of_both(tmp_path, on_two_ranks):
    on_two_ranks("tests.integrations.test_huggingface:archive_and_resume", tmp_path)
    archive = inshrink_core.open(tmp_path / "run.inshrink")
    assert archive.steps == (2, 4)
    present = {file.path for file in archive.checkpoint(archive.last).files}
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} <= present


def test_the_program_of_the_page_runs_twice_and_goes_on(tmp_path, monkeypatch):
    program = blocks("huggingface", "python", "integrations")[0]
    monkeypatch.chdir(tmp_path)
    for steps in (4, 6):
        arguments = TrainingArguments(
            output_dir="out", max_steps=steps, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        names = {"model": model(), "arguments": arguments, "dataset": data()}
        exec(program, names)
    assert inshrink_core.open(tmp_path / "run.inshrink").steps == (2, 4, 6)
