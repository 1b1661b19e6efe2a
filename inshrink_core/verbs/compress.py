"""Compress a run: in this process, in parts, or beside a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from inshrink_core.request import Request, python_call
from inshrink_core.verbs.shared.groups import Compressing

if TYPE_CHECKING:
    from inshrink_core.verbs.shared.compressing import CompressReport


@dataclass(frozen=True)
class Compress(Compressing, Request["CompressReport"]):
    """Write the steps of a run that an archive does not hold yet.

    Raises
    ------
    StepConflictError
        The archive holds a step with other values, and `resumed_from` is not given.
    InputError
        The archive was written with another codec, or a step does not exist.
    BaseModelError
        `base` is another model than the one that the archive was begun with.
    UnreadableError
        Checkpoints of the run are damaged, or fail their own checksums. All others are archived, and the
        error's `report` is the usual return value. The class is UnreadableStepError if `steps` names an
        unreadable step.
    RefusedLinkError
        A link leads to tensors outside of the run, and `follow_links` is not set.
    EvaluatorError, UntrustedCodeError
        The evaluator failed, or lacks consent to run. Steps committed before are kept.
    LockedError
        Another process writes the archive; with `watch`, for longer than a dozen intervals.

    Notes
    -----
    With `watch` the function runs beside a training, and returns a `WatchReport`, also after Ctrl-C.
    Committed steps are kept, and the next watch archives an interrupted step. The directory may be empty at
    first. `progress` receives events, too: their stage is ``watch``, and their `detail` is a text such as
    "archived step 400". Other processes may read, prune or append between two writes; each write decodes the
    last step again, from at most `keyframe_every` frames.

    Codec, settings and optimizer that are not given are those of the existing archive
    (`inshrink_core.chain.ChainConfig`). Under bounds (`inshrink_core.verbs.Bounds`) each step is written as
    the smallest frame found that keeps them, or exactly if no smaller frame does.

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
        """The progress stage whose details are printed as lines on stderr; empty for none."""
        return "watch" if self.watch else ""

    def perform_part(self) -> Any:
        """Write one part, and commit nothing."""
        from inshrink_core.verbs.shared.parts import write_part

        return write_part(self)

    def perform(self) -> CompressReport:
        """Write the steps that the archive lacks."""
        if self.watch:
            from inshrink_core.verbs.shared.watch import watch_run

            return cast("CompressReport", watch_run(self))
        if self.part is not None or self.is_shared_out:
            from inshrink_core.verbs.shared.parts import compress_in_parts

            return compress_in_parts(self)
        from inshrink_core.verbs.shared.compressing import write_run

        return write_run(self)


compress = python_call(Compress)
