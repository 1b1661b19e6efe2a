"""Frames that every back end makes of a small GPT with AdamW are those of the reference, and decode alike."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from inshrink_core import compress
from inshrink_core.chain import Archive, tensor_digest
from inshrink_core.ops import Backend, force_backend
from tests.ops.interpreted import kernels
from tests.strategies import normal


def write_run(folder):
    """Write two checkpoints of an embedding and a projection; small, because Triton's interpreter is slow."""
    model = nn.ModuleDict({"wte": nn.Embedding(4, 8), "ln": nn.LayerNorm(8), "attn": nn.Linear(8, 12)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in (1, 2, 3, 4):
        for number, parameter in enumerate(model.parameters()):
            rows = normal((parameter.shape[0], *[1] * (parameter.dim() - 1)), number).exp()
            parameter.grad = rows * normal(tuple(parameter.shape), 10 * step + number)
        optimizer.step()
        if step % 2 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / f"step_{step}.pt")


def contents(run, archive, device):
    """The blocks that a run becomes, and the bits of the values that these decode to."""
    compress(run, archive, device=device, threads=1 if device == "cpu" else 2)
    opened, found = Archive.open(archive).on(device), {}
    for info in opened.reader.frames:
        frame, checkpoint = opened.frame(info), opened.checkpoint(info)
        found |= {f"{info.step} block {entry.key}": frame.read(entry) for entry in frame.entries}
        for spec in checkpoint.specs:
            found[f"{info.step} {spec.key}"] = tensor_digest(checkpoint.source.read(spec).cpu())
    return found


def check_frames_are_the_same_and_decode_alike(device):
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        run.mkdir()
        torch.manual_seed(0)
        write_run(run)
        with force_backend(Backend.REFERENCE):
            expected = contents(run, Path(name, "a.inshrink"), "cpu")
        with kernels():
            found = contents(run, Path(name, "b.inshrink"), device)
    assert len(found) > 30
    assert found == expected
