"""Restore steps as files, or as tensors to load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec
from inshrink_core.errors import InputError, NotFoundError
from inshrink_core.execution.progress import Counter
from inshrink_core.execution.threads import default_threads
from inshrink_core.execution.together import leave_group, meet
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import (
    ArchiveLike,
    Computing,
    Decoding,
    InParts,
    PathLike,
    Stepping,
    local_target,
)
from inshrink_core.verbs.shared.values import chosen_steps

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.chain import Archive, OriginalChecks
    from inshrink_core.chain.sizes import Exactness
    from inshrink_core.frame import FrameInfo


_SHARE_OF_A_RUN: Final = 0.5
"""Default share of the available memory and disk that restoring several steps may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(Report):
    """Result of `restore`.

    Parameters
    ----------
    steps
        Training steps, ascending.
    paths
        Paths written.
    layout
        Format of the files: ``same`` (the format of the run), ``safetensors``, ``torch`` or ``dcp``.
    seconds
        Wall time.
    bytes_read
        Bytes read from the archive.
    stored
        The roles that were restored bit for bit, and those with an error.
    originals
        Result of checking the original files when they were archived (docs/runs.md#checksums).
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    without_state
        Steps whose optimizer state was pruned; everything else of them was restored.
    """

    steps: tuple[int, ...]
    paths: tuple[Path, ...]
    layout: str
    seconds: float
    bytes_read: int
    stored: Exactness
    originals: OriginalChecks
    device: str = "cpu"
    without_state: tuple[int, ...] = ()

    KEYS: ClassVar = (
        "steps steps_without_state=without_state files=paths format=layout seconds bytes_read "
        "exact_roles=stored.exact lossy_roles=stored.lossy originals device"
    )

    def remarks(self) -> Iterator[str]:
        """Yield what the files lack."""
        if self.without_state:
            yield "note: the optimizer's state was pruned, so training cannot continue from here"


@dataclass(frozen=True)
class Restore(Stepping, Computing, InParts, Decoding, Request[RestoreReport]):
    """Write archived steps back as files, in the run's own format.

    Parameters
    ----------
    archive
        The archive to restore from.
    output
        The folder to write to. Single steps, and steps that were single files, are written right there.
        Others get a folder each, named as in the run, or checkpoint-STEP.
    every
        Restore every step.
    layout
        The format to write: the run's own (same), or another; dcp is torch.distributed.checkpoint on any
        number of ranks.
    tensors
        Only tensors whose keys match this glob, as safetensors; nothing else is read or written.
    branch
        Restore from this branch: its number, or the name of a checkpoint without a step, such as best.
    force
        Overwrite existing files.

    Raises
    ------
    NotFoundError
        The archive lacks a step, or no tensor matches.
    BaseModelError
        The required base model is missing, or is another one.
    ExistsError
        A file exists and `force` is not set.
    MissingFrameError
        A required frame is listed and missing.
    TooLargeError
        The restore needs more memory or disk than the limits (by default what is available, and half of it
        for several steps); nothing is written.
    UnsafePathError
        The archive names a path outside of `output`.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, folder / "digits.inshrink", steps=[400])
    >>> inshrink_core.restore(folder / "digits.inshrink", folder / "out", steps=[400]).paths[0].name
    'step_000400.pt'
    """

    archive: ArchiveLike
    output: Annotated[PathLike, Option(("--output", "-o"), metavar="DIR")]
    _: KW_ONLY
    every: Annotated[bool, Option(("--all",))] = False
    layout: Annotated[str, Option(("--format",), metavar="same|safetensors|torch|dcp")] = "same"
    tensors: Annotated[str | None, Option(metavar="GLOB")] = None
    force: bool = False
    branch: Annotated[int | str | None, Option(metavar="N|NAME")] = None

    THREADED: ClassVar = True
    EXAMPLES: ClassVar = (
        "inshrink restore digits.inshrink --step 400 -o restored/",
        "inshrink restore digits.inshrink --all --tensors 'conv*' -o restored/",
    )

    def perform(self) -> RestoreReport:
        """Write the files."""
        if self.is_shared_out:
            return self._on_engine()
        from inshrink_core.chain import original_checks
        from inshrink_core.chain.attachments import dropped_of
        from inshrink_core.chain.parts import frames_of
        from inshrink_core.chain.restoring import fitting
        from inshrink_core.chain.sizes import exactness_of, frame_size
        from inshrink_core.formats import write_checkpoint
        from inshrink_core.formats.disk import check_target
        from inshrink_core.formats.write import LAYOUTS, restorable_layout

        begun = time.perf_counter()
        if self.layout not in LAYOUTS:
            raise InputError(f"--format {self.layout}", remedy=f"choose one of {', '.join(LAYOUTS)}")
        if self.every and self.steps:
            raise InputError("--step and --all exclude each other", remedy="give one of them")
        opened = self.opened_archive(self.archive)
        if not opened.reader.listed:
            raise NotFoundError("the archive holds no steps yet", where=str(opened.path))
        directory, keys = local_target(self.output), _selector(self.tensors)
        every = self._frames(opened)
        infos = tuple(frames_of(self.part, every))
        if keys is None:
            opened.fetch(infos)
        opened = self.opened_archive(opened, 1.0 if len(infos) < 2 else _SHARE_OF_A_RUN)
        view, threads = opened, self.threads or default_threads()
        if infos:
            view, threads = fitting(opened, infos, directory, self.layout, keys, threads)
        total = 0
        if self.progress is not None:
            specs = (row.spec for info in infos for row in frame_size(opened, info).tensors)
            total = sum(spec.nbytes for spec in specs if keys is None or keys(spec.key))
        count = Counter(self.progress, "restore", total)
        paths: list[Path] = []
        written = self.layout
        folders, collide = _folders(view, every)
        for info in infos:
            checkpoint = view.checkpoint(info)
            written = restorable_layout(checkpoint) if self.layout == "same" and keys is None else self.layout
            apart = collide or bool(checkpoint.folder) or written != "same" or keys is not None
            nested = len(every) > 1 and apart
            target = check_target(directory, f"{folders[info]}/file").parent if nested else directory
            order = self._matching(checkpoint, keys, view.where(info))
            with checkpoint.prefetch(order, threads) as ahead:
                paths += write_checkpoint(
                    ahead,
                    target,
                    layout=written,
                    force=self.force,
                    keys=keys,
                    progress=partial(_report, count, checkpoint),
                    limits=opened.limits,
                )
        if self.part is not None:
            meet()
            leave_group()
        return RestoreReport(
            steps=tuple(info.step for info in infos),
            paths=tuple(paths),
            layout=written,
            seconds=time.perf_counter() - begun,
            bytes_read=opened.bytes_read,
            stored=exactness_of(opened, infos, keys),
            originals=original_checks(opened, infos),
            device=opened.device,
            without_state=tuple(info.step for info in infos if dropped_of(opened.frame(info))),
        )

    def _matching(
        self, checkpoint: Checkpoint, keys: Callable[[str], bool] | None, where: str
    ) -> list[TensorSpec]:
        """Return the requested tensors of a checkpoint."""
        from inshrink_core.formats.carried import carried_tensors

        order = [spec for spec in checkpoint.specs if keys is None or keys(spec.key)]
        if keys and not order and not any(keys(row.name) for row in carried_tensors(checkpoint)):
            remedy = "`inshrink inspect --tensors` lists them"
            raise NotFoundError(f"no tensor matches '{self.tensors}'", where=where, remedy=remedy)
        return order

    def _on_engine(self) -> RestoreReport:
        """Restore with workers, each some of the steps."""
        from inshrink_core.chain import original_checks
        from inshrink_core.chain.sizes import exactness_of
        from inshrink_core.verbs.shared.sharing import shared_out

        begun = time.perf_counter()
        done: list[RestoreReport] = shared_out(self)
        opened = self.opened_archive(self.archive)
        infos = self._frames(opened)
        return replace(
            next((report for report in done if report.steps), done[0]),
            steps=tuple(step for report in done for step in report.steps),
            paths=tuple(path for report in done for path in report.paths),
            seconds=time.perf_counter() - begun,
            bytes_read=sum(report.bytes_read for report in done),
            stored=exactness_of(opened, infos, _selector(self.tensors)),
            originals=original_checks(opened, infos),
        )

    def _frames(self, archive: Archive) -> tuple[FrameInfo, ...]:
        """Return the frames to restore: those of the requested steps, or the last one."""
        branch = _branch_number(archive, self.branch)

        def known() -> Sequence[int]:
            if branch is None:
                return archive.listed_steps
            return sorted({frame.step for frame in archive.reader.listed_history(_tip(archive, branch))})

        steps = chosen_steps([":"] if self.every else self.steps, known, str(archive.path))
        if steps is not None:
            named = archive.reader.named if self.every and branch is None else ()
            return (*(archive.reader.find(step, branch) for step in steps), *named)
        return (archive.last if branch is None else _tip(archive, branch),)


restore = python_call(Restore)


def _folders(archive: Archive, frames: Collection[FrameInfo]) -> tuple[dict[FrameInfo, str], bool]:
    """Return a folder for each of several steps, and whether files of steps that had none would collide."""
    from inshrink_core.formats.disk import check_names

    steps = {info: archive.checkpoint(info) for info in frames}
    # Steps that were single files in the run are written beside each other, unless names collide.
    names = [file.path.casefold() for item in steps.values() if not item.folder for file in item.files]
    numbered = {info: f"checkpoint-{item.branch or info.step}" for info, item in steps.items()}
    folders = {info: item.folder or numbered[info] for info, item in steps.items()}
    if len({name.casefold() for name in folders.values()}) < len(frames):
        folders = numbered
    check_names(folders.values(), str(archive.path))
    return folders, len(set(names)) < len(names)


def _branch_number(archive: Archive, branch: int | str | None) -> int | None:
    """Return the number of a branch, given by number or name.

    Raises
    ------
    NotFoundError
        No branch has that name.
    """
    if not isinstance(branch, str) or branch.isdigit():
        return None if branch is None else int(branch)
    named = archive.branches
    if branch not in named:
        others = ", ".join(named) or "none"
        raise NotFoundError(
            f"there is no branch '{branch}'",
            where=archive.reader.path,
            remedy=f"the named branches are: {others}",
        )
    return named[branch].branch


def _tip(archive: Archive, branch: int) -> FrameInfo:
    """Return the last frame of a branch."""
    _ = archive.reader.listed_head  # raises without a manifest, which records the last frames
    tips = [frame for frame in archive.reader.listed if frame.branch == branch]
    if not tips:
        raise NotFoundError(f"there is no branch {branch}", where=archive.reader.path)
    return max(tips, key=lambda frame: frame.generation)


def _report(count: Counter, checkpoint: Checkpoint, key: str) -> None:
    count.add(checkpoint.spec(key).nbytes, checkpoint.step, key)


def _selector(pattern: str | None) -> Callable[[str], bool] | None:
    """Return a test of tensor keys for a glob."""
    return None if pattern is None else lambda key: fnmatchcase(key, pattern)


def load_state_dict(
    archive: Archive | str | os.PathLike[str], step: int | None = None, *, device: str = "auto"
) -> dict[str, Tensor]:
    """Return weights and buffers of an archived step by name, for `torch.nn.Module.load_state_dict`.

    Parameters
    ----------
    archive
        The archive, or its path.
    step
        The step; by default the last.
    device
        Where tensors are decoded: ``auto``, ``cpu`` or ``cuda``. They are returned in host memory.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=[400])
    >>> sorted(inshrink_core.verbs.load_state_dict(target, 400))[:2]
    ['bn1.bias', 'bn1.num_batches_tracked']
    """
    from inshrink_core.chain import Archive
    from inshrink_core.formats.carried import carried_tensors

    opened = archive if isinstance(archive, Archive) else Archive.open(archive)
    info = opened.last if step is None else opened.reader.find(step)
    checkpoint = opened.on(device).checkpoint(info)
    carried = {tensor.name: tensor for tensor in carried_tensors(checkpoint) if tensor.role in MODEL_ROLES}
    return checkpoint.state_dict() | {name: tensor.restored() for name, tensor in carried.items()}
