"""What is in a run or an archive, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inshrink_core.analysis.gain import RestoreGain, restore_gain, restore_gain_of_run
from inshrink_core.chain import (
    QUALITY,
    TAKEN,
    Archive,
    archive_size,
    optimizer_of,
    original_checks,
    step_needs,
)
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.errors import CheckFailedError, InputError, InshrinkError, MissingFrameError
from inshrink_core.execution import resolve_device
from inshrink_core.formats import Run
from inshrink_core.formats.run import NoCheckpointError
from inshrink_core.report import plain_value
from inshrink_core.verbs.restore import open_any

if TYPE_CHECKING:
    from inshrink_core.codec import AnyCodec
    from inshrink_core.execution.progress import OnProgress
    from inshrink_core.frame import FrameInfo

__all__ = ["Inventory", "inspect"]

ARCHIVE_FORMAT = "inshrink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a run or an archive holds.

    Parameters
    ----------
    path
        The run or the archive.
    facts
        The document of ``inshrink inspect --json``, whose keys docs/cli.md explains.
    failure
        What is wrong with it although it can be shown.
    restore_gain
        Gain and noise of restores, where they were asked for.
    device
        Where they were measured; None without them, for nothing is decoded or encoded then.
    """

    path: str
    facts: Mapping[str, Any]
    failure: InshrinkError | None = None
    restore_gain: RestoreGain | None = None
    device: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink inspect --json``."""
        gain = {} if self.restore_gain is None else {"restore_gain": self.restore_gain.to_json()}
        return {**self.facts, "device": self.device, **gain}


def inspect(
    source: Run | Archive | str | os.PathLike[str],
    *,
    gain: bool = False,
    against: Run | str | os.PathLike[str] | None = None,
    codec: str | None = None,
    config: Mapping[str, Any] | AnyCodec | None = None,
    device: str = "auto",
    progress: OnProgress | None = None,
    **options: Any,
) -> Inventory:
    """List steps, tensors, roles and sizes of a run or an archive; without `gain`, reads headers only.

    Parameters
    ----------
    source
        A run or an archive, or its path.
    gain
        Measure restore gain and noise too, which reads and encodes everything.
    against
        With `gain`, the original run of an archive.
    codec, config
        With `gain`, what a run is encoded with.
    device
        With `gain`, where: ``auto``, ``cpu`` or ``cuda``.
    progress
        Called as the gain is measured.
    **options
        How a run is opened, as `inshrink_core.open` takes them.

    Raises
    ------
    NotFoundError
        There is neither a run nor an archive.
    InputError
        `gain` of an archive without its run, or an option that does not go with what is inspected.

    Examples
    --------
    >>> import inshrink_core
    >>> inspect(inshrink_core.sample("digits-cnn")).facts["n_parameters"]
    44762
    """
    try:
        opened = source if isinstance(source, Run | Archive) else open_any(source, **options)
    except NoCheckpointError as error:
        if not error.skipped:
            raise
        facts = _run_facts(_Tensors(archived=False), error.skipped)
        return Inventory(path=str(source), facts=facts, failure=error)
    found = _inspect_archive(opened) if isinstance(opened, Archive) else _inspect_run(opened)
    if not gain:
        return found
    device = resolve_device(device)
    if isinstance(opened, Archive):
        if against is None:
            raise InputError(
                "--gain compares an archive with the original run", remedy="give it with --against RUN"
            )
        if codec is not None:
            raise InputError("an archive has its codec already", remedy="leave out --codec")
        measured = restore_gain(opened, against, device=device, progress=progress)
        return replace(found, restore_gain=measured, device=device)
    if against is not None:
        raise InputError("--against goes with an archive, and this is a run", remedy="leave it out")
    measured = restore_gain_of_run(opened, codec=codec, config=config, device=device, progress=progress)
    return replace(found, restore_gain=measured, device=device)


@dataclass(slots=True)
class _Sum:
    """One tensor over all steps: its newest spec, and its bytes added up."""

    spec: TensorSpec
    n_steps: int = 0
    raw_bytes: int = 0
    archive_bytes: int = 0
    codec: str | None = None


class _Tensors:
    """Tensors by key, in order of first appearance."""

    def __init__(self, *, archived: bool) -> None:
        self._archived = archived
        self._sums: dict[str, _Sum] = {}
        self._last_keys: frozenset[str] = frozenset()

    def add_step(self, rows: Iterable[tuple[TensorSpec, int, str | None]]) -> None:
        """Count the tensors of one step: spec, archived bytes, bitstream."""
        keys = set()
        for spec, archive_bytes, codec in rows:
            entry = self._sums.setdefault(spec.key, _Sum(spec))
            entry.spec, entry.codec = spec, codec
            entry.n_steps += 1
            entry.raw_bytes += spec.nbytes
            entry.archive_bytes += archive_bytes
            keys.add(spec.key)
        self._last_keys = frozenset(keys)

    @property
    def raw_bytes(self) -> int:
        return sum(entry.raw_bytes for entry in self._sums.values())

    @property
    def n_parameters(self) -> int:
        """Elements of the weights of the last step, tied ones once."""
        return sum(
            entry.spec.numel
            for key, entry in self._sums.items()
            if key in self._last_keys and entry.spec.role is TensorRole.WEIGHT
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a tensor."""
        rows = []
        for key, entry in self._sums.items():
            row: dict[str, Any] = {
                "key": key,
                "role": entry.spec.role.value,
                "dtype": entry.spec.dtype,
                "shape": list(entry.spec.shape),
                "layer": entry.spec.layer.value if entry.spec.layer else None,
                "n_steps": entry.n_steps,
                "raw_bytes": entry.raw_bytes,
            }
            if self._archived:
                row |= {
                    "codec": entry.codec,
                    "archive_bytes": entry.archive_bytes,
                    "ratio": _ratio(entry.raw_bytes, entry.archive_bytes),
                }
            rows.append(row)
        return rows

    def roles(self) -> dict[str, dict[str, Any]]:
        """Return a row a role, the largest first."""
        sums: dict[str, dict[str, Any]] = {}
        for entry in self._sums.values():
            row = sums.setdefault(
                entry.spec.role.value,
                {"tensors": 0, "raw_bytes": 0} | ({"archive_bytes": 0} if self._archived else {}),
            )
            row["tensors"] += 1
            row["raw_bytes"] += entry.raw_bytes
            if self._archived:
                row["archive_bytes"] += entry.archive_bytes
                row["ratio"] = _ratio(row["raw_bytes"], row["archive_bytes"])
        return dict(sorted(sums.items(), key=lambda item: -item[1]["raw_bytes"]))


def _ratio(raw: int, archived: int) -> float | None:
    """Return raw over archived bytes; None for what takes no bytes."""
    return raw / archived if raw and archived else None


def _inspect_run(run: Run) -> Inventory:
    """Return the inventory of a run; reads the header of every checkpoint."""
    tensors = _Tensors(archived=False)
    for step in run.steps:
        tensors.add_step((spec, 0, None) for spec in run[step].specs)
    facts = _run_facts(tensors, run.skipped, run.format, run.steps)
    return Inventory(
        path=str(run.path), facts={**facts, "bytes_read": run.bytes_read, "notes": list(run.notes)}
    )


def _run_facts(
    tensors: _Tensors, skipped: Iterable[Any], layout: str | None = None, steps: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the document of a run, or of a directory without a readable checkpoint."""
    return {
        "kind": "run",
        "format": layout,
        "steps": list(steps),
        "n_parameters": tensors.n_parameters,
        "tensors": tensors.rows(),
        "roles": tensors.roles(),
        "raw_bytes": tensors.raw_bytes,
        "bytes_read": 0,
        "skipped": [{"path": str(row[0]), "reason": str(row[1])} for row in skipped],
        "notes": [],
    }


def _inspect_archive(archive: Archive) -> Inventory:
    """Return the inventory of an archive; reads the index of every frame."""
    tensors = _Tensors(archived=True)
    whole, broken = _readable(archive)
    sizes = archive_size(archive, whole)
    for frame in sizes.frames:
        tensors.add_step((tensor.spec, tensor.nbytes, tensor.codec) for tensor in frame.tensors)
    meta = archive.frame(whole[-1]).meta if whole else {}
    reader, catalog = archive.reader, archive.reader.catalog
    head, problem = reader.listed_head, catalog.manifest_problem
    notes = _archive_notes(archive, broken)
    facts: dict[str, Any] = {
        "kind": "archive",
        "format": ARCHIVE_FORMAT,
        "steps": list(archive.steps),
        "n_parameters": tensors.n_parameters,
        "codec": meta.get("codec"),
        "config": meta.get("config"),
        "optimizer": optimizer_of(meta) if "optimizer" in meta else None,
        **({} if sizes.base is None else {"base": plain_value(sizes.base)}),
        "ratio_weights": sizes.ratio_weights,
        "ratio_total": sizes.ratio_total,
        "bits_per_weight": sizes.bits_per_weight,
        "raw_bytes": sizes.raw_total,
        "archive_bytes": sizes.nbytes,
        "needs": _needs(archive, whole, notes),
        "n_branches": len({frame.branch for frame in reader.frames}),
        "frames": [frame.to_json() | _said(archive.frame(frame.info).meta) for frame in sizes.frames],
        "missing_frames": [{**lost.place, "last": lost == head} for lost in reader.missing],
        "manifest_problem": problem.what if problem else None,
        "unreadable_frames": list(catalog.unknown),
        "undecodable_steps": [info.step for info in broken],
        "tensors": tensors.rows(),
        "roles": tensors.roles(),
        "bytes_read": archive.bytes_read,
        "skipped": [],
        "originals": original_checks(archive, whole).to_json(),
        "notes": notes,
    }
    return Inventory(path=reader.path, facts=facts, failure=_failure(reader.path, facts))


def _said(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a frame says of what a restore of it costs, and of tensors that it left as they were."""
    return {"quality": meta.get(QUALITY)} | ({"older": meta[TAKEN]} if TAKEN in meta else {})


def _failure(path: str, facts: Mapping[str, Any]) -> CheckFailedError | None:
    """Return what is wrong with an archive that can be shown all the same."""
    if facts["manifest_problem"]:
        return CheckFailedError(
            f"{facts['manifest_problem']}, which alone tells whether frames are gone",
            where=path,
            remedy="`inshrink verify` lists what else is wrong; the next append writes it anew",
        )
    n_missing = len(facts["missing_frames"])
    if not n_missing:
        return None
    return CheckFailedError(
        "a frame is missing" if n_missing == 1 else f"{n_missing} frames are missing",
        where=path,
        remedy="fetch the files from where the archive came from, or give the frames up with "
        "`inshrink prune --forget-missing`",
    )


def _needs(archive: Archive, frames: Iterable[FrameInfo], notes: list[str]) -> dict[str, int] | None:
    """Return what restoring takes: the most of any step, and the disk of all; None where nothing tells."""
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
