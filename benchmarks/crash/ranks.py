"""Two ranks of a training that save themselves: one is killed at a point of a save, and both start again.

A point is the beginning or the end of a call of the protocol: where the ranks meet, each of their exchanges,
the writing of a part, and what the first of them does for all. After each kill the other rank must end, by
itself and with an error that says why; what was committed must be there; and the training, started again
from it, must end with the bits of one that was not interrupted.
"""

from __future__ import annotations

import importlib
import os
import posix
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import inshrink_core
from benchmarks.crash.cases import Child, Outcome
from benchmarks.crash.judging import Expected, digests, judge_archive
from benchmarks.crash.modes import Case
from inshrink_core.archive import ArchiveReader, ArchiveWriter, PartWriter, commit_parts, is_archive
from inshrink_core.errors import ConflictError, InshrinkError
from inshrink_core.integrations import dcp as dcp_writer
from inshrink_core.integrations.dcp import InshrinkReader, InshrinkWriter
from inshrink_core.integrations.dcp_ranks import Ranks

N_RANKS, LAST, STRUCK = 2, 3, 2
ROWS, COLUMNS = 6, 8

CALLS: Final = (
    (InshrinkWriter, "reset"),
    (Ranks, "meet"),
    (Ranks, "gathered"),
    (InshrinkWriter, "prepare_global_plan"),
    (InshrinkWriter, "write_data"),
    (PartWriter, "begin"),
    (PartWriter, "_publish"),
    (PartWriter, "suspend"),
    (ArchiveWriter, "write_manifest"),
    (InshrinkWriter, "finish"),
)
"""What a save consists of."""

PATIENCE_S: Final = 2.0
"""How long a rank waits for one that does not come."""

EXPECTED_ERRORS: Final = (InshrinkError, CheckpointException, RuntimeError)
"""Ours, DCP's, and those of the training's own collectives, which end with the rank."""


class Kill(NamedTuple):
    """Which rank is killed, and at which of its points."""

    rank: int
    at: int


class _Training:
    """A weight in shards and a number, which change with each step and with what they were before."""

    def __init__(self) -> None:
        self.step, self._mesh = 0, init_device_mesh("cpu", (N_RANKS,))
        self._rows = slice(*(ROWS * rank // N_RANKS for rank in (dist.get_rank(), dist.get_rank() + 1)))
        self.weight, self.scale = torch.zeros(ROWS, COLUMNS)[self._rows], torch.ones(1)

    def train(self) -> None:
        self.step += 1
        move = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(self.step))
        self.weight, self.scale = 0.9 * self.weight + move[self._rows] * self.scale, self.scale * 1.01

    def state(self) -> dict[str, Any]:
        weight = DTensor.from_local(self.weight, self._mesh, [Shard(0)], run_check=False)
        return {"model": {"fc.weight": weight, "scale": self.scale}, "step": self.step}

    def load(self, archive: Path) -> None:
        state = self.state()
        dcp.load(state, storage_reader=InshrinkReader(archive, threads=1))
        self.weight, self.step = state["model"]["fc.weight"].to_local(), state["step"]


def _train(training: _Training, archive: Path) -> None:
    """Train and save until the last step, from what is there on."""
    resumed = is_archive(archive) and bool(ArchiveReader.open(archive).listed)
    if resumed:
        training.load(archive)
    options: dict[str, Any] = {"codec": "lossless", "optimizer": "exact", "threads": 1, "timeout": PATIENCE_S}
    writer = InshrinkWriter(archive, **options, resumed_from=training.step if resumed else None)
    while training.step < LAST:
        training.train()
        dcp.save(training.state(), storage_writer=writer, checkpoint_id=f"step-{training.step}")


def _watch(found: list[str], at: int | None, is_struck: Callable[[], bool]) -> None:
    """Note every point of one save that is come to, and end the process at one of them."""

    def point(name: str) -> None:
        if is_struck():
            found.append(name)
            if len(found) == at:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched(owner: type, name: str) -> None:
        called = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            point(f"{name} begins")
            value = called(*arguments, **options)
            point(f"{name} ends")
            return value

        setattr(owner, name, call)

    for owner, name in CALLS:
        watched(owner, name)


def _rank(rank: int, folder: Path, store: Path, at: int | None) -> dict[str, Any]:
    """Be a rank, and return what came of it."""
    warnings.simplefilter("ignore")
    os.environ["LOCAL_WORLD_SIZE"] = str(N_RANKS)
    os.urandom = posix.urandom  # two attempts have not the same ids
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=N_RANKS,
        store=dist.FileStore(str(store), N_RANKS),
        timeout=timedelta(seconds=20),
    )
    points: list[str] = []

    try:
        training = _Training()
        if at is not None:
            _watch(points, at, lambda: training.step == STRUCK)
        _train(training, folder / "a")
        dist.barrier()
    except BaseException as error:  # whatever it is, it is reported
        ended = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if not isinstance(error, EXPECTED_ERRORS):
            return {"ended": "", "problem": f"untyped: rank {rank}: {ended}"}
        return {"ended": ended}
    return {"ended": "done", "points": points}


def _on_ranks(folder: Path, kill: Kill | None, *, log: bool = False) -> list[dict[str, Any]]:
    """Fork the ranks, and return what came of each."""
    store, children = folder / f"store-{len(list(folder.glob('store-*')))}", []
    for rank in range(N_RANKS):
        at = 0 if log else kill.at if kill is not None and kill.rank == rank else None
        children.append(Child.start(partial(_rank, rank, folder, store, at)))
    outcomes = [child.answer() for child in children]
    for rank, outcome in enumerate(outcomes):
        if "hung" in outcome:
            outcome |= {"ended": "", "problem": f"untyped: rank {rank} hangs"}
        elif "died" in outcome:
            outcome["ended"] = "killed"
    return outcomes


@dataclass
class RankStage:
    """The training, its undisturbed end, and the folder that its cases run in."""

    root: Path
    expected: Expected = field(default_factory=Expected)
    points: list[list[str]] = field(default_factory=list)

    @property
    def n_operations(self) -> int:
        """Points of all ranks."""
        return sum(map(len, self.points))

    def open(self) -> None:
        """Run it undisturbed, and note its points."""
        folder = self._fresh()
        self._warm(folder / "warm")
        outcomes = _on_ranks(folder, None, log=True)
        if any(outcome["ended"] != "done" for outcome in outcomes):
            raise RuntimeError(f"the ranks fail undisturbed: {outcomes}")
        self.points = [outcome["points"] for outcome in outcomes]
        self.expected = Expected(digests(folder / "a"), inshrink_core.Archive.open(folder / "a").steps)

    def _warm(self, archive: Path) -> None:
        """Save and load here, so that no rank has to import or compile anything."""
        if "triton" not in sys.modules:  # it complains when Python ends
            sys.modules["triton"] = None  # type: ignore[assignment]
        importlib.import_module("torch._dynamo")
        state = {"model": {"fc.weight": torch.randn(ROWS, COLUMNS), "scale": torch.ones(1)}, "step": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in (1, 2):
                writer = InshrinkWriter(archive, codec="lossless", optimizer="exact", threads=1, no_dist=True)
                dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}", no_dist=True)
            dcp.load(state, storage_reader=InshrinkReader(archive, threads=1), no_dist=True)
            digests(archive)

    def _fresh(self) -> Path:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        return self.root

    def kills(self, random: Random, point: str = "") -> Iterator[Case]:
        """Kill each rank at each of its points of the second save, or at those of a name, in random order."""
        kills = [
            Kill(rank, at)
            for rank, points in enumerate(self.points)
            for at, name in enumerate(points, 1)
            if point in name
        ]
        random.shuffle(kills)
        for kill in kills:
            name = f"rank {kill.rank} killed at point {kill.at}, {self.points[kill.rank][kill.at - 1]}"
            yield Case(name, self._killed(kill))

    def _killed(self, kill: Kill) -> Outcome:
        folder = self._fresh()
        archive, outcomes = folder / "a", _on_ranks(folder, kill)
        problems = [outcome["problem"] for outcome in outcomes if "problem" in outcome]
        if outcomes[kill.rank]["ended"] != "killed":
            problems.append(f"wrong: rank {kill.rank} was not killed: {outcomes[kill.rank]['ended']}")
        problems += judge_archive(archive, self.expected, tuple(range(1, STRUCK)))
        if not problems:
            again = _on_ranks(folder, None)
            problems += [
                outcome.get("problem", f"refused: rank {rank}: {outcome['ended']}")
                for rank, outcome in enumerate(again)
                if outcome["ended"] != "done"
            ]
            problems += judge_archive(archive, self.expected, self.expected.final)
            problems += self._left_over(archive)
        return Outcome(tuple(problems), 1, (), outcomes[1 - kill.rank]["ended"])

    def _left_over(self, archive: Path) -> Iterator[str]:
        """Yield files that no later save removes."""
        listed = {file.path for frame in ArchiveReader.open(archive).listed for file in frame.files}
        there = {path.relative_to(archive).as_posix() for path in archive.rglob("*.*") if path.is_file()}
        yield from (f"leftover: {path}" for path in sorted(there - listed) if path.startswith("frames/"))


def parts_kept() -> AbstractContextManager[Any]:
    """A training that does not give up what the ranks of an earlier one have written."""
    return mock.patch.object(dcp_writer, "commit_parts", lambda path, discard=False: commit_parts(path))


def silent_failure() -> AbstractContextManager[Any]:
    """A rank that takes the end of another one for an answer."""
    gathered = Ranks.gathered

    def answered(ranks: Ranks, make: Callable[[], Any], what: str) -> Any:
        try:
            return gathered(ranks, make, what)
        except ConflictError as error:
            raise OSError from error

    return mock.patch.object(Ranks, "gathered", answered)


RANK_PLANTS: Final = {
    "parts-kept": (parts_kept, "_publish begins"),
    "silent-failure": (silent_failure, "gathered begins"),
}
"""Defects that killing ranks must find, and at which points."""
