"""What the ranks of the tests of process groups do: importable, for they are processes."""

import logging
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from inshrink_core.errors import ConflictError, InputError
from inshrink_core.integrations.dcp import InshrinkWriter

VALUES = torch.arange(16.0)


class Saves:
    """The saves of one archive, of rising steps; each holds `VALUES` times its step."""

    def __init__(self, archive, group=None, mesh=None, **options):
        self._step, self._mesh = 0, mesh
        self._options = {"process_group": group, "no_dist": options.get("no_dist", False)}
        self.writer = InshrinkWriter(archive, codec="lossless", **{"timeout": 60, **self._options, **options})

    def _next(self):
        self._step += 1
        values = VALUES * self._step
        if self._mesh is not None:  # without communication: some ranks come later
            rows = values.chunk(self._mesh.size())[self._mesh.get_local_rank()]
            shape, stride = values.shape, values.stride()
            values = DTensor.from_local(
                rows, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
        options = {"storage_writer": self.writer, "checkpoint_id": f"step-{self._step}", **self._options}
        return {"model": {"w": values}}, options

    def save(self, **more):
        state, options = self._next()
        dcp.save(state, **options, **more)

    def start(self):
        state, options = self._next()
        return dcp.async_save(state, **options)


def save_among_groups(folder):
    """Save on four ranks, between things that some of them do without the others."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    row = mesh.get_group("columns")
    if rank < 2:
        Saves(folder / "first row", row).save()
    # A group that some ranks make is named after how many there are: saves do not count.
    dist.barrier(dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True))

    every = Saves(folder / "every")
    every.save()
    dist.new_group([0])
    embedding = dist.new_group([0, 3])
    every.save()

    if rank == 0:  # writers and saves that the others do not have
        for name in ("alone", "alone too"):
            alone = Saves(folder / name, no_dist=True)
            alone.save()
            alone.save()
    if rank in (0, 2):
        [Saves(folder / f"unused {number}") for number in range(1 + rank)]
    every.save()
    second = Saves(folder / "second")
    second.save()

    ends = Saves(folder / "ends", embedding) if rank in (0, 3) else None
    for _ in range(2):
        if ends is not None:
            ends.save()
        every.save()

    for name in ("columns", "rows"):
        group = mesh.get_group(name)
        part = Saves(folder / f"{name} {min(dist.get_process_group_ranks(group))}", group, mesh[name])
        part.save()
        part.save()
    every.save()

    gone = dist.new_group([0, 1])
    if rank < 2:
        dist.destroy_process_group(gone)
    every.save()

    pair, all_again = dist.new_group([1, 3]), dist.new_group([0, 1, 2, 3])
    behind = [Saves(folder / "behind all", all_again)]
    if rank in (1, 3):
        behind.append(Saves(folder / "behind pair", pair))
    for _ in range(2):
        begun = [saves.start() for saves in (behind if rank < 2 else behind[::-1])]
        every.save()
        for item in begun:
            item.result()
    second.save()


class Acts(dcp.DefaultSavePlanner):
    """A planner that does something before it gives what a rank writes."""

    def __init__(self, act):
        super().__init__()
        self._act = act

    def resolve_data(self, write_item):
        self._act()
        return super().resolve_data(write_item)


def missing(error):
    """Return the ranks that a message says are missing."""
    found = re.findall(r"((?:rank \d+(?:, )?)+) (?:did not come to|stopped answering in) ", str(error))
    return set(found)


def refuse(saves, match, **options):
    """Save, and return the failure of this rank, which must be a conflict."""
    with pytest.raises((CheckpointException, ConflictError)) as caught:
        saves.save(**options)
    error = caught.value
    if isinstance(error, CheckpointException):
        error = error.failures[dist.get_rank()][0]
    assert isinstance(error, ConflictError)
    assert re.search(match, str(error)), error
    return error


def miss_a_rank(folder):
    """Save on three ranks, one of which is missing, in one way after the other; then all save."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3,))
    hasty = Saves(folder / "b", mesh=mesh, timeout=4)
    hasty.save()
    late = Acts(lambda: time.sleep(6 if rank == 1 else 0))
    error = refuse(hasty, "(in|to) the exchange of objects of save step-2", planner=late)
    assert missing(error) == {"rank 1"}, error
    hasty.save()

    if rank == 1:  # comes when the others have given up
        time.sleep(6)
    refuse(hasty, "rank 1 did not come to save step-4: rank [02] waited 4 s there")
    dist.barrier()
    hasty.save()

    unconnected = Saves(folder / "c", timeout=3)
    connect = dist.ProcessGroupGloo
    if rank == 1:
        dist.ProcessGroupGloo = _no_interface
    error = refuse(
        unconnected, "the ranks lost each other in the connection of save step-1 .*rank 1: no interf"
    )
    assert not missing(error)
    dist.ProcessGroupGloo = connect
    dist.barrier()
    unconnected.save()


def _no_interface(*args):
    raise RuntimeError("no interface")


def end_within_a_save(folder):
    """Save on three ranks, of which one ends; the log says which, for DCP's own exchange fails, too."""
    rank, lines = dist.get_rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("inshrink_core").addHandler(handler)
    saves = Saves(folder / "a", mesh=init_device_mesh("cpu", (3,)))
    saves.save()

    def act():
        if rank == 1:
            threading.Timer(0.5, os._exit, (0,)).start()
        elif rank == 2:
            time.sleep(2)

    with pytest.raises(RuntimeError):
        saves.save(planner=Acts(act))
    assert f"rank 1 stopped answering in the exchange of objects of save step-2: rank {rank}" in lines[0]
    os._exit(0)  # no barrier is left that all ranks come to


def save_outside_of_the_group(folder):
    """Save on a rank that is not in the writer's group."""
    group = dist.new_group([0])
    saves = Saves(folder / "a", group)
    if dist.get_rank() == 0:
        saves.save()
    else:
        with pytest.raises(InputError, match="this rank is not in the process group"):
            saves.writer.reset("step-1")
