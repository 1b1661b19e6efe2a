"""The interface of all codecs, and their registry.

A codec encodes one tensor at a time, so memory is bounded by one tensor and work is spread over threads,
devices and machines. A small plan holds the decisions that one frame makes for all its tensors. Every codec
satisfies six laws (tested in ``tests/codec_suite.py``, explained in ``docs/design.md``): closed loop,
locality, device independence, bounded size, totality, and re-key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from inshrink_core.checkpoint import MODEL_ROLES, LayerType, TensorRole, TensorSpec
from inshrink_core.errors import ConfigError, IncompatibleError, TooLargeError
from inshrink_core.frame import Block
from inshrink_core.plugins import plugin, plugins

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_MEMORY: Final = 7
"""Peak memory of decoding one tensor over its size in bytes: values, state and temporaries.
Measured for every lossy codec with tensors of 64 MB: 2.5 to 6.8."""

_MEMORY_OF_FALLBACK: Final = 3
"""The same ratio for the lossless codec; measured: 2.0 to 2.9."""

DEFAULT_CODEC: Final = "lattice"
"""Default codec of weights."""

FALLBACK_CODEC: Final = "lossless"
"""Codec of tensors that no other codec takes, and of steps that no lossy setting keeps within the bounds."""

DIVERGENCE_PER_ERROR: Final = 1.9
"""Divergence in nats over the squared relative error of the weights: geometric mean over two runs and eleven
settings of Inshrinkerator; the range is 0.9 to 4.2."""

PARTS = ("pruned", "quantized", "protected")
PRUNED, QUANTIZED, PROTECTED = range(len(PARTS))
"""How a codec treats an element: set it to zero, assign it a level, or store it exactly or nearly so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """A tunable parameter: a codec setting that trades size for fidelity.

    Parameters
    ----------
    settings
        Names of the settings that change together.
    values
        Values to sweep, from the most faithful to the smallest.
    label, unit
        Display name and unit; without a label, the name of the first setting is shown.
    within
        Lowest and highest value of a continuous search range; None restricts the search to `values`.
    layer
        The only layer type that the parameter affects; None for all.
    """

    settings: tuple[str, ...]
    values: tuple[float, ...]
    label: str = ""
    unit: str = ""
    within: tuple[float, float] | None = None
    layer: LayerType | None = None

    @property
    def is_integer(self) -> bool:
        """Whether the values are integers."""
        return all(isinstance(value, int) for value in self.values)

    def is_coarser(self, value: float, other: float) -> bool:
        """Whether one value makes smaller frames than another."""
        return value > other if self.values[-1] > self.values[0] else value < other

    def between(self, value: float, other: float) -> float:
        """Return the geometric mean of two values, rounded to three digits or to an integer."""
        middle = math.sqrt(value * other)
        return round(middle) if self.is_integer else float(f"{middle:.3g}")


class Switch(NamedTuple):
    """A categorical setting of which a search tries both values.

    Parameters
    ----------
    setting, words
        Name of the setting and its values, the default first.
    idle_at
        Index of the axis whose most faithful value disables the switch.
    """

    setting: str
    words: tuple[str, ...]
    idle_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The tunable parameters of a codec, used by sweeps, searches, commands and pages.

    Parameters
    ----------
    tunable
        The parameter that a sweep varies and a page shows first.
    axes
        The parameters that a search varies, if it varies more than `tunable`.
    switch
        The categorical setting of the search.
    beside
        Fixed settings of sweeps and searches that differ from the codec's defaults.
    """

    tunable: Tunable
    axes: tuple[Tunable, ...] = ()
    switch: Switch | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, value: float) -> dict[str, Any]:
        """Return the settings at one value of the tunable parameter."""
        turned = int(value) if self.tunable.is_integer else value
        return {**self.beside, **dict.fromkeys(self.tunable.settings, turned)}

    def value(self, codec: AnyCodec) -> float:
        """Return the value of the tunable parameter in a codec's settings."""
        return float(getattr(codec, self.tunable.settings[0]))

    def searched(self, layers: frozenset[LayerType | None]) -> tuple[Tunable, ...]:
        """Return the parameters to search on a run with these layer types."""
        return tuple(
            axis for axis in self.axes or (self.tunable,) if axis.layer is None or axis.layer in layers
        )


class Levels(NamedTuple):
    """The levels to which a codec quantized one tensor, and the level of each element.

    Parameters
    ----------
    kind
        ``codebook``: arbitrary levels. ``lattice`` and ``grid``: evenly spaced levels. ``rounded``: values
        rounded to bfloat16. ``exact``: bit for bit. ``other``: the codec has no levels.
    points : Float[ndarray, "c"] or None
        All levels, ascending, if they are few.
    step_size
        Step size between neighbouring points; None without a lattice or a grid.
    parts : UInt8[ndarray, "n"] or int
        Index into `PARTS` for each element, or one index for all of them.
    """

    kind: str
    points: NDArray[np.float64] | None = None
    step_size: float | None = None
    parts: NDArray[np.uint8] | int = QUANTIZED


class TensorReference(ABC):
    """The decoded state of one tensor after a frame, which the next delta is coded against.

    Implementations are dataclasses of integers and tensors. An encoded state is in host memory, a decoded one
    on the device that decoded it. A state never aliases the caller's tensor, unless the caller gave it up
    (`TensorInput.owned`).
    """

    @abstractmethod
    def decoded(self) -> Tensor:
        """Return the tensor this state decodes to, in the stored dtype and shape, possibly that of the state.

        A caller that keeps the state must not modify the tensor.
        """

    def exact_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the decoded tensor and the context state of an exact delta, if there is any."""
        return self.decoded(), None

    def distance(self, tensor: Tensor) -> tuple[float, float] | None:
        """Return the squared distance of a tensor from the decoded one, and the squared norm of the tensor.

        None if this requires decoding. `inshrink_core.ops.cpu.distance.squared_distance` defines the sums.
        """
        return None

    def levels(self) -> Levels:
        """Return the levels of the values; ``other`` unless a codec overrides this."""
        return Levels("other")


@dataclass(frozen=True, slots=True, eq=False)
class ShapedReference(TensorReference):
    """A state that does not hold the values, but derives them on each access.

    Parameters
    ----------
    dtype, shape
        Stored dtype and shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BaseReference(TensorReference):
    """The values of a base model, as reference of the first frame of a fine-tuning.

    This is not the state of any codec. A codec with `Codec.uses_base` receives it in place of a state, with
    the same values in `Codec.encode` and `Codec.decode`. Everything derived from the values must have the
    same bits on every device.

    Parameters
    ----------
    read
        Reads the tensor on the CPU, in the dtype and shape of the spec, anew on each call.
    """

    read: Callable[[], Tensor]

    def decoded(self) -> Tensor:
        """Return the tensor."""
        return self.read()


DecodedMoment: TypeAlias = "Callable[[], Tensor]"
"""Decodes a first moment or momentum."""


class TensorInput:
    """One tensor to encode, with the encoder's side information. Decoding needs neither.

    A chain gives functions that read each part when the codec requests it.

    Parameters
    ----------
    spec
        Name, role, dtype and shape.
    tensor
        The values in `spec.dtype`, on any device, with any strides; or a function that reads them, once, or
        only a sample of them with `sampled`.
    auxiliaries
        Auxiliary tensors of the same parameter, by role; or a function that reads one, as `auxiliary`.
    restored
        The values from which training last resumed after a restore, or a function that decodes them; None
        without a restore.
    moment_before
        Decodes the parameter's first moment in the previous frame; None if it has none.
    owned
        True if no other code modifies `tensor`, so that a state may hold it without a copy.
    """

    def __init__(
        self,
        *,
        spec: TensorSpec,
        tensor: Tensor | Callable[..., Tensor],
        auxiliaries: Mapping[TensorRole, Tensor | None] | Callable[..., Tensor | None] = MappingProxyType({}),
        restored: Tensor | Callable[[], Tensor | None] | None = None,
        moment_before: DecodedMoment | None = None,
        owned: bool = False,
    ) -> None:
        self.spec, self.moment_before, self.owned = spec, moment_before, owned
        self._tensor, self._restored, self._auxiliaries = tensor, restored, auxiliaries

    @property
    def tensor(self) -> Tensor:
        """The values."""
        if callable(self._tensor):
            self._tensor = self._tensor()
        return self._tensor

    @property
    def restored(self) -> Tensor | None:
        """The values from which training last resumed after a restore."""
        return self._restored() if callable(self._restored) else self._restored

    @property
    def sample(self) -> Tensor:
        """A flat sample of the values (`inshrink_core.ops.sample.sample`); a small tensor in full."""
        from inshrink_core.ops.sample import sample

        return self._tensor(sampled=True) if callable(self._tensor) else sample(self._tensor)

    def auxiliary(self, *roles: TensorRole, sampled: bool = False) -> Tensor | None:
        """Return the auxiliary tensor of the first available role, or a sample of it."""
        if callable(self._auxiliaries):
            return self._auxiliaries(*roles, sampled=sampled)
        from inshrink_core.ops.sample import sample

        found = next((item for role in roles if (item := self._auxiliaries.get(role)) is not None), None)
        return sample(found) if sampled and found is not None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameContext:
    """The encoder's side information about a frame. Decoding does not need it.

    Parameters
    ----------
    learning_rates
        Learning rate by parameter name, if the checkpoint's optimizer state contains it.
    memory
        The result of `EncoderState.remember` for the previous frame of the chain; in the first frame, of
        `EncoderState.initial_memory`. None otherwise, and after a frame of another codec.
    after_restore
        Whether training resumed from the previous frame of the chain.
    expected_updates
        Expected update size: the further movement of a parameter due to its momentum, over the momentum
        buffer. It is the learning rate times the sum of the powers of beta1. By parameter name, if the
        checkpoint's optimizer state contains it.
    step_sizes
        `EncoderState.step_size` of the frame's weights by parameter name, for codecs of optimizer state.
    """

    learning_rates: Mapping[str, float] = field(default_factory=dict)
    memory: Any = None
    after_restore: bool = False
    expected_updates: Mapping[str, float] = field(default_factory=dict)
    step_sizes: Mapping[str, float] = field(default_factory=dict)


_NOTHING_KNOWN: Final = FrameContext()


class LookAheadStep(NamedTuple):
    """A step of a run that a codec inspects before it plans a chain's first frame.

    Parameters
    ----------
    place
        Index of the step in the run, from 0.
    auxiliaries
        Whether the auxiliary tensors are read too.
    """

    place: int
    auxiliaries: bool


class PastFrame(NamedTuple):
    """One tensor in one earlier frame of a chain, for `EncoderState.recall`.

    Parameters
    ----------
    block
        The tensor's block.
    settings
        The codec settings of the frame.
    moment_before
        As in `TensorInput`.
    """

    block: Block
    settings: Mapping[str, Any]
    moment_before: DecodedMoment | None


class Encoded(NamedTuple):
    """The result of `Codec.encode`: the block, and the state that decoding it yields."""

    block: Block
    reference: TensorReference


_Plan = TypeVar("_Plan")
_State = TypeVar("_State", bound=ShapedReference)


@dataclass(frozen=True, slots=True)
class Codec(ABC, Generic[_Plan]):
    """Encodes a checkpoint's tensors to blocks and decodes them; an instance is a set of settings.

    A subclass is a ``@dataclass(frozen=True, kw_only=True, slots=True)``. Its fields are JSON values with
    defaults, and decoding must not depend on them. An instance has no other state, so threads may share it.
    ``_Plan`` is the type of the frame's plan for all its tensors.
    """

    name: ClassVar[str]
    """Name that selects the codec."""

    bitstream: ClassVar[str]
    """``name/version`` of the codec's bitstream; tensors it does not cover are stored as ``lossless/1``."""

    words: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Allowed words of each categorical setting, by setting."""

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Closed range of each numeric setting, by setting; integer bounds require an integer."""

    constants: ClassVar[Mapping[str, Any]] = {}
    """Fixed values that frames record among the settings."""

    uses_base: ClassVar[bool] = False
    """Whether `encode` and `decode` accept a `BaseReference`, which makes blocks smaller."""

    covers_masters: ClassVar[bool] = False
    """Whether the lossy rule for weights also covers master weights; else they are stored exactly."""

    label: ClassVar[str] = ""
    """Display name; empty to display `name`."""

    tuning: ClassVar[Tuning | None] = None
    """Tunable parameters; None if the codec has none."""

    compared: ClassVar[tuple[tuple[str, Mapping[str, Any]], ...]] = ()
    """Labels and settings for comparisons with other codecs: the published ones, or usual baselines."""

    def __post_init__(self) -> None:
        for name, known in self.words.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"'{name}' has an unknown value", expected=" or ".join(known), found=repr(value)
                )
        for name, (low, high) in self.ranges.items():
            value, whole = getattr(self, name), isinstance(low, int) and isinstance(high, int)
            # A bool is an int in Python, and NaN fails every comparison.
            is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(
                    f"'{name}' is out of range", expected=f"{kind}, {low:g} to {high:g}", found=repr(value)
                )

    def settings(self) -> dict[str, Any]:
        """Return all settings as JSON values, as recorded in a frame."""
        return {**dataclasses.asdict(self), **self.constants}

    @classmethod
    def is_exact(cls, settings: Mapping[str, Any]) -> bool:
        """Whether frames with these settings store their weights bit for bit."""
        return False

    def made_exact(self) -> AnyCodec | None:
        """Return a codec that stores one step bit for bit without an effect on later frames.

        None if the fallback codec must store such a step.
        """
        return None

    def takes(self) -> frozenset[TensorRole]:
        """Return the roles that this codec encodes; the chain configuration covers other roles."""
        return MODEL_ROLES

    def observe(self, item: TensorInput, reference: TensorReference | None) -> Any:
        """Return a small statistic of one tensor for `plan`; None if the plan does not depend on it.

        A codec that reads only `TensorInput.sample` is fast on large tensors.
        """
        return None

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext = _NOTHING_KNOWN
    ) -> _Plan:
        """Return the frame's decisions for all tensors together, from the result of `observe` for each.

        The plan is None for a codec without joint decisions.
        """
        return cast("_Plan", None)

    def expected_divergence(self, relative_error: float) -> float:
        """Return the expected divergence of the worst step of a chain in nats, estimated from other runs.

        Parameters
        ----------
        relative_error
            Square root of the squared error over the squared norm of the weights, at that step.
        """
        return DIVERGENCE_PER_ERROR * relative_error**2

    @abstractmethod
    def encode(self, item: TensorInput, plan: _Plan, reference: TensorReference | None) -> Encoded:
        """Encode one tensor.

        Parameters
        ----------
        item
            The tensor and its auxiliary tensors.
        plan
            The result of `plan` for this frame.
        reference
            State after the previous frame, from any codec. In a keyframe it is None, or a `BaseReference` if
            the codec `uses_base`.

        Returns
        -------
        Encoded
            The block, of at most twice the tensor's size and 2 KiB, and the state that decoding it yields,
            bit for bit.
        """

    @abstractmethod
    def decode(
        self, spec: TensorSpec, block: Block, reference: TensorReference | None, device: str = "cpu"
    ) -> TensorReference:
        """Return the state after a block; the result does not depend on the codec's settings.

        Parameters
        ----------
        spec
            Name, role, dtype and shape of the tensor.
        block
            The block from `encode`.
        reference
            State after the previous frame; None in a keyframe.
        device
            Device to decode on, as a torch device name. A block with a reference is decoded on the
            reference's device. A codec without kernels for the device decodes in host memory. The bits are
            the same.

        Returns
        -------
        TensorReference
            The state, on that device or in host memory.

        Raises
        ------
        DamagedError
            The payload is not a valid block for this spec and reference.

        Notes
        -----
        Decoding never crashes or hangs on any input. Its memory is bounded by a small multiple of
        `TensorSpec.nbytes` and the payload, plus some megabytes. A reference decoded from malicious bytes is
        valid input.
        """

    @abstractmethod
    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a standalone block that decodes to the same bits as `reference`.

        With `unchanged`, the block is decoded relative to the reference and takes a few bytes. A codec with
        such a block in its bitstream preserves its state, which the next block is coded against.
        """


AnyCodec: TypeAlias = Codec[Any]
"""A codec with any type of plan."""


class EncoderState(Generic[_Plan]):
    """Interface of codecs with an encoder state along a chain. Decoders need none of it."""

    __slots__ = ()

    @property
    def uses_past(self) -> bool:
        """Whether `encode` uses `TensorInput.moment_before`."""
        return False

    def recall(self, reference: TensorReference, past: Iterable[PastFrame]) -> TensorReference:
        """Return a decoded state with the encoder state of the chain restored.

        Parameters
        ----------
        reference
            The state after the last of the frames.
        past
            The tensor in each frame of the chain, from the keyframe.
        """
        return reference

    def remember(self, plan: _Plan) -> Any:
        """Return the memory for planning later frames: msgpack values, stored in the frame."""
        return None

    def step_size(self, plan: _Plan, spec: TensorSpec) -> float | None:
        """Return the planned step size of a tensor; None if it has none."""
        return None

    def shaped(self, states: Iterable[TensorReference]) -> tuple[int, int]:
        """Return the number of weights with error feedback, and of all weights with known first moments."""
        return 0, 0

    def error_persistence(self, shaped: int, known: int) -> float:
        """Return the error persistence: how long weight errors affect training, over plain rounding.

        Parameters
        ----------
        shaped, known
            The counts of `shaped` in the previous frame, over all ranks; 0 if unknown.
        """
        return 1.0

    def look_ahead_steps(self, n_steps: int) -> tuple[LookAheadStep, ...]:
        """Return the steps to inspect before the first frame of a run of `n_steps`, ascending.

        The codec must also work without them, as in a training that is still running.
        """
        return ()

    def look_ahead(self, spec: TensorSpec, inputs: Iterator[tuple[int, TensorInput]]) -> Any:
        """Return statistics of one tensor's values along a run.

        Parameters
        ----------
        spec
            The tensor in the run's first step.
        inputs
            Index of the step and sample of the tensor, for each of the `look_ahead_steps`. Steps that cannot
            be read or do not contain the tensor are omitted.
        """
        return None

    def initial_memory(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], rates: Sequence[Mapping[str, float]]
    ) -> Any:
        """Return the memory for planning a chain's first frame, in the form of `remember`.

        Parameters
        ----------
        specs
            The tensors that this codec encodes.
        statistics
            The result of `look_ahead` for each.
        rates
            `FrameContext.learning_rates` at each of the `look_ahead_steps` that is readable.
        """
        return None


def state_as(kind: type[_State], reference: TensorReference | None, spec: TensorSpec) -> _State | None:
    """Return the reference if it is a state of the kind with the tensor's dtype and shape, else None."""
    fits = isinstance(reference, kind) and (reference.dtype, reference.shape) == (spec.dtype, spec.shape)
    return reference if isinstance(reference, kind) and fits else None


_MAX_NBYTES = 1 << 62
"""Largest size of a tensor in bytes; sizes derived from a larger one do not fit 64 bits."""

_NO_MEMORY: Final = re.compile("allocate memory|out of memory")
"""Matches PyTorch's messages for failed allocations, on the host and on devices."""


@contextmanager
def enough_memory(spec: TensorSpec, device: str = "cpu") -> Iterator[None]:
    """Raise a `TooLargeError` if memory does not suffice to decode a tensor.

    A few bytes may declare any shape. PyTorch and NumPy report a failed allocation in five ways, some of them
    before the system is asked.

    Raises
    ------
    TooLargeError
        The allocation failed, or the tensor exceeds the largest size.
    """
    if spec.nbytes > _MAX_NBYTES:
        raise TooLargeError("a tensor is larger than any memory", where=spec.key)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        other = "" if device == "cpu" else "use --device cpu, "
        raise TooLargeError(
            "there is not enough memory to decode a tensor",
            where=spec.key,
            expected=f"room for {spec.nbytes} bytes and their encoded form",
            remedy=f"{other}close other programs, or use a machine with more memory",
        ) from error


_GROUP: Final = "inshrink.codecs"


def codec_names() -> tuple[str, ...]:
    """Return the names of all installed codecs, built-in ones first."""
    return tuple(plugins(_GROUP))


def weight_codecs() -> tuple[str, ...]:
    """Return the names of the codecs that store weights, the default first.

    Examples
    --------
    >>> weight_codecs()[0], "moments" in weight_codecs()
    ('lattice', False)
    """
    names = sorted(codec_names(), key=lambda name: name != DEFAULT_CODEC)
    return tuple(name for name in names if _stores_weights(name))


def _stores_weights(name: str) -> bool:
    return TensorRole.WEIGHT in get_codec(name)().takes()


@functools.cache
def get_codec(name: str) -> type[AnyCodec]:
    """Return the codec class of a name; its instances are sets of settings.

    Raises
    ------
    ConfigError
        No codec of this name is installed.

    Examples
    --------
    >>> get_codec("lattice")(coarseness=2.0).settings()["coarseness"]
    2.0
    """
    point = plugin(_GROUP, name)
    if point is None:
        raise ConfigError(f"there is no codec '{name}'", remedy=f"choose one of {', '.join(codec_names())}")
    return cast("type[AnyCodec]", point.load())


def make_codec(name: str, settings: Mapping[str, Any] | AnyCodec | None) -> AnyCodec:
    """Return a codec with the given settings and defaults for the others; a codec instance is returned as is.

    Raises
    ------
    ConfigError
        The codec is not installed, a setting is unknown, or a value is out of range.
    """
    kind = get_codec(name)
    if isinstance(settings, Codec):
        if not isinstance(settings, kind):
            raise ConfigError(f"a {type(settings).__name__} does not configure the codec '{name}'")
        return settings
    known = [field.name for field in dataclasses.fields(kind)]
    settings = dict(item for item in (settings or {}).items() if item not in kind.constants.items())
    for setting in settings:
        if setting not in known:
            raise ConfigError(
                f"the codec '{name}' has no setting '{setting}'", remedy=f"it has: {', '.join(known)}"
            )
    try:
        return kind(**settings)
    except TypeError as error:
        raise ConfigError(f"the settings of the codec '{name}' have a wrong type ({error})") from error


def require_weight_codec(name: str) -> None:
    """Refuse a codec that does not store weights.

    Raises
    ------
    ConfigError
        The codec stores only optimizer state, or is not installed.
    """
    if not _stores_weights(name):
        raise ConfigError(f"the codec '{name}' stores no weights", remedy="choose it with --optimizer")


@functools.cache
def _reader(bitstream: str) -> AnyCodec | None:
    """Return the codec of a bitstream, cached because every block looks it up."""
    name = bitstream.partition("/")[0]
    codec = get_codec(name)() if plugin(_GROUP, name) is not None else None
    return codec if codec is not None and codec.bitstream == bitstream else None


def decoding_memory(bitstream: str) -> int:
    """Return the approximate peak memory of decoding a tensor, over its size in bytes.

    This avoids an import of the codec, which takes longer than reading every header of an archive.
    """
    return _MEMORY_OF_FALLBACK if bitstream.partition("/")[0] == FALLBACK_CODEC else _MEMORY


def codec_for_block(bitstream: str, where: str = "") -> AnyCodec:
    """Return the codec that decodes a bitstream ``name/version``.

    Raises
    ------
    IncompatibleError
        No installed codec decodes the bitstream.
    """
    codec = _reader(bitstream)
    if codec is None:
        raise IncompatibleError(
            f"no installed codec reads the bitstream '{bitstream}'",
            where=where,
            remedy="upgrade Inshrink, or install the codec it was written with",
        )
    return codec
