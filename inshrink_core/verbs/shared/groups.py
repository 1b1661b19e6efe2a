"""Option groups that several verbs share: reading, decoding, writing, bounds and execution."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from inshrink_core.errors import InputError, NotFoundError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.engines import ENGINES, THREADS
from inshrink_core.execution.resources import Limits
from inshrink_core.request import Option, Request
from inshrink_core.text import parse_size, url_of
from inshrink_core.verbs.shared.values import AnySteps, chosen_steps, given_settings, read_config_file

if TYPE_CHECKING:
    from inshrink_core.chain import Archive, ChainConfig
    from inshrink_core.chain.base import BaseLike
    from inshrink_core.codec import AnyCodec
    from inshrink_core.formats import Run, TrainingLog
    from inshrink_core.search.bounds import Bounds

    PathLike = str | os.PathLike[str]
else:
    # Command lines and files give these as paths; opened objects come from Python, and need the engine.
    PathLike = Archive = Run = AnyCodec = BaseLike = TrainingLog = str

AnyBase = BaseLike | PathLike
"""A base model, or its place: a file, a directory, ``ARCHIVE@STEP`` or ``RUN@STEP``."""
AnyArchive = Archive | PathLike
"""An archive, or its path or URL."""
AnyLog = TrainingLog | PathLike
"""A training log, or its file."""
AnyRun = Run | PathLike
"""A run, or its path."""
ArchiveLike = Annotated[AnyArchive, Option(metavar="ARCHIVE")]
RunLike = Annotated[AnyRun, Option(metavar="RUN")]
RunOrArchive = Annotated[AnyRun | AnyArchive, Option(metavar="RUN|ARCHIVE")]
Size = Annotated[int | None, Option(metavar="SIZE", read=parse_size)]
"""A number of bytes; on the command line also as 4GB."""
Device = Annotated[str, Option(metavar="auto|cpu|cuda")]
Steps = Annotated[AnySteps | None, Option(("--steps", "--step"), "STEPS", many=True)]


def steps_of(opened: Run | Archive, steps: AnySteps | None) -> tuple[int, ...] | None:
    """Return the steps of a run or an archive that a request names; None if it names none.

    Steps that cannot be read are included: the verb reports why.
    """
    from inshrink_core import formats

    def known() -> Sequence[int]:
        if isinstance(opened, formats.Run):
            return sorted({*opened.steps, *(row.step for row in opened.unreadable if row.step is not None)})
        return opened.listed_steps

    return chosen_steps(steps, known, str(opened.path))


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """Selection of steps.

    Parameters
    ----------
    steps
        A step, a list 100,200, or a range FIRST:LAST[:EVERY] with both ends; may be repeated. By default all
        steps; for a restore, the last.
    """

    steps: Steps = None


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Device and threads that encode or decode tensors.

    Parameters
    ----------
    device
        Where tensors are encoded or decoded; auto is CUDA if available. The result does not depend on it.
    threads
        Tensors processed at a time; by default the number of processors.
    """

    device: Device = "auto"
    threads: Annotated[int | None, Option(least=1)] = None


@dataclass(frozen=True, kw_only=True)
class InParts:
    """Distribution of the work over workers or processes started elsewhere.

    Parameters
    ----------
    part
        Do one part of the work: I/N, or auto for the rank and world size of torchrun or Slurm.
    engine
        Where the work runs: threads, other processes, or Ray (the cluster of RAY_ADDRESS, else this machine).
        The result does not depend on it.
    workers
        Processes or tasks of Ray at a time; by default as many as the machine has room for.
    """

    part: Annotated[str | None, Option(metavar="I/N|auto")] = None
    engine: Annotated[str, Option(metavar="|".join((THREADS, *ENGINES)))] = THREADS
    workers: Annotated[int | None, Option(metavar="N", least=1)] = None

    @property
    def is_shared_out(self) -> bool:
        """Whether the request asks for an engine."""
        return self.engine != THREADS or self.workers is not None

    def perform_part(self) -> Any:
        """Perform one part in a worker; return the data that the report on all parts needs."""
        return cast("Request[Any]", self).perform()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for opening a run.

    Parameters
    ----------
    step_pattern
        How file names contain the step number: 'model_ep{step}_*.pt'.
    follow_links
        Follow links that lead out of the run.
    """

    step_pattern: Annotated[str | None, Option(metavar="PATTERN")] = None
    follow_links: bool = False

    @property
    def reading(self) -> dict[str, Any]:
        """Keywords for `inshrink_core.open`."""
        return {"step_pattern": self.step_pattern, "follow_links": self.follow_links}

    def opened_run(self, run: Run | PathLike) -> Run:
        """Open a run; refuse an archive, which would look like a directory without checkpoints."""
        from inshrink_core import formats
        from inshrink_core.archive import is_archive

        if isinstance(run, formats.Run):
            return run
        # A URL is opened first, so that errors of a bucket name the run.
        try:
            found = formats.open_run(run, **self.reading) if url_of(run) else None
        except NotFoundError:
            found = None
        if found is None and is_archive(run):
            raise InputError(
                "this is an archive, where a run is needed",
                where=os.fspath(run),
                remedy="`inshrink restore` makes one",
            )
        return found or formats.open_run(run, **self.reading)


@dataclass(frozen=True, kw_only=True)
class Sparing(Reading):
    """Options for opening a run with unreadable checkpoints.

    Parameters
    ----------
    skip_damaged
        Report checkpoints that cannot be read, and exit with 0 all the same.
    """

    skip_damaged: bool = False


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Options for opening and decoding an archive.

    Parameters
    ----------
    base
        The base model that the archive was encoded with; by default its former file, if unchanged.
    device
        Where tensors are encoded or decoded; auto is CUDA if available. The result does not depend on it.
    max_memory
        Maximum memory for decoding, such as 4GB; by default the available memory.
    max_disk
        Maximum disk space for decoded files, such as 4GB; by default the free space.
    """

    base: Annotated[AnyBase | None, Option(metavar="FILE|DIRECTORY|ARCHIVE@STEP")] = None
    device: Device = "auto"
    max_memory: Size = None
    max_disk: Size = None

    def limits(self, share: float = 1.0) -> Limits:
        """Return the limits; a limit that is not given is `share` of the available amount."""
        return Limits(max_memory=self.max_memory, max_disk=self.max_disk, share=share)

    def opened_archive(
        self, archive: Archive | PathLike, share: float = 1.0, *, decodes: bool = True
    ) -> Archive:
        """Open an archive within the limits, and for decoding on the device."""
        from inshrink_core import chain

        if not isinstance(archive, chain.Archive):
            archive = chain.Archive.open(archive, base=self.base)
        limits = self.limits(share)
        opened = archive if limits == Limits() else archive.limited(limits)
        return opened.on(self.device) if decodes else opened


@dataclass(frozen=True, kw_only=True)
class Opening(Reading, Decoding):
    """Options for opening a run or an archive."""

    def opened(self, path: Run | Archive | PathLike) -> Run | Archive:
        """Open a run or an archive."""
        from inshrink_core.chain.archive import Archive, open_any

        opened = (
            open_any(path, base=self.base, **self.reading) if isinstance(path, str | os.PathLike) else path
        )
        return self.opened_archive(opened) if isinstance(opened, Archive) else opened


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Options for writing frames: a config file, and single options that override it.

    Parameters
    ----------
    codec
        Codec of the weights; by default the archive's, else lattice.
    config
        Settings from a TOML or JSON file, or the result of a search; options override them. In Python also a
        mapping, or a codec.
    settings
        A setting of the codec; may be repeated.
    optimizer
        How to store optimizer state: bit for bit, magnitudes to a factor of two, rank-one factors, or not at
        all; by default compressed, or exact with exact weights.
    keyframe_every
        Frames from one keyframe to the next; by default 32.
    """

    codec: Annotated[str | None, Option(metavar="NAME")] = None
    config: Annotated[Mapping[str, Any] | AnyCodec | PathLike | None, Option(metavar="FILE")] = None
    settings: Annotated[
        Mapping[str, Any] | Sequence[str], Option(("--set",), metavar="KEY=VALUE", many=True)
    ] = ()
    optimizer: Annotated[str | None, Option(metavar="exact|compressed|compact|drop")] = None
    keyframe_every: Annotated[int | None, Option(least=1)] = None

    def chosen(self, **named: Any) -> dict[str, Any]:
        """Return the choices for `make_chain_config`; `named` are codec settings with an option."""
        config = self.config
        given: Mapping[str, Any] = {}
        if isinstance(config, str | os.PathLike):
            given = read_config_file(Path(config))
            config = given_settings(given)
        settings = given_settings({}, self.settings) | {k: v for k, v in named.items() if v is not None}
        if settings and not isinstance(config, Mapping | None):
            raise InputError("the codec already has settings", remedy="give other settings to the codec")
        return {
            "codec": self.codec or given.get("codec"),
            "config": {**config, **settings} if isinstance(config, Mapping) else config or settings or None,
            "optimizer": self.optimizer or given.get("optimizer"),
            "keyframe_every": self.keyframe_every or given.get("keyframe_every", _KEYFRAME_EVERY),
        }

    def chain_config(
        self, archive: PathLike = "", *, device: str = "auto", threads: int | None = None
    ) -> ChainConfig:
        """Return the chain config; choices not given come from the archive, if it exists, or the defaults."""
        from inshrink_core.chain.defaults import make_chain_config

        return make_chain_config(archive, **self.chosen(), device=device, threads=threads)


_KEYFRAME_EVERY = 32
"""Used when neither a request nor a config file gives the number."""


def local_target(path: PathLike) -> Path:
    """Return the local path to write to; refuse a URL, which would become a folder of that name."""
    from inshrink_core.archive.storage.registry import place_of

    if isinstance(place_of(path), str):
        raise InputError(
            "this is written on local or mounted file systems",
            where=os.fspath(path),
            remedy="write it here, then copy it",
        )
    return Path(path)


@dataclass(frozen=True, kw_only=True)
class Bounding:
    """Quality bounds on every restored step.

    Parameters
    ----------
    max_drop
        Largest drop: how much worse the metric of a restored step is than the original's; 0.01 is 1 %.
    max_divergence
        Largest mean KL divergence of a restored step's predictions from the original's, in nats; inf is no
        bound. Beside --max-drop, compress uses 0.003 if the evaluator returns log_probs.
    max_restore_cost
        Largest restore cost: the expected relative rise of the loss when training continues from a restored
        step. With an evaluator and no bound, compress uses 0.003 (0.3 %).
    """

    max_drop: Annotated[float | None, Option(metavar="FRACTION", least=0)] = None
    max_divergence: Annotated[float | None, Option(metavar="NATS", least=0)] = None
    max_restore_cost: Annotated[float | None, Option(metavar="FRACTION", least=0)] = None

    @property
    def bounds(self) -> Bounds:
        """The bounds; infinite where not given."""
        from inshrink_core.search.bounds import Bounds

        return Bounds(
            max_drop=self.max_drop, max_divergence=self.max_divergence, max_restore_cost=self.max_restore_cost
        )


@dataclass(frozen=True)
class Compressing(Stepping, Writing, Bounding, EvaluatorRequest, Computing, Sparing, InParts, Request[Any]):
    """Options of `compress`.

    Parameters
    ----------
    run
        A run: a directory, a glob or a checkpoint file.
    archive
        The archive to make or to append to.
    coarseness
        Rounding step of the weights relative to their movement between checkpoints (lattice codec), about
        0.25 to 10, by default 0.5: higher is smaller and less exact.
    resumed_from
        The archived step that training was restored from; a branch begins there.
    base
        The base model of a fine-tuning. The first frame is encoded relative to it, and a restore needs it.
    allow_damaged
        Also archive files that fail their own checksums, and record the damage.
    watch
        Run beside a training, and archive each checkpoint when it is finished.
    interval
        Seconds between polls. A checkpoint is finished when it is readable and did not change between two.
    until
        End when this step or a later one is archived.
    idle
        End after so many seconds without a newly archived step or a new unreadable file.
    release
        Delete originals, except the newest two, once they are compared and restored bit for bit.
    lossy
        Also release originals of which only a lossy copy remains, as with the default codec.
    look_ahead
        Whether the codec of a new archive may read some of the steps first, to plan for the whole run. Switch
        it off where a run is written step by step as it grows.
    """

    run: RunLike
    archive: Annotated[PathLike, Option(("--output", "-o"), metavar="ARCHIVE")]
    _: KW_ONLY
    coarseness: float | None = None
    resumed_from: Annotated[int | None, Option(metavar="STEP")] = None
    base: Annotated[AnyBase | None, Option(metavar="FILE|DIRECTORY|ARCHIVE@STEP")] = None
    allow_damaged: bool = False
    watch: bool = False
    interval: Annotated[float, Option(("--poll",), metavar="SECONDS", least=0.001, needs="watch")] = 5.0
    until: Annotated[int | None, Option(metavar="STEP", least=0, needs="watch")] = None
    idle: Annotated[float | None, Option(metavar="SECONDS", least=0.001, needs="watch")] = None
    release: Annotated[bool, Option(needs="watch")] = False
    lossy: Annotated[bool, Option(needs="release")] = False
    look_ahead: Annotated[bool, Option(hidden=True)] = True

    @property
    def reading(self) -> dict[str, Any]:
        """Keywords for `inshrink_core.open`."""
        return super().reading | {"allow_damaged": self.allow_damaged}

    def chosen(self, **named: Any) -> dict[str, Any]:
        """Return the choices for writing frames, with the coarseness among the settings."""
        return super().chosen(coarseness=self.coarseness, **named)
