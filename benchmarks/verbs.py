"""Whole commands against ``zstd -3`` on the same bytes: what a user waits for.

`inshrink compress` and `inshrink restore` as processes of their own, on a generated run of a GPT: weights in
float32, alone and with the moments of AdamW. It has 69 M parameters; ``python -m benchmarks.verbs middle 1``
takes 10 M and one repetition. ``zstd`` is the library of that name on one thread, level 3, in a process of
its own, too: it reads the same files and writes one compressed file.
Each repetition runs every command once, in turn, so that a machine whose speed drifts moves all of them.

Each row has the wall time of a command (median over the repetitions); `fixed_seconds` is the least that the
same command takes for a checkpoint of a few kilobytes: the start of the interpreter, imports, kernels.
`peak_mb` is the most memory that the command has resident, and `fixed_peak_mb` that for a few kilobytes, most
of it torch. Megabytes are those of the run's files, 10^6 bytes; for `restore`, of the one step that it
writes. `vs_zstd` is the speed over that of zstd's compression in the same repetition, both without their
fixed seconds.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.results import write

N_STEPS = 4
REPETITIONS = 5

MODELS = {"large": (768, 8, 16000), "middle": (384, 5, 4000), "quick": (64, 2, 500)}
"""Width, layers and tokens of a GPT: 69 M parameters, 10 M for a machine that has much else to do, and few to
try whether the commands run."""

_LEARNING_RATE = 3e-4
_STEPS_BETWEEN = 50
"""Training steps from one checkpoint to the next."""

_MOVEMENT = 6.0
"""Learning rates that a weight moves by meanwhile."""

_BETAS = (0.9, 0.999)

_ZSTD = """
import os, sys, zstandard
compressor = zstandard.ZstdCompressor(level=3)
with open(sys.argv[1], "wb") as target:
    for path in sys.argv[2:]:
        with open(path, "rb") as source:
            compressor.copy_stream(source, target, size=os.path.getsize(path))
    os.fsync(target.fileno())
"""


class Taken(NamedTuple):
    """Seconds that a command took, and its peak memory in bytes."""

    wall: float
    peak: float


class Command(NamedTuple):
    """A command of the table.

    Parameters
    ----------
    run
        ``weights`` or ``adamw``.
    verb
        ``zstd``, ``compress`` or ``restore``.
    threads
        How many it is given.
    """

    run: str
    verb: str
    threads: int = 1


COMMANDS = [
    Command(run, verb, threads)
    for run in ("weights", "adamw")
    for verb, threads in (("zstd", 1), ("compress", 1), ("compress", 2), ("restore", 1), ("restore", 2))
]


def gradient(noise: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a gradient as layers have them, most of it in a dozen directions of a matrix, about as large."""
    if noise.dim() < 2:
        return noise
    rows, columns = (torch.randn(n, 12, generator=generator) for n in noise.shape)
    return 0.27 * rows @ columns.T + 0.3 * noise


def gpt(width: int = 384, n_layers: int = 6, n_tokens: int = 8000) -> dict[str, torch.Tensor]:
    """Return weights with the shapes of a small GPT."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (n_tokens, width), "wpe.weight": (256, width)}
    for i in range(n_layers):
        shapes |= {
            f"h.{i}.{norm}.{part}": (width,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")
        }
        shapes |= {f"h.{i}.attn.qkv.weight": (3 * width, width), f"h.{i}.attn.proj.weight": (width, width)}
        shapes |= {f"h.{i}.mlp.fc.weight": (4 * width, width), f"h.{i}.mlp.proj.weight": (width, 4 * width)}
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_run(directory: Path, model: dict[str, torch.Tensor], moments: bool, n_steps: int = N_STEPS) -> None:
    """Write checkpoints of a training that is imitated: moments as AdamW has them, weights that follow them.

    Parameters
    ----------
    directory
        An empty folder.
    model
        The first weights; they are not changed.
    moments
        Whether the files hold AdamW's, too.
    n_steps
        How many checkpoints.

    Notes
    -----
    A gradient's scale is that of its row and column times one of its own, log-normal; a second moment is
    the mean of the squares of a thousand such, so it moves by a few percent between checkpoints; a first
    moment is new every time, has the scale of its row and column, and lies in few directions, mostly.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    sides, scales, seconds = {}, {}, {}
    weights = {name: tensor.clone() for name, tensor in model.items()}
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        side = torch.full(shape, 1e-4)
        if len(shape) == 2:
            side *= torch.exp(0.6 * normal(shape[0], 1)) * torch.exp(0.4 * normal(1, shape[1]))
        scale = side * torch.exp(0.7 * normal(*shape))
        sides[name], scales[name], seconds[name] = side, scale, scale.square()
    decay = _BETAS[1] ** _STEPS_BETWEEN
    directory.mkdir()
    for step in range(1, n_steps + 1):
        state = {}
        for i, (name, weight) in enumerate(weights.items()):
            shape, scale = tuple(weight.shape), scales[name]
            noise = 1 + math.sqrt(2 / _STEPS_BETWEEN) * normal(*shape)
            seconds[name] = decay * seconds[name] + (1 - decay) * scale.square() * noise.abs()
            first = gradient(normal(*shape), generator) * sides[name]
            first *= math.sqrt((1 - _BETAS[0]) / (1 + _BETAS[0]))
            weight += _LEARNING_RATE * _MOVEMENT * normal(*shape)
            state[i] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": seconds[name]}
        groups = [{"lr": _LEARNING_RATE, "betas": _BETAS, "eps": 1e-8, "params": list(state)}]
        content = {"model": weights, "step": step * _STEPS_BETWEEN}
        optimizer = {"optimizer": {"state": state, "param_groups": groups}} if moments else {}
        torch.save(content | optimizer, directory / f"step_{step * _STEPS_BETWEEN:06d}.pt")


class _Folder:
    """Runs, and what commands make of them, below one folder."""

    def __init__(self, folder: Path, models: dict[str, dict[str, torch.Tensor]]) -> None:
        self._folder = folder
        self.nbytes: dict[tuple[str, str], int] = {}
        for size, model in models.items():
            for run in ("weights", "adamw"):
                path = self._run(size, run)
                write_run(path, model, run == "adamw", N_STEPS if size == "large" else 1)
                files = [file.stat().st_size for file in sorted(path.iterdir())]
                self.nbytes[size, run] = sum(files)
                self.nbytes[size, f"{run} step"] = files[-1]

    def _run(self, size: str, run: str) -> Path:
        return self._folder / f"{size}-{run}"

    def take(self, size: str, command: Command) -> Taken:
        """Run a command and remove what it made; an archive stays until it is made again."""
        run, archive = self._run(size, command.run), self._folder / f"{size}-{command.run}.inshrink"
        target = self._folder / "out"
        inshrink = [str(Path(sys.executable).with_name("inshrink")), command.verb]
        threads = ["--threads", str(command.threads)]
        if command.verb == "zstd":
            words = [sys.executable, "-c", _ZSTD, str(target), *map(str, sorted(run.iterdir()))]
        elif command.verb == "compress":
            shutil.rmtree(archive, ignore_errors=True)
            words = [*inshrink, str(run), "-o", str(archive), *threads]
        else:
            words = [*inshrink, str(archive), "-o", str(target), *threads]
        taken = _taken(words)
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        return taken


def _taken(words: list[str]) -> Taken:
    """Run a process to its end.

    Its peak is read from /proc: that of `os.wait4` begins with the memory of this process.
    """
    begun, peak = time.perf_counter(), 0
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while child.poll() is None:
        status = Path(f"/proc/{child.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM" in status else peak
        time.sleep(0.005)
    subprocess.CompletedProcess(words, child.returncode).check_returncode()
    return Taken(time.perf_counter() - begun, 1024 * peak)


def measure(model: str = "large", repetitions: int = REPETITIONS) -> list[dict[str, object]]:
    """Return a row for each command."""
    # A user's interpreter compiles a module once, and not at each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    large = gpt(*MODELS[model])
    build = Path("build")
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="inshrink-verbs-", dir=build) as scratch:
        folder = _Folder(Path(scratch), {"small": gpt(16, 1, 10), "large": large})
        found: dict[tuple[str, Command], list[Taken]] = {}
        for size in ("small", "large"):
            for _ in range(repetitions):
                for command in COMMANDS:
                    found.setdefault((size, command), []).append(folder.take(size, command))
    n = sum(tensor.numel() for tensor in large.values())
    return [_row(command, n, found, folder.nbytes) for command in COMMANDS]


def _row(
    command: Command, n: int, found: dict[tuple[str, Command], list[Taken]], sizes: dict[tuple[str, str], int]
) -> dict[str, object]:
    """Return the row of a command."""

    def net(timed: Command) -> list[float]:
        fixed = min(taken.wall for taken in found["small", timed])
        return [taken.wall - fixed for taken in found["large", timed]]

    def size(timed: Command) -> int:
        return sizes["large", f"{timed.run} step" if timed.verb == "restore" else timed.run]

    zstd = command._replace(verb="zstd", threads=1)
    pairs = zip(net(command), net(zstd), strict=True)
    medians = [statistics.median(column) for column in zip(*found["large", command], strict=True)]
    fixed = [min(column) for column in zip(*found["small", command], strict=True)]
    return {
        "run": command.run,
        "parameters": n,
        "verb": command.verb,
        "threads": command.threads,
        "megabytes": size(command) / 1e6,
        "wall_seconds": medians[0],
        "fixed_seconds": fixed[0],
        "peak_mb": medians[1] / 1e6,
        "fixed_peak_mb": fixed[1] / 1e6,
        "mb_per_s": size(command) / 1e6 / statistics.median(net(command)),
        "vs_zstd": statistics.median(size(command) / ours / (size(zstd) / zstds) for ours, zstds in pairs),
        "repetitions": len(found["large", command]),
    }


def main(model: str = "large", repetitions: int = REPETITIONS, quick: bool = False) -> Path:
    """Write ``results/verbs.csv``; quick: a small model, once."""
    if quick:
        model, repetitions = "quick", 1
    return write("verbs_quick" if model == "quick" else "verbs", measure(model, repetitions))


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
