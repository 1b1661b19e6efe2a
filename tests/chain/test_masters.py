"""Master weights beside weights of half precision: stored as the weights are, or exactly."""

import pytest
import torch
from torch import nn

import inshrink_core
from inshrink_core.chain.sizes import frame_size
from inshrink_core.checkpoint import TensorRole
from tests.runs import batch

STEPS = (5, 10, 15, 20)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 120), nn.ReLU(), nn.Linear(120, 120), nn.Linear(120, 10))


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    """Train in float32, and save bfloat16 copies, masters and moments, as mixed precision does."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    folder.mkdir()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, STEPS[-1] + 1):
        inputs, targets = batch(step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in STEPS:
            state = optimizer.state_dict()
            for number, parameter in enumerate(model.parameters()):
                state["state"][number]["master_param"] = parameter.detach().clone()
            weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
            content = {"model": weights, "optimizer": state, "step": step}
            torch.save(content, folder / f"step_{step:02d}.pt")
    return folder


def archived(run_path, folder, **options):
    """Compress, and return the archive and the content of its last step's file."""
    inshrink_core.compress(run_path, folder / "run.inshrink", threads=1, **options)
    restored = inshrink_core.restore(folder / "run.inshrink", folder / "out", steps=[STEPS[-1]])
    return inshrink_core.Archive.open(folder / "run.inshrink"), torch.load(restored.paths[0])


def codecs_of(archive, role):
    """Return the bitstreams of all tensors of a role that are large enough to have one of their own."""
    sizes = [frame_size(archive, info) for info in archive.frames]
    tensors = [tensor for size in sizes for tensor in size.tensors]
    return {tensor.codec for tensor in tensors if tensor.spec.role is role and tensor.spec.numel > 200}


def test_master_weights_are_on_a_lattice_as_the_weights_are_that_stay_their_copies(run_path, tmp_path):
    archive, restored = archived(run_path, tmp_path, codec="lattice", optimizer="compressed")
    original = torch.load(run_path / f"step_{STEPS[-1]}.pt")
    assert codecs_of(archive, TensorRole.MASTER) == {"lattice/1"} == codecs_of(archive, TensorRole.WEIGHT)
    before = torch.load(run_path / f"step_{STEPS[-2]}.pt")
    for number, state in original["optimizer"]["state"].items():
        found = restored["optimizer"]["state"][number]
        master, restored_master = state["master_param"], found["master_param"]
        moved = (master - before["optimizer"]["state"][number]["master_param"]).square().mean().sqrt()
        assert restored_master.dtype is torch.float32
        assert float((restored_master - master).abs().max()) < 6 * float(moved)
        assert torch.equal(found["step"], state["step"])
    masters = [state["master_param"] for state in restored["optimizer"]["state"].values()]
    for weight, master in zip(restored["model"].values(), masters, strict=True):
        if weight.dim() == 2:
            apart = (weight.float() - master).square().mean().sqrt()
            assert float(apart) < 0.1 * float(master.square().mean().sqrt())


@pytest.mark.parametrize(("codec", "optimizer"), [("lattice", "exact"), ("inshrinkerator", "compressed")])
def test_masters_are_exact_where_the_optimizer_is_and_under_codecs_without_a_rule(
    run_path, tmp_path, codec, optimizer
):
    archive, restored = archived(run_path, tmp_path, codec=codec, optimizer=optimizer)
    assert codecs_of(archive, TensorRole.MASTER) == {"lossless/1"}
    original = torch.load(run_path / f"step_{STEPS[-1]}.pt")
    for number, state in original["optimizer"]["state"].items():
        assert torch.equal(restored["optimizer"]["state"][number]["master_param"], state["master_param"])
