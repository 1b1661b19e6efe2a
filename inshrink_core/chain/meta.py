"""What a frame says of itself beside its blocks: checked once, where the frame is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from inshrink_core.archive.layout import RESTORE_REMEDY
from inshrink_core.errors import DamagedError

__all__ = ["check_meta"]


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == 16


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_maps(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_source(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_id(item) for item in value)


_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "codec": _is_text,
    "config": _is_map,
    "overrides": _is_maps,
    "optimizer": _is_text,
    "content": _is_id,
    "restored": _is_id,
    "rekeyed": _is_id,
    "source": _is_source,
}
"""The keys that are read (docs/format.md); others may hold anything."""


def check_meta(meta: Mapping[str, Any], where: str) -> None:
    """Refuse a frame whose meta holds what its keys cannot mean.

    Raises
    ------
    DamagedError
        A value is of another type than the format says.
    """
    for key, is_sound in _KINDS.items():
        if key in meta and not is_sound(meta[key]):
            raise DamagedError(
                f"the frame's meta '{key}' is malformed",
                where=where,
                found=repr(meta[key])[:80],
                remedy=RESTORE_REMEDY,
            )
