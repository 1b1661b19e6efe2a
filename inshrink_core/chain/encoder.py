"""Encoding of frames, for archives, in memory, or as trials that are not stored."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from inshrink_core.errors import InshrinkError
from inshrink_core.execution.device import separate_stream, upload
from inshrink_core.execution.threads import ordered_map
from inshrink_core.formats.source import peek
from inshrink_core.values import real_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.frame import Block


RESIDENT_NBYTES = 1 << 16
"""Size up to which a state is held in memory: reopening its file would take longer than coding it."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RecalledReference(TensorReference):
    """The state of a tensor stored bit for bit, whose values are read again on each access.

    Parameters
    ----------
    recall
        Returns the state (`TensorReference.exact_state`), from the original file or from the archive. It
        holds the context state of the next delta, because no file contains it.
    """

    recall: Callable[[], tuple[Tensor, Tensor | None]]

    def decoded(self) -> Tensor:
        """Return the values; see `exact_state`."""
        return self.exact_state()[0]

    def exact_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the values, in new memory, and the context state.

        Raises
        ------
        DamagedError, MissingFrameError, IncompatibleError
            The values have left their file and cannot be decoded from the archive.
        """
        return self.recall()


def read_again(source: TensorSource, spec: TensorSpec, digest: bytes) -> Tensor | None:
    """Return a tensor from its original file; None if the file is gone or has changed.

    The digest verifies that the values are the same bits that a reader of the archive decodes. A delta
    against different values could not be decoded.
    """
    try:
        # The digest below is stronger than the file's checksum.
        tensor = peek(source, spec)
    except InshrinkError as error:
        _logger.info("tensor '%s' is decoded from the archive: %s", spec.key, error)
        return None
    if tensor_digest(tensor) != digest:
        _logger.info("tensor '%s' is decoded from the archive: its file changed", spec.key)
        return None
    return tensor


_OF_MODEL = frozenset({TensorRole.WEIGHT, TensorRole.MASTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainState:
    """The state of a chain, against which its next frame is encoded. Equality ignores states and shards.

    Parameters
    ----------
    references
        States after the previous frame by key, read-only; empty for a keyframe.
    memory
        The codec's memory of earlier frames (`EncoderState.remember`); for the first frame, the result of
        `look_ahead`.
    restored
        Returns the values from which training last resumed after a restore; None without a restore.
    after_restore
        Whether training resumed from the previous frame.
    unchanged
        Keys of the `references` that the frame leaves unchanged.
    observed
        States relative to which tensors are observed, by key; None for `references`. A part of a frame
        observes all tensors, but has the references of some.
    shards
        The collective over the ranks of a training, if each rank observes only its own tensors.
    """

    references: Mapping[str, TensorReference] = field(default_factory=dict, compare=False)
    memory: Any = None
    restored: Callable[[TensorSpec], Tensor | None] | None = None
    after_restore: bool = False
    unchanged: frozenset[str] = frozenset()
    observed: Mapping[str, TensorReference] | None = field(default=None, compare=False)
    shards: Shards | None = field(default=None, compare=False)


def _input(
    checkpoint: Checkpoint,
    spec: TensorSpec,
    device: str,
    tensor: Tensor | None = None,
    restored: Callable[[TensorSpec], Tensor | None] | None = None,
    moment: TensorReference | None = None,
) -> TensorInput:
    """Return a tensor to encode, each part of which is read when the codec requests it."""

    def read(found: TensorSpec, *, sampled: bool = False) -> Tensor:
        return upload(peek(checkpoint.source, found, sampled=sampled), device)

    def auxiliary(*roles: TensorRole, sampled: bool = False) -> Tensor | None:
        found = checkpoint.auxiliary_spec(spec, *roles)
        return None if found is None else read(found, sampled=sampled)

    def start() -> Tensor | None:
        values = None if restored is None else restored(spec)
        return None if values is None else upload(values, device)

    return TensorInput(
        spec=spec,
        tensor=partial(read, spec) if tensor is None else tensor,
        auxiliaries=auxiliary,
        restored=start,
        moment_before=None if moment is None else moment.decoded,
        owned=True,
    )


class TensorResult(NamedTuple):
    """One encoded tensor."""

    spec: TensorSpec
    block: Block
    reference: TensorReference
    digest: bytes
    squared_error: float
    squared_norm: float


def look_ahead(
    chain: ChainConfig,
    steps: Sequence[int],
    read: Callable[[int], Checkpoint],
    keys: frozenset[str] | None = None,
) -> Any:
    """Inspect a few steps of a run, and return the memory for planning its first frame.

    Parameters
    ----------
    chain
        The codecs and their settings.
    steps
        The steps to encode, ascending.
    read
        Returns the checkpoint of a step.
    keys
        Keys of the tensors to inspect; by default all tensors of the chain's own codec.

    Returns
    -------
    memory
        For the `ChainState` of the first frame; None if the codec does not look ahead.

    Notes
    -----
    Reads each tensor once a step, without verifying checksums, since nothing of it is stored. Skips
    unreadable steps, which are reported when they are encoded. Holds the codec's statistics of each
    tensor, and two tensors a thread.
    """
    codec = chain.config
    if not isinstance(codec, EncoderState):
        return None
    there: list[tuple[LookAheadStep, Checkpoint]] = []
    for wanted in codec.look_ahead_steps(len(steps)):
        with contextlib.suppress(InshrinkError, OSError):
            there.append((wanted, read(steps[wanted.place])))
    if not there:
        return None

    def look(spec: TensorSpec) -> Any:
        return codec.look_ahead(spec, _look_ahead_inputs(spec, there))

    specs = chain.members(there[0][1].specs)
    members = [spec for spec in specs if keys is None or spec.key in keys]
    statistics = list(ordered_map(look, members, threads=chain.threads, weight=_nbytes))
    return codec.initial_memory(members, statistics, [_rates(checkpoint) for _, checkpoint in there])


class FramePlan:
    """A planned frame, whose tensors can each be encoded once.

    Parameters
    ----------
    chain
        The codecs, their settings and the tensors they encode.
    checkpoint
        The full checkpoint; tensors outside the frame may still inform the plan.
    state
        The chain state to encode against. Unless the caller holds on to it, each tensor's state is released
        when its successor exists.
    specs
        The tensors of the frame. Each is read once or twice.

    Attributes
    ----------
    chain, checkpoint
        As given.
    memory
        The memory of the chain's codec for later frames.
    members
        The tensors of the chain's codec.

    Raises
    ------
    ConfigError
        An override matches no tensor of the checkpoint.
    """

    def __init__(
        self, chain: ChainConfig, checkpoint: Checkpoint, state: ChainState, specs: Sequence[TensorSpec]
    ) -> None:
        if state.shards is None:  # a rank of several has only some of the tensors
            chain.require_matches(checkpoint)
        codec, by_role = chain.config, chain.codecs_by_role()
        self.chain, self.checkpoint = chain, checkpoint
        self._restored, self._unchanged, self._old = state.restored, state.unchanged, dict(state.references)
        self.members = chain.members(specs)
        made, codecs = [codec], dict[str, AnyCodec]()
        for spec in self.members:  # many overrides often amount to a few configs; plan each only once
            config = chain.config_of(spec)
            codecs[spec.key] = next((known for known in made if known == config), config)
            if codecs[spec.key] not in made:
                made.append(config)
        self._codecs = by_role | codecs
        before = self._old if state.observed is None else state.observed

        def observe(spec: TensorSpec) -> Any:
            with separate_stream(chain.device):
                return codecs[spec.key].observe(_input(checkpoint, spec, chain.device), before.get(spec.key))

        seen: Sequence[Any] = list(ordered_map(observe, self.members, threads=chain.threads, weight=_nbytes))
        observed: Sequence[TensorSpec] = self.members
        memory = state.memory
        if state.shards is not None:
            observed, seen, memory = state.shards.observations(self.members, seen, memory)
        context = FrameContext(
            learning_rates=_rates(checkpoint),
            memory=memory,
            after_restore=state.after_restore,
            expected_updates=_expected_updates(checkpoint),
        )
        # Each override has a separate plan from the statistics of all tensors, so pools stay complete.
        self._plans = {id(config): config.plan(observed, seen, context) for config in made}
        beside = replace(context, step_sizes=self._step_sizes())
        others = {id(config): config for config in by_role.values() if config is not codec}
        self._plans |= {key: config.plan([], [], beside) for key, config in others.items()}
        moments = {spec.key: chain.first_moment(checkpoint, spec) for spec in self.members}
        self._past = {k: self._old[m.key] for k, m in moments.items() if m is not None and m.key in self._old}
        self.memory = codec.remember(self._plans[id(codec)]) if isinstance(codec, EncoderState) else None

    def _step_sizes(self) -> dict[str, float]:
        """Return the step sizes of weights by parameter, for rounding first moments."""
        step_sizes: dict[str, float] = {}
        for spec in self.members:
            codec = self._codecs[spec.key]
            if spec.role not in _OF_MODEL or not isinstance(codec, EncoderState):
                continue
            width = codec.step_size(self._plans[id(codec)], spec)
            # If a parameter has master weights, the optimizer updates these.
            if width is not None and (spec.role is TensorRole.MASTER or spec.name not in step_sizes):
                # First moments need no finer units when errors of weights persist longer.
                counts = codec.shaped([self._old[spec.key]] if spec.key in self._old else [])
                step_sizes[spec.name] = width * math.sqrt(codec.error_persistence(*counts))
        return step_sizes

    def encode(
        self, specs: Iterable[TensorSpec], ready: Mapping[str, TensorResult] = MappingProxyType({})
    ) -> Iterator[TensorResult]:
        """Yield the encoded tensors one by one, in the order of the specs; reuse results in `ready`."""

        def result(spec: TensorSpec) -> TensorResult:
            return ready.get(spec.key) or self._encode(spec)

        yield from ordered_map(result, specs, threads=self.chain.threads, weight=_nbytes)

    def _encode(self, spec: TensorSpec) -> TensorResult:
        codec, before = self._codecs.get(spec.key) or self._codecs[spec.role], self._old.pop(spec.key, None)
        # Lossless coding runs in host memory.
        device = "cpu" if codec.name == FALLBACK_CODEC else self.chain.device
        read = self.checkpoint.source.read(spec)
        digest = tensor_digest(read)
        moment = self._past.pop(spec.key, None)
        with separate_stream(device):
            item = _input(self.checkpoint, spec, device, upload(read, device), self._restored, moment)
            if before is not None and spec.key in self._unchanged:
                block = codec.rekey(spec, before, unchanged=True)
                after = codec_for_block(block.codec).decode(spec, block, before)
            else:
                block, after = codec.encode(item, self._plans[id(codec)], before)
            # Lossless blocks have no error to measure.
            counts = codec.name != FALLBACK_CODEC and spec.role in MODEL_ROLES
            error, norm = squared_error(item.tensor, after) if counts else (0.0, 0.0)
        return TensorResult(spec, block, after, digest, error, norm)


class PreparedFrame(NamedTuple):
    """A frame with tensors that were encoded in advance, in memory.

    Parameters
    ----------
    plan
        The plan of the frame.
    state
        The chain state that it was encoded against.
    results
        Tensors encoded so far, by key.
    """

    plan: FramePlan
    state: ChainState
    results: Mapping[str, TensorResult]

    def holds(
        self, chain: ChainConfig, checkpoint: Checkpoint, state: ChainState, specs: Iterable[TensorSpec]
    ) -> bool:
        """Whether the results are valid for a checkpoint's frame."""
        before, now = self.state.references, state.references
        if before.keys() != now.keys() or any(before[key] is not now[key] for key in now):
            return False
        is_same = chain == self.plan.chain and checkpoint is self.plan.checkpoint and self.state == state
        return is_same and self.plan.members == chain.members(specs)


def _rates(checkpoint: Checkpoint) -> dict[str, float]:
    return {name: group["lr"] for name, group in checkpoint.hyperparameters.items() if "lr" in group}


def _expected_updates(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the expected update size of momentum by parameter name, for Adam and SGD only."""
    found = {}
    for name, group in checkpoint.hyperparameters.items():
        beta = group.get("momentum" if "dampening" in group else "beta1", 0.0)
        if group.get("lr", 0.0) > 0 and 0 < beta < 1:
            found[name] = group["lr"] * beta / (1 - beta)
    return found


def _look_ahead_inputs(
    spec: TensorSpec, there: Sequence[tuple[LookAheadStep, Checkpoint]]
) -> Iterator[tuple[int, TensorInput]]:
    """Yield samples of a tensor at each inspected step that has the same tensor."""
    for look, checkpoint in there:
        if spec.key not in checkpoint or checkpoint.spec(spec.key) != spec:
            continue
        wanted = (TensorRole.EXP_AVG_SQ, TensorRole.MOMENTUM) if look.auxiliaries else ()
        try:
            read = _input(checkpoint, spec, "cpu")
            auxiliaries = {role: read.auxiliary(role, sampled=True) for role in wanted}
            item = TensorInput(spec=spec, tensor=read.sample, auxiliaries=auxiliaries)
        except (InshrinkError, OSError):
            continue
        yield look.place, item


def _nbytes(spec: TensorSpec) -> int:
    """Return an upper estimate of a tensor's memory during encoding, in bytes."""
    return spec.nbytes + RESIDENT_NBYTES


def squared_error(tensor: Tensor, reference: TensorReference) -> tuple[float, float]:
    """Return (squared error, squared norm) of a floating tensor; non-finite values are ignored."""
    import torch

    from inshrink_core.ops.cpu.distance import SLICE, squared_distance

    if not tensor.is_floating_point():
        return 0.0, 0.0
    statistics = reference.distance(tensor)
    if statistics is not None:
        return statistics
    squared_error = squared_norm = 0.0
    now, decoded = tensor.detach().resolve_neg().reshape(-1), reference.decoded().reshape(-1)
    for start in range(0, now.numel(), SLICE):
        original = real_numbers(now[start : start + SLICE].cpu(), torch.float32)
        restored = real_numbers(decoded[start : start + SLICE].cpu(), torch.float32)
        error, norm = squared_distance(original, restored)
        squared_error += error
        squared_norm += norm
    return squared_error, squared_norm
