"""Checkpoints in memory: named tensors with roles, read lazily, and the exact bytes around them.

A checkpoint may hold several models. Tensor names of a second model begin with the model's name, as in
``ema.fc.weight``.

A checkpoint on disk is one or more files. A `FileLayout` describes each file: its *regions* hold tensor
bytes, and its *skeleton* is every other byte of the file (headers, pickles, scalars). Putting tensors back
into the regions of an unchanged skeleton restores the file in its own format. A lossless restore is
therefore byte-identical, and a lossy one differs only in tensor values.

This module imports neither numpy nor torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self, runtime_checkable

from inshrink_core.errors import InputError, NotFoundError, clipped
from inshrink_core.execution.prefetch import Prefetcher
from inshrink_core.text import percent, size

if TYPE_CHECKING:
    from torch import Tensor


DTYPE_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element of every supported dtype, by torch's name without the prefix. An element of
``float4_e2m1fn_x2`` holds two numbers."""

FLOATS = frozenset(dtype for dtype in DTYPE_SIZES if "float" in dtype) - {"float4_e2m1fn_x2"}
"""Dtypes whose elements are one real number each."""


class TensorRole(StrEnum):
    """Role of a tensor in a training.

    Examples
    --------
    >>> TensorRole("exp_avg") in OPTIMIZER_ROLES
    True
    """

    WEIGHT = "weight"
    BUFFER = "buffer"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MAX_EXP_AVG_SQ = "max_exp_avg_sq"
    MOMENTUM = "momentum"
    MASTER = "master"
    GRADIENT = "gradient"
    STEP = "step"
    STATE = "state"
    """Other optimizer state; always exact."""
    EXTRA = "extra"
    """Tensors saved beside models and optimizers; always exact."""


MODEL_ROLES = frozenset({TensorRole.WEIGHT, TensorRole.BUFFER})
"""Roles that `ratio_weights` counts and an evaluator receives."""

OPTIMIZER_ROLES = frozenset(set(TensorRole) - MODEL_ROLES - {TensorRole.GRADIENT, TensorRole.EXTRA})
"""Roles that the option ``--optimizer`` applies to."""

EXACT_ROLES = frozenset({TensorRole.STEP, TensorRole.STATE, TensorRole.EXTRA})
"""Roles that every codec stores bit for bit."""


class LayerType(StrEnum):
    """Type of the layer of a parameter; partitions and step sizes are chosen per layer type."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    LINEAR = "linear"
    VECTOR = "vector"


_EMBEDDING = re.compile(r"(^|[._])(\w*emb(ed(ding)?s?)?|wte|wpe|tok(ens?)?)([._]|$)", re.IGNORECASE)
_UNATTRIBUTED = re.compile(r"optimizer(\.\d+)?\.state\.\w+")
_ATTENTION = re.compile(
    r"(^|[._])(q|k|v|qkv)(_?proj)?([._]|$)|(^|[._])(self_)?\w*attn?(ention)?\w*([._]|$)", re.IGNORECASE
)


def classify_layer(name: str, shape: tuple[int, ...]) -> LayerType:
    """Return the layer type that a parameter's name and shape suggest.

    Parameters
    ----------
    name
        Dotted parameter name.
    shape
        Its shape; with at most one dimension, the type is `vector` for any name.

    Examples
    --------
    >>> classify_layer("transformer.wte.weight", (50257, 768)).value
    'embedding'
    >>> classify_layer("h.0.attn.c_proj.weight", (768, 768)).value
    'attention'
    >>> classify_layer("conv1.weight", (16, 1, 3, 3)).value
    'convolution'
    """
    if len(shape) <= 1:
        return LayerType.VECTOR
    if _EMBEDDING.search(name):
        return LayerType.EMBEDDING
    if len(shape) >= 3:
        return LayerType.CONVOLUTION
    if _ATTENTION.search(name):
        return LayerType.ATTENTION
    return LayerType.LINEAR


AVERAGE: Final = "average"
"""Name by which an evaluator requests the moving average, regardless of its name in the checkpoint."""

N_AVERAGED: Final = "n_averaged"
"""Buffer of ``torch.optim.swa_utils.AveragedModel``, which stores the model under ``module``."""

_BEGIN: Final = r"(?:^|[._-]|(?<=[a-z])(?=[A-Z]))"
_END: Final = r"(?![a-z])"
_AVERAGE: Final = re.compile(rf"{_BEGIN}(?i:emas?|swa|ewma|polyak|avg|averaged?|averaging|shadow){_END}")
_COPY: Final = re.compile(rf"{_BEGIN}(?i:teacher|target|momentum|lagged|slow|old){_END}")
"""Names of models that follow another one. Layers may have such names, too, so shapes must confirm it."""

Shapes = Mapping[str, tuple[int, ...]]


def is_average_name(name: str) -> bool:
    """Return whether the name of a model or of a key suggests a moving average.

    Examples
    --------
    >>> [is_average_name(name) for name in ("ema", "unet_ema", "netEMA", "state_dict_ema", "schema")]
    [True, True, True, True, False]
    """
    return _AVERAGE.search(name) is not None


def model_of(name: str, models: Iterable[str]) -> str:
    """Return the name of the model that a tensor belongs to; empty for the main model.

    Examples
    --------
    >>> model_of("ema.fc.weight", ["ema"]), model_of("fc.weight", ["ema"])
    ('ema', '')
    """
    return max((model for model in models if name.startswith(f"{model}.")), key=len, default="")


def twins(shapes: Shapes, models: Collection[str] = (), trained: Collection[str] = ()) -> dict[str, str]:
    """Return, for each tensor of a moving average, the tensor that it averages, by name.

    Parameters
    ----------
    shapes
        Shapes of weights and buffers by name.
    models
        Names of the models beside the main one.
    trained
        Models with an optimizer: these are averages only if their name suggests one.

    Notes
    -----
    A model is an average if its name suggests one and most of its tensors have a twin of the same name and
    shape, or if it has the names and shapes of the main model and no optimizer. A module of a model may also
    be an average: ``ema_model.module.fc.weight`` beside ``model.fc.weight``.

    Examples
    --------
    >>> twins({"fc.weight": (2, 3), "ema.fc.weight": (2, 3)}, ["ema"])
    {'ema.fc.weight': 'fc.weight'}
    """
    groups: dict[str, dict[str, str]] = {}
    for name in shapes:
        model = model_of(name, models)
        own = f"{model}." if is_average_name(model) else ""
        # The state of an average may include the trained model: ``ema.ema_model.`` and ``ema.online_model.``
        if prefix := own + _average_prefix(name.removeprefix(own)) or (model and f"{model}."):
            groups.setdefault(prefix, {})[name.removeprefix(prefix)] = name
    found: dict[str, str] = {}
    for prefix, members in groups.items():
        if N_AVERAGED in members:
            members = {tail.removeprefix("module."): name for tail, name in members.items()}
        called = is_average_name(prefix)
        if called:
            others = [n for n in shapes if not n.startswith(prefix) and _average_prefix(n) == ""]
            pairs = _paired(members, others, shapes)
            if 2 * sum(shapes[n] != () for n in pairs) > sum(shapes[n] != () for n in members.values()):
                found |= pairs
        elif prefix[:-1] not in trained or _COPY.search(prefix):
            bases = ["", *models] if _COPY.search(prefix) else [""]
            for base in bases:
                theirs = {n for n in shapes if model_of(n, models) == base and f"{base}." != prefix}
                stem = f"{base}." if base else ""
                pairs = {name: stem + tail for tail, name in members.items()}
                if theirs == set(pairs.values()) and all(shapes[n] == shapes[t] for n, t in pairs.items()):
                    found |= pairs
                    break
    return found


def _average_prefix(name: str) -> str:
    """Return a name up to its first module that is named like an average."""
    match = _AVERAGE.search(name)
    return name[: name.find(".", match.end()) + 1] if match else ""


def _paired(members: Mapping[str, str], others: Iterable[str], shapes: Shapes) -> dict[str, str]:
    """Return the twins of an average's tensors, from the module that contains most of them."""
    known = {name: name for name in others}
    if not any("." in tail for tail in members):
        # The average of latent diffusion has names without dots.
        known = {name.replace(".", ""): name for name in known} | known
    longest = max(members, key=lambda tail: (shapes[members[tail]] != (), len(tail)))
    bases = {"", *(name.removesuffix(longest) for name in known if name.endswith(longest))}

    def pairs(base: str) -> dict[str, str]:
        wanted = {name: known.get(base + tail) for tail, name in members.items()}
        return {name: twin for name, twin in wanted.items() if twin and shapes[twin] == shapes[name]}

    return max(map(pairs, sorted(bases, key=len)), key=len)


_MAX_UNSEEN = 3
_LARGE = 1 << 20
"""Least bytes of a file that is worth reporting: tokenizers and the pickles of headers are smaller."""


class Cell(NamedTuple):
    """Position of a cell: the shape of the full tensor, and the index of the cell's first element."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, role, dtype and shape of one tensor; no values.

    Parameters
    ----------
    name
        The parameter or buffer, as in the run with wrapper keys removed. A tensor of the optimizer has the
        name of its parameter (``optimizer.state.3`` if unknown); for the role `TensorRole.STATE`, a colon and
        the name of the state follow.
    role
        Role of the tensor in the training.
    dtype
        A key of `DTYPE_SIZES`.
    shape
        Extent of each dimension; ``()`` for a scalar.
    exact
        True if values must be restored bit for bit by every codec, because another tensor shares part of the
        storage.
    layer
        Layer type; by default the result of `classify_layer`. Readers set it where they know more, as for a
        head tied to an embedding.
    cell
        For a cell of a larger tensor (`inshrink_core.chain.parts.cell_spec`), its position. The name of a
        cell ends with its region, as in ``fc.weight[0:512,0:256]``.

    Attributes
    ----------
    key
        Unique within a checkpoint: the name, followed by ``@role`` except for weights and buffers.
    numel
        Number of elements.
    nbytes
        Raw size in bytes in the stored dtype.

    Examples
    --------
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.EXP_AVG, dtype="bfloat16", shape=(8, 4))
    >>> spec.key, spec.nbytes
    ('fc.weight@exp_avg', 64)
    """

    name: str
    role: TensorRole
    dtype: str
    shape: tuple[int, ...]
    exact: bool = False
    layer: LayerType | None = None
    cell: Cell | None = None
    key: str = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field, numel = object.__setattr__, math.prod(self.shape)  # the dataclass is frozen
        if self.layer is None:
            set_field(self, "layer", classify_layer(self.name, self.shape))
        set_field(self, "key", self.name if self.role in MODEL_ROLES else f"{self.name}@{self.role.value}")
        set_field(self, "numel", numel)
        set_field(self, "nbytes", numel * DTYPE_SIZES[self.dtype])

    @property
    def parameter(self) -> str:
        """Name of the parameter or buffer that the tensor is or belongs to; for a cell, of its tensor."""
        name = self.name if self.cell is None else self.name[: self.name.rindex("[")]
        return name.rpartition(":")[0] if self.role is TensorRole.STATE else name

    @property
    def full_spec(self) -> TensorSpec:
        """Spec of the full tensor of a cell; else this spec."""
        if self.cell is None:
            return self
        name = self.name[: self.name.rindex("[")]
        return replace(self, name=name, shape=self.cell.shape, cell=None)

    @property
    def is_unattributed(self) -> bool:
        """Whether the tensor is optimizer state of an unknown parameter."""
        return self.role in OPTIMIZER_ROLES and _UNATTRIBUTED.fullmatch(self.parameter) is not None

    def check(self, tensor: Tensor) -> None:
        """Refuse a tensor that differs from this spec: it would be decoded with another dtype or shape.

        Raises
        ------
        InputError
            Dtype or shape differ.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (self.dtype, self.shape):
            raise InputError(
                "a tensor differs from its spec",
                where=self.key,
                expected=f"{self.dtype} {self.shape}",
                found=f"{dtype} {tuple(tensor.shape)}",
            )


class Box(NamedTuple):
    """Part of a tensor: first index and extent in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that index the part."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


class Member(NamedTuple):
    """Position of one tensor inside a region: byte offset, and element strides (None: contiguous).

    For a sharded tensor, `box` is the part stored here; None is the whole tensor.
    """

    key: str
    start: int
    stride: tuple[int, ...] | None
    box: Box | None = None

    def shape_in(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the shape of the stored part."""
        return spec.shape if self.box is None else self.box.sizes

    def nbytes_in(self, spec: TensorSpec) -> int:
        """Return the size of the stored part in bytes, without the bytes that strides skip."""
        return math.prod(self.shape_in(spec)) * DTYPE_SIZES[spec.dtype]


class Region(NamedTuple):
    """Span of a file that holds tensor bytes, with its tensors.

    A region usually holds one contiguous tensor. Tensors with overlapping storages share a region.
    """

    offset: int
    nbytes: int
    members: tuple[Member, ...]


class ZipEntry(NamedTuple):
    """Zip entry whose CRC-32 covers a region: its data span, and the positions of the CRC in the file."""

    data_offset: int
    data_nbytes: int
    crc_offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """Layout of one file of a checkpoint.

    Parameters
    ----------
    path
        POSIX path relative to the checkpoint's root; a single-file checkpoint has one component.
    nbytes
        Size of the file.
    kind
        ``torch``, ``safetensors``, ``dcp`` or ``opaque`` (no regions: the file is stored unchanged).
    regions
        Ascending, disjoint spans of tensor bytes. The skeleton is every byte outside of them.
    zip_entries
        Entries whose CRC must be recomputed after the regions are filled; their CRC fields are zero in the
        skeleton.
    """

    path: str
    nbytes: int
    kind: str
    regions: tuple[Region, ...] = ()
    zip_entries: tuple[ZipEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class UnseenFile:
    """A file with bytes outside of tensors.

    Parameters
    ----------
    path
        Path of the file within its checkpoint.
    bytes
        Its bytes outside of tensors, at the largest step.
    """

    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Unseen:
    """Bytes of some files outside of tensors, which are stored unchanged.

    Parameters
    ----------
    bytes
        Number of these bytes, over the chosen steps.
    share
        Their share of all bytes of these files.
    files
        The files with most of them, at most three.
    """

    bytes: int = 0
    share: float = 0.0
    files: tuple[UnseenFile, ...] = ()

    @classmethod
    def of(cls, layouts: Iterable[FileLayout]) -> Self:
        """Return the counts for the files of checkpoints; a path that recurs is listed once."""
        nbytes, total, files = 0, 0, dict[str, int]()
        for layout in layouts:
            outside = layout.nbytes - sum(region.nbytes for region in layout.regions)
            nbytes, total = nbytes + outside, total + layout.nbytes
            files[layout.path] = max(outside, files.get(layout.path, 0))
        most = sorted(files.items(), key=lambda file: (-file[1], file[0]))[:_MAX_UNSEEN]
        share = nbytes / total if total else 0.0
        return cls(nbytes, share, tuple(UnseenFile(*item) for item in most if item[1]))

    @property
    def text(self) -> str:
        """One line, if the share is at least a hundredth and a file is large; else empty."""
        large = [f"{clipped(file.path)} ({size(file.bytes)})" for file in self.files if file.bytes >= _LARGE]
        if not large or self.share < 0.01:
            return ""
        share = f"{percent(self.share)} of the bytes ({size(self.bytes)})"
        return f"{share} are opaque and stored unchanged: {', '.join(large)}"


class TensorSource(Protocol):
    """Source of a checkpoint's bytes: files of a run, or frames of an archive."""

    def read(self, spec: TensorSpec) -> Tensor:
        """Return the tensor, contiguous on the CPU in the stored dtype; the caller may keep it."""
        ...

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of the file outside its regions, in order, CRC fields zeroed.

        Bytes inside of a region that belong to no member (holes of a strided view) follow.
        """
        ...


@runtime_checkable
class DistantSource(TensorSource, Protocol):
    """A source with slow access, such as a network storage."""

    def prefetch(self, specs: Iterable[TensorSpec]) -> AbstractContextManager[None]:
        """Prefetch tensors while the context is open, roughly in this order."""
        ...


@dataclass(frozen=True)
class OverlaidSource:
    """`TensorSource` that makes some tensors by functions, by key; the rest is that of another source."""

    source: TensorSource
    made: Mapping[str, Callable[[TensorSpec], Tensor]]

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor that is made, or that of the other source."""
        return self.made.get(spec.key, self.source.read)(spec)

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside its regions from the other source."""
        return self.source.skeleton(layout)


@dataclass(frozen=True)
class TensorsInMemory:
    """`TensorSource` of tensors in memory by key, for a checkpoint without files."""

    tensors: Mapping[str, Tensor] = field(repr=False)

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a copy of a tensor."""
        return self.tensors[spec.key].clone()

    def skeleton(self, layout: FileLayout) -> bytes:
        """Raise NotFoundError, as the source has no files."""
        raise NotFoundError(f"no file '{layout.path}' beside tensors in memory")


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint(Mapping[str, "Tensor"]):
    """One saved state of a training: a lazy mapping from tensor key to tensor.

    Parameters
    ----------
    step
        The training step.
    specs
        Every distinct tensor, in file order; tensors that share one storage are listed once.
    source
        Source of the values, which are read on demand.
    files
        Layouts of the files, in path order.
    aliases
        Other keys of tied weights, mapped to the key in `specs`.
    hyperparameters
        Per parameter name, the numbers of its optimizer group: ``lr``, ``beta1``, ``beta2``, ``eps``,
        ``weight_decay``, ``momentum``, ``dampening``, if the file has them.
    origin
        Path of the checkpoint, for messages.
    branch
        Name of a checkpoint that is no step of the run, such as ``best``; else empty.
    folder
        Name of the checkpoint's directory; empty for a file, and if unknown.
    models
        Names of the models beside the main one (``ema``, ``D``); names of their tensors begin with these.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> checkpoint = run[run.steps[-1]]
    >>> checkpoint["conv1.weight"].shape
    torch.Size([16, 1, 3, 3])
    """

    step: int
    specs: tuple[TensorSpec, ...]
    source: TensorSource = field(repr=False)
    files: tuple[FileLayout, ...] = field(default=(), repr=False)
    aliases: Mapping[str, str] = field(default_factory=dict, repr=False)
    hyperparameters: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)
    origin: str = ""
    branch: str = ""
    folder: str = ""
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {spec.key: spec for spec in self.specs})

    def spec(self, key: str) -> TensorSpec:
        """Return the spec under a key or alias.

        Raises
        ------
        NotFoundError
            No tensor has that key.
        """
        by_key: dict[str, TensorSpec] = self._by_key  # type: ignore[attr-defined]
        try:
            return by_key[self.aliases.get(key, key)]
        except KeyError:
            raise NotFoundError(
                f"no tensor '{key}' at step {self.step}",
                where=self.origin,
                remedy="`inshrink inspect` lists the tensors",
            ) from None

    def __getitem__(self, key: str) -> Tensor:
        return self.source.read(self.spec(key))

    def __contains__(self, key: object) -> bool:
        return key in self._by_key or key in self.aliases  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.specs)

    def auxiliary_spec(self, spec: TensorSpec, *roles: TensorRole) -> TensorSpec | None:
        """Return the auxiliary tensor of a parameter with one number per element, such as its gradient.

        Parameters
        ----------
        spec
            The parameter.
        roles
            Roles to search, in order. The first tensor of floats in the parameter's shape is returned.
        """
        for role in roles:
            key = f"{spec.name}@{role.value}"
            if key in self and self.spec(key).shape == spec.shape and self.spec(key).dtype in FLOATS:
                return self.spec(key)
        return None

    @contextmanager
    def prefetch(self, specs: Collection[TensorSpec], n_threads: int = 1) -> Iterator[Checkpoint]:
        """Yield the same checkpoint, with tensors read ahead while the context is open.

        Parameters
        ----------
        specs
            The tensors, roughly in the order of their use; another order is slower.
        n_threads
            Number of tensors to read at a time; 1 reads each tensor when it is used.

        Notes
        -----
        Tensors read ahead and not used yet take at most ``n_threads + 1`` times the bytes of the largest
        tensor.
        """
        distant = self.source if isinstance(self.source, DistantSource) else None
        with nullcontext() if distant is None else distant.prefetch(specs):
            if n_threads <= 1:
                yield self
                return
            by_key = {spec.key: spec for spec in specs}
            sizes = {key: spec.nbytes for key, spec in by_key.items()}
            most = (n_threads + 1) * max(sizes.values(), default=0)
            ahead = Prefetcher(lambda key: self.source.read(by_key[key]), sizes.items(), most, n_threads)
            made = dict.fromkeys(by_key, lambda spec: ahead.get(spec.key))
            try:
                yield replace(self, source=OverlaidSource(self.source, made))
            finally:
                ahead.stop(wait=True)

    @cached_property
    def twins(self) -> Mapping[str, str]:
        """For each tensor of a moving average, the tensor that it averages, by name."""
        shapes = {name: self.spec(key).shape for name, key in self._model_keys.items()}
        stated = {spec.parameter for spec in self.specs if spec.role in OPTIMIZER_ROLES}
        trained = {model_of(name, self.models) for name in stated}
        main = [s for s in self.specs if s.role is TensorRole.WEIGHT and not model_of(s.name, self.models)]
        return twins(shapes, self.models, self.models if len(stated) > len(main) else trained)

    @property
    def n_parameters(self) -> int:
        """Number of elements of the weights; tied weights count once, and moving averages do not count."""
        weights = (spec for spec in self.specs if spec.role is TensorRole.WEIGHT)
        return sum(spec.numel for spec in weights if spec.name not in self.twins)

    @property
    def _model_keys(self) -> dict[str, str]:
        """Keys of weights and buffers by name, including tied names."""
        keys = {spec.name: spec.key for spec in self.specs if spec.role in MODEL_ROLES}
        return keys | {name: key for name, key in self.aliases.items() if self.spec(key).role in MODEL_ROLES}

    def state_dict(self, which: str | None = "") -> dict[str, Tensor]:
        """Return weights and buffers of a model by name, with tied names, for ``load_state_dict``.

        Parameters
        ----------
        which
            ``""`` for the main model; ``"average"`` for its moving average; the name of another model, or of
            a module. None for the tensors of all models under their full names; so does ``""`` without a
            main model.

        Raises
        ------
        NotFoundError
            The checkpoint has no such model.

        Notes
        -----
        Tensors that an average lacks, such as buffers, are taken from the averaged model.
        """
        keys = self.model_keys(which)
        keys_of_model = set(keys.values())
        specs = [spec for spec in self.specs if spec.key in keys_of_model]
        with self.prefetch(specs):
            tensors = {spec.key: self.source.read(spec) for spec in specs}
        return {name: tensors[key] for name, key in keys.items()}

    def model_keys(self, which: str | None = "") -> dict[str, str]:
        """Return the keys of the tensors of `state_dict`, by their names there."""
        keys = self._model_keys
        model = {name: model_of(name, self.models) for name in keys}
        if which is None or (not which and "" not in model.values()):
            return keys
        averaged: dict[str, str] = {}
        for name, twin in self.twins.items():
            if which == AVERAGE or (which in self.models and model[name] == which):
                averaged.setdefault(twin, name)
        if averaged:
            base = min(model[twin] for twin in averaged)
            prefix = f"{base}." if base else ""
            return {
                name.removeprefix(prefix): keys[averaged.get(name, name)]
                for name in keys
                if model[name] == base
            }
        chosen = {name: key for name, key in keys.items() if not which and not model[name]}
        if which:
            prefix = f"{which}."
            chosen = {n.removeprefix(prefix): key for n, key in keys.items() if n.startswith(prefix)}
        if not chosen:
            others = ", ".join(map(clipped, self.models))
            raise NotFoundError(
                f"no model '{clipped(which)}' at step {self.step}",
                where=self.origin,
                remedy=f"the checkpoint has the models {others}" if others else "it has one model alone",
            )
        return chosen

    def raw_bytes(self, roles: frozenset[TensorRole] = frozenset(TensorRole)) -> int:
        """Return the raw bytes of the tensors of some roles; tied tensors count once."""
        return sum(spec.nbytes for spec in self.specs if spec.role in roles)
