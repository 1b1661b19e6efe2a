"""Compressing a run: in this process, in parts, or beside a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from inshrink_core.request import python_call
from inshrink_core.verbs.shared.compressing import Compressing, CompressReport


@dataclass(frozen=True)
class Compress(Compressing):
    """Write a run into an archive: the steps it does not hold yet.

    Raises
    ------
    StepConflictError
        A step is in the archive with other values, and `resumed_from` does not say why.
    InputError
        The archive was written with another codec, or a step does not exist.
    BaseModelError
        `base` is another model, or not the one that the archive was begun with.
    UnreadableError
        Checkpoints of the run cannot be read: they are damaged, or do not match their own checksums. All
        others are archived, and its `report` is what is returned otherwise. UnreadableStepError where
        `steps` has the step of one.
    RefusedLinkError
        Tensors lie behind a link out of the run, and `follow_links` is not set.
    EvaluatorError, UntrustedCodeError
        The evaluator failed, or may not run. Steps committed before are kept.
    LockedError
        Another process writes the archive; with `watch`, for longer than a dozen intervals.

    Notes
    -----
    With `watch` the function stays beside a training, and returns a `WatchReport`, also after Ctrl-C: steps
    that were committed are kept, and one that was being written is archived by the next watch. A directory
    without a checkpoint is waited in. `progress` then gets what happens, too: the stage is ``watch``, and
    `detail` says it, as "archived step 400". Others may read, prune or append between two
    writings; each writing decodes the last step again, at most `keyframe_every` frames.

    What is not said of codec, settings and optimizer is as the archive was written so far
    (`inshrink_core.chain.ChainConfig`). Under bounds (`inshrink_core.verbs.Bounds`) each step is written with
    the smallest frame found that keeps them, or exactly if no smaller one does.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=run.steps[:3])
    >>> report.appended == run.steps[:3]
    True
    >>> watched = inshrink_core.compress(run.path, target, watch=True, interval=0.1, until=run.steps[3])
    >>> watched.ended, watched.appended == run.steps[3:4]
    ('until', True)
    """

    EXAMPLES: ClassVar = (
        "inshrink compress runs/digits -o digits.inshrink --coarseness 4",
        "inshrink compress runs/digits -o part.inshrink --steps 100:500 --codec inshrinkerator --set bins=16",
        "inshrink compress runs/digits -o bounded.inshrink --max-drop 0.01 --evaluator judge.py:evaluate",
        "inshrink compress runs/tuned -o tuned.inshrink --base models/pretrained.safetensors",
    )
    INTERRUPTED: ClassVar = "committed steps are kept, and the same command continues"
    THREADED: ClassVar = True

    @property
    def events(self) -> str:
        """The stage of progress whose details are lines on stderr; empty for none."""
        return "watch" if self.watch else ""

    def perform_part(self) -> Any:
        """Write one part, and commit nothing."""
        from inshrink_core.chain.parts import Share
        from inshrink_core.verbs.modes.parts import write_part

        return write_part(self, Share.parse(str(self.part)))

    def perform(self) -> CompressReport:
        """Write what is not there."""
        if self.watch:
            from inshrink_core.verbs.modes.watch import watch_run

            return cast("CompressReport", watch_run(self))
        if self.part is not None or self.is_shared_out:
            from inshrink_core.verbs.modes.parts import compress_in_parts

            return compress_in_parts(self)
        return self.write()


compress = python_call(Compress)
