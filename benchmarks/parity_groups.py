"""Further groups of `benchmarks.parity`: layouts, several ranks, DeepSpeed, a bucket, refusals.

Of each run there are five digests, over all files or frames: the document of ``compress``, the archive's
files, the blocks and the values of its frames, and the restored files. Of a refusal there is one, of its exit
code, of the keys of the document and of the place that its error names, without its words.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import warnings
from pathlib import Path
from unittest import mock

import torch

from benchmarks import bucket as server
from benchmarks.parity import Parity, digest, fixed_randomness, judge, torch_run

_DEEPSPEED = Path(__file__).parents[1] / "tests" / "formats" / "deepspeed"
_STEPS = (10, 20)

_BAD_EVALUATOR = "def evaluate(state):\n    raise ValueError('no data')\n"


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


def _archived(parity: Parity, name: str, run: Path, *options: str, code: int | None = 0) -> None:
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
            _archived(parity, layout.name, run, code=None)  # 1 where something of it cannot be read
        else:
            parity.refuse(layout.name, "inspect", run)
        shutil.rmtree(run)


def deepspeed(parity: Parity) -> None:
    """What DeepSpeed wrote, exactly and with the default codecs."""
    for run in sorted(path for path in _DEEPSPEED.iterdir() if (path / "latest").exists()):
        parity.run(f"{run.name} inspect", "inspect", run, "--tensors")
        _archived(parity, run.name, run)
        _archived(parity, f"{run.name} exact", run, "--codec", "lossless", "--optimizer", "exact")


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
    _archived(parity, "folders", parity.scratch / "run")
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


GROUPS = (layouts, deepspeed, ranks, bucket, refusals)
