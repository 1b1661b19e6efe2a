"""Training resumed from each way of storing optimizer state: what its loss does, and what is exact."""

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from inshrink_core import Saver
from inshrink_core.chain import Archive
from inshrink_core.chain.sizes import archive_size
from tests.runs import train

AT, LATER = 60, 25


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 160), nn.ReLU(), nn.Linear(160, 160), nn.Linear(160, 10))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


class Resumed(NamedTuple):
    """Losses after the restore, and the optimizers' states at the restore: saved, and restored."""

    losses: list[float]
    saved: dict[str, Any]
    restored: dict[str, Any]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return a function that trains and saves with exact weights, restores, and trains on; once for each."""

    @functools.cache
    def run(make, state):
        archive = tmp_path_factory.mktemp("resumed") / "run.inshrink"
        model, other = network(), network()
        optimizer, again = make(model), make(other)
        with Saver(archive, model, optimizer, codec="lossless", optimizer_state=state) as saver:
            for start in range(0, AT, 20):
                train(model, optimizer, range(start, start + 20))
                saver.save(start + 20)
        with Saver(archive, other, again) as saver:
            saver.restore()
        restored = copy.deepcopy(again.state_dict())
        return Resumed(train(other, again, range(AT, AT + LATER)), optimizer.state_dict(), restored)

    return run


def rise(item, other):
    """Return the mean difference of the losses over the same batches."""
    return (sum(item.losses) - sum(other.losses)) / LATER


@pytest.mark.parametrize(
    ("make", "state"), [(adam, "compressed"), *((sgd, state) for state in ("compressed", "compact"))]
)
def test_the_loss_after_a_restore_is_within_three_thousandths(resumed, make, state):
    exact = resumed(make, "exact")
    assert abs(rise(resumed(make, state), exact)) < 0.003 * sum(exact.losses) / LATER


def test_a_momentum_buffer_is_worth_its_bytes(resumed):
    exact, fresh = resumed(sgd, "exact"), rise(resumed(sgd, "drop"), resumed(sgd, "exact"))
    assert all(abs(rise(resumed(sgd, state), exact)) < fresh / 5 for state in ("compressed", "compact"))


@pytest.mark.parametrize("state", ["compressed", "compact"])
def test_steps_and_hyperparameters_are_exact_and_no_second_moment_becomes_zero(resumed, state):
    found = resumed(adam, state)
    assert found.restored["param_groups"] == found.saved["param_groups"]
    for before, after in zip(found.saved["state"].values(), found.restored["state"].values(), strict=True):
        assert torch.equal(before["step"], after["step"])
        assert bool((after["exp_avg_sq"][before["exp_avg_sq"] > 0] > 0).all())
        assert bool((after["exp_avg_sq"][after["exp_avg"] != 0] > 0).all())


@pytest.mark.parametrize(("state", "times"), [("compressed", 4), ("compact", 4)])
def test_the_first_step_after_a_restore_is_at_most_a_few_times_the_longest_without(resumed, state, times):
    found = resumed(adam, state)
    for before, after in zip(found.saved["state"].values(), found.restored["state"].values(), strict=True):
        assert longest(after) <= times * longest(before)


def longest(state):
    """Return the largest update of a parameter, in learning rates."""
    return float((state["exp_avg"] / state["exp_avg_sq"].sqrt().clamp_min(1e-12)).abs().max())


def centred(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-3, centered=True)


@pytest.mark.parametrize(
    ("make", "exact", "least"),
    [
        (torch.optim.RMSprop, (), 8.0),
        (centred, ("square_avg", "grad_avg"), 1.5),
        (torch.optim.Adagrad, (), 8.0),
        (torch.optim.Adadelta, ("acc_delta",), 2.0),
        (torch.optim.Adamax, ("exp_inf",), 1.5),
        (torch.optim.Adafactor, ("row_var", "col_var", "variance"), 4.0),
        (lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]), (), 6.0),
    ],
)
def test_any_optimizer_is_stored_smaller_and_trains_on(make, exact, least, tmp_path):
    """State of no known kind is exact; none stays outside of what is compressed."""
    model, other = network(), network()
    optimizer, again = make(model.parameters()), make(other.parameters())
    with Saver(tmp_path / "run.inshrink", model, optimizer) as saver:
        for start in range(0, AT, 20):
            train(model, optimizer, range(start, start + 20))
            saver.save(start + 20)
    size = archive_size(Archive.open(tmp_path / "run.inshrink"))
    assert size.ratio_total is not None
    assert size.ratio_total > least
    with Saver(tmp_path / "run.inshrink", other, again) as saver:
        saver.restore()
    saved, restored = optimizer.state_dict()["state"], again.state_dict()["state"]
    for number, state in saved.items():
        assert state.keys() == restored[number].keys()
        assert all(torch.equal(state[word], restored[number][word]) for word in exact if word in state)
    assert all(torch.isfinite(torch.tensor(train(other, again, range(AT, AT + LATER)))))


def test_second_moments_go_where_gradients_take_them_though_every_save_is_restored(tmp_path):
    """Were octaves held, they would be back at the archive's after each restore."""
    model = nn.Linear(64, 48)
    goal = 1e-6 * torch.exp2(torch.randn(48, 64, generator=torch.Generator().manual_seed(1)))
    optimizer = adam(model)
    model(torch.ones(1, 64)).square().sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"].fill_(1e-6)
    for step in range(1, 10):
        with Saver(tmp_path / "run.inshrink", model, optimizer) as saver:
            if step > 1:
                saver.restore()
            second = optimizer.state[model.weight]["exp_avg_sq"]
            second.mul_(0.6).add_(goal, alpha=0.4)
            saver.save(step)
    behind, level = (goal / second).log2(), (goal / 1e-6).log2()
    assert abs(float((behind * level).sum() / level.square().sum())) < 0.1
