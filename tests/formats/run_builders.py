"""Small runs on disk, made by hand for the tests of `formats`."""

import json
from contextlib import contextmanager

import torch
from safetensors.torch import save_file
from torch import nn

from tests.formats.layouts.builders import save_sharded


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.BatchNorm1d(4))


def train(model, optimizer, n_steps=2):
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(torch.randint(0, 10, (8,))).square().sum().backward()
        optimizer.step()


def training_state(seed=0, step=5):
    model = small_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    train(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def save_run(folder, steps=(10, 20, 30)):
    folder.mkdir(exist_ok=True)
    for step in steps:
        torch.save(training_state(step, step), folder / f"ckpt_{step}.pt")
    return folder


def save_huggingface(root, steps=(100, 200), sharded=False):
    for step in steps:
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        model = small_model(step)
        decay = [p for p in model.parameters() if p.ndim >= 2]
        plain = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        )
        train(model, optimizer)
        tensors = dict(model.state_dict())
        if sharded:
            save_sharded(folder, tensors)
        else:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        torch.save({"last_epoch": step}, folder / "scheduler.pt")
        (folder / "training_args.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
        (folder / "rng_state.pth").write_bytes(b"cposix\nsystem\n(S'exit 1'\ntR.")
        history = [{"step": s, "loss": 1.0 / s, "epoch": s / 100} for s in range(50, step + 1, 50)]
        history.append({"step": step, "eval_loss": float("nan")})
        state = {"global_step": step, "log_history": history}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        (folder / "config.json").write_text("{}")
    return root


def content_of(folder):
    """Return the content of every file below a folder, by path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat_a, flat_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(flat_a, flat_b)


class Call:
    """Pickles as a call of a function with given arguments."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@contextmanager
def without_checksums():
    """Let `torch.save` leave the checksums of its files out."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)
