"""The run or archive that a page is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inshrink_core.chain import ChainReport
from inshrink_core.checkpoint import MODEL_ROLES, TensorSpec, twins

ASK_ABOVE_BYTES = 200_000_000
"""Reading more than this takes long enough that the reader is asked first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The run or archive on screen, as its headers tell.

    Parameters
    ----------
    path
        Real path, and the step pattern as its last part where there is one: what opens it again.
    name
        What to call it. Untrusted text, as every name here.
    kind
        ``run`` or ``archive``.
    format
        On-disk format, as ``torch``.
    steps
        Steps of its checkpoints, ascending.
    tensors
        Tensors of the last checkpoint, in file order.
    total_bytes
        Bytes of all its checkpoints on disk.
    bytes_read
        Bytes read so far to know all this.
    skipped
        Files that were left out, and why.
    unreadable
        Checkpoints that cannot be read, and why.
    notes
        What a reader should know of how it was read.
    log
        Per training metric, its values by step.
    archive
        Its frames and sizes, where it is an archive or one of it is known.
    step_pattern
        How the names of a run tell its steps; empty where nobody said.
    is_ordered
        Whether the tensors stand in the model's order; else they stand by name.
    directory, newest
        Of a run, where its settings and measurements lie, and its last checkpoint: on this machine, also
        where the run lies at an address.
    """

    path: Path
    name: str
    kind: str
    format: str
    steps: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    bytes_read: int
    skipped: tuple[tuple[str, str], ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    log: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    archive: ChainReport | None = None
    step_pattern: str = ""
    is_ordered: bool = True
    directory: Path = Path()
    newest: Path = Path()

    @property
    def place(self) -> Path:
        """The folder or file on disk: the path without the step pattern."""
        return self.path.parent if self.step_pattern else self.path

    @property
    def folder(self) -> Path:
        """The folder of a run; of a checkpoint file, the one that it lies in."""
        return self.place if self.place.is_dir() else self.place.parent

    @property
    def model_tensors(self) -> tuple[TensorSpec, ...]:
        """Weights and buffers of the last checkpoint."""
        return tuple(row for row in self.tensors if row.role in MODEL_ROLES)

    @property
    def n_parameters(self) -> int:
        """Elements of the weights of the last checkpoint, without moving averages."""
        averages = twins({row.name: row.shape for row in self.model_tensors})
        return sum(row.numel for row in self.tensors if row.role == "weight" and row.name not in averages)
