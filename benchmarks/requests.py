"""What reading an archive asks of a bucket.

``python -m benchmarks.requests`` makes an archive of 24 frames in one chain, 28 tensors each, and reads it
through a storage that counts requests and answers each after 30 ms: opening it, restoring its last step, and
reading one tensor of it; from a folder and packed. Beside it stands the same with one request at a time, as
of a disk, and restoring from the disk itself. Every way begins with nothing in memory.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import inshrink_core
from benchmarks.results import write
from inshrink_core.archive.packed import PackedStorage
from inshrink_core.archive.reader import ArchiveReader
from inshrink_core.archive.storage.blocks import CACHE
from inshrink_core.archive.storage.contract import Storage, Tag
from inshrink_core.archive.storage.registry import object_at
from inshrink_core.chain import Archive

N_FRAMES, N_WEIGHTS, WIDTH = 24, 7, 128
WAIT_S = 0.03
REPETITIONS, QUICK_REPETITIONS = 3, 1

_Answer = TypeVar("_Answer")


class CountingStorage(Storage):
    """Another storage, to read from as if it were far away.

    Parameters
    ----------
    under
        Where the objects lie.

    Notes
    -----
    `requests` and `bytes_read` are of what was asked through it. `round_trips` are how often somebody waited:
    once for requests that are made at the same time, as long as they are no more than `n_at_once`. What two
    threads ask each on its own counts twice, so there may be fewer.
    """

    writable = False

    def __init__(self, under: Storage) -> None:
        super().__init__(under.name)
        self._under, self.n_at_once = under, max(under.n_at_once, Storage.n_at_once)
        self.round_trips = 0
        self._within = threading.local()

    def answer(self, call: Callable[[], _Answer]) -> _Answer:
        """Return what one request is answered."""
        batch: list[None] | None = getattr(self._within, "batch", None)
        if batch is None:
            self._wait(1)
        else:
            batch.append(None)
        answer = call()
        content = answer[0] if isinstance(answer, tuple) else answer
        self.counted(content if isinstance(content, bytes) else b"")
        return answer

    def _wait(self, n_trips: int) -> None:
        with self._counting:
            self.round_trips += n_trips

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        return self.answer(partial(self._under.read, path, offset, nbytes))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        return self.answer(partial(self._under.size, path))

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        return self.answer(partial(self._under.names, folder))

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return all of a small object, and its tag."""
        return self.answer(partial(self._under.load, path))

    def together(self, calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        """Return what calls return, made at the same time."""
        batch: list[None] = []
        answers = super().together([partial(self._in_batch, batch, call) for call in calls])
        self._wait(-(-len(batch) // self.n_at_once))
        return answers

    def _in_batch(self, batch: list[None], call: Callable[[], _Answer]) -> _Answer:
        self._within.batch = batch
        try:
            return call()
        finally:
            self._within.batch = None


def counting_reader(
    storage: Storage, kind: type[CountingStorage] = CountingStorage
) -> tuple[ArchiveReader, CountingStorage]:
    """Open an archive once more, as from a bucket, and return what counts the requests."""
    if isinstance(storage, PackedStorage):
        around, name = object_at(storage.name)
        counting = kind(around)
        return ArchiveReader(PackedStorage(counting.open(name))), counting
    counting = kind(storage)
    return ArchiveReader(counting), counting


class FarStorage(CountingStorage):
    """Another storage, each request to which takes a while."""

    def answer(self, call: Callable[[], _Answer]) -> _Answer:
        time.sleep(WAIT_S)
        return super().answer(call)


class FarOneByOne(FarStorage):
    """The same for a reader that fetches nothing ahead."""

    def __init__(self, under: Storage) -> None:
        super().__init__(under)
        self.n_at_once = 1


def write_run(folder: Path) -> None:
    """Write checkpoints whose weights move a little from step to step, with both moments of Adam."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{i}.weight": 0.1 * torch.randn(WIDTH, 96 if i % 2 else 256, generator=generator)
        for i in range(N_WEIGHTS)
    }
    for step in range(1, N_FRAMES + 1):
        state = {}
        for number, weight in enumerate(weights.values()):
            moment = 1e-3 * torch.randn(weight.shape, generator=generator)
            weight += moment
            state[number] = {"step": torch.tensor(float(step)), "exp_avg": moment, "exp_avg_sq": moment**2}
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(range(N_WEIGHTS))}
        optimizer = {"state": state, "param_groups": [group]}
        torch.save({"model": weights, "optimizer": optimizer, "step": step}, folder / f"step_{step:04}.pt")


def opened(reader: ArchiveReader, scratch: Path) -> None:
    """Open it alone."""


def restored(reader: ArchiveReader, scratch: Path) -> None:
    """Restore the last step."""
    inshrink_core.restore(Archive(reader), scratch / "out", steps=[N_FRAMES], force=True, threads=1)


def one_tensor(reader: ArchiveReader, scratch: Path) -> None:
    """Read one tensor of the last step."""
    assert Archive(reader)[N_FRAMES]["layers.0.weight"].numel()


ACTS = {"open": opened, "restore the last step": restored, "read one tensor": one_tensor}


def measure_far(path: Path, kind: type[CountingStorage], act: str, scratch: Path) -> dict[str, object]:
    """Read an archive through a storage that counts and waits."""
    CACHE.clear()
    begun = time.perf_counter()
    reader, far = counting_reader(ArchiveReader.open(path).storage, kind)
    ACTS[act](reader, scratch)
    seconds = time.perf_counter() - begun
    return {
        "requests": far.requests,
        "round_trips": far.round_trips,
        "bytes": far.bytes_read,
        "seconds": seconds,
    }


def measure_near(path: Path, act: str, scratch: Path) -> dict[str, object]:
    """Read an archive from the disk."""
    begun = time.perf_counter()
    reader = ArchiveReader.open(path)
    ACTS[act](reader, scratch)
    return {"seconds": time.perf_counter() - begun, "bytes": reader.storage.bytes_read}


def middle(rows: list[dict[str, object]]) -> dict[str, object]:
    """Return the row of the middle of their seconds."""
    return sorted(rows, key=lambda row: row["seconds"])[len(rows) // 2]  # type: ignore[arg-type,return-value]


def main(quick: bool = False) -> Path:
    """Write ``results/requests.csv``."""
    repetitions = QUICK_REPETITIONS if quick else REPETITIONS
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        run, folder, packed = scratch / "run", scratch / "a.inshrink", scratch / "p.inshrink"
        run.mkdir()
        write_run(run)
        inshrink_core.compress(run, folder, threads=1, keyframe_every=N_FRAMES)
        inshrink_core.verbs.export(folder, pack=packed)
        restored(ArchiveReader.open(folder), scratch)  # loads the kernels
        for path, place in ((folder, "folder"), (packed, "packed")):
            for act in ACTS:
                ways: dict[str, Callable[[], dict[str, object]]] = {
                    "at once": lambda path=path, act=act: measure_far(path, FarStorage, act, scratch),
                    "one by one": lambda path=path, act=act: measure_far(path, FarOneByOne, act, scratch),
                    "disk": lambda path=path, act=act: measure_near(path, act, scratch),
                }
                found: dict[str, list[dict[str, object]]] = {way: [] for way in ways}
                for _ in range(repetitions):
                    for way, measure in ways.items():
                        found[way].append(measure())
                about = {"frames": N_FRAMES, "place": place, "act": act}
                rows += [about | {"way": way} | middle(some) for way, some in found.items()]
    return write("requests_quick" if quick else "requests", rows)


if __name__ == "__main__":
    print(main())
