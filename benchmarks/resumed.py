"""One restore in the middle of a training, and what follows it: weights and optimizer from the archive.

The training goes on in a new model and a new optimizer, with the batches that the uninterrupted one gets.
Trainings that are finished are kept in a folder and not run again; two settings that decode to the same bits
share one.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import inshrink_core
from inshrink_core.chain import ArchiveSize
from inshrink_core.checkpoint import OPTIMIZER_ROLES, TensorRole
from inshrink_core.codec import get_codec
from inshrink_core.execution.kept import keep_result, key_digest, load_result
from inshrink_core.frame import FrameKind
from inshrink_core.lab.tasks.task import Task

FIRST, LATER = 25, 200
"""Steps after the restore at which losses are compared: only the first tell codecs apart."""

VERSION = 1
"""Of the trainings: results of another version are not used again."""


class Setting(NamedTuple):
    """How weights and optimizer state are stored, and whether training goes on beyond the first steps."""

    label: str
    codec: str
    config: dict[str, Any]
    optimizer: str
    far: bool = True


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A training, the step at which it fails, and what is compared.

    Parameters
    ----------
    task
        What is trained.
    n_steps
        Length of the training, as the learning rate knows it.
    save_every
        Steps from one checkpoint of the archive to the next.
    restored_at
        The last checkpoint, from which training resumes.
    later
        Steps trained on after it.
    """

    task: Task
    n_steps: int
    save_every: int
    restored_at: int
    settings: tuple[Setting, ...]
    seeds: int = 3
    later: int = LATER

    def key(self, seed: int) -> dict[str, Any]:
        """Return everything the uninterrupted training depends on."""
        lengths = [self.n_steps, self.save_every, self.restored_at, self.later]
        return {"version": VERSION, "task": self.task.name, "lengths": lengths, "seed": seed}


@dataclass
class Training:
    """A model, its optimizer and the training losses so far."""

    task: Task
    seed: int
    n_steps: int
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.task.build()
        self.optimizer = self.task.optimizer(self.model)
        self.peak = self.optimizer.param_groups[0]["lr"]

    def advance(self, steps: range) -> None:
        """Train some steps; the batch of a step follows from seed and step alone."""
        for step in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.peak * self.task.learning_rate_factor(step, self.n_steps)
            batch = self.task.batch(step, torch.Generator().manual_seed(1_000_003 * self.seed + step))
            loss = self.task.loss(self.model, batch)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if self.task.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_gradient_norm)
            self.optimizer.step()
            self.losses.append(float(loss.detach()))

    def finish(self, at: int, later: int | None, folder: Path, *, uninterrupted: bool) -> dict[str, Any]:
        """Train on from the restore; return batch losses and the validation losses."""
        self.losses.clear()
        before = self._weights()
        self.advance(range(at + 1, at + FIRST + 1))
        first, now = self.task.evaluate(self.model), self._weights()
        if uninterrupted:
            torch.save((before, now), folder / "weights.pt")
        start, goal = torch.load(folder / "weights.pt")
        extra = {"strays": float((now - goal).norm() / (goal - start).norm())}
        if later is not None:
            self.advance(range(at + FIRST + 1, at + later + 1))
            extra["later"] = self.task.evaluate(self.model)
        return {"losses": self.losses, "first": first, **extra}

    def _weights(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def train(experiment: Experiment, seed: int, folder: Path) -> dict[str, Any]:
    """Train without a failure, with checkpoints up to the restore; kept in a folder."""
    key = experiment.key(seed)
    kept = load_result(folder / "uninterrupted.json", key, "result", dict)
    if kept is not None and (folder / "weights.pt").exists():
        return kept
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    training = Training(experiment.task, seed, experiment.n_steps)
    for step in range(experiment.save_every, experiment.restored_at + 1, experiment.save_every):
        training.advance(range(step - experiment.save_every + 1, step + 1))
        content = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save({**content, "step": step}, folder / "run" / f"step_{step:06d}.pt")
    result = training.finish(experiment.restored_at, experiment.later, folder, uninterrupted=True)
    keep_result(folder / "uninterrupted.json", key, "result", result)
    return result


def measure(experiment: Experiment, setting: Setting, seed: int, folder: Path) -> dict[str, Any]:
    """Compress the run, restore its last step and resume from it; what is known is not done again.

    Returns
    -------
    dict
        ``losses`` of the batches after the restore, ``first`` and ``later`` on validation data, ``strays``,
        and the sizes of the archive.
    """
    codecs = [get_codec(name).bitstream for name in (setting.codec, "moments", "lossless")]
    asked = {**experiment.key(seed), "setting": setting[1:4], "codecs": codecs}
    known = folder / f"archive-{key_digest(asked)}.json"
    archived = load_result(known, asked, "result", dict)
    content: dict[str, Any] | None = None
    if archived is None:
        content, archived = _through_archive(setting, experiment.restored_at, folder)
        keep_result(known, asked, "result", archived)
    key = {**experiment.key(seed), "content": archived["digest"]}
    path = folder / f"resumed-{key_digest(key)}.json"
    result = load_result(path, key, "result", dict)
    if result is None and not setting.far:
        key["far"] = False
        path = folder / f"resumed-{key_digest(key)}.json"
        result = load_result(path, key, "result", dict)
    if result is None:
        if content is None:
            content, _ = _through_archive(setting, experiment.restored_at, folder)
        result = _resume(experiment, seed, folder, content, setting.far)
        keep_result(path, key, "result", result)
    return {**result, **archived}


def _resume(
    experiment: Experiment, seed: int, folder: Path, content: dict[str, Any], far: bool
) -> dict[str, Any]:
    """Go on in a model of another seed: had the restore left anything out, it would show."""
    training = Training(experiment.task, seed + 0x5EED, experiment.n_steps)
    training.seed = seed
    training.model.load_state_dict(content["model"])
    if "optimizer" in content:
        training.optimizer.load_state_dict(content["optimizer"])
    later = experiment.later if far else None
    return training.finish(experiment.restored_at, later, folder, uninterrupted=False)


def _through_archive(setting: Setting, step: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a restore of the last step gives, and what the archive takes."""
    with tempfile.TemporaryDirectory() as scratch:
        report = inshrink_core.compress(
            folder / "run",
            Path(scratch) / "run.inshrink",
            codec=setting.codec,
            config=setting.config,
            optimizer=setting.optimizer,
            threads=1,
        )
        restored = inshrink_core.restore(report.path, Path(scratch) / "restored", steps=[step])
        content: dict[str, Any] = torch.load(restored.paths[0], weights_only=True)
    return content, {**_sizes(report.size), "digest": _digest(content)}


def _sizes(size: ArchiveSize) -> dict[str, float]:
    """Return bits a parameter of the delta frames, and ratios; a parameter is one of the model."""
    deltas = [frame for frame in size.frames if frame.info.kind is FrameKind.DELTA]
    blocks = [block for frame in deltas for block in frame.tensors]
    n_weights = sum(block.spec.numel for block in blocks if block.spec.role is TensorRole.WEIGHT)
    nbytes = sum(frame.info.nbytes for frame in deltas)
    state = sum(block.nbytes for block in blocks if block.spec.role in OPTIMIZER_ROLES)
    raw = sum(frame.raw_total for frame in deltas)
    return {
        "bits_total": 8 * nbytes / n_weights,
        "bits_optimizer": 8 * state / n_weights,
        "ratio_delta": raw / nbytes,
        "ratio_chain": size.raw_total / size.nbytes,
    }


def _digest(content: dict[str, Any]) -> str:
    """Tell restored states apart by everything that training continues from."""
    state = content.get("optimizer", {}).get("state", {})
    tensors = [*content["model"].values(), *(t for held in state.values() for t in held.values())]
    digest = hashlib.sha256(repr(sorted(state)).encode())
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
    """Train on one thread: the last bits of a training depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
