"""A restore of what was lost alone: all else stays; and what restored folders are called."""

import pytest
import torch
from safetensors.torch import save_file

import inshrink_core
from inshrink_core.errors import InputError, NotFoundError, UnsafePathError
from inshrink_core.training.saver import Saver
from tests.runs import adam, model, sgd, train


@pytest.mark.parametrize(
    ("make", "moments"), [(adam, ("exp_avg", "exp_avg_sq")), (sgd, ("momentum_buffer",))]
)
def test_lost_tensors_come_back_with_their_moments_and_the_others_stay(tmp_path, make, moments):
    network = model()
    optimizer = make(network)
    with Saver(
        tmp_path / "run.inshrink", network, optimizer, codec="lossless", optimizer_state="exact"
    ) as saver:
        train(network, optimizer, range(3))
        saver.save(3)
        saved = {name: value.clone() for name, value in network.state_dict().items()}
        lost, parameter = next(iter(network.named_parameters()))
        gathered = {moment: optimizer.state[parameter][moment].clone() for moment in moments}
        train(network, optimizer, range(2))
        live = {name: value.clone() for name, value in network.state_dict().items()}
        others = {
            other: optimizer.state[other][moments[0]].clone() for other in list(network.parameters())[1:]
        }
        with torch.no_grad():
            parameter.fill_(torch.nan)
        assert saver.restore(partial=[lost]) == 3
        after = network.state_dict()
        assert torch.equal(after[lost], saved[lost])
        assert all(torch.equal(after[name], live[name]) for name in live if name != lost)
        assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in gathered.items())
        assert all(torch.equal(optimizer.state[other][moments[0]], value) for other, value in others.items())
        train(network, optimizer, range(1))
        saver.save(6)
        assert saver.restore() == 6


@pytest.mark.parametrize(("names", "what"), [(["0.weight", "nowhere"], "nowhere"), ([], "no tensor")])
def test_names_that_are_none_change_nothing(tmp_path, names, what):
    network = model()
    optimizer = adam(network)
    with Saver(tmp_path / "run.inshrink", network, optimizer) as saver:
        train(network, optimizer, range(1))
        saver.save(1)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        with pytest.raises(InputError, match=what):
            saver.restore(partial=names)
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_save_is_read_without_loading_it(tmp_path):
    network = model()
    optimizer = adam(network)
    with Saver(tmp_path / "run.inshrink", network, optimizer, codec="lossless") as saver:
        train(network, optimizer, range(1))
        saver.save(1, {"seen": 7})
        content = saver.read(1)
        assert (content["step"], content["extra"]["seen"]) == (1, 7)
        assert content["model"].keys() == network.state_dict().keys()
        with pytest.raises(NotFoundError):
            saver.read(2)


def _write_folders(root, names):
    for at, name in enumerate(names):
        (root / name).mkdir(parents=True)
        save_file({"fc.weight": torch.full((4, 4), float(at))}, root / name / "model.safetensors")
        (root / name / "config.json").write_text("{}")
    return root


@pytest.mark.parametrize(
    "names",
    [
        ["Feb01_00-10-00", "Feb01_13-45-58", "Mar02_00-00-07"],
        ["epoch_1", "epoch_2"],
        ["checkpoint-10", "checkpoint-20"],
        ["iter_0000010", "iter_0000020"],
    ],
)
def test_restored_folders_bear_their_names_and_are_the_same_run(tmp_path, names):
    run = inshrink_core.open(_write_folders(tmp_path / "run", names))
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", every=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    again = inshrink_core.open(tmp_path / "out")
    assert again.steps == run.steps
    for step in run.steps:
        assert again.path_of(step).name == run.path_of(step).name
        assert torch.equal(again[step]["fc.weight"], run[step]["fc.weight"])


def test_folders_of_one_name_are_restored_by_their_steps(tmp_path):
    names = ["version_0/step_10", "version_1/step_10"]
    inshrink_core.compress(_write_folders(tmp_path / "run", names), tmp_path / "a.inshrink", codec="lossless")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", every=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_no_folder_is_written_through_a_link(tmp_path):
    run = _write_folders(tmp_path / "run", ["epoch_1", "epoch_2"])
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless")
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "epoch_2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", every=True)
    assert not list((tmp_path / "elsewhere").iterdir())
