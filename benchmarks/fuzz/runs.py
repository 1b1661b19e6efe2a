"""Tiny training runs, and archives of them in every shape that archives have."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import save

import inshrink_core
from benchmarks.fuzz import scratch, zero
from benchmarks.fuzz.target import BrokenPromiseError
from inshrink_core.codec import weight_codecs
from inshrink_core.verbs.export import export

STEPS: Final = (10, 20, 30)
Files = dict[str, bytes]


def state_at(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the state of a training of a few dozen numbers; steps move it a little."""
    noise = torch.Generator().manual_seed(step)
    start = torch.Generator().manual_seed(0)

    def moving(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=start) + 0.01 * torch.randn(shape, generator=noise)).to(dtype)

    model = {
        "fc.weight": moving(4, 6),
        "fc.bias": torch.zeros(4, dtype=dtype),
        "norm.num_batches_tracked": torch.tensor(step),
    }
    first, second = moving(4, 6), moving(4, 6).square()
    moments = {0: {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0, 1]}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [group]}, "step": step}


def save_torch_run(folder: Path, steps: tuple[int, ...] = STEPS, dtype: torch.dtype = torch.float32) -> Path:
    """Write a run of torch files."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        torch.save(state_at(step, dtype), folder / f"step_{step}.pt")
    return folder


def save_safetensors_run(folder: Path, steps: tuple[int, ...] = STEPS) -> Path:
    """Write a run of safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        save_file(state_at(step)["model"], folder / f"step_{step}.safetensors", metadata={"step": str(step)})
    return folder


def save_directories(root: Path, steps: tuple[int, ...] = STEPS) -> Path:
    """Write a run of folders: shards with their index, optimizer, trainer state, config."""
    for step in steps:
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        state = state_at(step)
        names = sorted(state["model"])
        places: dict[str, str] = {}
        for number, part in enumerate((names[:2], names[2:]), 1):
            shard = f"model-{number:05d}-of-00002.safetensors"
            save_file(
                {name: state["model"][name] for name in part}, folder / shard, metadata={"format": "pt"}
            )
            places |= dict.fromkeys(part, shard)
        index = {"metadata": {"total_size": 300}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        torch.save(state["optimizer"], folder / "optimizer.pt")
        history = [{"step": at, "loss": 1.0 / at, "epoch": at / 10} for at in range(10, step + 1, 10)]
        trainer = {"global_step": step, "log_history": history}
        (folder / "trainer_state.json").write_text(json.dumps(trainer))
        (folder / "config.json").write_text('{"model_type": "tiny", "hidden_size": 4}')
    (root / "inshrink.toml").write_text('[evaluator]\nfile = "evaluator.py"\nmetric = "loss"\n')
    return root


def save_distributed_run(folder: Path, steps: tuple[int, ...] = STEPS) -> Path:
    """Write a run of distributed checkpoints."""
    with same_ids("distributed"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        for step in steps:
            save(state_at(step)["model"], checkpoint_id=folder / f"step-{step}", no_dist=True)
    return folder


LAYOUTS: Final[dict[str, Callable[[Path, tuple[int, ...]], Path]]] = {
    "torch": save_torch_run,
    "safetensors": save_safetensors_run,
    "folders": save_directories,
    "distributed": save_distributed_run,
    "zero": zero.save_run,
    "zero3": partial(zero.save_run, stage=3),
}


@cache
def run_files(layout: str, steps: tuple[int, ...] = STEPS) -> Files:
    """Return the files of a tiny run; not to be changed."""
    return files_of(LAYOUTS[layout](scratch.absent(f"run-{layout}"), steps))


def files_of(path: Path) -> Files:
    """Return every file of a folder, by its path in it; of a file, itself under its own name."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    found = sorted(p for p in path.rglob("*") if p.is_file() and p.name != "lock")
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in found}


SPECIAL: Final = b"\0special:"
"""What stands for something that is no file, by its kind."""

SPECIAL_KINDS: Final = (b"pipe", b"folder", b"device", b"file outside", b"folder outside")


def write_files(folder: Path, files: Files) -> None:
    """Write files where they belong, and what stands for no file as that."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith(SPECIAL):
            _put_special(path, content.removeprefix(SPECIAL))
        else:
            path.write_bytes(content)


def _put_special(path: Path, kind: bytes) -> None:
    if kind == b"pipe":
        os.mkfifo(path)
    elif kind == b"folder":
        path.mkdir()
    else:
        target = {b"device": Path("/dev/zero"), b"file outside": outside() / "precious.tmp"}
        path.symlink_to(target.get(kind, outside()))


def special(rng: random.Random, name: str, files: Files) -> Files:
    """Return the files with something in the place of one, or of a folder of them, that is no file."""
    left = {path: data for path, data in files.items() if path != name and not path.startswith(f"{name}/")}
    left = {path: data for path, data in left.items() if not name.startswith(f"{path}/")}
    return left | {name: SPECIAL + rng.choice(SPECIAL_KINDS)}


def outside() -> Path:
    """Return a folder that links lead to: nothing in it may ever change."""
    folder = scratch.root() / str(os.getpid()) / "outside"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for name in _PRECIOUS:
            (folder / name).write_bytes(b"precious")
    return folder


_PRECIOUS: Final = ("precious.tmp", ".precious.tmp", "lock", "00000001-10.frame", "inshrink-manifest")


def require_outside_untouched() -> None:
    """Raise BrokenPromiseError where a link was followed that leads out of what was written."""
    found = {path.name: path.read_bytes() for path in outside().iterdir()}
    if found != dict.fromkeys(_PRECIOUS, b"precious"):
        shutil.rmtree(outside())
        raise BrokenPromiseError("nothing behind a link is written or deleted", f"{sorted(found)}")


@contextlib.contextmanager
def same_ids(name: str) -> Iterator[None]:
    """Have ids the same in every process, so that a case can be replayed by its number."""
    with mock.patch("os.urandom", random.Random(name).randbytes):
        yield


Make = Callable[[Path, Path], object]
"""Makes an archive of a run: takes the run, and the path of the archive."""


def _compressed(codec: str, **options: Any) -> Make:
    return partial(inshrink_core.compress, codec=codec, **options)


def _branched(run: Path, path: Path) -> None:
    inshrink_core.compress(run, path, steps=STEPS[:2], codec="lossless")
    other = save_torch_run(path.with_name("branched"), (STEPS[2],))
    inshrink_core.compress(other, path, steps=(STEPS[2],), resumed_from=STEPS[0])


def _pruned(run: Path, path: Path) -> None:
    inshrink_core.compress(run, path, codec="lattice", optimizer="compressed")
    inshrink_core.verbs.prune(path, keep=STEPS[1:], apply=True)


def _rekeyed(run: Path, path: Path) -> None:
    inshrink_core.compress(run, path, codec="inshrinkerator", keyframe_every=2)
    inshrink_core.verbs.prune(path, keep_last=1, apply=True)


def _exported(run: Path, path: Path) -> None:
    inshrink_core.compress(run, path.with_name("whole.inshrink"))
    export(path.with_name("whole.inshrink"), path, weights_only=True)


def _segments(run: Path, path: Path) -> None:
    with mock.patch("inshrink_core.archive.segment.MAX_SMALL_FILES", 1):
        inshrink_core.compress(run, path, steps=STEPS[:2], codec="lattice")
    inshrink_core.compress(run, path, codec="lattice")


def _packed(run: Path, path: Path) -> None:
    inshrink_core.compress(run, path.with_name("unpacked.inshrink"), codec="lattice")
    export(path.with_name("unpacked.inshrink"), pack=path)


@cache
def archives() -> dict[str, Files]:
    """Return the files of every archive, by a name that says what is special about it."""
    folder = scratch.fresh("seeds")
    torch_run = save_torch_run(folder / "torch")
    half_run = save_torch_run(folder / "half", dtype=torch.bfloat16)
    shards = save_directories(folder / "shards")
    makers: dict[str, tuple[Make, Path]] = {
        codec: (_compressed(codec), torch_run) for codec in weight_codecs()
    }
    makers |= {
        "moments": (_compressed("lattice", optimizer="compressed"), torch_run),
        "half": (_compressed("lattice", optimizer="compact"), half_run),
        "keyframes": (_compressed("lattice", keyframe_every=1), torch_run),
        "shards": (_compressed("lattice", optimizer="drop"), shards),
        "whole-shards": (_compressed("lossless"), shards),
        "branched": (_branched, torch_run),
        "pruned": (_pruned, torch_run),
        "rekeyed": (_rekeyed, torch_run),
        "exported": (_exported, torch_run),
        "segments": (_segments, torch_run),
        "packed": (_packed, torch_run),
    }
    found = {}
    for name, (make, run) in makers.items():
        path = scratch.fresh(f"seeds-{name}") / f"{name}.inshrink"
        with same_ids(name):
            make(run, path)
        found[name] = files_of(path)
    return found
