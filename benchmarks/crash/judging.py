"""What was promised, and whether an archive keeps it: the judgement that does not trust the verbs."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import inshrink_core
from benchmarks.crash.disk import Tree
from inshrink_core.archive import ArchiveWriter, FrameWriter, is_archive
from inshrink_core.errors import InshrinkError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.formats.write import restorable_layout

Note = Callable[[str], None]
SCRATCH = "INSHRINK_CRASH_SCRATCH"
"""Where the environment tells a folder for what is restored to be judged."""


@dataclass
class Expected:
    """What an undisturbed run of a verb gives: what steps may restore to, the last steps, and the tree."""

    steps: dict[int, frozenset[str]] = field(default_factory=dict)
    final: tuple[int, ...] = ()
    tree: Tree = field(default_factory=dict)


def digests(archive: Path) -> dict[int, frozenset[str]]:
    """Return a digest of the files that each step is restored to, one each."""
    scratch = Path(os.environ[SCRATCH]) / "restored"
    shutil.rmtree(scratch, ignore_errors=True)
    view, found = inshrink_core.Archive.open(archive).sequential(), {}
    for step in view.steps:
        layout = restorable_layout(view[step])
        paths = inshrink_core.formats.write_checkpoint(view[step], scratch / str(step), layout=layout)
        contents = [(path.relative_to(scratch).as_posix(), path.read_bytes()) for path in paths]
        joined = "|".join(f"{path}:{zlib.crc32(data):08x}:{len(data)}" for path, data in contents)
        found[step] = frozenset({joined})
    shutil.rmtree(scratch, ignore_errors=True)
    return found


def judge_archive(
    archive: Path, expected: Expected, must: tuple[int, ...], *, deep: bool = True
) -> Iterator[str]:
    """Yield what is wrong with an archive: steps that are lost, others that are readable, and damage."""
    if not is_archive(archive):
        if must:
            yield f"lost: steps {must}, there is no archive"
        return
    try:
        found = digests(archive)
        checked = inshrink_core.verify(archive, deep=deep)
    except (InshrinkError, OSError) as error:
        yield f"{'lost' if must else 'refused'}: {type(error).__name__}: {error}"
        return
    yield from (f"lost: step {step}" for step in must if step not in found)
    for step, digest in found.items():
        if step not in expected.steps:
            yield f"wrong: step {step} was never written"
        elif not digest <= expected.steps[step]:
            yield f"wrong: step {step} restores to something else"
    yield from (f"wrong: verify: {problem}" for problem in checked.problems)


@contextmanager
def observed(note: Note, evaluator: Callable[[], Any]) -> Iterator[None]:
    """Note every frame as promised when its commit has returned; judge bounds here; give ids that repeat.

    A frame of a group is promised when the group was flushed, one in parts with its last part.
    """
    commit, flush, hold = FrameWriter.commit, ArchiveWriter._flush_group, ArchiveWriter._add_to_group
    grouped: list[Any] = []

    def add_later(self: ArchiveWriter, content: bytes, info: Any) -> None:
        grouped.append(info)
        hold(self, content, info)

    def committed(self: FrameWriter, meta: Any) -> Any:
        info = commit(self, meta)
        if info not in grouped and info.files[-1].number + 1 == info.n_parts:
            note(f"committed {info.step}")
        return info

    def flushed(self: ArchiveWriter) -> None:
        group = tuple(self._group)
        flush(self)
        for info in group:
            note(f"committed {info.step}")

    with (
        mock.patch.object(FrameWriter, "commit", committed),
        mock.patch.multiple(ArchiveWriter, _flush_group=flushed, _add_to_group=add_later),
        mock.patch.object(EvaluatorRequest, "resolve", return_value=evaluator()),
        # The same ids every time: equal states are then judged once.
        mock.patch("os.urandom", lambda nbytes: bytes(range(1, 1 + nbytes))),
    ):
        yield


def promised(
    archive: str | None, required: tuple[int, ...], notes: tuple[str, ...], expected: Expected
) -> tuple[int, ...]:
    """Return the steps that must be in the verb's archive after these notes, spooled saves not counted."""
    if "done" in notes:
        return expected.final
    return tuple(sorted({*required, *noted(notes, "committed")} if archive else ()))


def noted(notes: tuple[str, ...], word: str) -> set[int]:
    """Return the steps of which something was noted."""
    return {int(note.split()[1]) for note in notes if note.split()[0] == word}
