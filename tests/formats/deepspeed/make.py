"""Write the checkpoints of DeepSpeed in this folder, with DeepSpeed itself: ``python make.py [TARGET]``.

Needs the package deepspeed (written with 0.19.8, DS_BUILD_OPS=0), runs on the CPU, two ranks over gloo. The
tests read what it wrote; CI does not run it.
"""

import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing import spawn

STEPS = (2, 3)


class Small(nn.Module):
    """A tied head, a frozen matrix, a buffer, and shapes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(13, 5)
        self.fc = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.tok.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x):
        hidden = self.tok(x)
        return self.head(self.norm(hidden + self.frozen(self.fc(hidden).relu())))


def config(stage, half, **zero):
    found = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if half:
        found["bf16"] = {"enabled": True}
    return found


RUNS = {
    "stage1": (3, config(1, False)),
    "stage2": (2, config(2, True)),
    "stage3": (2, config(3, True, sub_group_size=40)),
    "bf16": (2, config(1, True) | {"data_types": {"grad_accum_dtype": "fp32"}}),
    "pipeline": (2, config(1, True)),
}
"""Ranks and configuration; the pipeline has two stages of one rank each."""


class Lookup(nn.Embedding):
    """The first stage, and with its weights the last."""

    def __init__(self):
        super().__init__(13, 5)


def parts(name):
    if name != "pipeline":
        model = Small()
        decayed = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
        plain = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        return model, {"optimizer": torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))}
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("tok", Lookup, tied_weight_attr=["weight"]),
        LayerSpec(nn.Linear, 5, 6),
        LayerSpec(nn.Linear, 6, 5),
        TiedLayerSpec("tok", Lookup, forward_fn=lambda tok, x: x @ tok.weight.t()),
    ]
    model = PipelineModule(
        layers,
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda out, y: nn.functional.cross_entropy(out.float().flatten(0, 1), y.flatten()),
    )
    params = [p for p in model.parameters() if p.requires_grad]
    return model, {"optimizer": torch.optim.AdamW(params, lr=0.01), "model_parameters": params}


def train(rank, name, target, port):
    n_ranks, settings = RUNS[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model, given = parts(name)
    engine, *_ = deepspeed.initialize(model=model, config=settings, **given)
    torch.manual_seed(rank)
    for step in range(1, max(STEPS) + 1):
        tokens = torch.randint(0, 13, (4, 6))
        if name == "pipeline":
            engine.train_batch(iter([(tokens, tokens)]))
        else:
            loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
            engine.backward(loss)
            engine.step()
        if step in STEPS:
            engine.save_checkpoint(target, client_state={"epoch": step - 2})
    torch.distributed.destroy_process_group()


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for port, (name, (n_ranks, _)) in enumerate(RUNS.items(), 29700):
        shutil.rmtree(root / name, ignore_errors=True)
        spawn(train, (name, str(root / name), port), n_ranks)
        for path in (root / name).glob("zero_to_*.py"):
            path.unlink()  # the same beside all checkpoints of DeepSpeed, 40 kB
    # What zero_to_fp32.py of DeepSpeed puts together, to compare with.
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole

    for name in ("stage1", "stage2", "stage3"):
        found = {k: v.clone() for k, v in whole(str(root / name), f"global_step{STEPS[-1]}").items()}
        torch.save(found, root / f"{name}.pt")


if __name__ == "__main__":
    main()
