"""Prove that a change of the code changes no bytes: ``python -m benchmarks.parity [--write] [PART ...]``.

Runs the command line on the bundled sample and on two generated runs: every codec, every optimizer preset,
overrides, bounds, branches, exports, packs, prunes, and every verb that reads; and on
every public layout, on what two ranks and DeepSpeed save, in a bucket, and on what is refused. What comes
out is reduced to digests: SHA-256 of every file of an archive and of every restored or exported one, of
every ``--json`` document without its times and places, and, by frame, of all its blocks and of all the values
it decodes to. Of a layout there are five: of the document of ``compress``, and over all files or frames of
the archive's files, the blocks, the values, and the restored files. Of a refusal there is one, of its exit
code, of the keys of the document and of the place that its error names, without its words.
``--write`` records them in ``results/parity.txt``; without it they are compared with what is there, and each
difference is a line and exit code 1.

The identity of an archive is random, and all its frames bear it, so the system's random bytes are fixed here.
Numbers in documents are compared to six digits: evaluators multiply matrices, and the last bits of that are
not the same on every processor.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import inshrink_core
from benchmarks import bucket as server
from benchmarks.results import RESULTS
from inshrink_core.chain import Archive, tensor_digest
from inshrink_core.chain.config import OPTIMIZER_CHOICES
from inshrink_core.cli import main as inshrink

CODECS = ("lattice", "inshrinkerator", "lossless", "lc-checkpoint", "excp", "qd", "uniform", "context")

RECORD = RESULTS / "parity.txt"

_CHANGING = frozenset(
    {"seconds", "train_seconds", "restored_seconds", "save_seconds", "mb_per_s", "bytes_read", "device"}
)
"""Keys of documents that hold times, what depends on how often a file is looked at, or on the machine."""

_DATES = frozenset({"measured_at"})
"""Keys of documents that say when something was measured: the day is left out, that it was measured stays."""

_DIGITS = 6
_SEED = 7

_CONFIG = """
codec = "lattice"
keyframe_every = 3
[settings]
coarseness = 3
[[override]]
match = "head*"
coarseness = 1
[[override]]
layer_type = "embedding"
gamma = 0
"""

_EVALUATOR = '''
import torch

def evaluate(state_dict):
    """Judge a state by how far a fixed random map of it lies from where the last one lay."""
    total = sum(float(t.double().square().mean()) for t in state_dict.values() if t.is_floating_point())
    generator = torch.Generator().manual_seed(3)
    head = state_dict["head.weight"].double()
    logits = torch.randn(64, head.shape[1], generator=generator, dtype=torch.float64) @ head.T
    return {"loss": 1 + total, "log_probs": logits.log_softmax(-1).float()}
'''

_TASK = """
import torch

class Tiny:
    name, version, metric, direction = "tiny", 1, "loss", "lower"
    n_steps, n_saves, n_restores, max_gradient_norm = 40, 8, 3, None

    def build(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def learning_rate_factor(self, step, n_steps):
        return 1 - step / n_steps

    def batch(self, step, generator):
        inputs = torch.randn(32, 8, generator=generator)
        return inputs, inputs.abs().argmax(-1) % 4

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def judged(self, model):
        inputs, labels = self.batch(0, torch.Generator().manual_seed(1))
        rows = model(inputs).log_softmax(1)
        return {"loss": self.loss(model, (inputs, labels)), "log_probs": rows}

    def evaluate(self, model):
        return float(self.judged(model)["loss"])
"""


_DEEPSPEED = Path(__file__).parents[1] / "tests" / "formats" / "deepspeed"
_STEPS = (10, 20)

_BAD_EVALUATOR = "def evaluate(state):\n    raise ValueError('no data')\n"


class Parity:
    """Runs commands in a scratch folder and keeps a digest of everything that comes out."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.found: dict[str, str] = {}

    def run(self, name: str, *words: str | Path, code: int | None = 0) -> None:
        """Run a verb and keep its document. Without a `code` any will do: errors are in the document."""
        ended, document = _run_verb(words)
        if code is not None and ended != code:
            raise RuntimeError(f"{name}: exit code {ended}, expected {code}: {document.get('error')}")
        self.found[f"{name} document"] = digest(self._plain(document))

    def refuse(self, name: str, *words: str | Path) -> None:
        """Run a verb that does not end with 0, and keep its exit code and what its error names."""
        code, document = _run_verb(words)
        if not code or "error" not in document:
            raise RuntimeError(f"{name}: exit code {code} without an error")
        error = document["error"]
        where = error["where"].replace(str(self.scratch), "SCRATCH")
        facts = {"keys": ",".join(sorted(document)), "where": where, "code": str(error["exit_code"])}
        self.found[f"{name} exit-{code}"] = digest(facts)

    def files(self, name: str, folder: Path) -> None:
        """Keep a digest of every file below a folder, or of one file."""
        paths = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
        for path in paths:
            if path.name == "lock":
                continue
            where = path.name if path == folder else path.relative_to(folder).as_posix()
            self.found[f"{name} {where}"] = hashlib.sha256(path.read_bytes()).hexdigest()

    def archive(self, name: str, path: Path) -> None:
        """Keep digests of an archive's files, and of what its frames hold however they are written."""
        self.files(name, path)
        archive = Archive.open(path)
        for info in archive.reader.frames:
            blocks, values = hashlib.sha256(), hashlib.sha256()
            for entry in archive.frame(info).entries:
                payload = archive.frame(info).read(entry)
                blocks.update(f"{entry.key}\0{entry.attachment}\0{len(payload)}\0".encode() + payload)
            checkpoint = archive.checkpoint(info)
            for spec in checkpoint.specs:
                values.update(f"{spec.key}\0".encode() + tensor_digest(checkpoint.source.read(spec)))
            where = f"{name} {info.generation}-{info.step}"
            self.found[f"{where} blocks"] = blocks.hexdigest()
            self.found[f"{where} values"] = values.hexdigest()

    def _plain(self, value: Any) -> Any:
        """Return a document without times and places, its numbers rounded."""
        if isinstance(value, dict):
            known = {key: item for key, item in value.items() if key not in _CHANGING}
            return {key: key if key in _DATES and item else self._plain(item) for key, item in known.items()}
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, str):
            return value.replace(str(self.scratch), "SCRATCH").replace(str(sample()), "SAMPLE")
        if isinstance(value, float) and math.isfinite(value):
            return float(f"{value:.{_DIGITS}g}")
        return value


def _run_verb(words: Iterable[str | Path]) -> tuple[int, dict[str, Any]]:
    """Run a verb with ``--json``; return its exit code and its document."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = inshrink([*map(str, words), "--json"])
    return code, json.loads(out.getvalue())


def digest(document: Any) -> str:
    """Return the digest of a document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def judge(run: Path) -> tuple[str, ...]:
    """Return the options that name the evaluator of a generated run."""
    return ("--evaluator", f"{run / 'judge.py'}:evaluate", "--eval-metric", "loss", "--direction", "lower")


def sample() -> Path:
    """Return the run that comes with Inshrink."""
    return Path(inshrink_core.sample("digits-cnn"))


def _state(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return weights of a small language model: every layer type, several dtypes, a tied head."""
    shapes = {
        "tok.weight": (96, 32),
        "blocks.0.attn.qkv.weight": (96, 32),
        "blocks.0.mlp.fc.weight": (128, 32),
        "blocks.0.norm.weight": (32,),
        "conv.weight": (8, 4, 3, 3),
        "head.weight": (96, 32),
    }
    state = {
        name: torch.from_numpy(rng.normal(0, 0.05, shape).astype(np.float32))
        for name, shape in shapes.items()
    }
    state["half.weight"] = torch.from_numpy(rng.normal(0, 0.1, (64, 48)).astype(np.float32)).bfloat16()
    state["quarter.weight"] = torch.from_numpy(rng.normal(0, 0.1, (64, 16)).astype(np.float32)).half()
    state["bn.running_mean"] = torch.zeros(8)
    state["bn.num_batches_tracked"] = torch.tensor(0)
    return state


def _moved(state: dict[str, Tensor], rng: np.random.Generator, step: int) -> dict[str, Tensor]:
    """Return where a training might have taken the weights: a drift and a little noise."""
    moved = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            moved[name] = torch.tensor(step)
            continue
        change = rng.normal(0, 0.05 / math.sqrt(step), tensor.shape).astype(np.float32)
        moved[name] = (tensor.float() + torch.from_numpy(change) * 0.1).to(tensor.dtype)
    return moved


def torch_run(folder: Path, steps: range, seed: int = _SEED) -> Path:
    """Write torch files of a training with AdamW, its state and its learning rate among them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    state = _state(rng)
    names = [name for name, tensor in state.items() if tensor.is_floating_point() and "running" not in name]
    for step in steps:
        state = _moved(state, rng, step)
        moments = {
            i: {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.from_numpy(rng.normal(0, 1e-3, state[name].shape).astype(np.float32)),
                "exp_avg_sq": torch.from_numpy(rng.gamma(0.5, 1e-6, state[name].shape).astype(np.float32)),
            }
            for i, name in enumerate(names)
        }
        group = {"lr": 1e-3 / step, "betas": (0.9, 0.99), "params": list(range(len(names)))}
        saved = {"model": dict(state), "optimizer": {"state": moments, "param_groups": [group]}, "step": step}
        saved["model"]["alias.weight"] = state["tok.weight"]
        saved["model"]["view.weight"] = state["head.weight"].t()
        torch.save(saved, folder / f"step_{step:04d}.pt")
    (folder / "judge.py").write_text(_EVALUATOR)
    return folder


def sharded_run(folder: Path, steps: range) -> Path:
    """Write Hugging Face directories: two safetensors shards, an index, side files."""
    rng = np.random.default_rng(_SEED + 1)
    state = _state(rng)
    for step in steps:
        state = _moved(state, rng, step)
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        names, files = sorted(state), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        shards = {
            file: {name: state[name].contiguous() for name in names[i::2]} for i, file in enumerate(files)
        }
        for file, tensors in shards.items():
            save_file(tensors, checkpoint / file, metadata={"format": "pt"})
        where = {name: file for file, tensors in shards.items() for name in tensors}
        (checkpoint / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where})
        )
        (checkpoint / "config.json").write_text(json.dumps({"model_type": "parity"}))
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def _archived(parity: Parity, name: str, run: Path, *options: str | Path) -> Path:
    """Compress a run, then look at the archive with every verb that reads one."""
    archive = parity.scratch / f"{name.replace(' ', '-')}.inshrink"
    parity.run(f"{name} compress", "compress", run, "-o", archive, *options)
    parity.archive(f"{name} archive", archive)
    parity.run(f"{name} inspect", "inspect", archive, "--tensors")
    left_out = int("--steps" in options)  # what the run holds beside them is missing, and verify says so
    parity.run(f"{name} verify", "verify", archive, "--deep", "--against", run, code=left_out)
    _restored(parity, name, archive)
    return archive


def _restored(parity: Parity, name: str, archive: Path) -> None:
    """Restore every step of an archive."""
    out = parity.scratch / f"{name.replace(' ', '-')}-restored"
    parity.run(f"{name} restore", "restore", archive, "--all", "-o", out)
    parity.files(f"{name} restored", out)
    shutil.rmtree(out)


def codecs(parity: Parity) -> None:
    """Every codec on every run."""
    options = ("--optimizer", "exact", "--keyframe-every", "3")
    for run in _runs(parity):
        for codec in CODECS:
            _archived(parity, f"{run.name} {codec}", run, "--codec", codec, *options)


def optimizers(parity: Parity) -> None:
    """Every optimizer preset, and what is taken where nothing is said."""
    run = _runs(parity)[0]
    _archived(parity, "default", run)
    for optimizer in OPTIMIZER_CHOICES:
        _archived(parity, f"optimizer {optimizer}", run, "--optimizer", optimizer)


def settings(parity: Parity) -> None:
    """Overrides, and settings of the two codecs that have many."""
    run = _runs(parity)[0]
    config = parity.scratch / "config.toml"
    config.write_text(_CONFIG)
    _archived(parity, "overrides", run, "--config", config)
    _archived(parity, "gamma 0", run, "--set", "gamma=0", "--coarseness", "4")
    published = ("--set", "bins=16", "--set", "prune=0.1", "--set", "protect=0.01")
    _archived(parity, "published", run, "--codec", "inshrinkerator", *published)


def bounds(parity: Parity) -> None:
    """Chains under a bound, the search, estimates and comparisons."""
    run = _runs(parity)[0]
    bound = ("--max-drop", "0.001", *judge(run))
    for codec in ("lattice", "inshrinkerator"):
        archive = _archived(parity, f"bound {codec}", run, "--codec", codec, *bound)
        parity.run(f"bound {codec} compare", "compare", archive, "--against", run, *judge(run))
    parity.run("search", "search", run, *bound, "-o", parity.scratch / "search.json")
    parity.run("estimate", "estimate", run, "--set", "coarseness=4")
    parity.run("bench", "bench", run, "--codecs", "lattice,uniform", *judge(run))
    archive = _archived(parity, "sample", sample(), "--steps", "100:400")
    parity.run("compare sample", "compare", archive, "--against", sample(), "--trust-run")


def branches(parity: Parity) -> None:
    """A restore, a branch, and what goes on from it."""
    first = torch_run(parity.scratch / "first", range(1, 7))
    archive = _archived(parity, "trunk", first, "--keyframe-every", "4")
    second = torch_run(parity.scratch / "second", range(4, 8), seed=_SEED + 2)
    parity.run("branch compress", "compress", second, "-o", archive, "--resumed-from", "3")
    parity.archive("branch archive", archive)
    parity.run("branch inspect", "inspect", archive)
    _restored(parity, "branch", archive)
    words = ("prune", archive, "--keep-last", "2", "--keep-every", "3")
    parity.run("prune plan", *words)
    parity.run("prune", *words, "--apply")
    parity.archive("pruned archive", archive)


def exports(parity: Parity) -> None:
    """One step in a file, a whole archive in a file, other formats, some tensors."""
    archive = _archived(parity, "exported", _runs(parity)[0], "--coarseness", "2")
    for name, *options in (("weights", "--weights-only"), ("exact", "--weights-only", "--exact"), ("whole",)):
        target = parity.scratch / f"{name}.inshrink"
        parity.run(f"export {name}", "export", archive, "--step", "3", "-o", target, *options)
        parity.archive(f"export {name}", target)
    packed, unpacked = parity.scratch / "packed.inshrink", parity.scratch / "unpacked.inshrink"
    parity.run("pack", "export", archive, "--pack", packed)
    parity.archive("pack", packed)
    parity.run("packed verify", "verify", packed, "--deep")
    parity.run("unpack", "export", packed, "--unpack", unpacked)
    parity.archive("unpack", unpacked)
    for kind in ("safetensors", "torch"):
        out, name = parity.scratch / f"as-{kind}", f"restore {kind}"
        parity.run(name, "restore", archive, "--format", kind, "--tensors", "blocks*", "-o", out)
        parity.files(name, out)


def trainings(parity: Parity) -> None:
    """What the saver writes of trainings that are restored again and again."""
    task = parity.scratch / "task.py"
    task.write_text(_TASK)
    short = ("--restores", "3", "--seeds", "1", "--keep-archives")
    ways = {"default": (), "lossless": ("--codec", "lossless"), "bound": ("--max-drop", "0.01")}
    for name, options in ways.items():
        out = parity.scratch / name
        parity.run(f"rehearse {name}", "rehearse", f"{task}:Tiny", "-o", out, *short, *options)
        for archive in sorted(out.rglob("*.inshrink")):
            parity.archive(f"rehearse {name} {archive.name}", archive)


def looks(parity: Parity) -> None:
    """The verbs that only look."""
    for run in _runs(parity):
        parity.run(f"{run.name} inspect", "inspect", run, "--tensors")
        for metric in ("magnitude", "update"):
            parity.run(f"{run.name} {metric}", "sensitivity", run, "--metric", metric)
    words = ("sensitivity", _runs(parity)[0], "--by", "layer_type")
    for metric in ("fisher", "taylor"):
        parity.run(f"adamw {metric}", *words, "--metric", metric)


def _summary(parity: Parity, name: str, archive: Path, *, is_fixed: bool = True) -> None:
    """Restore an archive, and keep digests of what it is, of what it holds and of what comes out."""
    of_files, of_frames, of_verb = (Parity(parity.scratch) for _ in range(3))
    of_files.files("", archive)
    of_frames.archive("", archive)
    if is_fixed:
        parity.found[f"{name} archive"] = digest(of_files.found)
    for kind in ("blocks", "values"):
        rows = {key: found for key, found in of_frames.found.items() if key.endswith(f" {kind}")}
        parity.found[f"{name} {kind}"] = digest(rows)
    out = parity.scratch / "restored"
    of_verb.run("", "restore", archive, "--all", "-o", out)
    of_verb.files("", out)
    parity.found[f"{name} restored"] = digest(of_verb.found)
    shutil.rmtree(out)


def _reduced(parity: Parity, name: str, run: Path, *options: str, code: int | None = 0) -> None:
    """Compress a run, and keep the digests of it."""
    archive = parity.scratch / f"{name.replace(' ', '-')}.inshrink"
    parity.run(f"{name} compress", "compress", run, "-o", archive, *options, code=code)
    if archive.exists():
        _summary(parity, name, archive)


def layouts(parity: Parity) -> None:
    """Every public layout with the default codecs."""
    from tests.formats.layouts.table import TABLE

    for layout in TABLE:
        run = parity.scratch / "runs" / layout.name
        with contextlib.chdir(parity.scratch):  # DCP notes the path
            layout.write(run.relative_to(parity.scratch))
        if layout.is_readable:
            _reduced(parity, layout.name, run, code=None)  # 1 where something of it cannot be read
        else:
            parity.refuse(layout.name, "inspect", run)
        shutil.rmtree(run)


def deepspeed(parity: Parity) -> None:
    """What DeepSpeed wrote, exactly and with the default codecs."""
    for run in sorted(path for path in _DEEPSPEED.iterdir() if (path / "latest").exists()):
        parity.run(f"{run.name} inspect", "inspect", run, "--tensors")
        _reduced(parity, run.name, run)
        _reduced(parity, f"{run.name} exact", run, "--codec", "lossless", "--optimizer", "exact")


def _train(rank: int, world: int, folder: Path) -> None:
    """Train on several ranks, and save folders of DCP and archives of the writer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from inshrink_core.integrations.dcp import InshrinkWriter

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), world)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, store=store)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writers = {
        "default": InshrinkWriter(folder / "default.inshrink"),
        "exact": InshrinkWriter(folder / "exact.inshrink", codec="lossless", optimizer="exact"),
    }
    for step in _STEPS:
        model(torch.randn(8, 48, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": step}
        with fixed_randomness(), contextlib.chdir(folder):  # DCP notes a random name, and the path
            dcp.save(state, checkpoint_id=f"run/step-{step}")
        for writer in writers.values():
            dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}")
    torch.distributed.barrier()  # Gloo's threads let go of tensors before Python ends
    torch.distributed.destroy_process_group()


def ranks(parity: Parity) -> None:
    """Folders of DCP that two ranks saved, and archives that two ranks wrote."""
    torch.multiprocessing.spawn(_train, (2, parity.scratch), nprocs=2)
    parity.run("folders inspect", "inspect", parity.scratch / "run", "--tensors")
    _reduced(parity, "folders", parity.scratch / "run")
    for name in ("default", "exact"):
        archive = parity.scratch / f"{name}.inshrink"
        parity.run(f"writer {name} inspect", "inspect", archive, "--tensors")
        _summary(parity, f"writer {name}", archive, is_fixed=False)  # ranks draw its identity
    archive, out = parity.scratch / "exact.inshrink", parity.scratch / "dcp"
    parity.run("writer restore dcp", "restore", archive, "--format", "dcp", "-o", out)
    parity.files("writer restore dcp", out)


def bucket(parity: Parity) -> None:
    """An archive in a bucket of S3: written, appended to, read, pruned."""
    run, url = torch_run(parity.scratch / "run", range(1, 6)), f"s3://{server.NAME}/runs/a.inshrink"
    waiting = mock.patch.dict(os.environ, {"INSHRINK_WAITING": str(parity.scratch / "waiting")})
    with waiting, server.running() as store:

        def objects(name: str) -> None:
            for key, content in store.objects.items():
                parity.found[f"{name} {key}"] = hashlib.sha256(content).hexdigest()

        words = ("compress", run, "-o", url, "--keyframe-every", "3")
        parity.run("compress", *words, "--steps", "1:3")
        parity.run("append", *words)
        objects("written")
        parity.run("inspect", "inspect", url, "--tensors")
        parity.run("verify", "verify", url, "--deep", "--against", run)
        parity.run("restore", "restore", url, "--all", "-o", parity.scratch / "out")
        parity.files("restored", parity.scratch / "out")
        parity.run("export", "export", url, "--pack", parity.scratch / "packed.inshrink")
        parity.files("export", parity.scratch / "packed.inshrink")
        parity.run("prune", "prune", url, "--keep-last", "2", "--apply")
        objects("pruned")


def refusals(parity: Parity) -> None:
    """What is refused, and with which exit code."""
    scratch = parity.scratch
    run, archive = torch_run(scratch / "run", range(1, 5)), scratch / "a.inshrink"
    parity.run("archive", "compress", run, "-o", archive)
    content = (run / "step_0002.pt").read_bytes()
    copies = {name: shutil.copytree(run, scratch / name) for name in ("cut", "empty", "rotten", "pickle")}
    (copies["cut"] / "step_0002.pt").write_bytes(content[: len(content) // 2])
    (copies["empty"] / "step_0002.pt").write_bytes(b"")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    (copies["rotten"] / "step_0002.pt").write_bytes(flipped)
    torch.save({"model": Path("/")}, copies["pickle"] / "step_0002.pt")
    for name, folder in copies.items():
        parity.refuse(f"{name} compress", "compress", folder, "-o", scratch / f"{name}.inshrink")
        parity.refuse(f"{name} verify", "verify", archive, "--against", folder)
    for name in ("bit", "short", "gone"):
        folder = shutil.copytree(archive, scratch / f"{name}-archive")
        frame = sorted((folder / "frames").iterdir())[1]
        damaged = bytearray(frame.read_bytes())
        if name == "gone":
            frame.unlink()
            parity.refuse(f"{name} inspect", "inspect", folder)
        else:
            damaged[len(damaged) // 2] ^= 1
            frame.write_bytes(damaged if name == "bit" else damaged[:-9])
        parity.refuse(f"{name} verify", "verify", folder, "--deep")
        parity.refuse(f"{name} restore", "restore", folder, "-o", scratch / "out")
    (scratch / "bad.py").write_text(_BAD_EVALUATOR)
    (scratch / "request.json").write_text('{"verb": "compress", "fields": {"colour": "red"}}')
    (scratch / "file").write_text("no archive")
    evaluator, out = f"{scratch / 'bad.py'}:evaluate", scratch / "out"
    for name, *words in (
        ("no verb", "compres", run),
        ("no option", "inspect", run, "--colour"),
        ("no run", "inspect", scratch / "nothing"),
        ("no output", "compress", run),
        ("no step of the run", "compress", run, "-o", out, "--steps", "9"),
        ("no codec", "compress", run, "-o", out, "--codec", "none"),
        ("no setting", "compress", run, "-o", out, "--set", "colour=1"),
        ("no value", "compress", run, "-o", out, "--set", "coarseness=-1"),
        ("no optimizer", "compress", run, "-o", out, "--optimizer", "none"),
        ("no config", "compress", run, "-o", out, "--config", scratch / "nothing.toml"),
        ("no base", "compress", run, "-o", out, "--base", scratch / "nothing"),
        ("no archive", "restore", run, "-o", out),
        ("a file as archive", "inspect", scratch / "file"),
        ("no step of the archive", "restore", archive, "-o", out, "--step", "9"),
        ("no tensor", "restore", archive, "-o", out, "--tensors", "nothing*"),
        ("no room", "restore", archive, "-o", out, "--max-disk", "1kB"),
        ("no memory", "restore", archive, "-o", out, "--max-memory", "1kB"),
        ("files exist", "restore", archive, "--all", "-o", run),
        ("nothing to export", "export", archive),
        ("nothing to keep", "prune", archive),
        ("no request", "run", scratch / "request.json"),
        ("no evaluator", "evaluate", run, "--evaluator", scratch / "nothing.py:evaluate"),
        ("a failing evaluator", "evaluate", run, "--evaluator", evaluator),
        ("a broken bound", "compare", archive, "--against", run, *judge(run), "--max-drop", "1e-9"),
        ("no bucket", "inspect", "nowhere://bucket/a.inshrink"),
        ("secrets", "inspect", "s3://user:secret@bucket/a.inshrink"),
    ):
        parity.refuse(name, *words)


PARTS = {
    part.__name__: part
    for part in (
        *(codecs, optimizers, settings, bounds, branches, exports, trainings, looks),
        *(layouts, deepspeed, ranks, bucket, refusals),
    )
}
"""The parts of the record by name."""


def _runs(parity: Parity) -> tuple[Path, Path]:
    """Return the two generated runs, made when first asked for."""
    adamw, sharded = parity.scratch / "adamw", parity.scratch / "sharded"
    if not adamw.exists():
        torch_run(adamw, range(1, 7))
        sharded_run(sharded, range(10, 60, 10))
    return adamw, sharded


def fixed_randomness() -> AbstractContextManager[Any]:
    """Make what the system calls random the same in every run."""
    return mock.patch("os.urandom", hashlib.shake_256(b"parity").digest)


def measure(parts: list[str]) -> dict[str, str]:
    """Return the digests of some parts, by name."""
    found: dict[str, str] = {}
    torch.set_num_threads(1)
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="inshrink-parity-") as scratch, fixed_randomness():
            parity = Parity(Path(scratch))
            PARTS[part](parity)
            found |= {f"{part}: {name}": digest for name, digest in parity.found.items()}
        sys.stderr.write(f"{part}: {len(parity.found)} digests\n")
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return a line for each name whose digest is another, is new, or is gone."""
    lines = [f"gone: {name}" for name in before.keys() - after.keys()]
    lines += [f"new: {name}" for name in after.keys() - before.keys()]
    lines += [f"differs: {name}" for name in before.keys() & after.keys() if before[name] != after[name]]
    return sorted(lines)


def main() -> int:
    """Measure, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="by default all")
    parser.add_argument("--write", action="store_true", help="record the digests in place of comparing them")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file to write or compare with")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    found = measure(parts)
    text = arguments.record.read_text() if arguments.record.exists() else ""
    known = dict(line.rsplit(" ", 1) for line in text.splitlines())
    of_parts = {name: digest for name, digest in known.items() if name.partition(":")[0] in parts}
    if arguments.write:
        rows = {**{name: d for name, d in known.items() if name not in of_parts}, **found}
        arguments.record.write_text("".join(f"{name} {digest}\n" for name, digest in sorted(rows.items())))
        return 0
    lines = differences(of_parts, found)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stderr.write(f"{len(found)} digests, {len(lines)} differences\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
