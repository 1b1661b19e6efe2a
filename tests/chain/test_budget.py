"""Saves under a budget: what changed most is saved, the rest stays, and whoever reads is told so."""

import json

import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.chain import WRITTEN, Archive, Budget, changed_nbytes
from inshrink_core.chain.meta import check_meta
from inshrink_core.cli import main
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import Spool
from inshrink_core.verbs.prune import prune

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


def opened(path, training, **settings):
    """Return a saver that has saved twice, whole: a keyframe, and a first change."""
    saver = Saver(path, training.model, training.optimizer, **settings)
    for step in (1, 2):
        training.move(0.1, 0.1, 0.1, 0.1)
        saver.save(step)
    return saver


def a_layer(saver):
    """Return what the largest layer's last change took."""
    saver.flush()
    archive = Archive.open(saver.path)
    return max(changed_nbytes(archive, archive.last).values())


@pytest.mark.parametrize(
    ("make", "word"), [(torch.optim.AdamW, "exp_avg"), (torch.optim.Adadelta, "acc_delta")]
)
def test_what_changed_most_is_saved_and_the_rest_stays_with_its_optimizer_state(path, make, word):
    training = Training(make)
    with opened(path, training, codec="lossless") as saver:
        before, moments = training.state(), training.moments(word)
        after = training.move(0.1, 0.3, 0.0, 0.2)
        saver.save(3, {"seen": 3}, budget=int(2.5 * a_layer(saver)))
        content = saver.read(3)
        stored = content["model"]
        for name in ("1.weight", "3.weight"):
            assert torch.equal(stored[name], after[name])
        for name in ("0.weight", "2.weight"):
            assert torch.equal(stored[name], before[name])
        assert torch.equal(content["optimizer"]["state"][0][word], moments[0])
        assert torch.equal(content["optimizer"]["state"][1][word], training.moments(word)[1])
        assert (content["step"], content["extra"]["seen"]) == (3, 3)
        assert saver.restore() == 3
        assert saver.older == {"0.weight": 2, "2.weight": 2}
        assert saver.restore(2) == 2
        assert saver.older == {}


@pytest.mark.parametrize("codec", ["lattice", "inshrinkerator"])
def test_what_stays_keeps_its_bits_and_its_chain(path, codec):
    training = Training()
    with opened(path, training, codec=codec) as saver:
        earlier = saver.read(2)
        budget = int(1.5 * a_layer(saver))
        training.move(0.0, 0.1, 0.0, 0.0)
        saver.save(3, budget=budget)
        training.move(0.1, 0.0, 0.0, 0.0)
        saver.save(4, budget=budget)
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
    taken = []
    with opened(path, training, codec="lossless") as saver:
        budget = int(1.5 * a_layer(saver))
        for step in range(3, 10):
            training.move(0.5, 0.0, 0.0, 0.0)
            saver.save(step, budget=budget, max_age=4)
        saver.flush()
        archive = Archive.open(path)
        for info in archive.frames[2:]:
            older = archive.frame(info).meta.get(WRITTEN, {})
            taken.append(info.step - min(older.values(), default=info.step))
    assert max(taken) == 3
    assert all(min(taken[i : i + 4]) < 3 for i in range(4))


def test_the_first_two_saves_and_keyframes_are_whole(path):
    training = Training()
    with Saver(path, training.model, training.optimizer, codec="lossless", keyframe_every=4) as saver:
        for step in range(1, 9):
            training.move(0.1, 0.2, 0.3, 0.4)
            saver.save(step, budget=8000)
        saver.flush()
        archive = Archive.open(path)
        complete = [WRITTEN not in archive.frame(info).meta for info in archive.frames]
        assert complete[:2] == [True, True]
        assert complete[2:] == [info.kind == "keyframe" for info in archive.frames[2:]]
        assert sum(complete) == 3


@pytest.mark.parametrize("given", [{"budget": 0}, {"budget": 2.5}, {"budget": 9999, "max_age": 0}])
def test_a_budget_that_is_none_is_refused(path, given):
    training = Training()
    with Saver(path, training.model, training.optimizer) as saver:
        with pytest.raises(InputError):
            saver.save(1, **given)
        saver.save(1)


def test_a_budget_below_the_largest_tensor_is_refused_at_first_and_not_later(path):
    training = Training()
    with opened(path, training, codec="lossless") as saver:
        largest = a_layer(saver)
        training.move(0.1, 0.1, 0.1, 0.1)
        with pytest.raises(InputError, match=r"budget is below what the last change of '\d.weight'"):
            saver.save(3, budget=largest // 2)
        saver.save(3, budget=largest)
        saver.save(4, budget=largest)
        assert saver.read(4)["step"] == 4


def test_a_save_that_the_process_left_in_the_spool_keeps_its_budget(tmp_path):
    spool = Spool(tmp_path / "spool")
    save = spool.put(3, {"checkpoint": {"model": {"w": torch.ones(3)}, "step": 3}}, budget=Budget(7, 2))
    assert Spool(spool.folder).recover() == [save]
    record = save.folder / "save.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"budget": {"nbytes": 0, "max_age": 2}}))
    again = Spool(spool.folder)
    assert again.recover() == []
    assert len(again.quarantined_saves) == 1


@pytest.mark.parametrize(("bound", "is_whole"), [(1e6, False), (1e-3, True)])
def test_with_a_check_what_is_restored_keeps_the_bound_or_the_save_is_whole(path, bound, is_whole):
    inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    training = Training()

    def check(model):
        return nn.functional.cross_entropy(model(inputs), torch.arange(64) % WIDTH)

    with opened(path, training, check=check, max_restore_cost=bound) as saver:
        training.move(0.1, 0.1, 0.1, 0.1)
        saver.save(3, budget=int(1.5 * a_layer(saver)))
        saver.restore()
        assert (saver.older == {}) is is_whole
        assert not saver.failures
        assert Archive.open(path).frame(Archive.open(path).last).meta["quality"]["restore_cost"] <= bound


def test_a_partial_restore_and_inspect_tell_what_is_older(path, capsys):
    training = Training()
    with opened(path, training, codec="lossless") as saver:
        training.move(0.0, 0.0, 0.0, 0.3)
        saver.save(3, budget=int(1.5 * a_layer(saver)))
        assert saver.restore(partial=["0.weight"]) == 3
        older = dict.fromkeys(("0.weight", "1.weight", "2.weight"), 2)
        assert saver.older == older
    main(["inspect", str(path), "--json"])
    frames = json.loads(capsys.readouterr().out)["frames"]
    assert [frame.get("older") for frame in frames] == [None, None, older]
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
