"""The one place where frames are made: for an archive, in memory, or as a trial that is not stored."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.chain.attachments import tensor_digest
from inshrink_core.chain.config import ChainConfig
from inshrink_core.chain.parts import Shards
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSource, TensorSpec
from inshrink_core.codec import (
    FALLBACK_CODEC,
    AnyCodec,
    EncoderState,
    FrameContext,
    LookAheadStep,
    TensorInput,
    TensorReference,
    codec_for_block,
)
from inshrink_core.errors import ConfigError, InshrinkError
from inshrink_core.execution import ordered_map
from inshrink_core.formats.disk import holding_files
from inshrink_core.formats.source import peek, peek_sample
from inshrink_core.values import real_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.codec import DecodedMoment
    from inshrink_core.frame import Block


HELD_NBYTES = 1 << 16
"""Up to this size a state is held: opening a file to read it again would take longer than coding it."""

_logger = logging.getLogger(__name__)


class Origin(NamedTuple):
    """Where a tensor was read, and the SHA-256 of what was read there."""

    source: TensorSource
    spec: TensorSpec
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecalledReference(TensorReference):
    """The state of a tensor stored bit for bit; its values are read again whenever they are asked for.

    Parameters
    ----------
    origin
        Where they may still be; None where only the archive has them.
    decode
        Decodes the state from the archive. Called where the origin is gone, or has other values now.
    history
        What else of the state the next delta is coded relative to (`TensorReference.exact_state`), held
        because no file has it.

    Notes
    -----
    The digest makes sure that the values are bit for bit those a reader of the archive decodes: a delta
    against any others would be lost.
    """

    origin: Origin | None
    decode: Callable[[], TensorReference]
    history: Tensor | None = None

    def decoded(self) -> Tensor:
        """Return the values; see `exact_state`."""
        return self.exact_state()[0]

    def exact_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the values, in memory of their own, and the history.

        Raises
        ------
        DamagedError, MissingFrameError, IncompatibleError
            They are not where they were read, and cannot be decoded either.
        """
        tensor = None if self.origin is None else _read_again(self.origin)
        return self.decode().exact_state() if tensor is None else (tensor, self.history)

    @property
    def nbytes(self) -> int:
        """Bytes of the history: nothing else is held."""
        return 0 if self.history is None else self.history.nbytes


def _read_again(origin: Origin) -> Tensor | None:
    """Return a tensor from where it was read; None if it is not there any more."""
    try:
        # The digest below is a stronger check than the file's own.
        tensor = peek(origin.source, origin.spec)
    except InshrinkError as error:
        _logger.info("tensor '%s' is decoded from the archive: %s", origin.spec.key, error)
        return None
    if tensor_digest(tensor) != origin.digest:
        _logger.info("tensor '%s' is decoded from the archive: its file changed", origin.spec.key)
        return None
    return tensor


_OF_MODEL = frozenset({TensorRole.WEIGHT, TensorRole.MASTER})


def _never_restored(spec: TensorSpec) -> Tensor | None:
    """Training was not restored since the chain began."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainState:
    """The state of a chain: what its next frame is encoded relative to.

    Parameters
    ----------
    references
        States after the frame before, by key; none for a keyframe. Not to be changed.
    memory
        What the codec remembers of the frames before (`EncoderState.remember`); for the first one, what
        `FrameEncoder.look_ahead` returned.
    restored
        Values that training last continued from after a restore, None where it did not.
    after_restore
        Whether training was restored from the frame before.
    unchanged
        Tensors of `references` that the frame leaves as they are, by key.
    observed
        What tensors are observed relative to, by key; None: `references`. Where a frame is encoded in parts,
        each part observes all tensors and has the references of some.
    shards
        Where each rank of a training observes what it holds, what brings the observations together.
    """

    references: Mapping[str, TensorReference] = field(default_factory=dict)
    memory: Any = None
    restored: Callable[[TensorSpec], Tensor | None] = _never_restored
    after_restore: bool = False
    unchanged: frozenset[str] = frozenset()
    observed: Mapping[str, TensorReference] | None = None
    shards: Shards | None = None

    def is_like(self, other: ChainState) -> bool:
        """Whether a frame is encoded relative to the very same states and memory."""
        one, two = self.references, other.references
        return (
            (self.memory, self.restored, self.after_restore, self.unchanged)
            == (other.memory, other.restored, other.after_restore, other.unchanged)
            and one.keys() == two.keys()
            and all(two[key] is reference for key, reference in one.items())
        )


class TensorJob(TensorInput):
    """A tensor on its way into a frame: each part is read when the codec asks for it.

    Parameters
    ----------
    checkpoint, spec
        The tensor.
    device
        Where the codec works.
    restored
        Returns what a tensor was restored to.
    moment_before
        As of `TensorInput`.
    tensor
        The values, where they were read already.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: TensorSpec,
        device: str,
        *,
        restored: Callable[[TensorSpec], Tensor | None] = _never_restored,
        moment_before: DecodedMoment | None = None,
        tensor: Tensor | None = None,
    ) -> None:
        self.spec, self.moment_before, self.owned = spec, moment_before, True
        self._checkpoint, self._device, self._start = checkpoint, device, restored
        self._values = tensor

    @property
    def tensor(self) -> Tensor:
        """The values, read once."""
        return self._peeked() if self._values is None else self._values

    def _peeked(self) -> Tensor:
        self._values = peek(self._checkpoint.source, self.spec).to(self._device)
        return self._values

    @property
    def restored(self) -> Tensor | None:
        """The values that training last continued from, decoded."""
        return None if (start := self._start(self.spec)) is None else start.to(self._device)

    @property
    def sample(self) -> Tensor:
        """A sample, without the rest of the tensor where that was not read."""
        if self._values is not None:
            return super().sample
        return peek_sample(self._checkpoint.source, self.spec).to(self._device)

    def companion(self, *roles: TensorRole, sampled: bool = False) -> Tensor | None:
        """Read a tensor of the same parameter, or a sample of it."""
        found = self._checkpoint.companion_spec(self.spec, *roles)
        if found is None:
            return None
        return (peek_sample if sampled else peek)(self._checkpoint.source, found).to(self._device)


class TensorResult(NamedTuple):
    """One encoded tensor."""

    spec: TensorSpec
    block: Block
    reference: TensorReference
    digest: bytes
    squared_error: float
    squared_norm: float


class FrameEncoder:
    """Encodes the tensors of checkpoints as the frames of a chain hold them.

    Parameters
    ----------
    chain
        Which codec takes which tensors, and with which settings.
    """

    def __init__(self, chain: ChainConfig) -> None:
        self._chain = chain
        self._by_role = chain.codecs_by_role()

    def encode(
        self, checkpoint: Checkpoint, state: ChainState, specs: Sequence[TensorSpec] | None = None
    ) -> tuple[Any, Iterator[TensorResult]]:
        """Observe tensors, plan their frame (`plan`), then encode tensor by tensor.

        Returns
        -------
        memory
            What the chain's own codec wants to remember.
        results
            One by one, in the order of the specs.
        """
        specs = checkpoint.specs if specs is None else specs
        plan = self.plan(checkpoint, state, specs)
        return plan.memory, plan.encode(specs)

    def members(self, specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the tensors that the chain's own codec takes, which its plan is made for."""
        return tuple(spec for spec in specs if self._by_role[spec.role] is self._chain.config)

    def plan(self, checkpoint: Checkpoint, state: ChainState, specs: Sequence[TensorSpec]) -> FramePlan:
        """Observe tensors and plan their frame.

        Parameters
        ----------
        checkpoint
            The whole checkpoint: what is not encoded may still show how sensitive a weight is.
        state
            What the frame is encoded relative to. It is not held: a caller that holds no state either frees
            each one when its successor is made.
        specs
            Which tensors the frame holds. Each is read once or twice.

        Raises
        ------
        ConfigError
            An override matches no tensor of the checkpoint.
        """
        chain, own, old = self._chain, self._chain.config, dict(state.references)
        members = self.members(specs)
        if state.shards is None:  # else it is what one rank of several holds
            self._require_matches(checkpoint)
        made, codecs = [own], dict[str, AnyCodec]()
        for spec in members:  # many overrides often come to a few configs, each of which has a plan
            config = chain.config_of(spec)
            codecs[spec.key] = next((one for one in made if one == config), config)
            if codecs[spec.key] is config and config is not own:
                made.append(config)
        before = old if state.observed is None else state.observed

        def observe(spec: TensorSpec) -> Any:
            return codecs[spec.key].observe(TensorJob(checkpoint, spec, chain.device), before.get(spec.key))

        statistics = list(ordered_map(observe, members, threads=chain.threads, weight=_weight))
        seen: tuple[Sequence[TensorSpec], Sequence[Any]] = (members, statistics)
        memory = state.memory
        if state.shards is not None:
            of_all, observed, memory = state.shards.observations(members, statistics, memory)
            seen = of_all, observed
        context = FrameContext(
            learning_rates=_rates(checkpoint),
            memory=memory,
            after_restore=state.after_restore,
            reaches=_reaches(checkpoint),
        )
        # An override has a plan of its own, from what was seen of all tensors: pools stay whole.
        plans = {id(codec): codec.plan(*seen, context) for codec in made}
        beside = replace(context, spacings=_spacings(members, codecs, plans, old))
        others = {id(codec): codec for codec in self._by_role.values() if codec is not own}
        plans |= {key: codec.plan([], [], beside) for key, codec in others.items()}
        moments = {spec.key: chain.first_moment(checkpoint, spec) for spec in members}
        past = {key: old[one.key] for key, one in moments.items() if one is not None and one.key in old}
        known = own if isinstance(own, EncoderState) else None
        return FramePlan(
            memory=known.remember(plans[id(own)]) if known else None,
            members=members,
            quality=known.predicted(plans[id(own)]) if known else None,
            _chain=chain,
            _checkpoint=checkpoint,
            _codecs=self._by_role | codecs,
            _plans=plans,
            _old=old,
            _past=past,
            _restored=state.restored,
            _unchanged=state.unchanged,
        )

    @holding_files()
    def look_ahead(
        self, steps: Sequence[int], read: Callable[[int], Checkpoint], keys: frozenset[str] | None = None
    ) -> Any:
        """Look at a few steps of a run, and return what its first frame is planned with.

        Parameters
        ----------
        steps
            The steps that are going to be encoded, ascending.
        read
            Returns the checkpoint of a step.
        keys
            Look at these tensors only; by default at all that the chain's own codec takes.

        Returns
        -------
        memory
            For the `ChainState` of the first frame; None where the codec does not look ahead.

        Notes
        -----
        Reads each tensor once a step, without checking checksums: nothing of it is stored. A step that
        cannot be read is passed over, which is reported when its turn comes. Holds what the codec makes
        of each tensor, and two tensors a thread.
        """
        codec = self._chain.config
        there: list[tuple[LookAheadStep, Checkpoint]] = []
        for one in codec.look_ahead_steps(len(steps)) if isinstance(codec, EncoderState) else ():
            with contextlib.suppress(InshrinkError, OSError):
                there.append((one, read(steps[one.place])))
        if not there or not isinstance(codec, EncoderState):
            return None

        def look(spec: TensorSpec) -> Any:
            return codec.look_ahead(spec, _look_ahead_inputs(spec, there))

        members = [spec for spec in self.members(there[0][1].specs) if keys is None or spec.key in keys]
        statistics = list(ordered_map(look, members, threads=self._chain.threads, weight=_weight))
        return codec.initial_memory(members, statistics, [_rates(checkpoint) for _, checkpoint in there])

    def _require_matches(self, checkpoint: Checkpoint) -> None:
        """Refuse an override that matches no tensor: it was meant for another model, or is misspelt."""
        for override in self._chain.overrides:
            if not any(map(override.matches, self.members(checkpoint.specs))):
                raise ConfigError(
                    f"no tensor matches the override '{override.match}'",
                    found=", ".join(f"{name}={value!r}" for name, value in override.to_json().items()),
                    remedy="`inshrink inspect RUN --tensors` lists names and layer types",
                )


@dataclass(frozen=True, kw_only=True)
class FramePlan:
    """A frame that is planned, and whose tensors can be encoded, each once.

    Parameters
    ----------
    memory
        What the chain's own codec wants to remember.
    members
        Tensors that it was planned for.
    quality
        What the frame says of the cost of a restore, if nobody measures it; None for nothing.
    """

    memory: Any
    members: Sequence[TensorSpec]
    quality: Mapping[str, Any] | None
    _chain: ChainConfig
    _checkpoint: Checkpoint
    _codecs: Mapping[TensorRole | str, AnyCodec]
    _plans: Mapping[int, Any]
    _old: dict[str, TensorReference]
    _past: dict[str, TensorReference]
    _restored: Callable[[TensorSpec], Tensor | None]
    _unchanged: frozenset[str]

    def encode(
        self, specs: Iterable[TensorSpec], ready: Mapping[str, TensorResult] = MappingProxyType({})
    ) -> Iterator[TensorResult]:
        """Yield tensors encoded, one by one, in the order of the specs; those that are ready as they are."""

        def result(spec: TensorSpec) -> TensorResult:
            return ready.get(spec.key) or self._encode(spec)

        yield from ordered_map(result, specs, threads=self._chain.threads, weight=_weight)

    def _encode(self, spec: TensorSpec) -> TensorResult:
        codec, before = self._codecs.get(spec.key) or self._codecs[spec.role], self._old.pop(spec.key, None)
        # Codecs that store exact bytes work in host memory.
        device = "cpu" if codec.name == FALLBACK_CODEC else self._chain.device
        read = self._checkpoint.source.read(spec)
        digest = tensor_digest(read)
        moment = self._past.pop(spec.key, None)
        job = TensorJob(
            self._checkpoint,
            spec,
            device,
            restored=self._restored,
            moment_before=None if moment is None else moment.decoded,
            tensor=read.to(device),
        )
        if before is not None and spec.key in self._unchanged:
            block = codec.rekey(spec, before, unchanged=True)
            after = codec_for_block(block.codec).decode(spec, block, before)
        else:
            block, after = codec.encode(job, self._plans[id(codec)], before)
        # What exact blocks of lossless chains lose is nothing, and takes no time to measure.
        counts = codec.name != FALLBACK_CODEC and spec.role in MODEL_ROLES
        error, norm = squared_error(job.tensor, after) if counts else (0.0, 0.0)
        return TensorResult(spec, block, after, digest, error, norm)


@dataclass(frozen=True)
class PreparedFrame:
    """A frame of which some tensors were encoded in memory, and how.

    Parameters
    ----------
    chain, checkpoint, state, plan
        How, of what and relative to what it was made, and its plan.
    results
        What is encoded already, by key.
    """

    chain: ChainConfig
    checkpoint: Checkpoint
    state: ChainState
    plan: FramePlan
    results: Mapping[str, TensorResult]

    def holds(
        self, chain: ChainConfig, checkpoint: Checkpoint, state: ChainState, specs: Iterable[TensorSpec]
    ) -> bool:
        """Whether these are the bytes of a checkpoint's frame."""
        is_same = chain == self.chain and checkpoint is self.checkpoint and self.state.is_like(state)
        return is_same and self.plan.members == FrameEncoder(chain).members(specs)


def _spacings(
    members: Sequence[TensorSpec],
    codecs: Mapping[str, AnyCodec],
    plans: Mapping[int, Any],
    old: Mapping[str, TensorReference],
) -> dict[str, float]:
    """Return the step sizes of weights, by parameter, that first moments are rounded by."""
    spacings: dict[str, float] = {}
    for spec in members:
        codec = codecs[spec.key]
        if spec.role not in _OF_MODEL or not isinstance(codec, EncoderState):
            continue
        width = codec.spacing(plans[id(codec)], spec)
        # The optimizer moves master weights, where there are any.
        if width is not None and (spec.role is TensorRole.MASTER or spec.name not in spacings):
            # Units of first moments do not get finer because errors of the weights last longer.
            counts = codec.shaped([old[spec.key]] if spec.key in old else [])
            spacings[spec.name] = width * math.sqrt(codec.lasting(*counts))
    return spacings


def _rates(checkpoint: Checkpoint) -> dict[str, float]:
    """Learning rate by parameter name, where it is known."""
    return {name: group["lr"] for name, group in checkpoint.hyperparameters.items() if "lr" in group}


def _reaches(checkpoint: Checkpoint) -> dict[str, float]:
    """How far momentum alone still moves a parameter, by name, for Adam and SGD: others step otherwise."""
    found = {}
    for name, group in checkpoint.hyperparameters.items():
        beta = group.get("momentum" if "dampening" in group else "beta1", 0.0)
        if group.get("lr", 0.0) > 0 and 0 < beta < 1:
            found[name] = group["lr"] * beta / (1 - beta)
    return found


def _look_ahead_inputs(
    spec: TensorSpec, there: Sequence[tuple[LookAheadStep, Checkpoint]]
) -> Iterator[tuple[int, TensorInput]]:
    """Read samples of a tensor at one look after the other, where it is the same tensor."""
    for look, checkpoint in there:
        if spec.key not in checkpoint or checkpoint.spec(spec.key) != spec:
            continue
        wanted = (TensorRole.EXP_AVG_SQ, TensorRole.MOMENTUM) if look.companions else ()
        try:
            job = TensorJob(checkpoint, spec, "cpu")
            companions = {role: job.companion(role, sampled=True) for role in wanted}
            item = TensorInput(spec=spec, tensor=job.sample, companions=companions)
        except (InshrinkError, OSError):
            continue
        yield look.place, item


def _weight(spec: TensorSpec) -> int:
    """Return about how many bytes of memory a tensor takes while it is encoded, none too few to count."""
    return spec.nbytes + HELD_NBYTES


def squared_error(tensor: Tensor, reference: TensorReference) -> tuple[float, float]:
    """Return (squared error, squared norm) of a floating tensor; non-finite values count for nothing."""
    import torch

    from inshrink_core.ops.cpu.distance import SLICE, squared_distance

    if not tensor.is_floating_point():
        return 0.0, 0.0
    statistics = reference.distance(tensor)
    if statistics is not None:
        return statistics.error, statistics.norm
    squared_error = squared_norm = 0.0
    now, decoded = tensor.detach().resolve_neg().reshape(-1), reference.decoded().reshape(-1)
    for start in range(0, now.numel(), SLICE):
        original = real_numbers(now[start : start + SLICE].cpu(), torch.float32)
        restored = real_numbers(decoded[start : start + SLICE].cpu(), torch.float32)
        distance = squared_distance(original, restored)
        squared_error += distance.error
        squared_norm += distance.norm
    return squared_error, squared_norm
