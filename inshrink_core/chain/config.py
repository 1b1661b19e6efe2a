"""How a run is written: the codecs of a chain, and which tensors go to which."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inshrink_core.chain.override import Override, overridden
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import Codec, CodecConfig, get_codec
from inshrink_core.errors import InputError

__all__ = ["OPTIMIZER_CHOICES", "ChainConfig", "Party", "default_optimizer", "is_exact"]

_MOMENTS: Mapping[str, str] = {"lattice": "fidelity", "lattice-ratio": "ratio"}
"""Preset of the moments codec by how the user asked for optimizer state."""

OPTIMIZER_CHOICES = ("lossless", *_MOMENTS, "drop")

_DEFAULT_OPTIMIZER = "lattice"
"""Where weights are stored with an error: the one place that says it, behind `default_optimizer`."""

_MOMENT_ROLES = frozenset(
    {TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ, TensorRole.MAX_EXP_AVG_SQ, TensorRole.MOMENTUM}
)


_CODECS_OF_MASTERS = frozenset({"lattice"})
"""Codecs whose rule for weights holds for master weights too. To others these are unknown: stored exactly."""


def is_exact(codec: str, settings: Mapping[str, Any]) -> bool:
    """Whether frames of a codec with these settings keep their weights bit for bit."""
    return not get_codec(codec).lossy or bool(settings.get("exact"))


def default_optimizer(codec: str, settings: Mapping[str, Any]) -> str:
    """Return how optimizer state is stored where nobody said: exactly beside exact weights, else compressed.

    Examples
    --------
    >>> default_optimizer("lattice", {}), default_optimizer("lossless", {})
    ('lattice', 'lossless')
    """
    return "lossless" if is_exact(codec, settings) else _DEFAULT_OPTIMIZER


class Party(NamedTuple):
    """A codec, its config, and the roles whose tensors it encodes."""

    codec: Codec
    config: CodecConfig
    roles: frozenset[TensorRole]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """How a run is written.

    Parameters
    ----------
    codec
        Name of the codec of weights and buffers.
    config
        Its config.
    overrides
        Settings for some of the tensors it encodes; later ones win.
    optimizer
        How optimizer state is stored that the codec leaves to others. ``lossless`` keeps it bit-exact;
        ``lattice`` keeps second moments to an octave and the direction of first moments,
        ``lattice-ratio`` second moments as rank-one factors only (`inshrink_core.codecs.moments`); both
        store master weights as the lattice codec stores weights. ``drop`` leaves it out, so that training
        cannot be resumed without warming the optimizer up again. By default `default_optimizer`; whatever
        the moments codec has no rule for is stored exactly, tensor by tensor.
    keyframe_every
        Frames from one keyframe to the next; restoring a step decodes at most that many frames.
    device
        Device the codec works on, as torch names it.
    threads
        Tensors encoded at a time; does not change the bytes.

    Raises
    ------
    InputError
        `optimizer` is none of `OPTIMIZER_CHOICES`.
    """

    codec: str
    config: CodecConfig
    overrides: tuple[Override, ...] = ()
    optimizer: str = ""
    keyframe_every: int = 32
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.optimizer:
            chosen = default_optimizer(self.codec, self._settings())
            object.__setattr__(self, "optimizer", chosen)  # frozen, and never seen without it
        if self.optimizer not in OPTIMIZER_CHOICES:
            raise InputError(
                f"optimizer state cannot be stored as '{self.optimizer}'",
                remedy=f"choose one of {', '.join(OPTIMIZER_CHOICES)}",
            )

    def record(self) -> dict[str, Any]:
        """Return what the frame says of how it was made."""
        record = {
            "codec": self.codec,
            "config": self._settings(),
            "optimizer": self.optimizer,
        }
        return record | ({"overrides": [one.to_json() for one in self.overrides]} if self.overrides else {})

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = dataclasses.asdict(self.config)  # type: ignore[call-overload]
        return settings

    def made_exact(self, codec: str, config: CodecConfig) -> ChainConfig:
        """Return how a step is written whose weights have to stay exact: everything with them.

        Optimizer state that was asked to be stored otherwise than by default stays as asked.
        """
        asked = "" if self.optimizer == _DEFAULT_OPTIMIZER else self.optimizer
        return dataclasses.replace(self, codec=codec, config=config, optimizer=asked)

    def config_of(self, spec: TensorSpec) -> CodecConfig:
        """Return the config of one tensor that the chain's own codec takes."""
        return overridden(self.config, self.overrides, spec)

    def parties(self) -> tuple[Party, ...]:
        """Return the codecs in order of precedence: the chain's own first, lossless last."""
        own, lossless = get_codec(self.codec), get_codec("lossless")
        roles = own.takes(self.config)
        if self.optimizer in _MOMENTS and self.codec in _CODECS_OF_MASTERS:
            roles |= {TensorRole.MASTER}
        parties = [Party(own, self.config, roles)]
        if self.optimizer in _MOMENTS:
            moments = get_codec("moments")
            preset: Any = {"preset": _MOMENTS[self.optimizer]}
            parties.append(Party(moments, moments.config_type(**preset), _MOMENT_ROLES))
        return (*parties, Party(lossless, lossless.config_type(), frozenset(TensorRole)))
