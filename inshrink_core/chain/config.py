"""Configuration of a chain: its codecs, and the tensors that each of them encodes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, LayerType, TensorRole, TensorSpec
from inshrink_core.codec import FALLBACK_CODEC, AnyCodec, EncoderState, get_codec, make_codec
from inshrink_core.errors import ConfigError, InputError

_MOMENTS_CODEC = "moments"
"""Default codec of optimizer state."""

_MOMENTS: Mapping[str, str] = {"compressed": "fidelity", "compact": "ratio"}
"""Preset of the moments codec for each choice of optimizer storage."""

OPTIMIZER_CHOICES = ("exact", *_MOMENTS, "drop")

_DEFAULT_OPTIMIZER = "compressed"
"""Default for lossy weights; all other code uses `default_optimizer`."""


def is_exact(codec: str, settings: Mapping[str, Any]) -> bool:
    """Whether frames of a codec with these settings store their weights bit for bit."""
    return get_codec(codec).is_exact(settings)


def default_optimizer(codec: str, settings: Mapping[str, Any]) -> str:
    """Return the default storage of optimizer state: exact with exact weights, else compressed.

    Examples
    --------
    >>> default_optimizer("lattice", {}), default_optimizer("lossless", {})
    ('compressed', 'exact')
    """
    return "exact" if is_exact(codec, settings) else _DEFAULT_OPTIMIZER


def optimizer_of(meta: Mapping[str, Any]) -> str:
    """Return how a frame stores optimizer state; exactly if the frame does not record it.

    Examples
    --------
    >>> optimizer_of({"optimizer": "compact"}), optimizer_of({})
    ('compact', 'exact')
    """
    return str(meta.get("optimizer", "exact"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """Configuration of a chain.

    Parameters
    ----------
    config
        The codec of weights and buffers, with its settings.
    overrides
        Settings for some of the codec's tensors; later overrides take precedence.
    optimizer
        Storage of optimizer state that the codec does not encode. ``exact``: bit for bit. ``compressed``:
        second moments to an octave, and the direction of first moments. ``compact``: second moments as
        rank-one factors only (`inshrink_core.codecs.moments.codec`). Both store master weights as the lattice
        codec stores weights. ``drop``: omitted, so that a resumed training must warm up its optimizer. By
        default `default_optimizer`. Tensors that the moments codec does not cover are stored exactly.
    keyframe_every
        Frames from one keyframe to the next; restoring a step decodes at most this many frames.
    device
        Device of the codec, as a torch device name.
    threads
        Number of tensors to encode in parallel; does not change the bytes.

    Raises
    ------
    InputError
        `optimizer` is none of `OPTIMIZER_CHOICES`.
    """

    config: AnyCodec
    overrides: tuple[Override, ...] = ()
    optimizer: str = ""
    keyframe_every: int = 32
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.optimizer:
            chosen = default_optimizer(self.codec, self.config.settings())
            object.__setattr__(self, "optimizer", chosen)  # frozen, but not yet visible to callers
        if self.optimizer not in OPTIMIZER_CHOICES:
            raise InputError(
                f"optimizer state cannot be stored as '{self.optimizer}'",
                remedy=f"choose one of {', '.join(OPTIMIZER_CHOICES)}",
            )

    @property
    def codec(self) -> str:
        """Name of the codec of weights and buffers."""
        return self.config.name

    def record(self) -> dict[str, Any]:
        """Return the record of the configuration for a frame's meta."""
        record = {"codec": self.codec, "config": self.config.settings(), "optimizer": self.optimizer}
        return record | self._overridden()

    def settings(self) -> dict[str, Any]:
        """Return settings and overrides in the form of a request, from which the chain can be recreated."""
        return self.config.settings() | self._overridden()

    def _overridden(self) -> dict[str, Any]:
        overrides = [override.to_json() for override in self.overrides]
        return {"overrides": overrides} if overrides else {}

    def made_exact(self, config: AnyCodec) -> ChainConfig:
        """Return the configuration for a step whose weights must be exact.

        The default storage of optimizer state becomes exact too; a choice of the user remains.
        """
        asked = "" if self.optimizer == _DEFAULT_OPTIMIZER else self.optimizer
        return dataclasses.replace(self, config=config, optimizer=asked)

    def config_of(self, spec: TensorSpec) -> AnyCodec:
        """Return the codec of one tensor with its overrides, for tensors of the chain's own codec."""
        return overridden(self.config, self.overrides, spec)

    def codec_of(self, spec: TensorSpec) -> AnyCodec:
        """Return the codec of any tensor, with its overrides."""
        codec = self.codecs_by_role()[spec.role]
        return self.config_of(spec) if codec is self.config else codec

    def members(self, specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the tensors of the chain's own codec, which its plan covers."""
        by_role = self.codecs_by_role()
        return tuple(spec for spec in specs if by_role[spec.role] is self.config)

    def require_matches(self, checkpoint: Checkpoint) -> None:
        """Refuse an override that matches no tensor, since it is misspelt or meant for another model.

        Raises
        ------
        ConfigError
            An override matches no tensor.
        """
        members = self.members(checkpoint.specs)
        for override in self.overrides:
            if not any(map(override.matches, members)):
                raise ConfigError(
                    f"no tensor matches the override '{override.match}'",
                    found=", ".join(f"{name}={value!r}" for name, value in override.to_json().items()),
                    remedy="`inshrink inspect RUN --tensors` lists names and layer types",
                )

    def first_moment(self, checkpoint: Checkpoint, spec: TensorSpec) -> TensorSpec | None:
        """Return the first moment that guides a tensor's rounding; None if the codec uses none."""
        codec = self.config_of(spec)
        if not isinstance(codec, EncoderState) or not codec.uses_past:
            return None
        return checkpoint.auxiliary_spec(spec, TensorRole.EXP_AVG, TensorRole.MOMENTUM)

    def first_moments(self, checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the distinct results of `first_moment` for some tensors."""
        found = (self.first_moment(checkpoint, spec) for spec in specs)
        return tuple({spec.key: spec for spec in found if spec is not None}.values())

    def codecs_by_role(self) -> dict[TensorRole, AnyCodec]:
        """Return the codec of each role: the chain's own, that of optimizer state, or lossless."""
        found: dict[TensorRole, AnyCodec] = dict.fromkeys(TensorRole, get_codec(FALLBACK_CODEC)())
        taken = self.config.takes()
        if self.optimizer in _MOMENTS:
            moments = make_codec(_MOMENTS_CODEC, {"preset": _MOMENTS[self.optimizer]})
            found |= dict.fromkeys(moments.takes(), moments)
            taken |= {TensorRole.MASTER} if self.config.covers_masters else frozenset()
        return found | dict.fromkeys(taken, self.config)


_SELECTORS = ("match", "layer_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """Codec settings for the tensors that match a pattern.

    Parameters
    ----------
    match
        Pattern of parameter names: ``*`` and ``?`` as in file names, ``[ab]`` for one of several letters.
    layer_type
        A `LayerType` that the tensors must have too; None: any.
    settings
        Settings of the codec.

    Examples
    --------
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> spec = TensorSpec(name="wte.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 8))
    >>> Override(layer_type="embedding", settings={"coarseness": 1.0}).matches(spec)
    True
    """

    match: str = "*"
    layer_type: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Override:
        """Return the override of an entry of a config file; the inverse of `to_json`."""
        settings = {name: value for name, value in entry.items() if name not in _SELECTORS}
        return cls(**{name: entry[name] for name in _SELECTORS if name in entry}, settings=settings)

    def matches(self, spec: TensorSpec) -> bool:
        """Whether the override applies to a tensor."""
        if self.layer_type is not None and spec.layer != self.layer_type:
            return False
        return fnmatchcase(spec.full_spec.name, self.match)

    def to_json(self) -> dict[str, Any]:
        """Return the override as an entry of a config file."""
        selectors: dict[str, Any] = {"match": self.match}
        if self.layer_type is not None:
            selectors["layer_type"] = self.layer_type
        return selectors | dict(self.settings)


def overridden(config: AnyCodec, overrides: Sequence[Override], spec: TensorSpec) -> AnyCodec:
    """Return a config with the settings of all matching overrides, applied in order.

    Raises
    ------
    ConfigError
        The codec does not have a setting, or a value is out of range.
    """
    settings: dict[str, Any] = {}
    for override in overrides:
        if override.matches(spec):
            settings |= override.settings
    return apply_settings(config, settings) if settings else config


def apply_settings(config: AnyCodec, settings: Mapping[str, Any]) -> AnyCodec:
    """Return a config with some of its fields replaced.

    Raises
    ------
    ConfigError
        The config does not have a field, or a value is out of range.
    """
    known = [field.name for field in dataclasses.fields(config)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"an override sets '{name}', which the codec does not have",
                remedy=f"it has: {', '.join(known)}; an override is chosen by {' and '.join(_SELECTORS)}",
            )
    try:
        return dataclasses.replace(config, **settings)
    except TypeError as error:
        raise ConfigError(f"a setting of an override has a wrong type ({error})") from error


def settings_of(meta: Mapping[str, Any], spec: TensorSpec) -> dict[str, Any]:
    """Return the settings of a tensor in a frame, from the record that `ChainConfig.record` made."""
    settings = dict(meta.get("config", {}))
    for override in map(Override.of, meta.get("overrides", ())):
        if override.matches(spec):
            settings |= override.settings
    return settings


_LARGE_ERROR: Final = 0.25
"""Relative error above which a tensor is reported."""

_PRUNES: Final = ("prune", "embedding_prune")
"""Settings that request large errors."""


class LargeError(NamedTuple):
    """A tensor with a large error at one step.

    Parameters
    ----------
    name
        Key of the tensor.
    step
        Training step.
    relative_error
        Norm of the error over the norm of the tensor.
    """

    name: str
    step: int
    relative_error: float


def large_errors(
    meta: Mapping[str, Any], spec: TensorSpec, step: int, relative_error: float | None
) -> tuple[LargeError, ...]:
    """Return the error of a model tensor if it is large and the user's settings do not request it.

    Parameters
    ----------
    meta
        Meta of the frame (`ChainConfig.record`).
    spec, step, relative_error
        The tensor and its error; None if the tensor is zero.
    """
    settings = settings_of(meta, spec)
    asked = settings != meta.get("config", {}) or any(settings.get(name) for name in _PRUNES)
    if asked or spec.role not in MODEL_ROLES or relative_error is None or relative_error <= _LARGE_ERROR:
        return ()
    return (LargeError(spec.key, step, relative_error),)


def parse_overrides(entries: Any, config: AnyCodec) -> tuple[Override, ...]:
    """Parse the overrides of a config document, and check each against the codec.

    Parameters
    ----------
    entries
        A list of tables with ``match``, ``layer_type``, and settings of the codec.
    config
        The config to override.

    Raises
    ------
    ConfigError
        The list is malformed, or a setting is unknown or out of range.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError("'override' is a list of tables", found=repr(entries))
    return tuple(_parse(entry, config) for entry in entries)


def _parse(entry: Any, config: AnyCodec) -> Override:
    if isinstance(entry, Override):
        entry = entry.to_json()
    if not isinstance(entry, Mapping):
        raise ConfigError("an override is a table", found=repr(entry))
    made = Override.of(entry)
    if not isinstance(made.match, str) or not made.match:
        raise ConfigError("'match' of an override is a pattern of parameter names", found=repr(made.match))
    if made.layer_type is not None and made.layer_type not in set(LayerType):
        raise ConfigError(
            "an override is for no known layer type",
            expected=" or ".join(LayerType),
            found=repr(made.layer_type),
        )
    if not made.settings:
        what = f"the override of '{made.match}' sets nothing"
        raise ConfigError(what, remedy="give it a setting of the codec")
    apply_settings(config, made.settings)
    return made


def literal_pattern(name: str) -> str:
    """Return an override pattern that matches exactly one name.

    Examples
    --------
    >>> literal_pattern("h.[0].w*")
    'h.[[]0].w[*]'
    """
    return re.sub(r"([*?[])", r"[\1]", name)


def assigned(chain: ChainConfig, specs: Sequence[TensorSpec], setting: str) -> dict[str, Any]:
    """Return the value of a codec's setting for each tensor by key, including overrides."""
    return {spec.key: getattr(chain.config_of(spec), setting) for spec in specs}


def assignments(
    specs: Sequence[TensorSpec], values: Mapping[str, Any], base: Any, settings: Sequence[str]
) -> tuple[dict[str, Any], ...]:
    """Return a small set of simple overrides that gives each tensor its value.

    Parameters
    ----------
    specs
        All tensors of the codec, so that no pattern matches a tensor by accident.
    values
        Value of each tensor, by key.
    base
        The value without an override.
    settings
        Settings of the codec to which the value is assigned.

    Returns
    -------
    tuple of dict
        Tables for `parse_overrides`. There is one for each layer type if the types
        determine the values; else one for each largest module with equal values. Each tensor matches at most
        one table.

    Notes
    -----
    O(n · depth of the modules). Tensors of several roles with the same name share their overrides; the first
    value is used.

    Examples
    --------
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> names = ("h.0.a", "h.0.b", "h.1.a", "head")
    >>> specs = [TensorSpec(name=n, role=TensorRole.WEIGHT, dtype="float32", shape=(2, 2)) for n in names]
    >>> assignments(specs, {"h.0.a": 1.0, "h.0.b": 1.0, "h.1.a": 2.0, "head": 2.0}, 2.0, ("coarseness",))
    ({'match': 'h.0.*', 'coarseness': 1.0},)
    """
    by_name: dict[str, Hashable] = {}
    by_type: dict[str | None, set[Hashable]] = {}
    for spec in specs:
        value = by_name.setdefault(spec.name, values[spec.key])
        by_type.setdefault(None if spec.layer is None else str(spec.layer), set()).add(value)
    untyped = by_type.pop(None, set())
    if all(len(found) == 1 for found in by_type.values()) and untyped <= {base}:
        only = {layer: next(iter(found)) for layer, found in by_type.items()}
        if len(set(only.values())) > 1:
            return tuple(
                {"layer_type": layer, **dict.fromkeys(settings, value)}
                for layer, value in sorted(only.items())
                if value != base
            )
    found = _of_modules([(tuple(name.split(".")), value) for name, value in by_name.items()], base)
    return tuple({"match": pattern, **dict.fromkeys(settings, value)} for pattern, value in found.items())


def _of_modules(tensors: Sequence[tuple[tuple[str, ...], Any]], base: Any) -> dict[str, Any]:
    """Return the values that differ from the base, by patterns of the largest uniform modules."""
    found: dict[str, Any] = {}
    inside: dict[tuple[str, ...], list[Any]] = {}
    for parts, value in tensors:
        for depth in range(len(parts)):
            inside.setdefault(parts[:depth], []).append(value)
    names = dict(tensors)
    # A tensor may have the name of a module with other tensors; the module's pattern does not match it.
    uniform = {at for at, values in inside.items() if len({*values, names.get(at, values[0])}) == 1}
    for parts, value in tensors:
        if value != base:
            module = next((parts[:depth] for depth in range(len(parts)) if parts[:depth] in uniform), parts)
            is_module = module != parts and len(inside[module]) > 1
            pattern = literal_pattern(".".join(module if is_module else parts))
            found[(f"{pattern}.*" if module else "*") if is_module else pattern] = value
    return found
