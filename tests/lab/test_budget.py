"""Saves under a budget: what changed most is saved, the rest stays, and whoever reads is told so."""

import json

import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.chain import WRITTEN, Archive
from inshrink_core.chain.meta import check_meta
from inshrink_core.cli import main
from inshrink_core.errors import DamagedError
from inshrink_core.training.saver import Saver
from inshrink_core.verbs.prune import prune
from inshrink_lab.budget import BudgetWriter

WIDTH, DEPTH = 24, 4


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.inshrink"


class Training:
    """Linear layers that move as far as they are told, and the moments of them."""

    def __init__(self, make=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        self.optimizer = make(self.model.parameters(), lr=1e-3)

    def move(self, *distances):
        """Move each layer, and the optimizer by a step."""
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for layer, distance in zip(self.model, distances, strict=True):
                layer.weight.add_(torch.randn(WIDTH, WIDTH), alpha=distance)
        return self.state()

    def state(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def moments(self, word):
        return [self.optimizer.state[layer.weight][word].clone() for layer in self.model]


def opened(path, training, share, **settings):
    """Return a saver that has saved twice, whole: a keyframe, and a first change."""
    writer = BudgetWriter(share)
    saver = Saver(path, training.model, training.optimizer, step_writer=writer, **settings)
    for step in (1, 2):
        training.move(0.1, 0.1, 0.1, 0.1)
        saver.save(step)
    return saver


def older(saver, step):
    """Return the step of each tensor that a save has left unchanged."""
    saver.flush()
    archive = Archive.open(saver.path)
    return archive.frame(archive.reader.find(step)).meta.get(WRITTEN, {})


@pytest.mark.parametrize(
    ("make", "word"), [(torch.optim.AdamW, "exp_avg"), (torch.optim.Adadelta, "acc_delta")]
)
def test_what_changed_most_is_saved_and_the_rest_stays_with_its_optimizer_state(path, make, word):
    training = Training(make)
    with opened(path, training, 0.6, codec="lossless") as saver:
        before, moments = training.state(), training.moments(word)
        after = training.move(0.1, 0.3, 0.0, 0.2)
        saver.save(3, {"seen": 3})
        content = saver.read(3)
        stored = content["model"]
        for name in ("1.weight", "3.weight"):
            assert torch.equal(stored[name], after[name])
        for name in ("0.weight", "2.weight"):
            assert torch.equal(stored[name], before[name])
        assert torch.equal(content["optimizer"]["state"][0][word], moments[0])
        assert torch.equal(content["optimizer"]["state"][1][word], training.moments(word)[1])
        assert (content["step"], content["extra"]["seen"]) == (3, 3)
        assert older(saver, 3) == {"0.weight": 2, "2.weight": 2}
        assert older(saver, 2) == {}


@pytest.mark.parametrize("codec", ["lattice", "inshrinkerator"])
def test_what_stays_keeps_its_bits_and_its_chain(path, codec):
    training = Training()
    with opened(path, training, 0.35, codec=codec) as saver:
        earlier = saver.read(2)
        training.move(0.0, 0.1, 0.0, 0.0)
        saver.save(3)
        training.move(0.1, 0.0, 0.0, 0.0)
        saver.save(4)
        last = saver.read(4)
        for i in (2, 3):
            assert torch.equal(last["model"][f"{i}.weight"], earlier["model"][f"{i}.weight"])
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                was, now = (content["optimizer"]["state"][i][moment] for content in (earlier, last))
                assert torch.equal(was, now)
        archive = Archive.open(path)
        _, complete, *some = archive.frames
        assert all(frame.nbytes < 0.8 * complete.nbytes for frame in some)
        assert archive.frame(some[-1]).meta[WRITTEN].keys() == {"1.weight", "2.weight", "3.weight"}
        # A delta upon what stayed is as small as one upon what did not.
        assert archive.frame(some[-1]).entry("0.weight").nbytes < 1.3 * (
            archive.frame(complete).entry("0.weight").nbytes
        )
        assert not inshrink_core.verify(path, deep=True).problems


def test_every_tensor_is_saved_within_its_age(path):
    training = Training()
    with opened(path, training, 0.5, codec="lossless") as saver:
        for step in range(3, 10):
            training.move(0.5, 0.0, 0.0, 0.0)
            saver.save(step)
        taken = [step - min(older(saver, step).values(), default=step) for step in range(3, 10)]
    assert max(taken) == 3
    assert all(min(taken[i : i + 4]) < 3 for i in range(4))


def test_the_first_two_saves_and_keyframes_are_whole(path):
    training = Training()
    with opened(path, training, 0.5, codec="lossless", keyframe_every=4) as saver:
        for step in range(3, 9):
            training.move(0.1, 0.2, 0.3, 0.4)
            saver.save(step)
        saver.flush()
        archive = Archive.open(path)
        complete = [WRITTEN not in archive.frame(info).meta for info in archive.frames]
        assert complete[:2] == [True, True]
        assert complete[2:] == [info.kind == "keyframe" for info in archive.frames[2:]]
        assert sum(complete) == 3


def test_inspect_tells_what_is_older(path, capsys):
    training = Training()
    with opened(path, training, 0.35, codec="lossless") as saver:
        training.move(0.0, 0.0, 0.0, 0.3)
        saver.save(3)
        assert saver.restore(partial=["0.weight"]) == 3
    left = dict.fromkeys(("0.weight", "1.weight", "2.weight"), 2)
    main(["inspect", str(path), "--json"])
    frames = json.loads(capsys.readouterr().out)["frames"]
    assert [frame.get("older") for frame in frames] == [None, None, left]
    main(["inspect", str(path)])
    assert "3 since step 2" in capsys.readouterr().out
    # What is left of an archive says it, too, and restores the same.
    before = Archive.open(path)[3].state_dict()
    prune(path, keep=[3], apply=True)
    archive = Archive.open(path)
    assert archive.frame(archive.last).meta[WRITTEN]["0.weight"] == 2
    assert all(torch.equal(value, before[name]) for name, value in archive[3].state_dict().items())


@pytest.mark.parametrize("written", [7, ["0.weight"], {"0.weight": "2"}, {"0.weight": True}])
def test_a_frame_that_says_no_steps_of_its_older_tensors_is_damaged(written):
    with pytest.raises(DamagedError, match="'written' is malformed"):
        check_meta({WRITTEN: written}, "here")
