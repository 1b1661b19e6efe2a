"""Folders as DeepSpeed writes them with ZeRO, made from tensors: any ranks, groups and paddings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

State = Mapping[str, Mapping[str, Tensor]]
"""By parameter: ``fp32`` and what else an optimizer holds of its shape."""


def _flat(group: Sequence[str], state: State, key: str, n_ranks: int, padding: int) -> list[Tensor]:
    """Return the partitions of a group's vector, as in stages 1 and 2."""
    parts = [torch.cat([state[name][key].flatten(), torch.zeros(padding)]) for name in group]
    vector = torch.cat(parts)
    vector = torch.cat([vector, torch.zeros(-len(vector) % (2 * n_ranks))])
    return [part.clone() for part in vector.chunk(n_ranks)]


def _each(group: Sequence[str], state: State, key: str, n_ranks: int) -> list[Tensor]:
    """Return each rank's parts of a group's parameters, as in stage 3."""
    rows = []
    for name in group:
        flat = state[name][key].flatten()
        part = -(-len(flat) // n_ranks)
        rows.append(torch.cat([flat, flat.new_zeros(part * n_ranks - len(flat))]).reshape(n_ranks, part))
    return [part.clone() for part in torch.cat(rows, dim=1)]


def save_zero(
    folder: Path,
    module: Mapping[str, Tensor],
    state: State,
    groups: Sequence[Sequence[str]],
    *,
    stage: int = 1,
    n_ranks: int = 2,
    step: int = 1,
    mp_rank: int = 0,
    padding: int = 0,
) -> Path:
    """Write the files of one model-parallel rank; `padding` follows every parameter in a vector."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted({key for tensors in state.values() for key in tensors} - {"fp32"})
    cut = {
        key: [
            _each(group, state, key, n_ranks) if stage == 3 else _flat(group, state, key, n_ranks, padding)
            for group in groups
        ]
        for key in ("fp32", *keys)
    }
    shapes = [{name: state[name]["fp32"].shape for name in group} for group in groups]
    root = {
        "module": {n: torch.empty(0) if stage == 3 and n in state else t for n, t in module.items()},
        "buffer_names": [name for name in module if name not in state],
        "param_shapes": shapes,
        "global_steps": step,
    }
    for rank in range(n_ranks):
        base = {
            "state": {
                i: {"step": torch.tensor(float(step))} | {key: cut[key][i][rank] for key in keys}
                for i in range(len(groups))
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [i]} for i in range(len(groups))],
        }
        vectors = [parts[rank] for parts in cut["fp32"]]
        if stage == 3:
            content = {"optimizer_state_dict": base, "fp32_flat_groups": vectors, "partition_count": n_ranks}
        else:
            content = {"base_optimizer_state": base, "single_partition_of_fp32_groups": vectors}
            content |= {"partition_count": [n_ranks] * len(groups)}
            content |= {"param_alignment_paddings": [[padding] * len(group) for group in groups]}
        name = f"zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}"
        torch.save({"optimizer_state_dict": content}, folder / f"{name}_optim_states.pt")
        if stage == 3:
            torch.save(root, folder / f"{name}_model_states.pt")
    if stage != 3:
        torch.save(root, folder / f"mp_rank_{mp_rank:02d}_model_states.pt")
    return folder


def some_state(seed: int = 0, n: int = 1) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return a module and its state: shapes that no number of ranks divides."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {
        "a.weight": (5 * n, 7 * n),
        "a.bias": (5 * n,),
        "b.weight": (3 * n, 2, 5 * n),
        "b.bias": (3 * n,),
    }
    module = {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    state = {
        name: {
            "fp32": weight.clone(),
            "exp_avg": 1e-3 * torch.randn(weight.shape, generator=chance),
            "exp_avg_sq": 1e-6 * torch.rand(weight.shape, generator=chance),
        }
        for name, weight in module.items()
    }
    return module | {"scale": torch.tensor([0.5, 2.0])}, state


GROUPS = (("a.weight", "b.weight"), ("a.bias", "b.bias"))


def save_run(root: Path, steps: tuple[int, ...] = (10, 20, 30), stage: int = 1) -> Path:
    """Write a run of two ranks."""
    for step in steps:
        module, state = some_state(step)
        save_zero(root / f"global_step{step}", module, state, GROUPS, stage=stage, step=step)
    return root
