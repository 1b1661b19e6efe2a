"""Which tensors of a frame come back bit for bit, and which with an error: told by its index alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.attributes import spec_of
from inshrink_core.chain.config import is_exact
from inshrink_core.checkpoint import MODEL_ROLES, TensorRole, TensorSpec
from inshrink_core.codec import get_codec
from inshrink_core.errors import ConfigError
from inshrink_core.frame import FrameInfo

__all__ = ["Exactness", "exactness_of", "is_rekeyed"]


class Exactness(NamedTuple):
    """Roles whose every tensor is stored bit for bit, and roles of which some are stored with an error."""

    exact: tuple[str, ...]
    lossy: tuple[str, ...]

    def to_json(self) -> dict[str, list[str]]:
        """Return what reports say of it."""
        return {"exact_roles": list(self.exact), "lossy_roles": list(self.lossy)}


def exactness_of(
    archive: Archive, frames: Iterable[FrameInfo], keys: Callable[[str], bool] = lambda key: True
) -> Exactness:
    """Tell of the tensors of some frames; files, and whatever is no tensor, are always exact.

    Parameters
    ----------
    archive, frames
        The archive, and which of its frames.
    keys
        Which tensors count; by default all.

    Raises
    ------
    DamagedError, MissingFrameError
        An index cannot be read.
    """
    exact: dict[str, bool] = {}
    for info in frames:
        frame, where = archive.frame(info), archive.where(info)
        is_kept = _rule_of(frame.meta, info)
        for entry in frame.entries:
            if not entry.part and keys(entry.key):
                spec = spec_of(entry, where)
                role = spec.role.value
                exact[role] = exact.get(role, True) and is_kept(spec, entry.codec)
    return Exactness(
        tuple(role for role, kept in exact.items() if kept),
        tuple(role for role, kept in exact.items() if not kept),
    )


def _rule_of(meta: Mapping[str, Any], info: FrameInfo) -> Callable[[TensorSpec, str], bool]:
    """Return what tells, by spec and bitstream, whether a block of a frame holds the original's bits."""
    codec, settings = str(meta.get("codec", "lossless")), meta.get("config", {})
    try:
        own: Any = get_codec(codec)
        roles = own.takes(own.config_type(**settings))
    except (ConfigError, TypeError):
        # A codec or a setting that is not known here: then nothing tells which bits are the original's.
        return lambda spec, bitstream: False
    whole, rekeyed = is_exact(codec, settings), is_rekeyed(meta, info)
    lossless = get_codec("lossless").reads

    def is_kept(spec: TensorSpec, bitstream: str) -> bool:
        if bitstream not in lossless:
            return spec.role in MODEL_ROLES and whole
        if spec.exact or whole or not rekeyed:
            return True
        # A block made anew holds what was decoded before: exact where the codec has no rule for the role.
        return spec.role not in roles - {TensorRole.BUFFER}

    return is_kept


def is_rekeyed(meta: Mapping[str, Any], info: FrameInfo) -> bool:
    """Whether a frame was made from decoded values: its lossless blocks hold those, not the original's."""
    return meta.get("rekeyed") == info.frame_id or "source" in meta
