"""The saver: what was saved is restored, whatever happens in between."""

import json
import shutil
import sys
import threading

import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.archive import ArchiveReader
from inshrink_core.chain import Archive, ChainWriter
from inshrink_core.errors import InputError, NotFoundError, StepConflictError
from inshrink_core.training.gradients import GradientAverage, finite
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import spool_folder
from tests.processes import ran
from tests.runs import adam, model, sgd, train
from tests.training.building import leave_in_the_spool


def begin(path, make_optimizer=adam, **options):
    network = model()
    optimizer = make_optimizer(network)
    options.setdefault("codec", "lossless")
    return network, optimizer, Saver(path, network, optimizer, **options)


def equal_states(entry, other):
    return all(torch.equal(entry[key], other[key]) for key in entry) and entry.keys() == other.keys()


def copy_of(network):
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def frames(path):
    return ArchiveReader.open(path).frames


# What is restored


@pytest.mark.parametrize("make_optimizer", [adam, sgd])
def test_lossless_restore_in_another_saver_continues_bit_for_bit(path, make_optimizer):
    network, optimizer, saver = begin(path, make_optimizer)
    with saver:
        train(network, optimizer, range(5))
        saver.save(5)
        expected = train(network, optimizer, range(5, 12))
    other, other_optimizer, saver = begin(path, make_optimizer)
    with saver:
        train(other, other_optimizer, range(100, 103))
        assert saver.restore() == 5
        assert train(other, other_optimizer, range(5, 12)) == expected
    assert equal_states(network.state_dict(), other.state_dict())


def test_restore_of_an_empty_archive_is_none_and_changes_nothing(path):
    network, _, saver = begin(path)
    before = copy_of(network)
    with saver:
        assert saver.restore() is None
    assert equal_states(before, network.state_dict())


def test_restore_waits_for_pending_saves_and_takes_the_step_asked_for(path):
    network, optimizer, saver = begin(path)
    with saver:
        states = {}
        for step in (1, 2, 3):
            train(network, optimizer, range(step, step + 1))
            states[step] = copy_of(network)
            saver.save(step, {"note": f"after {step}"})
        assert saver.restore(2) == 2
        assert equal_states(states[2], network.state_dict())
        assert saver.extra == {"note": "after 2"}
        assert saver.restore() == 3
        assert equal_states(saver.read(2)["model"], states[2])
        assert equal_states(states[3], network.state_dict())
        with pytest.raises(NotFoundError):
            saver.read(4)


def test_a_lossy_restore_loads_what_the_archive_decodes_and_the_optimizer_exactly_where_asked(path):
    config = {"bins": 8}
    network, optimizer, saver = begin(path, codec="inshrinkerator", config=config, optimizer_state="exact")
    with saver:
        train(network, optimizer, range(5))
        moments = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
        trained = copy_of(network)
        saver.save(5)
        saver.restore()
    decoded = Archive.open(path)[5].state_dict()
    assert equal_states(decoded, network.state_dict())
    assert not torch.equal(trained["4.weight"], network.state_dict()["4.weight"])
    for before, state in zip(moments, optimizer.state.values(), strict=True):
        assert torch.equal(before, state["exp_avg_sq"])


def test_bfloat16_and_tied_weights_are_restored_in_place(path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

    network = Tied().to(torch.bfloat16)
    with Saver(path, network, codec="lossless") as saver:
        saver.save(0)
        before, storage = network.embedding.weight.detach().clone(), network.embedding.weight
        nn.init.zeros_(network.embedding.weight)
        assert saver.restore() == 0
    assert network.head.weight is network.embedding.weight is storage
    assert network.head.weight.dtype is torch.bfloat16
    assert torch.equal(before, network.head.weight)


# Lineage


def test_a_save_after_a_restore_of_an_earlier_step_opens_a_branch(path):
    network, optimizer, saver = begin(path)
    with saver:
        for step in (1, 2, 3):
            train(network, optimizer, range(step, step + 1))
            saver.save(step)
        abandoned = copy_of(network)
        saver.restore(1)
        train(network, optimizer, range(50, 52))
        saver.save(3)
        train(network, optimizer, range(52, 53))
        saver.save(4)
    first, *_ = history = frames(path)
    assert [(frame.step, frame.branch) for frame in history] == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 1)]
    assert history[3].parent_id == first.frame_id
    assert history[4].parent_id == history[3].frame_id
    archive = Archive.open(path)
    restored = [archive.frame(frame).meta.get("restored") for frame in history]
    assert restored == [None] * 3 + [first.frame_id] * 2
    assert archive.steps == (1, 3, 4)
    assert equal_states(archive[4].state_dict(), network.state_dict())
    assert equal_states(archive.checkpoint(history[2]).state_dict(), abandoned)
    assert inshrink_core.verify(path, deep=True).ok


@pytest.mark.parametrize(("restored", "parent", "branch"), [((3,), 3, 0), ((1, 2), 2, 1), ((2, 3), 3, 0)])
def test_the_last_restore_before_a_save_decides_the_lineage(path, restored, parent, branch):
    network, optimizer, saver = begin(path)
    with saver:
        for step in (1, 2, 3):
            train(network, optimizer, range(step, step + 1))
            saver.save(step)
        for step in restored:
            saver.restore(step)
        train(network, optimizer, range(70, 71))
        saver.save(parent + 1)
    history = frames(path)
    assert (history[3].branch, history[3].parent_id) == (branch, history[parent - 1].frame_id)


@pytest.mark.parametrize("step", [0, 3, 5])
def test_a_step_that_is_not_after_the_last_is_refused(path, step):
    _, _, saver = begin(path)
    with saver:
        saver.save(5)
        with pytest.raises(StepConflictError, match="restore that step first"):
            saver.save(step)
    assert Archive.open(path).steps == (5,)


# Gradients


def test_record_keeps_the_published_average(path):
    network = nn.Linear(3, 2)
    average = GradientAverage(dict(network.named_parameters()))
    expected = None
    for seed in range(4):
        gradient = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        network.weight.grad = gradient.clone()
        average.record()
        expected = gradient if expected is None else 0.9 * gradient + 0.1 * expected
    taken = average.take()
    assert list(taken) == ["weight"]
    torch.testing.assert_close(taken["weight"], expected)
    assert average.take() == {}


def test_a_gradient_that_is_not_finite_is_not_recorded():
    network = nn.Linear(2, 1)
    network.weight.grad, network.bias.grad = torch.tensor([[1.0, float("inf")]]), torch.ones(1)
    average = GradientAverage(dict(network.named_parameters()))
    average.record()
    assert list(finite(average.take())) == ["bias"]


def test_codecs_can_read_recorded_gradients_of_every_model_and_the_archive_does_not_hold_them(
    path, monkeypatch
):
    seen = []
    original = ChainWriter.append

    def append(chain, checkpoint, **options):
        assert checkpoint.hyperparameters["D.4.weight"]["beta1"] == 0.9
        roles = ("gradient", "exp_avg")
        seen.extend(checkpoint[f"{name}4.weight@{role}"] for name in ("", "D.") for role in roles)
        return original(chain, checkpoint, **options)

    monkeypatch.setattr(ChainWriter, "append", append)
    critic = model()
    other = adam(critic)
    network, optimizer, saver = begin(path, optimizer_state="drop", also={"D": (critic, other)})
    with saver:
        train(network, optimizer, range(1))
        train(critic, other, range(1, 2))
        saver.record()
        saver.save(1)
    for net, state in ((network, optimizer), (critic, other)):
        gradient, moment = seen.pop(0), seen.pop(0)
        assert torch.equal(gradient, net[4].weight.grad)
        assert torch.equal(moment, state.state[net[4].weight]["exp_avg"])
    assert all("@" not in key for key in Archive.open(path)[1])


# Failures


NOT_CLOSED = """
import sys
import torch
from inshrink_core.training.saver import Saver
from tests.runs import model, train

network = model()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
saver = Saver(sys.argv[1], network, optimizer, codec="lossless")
for step in (1, 2, 3):
    train(network, optimizer, range(step, step + 1))
    saver.save(step)
print("saved", flush=True)
"""


def test_a_process_that_ends_without_close_archives_what_is_pending(path):
    done = ran(sys.executable, "-c", NOT_CLOSED, path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")
    assert Archive.open(path).steps == (1, 2, 3)
    assert not spool_folder(path).exists()


def test_half_a_save_is_removed(path):
    spool = spool_folder(path)
    (spool / ".00000003.tmp").mkdir(parents=True)
    (spool / ".00000003.tmp" / "step_000003.pt").write_bytes(b"half")
    with begin(path)[2] as saver:
        assert saver.last_step is None
    assert not spool.exists()


@pytest.mark.parametrize("damage", ["weights", "cut", "record", "empty"])
def test_a_damaged_save_in_the_spool_is_quarantined_others_are_archived(path, monkeypatch, caplog, damage):
    leave_in_the_spool(begin(path)[2], monkeypatch, 1, 2)
    folder = spool_folder(path) / "00000001"
    file = folder / "step_000001.pt"
    content = bytearray(file.read_bytes())
    if damage == "record":
        (folder / "save.json").write_text(
            json.dumps({"step": -1, "name": "step_000001.pt", "restored": None, "parent": None})
        )
    elif damage == "weights":
        at = content.index(model().state_dict()["4.weight"].numpy().tobytes())
        content[at + 9] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for _ in range(2):
        with begin(path)[2] as saver:
            assert saver.restore() == 2
            (aside,) = saver.quarantined
    assert aside.folder == spool_folder(path) / "00000001.quarantined"
    assert aside.step == (None if damage == "record" else 1)
    assert str(aside.folder) in aside.why
    assert "quarantined, others go on" in caplog.text
    assert "quarantined earlier" in caplog.text
    assert before.items() <= {file.name: file.read_bytes() for file in aside.folder.iterdir()}.items()
    shutil.rmtree(aside.folder)
    with begin(path)[2] as saver:
        assert saver.quarantined == ()
    assert not spool_folder(path).exists()


def test_a_quarantined_save_that_is_repaired_and_moved_back_is_archived(path, monkeypatch):
    leave_in_the_spool(begin(path)[2], monkeypatch, 1)
    file = spool_folder(path) / "00000001" / "step_000001.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    with begin(path)[2] as saver:
        (aside,) = saver.quarantined
    (aside.folder / file.name).write_bytes(content)
    aside.folder.rename(file.parent)
    with begin(path)[2] as saver:
        assert saver.restore() == 1
    assert not spool_folder(path).exists()


def test_a_third_save_waits_until_the_first_is_archived(path, monkeypatch):
    entered, release = threading.Event(), threading.Event()
    original = ChainWriter.append

    def append(chain, checkpoint, **options):
        entered.set()
        assert release.wait(60)
        return original(chain, checkpoint, **options)

    monkeypatch.setattr(ChainWriter, "append", append)
    _, _, saver = begin(path)
    with saver:
        saver.save(1)
        saver.save(2)
        assert entered.wait(60)
        third = threading.Thread(target=saver.save, args=(3,))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        release.set()
        third.join(60)
        assert not third.is_alive()
    assert Archive.open(path).steps == (1, 2, 3)


# Mistakes


def wide():
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8 * 36, 12))


def by_parameter(network):
    return torch.optim.AdamW([{"params": [parameter]} for parameter in network.parameters()])


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (wide, None, r"'4.weight' has another shape"),
        (lambda: nn.Linear(2, 2), None, "has no tensor 'weight'"),
        (nn.Flatten, None, "lacks: '0.weight'"),
        (model, by_parameter, "optimizer is not the one"),
    ],
)
def test_another_model_or_optimizer_is_refused_before_anything_is_touched(path, make, optimizer, message):
    network, trained, saver = begin(path)
    with saver:
        train(network, trained, range(1))
        saver.save(1)
    other = make()
    before = copy_of(other)
    made = None if optimizer is None else optimizer(other)
    with Saver(path, other, made) as saver, pytest.raises(InputError, match=message):
        saver.restore()
    assert equal_states(before, other.state_dict())


def test_a_closed_saver_says_so_and_closing_twice_is_harmless(path):
    saver = begin(path)[2]
    saver.close()
    saver.close()
    for call in (lambda: saver.save(1), saver.restore, saver.flush):
        with pytest.raises(InputError, match="closed"):
            call()


def test_a_step_of_another_program_is_refused(path):
    run = inshrink_core.sample("digits-cnn")
    inshrink_core.compress(run, path, steps=[10], optimizer="drop", codec="lossless")
    with begin(path, codec=None)[2] as saver, pytest.raises(InputError, match="not written by a saver"):
        saver.restore()


def test_a_spooled_step_of_the_wrong_type_is_refused(path):
    with begin(path)[2] as saver:
        for step in (-1, 1.0, True, "3"):
            with pytest.raises(InputError, match="whole number"):
                saver.save(step)
