"""The verbs that are ended, on runs so small that a case takes milliseconds, and what each has promised."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import inshrink_core
from benchmarks.crash.disk import Tree, read_tree
from benchmarks.crash.judging import Expected, Note, judge_archive
from inshrink_core.errors import StorageError
from inshrink_core.evaluate import Evaluation
from inshrink_core.metrics import Direction

RUN, ARCHIVE, PACKED, OUT = "run", "archives/a.inshrink", "packed.inshrink", "new/parents/out"
STEPS = (1, 2, 3, 4)
SHAPES = {"a.weight": (6, 8), "b.weight": (3, 6)}


def state(step: int) -> dict[str, Tensor]:
    """Return the weights of a step: small movements from step to step, the same whenever asked."""
    found = {}
    for name, shape in SHAPES.items():
        base = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        total = torch.randn(shape, generator=base)
        for before in range(step):
            moved = torch.Generator().manual_seed(1000 * before + zlib.crc32(name.encode()) % 997)
            total = total + 0.01 * torch.randn(shape, generator=moved)
        found[name] = total
    return found


def moments(step: int) -> dict[str, Any]:
    """Return an AdamW state of a step, as PyTorch saves it."""
    rows = {}
    for i, tensor in enumerate(state(step).values()):
        rows[i] = {"step": torch.tensor(float(step)), "exp_avg": tensor * 0.1, "exp_avg_sq": tensor**2}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0, 1]}
    return {"state": rows, "param_groups": [group]}


def write_run(folder: Path, steps: tuple[int, ...] = STEPS) -> None:
    """Write a run of one file a step."""
    folder.mkdir(parents=True)
    for step in steps:
        content = {"model": state(step), "optimizer": moments(step), "step": step}
        torch.save(content, folder / f"step_{step:06}.pt")


def write_run_of_folders(folder: Path, steps: tuple[int, ...] = STEPS) -> None:
    """Write a run of three files a step."""
    for step in steps:
        inside = folder / f"checkpoint-{step}"
        inside.mkdir(parents=True)
        save_file(state(step), inside / "model.safetensors")
        torch.save(moments(step), inside / "optimizer.pt")
        (inside / "trainer_state.json").write_text(f'{{"global_step": {step}}}')


VERBS: dict[str, type[Verb]] = {}
"""Every verb by its name, in the order of their definitions."""


class Verb:
    """One verb: its beginning, what is done, and how it is run again.

    `archive` is the one that the verb writes, if any; `originals` must not change; `exact_again` says
    whether a second run ends with the same bits.
    """

    name: ClassVar[str]
    archive: ClassVar[str | None] = None
    originals: ClassVar[tuple[str, ...]] = (RUN,)
    exact_again: ClassVar[bool] = True
    again_within: ClassVar[bool] = False
    """Whether a process that was refused something goes on, and runs it again itself."""
    required: ClassVar[tuple[int, ...]] = ()
    """Steps of `archive` from the beginning that must be there always."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            VERBS[cls.name] = cls

    def prepare(self, root: Path) -> None:
        """Make what the verb begins with."""
        write_run(root / RUN)

    def act(self, root: Path, note: Note) -> None:
        """Run the verb; notes what it has promised."""
        raise NotImplementedError

    def again(self, root: Path) -> bool:
        """Run it again, as its user would; False where it is refused, for its output is there."""
        self.act(root, lambda _: None)
        return True

    def outputs(self, root: Path, expected: Expected, notes: tuple[str, ...]) -> Iterator[str]:
        """Yield what is wrong with outputs that are no archive that `archive` names."""
        return iter(())


def _compress(root: Path, **options: Any) -> Any:
    options = {"codec": "lattice", "keyframe_every": 3, "threads": 1, **options}
    return inshrink_core.compress(root / RUN, root / ARCHIVE, **options)


class Compress(Verb):
    """A first compress, into folders that are made."""

    name = "compress"
    archive = ARCHIVE

    def act(self, root: Path, note: Note) -> None:
        _compress(root)


class Append(Compress):
    """A compress that goes on."""

    name = "append"
    again_within = True
    required = (1, 2)

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        _compress(root, steps=self.required)


class Parts(Append):
    """A compress in two parts, the second of which makes steps live and commits."""

    name = "parts"

    def act(self, root: Path, note: Note) -> None:
        for part in ("1/2", "2/2"):
            _compress(root, part=part)


class Commit(Parts):
    """The commit of what two parts left."""

    name = "commit"
    required = (1, 2, 3, 4)

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        with mock.patch("inshrink_core.verbs.shared.parts.commit_if_last"):
            super().act(root, lambda _: None)

    def act(self, root: Path, note: Note) -> None:
        inshrink_core.verbs.commit(root / ARCHIVE)


def crowded() -> AbstractContextManager[Any]:
    """Write frames in groups of three, and more than two small files together."""
    limits = {"MAX_SMALL_FILES": 2, "GROUP_FRAMES": 3}
    return mock.patch.multiple("inshrink_core.archive.segment", **limits)


class Group(Append):
    """A compress of groups that goes on where each frame is a file."""

    name = "group"

    def prepare(self, root: Path) -> None:
        write_run(root / RUN, (1, 2, 3, 4, 5, 6, 7))
        _compress(root, steps=self.required)

    def act(self, root: Path, note: Note) -> None:
        with crowded():
            _compress(root)


class LinearEvaluator:
    """An evaluator of this process: the weights on fixed inputs."""

    spec = f"{__file__}:evaluate"
    which = ""
    metric: str | None = "loss"
    direction = Direction.LOWER

    def evaluate(self, state_dict: Any) -> Evaluation:
        found = state_dict.state_dict() if hasattr(state_dict, "state_dict") else state_dict
        inputs = torch.linspace(-1, 1, 64).reshape(8, 8)
        hidden = inputs @ found["a.weight"].float().T
        log_probs = torch.log_softmax(hidden @ found["b.weight"].float().T, dim=1)
        loss = float(-log_probs[:, 0].mean())
        return Evaluation(
            metric="loss",
            direction=Direction.LOWER,
            value=loss,
            metrics={"loss": loss},
            log_probs=log_probs.numpy().astype(numpy.float32),
        )

    def close(self) -> None:
        """Nothing is held."""


class Bounded(Compress):
    """A compress under a promise; where it goes on it may choose otherwise, within the promise."""

    name = "bounded"
    exact_again = False

    def act(self, root: Path, note: Note) -> None:
        report = _compress(root, keyframe_every=32, max_drop=0.05, max_divergence=0.05)
        if report.bound_record is None or any(
            quality.drop > 0.05 for quality in report.bound_record.steps.values()
        ):
            raise RuntimeError("the promise is not kept")


class Watch(Compress):
    """A watch that ends with the last step."""

    name = "watch"

    def act(self, root: Path, note: Note) -> None:
        how = {"settings": {"shaping": "auto"}, "optimizer": "compressed"}
        report = _compress(root, watch=True, interval=0.001, until=STEPS[-1], **how)
        if report.ended != "until":
            raise RuntimeError(f"the watch ended: {report.ended}")


class Prune(Verb):
    """A prune that re-keys one frame and rewrites another."""

    name = "prune"
    archive = ARCHIVE
    required = (3, 5, 6)

    def prepare(self, root: Path) -> None:
        write_run(root / RUN, (1, 2, 3, 4, 5, 6))
        _compress(root, keyframe_every=32)

    def act(self, root: Path, note: Note) -> None:
        inshrink_core.verbs.prune(root / ARCHIVE, keep=(3,), keep_last=2, apply=True)


class Strip(Prune):
    """A prune of which all steps but the last ones lose their optimizer state."""

    name = "strip"
    required = (1, 2, 3, 4, 5, 6)

    def act(self, root: Path, note: Note) -> None:
        inshrink_core.verbs.prune(root / ARCHIVE, optimizer_last=2, apply=True)


class Thin(Prune):
    """A prune of which every file is a segment."""

    name = "thin"

    def prepare(self, root: Path) -> None:
        write_run(root / RUN, (1, 2, 3, 4, 5, 6))
        with crowded():
            _compress(root, keyframe_every=32)

    def act(self, root: Path, note: Note) -> None:
        with crowded():
            super().act(root, note)


class Release(Verb):
    """A release of the originals of two steps out of four, of three files each."""

    name = "release"
    archive = ARCHIVE
    originals = ()
    required = STEPS

    def prepare(self, root: Path) -> None:
        write_run_of_folders(root / RUN)
        _compress(root, codec="lossless", optimizer="exact")

    def act(self, root: Path, note: Note) -> None:
        inshrink_core.verbs.release(root / RUN, root / ARCHIVE, apply=True)

    def outputs(self, root: Path, expected: Expected, notes: tuple[str, ...]) -> Iterator[str]:
        """Yield originals of which a reader sees a part alone."""
        names = {"model.safetensors", "optimizer.pt", "trainer_state.json"}
        for step in STEPS:
            folder = root / RUN / f"checkpoint-{step}"
            there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
            if there not in (names, set()) or (step > STEPS[-3] and not there):
                yield f"lost: of the original of step {step} there is {sorted(there)}"
            if there and step <= STEPS[-3] and "done" in notes:
                yield f"refused: the original of step {step} is still there"


EXACT: dict[str, Any] = {"codec": "lossless", "optimizer_state": "exact", "threads": 1}


def network() -> nn.Module:
    """Return a model of the weights that `state` gives."""
    return nn.ModuleDict({"a": nn.Linear(8, 6, bias=False), "b": nn.Linear(6, 3, bias=False)})


class Saving(Verb):
    """A saver in a training of four saves, beside which it archives."""

    name = "saver"
    again_within = True
    archive = ARCHIVE
    originals = ()
    until: ClassVar[int] = STEPS[-1]

    def prepare(self, root: Path) -> None:
        (root / "archives").mkdir()

    def act(self, root: Path, note: Note) -> None:
        with inshrink_core.Saver(root / ARCHIVE, network(), **EXACT) as saver:
            for step in range((saver.last_step or 0) + 1, self.until + 1):
                self._save(saver, step)
                note(f"saved {step}")

    def _save(self, saver: inshrink_core.Saver, step: int) -> None:
        saver._state.models[""].load_state_dict(state(step))
        saver.save(step, {"seed": step})

    def recover(self, root: Path) -> None:
        """Open the saver and close it: what an earlier one saved is archived."""
        inshrink_core.Saver(root / ARCHIVE, nn.Linear(1, 1), codec="lossless").close()


class Poisoned(Saving):
    """A saver that finds two saves on a new branch in its spool, the first of which was cut off."""

    name = "poisoned"
    required = (1,)
    until = 5
    bad: ClassVar[str] = "step_000003.pt"
    _bad: bytes

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        refuse = mock.patch("inshrink_core.chain.ChainWriter.append", side_effect=StorageError("full"))
        saver = inshrink_core.Saver(root / ARCHIVE, network(), **EXACT)
        for step in (1, 2):
            saver.save(step)
        saver.restore(1)
        with refuse, mock.patch("inshrink_core.training.archiver.Archiver.wait_for_room"):
            for step in (3, 4):
                self._save(saver, step)
            with contextlib.suppress(StorageError):
                saver.close()
        (path,) = root.rglob(self.bad)
        self._bad = path.read_bytes()[:-40]
        path.write_bytes(self._bad)

    def act(self, root: Path, note: Note) -> None:
        note("saved 4")
        super().act(root, note)

    def outputs(self, root: Path, expected: Expected, notes: tuple[str, ...]) -> Iterator[str]:
        if [path.read_bytes() for path in root.rglob(self.bad)] != [self._bad]:
            yield "lost: what could not be read is not there once, as it was"


class Crowd(Saving):
    """A saver whose small files are put together."""

    name = "crowd"

    def act(self, root: Path, note: Note) -> None:
        with crowded():
            super().act(root, note)


class _OneFile(Verb):
    """A verb that makes one new archive of another."""

    target: ClassVar[str]
    originals = (RUN, ARCHIVE)

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        _compress(root)

    def outputs(self, root: Path, expected: Expected, notes: tuple[str, ...]) -> Iterator[str]:
        target = root / self.target
        if os.path.lexists(target):
            yield from judge_archive(target, expected, expected.final)
        elif "done" in notes:
            yield f"lost: {self.target} is not there"

    def again(self, root: Path) -> bool:
        self.act(root, lambda _: None, force=True)
        return True


class Pack(_OneFile):
    """A folder packed into one file, in folders that are made."""

    name = "pack"
    target = f"{OUT}/{PACKED}"

    def act(self, root: Path, note: Note, *, force: bool = False) -> None:
        inshrink_core.verbs.export(root / ARCHIVE, pack=root / self.target, force=force)


class Unpack(_OneFile):
    """A packed archive made a folder again."""

    name = "unpack"
    target = f"{OUT}/b.inshrink"
    originals = (RUN, ARCHIVE, PACKED)

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        inshrink_core.verbs.export(root / ARCHIVE, pack=root / PACKED)

    def act(self, root: Path, note: Note, *, force: bool = False) -> None:
        inshrink_core.verbs.export(root / PACKED, unpack=root / self.target)

    def again(self, root: Path) -> bool:
        # What is there is whole, as was judged before, and refusing to replace it is right.
        missing = not os.path.lexists(root / self.target)
        return missing and super().again(root)


class Export(_OneFile):
    """One step as one file."""

    name = "export"
    target = f"{OUT}/model.inshrink"

    def act(self, root: Path, note: Note, *, force: bool = False) -> None:
        inshrink_core.verbs.export(root / ARCHIVE, root / self.target, step=3, force=force)


class Restore(Verb):
    """A step of three files, restored to a folder that is made."""

    name = "restore"
    originals = (RUN, ARCHIVE)
    force: ClassVar[bool] = False

    def prepare(self, root: Path) -> None:
        write_run_of_folders(root / RUN)
        _compress(root, codec="lossless")

    def act(self, root: Path, note: Note) -> None:
        inshrink_core.restore(root / ARCHIVE, root / OUT, steps=[3], threads=1, force=self.force)

    def again(self, root: Path) -> bool:
        inshrink_core.restore(root / ARCHIVE, root / OUT, steps=[3], threads=1, force=True)
        return True

    def outputs(self, root: Path, expected: Expected, notes: tuple[str, ...]) -> Iterator[str]:
        new, old = self._files(expected.tree), self._old()
        found = self._files(read_tree(root))
        sides = set()
        for path, content in found.items():
            if "/." in path:
                continue
            if content == new.get(path):
                sides |= {"new"} if content != old.get(path) else set()
            elif content == old.get(path):
                sides.add("old")
            else:
                yield f"wrong: {path} is neither the old file nor the new one"
        if len(sides) > 1:
            yield "wrong: a mixture of two steps"
        if "done" in notes:
            yield from (f"lost: {path} is not the new one" for path in new if found.get(path) != new[path])

    def _files(self, tree: Tree) -> Tree:
        return {
            path: content
            for path, content in tree.items()
            if path.startswith(f"{OUT}/") and content is not None
        }

    def _old(self) -> Tree:
        return {}


class Replace(Restore):
    """A step of three files, restored over those of another."""

    name = "replace"
    force = True
    _before: Tree

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        inshrink_core.restore(root / ARCHIVE, root / OUT, steps=[1], threads=1)
        self._before = self._files(read_tree(root))

    def _old(self) -> Tree:
        return self._before
