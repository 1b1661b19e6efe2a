"""What the ranks of the tests of `torch.distributed.checkpoint` do: importable, for they are processes."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from inshrink_core.archive import ArchiveWriter, PartWriter, is_archive
from inshrink_core.archive.parts import SharedFrame
from inshrink_core.chain import Archive
from inshrink_core.errors import ConflictError
from inshrink_core.integrations.dcp import InshrinkReader, InshrinkWriter

EXACT = {"codec": "lossless", "optimizer": "exact"}

WIDTH = 512
"""Of the model: its largest weight has several cells."""

SMALL = 64
"""Of a model whose values do not matter."""

_PRELOADED = (
    "torch._dynamo",  # which the first optimizer imports
    "numba",
    "scipy.linalg",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "inshrink_core.integrations.dcp",
)


def _rank(rank, world, store, function, arguments):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(str(store), world))
    function(*arguments)
    dist.barrier()  # Gloo's threads let go of tensors before Python ends
    dist.destroy_process_group()


def on_ranks(world, folder, function, *arguments):
    """Run a function on ranks that see each other; raises what one of them raised, and ends the others."""
    store = folder / f"store-{len(list(folder.glob('store-*')))}"
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    torch.multiprocessing.start_processes(
        _rank, (world, store, function, arguments), nprocs=world, start_method="forkserver"
    )


class Training:
    """A model with its optimizer, sharded over a mesh; what a batch holds depends on the step alone."""

    def __init__(self, mesh=None, width=WIDTH):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.width, self.step = width, 0
        self.model = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 3), nn.BatchNorm1d(3)
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
        if "columns" in (mesh.mesh_dim_names or ()):
            from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

            parallelize_module(self.model[0], mesh["columns"], RowwiseParallel(input_layouts=Replicate()))
            mesh = mesh["rows"]
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, step):
        """Train up to a step."""
        while self.step < step:
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            batch = torch.randn(8, self.width, generator=generator)
            self.model(batch).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        # Not in the order of an archive:
        return {"optim": moments, "model": weights, "step": self.step, "name": "run"}

    def load(self, **options):
        state = self.state()
        dcp.load(state, **options)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.step = state["step"]

    def whole(self):
        """Return every tensor of the state, whole, by name."""
        found = {}

        def walk(name, value):
            if isinstance(value, dict):
                for key, inner in value.items():
                    walk(f"{name}.{key}" if name else str(key), inner)
            elif isinstance(value, torch.Tensor):
                found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()

        walk("", self.state())
        return found


def same(a, b):
    """Whether states are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save(state, writer, step, **options):
    dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}", **options)


def keep(whole, path):
    if dist.get_rank() == 0:
        torch.save(whole, path)


def train(archive, steps, load, grid, stored):
    """Train and save, from a step of the archive on; what is loaded must be what was kept."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")) if grid else None
    training = Training(mesh)
    if load is not None:
        training.load(storage_reader=InshrinkReader(archive, step=load))
        assert training.step == load
        assert same(training.whole(), torch.load(stored / f"{load}.pt"))
    writer = InshrinkWriter(archive, **EXACT)
    for step in steps:
        training.train(step)
        save(training.state(), writer, step)
        keep(training.whole(), stored / f"{step}.pt")


def load_folders(folder, stored, steps):
    training = Training()
    for step in steps:
        training.load(checkpoint_id=folder / f"checkpoint-{step}")
        assert same(training.whole(), torch.load(stored / f"{step}.pt"))


def train_on(archive, last, stored, kill=None):
    """Train on from the last step of the archive, saving each; a rank may be killed at its second save."""
    training, resumed = Training(width=SMALL), is_archive(archive)
    if resumed:
        training.load(storage_reader=InshrinkReader(archive))
    writer = InshrinkWriter(archive, **EXACT, resumed_from=training.step if resumed else None)
    while training.step < last:
        training.train(training.step + 1)
        if training.step == 2 and kill is not None and kill[1] == dist.get_rank():
            _die_at(kill[0])
        save(training.state(), writer, training.step)
    keep(training.whole(), stored)


def with_environment(variables, function, *arguments):
    """Call a function with variables that the parent of all ranks did not have."""
    os.environ.update(variables)
    function(*arguments)


POINTS = {
    "before the plan": (InshrinkWriter, "prepare_local_plan", True),
    "planned": (InshrinkWriter, "_described", True),
    "before writing": (InshrinkWriter, "write_data", True),
    "before its part has its name": (PartWriter, "_publish", True),
    "after its part has its name": (PartWriter, "_publish", False),
    "before the commit": (InshrinkWriter, "finish", True),
    "before the manifest": (ArchiveWriter, "write_manifest", True),
    "after the manifest": (ArchiveWriter, "write_manifest", False),
    "after the commit": (InshrinkWriter, "finish", False),
    "before the frame is listed": (SharedFrame, "commit", True),
    "after the frame is listed": (SharedFrame, "commit", False),
}
"""Of the protocol: what is called there, and whether a rank is killed before it or after."""


def _die_at(point):
    owner, name, before = POINTS[point]
    called = getattr(owner, name)

    def dies(*args, **options):
        if not before:
            called(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dies)


def differ(folder):
    """Save what no save may be, on two ranks; after each, all is as before, and a save goes on."""
    rank, archive = dist.get_rank(), folder / "a"
    mesh = init_device_mesh("cpu", (2,))

    def state(seed, rows=64, dtype=torch.float32):
        torch.manual_seed(seed)
        return {"model": {"weight": distribute_tensor(torch.randn(rows, 8).to(dtype), mesh, [Shard(0)])}}

    writer = InshrinkWriter(archive, **EXACT)
    save(state(1), writer, 1)

    def refused(words, act, kind=CheckpointException):
        with pytest.raises(kind, match=words):
            act()
        assert Archive.open(archive).steps == tuple(done), words

    done = [1]
    refused("rank 1 saves with another step", lambda: save(state(2), writer, 2 + rank), ConflictError)
    other = InshrinkWriter(archive, **EXACT, keyframe_every=8 + rank)
    refused("another keyframe_every", lambda: save(state(2), other, 2), ConflictError)
    refused(
        "another tensor 'model.weight'",
        lambda: save(state(2, dtype=(torch.float32, torch.float64)[rank]), writer, 2),
    )
    refused("global plan|another tensor", lambda: save(state(2, rows=64 + 2 * rank), writer, 2))
    refused("does not follow step 1", lambda: save(state(2), writer, 1))
    publish = PartWriter._publish
    if rank == 1:
        PartWriter._publish = _fails
    refused("out of luck", lambda: save(state(2), writer, 2))
    PartWriter._publish = publish
    save(state(2), writer, 2)
    done.append(2)
    # Another training, after which the first one must not go on:
    save(state(3), InshrinkWriter(archive, **EXACT), 3)
    done.append(3)
    refused("another training", lambda: save(state(4), writer, 4))
    began = time.monotonic()
    hasty, last = InshrinkWriter(archive, **EXACT, timeout=2), state(4)
    if rank == 0:
        refused("rank 1 did not come", lambda: save(last, hasty, 4), ConflictError)
        assert time.monotonic() - began < 60


def _fails(*args, **options):
    raise RuntimeError("out of luck")


def save_aside(folder):
    """Save as `save` does, on a thread and in a process, and beside an optimizer that is dropped."""
    training = Training(width=SMALL)
    kinds = {"sync": None, "thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
    writers = {name: InshrinkWriter(folder / name, **EXACT) for name in kinds}
    dropped = InshrinkWriter(folder / "dropped", codec="lossless", optimizer="drop")
    for step in (1, 2, 3):
        training.train(step)
        for name, kind in kinds.items():
            options = {"storage_writer": writers[name], "checkpoint_id": f"step-{step}"}
            if kind is None:
                dcp.save(training.state(), **options)
            else:
                dcp.async_save(training.state(), async_checkpointer_type=kind, **options).result()
        save(training.state(), dropped, step, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    keep(training.whole(), folder / "whole.pt")


def save_behind(archive, gate, stored):
    """Train on while the store takes no part of a save; then it does, and that step is there."""
    training, group = Training(width=SMALL), dist.new_group(backend="gloo")
    writer = InshrinkWriter(archive, **EXACT, process_group=group)
    training.train(1)
    save(training.state(), writer, 1, process_group=group)
    training.train(2)
    expected = training.whole()
    if dist.get_rank() == 0:
        gate.touch()
    dist.barrier()
    options = {"storage_writer": writer, "process_group": group, "checkpoint_id": "step-2"}
    begun = time.monotonic()
    saved = dcp.async_save(training.state(), **options)
    returned = time.monotonic() - begun
    training.train(6)
    time.sleep(1)
    assert not saved.done()
    assert Archive.open(archive).steps == (1,)
    dist.barrier()
    gate.unlink(missing_ok=True)
    saved.result()
    assert time.monotonic() - begun > returned + 1
    assert Archive.open(archive).steps == (1, 2)
    assert training.step == 6
    training.load(storage_reader=InshrinkReader(archive, step=2))
    assert same(training.whole(), expected)
    keep(expected, stored)


def save_aligned(folder, settings):
    """Save a tensor with each of the settings, into archives of their names.

    Its shards are whole cells on 1, 2 and 4 ranks; it moves in few directions. On 2 another session
    saves the last step.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, how in settings.items():
        _save_aligned(mesh, folder / name, {**how, "optimizer": "compressed"})


def _save_aligned(mesh, archive, how):
    writer = InshrinkWriter(archive, **how)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(8, 512, generator=generator) / 3
    value, moment = torch.randn(2048, 512, generator=generator) * 0.02, torch.zeros(2048, 512)
    for step in (1, 2, 3):
        change = torch.randn(2048, 8, generator=generator) @ directions
        change += 0.1 * torch.randn(2048, 512, generator=generator)
        value, moment = value + 1e-3 * change, 0.9 * moment + 0.1 * change
        weight, average = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (value, moment))
        state = {"one.weight": {"exp_avg": average, "step": torch.tensor(float(step))}}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": ["one.weight"]}]
        if step == 3 and mesh.size() == 2:
            writer = InshrinkWriter(archive, **how)
        optim = {"state": state, "param_groups": groups}
        save({"model": {"one.weight": weight}, "optim": optim}, writer, step)


def _of_two_ranks(step):
    torch.manual_seed(step)
    mesh = init_device_mesh("cpu", (2,))
    return {"model": {"weight": distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)])}}


def overtaken(archive):
    """Save while another training lists a frame: the save fails on every rank, and so does each after it."""
    writer = InshrinkWriter(archive, **EXACT)
    save(_of_two_ranks(1), writer, 1)
    publish = PartWriter._publish
    if dist.get_rank() == 0:

        def late(self, file, info):
            PartWriter._publish = publish
            other = InshrinkWriter(archive, **EXACT, no_dist=True)
            save({"model": {"weight": torch.zeros(64, 8)}}, other, 2, no_dist=True)
            publish(self, file, info)

        PartWriter._publish = late
    with pytest.raises(CheckpointException, match="another writer"):
        save(_of_two_ranks(2), writer, 2)
    with pytest.raises(CheckpointException, match="another training"):
        save(_of_two_ranks(3), writer, 3)


def fail_once(archive):
    """Save while one part cannot be uploaded."""
    from datetime import timedelta

    from inshrink_core.archive.storage import objects

    objects._RETRY = {**objects._RETRY, "max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    objects._N_ATTEMPTS = 1
    writer = InshrinkWriter(archive, **EXACT)
    save(_of_two_ranks(1), writer, 1)
    with pytest.raises(CheckpointException, match="overloaded"):
        save(_of_two_ranks(2), writer, 2)
    assert Archive.open(archive).steps == (1,)
    save(_of_two_ranks(3), writer, 3)
