"""The documents of ``inshrink inspect``: adding up what the headers of a run or an archive say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inshrink_core.checkpoint import TensorRole, TensorSpec

if TYPE_CHECKING:
    from inshrink_core.chain import Archive
    from inshrink_core.formats import Run
    from inshrink_core.frame import FrameInfo

__all__ = ["empty_document", "make_document"]

ARCHIVE_FORMAT = "inshrink"


@dataclass(slots=True)
class _Sum:
    """One tensor over all steps: its newest spec, and its bytes added up."""

    spec: TensorSpec
    n_steps: int = 0
    raw_bytes: int = 0
    archive_bytes: int = 0
    codec: str | None = None


class _Inventory:
    """Tensors by key, in order of first appearance."""

    def __init__(self) -> None:
        self.sums: dict[str, _Sum] = {}
        self.last_keys: frozenset[str] = frozenset()

    def add_step(self, rows: Iterable[tuple[TensorSpec, int, str | None]]) -> None:
        """Count the tensors of one step: spec, archived bytes, bitstream."""
        keys = set()
        for spec, archive_bytes, codec in rows:
            entry = self.sums.setdefault(spec.key, _Sum(spec))
            entry.spec, entry.codec = spec, codec
            entry.n_steps += 1
            entry.raw_bytes += spec.nbytes
            entry.archive_bytes += archive_bytes
            keys.add(spec.key)
        self.last_keys = frozenset(keys)

    @property
    def n_parameters(self) -> int:
        """Elements of the weights of the last step, tied ones once."""
        return sum(
            entry.spec.numel
            for key, entry in self.sums.items()
            if key in self.last_keys and entry.spec.role is TensorRole.WEIGHT
        )

    def tensors(self, *, archived: bool) -> list[dict[str, Any]]:
        """Return a row a tensor."""
        rows = []
        for key, entry in self.sums.items():
            row: dict[str, Any] = {
                "key": key,
                "role": entry.spec.role.value,
                "dtype": entry.spec.dtype,
                "shape": list(entry.spec.shape),
                "layer": entry.spec.layer.value if entry.spec.layer else None,
                "n_steps": entry.n_steps,
                "raw_bytes": entry.raw_bytes,
            }
            if archived:
                row |= {
                    "codec": entry.codec,
                    "archive_bytes": entry.archive_bytes,
                    "ratio": _ratio(entry.raw_bytes, entry.archive_bytes),
                }
            rows.append(row)
        return rows

    def roles(self, *, archived: bool) -> dict[str, dict[str, Any]]:
        """Return a row a role, the largest first."""
        sums: dict[str, dict[str, Any]] = {}
        for entry in self.sums.values():
            row = sums.setdefault(
                entry.spec.role.value,
                {"tensors": 0, "raw_bytes": 0} | ({"archive_bytes": 0} if archived else {}),
            )
            row["tensors"] += 1
            row["raw_bytes"] += entry.raw_bytes
            if archived:
                row["archive_bytes"] += entry.archive_bytes
                row["ratio"] = _ratio(row["raw_bytes"], row["archive_bytes"])
        return dict(sorted(sums.items(), key=lambda item: -item[1]["raw_bytes"]))


def _ratio(raw: int, archived: int) -> float | None:
    """Return raw over archived bytes; None for what takes no bytes."""
    return raw / archived if raw and archived else None


def empty_document(skipped: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """Return the document of a directory without a readable checkpoint."""
    return {
        "kind": "run",
        "format": None,
        "steps": [],
        "n_parameters": 0,
        "tensors": [],
        "roles": {},
        "raw_bytes": 0,
        "bytes_read": 0,
        "skipped": _skipped(skipped),
        "notes": [],
    }


def make_document(opened: Run | Archive) -> dict[str, Any]:
    """Return the document of whatever was opened; reads headers only."""
    from inshrink_core.chain import Archive

    return _archive_document(opened) if isinstance(opened, Archive) else _run_document(opened)


def _run_document(run: Run) -> dict[str, Any]:
    """Return the document of a run; reads the header of every checkpoint."""
    inventory = _Inventory()
    for step in run.steps:
        inventory.add_step((spec, 0, None) for spec in run[step].specs)
    return {
        "kind": "run",
        "format": run.format,
        "steps": list(run.steps),
        "n_parameters": inventory.n_parameters,
        "tensors": inventory.tensors(archived=False),
        "roles": inventory.roles(archived=False),
        "raw_bytes": sum(entry.raw_bytes for entry in inventory.sums.values()),
        "bytes_read": run.bytes_read,
        "skipped": _skipped(run.skipped),
        "notes": list(run.notes),
    }


def _archive_document(archive: Archive) -> dict[str, Any]:
    """Return the document of an archive; reads the index of every frame."""
    from inshrink_core.chain import archive_size, original_checks

    inventory = _Inventory()
    whole, broken = _readable(archive)
    sizes = archive_size(archive, whole)
    for frame in sizes.frames:
        inventory.add_step((tensor.spec, tensor.nbytes, tensor.codec) for tensor in frame.tensors)
    meta = archive.frame(whole[-1]).meta if whole else {}
    head = archive.reader.listed_head
    originals = original_checks(archive, whole)
    notes = _archive_notes(archive, broken)
    return {
        "kind": "archive",
        "format": ARCHIVE_FORMAT,
        "steps": list(archive.steps),
        "n_parameters": inventory.n_parameters,
        "codec": meta.get("codec"),
        "config": meta.get("config"),
        "optimizer": meta.get("optimizer"),
        "ratio_weights": sizes.ratio_weights,
        "ratio_total": sizes.ratio_total,
        "bits_per_weight": sizes.bits_per_weight,
        "raw_bytes": sizes.raw_total,
        "archive_bytes": sizes.nbytes,
        "needs": _needs(archive, whole, notes),
        "n_branches": len({frame.branch for frame in archive.reader.frames}),
        "frames": [
            {
                "step": frame.info.step,
                "kind": frame.info.kind.value,
                "branch": frame.info.branch,
                "bytes": frame.info.nbytes,
                "ratio_weights": frame.ratio_weights,
                "ratio_total": frame.ratio_total,
            }
            for frame in sizes.frames
        ],
        "missing_frames": [
            {"step": lost.step, "branch": lost.branch, "path": lost.path, "last": lost == head}
            for lost in archive.reader.missing
        ],
        "manifest_problem": problem.what if (problem := archive.reader.catalog.manifest_problem) else None,
        "unreadable_frames": list(archive.reader.catalog.unknown),
        "undecodable_steps": [info.step for info in broken],
        "tensors": inventory.tensors(archived=True),
        "roles": inventory.roles(archived=True),
        "bytes_read": archive.bytes_read,
        "skipped": [],
        "originals": originals.to_json(),
        "notes": notes,
    }


def _needs(archive: Archive, frames: Iterable[FrameInfo], notes: list[str]) -> dict[str, int] | None:
    """Return what restoring takes: the most of any step, and the disk of all; None where nothing tells."""
    from inshrink_core.chain import step_needs
    from inshrink_core.errors import InshrinkError

    rows = []
    for info in frames:
        try:
            rows.append(step_needs(archive, info))
        except InshrinkError as error:
            notes.append(f"step {info.step} cannot be restored: {error}")
    if not rows:
        return None
    return {
        "memory_restore": max(row.memory() for row in rows),
        "memory_verify": max(row.memory_in_turn for row in rows),
        "disk_step": max(row.disk for row in rows),
        "disk_all": sum(row.disk for row in rows),
    }


def _readable(archive: Archive) -> tuple[list[FrameInfo], list[FrameInfo]]:
    """Return the frames of the head's history that can be read, and those that need a missing one."""
    from inshrink_core.errors import MissingFrameError

    whole: list[FrameInfo] = []
    broken: list[FrameInfo] = []
    for info in archive.frames:
        try:
            archive.frame(info)
        except MissingFrameError:
            broken.append(info)
        else:
            whole.append(info)
    return whole, broken


def _archive_notes(archive: Archive, broken: Iterable[FrameInfo]) -> list[str]:
    """Say what of an archive is not as it was committed."""
    catalog = archive.reader.catalog
    head = archive.reader.listed_head
    notes = []
    for lost in catalog.missing:
        last = ": the last one, from which training would go on" if lost == head else ""
        branch = f" on branch {lost.branch}" if lost.branch else ""
        notes.append(f"the frame of step {lost.step}{branch} is missing ({lost.path}){last}")
    steps = ", ".join(str(info.step) for info in broken)
    if steps:
        notes.append(f"without a missing frame these steps cannot be decoded: {steps}")
    if catalog.manifest_problem is not None:
        notes.append(f"{catalog.manifest_problem.what}: frames that are gone cannot be told")
        notes += [f"this frame cannot be read: {path}" for path in catalog.unknown]
    return notes


def _skipped(rows: Iterable[Any]) -> list[dict[str, str]]:
    """Return what was left out, and why."""
    return [{"path": str(row[0]), "reason": str(row[1])} for row in rows]
