"""FSDP on two ranks: what they save together is one run of whole tensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

import inshrink_core

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = (10, 20)


def _rank(rank: int, world: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.FileStore(str(folder / "store"), world)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, store=store)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 1), torch.nn.BatchNorm1d(1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in STEPS:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        columns = torch.arange(24.0).reshape(4, 6) + step
        weights["columns"] = distribute_tensor(columns, mesh, [Shard(1)])
        state = {"model": weights, "optimizer": moments, "train_state": {"step": torch.tensor(step)}}
        dcp.save(state, checkpoint_id=folder / "run" / f"step-{step}")
        whole = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in weights.items()
        }
        if rank == 0:
            torch.save(whole, folder / f"whole-{step}.pt")
    torch.distributed.barrier()  # Gloo's threads let go of tensors before Python ends
    torch.distributed.destroy_process_group()


def test_what_two_ranks_save_is_read_whole_and_restored_byte_for_byte(tmp_path):
    torch.multiprocessing.spawn(_rank, (2, tmp_path), nprocs=2)
    run = inshrink_core.open(tmp_path / "run")
    assert run.steps == STEPS
    for step in STEPS:
        whole = torch.load(tmp_path / f"whole-{step}.pt")
        assert run[step].state_dict().keys() == whole.keys()
        assert all(torch.equal(run[step][name], tensor) for name, tensor in whole.items())
    assert run[20]["0.weight@exp_avg"].shape == (5, 8)
    inshrink_core.compress(run, tmp_path / "a.inshrink", codec="lossless", optimizer="exact")
    inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[20])
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "step-20" / path.name).read_bytes()
