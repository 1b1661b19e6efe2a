"""Distribution of a checkpoint's tensors, or of their cells, over several writers."""

from __future__ import annotations

import heapq
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from inshrink_core.archive.frame_reader import joined_memory
from inshrink_core.checkpoint import Box, Cell, TensorSpec
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.formats.distributed import coverage_error
from inshrink_core.frame import FrameInfo

CELL_NUMEL: Final = 1 << 18
"""Least number of elements of a cell. Smaller cells take more bytes, larger ones more after resharding."""

AUTO: Final = "auto"
"""Option value: take the share from the environment."""

_TEXT: Final = re.compile(r"([0-9]{1,5})/([0-9]{1,5})", re.ASCII)

_ENVIRONMENTS: Final = (
    ("torchrun", "RANK", "WORLD_SIZE", ""),
    ("a Slurm array", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ""),
)
"""Environment variables of a launcher: process number, process count, and first number (default 0)."""


class Share(NamedTuple):
    """One part of a shared job: its number, from 0, and the number of parts."""

    part: int
    n_parts: int

    def __str__(self) -> str:
        return f"{self.part + 1}/{self.n_parts}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a share as users write it: ``2/8`` is the second of eight.

        Raises
        ------
        InputError
            The text is not a share.

        Examples
        --------
        >>> Share.parse("2/8")
        Share(part=1, n_parts=8)
        """
        match = _TEXT.fullmatch(text)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= count:
            raise InputError(f"'{text}' is not a part", expected="I/N with 1 ≤ I ≤ N, or auto")
        return cls(number - 1, count)

    def of(self, sizes: Iterable[int]) -> range:
        """Return the range of items that belong to this part, so that parts have about equal sizes.

        Parts are consecutive and every item belongs to one part. An item larger than all others together
        leaves other parts empty.

        Examples
        --------
        >>> [Share(i, 2).of([3, 1, 1, 1]) for i in range(2)]
        [range(0, 1), range(1, 4)]
        """
        rows = list(sizes)
        total, done = max(1, sum(rows)), 0
        owners = []
        for size in rows:
            owners.append(min(self.n_parts - 1, (2 * done + size) * self.n_parts // (2 * total)))
            done += size
        mine = [at for at, owner in enumerate(owners) if owner == self.part]
        return range(mine[0], mine[-1] + 1) if mine else range(0)


def share_of(text: str | None, environment: Mapping[str, str] | None = None) -> Share | None:
    """Return the share given by an option: ``I/N``, or ``auto`` to use the environment.

    Parameters
    ----------
    text
        The option; None if the work is not shared.
    environment
        The environment variables; by default those of the process.

    Raises
    ------
    InputError
        The text is not a share, or the environment has none.
    """
    if text is None or text != AUTO:
        return None if text is None else Share.parse(text)
    known = os.environ if environment is None else environment
    for name, number, count, first in _ENVIRONMENTS:
        if number in known and count in known:
            try:
                share = Share(int(known[number]) - int(known.get(first, "0")), int(known[count]))
            except ValueError:
                share = Share(-1, 0)
            if not 0 <= share.part < share.n_parts:
                raise InputError(
                    f"{name} names no part",
                    expected=f"{number} below {count}",
                    found=f"{number}={known[number]}, {count}={known[count]}",
                )
            return share
    raise InputError(
        "the part of this process is unknown",
        expected=" or ".join(f"{number} and {count}" for _, number, count, _ in _ENVIRONMENTS),
        remedy="say so: --part I/N",
    )


def frames_of(part: str | None, infos: Sequence[FrameInfo]) -> Sequence[FrameInfo]:
    """Return the frames of a part (`share_of`); all frames if the work is not shared."""
    share = share_of(part)
    return infos if share is None else [infos[at] for at in share.of(info.nbytes for info in infos)]


class Split:
    """Assignment of tensors to parts, balanced by bytes; a weight and its optimizer state share a part.

    Parameters
    ----------
    specs
        Tensors of the first step; every part must pass the same.
    n_parts
        Number of parts.

    Examples
    --------
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> sizes = {"a": 3, "b": 2, "c": 1}
    >>> made = {"role": TensorRole.WEIGHT, "dtype": "float32"}
    >>> specs = [TensorSpec(name=name, shape=(n,), **made) for name, n in sizes.items()]
    >>> split = Split(specs, 2)
    >>> [split.part_of(spec) for spec in specs]
    [0, 1, 1]
    """

    def __init__(self, specs: Iterable[TensorSpec], n_parts: int) -> None:
        self.n_parts = n_parts
        columns: dict[str, int] = {}
        for spec in specs:
            columns[spec.parameter] = columns.get(spec.parameter, 0) + spec.nbytes
        loads = [(0, part) for part in range(n_parts)]
        self._parts: dict[str, int] = {}
        for name in sorted(columns, key=lambda name: (-columns[name], name)):
            load, part = heapq.heappop(loads)
            self._parts[name] = part
            heapq.heappush(loads, (load + columns[name], part))

    def part_of(self, spec: TensorSpec) -> int:
        """Return the part of a tensor; a tensor not in the first step is assigned by a hash of its name."""
        known = self._parts.get(spec.parameter)
        return zlib.crc32(spec.parameter.encode()) % self.n_parts if known is None else known

    def owns(self, spec: TensorSpec, part: int) -> bool:
        """Whether a tensor belongs to a part."""
        return self.part_of(spec) == part


@dataclass(frozen=True)
class Shards:
    """The tensors and cells of one rank of a training in which every rank writes its own.

    Parameters
    ----------
    places
        Position in the frame of each of the rank's tensors and cells, by key.
    gathered
        All-gather: returns the values of all ranks in rank order. Every rank must call it.
    """

    places: Mapping[str, int]
    gathered: Callable[[Any], Sequence[Any]]

    def owns(self, spec: TensorSpec, part: int) -> bool:
        """Whether a tensor or cell belongs to this rank."""
        return spec.key in self.places

    def observations(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], memory: Any
    ) -> tuple[list[TensorSpec], list[Any], Any]:
        """Return the statistics of all ranks, sorted by key, and their joint memory.

        The order does not depend on the sharding. Each rank stores the memory of its own tensors
        (`memory_of`).
        """
        known = memory_of(memory, frozenset(spec.key for spec in specs))
        given = self.gathered((list(zip(specs, statistics, strict=True)), known))
        rows = sorted((row for rows, _ in given for row in rows), key=lambda row: row[0].key)
        return [spec for spec, _ in rows], [seen for _, seen in rows], joined_memory(m for _, m in given)


def memory_of(memory: Any, keys: frozenset[str]) -> Any:
    """Return the part of a memory that concerns some tensors, and the entries for all together.

    Examples
    --------
    >>> memory_of({"rate": 0.1, "held": {"a": 1, "b": 2}}, frozenset({"b"}))
    {'rate': 0.1, 'held': {'b': 2}}
    """
    if not isinstance(memory, dict):
        return memory
    return {
        name: {key: row for key, row in value.items() if key in keys} if isinstance(value, dict) else value
        for name, value in memory.items()
    }


def cell_spec(spec: TensorSpec, box: Box) -> TensorSpec:
    """Return the spec of a cell of a tensor.

    Examples
    --------
    >>> from inshrink_core.checkpoint import TensorRole
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.EXP_AVG, dtype="float32", shape=(8, 4))
    >>> cell_spec(spec, Box((4, 0), (4, 4))).key
    'fc.weight[4:8,0:4]@exp_avg'
    """
    region = ",".join(f"{at}:{at + size}" for at, size in zip(*box, strict=True))
    return replace(spec, name=f"{spec.name}[{region}]", shape=box.sizes, cell=Cell(spec.shape, box.offsets))


def cells_of(spec: TensorSpec, box: Box) -> list[tuple[TensorSpec, Box]]:
    """Cut a rank's region of a tensor into cells.

    Cells are cut at multiples of the smallest number of rows of the full tensor with `CELL_NUMEL` elements,
    so that another number of ranks uses the same cuts.

    Parameters
    ----------
    spec
        The full tensor.
    box
        The rank's region of it.

    Returns
    -------
    list of (cell, place)
        Each cell and its position in the rank's region; the tensor itself if it is one cell.
    """
    if not math.prod(box.sizes) or len(spec.shape) == 0:
        return [] if spec.numel else [(spec, box)]
    n_rows = -(-CELL_NUMEL // (spec.numel // spec.shape[0]))
    first, end = box.offsets[0], box.offsets[0] + box.sizes[0]
    if box.sizes == spec.shape and end <= n_rows:
        return [(spec, box)]
    cuts = [first, *range((first // n_rows + 1) * n_rows, end, n_rows), end]
    rest = (0,) * (len(box.sizes) - 1)
    cells = []
    for at, until in pairwise(cuts):
        sizes = (until - at, *box.sizes[1:])
        cell = cell_spec(spec, Box((at, *box.offsets[1:]), sizes))
        cells.append((cell, Box((at - first, *rest), sizes)))
    return cells


def joined_specs(
    specs: Iterable[TensorSpec], where: str
) -> tuple[tuple[TensorSpec, ...], dict[str, tuple[TensorSpec, ...]]]:
    """Return the tensors that a frame's blocks make up, and the cells of tensors in cells, by key.

    Raises
    ------
    DamagedError
        The cells of a tensor leave a hole, overlap, or belong to different tensors.
    """
    found: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        found.setdefault(spec.full_spec.key, []).append(spec)
    cells = {key: tuple(rows) for key, rows in found.items() if len(rows) > 1 or rows[0].cell}
    for key, rows in cells.items():
        full_spec = rows[0].full_spec
        if any(row.cell is None or row.full_spec != full_spec for row in rows):
            raise DamagedError(f"the cells of '{key}' are not of one tensor", where=where)
        boxes = [box_of(row) for row in rows if row.numel]
        if flaw := coverage_error(boxes, full_spec.shape):
            raise DamagedError(f"the cells of '{key}' {flaw}", where=where)
    return tuple(rows[0].full_spec for rows in found.values()), cells


def box_of(spec: TensorSpec) -> Box:
    """Return the region of a cell in its tensor; for a full tensor, all of it."""
    return Box((0,) * len(spec.shape) if spec.cell is None else spec.cell.offsets, spec.shape)
