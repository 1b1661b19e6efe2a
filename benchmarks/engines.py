"""What engines cost: torchrun and Ray against two processes that have nothing to do with each other.

A run of 650 MB with the shapes of a small GPT and AdamW's state. The *ceiling* is two processes of one
thread, each of which compresses a run that holds half of the columns, as part 1/1; torchrun and Ray compress
the whole run with two workers of one thread.
Workers are started, and have compressed something, before the clock starts. Rounds are interleaved, for other
work on the machine slows each of them: only the ratio in a round says something, and `of_ceiling` is its
median over the rounds. `peak_bytes` is what a process holds at most above what it held before: a worker of
some, and the process that drives one and four workers. The last rows are of an archive with small frames in
many parts. ``results/engines.csv``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write
from inshrink_core.archive import PartWriter, commit_parts
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.chain.parts import Split
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.execution.engines import installed_engines

WIDTH, DEPTH, N_TOKENS = 512, 3, 8000
N_STEPS = 4
ROUNDS = 5
PARTS = (32, 128)
N_TENSORS = 8
_TIMEOUT_S = 900

_CHILD = """
import json, pathlib, shutil, sys, tempfile, time
import inshrink_core
from inshrink_core.execution import prepare_process
from inshrink_core.execution.together import is_together, meet
from inshrink_core.lab.bench.measure import PeakMemory

run, small, target, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
prepare_process()
if options.get("engine") == "ray":
    import ray
    ray.init(num_cpus=options["workers"], include_dashboard=False, log_to_driver=False, logging_level="ERROR")
warm = tempfile.mkdtemp(dir=pathlib.Path(target).parent)
alone = {k: v for k, v in options.items() if k != "part"}
inshrink_core.compress(small, warm + "/small", **alone)
print("ready", flush=True)
if is_together():
    first = meet()
else:
    first = True
    sys.stdin.readline()
with PeakMemory() as peak:
    begun = time.perf_counter()
    inshrink_core.compress(run, target, **options)
    seconds = time.perf_counter() - begun
if first:
    print(json.dumps({"seconds": seconds, "peak": peak.nbytes}), flush=True)
"""


def shapes(width: int, depth: int, n_tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GPT's weights."""
    found: dict[str, tuple[int, ...]] = {"wte.weight": (n_tokens, width)}
    for at in range(depth):
        layer = {"qkv": (3 * width, width), "proj": (width, width)}
        layer |= {"fc1": (4 * width, width), "fc2": (width, 4 * width)}
        found |= {f"h.{at}.{name}.weight": shape for name, shape in layer.items()}
        found[f"h.{at}.ln.weight"] = (width,)
    return found


def write_runs(folders: dict[Path, Collection[str] | None], made: dict[str, tuple[int, ...]]) -> int:
    """Write the same training into some folders, of its weights those asked for; return its bytes."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in made.items()}
    first = {name: torch.zeros(shape) for name, shape in made.items()}
    second = {name: torch.zeros(shape) for name, shape in made.items()}
    for step in range(1, N_STEPS + 1):
        for name, weight in weights.items():
            rows = 0.5 + torch.rand((weight.shape[0], *[1] * (weight.dim() - 1)), generator=generator)
            gradient = 1e-3 * rows * torch.randn(weight.shape, generator=generator)
            first[name].mul_(0.9).add_(gradient, alpha=0.1)
            second[name].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            weight.addcdiv_(first[name], (second[name].sqrt() + 1e-8), value=-1e-3 / step)
        for folder, asked in folders.items():
            names = [name for name in made if asked is None or name in asked]
            state = {
                at: {"step": torch.tensor(float(step)), "exp_avg": first[name], "exp_avg_sq": second[name]}
                for at, name in enumerate(names)
            }
            groups = [{"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "params": list(range(len(names)))}]
            torch.save(
                {
                    "model": {name: weights[name] for name in names},
                    "optimizer": {"state": state, "param_groups": groups},
                    "step": step,
                },
                folder / f"step_{step}.pt",
            )
    return N_STEPS * 12 * sum(weight.numel() for weight in weights.values())


class Bench:
    """The runs in a scratch folder, and what is started on them."""

    def __init__(self, scratch: Path, width: int, depth: int, n_tokens: int) -> None:
        self._scratch, self._n = scratch, 0
        self.run, self.small = scratch / "run", scratch / "small"
        self.halves = [scratch / "half 1", scratch / "half 2"]
        for folder in (self.run, self.small, *self.halves):
            folder.mkdir()
        write_runs({self.small: None}, shapes(32, 1, 64))
        made = shapes(width, depth, n_tokens)
        sizes = _specs(made)
        split = Split(sizes, 2)
        owned = [{spec.key for spec in sizes if split.part_of(spec) == part} for part in range(2)]
        self.nbytes = write_runs({self.run: None, self.halves[0]: owned[0], self.halves[1]: owned[1]}, made)
        self.largest = max(12 * spec.numel for spec in sizes)

    def _command(self, run: Path, options: dict[str, Any]) -> list[str]:
        self._n += 1
        target = self._scratch / f"archive {self._n}"
        return ["-c", _CHILD, str(run), str(self.small), str(target), json.dumps(options)]

    def together(self, runs: list[Path], **options: Any) -> tuple[float, int]:
        """Start a process a run, and all at once when they are ready; return longest time and peak."""
        commands = [[sys.executable, *self._command(run, {"threads": 1, **options})] for run in runs]
        children = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
            )
            for command in commands
        ]
        for child in children:
            assert child.stdout is not None
            while child.stdout.readline().strip() != "ready":
                if child.poll() is not None:
                    raise RuntimeError("a child ended before it was ready")
        said = []
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            out, _ = child.communicate(timeout=_TIMEOUT_S)
            said.append(json.loads(out.splitlines()[-1]))
        return max(one["seconds"] for one in said), max(one["peak"] for one in said)

    def torchrun(self, workers: int) -> tuple[float, int]:
        """Compress under torchrun."""
        script = self._scratch / "child.py"
        script.write_text(_CHILD)
        _, _, *arguments = self._command(self.run, {"threads": 1, "part": "auto"})
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command = [sys.executable, *launcher, str(script), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=_environment(), check=True
        )
        said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        return said["seconds"], said["peak"]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0"}


def _specs(made: dict[str, tuple[int, ...]]) -> list[TensorSpec]:
    row = {"role": TensorRole.WEIGHT, "dtype": "float32"}
    return [TensorSpec(name=name, shape=shape, **row) for name, shape in made.items()]


def measure(bench: Bench, rounds: int, drivers: Collection[int]) -> list[dict[str, object]]:
    """Measure every engine in each round, then what processes hold."""
    ways: dict[str, Callable[[], tuple[float, int]]] = {
        "ceiling": lambda: bench.together(bench.halves, part="1/1"),
        "torchrun": lambda: bench.torchrun(2),
        "ray": lambda: bench.together([bench.run], engine="ray", workers=2),
    }
    if "ray" not in installed_engines():
        del ways["ray"]
    found = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    rows: list[dict[str, object]] = []
    for name in ways:
        seconds = statistics.median(one[name][0] for one in found)
        share = statistics.median(one["ceiling"][0] / one[name][0] for one in found)
        rows.append(
            {
                "what": name,
                "workers": 2,
                "rounds": rounds,
                "raw_bytes": bench.nbytes,
                "seconds": seconds,
                "mb_per_s": bench.nbytes / 1e6 / seconds,
                "of_ceiling": share,
                "lowest": min(one["ceiling"][0] / one[name][0] for one in found),
                "highest": max(one["ceiling"][0] / one[name][0] for one in found),
            }
        )
    for parts in (2, 8):
        _, peak = bench.together([bench.run], part=f"1/{parts}")
        rows.append(
            {
                "what": f"a worker, 1 of {parts}",
                "workers": 1,
                "peak_bytes": peak,
                "largest_column_bytes": bench.largest,
                "of_largest_column": peak / bench.largest,
            }
        )
    for workers in drivers:
        _, peak = bench.together([bench.run], engine="processes", workers=workers)
        rows.append({"what": "the driver", "workers": workers, "peak_bytes": peak})
    return rows


def commits(scratch: Path, counts: Collection[int]) -> list[dict[str, object]]:
    """Measure what the last part and the commit of two small frames take, in so many parts."""
    rows: list[dict[str, object]] = []
    for n in counts:
        path = scratch / f"parts {n}"
        for at in range(n):
            begun = time.perf_counter()
            with PartWriter(path, at, n) as writer:
                opened = time.perf_counter() - begun
                head = None
                for step in range(2):
                    kind = "keyframe" if head is None else "delta"
                    with writer.begin(step=step, kind=kind, parent_id=head and head.frame_id) as frame:
                        for tensor in range(N_TENSORS):
                            frame.add(f"{at}.{tensor}", "raw/1", bytes(100), place=at * N_TENSORS + tensor)
                        head = frame.commit({"format": "torch"})
        begun = time.perf_counter()
        commit_parts(path)
        rows += [
            {"what": "opening the last part", "workers": n, "seconds": opened},
            {"what": "the commit of two frames", "workers": n, "seconds": time.perf_counter() - begun},
            {"what": "their manifest", "workers": n, "bytes": (path / MANIFEST_NAME).stat().st_size},
        ]
    return rows


def main(quick: bool = False) -> None:
    """Write ``results/engines.csv``."""
    with tempfile.TemporaryDirectory(prefix="inshrink-commits-") as folder:
        shared = commits(Path(folder), (8, 32) if quick else PARTS)
    with tempfile.TemporaryDirectory(prefix="inshrink-engines-") as scratch:
        bench = Bench(Path(scratch), WIDTH, DEPTH, N_TOKENS)
        rows = [*measure(bench, 1 if quick else ROUNDS, (1, 4)), *shared]
    sys.stdout.write(f"{write('engines_quick' if quick else 'engines', rows)}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    main(parser.parse_args().quick)
