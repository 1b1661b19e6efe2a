"""What two processes do with torchtitan's checkpoint manager and `InshrinkWriter`."""

import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from tests.integrations.dcp_ranks import same


class Progress:
    """How far training is, as torchtitan's trainer keeps it."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


class Run:
    """A small model with torchtitan's optimizers, learning rates and checkpoint manager."""

    def __init__(self, manager, folder, mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.model, self.progress = model, Progress()
        self.optimizers = default_adamw(lr=1e-2, implementation="for-loop").build(model_parts=[model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
        self.manager = manager.Config(
            enable=True, interval=2, folder="checkpoint", async_mode=mode, last_save_model_only=False
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self, last):
        """Train as torchtitan's trainer does, and return the weights and moments."""
        self.manager.load(step=-1)
        while self.progress.step < last:
            self.progress.step += 1
            batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(self.progress.step))
            self.model(batch).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.manager.save(self.progress.step)
        self.manager.maybe_wait_for_saving()
        self.manager.close()
        tensors = {**self.model.state_dict(), **self.optimizers.state_dict()}
        return {
            name: item.full_tensor() if hasattr(item, "full_tensor") else torch.as_tensor(item)
            for name, item in tensors.items()
            if isinstance(item, torch.Tensor)
        }


def main(folder, page, mode):
    folder = Path(folder)
    dist.init_process_group("gloo")
    spec = importlib.util.spec_from_file_location("page", page)
    names = importlib.util.module_from_spec(spec)
    sys.modules["page"] = names
    spec.loader.exec_module(names)
    manager = names.InshrinkCheckpointManager
    Run(manager, folder, mode).train(5)  # and is interrupted after the save of step 4
    again = Run(manager, folder, mode)
    resumed = again.train(8)
    assert again.manager.resumed_from == 4
    whole = Run(manager, folder / "whole", mode).train(8)
    assert same(whole, resumed)
