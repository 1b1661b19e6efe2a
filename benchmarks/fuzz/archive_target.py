"""Attacks on archives: every verb that reads one, and what it promises of the result."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import re
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

import inshrink_core
from benchmarks.fuzz import runs, scratch
from benchmarks.fuzz.archive_mutants import Mutant, Truth, beheaded, blind, repaired, with_special
from benchmarks.fuzz.judging import MAX_MESSAGE_CHARS, is_too_big
from benchmarks.fuzz.sealing import is_packed_name
from benchmarks.fuzz.target import RawError, require
from inshrink_core.analysis import moved_between
from inshrink_core.chain import Archive
from inshrink_core.cli import main
from inshrink_core.errors import InshrinkError, NotFoundError
from inshrink_core.verbs.inspect import inspect

_EXIT_BUG: Final = 70
_NAME: Final = "run.inshrink"
_RARE: Final = 16
"""Verbs that take most of a case's time run in one of so many cases each."""

_PACKED: Final = ("packed", "exported")
"""Archives that are one file."""

_SELDOM: Final = 3
"""The same where they are what is attacked: writers, before all."""

_TOGETHER: Final = 0.85
"""Share of cases that restore all steps by one call, which decodes each frame once."""


def digest(tensor: torch.Tensor) -> bytes:
    """Return what tells a tensor from others, its dtype and shape included."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + flat.numpy().tobytes()).digest()[:8]


def state_digest(state: dict[str, torch.Tensor]) -> bytes:
    """Return what tells a state dict from others."""
    total = hashlib.sha256()
    for key, tensor in sorted(state.items()):
        total.update(key.encode(errors="surrogatepass") + digest(tensor))
    return total.digest()[:8]


def folder_digest(folder: Path) -> bytes:
    """Return what tells the files of a folder from others."""
    total = hashlib.sha256()
    for name, content in runs.files_of(folder).items():
        total.update(f"{name}\0{len(content)}\0".encode(errors="surrogatepass") + content)
    return total.digest()[:8]


def command_line(*words: str) -> int:
    """Run the command line in this process; a bug that it reports is raised as what it is."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, {"INSHRINK_TRACEBACK": "1", "COLUMNS": "100"}),
    ):
        code = main(list(words))
    output = err.getvalue()
    if code == _EXIT_BUG:
        frames = re.findall(r'inshrink_core/(\S+)", line ([0-9]+), in (\S+)', output)
        last = output.strip().splitlines()[-1] if output.strip() else ""
        raise RawError(last[:1000], tuple(f"{f}:{n} {name}" for f, n, name in reversed(frames))[:4])
    lines = output.partition("Traceback")[2].splitlines() if "Traceback" in output else output.splitlines()
    n = len(lines[-1]) if lines else 0
    require(n <= MAX_MESSAGE_CHARS, "the command line's error fits a screen", f"{n} characters")
    return code


class ArchiveTarget:
    """Mutants of archives, read by every verb.

    Parameters
    ----------
    name
        Of the target.
    sealed
        Whether every checksum is repaired after the mutation.
    is_chosen
        Which of the archives, by name, are attacked.
    change
        Makes the mutant, in the place of what `sealed` asks for.
    """

    def __init__(
        self,
        name: str,
        *,
        sealed: bool,
        is_chosen: Callable[[str], bool] = lambda name: True,
        change: Callable[[random.Random, runs.Files], runs.Files] | None = None,
    ) -> None:
        self.name = name
        self._change = change
        self._sealed = sealed
        self._is_chosen = is_chosen

    def seeds(self) -> Sequence[bytes]:
        """Return every archive, untouched."""
        return [
            Mutant(base, self._sealed, files, truth_of(base)).pack()
            for base, files in runs.archives().items()
            if self._is_chosen(base)
        ]

    def mutate(self, rng: random.Random) -> bytes:
        """Return an archive with an accident, or an attack."""
        names = [name for name in runs.archives() if self._is_chosen(name)]
        base = rng.choice(names)
        files = runs.archives()[base]
        if self._change is not None:
            changed = self._change(rng, files)
        elif self._sealed:
            changed = repaired(rng, files)
        else:
            alike = [
                other for other in runs.archives().values() if is_packed_name(other) == is_packed_name(files)
            ]
            changed = blind(rng, files, tuple(alike))
        return Mutant(base, self._sealed, changed, truth_of(base)).pack()

    def execute(self, data: bytes) -> str:
        """Read the archive by every verb, the costly ones in some cases only."""
        mutant = Mutant.unpack(data)
        path = _write(mutant)
        examination = Examination(path, mutant, zlib.crc32(data))
        found = examination.run()
        runs.require_outside_untouched()
        return found


def _write(mutant: Mutant) -> Path:
    folder = scratch.fresh("archive")
    if len(mutant.files) == 1 and all(name.endswith(".inshrink") for name in mutant.files):
        (content,) = mutant.files.values()
        (folder / _NAME).write_bytes(content)
    else:
        (folder / _NAME).mkdir()
        runs.write_files(folder / _NAME, mutant.files)
    return folder / _NAME


@cache
def truth_of(base: str) -> Truth:
    """Return what an untouched archive gives."""
    files = runs.archives()[base]
    path = _write(Mutant(base, False, files, {}))
    archive = Archive.open(path)
    truth: Truth = {"steps": list(archive.steps), "head": archive.steps[-1], "files": {}, "state": {}}
    out = scratch.absent("truth")
    inshrink_core.restore(path, out, steps=archive.steps, threads=1)
    truth["all"] = folder_digest(out)
    truth["id"] = archive.reader.archive_id
    # Steps of older branches too: whoever names one gets it.
    for step in sorted({frame.step for frame in archive.reader.frames}):
        out = scratch.absent("truth")
        inshrink_core.restore(path, out, steps=[step], threads=1)
        truth["files"][step] = folder_digest(out)
        truth["state"][step] = state_digest(inshrink_core.verbs.load_state_dict(path, step))
    return truth


class Examination:
    """One archive, read by one verb after the other.

    Parameters
    ----------
    path
        Where it lies.
    mutant
        What it is.
    choice
        A number that says which of the costly verbs are run.
    """

    def __init__(self, path: Path, mutant: Mutant, choice: int) -> None:
        self._path, self._truth, self._sealed = path, mutant.truth, mutant.sealed
        self._rng = random.Random(choice)
        is_special = any(content.startswith(runs.SPECIAL) for content in mutant.files.values())
        self._rare = _SELDOM if is_special else _RARE
        self._refused = self._different = False

    def run(self) -> str:
        """Return the class of the case.

        Raises
        ------
        BrokenPromiseError
            A verb gave another result than the untouched archive's, or than another verb's.
        """
        archive = self._tried(lambda: Archive.open(self._path))
        if archive is not None and self._rng.randrange(4) == 0:
            self._inspect(archive)
        verified = self._verify()
        self._often_enough(self._command_lines)
        if archive is not None:
            steps = self._tried(lambda: archive.steps) or ()
            if not self._sealed and archive.reader.archive_id == self._truth.get("id"):
                # Some may be missing; none of a branch that training had left may be shown.
                holds = set(steps) <= set(self._truth["steps"])
                require(holds, "no other steps are given for the last ones", f"{list(steps)[:9]}")
            restored = self._restore(archive, steps, verified)
            self._read_otherwise(archive, steps, restored)
            self._change(steps, restored)
        else:
            require(not verified, "verified implies restores", "it does not even open")
        return "refused" if self._refused else "different" if self._different else "same"

    def _tried(self, call: Callable[[], Any]) -> Any:
        """Call; None where the archive is refused."""
        try:
            return call()
        except InshrinkError as error:
            self._refused = True
            if len(str(error)) > MAX_MESSAGE_CHARS or is_too_big(error):
                raise
            return None

    def _same(self, found: object, expected: object, verb: str, detail: str) -> None:
        """Blind mutants may not give another result; others are other archives."""
        if found == expected:
            return
        self._different = True
        require(self._sealed, f"{verb} gives what was stored, or an error", detail)

    def _often_enough(self, call: Callable[[], None]) -> None:
        if self._rng.randrange(self._rare) == 0:
            call()

    def _inspect(self, archive: Archive) -> None:
        document = self._tried(lambda: inspect(archive).facts)
        if document is not None:
            self._different |= document["steps"] != self._truth["steps"]

    def _verify(self) -> bool:
        found = self._tried(lambda: inshrink_core.verify(self._path, deep=True))
        if found is None or not found.ok:
            self._refused = True
            problems = found.problems if found is not None else ()
            require(
                all(len(p.what) + len(p.where) <= MAX_MESSAGE_CHARS for p in problems),
                "a problem fits a screen",
                f"{max((len(p.what) for p in problems), default=0)} characters",
            )
            return False
        return True

    def _restore(self, archive: Archive, steps: Sequence[int], verified: bool) -> dict[int, Path]:
        """Restore the step a user gets who names none, and every step, together or each alone."""
        if verified:
            self._same(list(steps), self._truth["steps"], "verify", f"steps {list(steps)[:9]}")
        if self._rng.randrange(4) == 0 and (out := self._restored(None, verified)):
            expected = self._truth["files"].get(self._truth["head"])
            self._same(folder_digest(out), expected, "restore of the newest step", f"of {list(steps)[:9]}")
        if list(steps) == self._truth["steps"] and self._rng.random() < _TOGETHER:
            if steps and (out := self._restored(list(steps), verified)):
                self._same(folder_digest(out), self._truth["all"], "restore", f"steps {list(steps)[:9]}")
            return {}
        found = {step: self._restored([step], verified) for step in steps}
        restored = {step: out for step, out in found.items() if out is not None}
        for step, out in restored.items():
            self._same(folder_digest(out), self._truth["files"].get(step), "restore", f"step {step}")
        return restored

    def _restored(self, steps: list[int] | None, verified: bool) -> Path | None:
        """Restore into a folder; None where it is refused, which a verified archive never is."""
        out = scratch.absent(f"out-{steps}")
        try:
            inshrink_core.restore(self._path, out, steps=steps, threads=1)
        except InshrinkError as error:
            self._refused = True
            if len(str(error)) > MAX_MESSAGE_CHARS or is_too_big(error):
                raise
            excused = steps is None and isinstance(error, NotFoundError)
            require(excused or not verified, "verified implies restores", f"steps {steps}: {error}"[:1000])
            return None
        return out

    def _read_otherwise(self, archive: Archive, steps: Sequence[int], restored: dict[int, Path]) -> None:
        """Whatever way a tensor is read, it is the same."""
        for step in {*restored, *(steps[-1:] if self._rng.random() < 0.5 else ())}:
            state = self._tried(lambda step=step: inshrink_core.verbs.load_state_dict(archive, step))
            if state is None:
                excused = step not in restored or self._holds_other_names(archive, step)
                require(excused, "what restores also loads", f"step {step}")
                continue
            self._same(state_digest(state), self._truth["state"].get(step), "load_state_dict", f"step {step}")
            if self._sealed and step in restored:
                self._written_as_decoded(archive, step, restored[step])
        if len(steps) > 1:
            self._often_enough(
                lambda: self._tried(lambda: moved_between(archive[steps[-2]], archive[steps[-1]]))
            )

    @staticmethod
    def _holds_other_names(archive: Archive, step: int) -> bool:
        """Whether names that collide in a state dict excuse that it cannot be made."""
        names = [spec.name for spec in archive[step].specs]
        return len(set(names)) != len(names)

    def _written_as_decoded(self, archive: Archive, step: int, folder: Path) -> None:
        """What stands in a restored file is what the tensor decodes to."""
        checkpoint = archive[step]
        for layout in checkpoint.files:
            path = folder / layout.path
            if not path.is_file():
                continue
            content = path.read_bytes()
            for region in layout.regions:
                for member in region.members:
                    if member.stride is not None or len(region.members) > 1:
                        continue
                    tensor = checkpoint[member.key]
                    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    start = region.offset + member.start
                    require(
                        content[start : start + len(raw)] == raw,
                        "restored is what was decoded",
                        f"step {step}, {member.key!r}"[:500],
                    )

    def _change(self, steps: Sequence[int], restored: dict[int, Path]) -> None:
        """Verbs that write: what was there before is there after, or they refuse."""
        self._often_enough(self._export)
        if self._path.is_dir() and not self._sealed:
            self._often_enough(self._forget)
        if self._path.is_dir() and steps:
            keep = steps[-1]
            self._often_enough(
                lambda: self._tried(lambda: inshrink_core.verbs.prune(self._path, keep=[keep]))
            )
        if self._path.is_dir():
            self._often_enough(lambda: self._append(steps, restored))

    def _forget(self) -> None:
        """Give up what is missing: what is left is listed, and nothing that was not there."""
        done = self._tried(lambda: inshrink_core.verbs.prune(self._path, forget_missing=True, apply=True))
        if done is not None and done.manifest:
            archive = Archive.open(self._path)
            require(
                archive.last == done.head and set(archive.steps) <= self._truth["files"].keys(),
                "what is given up is gone, and the rest is listed",
                f"steps {archive.steps[:9]}",
            )

    def _export(self) -> None:
        complete = self._rng.random() < 0.5
        out = scratch.absent("exported.inshrink")
        self._tried(lambda: inshrink_core.verbs.export(self._path, out, weights_only=not complete))

    def _append(self, steps: Sequence[int], restored: dict[int, Path]) -> None:
        before = {step: folder_digest(folder) for step, folder in restored.items()}
        source = scratch.fresh("next")
        runs.save_torch_run(source, (40,))
        if self._tried(lambda: inshrink_core.compress(source, self._path, threads=1)) is None:
            return
        archive = Archive.open(self._path)
        for step in before:
            out = scratch.absent("again")
            if step not in archive.steps:
                # Appended to what a missing or unreadable head left: the step is on another branch now.
                require(self._refused or self._sealed, "appending keeps every step", f"step {step}")
                continue
            inshrink_core.restore(self._path, out, steps=[step], threads=1)
            same = folder_digest(out) == before[step]
            require(same, "appending changes no step", f"step {step}")

    def _command_lines(self) -> None:
        """What people see: inspect and verify, as text and as JSON."""
        path = str(self._path)
        json = ("--json",) if self._rng.random() < 0.5 else ()
        code = command_line("inspect", path, "--tensors", *json)
        self._refused |= code != 0
        if code == 0 and not self._sealed and (archive := self._tried(lambda: Archive.open(path))):
            found = list(self._tried(lambda: archive.steps) or ())
            self._same(found, self._truth["steps"], "inspect", f"exit code 0, steps {found[:9]}")
        self._refused |= command_line("verify", path, *json) != 0


def targets() -> list[ArchiveTarget]:
    """Return the attacks on archives."""
    return [
        ArchiveTarget("archive-blind", sealed=False, is_chosen=lambda name: name != "packed"),
        ArchiveTarget("archive-sealed", sealed=True, is_chosen=lambda name: name != "packed"),
        ArchiveTarget(
            "archive-beheaded", sealed=False, is_chosen=lambda name: name not in _PACKED, change=beheaded
        ),
        ArchiveTarget(
            "archive-special", sealed=False, is_chosen=lambda name: name not in _PACKED, change=with_special
        ),
        ArchiveTarget("packed-blind", sealed=False, is_chosen=lambda name: name == "packed"),
        ArchiveTarget("packed-sealed", sealed=True, is_chosen=lambda name: name == "packed"),
    ]
