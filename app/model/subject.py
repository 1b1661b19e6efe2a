"""The run or archive that a page is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inshrink_core.chain.report import ChainReport
from inshrink_core.checkpoint import MODEL_ROLES, TensorSpec, twins

ASK_ABOVE_BYTES = 200_000_000
"""Reading more than this takes long, so the page asks first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The run or archive on screen, from its headers.

    Parameters
    ----------
    path
        Real path, with the step pattern as its last part if one is used; opens the subject again.
    name
        Its name. Untrusted text, like every name here.
    kind
        ``run`` or ``archive``.
    format
        On-disk format, such as ``torch``.
    steps
        Steps of its checkpoints, ascending.
    tensors
        Tensors of the last checkpoint, in file order.
    total_bytes
        Bytes of all its checkpoints on disk.
    skipped
        Skipped files, with reasons.
    unreadable
        Unreadable checkpoints, with reasons.
    notes
        Remarks on how it was read.
    log
        Values by step of each training metric.
    archive
        Frames and sizes of the archive, or of a run's known archive.
    step_pattern
        Pattern of steps in the names of a run; empty if none was given.
    is_ordered
        Whether the tensors are in the model's order; else they are sorted by name.
    directory, newest
        For a run, the folder of its settings and measurements, and its last checkpoint. Both are on this
        machine, also for a run at an address.
    n_unread
        Number of checkpoints of a large run whose headers are not read yet; all else is of those read.
    """

    path: Path
    name: str
    kind: str
    format: str
    steps: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    skipped: tuple[tuple[str, str], ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    log: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    archive: ChainReport | None = None
    step_pattern: str = ""
    is_ordered: bool = True
    directory: Path = Path()
    newest: Path = Path()
    n_unread: int = 0

    @property
    def place(self) -> Path:
        """The folder or file on disk: the path without the step pattern."""
        return self.path.parent if self.step_pattern else self.path

    @property
    def folder(self) -> Path:
        """The folder of a run, or the folder of a checkpoint file."""
        return self.place if self.place.is_dir() else self.place.parent

    @property
    def raw_nbytes(self) -> int:
        """Raw bytes of all tensors of all steps."""
        return len(self.steps) * sum(row.nbytes for row in self.tensors)

    @property
    def model_tensors(self) -> tuple[TensorSpec, ...]:
        """Weights and buffers of the last checkpoint."""
        return tuple(row for row in self.tensors if row.role in MODEL_ROLES)

    @property
    def n_parameters(self) -> int:
        """Elements of the weights of the last checkpoint, without moving averages."""
        averages = twins({row.name: row.shape for row in self.model_tensors})
        return sum(row.numel for row in self.tensors if row.role == "weight" and row.name not in averages)
