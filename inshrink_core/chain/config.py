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

__all__ = ["OPTIMIZER_CHOICES", "ChainConfig", "Party"]

_MOMENTS: Mapping[str, str] = {"lattice": "fidelity", "lattice-ratio": "ratio"}
"""Preset of the moments codec by how the user asked for optimizer state."""

OPTIMIZER_CHOICES = ("lossless", *_MOMENTS, "drop")

_MOMENT_ROLES = frozenset(
    {TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ, TensorRole.MAX_EXP_AVG_SQ, TensorRole.MOMENTUM}
)


_CODECS_OF_MASTERS = frozenset({"lattice"})
"""Codecs whose rule for weights holds for master weights too. To others these are unknown: stored exactly."""


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
        cannot be resumed without warming the optimizer up again.
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
    optimizer: str = "lossless"
    keyframe_every: int = 32
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_CHOICES:
            raise InputError(
                f"optimizer state cannot be stored as '{self.optimizer}'",
                remedy=f"choose one of {', '.join(OPTIMIZER_CHOICES)}",
            )

    def record(self) -> dict[str, Any]:
        """Return what the frame says of how it was made."""
        record = {
            "codec": self.codec,
            "config": dataclasses.asdict(self.config),  # type: ignore[call-overload]
            "optimizer": self.optimizer,
        }
        return record | ({"overrides": [one.to_json() for one in self.overrides]} if self.overrides else {})

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
