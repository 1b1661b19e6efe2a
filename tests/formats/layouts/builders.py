"""State of tiny trainings at a step, and the files that frameworks put it into."""

import io
import json
import shutil
import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.formats.layouts.layout import ADAM, BUFFERS, SGD, WEIGHTS

Shapes = Mapping[str, tuple[int, ...]]

NET: Final[Shapes] = {
    "embed.weight": (6, 4),
    "fc.weight": (8, 4),
    "fc.bias": (8,),
    "norm.weight": (8,),
    "norm.bias": (8,),
    "head.weight": (3, 8),
    "head.bias": (3,),
}
"""Parameters of a network with BatchNorm; its statistics are added by `net`."""

GPT: Final[Shapes] = {
    "wte.weight": (7, 4),
    "h.0.ln_1.weight": (4,),
    "h.0.attn.c_attn.weight": (12, 4),
    "ln_f.weight": (4,),
}
"""Parameters of a language model without buffers."""

CRITIC: Final[Shapes] = {"conv.weight": (4, 3, 2, 2), "conv.bias": (4,), "out.weight": (1, 4)}
"""A second model, with other names and shapes."""


def numel(*models):
    """Return the number of parameters of some models."""
    return sum(torch.Size(shape).numel() for shapes in models for shape in shapes.values())


OF_NET: Final = {"parameters": numel(NET), "roles": WEIGHTS | BUFFERS}
OF_NET_SGD: Final = OF_NET | {"roles": WEIGHTS | BUFFERS | SGD}
OF_NET_ADAM: Final = OF_NET | {"roles": WEIGHTS | BUFFERS | ADAM}
OF_GPT_ADAM: Final = {"parameters": numel(GPT), "roles": WEIGHTS | ADAM}
OF_TWO_GPT_ADAM: Final = OF_GPT_ADAM | {"parameters": 2 * numel(GPT)}
OF_BOTH_ADAM: Final = OF_GPT_ADAM | {"parameters": numel(GPT, CRITIC)}
"""What steps of each model have, for rows of the table."""


def values(shapes, step, seed=0, prefix=""):
    """Return tensors that move a little from step to step."""

    def drawn(name, *of):
        chance = torch.Generator().manual_seed(zlib.crc32(repr((name, seed, *of)).encode()))
        return torch.randn(shapes[name], generator=chance)

    return {prefix + name: drawn(name) + 0.01 * drawn(name, step) for name in shapes}


def net(step, seed=0, prefix=""):
    """Return the state dict of the network with BatchNorm."""
    statistics = {"norm.running_mean": (8,), "norm.running_var": (8,)}
    state: dict[str, Tensor] = {}
    for name, value in values(NET, step, seed).items():
        state[prefix + name] = value
        if name == "norm.bias":
            moved = values(statistics, step, seed)
            state |= {prefix + called: one.abs() for called, one in moved.items()}
            state[f"{prefix}norm.num_batches_tracked"] = torch.tensor(int(step))
    return state


def gpt(step, seed=0, prefix=""):
    """Return the state dict of the language model."""
    return values(GPT, step, seed, prefix)


def critic(step, prefix=""):
    """Return the state dict of the second model."""
    return values(CRITIC, step, 1, prefix)


def average(state):
    """Return a moving average of a state dict: near it, and not equal."""
    return {
        name: value.clone() if not value.is_floating_point() else value * 0.999
        for name, value in state.items()
    }


def half(state):
    """Return a state dict in half precision."""
    return {name: v.half() if v.is_floating_point() else v for name, v in state.items()}


def _optimizer(shapes, step, moments, **group):
    state: dict[int, dict[str, Any]] = {}
    for i, name in enumerate(shapes):
        state[i] = {"step": torch.tensor(float(step))} if "exp_avg" in moments else {}
        for key, scale in moments.items():
            moment = scale * values({name: shapes[name]}, step, zlib.crc32(key.encode()))[name]
            state[i][key] = moment.abs() if key.endswith("_sq") else moment
    return {"state": state, "param_groups": [{"lr": 1e-3, **group, "params": list(range(len(shapes)))}]}


def adam(shapes, step):
    """Return the state of AdamW."""
    moments = {"exp_avg": 1e-3, "exp_avg_sq": 1e-6}
    return _optimizer(shapes, step, moments, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, amsgrad=False)


def sgd(shapes, step):
    """Return the state of SGD with momentum."""
    return _optimizer(shapes, step, {"momentum_buffer": 1e-2}, momentum=0.9, weight_decay=1e-4)


class Net(nn.Module):
    """The network as a module, for frameworks that pickle it as a whole."""

    def __init__(self, step=0):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.fc, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.load_state_dict(net(step))


def save(path, value):
    """Write a torch file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def save_stream(value, *paths):
    """Write torch files of the same bytes: through a stream, zip records do not depend on the name."""
    stream = io.BytesIO()
    torch.save(value, stream)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue())


def save_tensors(path, tensors):
    """Write a safetensors file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata={"format": "pt"})


def save_sharded(folder, tensors, stem="model"):
    """Write two safetensors files and their index."""
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        shard = f"{stem}-{i:05}-of-00002.safetensors"
        save_tensors(folder / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index))


def write_text(path, text="{}"):
    """Write a text, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def copy(source, *targets):
    """Copy a file byte for byte, without its time."""
    for target in targets:
        shutil.copyfile(source, target)


def random_states(step):
    """Return states of random-number generators, as frameworks save them."""
    chance = torch.Generator().manual_seed(step)
    return {"python": (3, (step, 1, 2), None), "cpu": chance.get_state(), "cuda": []}
