"""Trainings on many devices: sharded, by rank, and several models of one step in folders."""

import json
from argparse import Namespace
from typing import Any

from benchmarks.fuzz.zero import GROUPS, save_zero, some_state
from tests.formats.layouts.builders import (
    CRITIC,
    GPT,
    OF_BOTH_ADAM,
    OF_GPT_ADAM,
    OF_TWO_GPT_ADAM,
    adam,
    copy,
    critic,
    gpt,
    numel,
    random_states,
    save,
    save_sharded,
    save_tensors,
    write_text,
)
from tests.formats.layouts.layout import BUFFERS, WEIGHTS, layout
from tests.formats.shards import save_shards


def _nested(tensors):
    """Return a state dict as a tree of modules."""
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


@layout("nanochat", steps=(100, 200), **OF_GPT_ADAM)
def nanochat(folder, step):
    save(folder / f"model_{step:06}.pt", gpt(step))
    for rank in (0, 1):
        save(folder / f"optim_{step:06}_rank{rank}.pt", adam(GPT, step + rank))
    write_text(folder / f"meta_{step:06}.json", json.dumps({"step": step, "val_bpb": 1.1}))


@layout("Megatron-LM", steps=(1000, 2000), **OF_TWO_GPT_ADAM)
def megatron(folder):
    for iteration in (1000, 2000):
        for rank in (0, 1):
            state = {"args": Namespace(tensor_model_parallel_size=2), "checkpoint_version": 3.0}
            state |= {"iteration": iteration, "model": {"language_model": _nested(gpt(iteration, rank))}}
            state |= {"optimizer": {"optimizer": adam(GPT, iteration)}}
            state |= {"rng_state": [random_states(iteration)]}
            save(folder / f"iter_{iteration:07}/mp_rank_{rank:02}/model_optim_rng.pt", state)
    write_text(folder / "latest_checkpointed_iteration.txt", "2000")


@layout(
    "DeepSpeed, ZeRO 1",
    steps=(1000, 2000),
    parameters=35 + 5 + 30 + 3,
    roles=WEIGHTS | BUFFERS | {"exp_avg", "exp_avg_sq", "master"},
)
def deepspeed(folder):
    for step in (1000, 2000):
        module, state = some_state(step)
        save_zero(folder / f"global_step{step}", module, state, GROUPS, stage=1, step=step)
    write_text(folder / "latest", "global_step2000")


@layout(
    "DeepSpeed, ZeRO 3, in transformers",
    steps=(1000, 2000),
    parameters=35 + 5 + 30 + 3,
    roles=WEIGHTS | BUFFERS | {"exp_avg", "exp_avg_sq"},
)
def deepspeed_in_transformers(folder, step):
    module, state = some_state(step)
    inner = folder / f"checkpoint-{step}"
    save_zero(inner / f"global_step{step}", module, state, GROUPS, stage=3, step=step)
    write_text(inner / "trainer_state.json", json.dumps({"global_step": step, "log_history": []}))
    write_text(inner / "latest", f"global_step{step}")


def _shards(tensors):
    """Return tensors as halves of two ranks."""
    cut = {name: tensor.chunk(2) for name, tensor in tensors.items()}
    return {
        name: (
            tensor.shape,
            [(0, (0,) * tensor.ndim, first), (1, (len(first), *(0,) * (tensor.ndim - 1)), second)],
        )
        for name, tensor in tensors.items()
        for first, second in [cut[name]]
    }


def _moments(step, prefix):
    """Return an optimizer's state as DCP names it: by parameter."""
    state = zip(GPT, adam(GPT, step)["state"].values(), strict=True)
    return {
        f"{prefix}{name}.{key}": value for name, held in state for key, value in held.items() if value.ndim
    }


@layout(
    "torchtitan (DCP)", steps=(500, 1000), parameters=numel(GPT), roles=WEIGHTS | {"exp_avg", "exp_avg_sq"}
)
def torchtitan(folder, step):
    tensors = gpt(step) | _moments(step, "optimizer.state.")
    target = folder / f"checkpoint/step-{step}"
    target.mkdir(parents=True)
    save_shards(target, _shards(tensors))


@layout(
    "FSDP in transformers",
    steps=(500, 1000),
    parameters=numel(GPT),
    roles=WEIGHTS | {"exp_avg", "exp_avg_sq"},
)
def fsdp(folder, step):
    inner = folder / f"checkpoint-{step}"
    for name, tensors in (
        ("pytorch_model_fsdp_0", gpt(step, prefix="model.")),
        ("optimizer_0", _moments(step, "optimizer.state.")),
    ):
        (inner / name).mkdir(parents=True)
        save_shards(inner / name, _shards(tensors))
    write_text(inner / "trainer_state.json", json.dumps({"global_step": step, "log_history": []}))


@layout("torchtune", steps=(0, 1), parameters=numel(GPT), beside=("recipe_state/recipe_state.pt",))
def torchtune(folder):
    for epoch in (0, 1):
        save_sharded(folder / f"epoch_{epoch}", gpt(epoch), "ft-model")
        write_text(folder / f"epoch_{epoch}/config.json")
    state = {"seed": 1, "epochs_run": 2, "total_epochs": 3, "max_steps_per_epoch": None}
    save(folder / "recipe_state/recipe_state.pt", {"optimizer": adam(GPT, 2)} | state)


@layout("torchtune before 0.5", steps=(0, 1), parameters=numel(GPT), beside=("recipe_state.pt",))
def torchtune_parts(folder):
    for epoch in (0, 1):
        held = list(gpt(epoch).items())
        for part in (0, 1):
            save(folder / f"hf_model_{part + 1:04}_{epoch}.pt", dict(held[2 * part : 2 * part + 2]))
    save(folder / "recipe_state.pt", {"optimizer": adam(GPT, 2), "seed": 1, "epochs_run": 2})


@layout("OLMo", steps=(1000, 2000), **OF_GPT_ADAM)
def olmo(folder):
    for step in (1000, 2000):
        inner = folder / f"step{step}-unsharded"
        save(inner / "model.pt", gpt(step))
        save(inner / "optim.pt", adam(GPT, step))
        save(inner / "train.pt", {"epoch": 0, "global_step": step, "rng": random_states(step)})
        write_text(inner / "config.yaml", "run_name: tiny\n")
    (folder / "latest-unsharded").symlink_to("step2000-unsharded")


@layout("verl", steps=(100, 200), **OF_BOTH_ADAM, models=("actor", "critic"))
def verl(folder):
    for step in (100, 200):
        for name, state, shapes in (("actor", gpt(step), GPT), ("critic", critic(step), CRITIC)):
            inner = folder / f"global_step_{step}/{name}"
            save(inner / "model_world_size_1_rank_0.pt", state)
            save(inner / "optim_world_size_1_rank_0.pt", adam(shapes, step))
            extra = {"lr_scheduler": {"last_epoch": step}, "rng": random_states(step)}
            save(inner / "extra_state_world_size_1_rank_0.pt", extra)
    write_text(folder / "latest_checkpointed_iteration.txt", "200")


@layout("RLHF with PPO", steps=(100, 200), parameters=numel(GPT, CRITIC), models=("actor", "critic"))
def rlhf(folder, step):
    for name, state in (("actor", gpt(step)), ("critic", critic(step))):
        save(folder / f"checkpoint-{step}/{name}/pytorch_model.bin", state)
        write_text(folder / f"checkpoint-{step}/{name}/config.json")


@layout(
    "merged beside a run", steps=(100, 200), parameters=numel(GPT), duplicates=("merged/model.safetensors",)
)
def merged(folder):
    for step in (100, 200):
        save_tensors(folder / f"checkpoint-{step}/model.safetensors", gpt(step))
    (folder / "merged").mkdir()
    copy(folder / "checkpoint-200/model.safetensors", folder / "merged/model.safetensors")
