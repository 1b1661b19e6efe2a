"""How long it takes to open a run of many checkpoints, and how that compares with another version.

    python -m benchmarks.opening                        # ms a checkpoint
    python -m benchmarks.opening --against ../other     # and the ratio to another checkout, interleaved

The run is a GPT of 148 tensors with AdamW's state, 592 tensors in all, small enough that headers are what is
read. ``last`` has the step at the end of its files, so that they begin alike; ``first`` has it at their
beginning, as Lightning does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

N_CHECKPOINTS = 200
_ENGINE = "inshrink_core"


def save_run(folder: Path, kind: str, n_checkpoints: int) -> None:
    """Write the checkpoints of a small GPT."""
    import torch
    from torch import nn

    d = 16
    blocks = [
        nn.ModuleDict(
            {"ln_1": nn.LayerNorm(d), "c_attn": nn.Linear(d, 3 * d), "c_proj": nn.Linear(d, d)}
            | {"ln_2": nn.LayerNorm(d), "c_fc": nn.Linear(d, 4 * d), "c_out": nn.Linear(4 * d, d)}
        )
        for _ in range(12)
    ]
    model = nn.ModuleDict(
        {"wte": nn.Embedding(64, d), "wpe": nn.Embedding(32, d), "h": nn.ModuleList(blocks)}
        | {"ln_f": nn.LayerNorm(d)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for i in range(n_checkpoints):
        optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1.5)
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        step = {"step": i * 100}
        torch.save(state | step if kind == "last" else step | state, folder / f"step_{i * 100}.pt")


def engine_of(checkout: Path, run: Path) -> ModuleType:
    """Import the engine of a checkout beside that of another; a first run opened loads all of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == _ENGINE]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))
    try:
        engine = importlib.import_module(f"{_ENGINE}.formats")
        engine.open_run(run)
    finally:
        sys.path.pop(0)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="the folder of another checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpoints", type=int, default=N_CHECKPOINTS)
    asked = parser.parse_args()
    checkouts = [Path(__file__).parents[1], *([asked.against.resolve()] if asked.against else [])]
    engines: list[ModuleType] = []
    for kind in ("last", "first"):
        with tempfile.TemporaryDirectory() as folder:
            save_run(Path(folder), kind, asked.checkpoints)
            engines = engines or [engine_of(path, Path(folder)) for path in checkouts]
            best = [float("inf")] * len(engines)
            for _ in range(asked.repeats):
                for i, engine in enumerate(engines):
                    begun = time.process_time()
                    engine.open_run(folder)
                    best[i] = min(best[i], time.process_time() - begun)
        told = ", ".join(f"{1000 * seconds / asked.checkpoints:.2f}" for seconds in best)
        ratio = f", ratio {best[0] / best[1]:.2f}" if len(best) == 2 else ""
        print(f"step {kind}: {told} ms a checkpoint{ratio}", flush=True)


if __name__ == "__main__":
    main()
