"""The one place where frames are made: for an archive, in memory, or as a trial that is not stored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.chain.attachments import tensor_digest
from inshrink_core.chain.config import ChainConfig, place_among
from inshrink_core.chain.parts import Shards
from inshrink_core.chain.recall import HELD_NBYTES, Origin
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSource, TensorSpec
from inshrink_core.codec import (
    AnyCodec,
    Encoded,
    FrameContext,
    LookAheadInput,
    LookAheadStep,
    TensorInput,
    TensorReference,
)
from inshrink_core.errors import ConfigError, InshrinkError
from inshrink_core.execution import ordered_map
from inshrink_core.formats.disk import holding_files
from inshrink_core.formats.source import FileSource, peek, peek_sample
from inshrink_core.values import real_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.frame import Block


_OF_MODEL = frozenset({TensorRole.WEIGHT, TensorRole.MASTER})
_WITH_COMPANIONS = _OF_MODEL | {TensorRole.EXP_AVG}


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
        What the codec remembers of the frames before (`Codec.remember`); for the first one, what it found by
        looking ahead (`FrameEncoder.look_ahead`).
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


class TensorResult(NamedTuple):
    """One encoded tensor.

    `origin` is set where the state need not be held: the tensor is stored exactly and can be read again.
    """

    spec: TensorSpec
    block: Block
    reference: TensorReference
    origin: Origin | None
    digest: bytes
    squared_error: float
    squared_norm: float


@dataclass(frozen=True)
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
    _encode: Callable[[TensorSpec], TensorResult]
    _threads: int

    def encode(
        self, specs: Iterable[TensorSpec], ready: Mapping[str, TensorResult] = MappingProxyType({})
    ) -> Iterator[TensorResult]:
        """Yield tensors encoded, one by one, in the order of the specs; those that are ready as they are."""

        def result(spec: TensorSpec) -> TensorResult:
            return ready.get(spec.key) or self._encode(spec)

        yield from ordered_map(result, specs, threads=self._threads, weight=_weight)


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

    def holds(self, chain: ChainConfig, checkpoint: Checkpoint, state: ChainState) -> bool:
        """Whether these are the bytes of a checkpoint's frame."""
        return chain == self.chain and checkpoint is self.checkpoint and self.state.is_like(state)


class FrameEncoder:
    """Encodes the tensors of checkpoints as the frames of a chain hold them.

    Parameters
    ----------
    chain
        Which codec takes which tensors, and with which settings.
    """

    def __init__(self, chain: ChainConfig) -> None:
        self._chain = chain
        self._role_codecs = chain.role_codecs()

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
        return tuple(spec for spec in specs if self._place(spec) == 0)

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
        chain, role_codecs, old = self._chain, self._role_codecs, dict(state.references)
        own, lossless = role_codecs[0], role_codecs[-1]
        members = self.members(specs)
        config_of = self._configs(checkpoint, members, alone=state.shards is None)
        wanted = [one.codec.companions() for one in role_codecs]
        wanted[0] = wanted[0].union(*(codec.companions() for codec in config_of.values()))
        # Codecs that store exact bytes work in host memory.
        devices = [chain.device if one.codec.lossy else "cpu" for one in role_codecs]
        restored, unchanged = state.restored, state.unchanged
        before = old if state.observed is None else state.observed
        context = FrameContext(
            learning_rates=_rates(checkpoint),
            memory=state.memory,
            after_restore=state.after_restore,
            reaches=_reaches(checkpoint),
        )

        def observe(spec: TensorSpec) -> Any:
            config = config_of[spec.key]
            item = _glimpse(checkpoint, wanted[0], devices[0], spec, config.looks_at_sample(spec))
            return config.observe(item, before.get(spec.key))

        statistics = list(ordered_map(observe, members, threads=chain.threads, weight=_weight))
        of_all: tuple[Sequence[TensorSpec], Sequence[Any]] = (members, statistics)
        if state.shards is not None:
            specs_of_all, seen, memory = state.shards.observations(members, statistics, state.memory)
            of_all, context = (specs_of_all, seen), replace(context, memory=memory)
        plans = [own.codec.plan(*of_all, context)]
        # An override has a plan of its own, from what was seen of all tensors: pools stay whole.
        plan_of: dict[int, Any] = {id(own.codec): plans[0]}
        for config in config_of.values():
            if id(config) not in plan_of:
                plan_of[id(config)] = config.plan(*of_all, context)
        spacings: dict[str, float] = {}
        for spec in members:
            codec = config_of[spec.key]
            width = codec.spacing(plan_of[id(codec)], spec) if spec.role in _OF_MODEL else None
            if width is not None:
                # Units of first moments do not get finer because errors of the weights last longer.
                counts = codec.shaped([old[spec.key]] if spec.key in old else [])
                width *= math.sqrt(codec.lasting(*counts))
            # The optimizer moves master weights, where there are any.
            if width is not None and (spec.role is TensorRole.MASTER or spec.name not in spacings):
                spacings[spec.name] = width
        beside = replace(context, spacings=spacings)
        plans += [one.codec.plan([], [], beside) for one in role_codecs[1:]]

        past: dict[str, TensorReference] = {}
        for spec in members:
            moment = checkpoint.companion_spec(spec, TensorRole.EXP_AVG, TensorRole.MOMENTUM)
            if config_of[spec.key].uses_past and moment is not None and moment.key in old:
                past[spec.key] = old[moment.key]

        def encode(spec: TensorSpec) -> TensorResult:
            place = self._place(spec)
            codec = role_codecs[place].codec if place else config_of[spec.key]
            if spec.key in unchanged:
                return _left(checkpoint, spec, codec.unchanged(spec, old.pop(spec.key)))
            read = checkpoint.source.read(spec)
            digest, tensor = tensor_digest(read), read.to(devices[place])
            looked_at, moment = codec.encoding_companions(), past.pop(spec.key, None)
            if moment is not None:  # that of the frame before stands in for this frame's
                looked_at -= {TensorRole.EXP_AVG, TensorRole.MOMENTUM}
            item = _item(checkpoint, looked_at, devices[place], spec, tensor)
            if codec.uses_restored and (start := restored(spec)) is not None:
                item = replace(item, restored=start.to(devices[place]))
            if moment is not None:
                item = replace(item, moment_before=moment.decoded)
            plan = plans[place] if place else plan_of[id(codec)]
            encoded = codec.encode(item, plan, old.pop(spec.key, None))
            counts = codec.lossy and spec.role in MODEL_ROLES
            error, norm = squared_error(item.tensor, encoded.reference) if counts else (0.0, 0.0)
            exact = encoded.block.codec in lossless.codec.reads
            lasting = exact and _is_lasting(checkpoint, spec)
            origin = Origin(checkpoint.source, spec, digest) if lasting else None
            return TensorResult(spec, encoded.block, encoded.reference, origin, digest, error, norm)

        remembered, quality = own.codec.remember(plans[0]), own.codec.predicted(plans[0])
        return FramePlan(remembered, members, quality, encode, chain.threads)

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
        codec = self._role_codecs[0].codec
        there: list[tuple[LookAheadStep, Checkpoint]] = []
        for one in codec.look_ahead_steps(len(steps)):
            with contextlib.suppress(InshrinkError, OSError):
                there.append((one, read(steps[one.place])))
        if not there:
            return None

        def look(spec: TensorSpec) -> Any:
            return codec.look_ahead(spec, _look_ahead_inputs(spec, there, codec))

        chosen = [spec for spec in there[0][1].specs if keys is None or spec.key in keys]
        members = [spec for spec in chosen if self._place(spec) == 0]
        statistics = list(ordered_map(look, members, threads=self._chain.threads, weight=_weight))
        return codec.initial_memory(members, statistics, [_rates(checkpoint) for _, checkpoint in there])

    def _place(self, spec: TensorSpec) -> int:
        """Return which of the codecs takes a tensor."""
        return place_among(self._role_codecs, spec)

    def _configs(
        self, checkpoint: Checkpoint, members: Sequence[TensorSpec], *, alone: bool
    ) -> dict[str, AnyCodec]:
        """Return the config of each tensor, the same object for those that share one.

        An override that matches none of the checkpoint's tensors was meant for another model, or is misspelt,
        unless the checkpoint is what one rank of several holds.
        """
        chain = self._chain
        for override in chain.overrides if alone else ():
            if not any(override.matches(spec) for spec in checkpoint.specs if self._place(spec) == 0):
                raise ConfigError(
                    f"no tensor matches the override '{override.match}'",
                    found=", ".join(f"{name}={value!r}" for name, value in override.to_json().items()),
                    remedy="`inshrink inspect RUN --tensors` lists names and layer types",
                )
        made: dict[tuple[bool, ...], AnyCodec] = {(False,) * len(chain.overrides): chain.config}
        configs: dict[str, AnyCodec] = {}
        for spec in members:
            which = tuple(override.matches(spec) for override in chain.overrides)
            if which not in made:
                config = chain.config_of(spec)
                # Many overrides often come to a few configs, and each of those has a plan of its own.
                made[which] = next((one for one in made.values() if one == config), config)
            configs[spec.key] = made[which]
        return configs


def _left(checkpoint: Checkpoint, spec: TensorSpec, encoded: Encoded) -> TensorResult:
    """Return a tensor that was left as it was; digest and error are of what it was not replaced by."""
    tensor = checkpoint.source.read(spec)
    error, norm = squared_error(tensor, encoded.reference) if spec.role in MODEL_ROLES else (0.0, 0.0)
    return TensorResult(spec, encoded.block, encoded.reference, None, tensor_digest(tensor), error, norm)


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
    spec: TensorSpec, there: Sequence[tuple[LookAheadStep, Checkpoint]], codec: AnyCodec
) -> Iterator[LookAheadInput]:
    """Read a tensor at one look after the other, where it is the same tensor."""
    companions, sampled = codec.companions(), codec.looks_at_sample(spec)
    for look, checkpoint in there:
        if spec.key not in checkpoint or checkpoint.spec(spec.key) != spec:
            continue
        try:
            statistics = companions if look.companions else frozenset()
            item = _glimpse(checkpoint, statistics, "cpu", spec, sampled)
        except (InshrinkError, OSError):
            continue
        yield LookAheadInput(look.place, item)


def _weight(spec: TensorSpec) -> int:
    """Return about how many bytes of memory a tensor takes while it is encoded, none too few to count."""
    return spec.nbytes + HELD_NBYTES


def _is_lasting(checkpoint: Checkpoint, spec: TensorSpec) -> bool:
    """Whether a tensor is worth reading again, and likely to be found where it was read."""
    return spec.nbytes > HELD_NBYTES and isinstance(checkpoint.source, FileSource)


def _glimpse(
    checkpoint: Checkpoint, companions: frozenset[TensorRole], device: str, spec: TensorSpec, sampled: bool
) -> TensorInput:
    """Read a tensor that is only looked at, or its sample, and its companions."""
    read = peek_sample if sampled else peek
    tensor = read(checkpoint.source, spec).to(device)
    return _item(checkpoint, companions, device, spec, tensor, read=read, sampled=sampled)


def _item(
    checkpoint: Checkpoint,
    companions: frozenset[TensorRole],
    device: str,
    spec: TensorSpec,
    tensor: Tensor,
    *,
    read: Callable[[TensorSource, TensorSpec], Tensor] = peek,
    sampled: bool = False,
) -> TensorInput:
    """Return a tensor with the companions its codec asked for, which are looked at."""

    def companion(*roles: TensorRole) -> Tensor | None:
        found = checkpoint.companion_spec(spec, *roles)
        return None if found is None else read(checkpoint.source, found).to(device)

    gradient = second_moment = momentum = None
    if spec.role is TensorRole.WEIGHT and TensorRole.GRADIENT in companions:
        gradient = companion(TensorRole.GRADIENT, TensorRole.EXP_AVG)
    elif spec.role is TensorRole.WEIGHT and TensorRole.EXP_AVG in companions:
        gradient = companion(TensorRole.EXP_AVG)
    if spec.role in _WITH_COMPANIONS and TensorRole.EXP_AVG_SQ in companions:
        second_moment = companion(TensorRole.EXP_AVG_SQ)
    if spec.role in _OF_MODEL and TensorRole.MOMENTUM in companions:
        momentum = companion(TensorRole.MOMENTUM)
    return TensorInput(
        spec=spec,
        tensor=tensor,
        gradient=gradient,
        second_moment=second_moment,
        momentum=momentum,
        owned=True,
        sampled=sampled,
    )


def squared_error(tensor: Tensor, reference: TensorReference) -> tuple[float, float]:
    """Return (squared error, squared norm) of a floating tensor; non-finite values count for nothing."""
    import torch

    from inshrink_core.ops.distance import SLICE, squared_distance

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
