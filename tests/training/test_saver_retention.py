"""Savers apply a policy as saves arrive: what stays keeps every bit, and training goes on from it."""

import copy
import json
import logging
from unittest.mock import Mock

import pytest
import torch

from inshrink_core import Saver, verify
from inshrink_core.chain import Archive
from inshrink_core.errors import InputError
from inshrink_core.training import Retention
from inshrink_core.training.archiver import RETAIN_EVERY
from inshrink_core.verbs import prune
from tests.runs import model, train
from tests.verbs.test_retention import steps_with_state

N_SAVES = 2 * RETAIN_EVERY + 3


def trained(path, n_saves=N_SAVES, **options):
    """Train with a saver, going on where its archive ends; return the weights of every save."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    weights = {}
    with Saver(path, network, optimizer, codec="lossless", optimizer_state="exact", **options) as saver:  # type: ignore[arg-type]
        begun = saver.restore() or 0
        for step in range(begun + 1, begun + n_saves + 1):
            loss = train(network, optimizer, range(step, step + 1))[0]
            saver.save(step, {"loss": loss, "metrics": {"score": -abs(step - 5)}, "seed": step})
            weights[step] = copy.deepcopy(network.state_dict())
    return weights


def test_a_saver_keeps_what_its_policy_says_and_every_bit_of_it(tmp_path):
    path = tmp_path / "a.inshrink"
    policy = Retention(keep_last=3, keep_every=8, keep_best="score:1:higher", optimizer_last=2)
    weights = trained(path, retention=policy)
    archive = Archive.open(path)
    assert archive.steps == (5, 8, 16, 17, 18, 19)
    assert steps_with_state(path) == [18, 19]
    for step in archive.steps:
        found = archive[step].state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights[step].items())
    assert verify(path, deep=True).ok
    more = trained(path, n_saves=2, retention=policy)
    assert Archive.open(path).steps == (5, 8, 16, 19, 20, 21)
    assert torch.equal(Archive.open(path)[21].state_dict()["0.weight"], more[21]["0.weight"])


def test_a_training_with_a_policy_goes_on_bit_for_bit(tmp_path):
    full = trained(tmp_path / "whole.inshrink", n_saves=12)
    policy = Retention(keep_last=1, optimizer_last=1)
    trained(tmp_path / "a.inshrink", n_saves=9, retention=policy)
    again = trained(tmp_path / "a.inshrink", n_saves=3, retention=policy)
    assert all(torch.equal(again[12][name], value) for name, value in full[12].items())


def test_a_step_without_state_gives_model_and_extra_and_says_so(tmp_path, caplog):
    path = tmp_path / "a.inshrink"
    weights = trained(path, n_saves=4, retention=Retention(optimizer_last=1))
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    train(network, optimizer, range(2))
    with Saver(path, network, optimizer) as saver, caplog.at_level(logging.WARNING):
        assert saver.restore(2) == 2
        assert saver.extra["seed"] == 2
        assert not optimizer.state
    assert "the optimizer's state of step 2 was pruned" in caplog.text
    assert all(torch.equal(network.state_dict()[name], value) for name, value in weights[2].items())


def test_a_save_of_one_file_whose_state_was_pruned_says_what_is_left(tmp_path):
    path = tmp_path / "a.inshrink"
    trained(path, n_saves=3)
    prune(path, optimizer_last=1, apply=True)
    network = model()
    with (
        Saver(path, network, torch.optim.AdamW(network.parameters())) as saver,
        pytest.raises(InputError, match="was pruned, and with it the file") as refused,
    ):
        saver.restore(2)
    assert "load_state_dict" in refused.value.remedy


def test_an_archive_that_cannot_be_pruned_loses_no_save(tmp_path, monkeypatch, caplog):
    refuse = Mock(side_effect=OSError("full"))
    monkeypatch.setattr("inshrink_core.archive.maintenance.Rewrite.switch", refuse)
    trained(tmp_path / "a.inshrink", n_saves=9, retention=Retention(keep_last=1))
    assert Archive.open(tmp_path / "a.inshrink").steps == tuple(range(1, 10))
    assert "is not pruned, and saves go on" in caplog.text


def test_folders_of_a_trainer_are_kept_by_its_own_log(tmp_path):
    network = model()
    policy = Retention(keep_best=["eval_loss:1", "f1:1"], keep_last=1)
    history = []
    with Saver(tmp_path / "a.inshrink", retention=policy) as saver:
        for step in range(1, 6):
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            torch.save(network.state_dict(), folder / "pytorch_model.bin")
            history.append({"step": step, "eval_loss": abs(step - 2.2)})
            (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
            saver.save_folder(folder, step, metrics={"f1": torch.tensor(float(step == 4)), "other": "?"})
    assert saver.failures == {}
    assert Archive.open(tmp_path / "a.inshrink").steps == (2, 4, 5)
