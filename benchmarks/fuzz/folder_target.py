"""Attacks on whole runs: what is left of a checkpoint is archived whole, or named; nothing is silent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import inshrink_core
from benchmarks.fuzz import runs, scratch
from benchmarks.fuzz.sealing import packed_files, unpacked_files
from benchmarks.fuzz.target import BrokenPromiseError, require
from inshrink_core.errors import UnreadableError
from inshrink_core.formats import Run, open_run
from inshrink_core.formats.discovery import WEIGHT_SUFFIXES

_NAMES: Final = ("README.md", "Readme.md", "c:x", "a\\b", "x\ny", "n" * 250, "é" * 120, "a/b", "A/B")
"""Side files, some of which no restore would write."""

_SUFFIXES: Final = (".pt", ".tmp", ".old", "-v1", "_2", "")
_PARTS: Final = (0.0, 0.1, 0.5, 0.9, 0.999)


class WholeRunTarget:
    """Runs of three steps whose files were cut, zeroed, flipped, deleted, renamed and added to."""

    name = "runs"

    def seeds(self) -> Sequence[bytes]:
        """Return a sound run of each layout."""
        return [packed_files(runs.run_files(layout)) for layout in runs.LAYOUTS]

    def mutate(self, rng: random.Random) -> bytes:
        """Return a run with a few files damaged."""
        files = dict(runs.run_files(rng.choice(tuple(runs.LAYOUTS))))
        for _ in range(rng.choice((1, 1, 2, 3))):
            if files:
                _damage(rng, files)
        return packed_files(files)

    def execute(self, data: bytes) -> str:
        """Archive the run, and expect every file of it in the archive or in the report."""
        files = unpacked_files(data)
        path, target = scratch.fresh("run"), scratch.absent("archived")
        runs.write_files(path, files)
        run = open_run(path)
        options: dict[str, Any] = {"codec": "lossless", "optimizer": "exact", "threads": 1}
        try:
            report = inshrink_core.compress(run, target, **options)
        except UnreadableError as error:
            report = error.report
        else:
            require(not report.unreadable, "what cannot be read is an error", str(report.unreadable[:1]))
        if report is None:
            raise BrokenPromiseError("the rest is archived")
        is_sound = any(runs.run_files(layout).items() <= files.items() for layout in runs.LAYOUTS)
        readable = not (is_sound and report.unreadable)
        require(readable, "a sound run is readable", str(report.unreadable[:1])[:500])
        named = {row.path for row in (*report.unreadable, *report.left_out)}
        found = {Path(entry) for entry in named}
        for step in report.appended:
            found |= _restored(run, target, step, named)
        for file, content in files.items():
            there = path / file
            said = found & {there, *there.parents} or not _is_known(there, content)
            require(said, "nothing is left out unsaid", repr(file)[:200])
        sound = inshrink_core.verify(target, deep=True, against=run, skip_damaged=True)
        require(sound.ok, "what was archived is sound", str(sound.problems[:1])[:500])
        is_whole = inshrink_core.verify(target, against=run).ok
        require(is_whole != bool(report.unreadable), "sound means that nothing is lost")
        return "refused" if report.unreadable else "different"


def _is_known(path: Path, content: bytes) -> bool:
    """Tell whether a file may be a part of a checkpoint, by its suffix or its first bytes."""
    if path.name.endswith((".toml", ".json", *_NAMES)):
        return False
    return path.suffix in WEIGHT_SUFFIXES or content[:4] == b"PK\x03\x04" or content[8:10] == b'{"'


def _restored(run: Run, target: Path, step: int, named: set[str]) -> set[Path]:
    """Restore a step; return what came of which files, each byte for byte.

    Raises
    ------
    BrokenPromiseError
        A file of the step is missing, and nobody said so.
    """
    out, origin = scratch.absent("restored"), run.path_of(step)
    inshrink_core.restore(target, out, steps=[step], threads=1)
    back = runs.files_of(out)
    there = {origin.name: origin.read_bytes()} if origin.is_file() else runs.files_of(origin)
    for name, content in there.items():
        source = origin if origin.is_file() else origin / name
        comes_back = str(source) in named or back.get(name) == content
        require(comes_back, "what was archived comes back", f"step {step}, {name!r}"[:500])
    return {origin}


def _damage(rng: random.Random, files: runs.Files) -> None:
    """Damage a file, or add one."""
    name = rng.choice(sorted(files))
    content, kind = files[name], rng.randrange(9)
    if kind <= 1:
        files[name] = content[: int(len(content) * rng.choice(_PARTS))]
    elif kind == 2:
        files[name] = bytes(len(content))
    elif kind == 3:
        at = rng.randrange(len(content) + 1)
        files[name] = content[:at] + bytes(len(content) - at)
    elif kind == 4 and content:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 8, 200))):
            changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        files[name] = bytes(changed)
    elif kind == 5:
        del files[name]
    elif kind == 6:
        folder, _, base = name.rpartition("/")
        stem = (base.partition(".")[0] if rng.random() < 0.5 else "") or base
        files[f"{folder}/{stem}{rng.choice(_SUFFIXES)}".strip("/")] = files.pop(name)
    elif kind == 7:
        for other in [entry for entry in files if entry.partition("/")[0] == name.partition("/")[0]]:
            del files[other]
        files[f"{name.partition('/')[0]}/config.json"] = b"{}"
    else:
        folder = name.rpartition("/")[0] or "side"
        files[f"{folder}/{rng.choice(_NAMES)}"] = rng.randbytes(9)
