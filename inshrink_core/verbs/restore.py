"""Restoring steps as files, or as tensors to load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from inshrink_core.errors import InputError, NotFoundError, TooLargeError
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.execution.together import meet, part_ways
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import count, duration, printable, size, steps_in_short
from inshrink_core.verbs.shared.groups import (
    ArchiveLike,
    Based,
    Computing,
    Limiting,
    OnEngine,
    PathLike,
    Steps,
    chosen_steps,
    local_target,
)
from inshrink_core.verbs.shared.showing import show_originals, stored_text

if TYPE_CHECKING:
    import os

    from rich.console import Console
    from torch import Tensor

    from inshrink_core.chain import Archive, Exactness, OriginalChecks
    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.frame import FrameInfo

__all__ = [
    "Restore",
    "RestoreReport",
    "known_steps",
    "load_state_dict",
    "restore",
]


_MOST_FILES_SHOWN: Final = 10

_SHARE_OF_A_RUN: Final = 0.5
"""Of the memory and the disk there is, what several steps may take unless it is said how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(Report):
    """What `restore` wrote.

    Parameters
    ----------
    steps
        The steps restored.
    paths
        Every file written.
    layout
        ``same`` as in the run, or the format the files were written in.
    seconds
        Wall time.
    bytes_read
        Bytes read from the archive.
    stored
        Which roles came back bit for bit, and which with an error.
    originals
        What is known of the checksums of the original files; a restored file is no better than its original.
    device
        Where tensors were decoded.
    without_state
        Steps whose optimizer state was pruned: what was restored of them is everything else.
    converted
        Tensors that the format has no form for, and what was written of each: plain values, or parts.
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
    converted: tuple[str, ...] = ()

    SAYS: ClassVar = (
        "steps steps_without_state=without_state files=paths format=layout seconds bytes_read "
        "exact_roles=stored.exact lossy_roles=stored.lossy originals device converted"
    )

    def show(self, console: Console) -> None:
        """Print the files written, the first ones by name."""
        for path in self.paths[:_MOST_FILES_SHOWN]:
            console.print(printable(str(path)), soft_wrap=True)
        if len(self.paths) > _MOST_FILES_SHOWN:
            console.print(f"… and {count(len(self.paths) - _MOST_FILES_SHOWN)} more files")
        written = sum(path.stat().st_size for path in self.paths if path.is_file())
        steps = "step" if len(self.steps) == 1 else "steps"
        console.print(
            f"{steps} {steps_in_short(self.steps)}: {size(written)} written in {duration(self.seconds)}, "
            f"{size(self.bytes_read)} read from the archive"
        )
        console.print(stored_text(self.stored), soft_wrap=True)
        if self.converted:
            shown = "; ".join(map(printable, self.converted[:_MOST_FILES_SHOWN]))
            more = len(self.converted) - _MOST_FILES_SHOWN
            shown += f"; and {count(more)} more" if more > 0 else ""
            console.print(f"note: the format has no such tensors, and holds {shown}", soft_wrap=True)
        if self.without_state:
            of = f"step {steps_in_short(self.without_state)}"
            console.print(f"note: the optimizer's state of {of} was pruned: training cannot go on from there")
        show_originals(console, self.originals.text)


@dataclass(frozen=True)
class Restore(Computing, OnEngine, Limiting, Based, Request[RestoreReport]):
    """Write archived steps back as files, in the run's own format.

    Parameters
    ----------
    archive
        The archive to restore from.
    output
        Where the files go; made if it is not there. One step goes right there, and so do several that are
        single files of the run's own format; other steps go into a folder each, called as in the run, or
        checkpoint-STEP.
    steps
        A step, a list 100,200, or a range FIRST:LAST[:EVERY], both ends included; may be repeated. By default
        the last step.
    every
        Restore every step.
    layout
        The run's own file format, or another: same, safetensors, torch, or dcp for
        torch.distributed.checkpoint on any number of ranks.
    tensors
        Only tensors whose keys match this glob, as safetensors; nothing else is read or written.
    force
        Overwrite files that exist.
    branch
        Look for the steps in the history of this branch's last frame: a number, or the name of a checkpoint
        that is no step, such as best.

    part
        Write some of the steps, beside other processes that write the others: I/N, or auto for what
        torchrun or Slurm tell this process. Steps are shared out in order, about equal in bytes.

    Raises
    ------
    NotFoundError
        A step is not in the archive, or no tensor matches.
    BaseModelError
        The base model is needed, and it is not there or is another one.
    ExistsError
        A file exists and `force` is not set.
    MissingFrameError
        A frame that is needed is listed and missing.
    TooLargeError
        It would take more memory or disk than that (by default what is available, and half of it for several
        steps); nothing is written.
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
    steps: Steps = None
    every: Annotated[bool, Option(("--all",))] = False
    layout: Annotated[str, Option(("--format",), metavar="same|safetensors|torch|dcp")] = "same"
    tensors: Annotated[str | None, Option(metavar="GLOB")] = None
    force: bool = False
    branch: Annotated[int | str | None, Option(metavar="N|NAME")] = None
    part: Annotated[str | None, Option(("--part",), metavar="I/N|auto")] = None

    THREADED: ClassVar = True
    EXAMPLES: ClassVar = (
        "inshrink restore digits.inshrink --step 400 -o restored/",
        "inshrink restore digits.inshrink --all --tensors 'conv*' -o restored/",
    )

    def perform(self) -> RestoreReport:
        """Write the files."""
        if self.is_shared_out:
            return self._on_engine()
        from inshrink_core.chain import exactness_of, original_checks
        from inshrink_core.chain.attachments import dropped_of
        from inshrink_core.execution import default_threads, recycling
        from inshrink_core.formats import write_checkpoint
        from inshrink_core.formats.disk import check_names, check_target
        from inshrink_core.formats.write import LAYOUTS, restorable_layout

        begun = time.perf_counter()
        if self.layout not in LAYOUTS:
            raise InputError(f"--format {self.layout}", remedy=f"choose one of {', '.join(LAYOUTS)}")
        if self.every and self.steps:
            raise InputError("--step and --all exclude each other", remedy="give one of them")
        opened = self.opened_archive(self.archive)
        if not opened.reader.listed:
            raise NotFoundError("the archive holds no steps yet", where=str(opened.path))
        directory, tensors, layout = local_target(self.output), self.tensors, self.layout
        every = self._frames(opened)
        infos = self._own(every)
        chosen = tuple(info.step for info in infos)
        if self.tensors is None:
            opened.fetch(infos)
        opened = opened.limited(self.limits(1.0 if len(chosen) < 2 else _SHARE_OF_A_RUN)).on(self.device)
        threads = self.threads or default_threads()
        view, threads = _fitting(opened, infos, directory, layout, tensors, threads) if infos else (opened, 1)
        counter = _Counter(opened, infos, tensors, self.progress)
        paths: list[Path] = []
        converted: dict[str, None] = {}
        written = layout
        # Files of steps that were no folders go beside each other, unless names collide.
        flat = [one for info in every if not (one := view.checkpoint(info)).folder]
        names = [file.path.casefold() for one in flat for file in one.files]
        collide = len(set(names)) < len(names)
        numbered = {info: f"checkpoint-{view.checkpoint(info).branch or info.step}" for info in every}
        folders = {info: view.checkpoint(info).folder or name for info, name in numbered.items()}
        if len({name.casefold() for name in folders.values()}) < len(every):
            folders = numbered
        check_names(folders.values(), str(opened.path))
        for info in infos:
            checkpoint = view.checkpoint(info)
            whole = tensors is None
            written = restorable_layout(checkpoint) if layout == "same" and whole else layout
            apart = collide or bool(checkpoint.folder) or written != "same" or not whole
            nested = len(every) > 1 and apart
            target = check_target(directory, f"{folders[info]}/file").parent if nested else directory
            keys = _selector(tensors)
            order = [spec for spec in checkpoint.specs if keys is None or keys(spec.key)]
            with (
                _naming(tensors),
                checkpoint.prefetch(order, threads) as ahead,
                recycling(),
            ):
                paths += write_checkpoint(
                    ahead,
                    target,
                    layout=written,
                    force=self.force,
                    keys=keys,
                    progress=counter.of(checkpoint),
                    limits=opened.limits,
                    converted=lambda what: converted.setdefault(what),
                )
        if self.part is not None:
            meet()
            part_ways()
        return RestoreReport(
            steps=chosen,
            paths=tuple(paths),
            layout=written,
            seconds=time.perf_counter() - begun,
            bytes_read=opened.bytes_read,
            stored=exactness_of(opened, infos, self._is_asked),
            originals=original_checks(opened, infos),
            device=opened.device,
            without_state=tuple(info.step for info in infos if dropped_of(opened.frame(info))),
            converted=tuple(converted),
        )

    def _on_engine(self) -> RestoreReport:
        """Have workers write the files, each those of some steps."""
        from inshrink_core.chain import exactness_of, original_checks
        from inshrink_core.verbs.shared.sharing import shared_out

        begun = time.perf_counter()
        done: list[RestoreReport] = shared_out(self)
        opened = self.opened_archive(self.archive)
        infos = self._frames(opened)
        return replace(
            next((one for one in done if one.steps), done[0]),
            steps=tuple(step for one in done for step in one.steps),
            paths=tuple(path for one in done for path in one.paths),
            seconds=time.perf_counter() - begun,
            bytes_read=sum(one.bytes_read for one in done),
            converted=tuple(dict.fromkeys(what for one in done for what in one.converted)),
            stored=exactness_of(opened, infos, self._is_asked),
            originals=original_checks(opened, infos),
        )

    def _is_asked(self, key: str) -> bool:
        return self.tensors is None or fnmatchcase(key, self.tensors)

    def _own(self, infos: tuple[FrameInfo, ...]) -> tuple[FrameInfo, ...]:
        """Return the frames of this part."""
        from inshrink_core.chain.parts import share_of

        share = share_of(self.part)
        return infos if share is None else tuple(infos[at] for at in share.of(info.nbytes for info in infos))

    def _frames(self, archive: Archive) -> tuple[FrameInfo, ...]:
        """Return the frames to restore: of the steps asked for, or the last."""
        branch = _branch_number(archive, self.branch)
        steps = chosen_steps(
            [":"] if self.every else self.steps, lambda: known_steps(archive, branch), str(archive.path)
        )
        if steps is not None:
            named = archive.reader.named if self.every and branch is None else ()
            return (*(archive.reader.find(step, branch) for step in steps), *named)
        return (archive.last if branch is None else _tip(archive, branch),)


restore = python_call(Restore)


def known_steps(archive: Archive, branch: int | None = None) -> tuple[int, ...]:
    """Return the steps of the newest branch's history or of another's, missing ones included, ascending.

    Raises
    ------
    NotFoundError
        There is no such branch.
    """
    if branch is None:
        return archive.listed_steps
    line = archive.reader.listed_history(_tip(archive, branch))
    return tuple(sorted({frame.step for frame in line}))


def _branch_number(archive: Archive, branch: int | str | None) -> int | None:
    """Return the number of a branch that is named.

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
    _ = archive.reader.listed_head  # without a manifest nothing tells which frame is the last of any branch
    tips = [frame for frame in archive.reader.listed if frame.branch == branch]
    if not tips:
        raise NotFoundError(f"there is no branch {branch}", where=archive.reader.path)
    return max(tips, key=lambda frame: frame.generation)


def _fitting(
    archive: Archive,
    infos: Sequence[FrameInfo],
    directory: Path,
    layout: str,
    tensors: str | None,
    threads: int,
) -> tuple[Archive, int]:
    """Return a view and a number of threads that fit the memory; refuse what does not fit the disk."""
    from inshrink_core.chain import sequential_within, step_needs
    from inshrink_core.formats.write import restorable_layout, written_nbytes

    disk, needs = 0, []
    for info in infos:
        checkpoint = archive.checkpoint(info)
        keys = _selector(tensors)
        as_written = restorable_layout(checkpoint) if layout == "same" and keys is None else layout
        needs.append(step_needs(archive, info, checkpoint, as_written))
        disk += written_nbytes(checkpoint, as_written, keys)
    what = f"restoring {len(infos)} steps" if len(infos) > 1 else f"restoring step {infos[0].step}"
    archive.limits.require_disk(disk, directory, what, archive.reader.path)
    if tensors is not None:  # some of them only: each is checked as it is decoded
        return (archive.sequential() if len(infos) > 1 else archive), threads
    view = sequential_within(archive, needs) if len(infos) > 1 else archive
    held = max((row.state for row in needs), default=0) if view.keeps_state else 0
    while threads > 1:
        try:
            most = max(row.memory(threads) for row in needs)
            archive.limits.require_memory(most + held, what, archive.reader.path)
            break
        except TooLargeError:
            threads -= 1
    if threads == 1:
        most = max(row.memory() for row in needs)
        archive.limits.require_memory(most + held, what, archive.reader.path)
    return view, threads


@contextmanager
def _naming(pattern: str | None) -> Iterator[None]:
    """Name the pattern in the error if no tensor matches it."""
    from inshrink_core.formats.write import NO_MATCH

    try:
        yield
    except NotFoundError as error:
        if pattern is None or error.what != NO_MATCH:
            raise
        raise NotFoundError(
            f"{NO_MATCH} '{pattern}'", where=error.where, remedy="`inshrink inspect --tensors` lists them"
        ) from None


def _selector(pattern: str | None) -> Callable[[str], bool] | None:
    """Return a test of tensor keys for a glob."""
    return None if pattern is None else lambda key: fnmatchcase(key, pattern)


class _Counter:
    """Counts the bytes of tensors that writers say they have written, over all steps."""

    def __init__(
        self, archive: Archive, infos: Sequence[FrameInfo], pattern: str | None, progress: OnProgress | None
    ) -> None:
        from inshrink_core.chain import frame_size

        self._progress = progress
        self._done = self._total = 0
        if progress is not None:
            for info in infos:
                size = frame_size(archive, info)
                keys = (tensor.spec for tensor in size.tensors)
                self._total += sum(s.nbytes for s in keys if pattern is None or fnmatchcase(s.key, pattern))

    def of(self, checkpoint: Checkpoint) -> Callable[[str], None] | None:
        """Return what a writer of this step calls after each tensor."""
        progress = self._progress
        if progress is None:
            return None

        def report(key: str) -> None:
            self._done += checkpoint.spec(key).nbytes
            progress(Progress("restore", self._done, self._total, checkpoint.step, key))

        return report


def load_state_dict(
    archive: Archive | str | os.PathLike[str], step: int | None = None, *, device: str = "auto"
) -> dict[str, Tensor]:
    """Return weights and buffers of an archived step, by name: what a module loads.

    Parameters
    ----------
    archive
        The archive, or its path.
    step
        The step; by default the last.
    device
        Where tensors are decoded: ``auto``, ``cpu`` or ``cuda``. They come in host memory.

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
    from inshrink_core.checkpoint import MODEL_ROLES
    from inshrink_core.formats.carried import carried_tensors

    opened = archive if isinstance(archive, Archive) else Archive.open(archive)
    info = opened.last if step is None else opened.reader.find(step)
    checkpoint = opened.on(device).checkpoint(info)
    carried = {one.name: one for one in carried_tensors(checkpoint) if one.role in MODEL_ROLES}
    return checkpoint.state_dict() | {name: one.whole() for name, one in carried.items()}
