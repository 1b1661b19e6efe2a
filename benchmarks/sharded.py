"""What a sharded training pays for saving itself: cells, another number of ranks, reads, and the wait.

Ranks on gloo hold 4.2 million weights and AdamW's moments, which walk at random; the codec is the default.
Rows of ``results/sharded.csv``:

- *cells*: bytes of a delta in cells over those of the same delta with each rank's shard in one block.
- *resharded*: bytes of the first save of another number of ranks over those of a delta of theirs. On 4
  ranks, shards are whole cells; on 3 they are not.
- *read*: bytes that a rank reads to load its shards over those of the blocks that hold them, along the chain.
- *meta*: bytes of a part's meta, where each rank has as many cells, over those with one rank.
- *exchanges*, *checked*: how often ranks exchange something in a save, beside what DCP does, without a check
  and with one whose coarseness stays; and the bytes that the first rank gives.
- *observed*: of each cell of all ranks, the bytes that every rank is told of it, and the seconds of a
  processor to read that and to plan.
- *async*: seconds until ``async_save`` (on a thread) returns over those of ``save``; medians, interleaved.
- *async, bucket*: the same into a bucket of a server (moto) that takes a second longer for each part. Needs
  obstore and ``moto[server]``; ``--bucket`` measures this row alone, and keeps the others.
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.results import renew, write
from inshrink_core.archive.document import pack_value
from inshrink_core.chain import Archive, parts
from inshrink_core.checkpoint import Box, TensorRole, TensorSpec
from inshrink_core.codec import FrameContext, TensorInput, get_codec
from inshrink_core.integrations.dcp import InshrinkReader, InshrinkWriter
from inshrink_core.integrations.dcp_ranks import Ranks

LAYERS, WIDTH = 4, 1024
N_CELLS = 1024
STEPS, MORE, ROUNDS = 4, 2, 5
TARGETS = {"cells": 1.01, "resharded": 1.5, "read": 1.1, "async": 0.1, "async, bucket": 0.1, "meta": 1.1}
_PART_S = 1.0


def state_at(step: int) -> dict[str, Any]:
    """Return this rank's shards of the state of a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    for layer in range(LAYERS):
        generator = torch.Generator().manual_seed(layer)
        weight, first, second = torch.randn(3, WIDTH, WIDTH, generator=generator) * 0.02
        second = second.square()
        for _ in range(step):
            gradient = torch.randn(WIDTH, WIDTH, generator=generator)
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient.square()
            weight = weight - 1e-4 * first / (second.sqrt() + 1e-8)
        name = f"layers.{layer}.weight"
        weights[name] = distribute_tensor(weight, mesh, [Shard(0)])
        moments[name] = {
            "step": torch.tensor(float(step)),
            "exp_avg": distribute_tensor(first, mesh, [Shard(0)]),
            "exp_avg_sq": distribute_tensor(second, mesh, [Shard(0)]),
        }
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "params": list(weights)}]
    return {"model": weights, "optim": {"state": moments, "param_groups": groups}}


def save(archive: Path, first: int, n_steps: int, cell: int = parts.CELL_NUMEL) -> None:
    """Save some steps on these ranks, after those that are there."""
    parts.CELL_NUMEL = cell  # type: ignore[misc]
    writer = InshrinkWriter(archive)
    for step in range(first, first + n_steps):
        dcp.save(state_at(step), storage_writer=writer, checkpoint_id=f"step-{step}")


def load(archive: Path, step: int, found: Path) -> None:
    """Load a step, and note what each rank reads and which blocks hold that."""
    reader, state = InshrinkReader(archive, step=step), state_at(0)
    dcp.load(state, storage_reader=reader)
    opened = Archive.open(archive)
    info = opened.reader.find(step)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = range(rank * WIDTH // world, (rank + 1) * WIDTH // world)
    held = 0
    for frame_info in opened.reader.chain(info.frame_id):
        frame = opened.frame(frame_info)
        for entry in frame.entries:
            if not entry.attachment and _overlaps(entry.attributes, rows):
                held += entry.nbytes
    torch.save((reader._archive.reader.bytes_read, held), found / f"{rank}.pt")


def _overlaps(attributes: tuple[Any, ...], rows: range) -> bool:
    """Whether a block holds some rows of its tensor."""
    if len(attributes) < 6:
        return True
    begin = attributes[5][1][0]
    return bool(begin < rows.stop and begin + attributes[2][0] > rows.start)


def wait(archive: str, found: Path, variables: dict[str, str]) -> None:
    """Save in turns, waiting and not, and note how long training waits."""
    os.environ |= variables
    writers = {name: InshrinkWriter(f"{archive}/{name}") for name in ("save", "async_save")}
    waits: dict[str, list[float]] = {name: [] for name in writers}
    for step in range(ROUNDS + 1):
        state = state_at(step)
        for name, writer in writers.items():
            dist.barrier()
            begun = time.perf_counter()
            done = getattr(dcp, name)(state, storage_writer=writer, checkpoint_id=f"step-{step}")
            waits[name].append(time.perf_counter() - begun)
            if name == "async_save":
                done.result()
    if dist.get_rank() == 0:
        # The first save loads kernels and joins the ranks.
        torch.save({name: statistics.median(seconds[1:]) for name, seconds in waits.items()}, found / "w.pt")


def grow(folder: Path) -> None:
    """Save a model that has as many cells a rank however many ranks there are; note what is exchanged."""
    world, mesh = dist.get_world_size(), init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Module()
    weight = torch.randn(WIDTH * world, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.02
    model.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    given: list[int] = []
    gathered = Ranks.gathered

    def counted(ranks: Ranks, make: Callable[[], Any], what: str) -> Any:
        def made() -> Any:
            given.append(0)
            value = make()
            given[-1] = len(pickle.dumps(value))
            return value

        return gathered(ranks, made, what)

    Ranks.gathered = counted  # type: ignore[method-assign]

    def check(asked: torch.nn.Module) -> torch.Tensor:
        rows = asked.weight.to_local()[:64]
        return torch.nn.functional.mse_loss(rows, torch.zeros_like(rows))

    found = {}
    for name, options in (("exchanges", {}), ("checked", {"model": model, "check": check})):
        writer = InshrinkWriter(folder / name, **options)
        for step in range(STEPS):
            move = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)) * 2e-3
            with torch.no_grad():
                model.weight += distribute_tensor(move, mesh, [Shard(0)])
            given.clear()
            moments = {
                "step": torch.tensor(float(step)),
                "exp_avg": distribute_tensor(move, mesh, [Shard(0)]),
                "exp_avg_sq": distribute_tensor(move.square(), mesh, [Shard(0)]),
            }
            groups = [{"lr": 2e-3, "betas": (0.9, 0.999), "params": ["weight"]}]
            optimizer = {"state": {"weight": moments}, "param_groups": groups}
            state = {"model": {"weight": model.weight}, "optim": optimizer}
            dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}")
        found[name] = (len(given), sum(given))
    Ranks.gathered = gathered  # type: ignore[method-assign]
    if dist.get_rank() == 0:
        reader = Archive.open(folder / "exchanges").reader
        meta = reader.frame(reader.find(STEPS - 1).frame_id).meta_of(world - 1)
        found["meta"] = (len(pack_value(meta)), 0)
        torch.save(found, folder / "found.pt")


def _rank(rank: int, world: int, store: Path, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(str(store), world))
    act(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world: int, folder: Path, act: Callable[..., None], *arguments: Any) -> None:
    """Have so many processes do the same together."""
    store = folder / f"store-{len(list(folder.glob('store-*')))}"
    torch.multiprocessing.start_processes(
        _rank, (world, store, act, arguments), nprocs=world, start_method="forkserver"
    )


def blocks(archive: Path, step: int) -> int:
    """Return the bytes of a step's frame."""
    return int(Archive.open(archive).reader.find(step).nbytes)


def grown(folder: Path, add: Callable[[str, str, float, float, str], None]) -> None:
    """Measure what grows with the ranks, and what does not."""
    first = {}
    for world in (1, 2, 4, 8):
        (folder / f"grow-{world}").mkdir()
        on_ranks(world, folder, grow, folder / f"grow-{world}")
        found = torch.load(folder / f"grow-{world}" / "found.pt")
        meta, _ = found.pop("meta")
        first.setdefault("meta", meta)
        add("meta", str(world), meta, first["meta"], "bytes")
        for name, (n_exchanges, nbytes) in found.items():
            add(name, str(world), n_exchanges, 1, "times")
            add(f"{name}, bytes", str(world), nbytes, 1, "bytes")


def planned(add: Callable[[str, str, float, float, str], None]) -> None:
    """Measure what a rank does for each cell of all ranks: it reads what was observed of it, and plans."""
    whole = TensorSpec(
        name="layers.0.attention.weight",
        role=TensorRole.WEIGHT,
        dtype="float32",
        shape=(N_CELLS * parts.CELL_NUMEL // WIDTH, WIDTH),
    )
    specs = [cell for cell, _ in parts.cells_of(whole, Box((0, 0), whole.shape))]
    codec = get_codec("lattice")()
    tensor = torch.randn(specs[0].shape, generator=torch.Generator().manual_seed(0))
    seen = codec.observe(TensorInput(spec=specs[0], tensor=tensor), None)
    rows = pickle.dumps(
        [(spec, seen._replace(probe=seen.probe[:-1] + bytes([at % 256]))) for at, spec in enumerate(specs)]
    )
    seconds: dict[str, list[float]] = {"read": [], "planned": []}
    for _ in range(ROUNDS):
        begun = time.process_time()
        told = pickle.loads(rows)
        read = time.process_time()
        codec.plan(*zip(*told, strict=True), FrameContext())
        seconds["planned"].append(time.process_time() - read)
        seconds["read"].append(read - begun)
    add("observed, bytes", "", len(rows), len(specs), "bytes")
    for name, found in seconds.items():
        add(f"observed, {name}", "", statistics.median(found), len(specs), "seconds")


def measure(folder: Path) -> list[dict[str, object]]:
    """Return the rows."""
    rows: list[dict[str, object]] = []

    def add(what: str, ranks: str, value: float, base: float, unit: str) -> None:
        rows.append(
            {"what": what, "ranks": ranks, "unit": unit, "value": value, "of": base, "ratio": value / base}
            | {"target": TARGETS.get(what, "") if (what, ranks) != ("resharded", "2 to 3") else ""}
        )
        print(rows[-1], flush=True)

    last = STEPS - 1
    on_ranks(2, folder, save, folder / "cells", 0, STEPS)
    on_ranks(2, folder, save, folder / "shards", 0, STEPS, 1 << 40)
    add("cells", "2", blocks(folder / "cells", last), blocks(folder / "shards", last), "bytes")
    for world in (2, 4, 1):
        on_ranks(world, folder, load, folder / "cells", last, folder)
        for rank in range(world):
            add("read", f"{world}, rank {rank}", *torch.load(folder / f"{rank}.pt"), "bytes")
    for world in (4, 3, 1):
        archive = folder / f"to-{world}"
        on_ranks(2, folder, save, archive, 0, STEPS)
        on_ranks(world, folder, save, archive, STEPS, MORE)
        add("resharded", f"2 to {world}", blocks(archive, STEPS), blocks(archive, STEPS + 1), "bytes")
    grown(folder, add)
    planned(add)
    (folder / "wait").mkdir()
    on_ranks(2, folder, wait, f"{folder}/wait", folder, {})
    waits = torch.load(folder / "w.pt")
    add("async", "2", waits["async_save"], waits["save"], "seconds")
    rows.append(into_bucket(folder))
    return rows


def into_bucket(folder: Path) -> dict[str, object]:
    """Return the row of a bucket."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.integrations.servers import KEYS, Proxy, make_bucket, moto

    def rule(number: int, method: str, path: str) -> None:
        if method == "PUT" and ".frame" in path:
            time.sleep(_PART_S)

    with moto() as address, Proxy(address, rule) as proxy:
        make_bucket(address, "bench")
        variables = {**KEYS, "AWS_ENDPOINT_URL": proxy.address, "INSHRINK_WAITING": f"{folder}/waiting"}
        on_ranks(2, folder, wait, "s3://bench/a", folder, variables)
    waits = torch.load(folder / "w.pt")
    row = {"what": "async, bucket", "ranks": "2", "unit": "seconds", "value": waits["async_save"]}
    row |= {"of": waits["save"], "ratio": waits["async_save"] / waits["save"]}
    print(row, flush=True)
    return row | {"target": TARGETS["async, bucket"]}


def main() -> None:
    """Measure, and write the table."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "inshrink_core.integrations.dcp"])
    with tempfile.TemporaryDirectory() as folder:
        if "--bucket" in sys.argv:
            renew("sharded", [into_bucket(Path(folder))], ["what", "ranks"])
        else:
            write("sharded", measure(Path(folder)))


if __name__ == "__main__":
    main()
