"""A restore of what was lost alone: all else stays, and training goes on where it is."""

import pytest
import torch

from inshrink_core.errors import InputError, NotFoundError
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
