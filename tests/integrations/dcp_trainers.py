"""What two processes do with Lightning and accelerate, and the writer of `torch.distributed.checkpoint`."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from inshrink_core.integrations.dcp import InshrinkReader, InshrinkWriter
from tests.integrations.dcp_ranks import EXACT, same


def whole(weights):
    return {name: getattr(item, "full_tensor", item.clone)() for name, item in weights.items()}


def with_lightning(folder, page):
    """Train with the callback of the page, and load what it saved into the trained model again."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from tests.integrations.test_lightning_sharded import Net, loader

    folder, names = Path(folder), {}
    exec(Path(page).read_text(), names)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[names["Archive"](folder / "a", 2)],
    )
    net = Net()
    trainer.fit(net, loader())
    weights = get_state_dict(net, [])[0]
    expected = whole(weights)
    blank = {name: torch.zeros_like(item) for name, item in weights.items()}
    state = {"model": blank}
    dcp.load(state, storage_reader=InshrinkReader(folder / "a"))
    assert same(expected, whole(state["model"]))


def with_accelerate(folder):
    """Save what accelerate has prepared, train on, go back, and train on again: the same."""
    from accelerate import Accelerator

    folder, accelerator = Path(folder), Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    writer = InshrinkWriter(folder / "a", **EXACT)

    def train(steps):
        for step in steps:
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return whole(get_state_dict(model, optimizer)[0])

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    train(range(3))
    dcp.save(state(), storage_writer=writer, checkpoint_id="step-3")
    expected = train(range(3, 6))
    found = state()
    dcp.load(found, storage_reader=InshrinkReader(folder / "a", step=3))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    assert same(expected, train(range(3, 6)))
    accelerator.end_training()
