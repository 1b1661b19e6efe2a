"""As many bytes cross the bus with `--device cuda` as docs/gpu.md says, counted where tensors are copied."""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

import inshrink_core
from inshrink_core.ops import Backend, force_backend
from tests.strategies import normal

SIDE = 256
N, SAMPLE, STEP = SIDE * SIDE, 4 * 16384, 4


def test_a_parameter_with_its_moments_crosses_the_bus_in_so_many_bytes(monkeypatch, tmp_path):
    moved: Counter[str] = Counter()

    def counted(name):
        method = getattr(Tensor, name)

        def call(tensor, *arguments, **options):
            if name == "cpu" or (arguments and isinstance(arguments[0], str)):
                moved[Path(sys._getframe(1).f_code.co_filename).name] += tensor.nbytes
            return method(tensor, *arguments, **options)

        return call

    model = nn.ModuleDict({"attn": nn.Linear(SIDE, SIDE, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        model.attn.weight.grad = normal((SIDE, SIDE), step)
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        (tmp_path / "run").mkdir(exist_ok=True)
        torch.save(state, tmp_path / "run" / f"step_{step}.pt")
    paths, options = (tmp_path / "run", tmp_path / "a.inshrink"), {"device": "cpu", "threads": 1}
    with force_backend(Backend.REFERENCE):
        inshrink_core.compress(*paths, steps=[1], **options)
        for name in ("to", "cpu"):
            monkeypatch.setattr(Tensor, name, counted(name))
        written = inshrink_core.compress(*paths, **options)
        assert moved["device.py"] == 16 * N + 2 * SAMPLE + STEP
        assert moved["distance.py"] == 8 * N
        assert moved["streams.py"] < written.size.nbytes
        moved.clear()
        inshrink_core.restore(paths[1], tmp_path / "out", steps=[2], **options)
        assert moved["archive.py"] == 12 * N + STEP
