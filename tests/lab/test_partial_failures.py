"""Partial failures: what a restore of the lost tensors alone costs, in steps."""

import copy
from types import SimpleNamespace

import pytest

import inshrink_lab
from inshrink_lab import losing


def test_failures_strike_between_saves_and_are_counted_in_steps(task, tmp_path):
    found = inshrink_lab.rehearse(task, tmp_path, lose=0.25, codec="lossless", restores=2, seeds=2)
    assert len(found.failures) == 4
    for failure in found.failures:
        assert failure.saved_at < failure.failed_at <= failure.saved_at + 2
        assert failure.whole == failure.failed_at - failure.saved_at
        assert len(failure.lost) == 2  # a quarter of six tensors, rounded
        assert 0 < failure.share < 1
        assert failure.partial <= 2 * failure.whole + 1
        assert failure.reached or failure.partial > 0
    assert found.fewer == pytest.approx(1 - found.partial / found.whole)
    assert found.to_json()["failures"][0]["lost"] == list(found.failures[0].lost)
    again = inshrink_lab.rehearse(task, tmp_path, lose=0.25, codec="lossless", restores=2, seeds=2)
    assert again == found
    assert not list(tmp_path.iterdir())


def test_nothing_is_lost_where_the_save_holds_what_the_training_has(task, tmp_path, monkeypatch):
    """Were a tensor restored as it was when it was lost, momentum and all, the training would not notice."""

    def load_nothing_older(state, content, names):
        state.models[""].load_state_dict(live[-1])

    live = []

    def remembering(training):
        live.append({name: value.clone() for name, value in training.model.state_dict().items()})
        return copy.deepcopy(training)

    monkeypatch.setattr(losing, "copy", SimpleNamespace(deepcopy=remembering))
    monkeypatch.setattr(losing.TrainingState, "load_lost", load_nothing_older)
    monkeypatch.setattr(losing, "perturb", lambda model, generator: None)
    found = inshrink_lab.rehearse(task, tmp_path, lose=0.25, codec="lossless", restores=2, seeds=1)
    assert [(failure.partial, failure.chance) for failure in found.failures] == [(0, 0), (0, 0)]
    assert found.fewer_beyond_chance == found.fewer == 1


def test_under_a_budget_saves_are_smaller_and_as_many_times_as_often(task, tmp_path, monkeypatch):
    saves = []

    class Counting(losing.Archive):
        @classmethod
        def open(cls, path):
            archive = super().open(path)
            saves.append([(frame.step, frame.nbytes) for frame in archive.frames])
            return archive

    monkeypatch.setattr(losing, "Archive", Counting)
    settings = {
        "lose": 0.25,
        "codec": "lossless",
        "optimizer": "drop",
        "restores": 2,
        "seeds": 1,
        "steps": 24,
    }
    whole = inshrink_lab.rehearse(task, tmp_path, **settings)
    every = saves[-1]
    found = inshrink_lab.rehearse(task, tmp_path, **settings, budget=0.5)
    assert len(saves[-1]) == 2 * len(every)
    assert min(nbytes for _, nbytes in saves[-1]) < 0.8 * min(nbytes for _, nbytes in every)
    assert found.budget == 0.5
    assert [item.failed_at for item in found.failures] == [item.failed_at for item in whole.failures]
    assert found.whole == whole.whole
