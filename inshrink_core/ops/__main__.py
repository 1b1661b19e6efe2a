"""``python -m inshrink_core.ops`` compiles the CPU kernels ahead of time.

Use it to build a wheel, an image or a checkout. With ``--all`` it compiles for every processor level in
`machine.LEVELS`, otherwise for the level of this processor. The script compresses and restores a small run
with tensors of each dtype, which compiles the kernels for one level. The recorded signatures then compile the
others.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from inshrink_core.execution.process import minimal_environment, start_python
from inshrink_core.ops.cpu import machine

_OPTIONS = ("", "--codec lossless --optimizer exact", "--optimizer compact", "--codec inshrinkerator")
"""Command-line options of the archives that the script writes and restores."""


_STDERR = 2


def _write_run(folder: Path) -> None:
    """Write four checkpoints of a model with AdamW and tensors of every dtype."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 48), nn.Linear(48, 96), nn.BatchNorm1d(96), nn.Linear(96, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in (10, 20, 30, 40):
        for _ in range(10):
            values = model(torch.randint(64, (32,)))
            values.logsumexp(-1).sub(values[:, 0]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        for kind in (torch.bfloat16, torch.float16, torch.float64):
            for name, value in model[3].state_dict().items():
                state[f"{kind}.{name}"] = value.to(kind)
        torch.save({"step": step, "model": state, "optimizer": optimizer.state_dict()}, folder / f"{step}.pt")


def _compile_level(level: str) -> None:
    """Compile for one level in this process, from the recorded signatures."""
    import inshrink_core.ops.cpu as package

    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for kernel in vars(importlib.import_module(module.name)).values():
            cache: Any = getattr(kernel, "_cache", None)
            for signature in cache.signatures() if isinstance(cache, machine.KernelCache) else ():
                kernel.compile(signature)


def _run(arguments: list[str], **variables: str) -> None:
    """Run Python in a child process that writes its kernels; exit if the process fails."""
    environment = minimal_environment() | variables | {machine.WRITE: "1"}
    process = start_python(arguments, errors=_STDERR, environment=environment)
    process.communicate()
    if process.returncode:
        sys.exit(process.returncode)


def main(arguments: list[str]) -> int:
    """Compile the kernels."""
    if arguments[:1] == ["--level"]:
        _compile_level(arguments[1])
        return 0
    asked = "all" if "--all" in arguments else "this level"
    note = machine.folder() / "levels"
    if note.exists() and note.read_text() in ("all", asked):
        return 0
    for old in machine.folder().parent.glob("*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        run.mkdir()
        _write_run(run)
        for number, options in enumerate(_OPTIONS):
            archive = str(Path(name) / f"{number}.inshrink")
            _run(["-m", "inshrink_core", "compress", str(run), "-o", archive, "-q", *options.split()])
            _run(["-m", "inshrink_core", "restore", archive, "-o", str(Path(name) / str(number)), "-q"])
    if "--all" in arguments:
        this_level = machine.choose_level()
        for level in machine.LEVELS:
            if level != this_level:
                target = {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": machine.FEATURES.get(level, "")}
                _run(["-m", "inshrink_core.ops", "--level", level], **target)
    note.write_text(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
