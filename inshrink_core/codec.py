"""The contract of all codecs, and the registry.

One tensor at a time, so that memory is bounded by a tensor and work spreads over threads, devices and
machines; what one frame decides for all tensors together is a small plan. A codec obeys six
laws (``tests/codec_suite.py`` tests them, ``docs/design.md`` explains them): closed loop, locality,
device independence, bounded size, totality, and re-key.
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

    from inshrink_core.ops.cpu.distance import Distance

_MEMORY: Final = 7
"""Peak memory of decoding one tensor over its bytes: values, state and what decoding needs on the way.
Measured over every lossy codec with tensors of 64 MB: 2.5 to 6.8."""

_MEMORY_OF_FALLBACK: Final = 3
"""The same of the lossless codec; measured: 2.0 to 2.9."""

DEFAULT_CODEC: Final = "lattice"
"""The codec of weights where none was chosen."""

FALLBACK_CODEC: Final = "lossless"
"""Stores tensors that no other codec takes, and steps for which nothing coarser keeps the bounds."""

DIVERGENCE_PER_ERROR: Final = 1.9
"""Nats over the squared relative error of the weights: geometric mean over two runs and eleven settings of
Inshrinkerator, .9 to 4.2."""

PARTS = ("pruned", "quantized", "protected")
PRUNED, QUANTIZED, PROTECTED = range(len(PARTS))
"""What a codec does with an element: set it to zero, give it a level, or store it exactly or nearly so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A setting of a codec that trades size for fidelity.

    Parameters
    ----------
    settings
        Names of the settings that are turned together.
    values
        From the most faithful to the smallest.
    label, unit
        What users see beside it; without a label, the name of the first setting.
    within
        The lowest and the highest value, where every number between them is possible and worth searching;
        None where only `values` are searched.
    layer
        The only layer type whose tensors it matters for; None for all.
    """

    settings: tuple[str, ...]
    values: tuple[float, ...]
    label: str = ""
    unit: str = ""
    within: tuple[float, float] | None = None
    layer: LayerType | None = None

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are possible."""
        return all(isinstance(value, int) for value in self.values)

    def is_coarser(self, value: float, other: float) -> bool:
        """Whether one value makes smaller frames than another."""
        return value > other if self.values[-1] > self.values[0] else value < other

    def between(self, value: float, other: float) -> float:
        """Return the geometric middle of two values, to three digits or to a whole number."""
        middle = math.sqrt(value * other)
        return round(middle) if self.whole else float(f"{middle:.3g}")


class Switch(NamedTuple):
    """A setting without order that a search tries both ways.

    Parameters
    ----------
    setting, words
        Its name and its values, the default first.
    idle_at
        The place of the axis at whose finest value the switch changes nothing.
    """

    setting: str
    words: tuple[str, ...]
    idle_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a codec trades size for fidelity: what sweeps, searches, commands and pages ask of it.

    Parameters
    ----------
    knob
        What a sweep turns, and a page offers first.
    axes
        What a search turns, where that is more than the knob.
    switch
        What a search tries both ways.
    beside
        Settings that a sweep and a search need beside them, where they differ from the codec's defaults.
    """

    knob: Knob
    axes: tuple[Knob, ...] = ()
    switch: Switch | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, value: float) -> dict[str, Any]:
        """Return the settings at one value of the knob."""
        turned = int(value) if self.knob.whole else value
        return {**self.beside, **dict.fromkeys(self.knob.settings, turned)}

    def value(self, codec: AnyCodec) -> float:
        """Return the value of the knob in a codec's settings."""
        return float(getattr(codec, self.knob.settings[0]))

    def searched(self, layers: frozenset[LayerType | None]) -> tuple[Knob, ...]:
        """Return what a search turns on a run with these layer types."""
        return tuple(axis for axis in self.axes or (self.knob,) if axis.layer is None or axis.layer in layers)


class Levels(NamedTuple):
    """The values that a codec may give the elements of one tensor, and the one that each element has.

    Parameters
    ----------
    kind
        ``codebook``: levels anywhere. ``lattice`` and ``grid``: evenly spaced. ``rounded``: each value in
        bfloat16. ``exact``: bit for bit. ``other``: the codec has no levels of its own.
    points : Float[ndarray, "c"] or None
        Every level, ascending, where they are few.
    spacing
        From one point to the next; None without a lattice or a grid.
    parts : UInt8[ndarray, "n"] or int
        Index into `PARTS` for each element, or one for all of them.
    symbols : Int[ndarray, "n"] or None
        Level number of each element, where the codec has one.
    unit
        For symbols whose changes are coded: their exponent, and how many units the spacing has. None where
        symbols themselves are coded.
    """

    kind: str
    points: NDArray[np.float64] | None = None
    spacing: float | None = None
    parts: NDArray[np.uint8] | int = QUANTIZED
    symbols: NDArray[np.integer] | None = None
    unit: tuple[int, int] | None = None


class TensorReference(ABC):
    """The decoded state of one tensor after a frame: what the next delta needs.

    Implementations are dataclasses of integers and tensors, in host memory where they were encoded, else
    on the device they were decoded on. They never alias the caller's tensor, but for one that was given away
    (`TensorInput.owned`).
    """

    @abstractmethod
    def decoded(self) -> Tensor:
        """Return the tensor this state decodes to, in the stored dtype and shape."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory the state holds, in bytes."""

    def decoded_anew(self) -> Tensor:
        """Return the tensor, one that the caller may write to."""
        return self.decoded().clone()

    def exact_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the decoded tensor and what else of the state an exact delta is coded relative to."""
        return self.decoded(), None

    def distance(self, tensor: Tensor) -> Distance | None:
        """Return how far a tensor is from the decoded one; None where only decoding would show it.

        Sums as of `inshrink_core.ops.cpu.distance.squared_distance`.
        """
        return None

    def levels(self) -> Levels:
        """Return the levels of the values; by default nothing is known of them."""
        return Levels("other")


@dataclass(frozen=True, slots=True, eq=False)
class ShapedReference(TensorReference):
    """A state of other things than values, which says what it decodes to and makes it anew each time.

    Parameters
    ----------
    dtype, shape
        As stored.
    """

    dtype: str
    shape: tuple[int, ...]

    def decoded_anew(self) -> Tensor:
        """Return the tensor, one that the caller may write to."""
        return self.decoded()


@dataclass(frozen=True, slots=True, eq=False)
class BaseReference(TensorReference):
    """The values of a base model, for the first frame of a fine-tuning: no state of any codec.

    A codec with `Codec.uses_base` gets it in the place of a state, in `Codec.encode` and in `Codec.decode`
    with the same values. Whatever it derives from them must be the same bits on every device.

    Parameters
    ----------
    read
        Reads the tensor, in the dtype and shape of the spec, on the CPU; each time anew.
    """

    read: Callable[[], Tensor]

    def decoded(self) -> Tensor:
        """Return the tensor."""
        return self.read()

    def decoded_anew(self) -> Tensor:
        """Return the tensor, one that the caller may write to."""
        return self.read()

    @property
    def nbytes(self) -> int:
        """Nothing is held."""
        return 0


DecodedMoment: TypeAlias = "Callable[[], Tensor]"
"""Decodes a first moment or momentum."""


class TensorInput:
    """One tensor to encode, and what the encoder may look at beside it. Never needed for decoding.

    A chain reads each part when the codec asks for it (`inshrink_core.chain.encoder.TensorJob`).

    Parameters
    ----------
    spec
        Name, role, dtype and shape.
    tensor
        The values, in `spec.dtype`, any device, any strides.
    companions
        Tensors of the same parameter, by role.
    restored
        The values that training last continued from after a restore; None where there was no restore.
    moment_before
        Decodes the first moment of this parameter in the previous frame; None where there is none.
    owned
        True where nobody else will write to `tensor`: a state may then keep it instead of a copy.
    """

    def __init__(
        self,
        *,
        spec: TensorSpec,
        tensor: Tensor,
        companions: Mapping[TensorRole, Tensor | None] = MappingProxyType({}),
        restored: Tensor | None = None,
        moment_before: DecodedMoment | None = None,
        owned: bool = False,
    ) -> None:
        self.spec, self.moment_before, self.owned = spec, moment_before, owned
        self._tensor, self._restored, self._companions = tensor, restored, companions

    @property
    def tensor(self) -> Tensor:
        """The values."""
        return self._tensor

    @property
    def restored(self) -> Tensor | None:
        """The values that training last continued from after a restore."""
        return self._restored

    @property
    def sample(self) -> Tensor:
        """A flat sample of the values (`inshrink_core.ops.sample.sample`): all of a small tensor."""
        return _sample(self.tensor)

    def companion(self, *roles: TensorRole, sampled: bool = False) -> Tensor | None:
        """Return the tensor of this parameter in the first of some roles that is known, or its sample."""
        found = next((item for role in roles if (item := self._companions.get(role)) is not None), None)
        return _sample(found) if sampled and found is not None else found


def _sample(tensor: Tensor) -> Tensor:
    from inshrink_core.ops.flat import flattened
    from inshrink_core.ops.sample import sample

    return sample(flattened(tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameContext:
    """What an encoder may know of a frame beside its tensors. Never needed for decoding.

    Parameters
    ----------
    learning_rates
        Learning rate by parameter name, where the checkpoint's optimizer state says it.
    memory
        What `EncoderState.remember` returned for the previous frame of the chain; in the first frame what
        `EncoderState.initial_memory` returned. None otherwise, and after a frame of another codec.
    after_restore
        Whether the training that led here was restored from the previous frame of the chain.
    reaches
        How far the momentum of a parameter still moves it, over its state: the learning rate times the sum of
        the powers of beta1; by parameter name, where the checkpoint's optimizer state says it.
    spacings
        `EncoderState.spacing` of the weights of this frame, by parameter name, for codecs of optimizer state.
    """

    learning_rates: Mapping[str, float] = field(default_factory=dict)
    memory: Any = None
    after_restore: bool = False
    reaches: Mapping[str, float] = field(default_factory=dict)
    spacings: Mapping[str, float] = field(default_factory=dict)


_NOTHING_KNOWN: Final = FrameContext()


class LookAheadStep(NamedTuple):
    """A step of a run that a codec looks at before it plans a chain's first frame.

    Parameters
    ----------
    place
        Of the step in the run, from 0.
    companions
        Whether tensors come with their companions, which have to be read too.
    """

    place: int
    companions: bool


class PastFrame(NamedTuple):
    """One tensor in one frame of a chain that was written before, for `EncoderState.recall`.

    Parameters
    ----------
    block
        Of the tensor.
    settings
        The settings it was written with.
    moment_before
        As of `TensorInput`.
    """

    block: Block
    settings: Mapping[str, Any]
    moment_before: DecodedMoment | None


class Encoded(NamedTuple):
    """What `Codec.encode` returns: the bytes, and the state the decoder will reach from them."""

    block: Block
    reference: TensorReference


_Plan = TypeVar("_Plan")
_State = TypeVar("_State", bound=ShapedReference)


@dataclass(frozen=True, slots=True)
class Codec(ABC, Generic[_Plan]):
    """A way to turn a checkpoint's tensors into blocks and back: the object is its settings.

    A subclass is a ``@dataclass(frozen=True, kw_only=True, slots=True)`` whose fields are JSON values, each
    with a default; what decodes a block must not depend on them. An object has no other state, so that one
    serves any number of threads. ``_Plan`` is what one frame decides for all its tensors.
    """

    name: ClassVar[str]
    """Name users select it by."""

    bitstream: ClassVar[str]
    """``name/version`` of the bytes it writes and decodes; what it does not cover is ``lossless/1``."""

    words: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The words that a setting takes, by its name."""

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """The closed range of a setting that is a number, by its name; whole numbers between whole bounds."""

    constants: ClassVar[Mapping[str, Any]] = {}
    """What frames record among the settings although it cannot be set."""

    uses_base: ClassVar[bool] = False
    """Whether `encode` and `decode` take a `BaseReference`, and make smaller blocks with it."""

    covers_masters: ClassVar[bool] = False
    """Whether its rule for weights holds for master weights too; else they are stored exactly."""

    label: ClassVar[str] = ""
    """What users see in the place of the name."""

    tuning: ClassVar[Tuning | None] = None
    """How it trades size for fidelity; None where nothing is to be searched."""

    compared: ClassVar[tuple[tuple[str, Mapping[str, Any]], ...]] = ()
    """Labels and settings that other codecs are compared with: as published, or usual baselines."""

    def __post_init__(self) -> None:
        for name, known in self.words.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"'{name}' takes one of a few words", expected=" or ".join(known), found=repr(value)
                )
        for name, (low, high) in self.ranges.items():
            value, whole = getattr(self, name), isinstance(low, int) and isinstance(high, int)
            # A bool is no number, and no comparison catches NaN from outside.
            is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(
                    f"'{name}' is out of range", expected=f"{kind} {low:g}..{high:g}", found=repr(value)
                )

    def settings(self) -> dict[str, Any]:
        """Return all settings as JSON values: what a frame says of how it was made."""
        return {**dataclasses.asdict(self), **self.constants}

    @classmethod
    def is_exact(cls, settings: Mapping[str, Any]) -> bool:
        """Whether frames made with these settings keep their weights bit for bit."""
        return False

    def made_exact(self) -> AnyCodec | None:
        """Return what writes one step bit for bit, so that later frames go on as if it had not.

        None where such a step has to be left to the fallback.
        """
        return None

    def takes(self) -> frozenset[TensorRole]:
        """Return the roles whose tensors this codec encodes; others are stored as the chain says."""
        return MODEL_ROLES

    def observe(self, item: TensorInput, reference: TensorReference | None) -> Any:
        """Return what the plan needs of one tensor, small; None where it does not depend on it.

        A codec that looks at `TensorInput.sample` alone is quick on large tensors.
        """
        return None

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext = _NOTHING_KNOWN
    ) -> _Plan:
        """Decide what one frame decides for all tensors together, from `observe` of each.

        A codec that decides nothing for all together has the plan None.
        """
        return cast("_Plan", None)

    def expected_divergence(self, relative_error: float) -> float:
        """Return what the worst step of a chain may diverge by, in nats, estimated from other runs.

        Parameters
        ----------
        relative_error
            Root of squared error over squared norm of the weights, at that step.
        """
        return DIVERGENCE_PER_ERROR * relative_error**2

    @classmethod
    def having(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return all that changes where some settings are set: these, and what is at odds with them."""
        return dict(settings)

    @abstractmethod
    def encode(self, item: TensorInput, plan: _Plan, reference: TensorReference | None) -> Encoded:
        """Encode one tensor.

        Parameters
        ----------
        item
            The tensor and its companions.
        plan
            What `plan` returned for this frame.
        reference
            State after the previous frame, from any codec; None in a keyframe, or a `BaseReference` where
            the codec `uses_base`.

        Returns
        -------
        Encoded
            The block and the state that decoding it yields, bit for bit.
        """

    @abstractmethod
    def decode(
        self, spec: TensorSpec, block: Block, reference: TensorReference | None, device: str = "cpu"
    ) -> TensorReference:
        """Return the state after a block, whatever the settings it was encoded with.

        Parameters
        ----------
        spec
            Name, role, dtype and shape of the tensor.
        block
            What `encode` returned.
        reference
            State after the previous frame; None in a keyframe.
        device
            Where to work, as torch names it: a block with a reference is decoded where that is. What a codec
            has no kernels for is done in host memory; the bits do not depend on it.

        Returns
        -------
        TensorReference
            On that device or in host memory.

        Raises
        ------
        DamagedError
            The payload is not a valid block for this spec and reference.

        Notes
        -----
        Never crashes or hangs, whatever the bytes; memory is a few times `TensorSpec.nbytes` and the payload,
        and some megabytes. A reference that hostile bytes decoded to is as good as any other.
        """

    @abstractmethod
    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a block that stands alone and decodes to the same bits as `reference`.

        Where `unchanged`, it is decoded relative to the reference and takes a few bytes. A codec that has
        such a block in its bitstream keeps its state, which the next block is coded relative to.
        """

    @abstractmethod
    def worst_case_bytes(self, spec: TensorSpec) -> int:
        """Return the largest payload `encode` may produce for a tensor of this spec."""


AnyCodec: TypeAlias = Codec[Any]
"""A codec of any plan."""


class EncoderState(Generic[_Plan]):
    """What an encoder knows of a chain beside the states. Decoders need none of it."""

    __slots__ = ()

    @property
    def uses_past(self) -> bool:
        """Whether `encode` looks at `TensorInput.moment_before`."""
        return False

    def recall(self, reference: TensorReference, past: Iterable[PastFrame]) -> TensorReference:
        """Return a decoded state with what `encode` had added to it for frames to come.

        Parameters
        ----------
        reference
            The state after the last of the frames.
        past
            The tensor in each frame of the chain, from the keyframe on.
        """
        return reference

    def remember(self, plan: _Plan) -> Any:
        """Return what later frames of the chain plan with: msgpack values, stored in the frame."""
        return None

    def predicted(self, plan: _Plan) -> Mapping[str, Any] | None:
        """Return what the frame records of the cost of a restore (`inshrink_core.chain.QUALITY`)."""
        return None

    def spacing(self, plan: _Plan, spec: TensorSpec) -> float | None:
        """Return the step size of a tensor, as planned; None where it has none."""
        return None

    def shaped(self, states: Iterable[TensorReference]) -> tuple[int, int]:
        """Count the weights with error feedback, and all of which it is known, by their states."""
        return 0, 0

    def lasting(self, shaped: int, known: int) -> float:
        """Return how long errors of weights go on to cost a training, over those of plain rounding.

        Parameters
        ----------
        shaped, known
            As `shaped` counts them in the previous frame, of all ranks; 0 where nothing is known.
        """
        return 1.0

    def look_ahead_steps(self, n_steps: int) -> tuple[LookAheadStep, ...]:
        """Return the steps to look at before the first frame of a run of `n_steps`, ascending.

        The codec must also work where it cannot look ahead, as in a training that still goes on.
        """
        return ()

    def look_ahead(self, spec: TensorSpec, inputs: Iterator[tuple[int, TensorInput]]) -> Any:
        """Return what the values of one tensor along a run show.

        Parameters
        ----------
        spec
            The tensor as it is in the run's first step.
        inputs
            Place in the run and sample of the tensor at each of the `look_ahead_steps`. Steps that cannot be
            read, or that have no such tensor, are left out.
        """
        return None

    def initial_memory(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], rates: Sequence[Mapping[str, float]]
    ) -> Any:
        """Return what a chain's first frame is planned with, as if an earlier frame had remembered it.

        Parameters
        ----------
        specs
            The tensors that this codec takes.
        statistics
            What `look_ahead` returned of each.
        rates
            `FrameContext.learning_rates` at each of the `look_ahead_steps` that could be read.
        """
        return None


def own_state(kind: type[_State], reference: TensorReference | None, spec: TensorSpec) -> _State | None:
    """Return a reference if it is a state of a kind, and of a tensor's dtype and shape."""
    fits = isinstance(reference, kind) and (reference.dtype, reference.shape) == (spec.dtype, spec.shape)
    return reference if isinstance(reference, kind) and fits else None


_MOST_NBYTES = 1 << 62
"""Largest size of a tensor: beyond it, sizes of what is derived from it do not fit 64 bits."""

_NO_MEMORY: Final = re.compile("allocate memory|out of memory")
"""How PyTorch says that there is none, of the host and of a device."""


@contextmanager
def enough_memory(spec: TensorSpec, device: str = "cpu") -> Iterator[None]:
    """Raise one error where there is not the memory to decode a tensor.

    A few bytes may claim any shape. PyTorch and numpy say in five ways that they cannot allocate it, some of
    them before, some after the system was asked.

    Raises
    ------
    TooLargeError
        There is not.
    """
    needed = spec.nbytes
    if needed > _MOST_NBYTES:
        raise TooLargeError(
            "a tensor is larger than any memory", where=spec.key, needed=needed, limit=_MOST_NBYTES
        )
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        other = "" if device == "cpu" else "use --device cpu, "
        raise TooLargeError(
            "there is not the memory to decode a tensor",
            where=spec.key,
            needed=needed,
            limit=0,
            expected=f"room for {needed} bytes and what they are decoded from",
            remedy=f"{other}close other programs, or use a machine with more memory",
        ) from error


_GROUP: Final = "inshrink.codecs"


def codec_names() -> tuple[str, ...]:
    """Return the names of every codec installed, built-in ones first."""
    return tuple(plugins(_GROUP))


def weight_codecs() -> tuple[str, ...]:
    """Return the names of the codecs that store weights, the default one first.

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
    """Return the codec of a name: a class whose objects are its settings.

    Raises
    ------
    ConfigError
        No such codec is installed.

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
    """Return a codec with plain settings, its defaults filled in; one that is made already as it is.

    Raises
    ------
    ConfigError
        No such codec, an unknown setting, or a value out of range.
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
    """Refuse a codec that a chain cannot store its weights with.

    Raises
    ------
    ConfigError
        It is a codec of the optimizer's state alone, or there is none of this name.
    """
    if not _stores_weights(name):
        raise ConfigError(f"the codec '{name}' stores no weights", remedy="choose it with --optimizer")


@functools.cache
def _reader(bitstream: str) -> AnyCodec | None:
    """Make the codec that decodes a bitstream once: every block asks."""
    name = bitstream.partition("/")[0]
    codec = get_codec(name)() if plugin(_GROUP, name) is not None else None
    return codec if codec is not None and codec.bitstream == bitstream else None


def decoding_memory(bitstream: str) -> int:
    """Return about the peak memory of decoding a tensor, over its bytes.

    Known without the codec, whose import takes longer than reading every header of an archive.
    """
    return _MEMORY_OF_FALLBACK if bitstream.partition("/")[0] == FALLBACK_CODEC else _MEMORY


def codec_for_block(bitstream: str, where: str = "") -> AnyCodec:
    """Return the codec that decodes a bitstream ``name/version``.

    Raises
    ------
    IncompatibleError
        No installed codec decodes it.
    """
    codec = _reader(bitstream)
    if codec is None:
        raise IncompatibleError(
            f"no installed codec reads the bitstream '{bitstream}'",
            where=where,
            remedy="upgrade Inshrink, or install the codec it was written with",
        )
    return codec
