"""Restore gain and noise of an archive: the effect of a restore at each previous step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from inshrink_core.chain import Archive, ChainState, stored_view
from inshrink_core.chain.defaults import chain_config_of
from inshrink_core.chain.gain import StepGain, TensorGain, pool, step_gain
from inshrink_core.checkpoint import TensorRole
from inshrink_core.errors import InputError
from inshrink_core.execution.device import resolve_device
from inshrink_core.formats import Run, open_run
from inshrink_core.frame import FrameInfo

__all__ = ["RestoreGain", "restore_gain"]


@dataclass(frozen=True, slots=True)
class RestoreGain:
    """Restore gain and noise of an archive, by step and tensor.

    Parameters
    ----------
    steps
        All steps whose previous step is archived too.
    """

    steps: tuple[StepGain, ...]

    @property
    def pooled(self) -> TensorGain:
        """The sums over all steps and tensors."""
        return pool(row for step in self.steps for row in step.tensors)


def restore_gain(
    archive: Archive | str | os.PathLike[str],
    against: Run | str | os.PathLike[str],
    *,
    steps: Iterable[int] | None = None,
    device: str = "auto",
) -> RestoreGain:
    """Measure how much of the run's movement each step would keep after a restore at the previous step.

    Parameters
    ----------
    archive
        The archive, or its path. Each step uses the codec and the config that encoded it.
    against
        The original run, or its path.
    steps
        Steps to measure; by default all with a previous step.
    device
        Device that encodes the steps: ``auto``, ``cpu`` or ``cuda``. It does not affect the result.

    Returns
    -------
    RestoreGain
        A gain of 0 means that a restore rolls training back to the previous step, 1 that it keeps the
        movement. The noise is the squared error of the kept movement, relative to the squared movement.

    Raises
    ------
    InputError
        Archive and run have no two consecutive steps in common.

    Notes
    -----
    A high gain is necessary for training to survive restores, but not sufficient; only a rehearsal can test
    that. The cost is about that of encoding every step once more.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, codec="lossless", steps=run.steps[:2])
    >>> round(restore_gain(target, run).pooled.gain, 3)
    1.0
    """
    run = against if isinstance(against, Run) else open_run(against)
    opened = archive if isinstance(archive, Archive) else Archive.open(archive)
    pairs = _pairs(opened, run, steps)
    if not pairs:
        raise InputError(
            "the archive and the run have no two consecutive steps in common",
            where=f"{opened.path} and {run.path}",
            remedy="a gain needs the movement from one archived step to the next",
        )
    walk, device = opened.on("cpu").sequential(), resolve_device(device)
    return RestoreGain(tuple(_step_gain(walk, run, before, info, device) for before, info in pairs))


def _pairs(archive: Archive, run: Run, steps: Iterable[int] | None) -> list[tuple[FrameInfo, FrameInfo]]:
    """Return each frame with its previous one, if the run has the originals of both."""
    chosen = None if steps is None else set(steps)
    known = {frame.frame_id: frame for frame in archive.frames}
    pairs = []
    for frame in archive.frames:
        before = known.get(frame.parent_id) if frame.parent_id is not None else None
        if before is None or (chosen is not None and frame.step not in chosen):
            continue
        if frame.step in run.steps and before.step in run.steps:
            pairs.append((before, frame))
    return pairs


def _step_gain(archive: Archive, run: Run, before: FrameInfo, info: FrameInfo, device: str) -> StepGain:
    """Encode one step again, from the decoded state of the previous step."""
    chain = replace(chain_config_of(archive.frame(info).meta), device=device)
    old_meta = archive.frame(before).meta
    decoded = archive.checkpoint(before)
    after = stored_view(run.as_archived(info.step, archive.checkpoint(info)), chain.optimizer)
    weights = [spec for spec in after.specs if spec.role is TensorRole.WEIGHT and spec.key in decoded]
    specs = (*weights, *chain.first_moments(decoded, weights))
    state = ChainState(
        references={spec.key: archive.recalled(chain, before, spec) for spec in specs},
        memory=old_meta.get("memory") if old_meta.get("codec") == chain.codec else None,
    )
    return step_gain(chain, run.as_archived(before.step, decoded), after, state)
