"""Defaults for a chain: codec, settings and device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inshrink_core.archive import is_archive
from inshrink_core.chain import Archive, ChainConfig
from inshrink_core.chain.config import Override, is_exact, optimizer_of, parse_overrides
from inshrink_core.codec import (
    DEFAULT_CODEC,
    AnyCodec,
    make_codec,
    require_weight_codec,
)
from inshrink_core.errors import InputError, MissingFrameError
from inshrink_core.execution.device import resolve_device
from inshrink_core.execution.threads import default_threads

if TYPE_CHECKING:
    import os


def make_configs(
    codec: str, settings: Mapping[str, Any] | AnyCodec | None
) -> tuple[AnyCodec, tuple[Override, ...]]:
    """Return a codec's config, and the overrides under ``overrides`` in the settings.

    Raises
    ------
    ConfigError
        A setting is unknown, or a value is out of range.
    """
    entries: Any = ()
    if isinstance(settings, Mapping):
        entries = settings.get("overrides", ())
        settings = {name: value for name, value in settings.items() if name != "overrides"}
    made = make_codec(codec, settings)
    return made, parse_overrides(entries, made)


def make_chain_config(
    archive: str | os.PathLike[str],
    codec: str | None,
    config: Mapping[str, Any] | AnyCodec | None,
    optimizer: str | None,
    keyframe_every: int,
    device: str,
    threads: int | None,
) -> ChainConfig:
    """Return a configuration with defaults from the archive's newest frame, or the general ones.

    Settings may include ``overrides``, a list of tables (`Override`). If given, they
    replace the archive's.
    """
    if keyframe_every < 1:
        raise InputError("--keyframe-every must be at least 1", found=str(keyframe_every), expected="≥ 1")
    meta: Mapping[str, Any] = {}
    if is_archive(archive):
        meta = _newest_meta(archive)
        used = str(meta.get("codec", codec or DEFAULT_CODEC))
        if codec is not None and codec != used:
            raise InputError(
                f"the archive was written with the codec '{used}'",
                where=str(archive),
                expected=used,
                found=codec,
                remedy=f"use --codec {used}, or write to another archive",
            )
        codec = used
        # A frame from another writer that does not record its optimizer storage has stored everything.
        optimizer = optimizer or (optimizer_of(meta) if meta else None)
    codec = codec or DEFAULT_CODEC
    require_weight_codec(codec)
    if config is None or isinstance(config, Mapping):
        recorded = {"overrides": meta.get("overrides", [])} if meta else {}
        config = {**meta.get("config", {}), **recorded, **(config or {})}
    made, overrides = make_configs(codec, config)
    return ChainConfig(
        config=made,
        overrides=overrides,
        optimizer=optimizer or "",
        keyframe_every=keyframe_every,
        device=resolve_device(device),
        threads=threads or default_threads(),
    )


def _newest_meta(archive: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the newest frame's meta; empty for an archive without frames.

    Steps that were stored exactly to keep a quality bound are skipped, unless all steps are exact.
    """
    opened = Archive.open(archive)
    newest: dict[str, Any] = {}
    for info in reversed(opened.frames):
        try:
            meta = opened.frame(info).meta
        except MissingFrameError:  # appending reports it if the frame is needed
            continue
        if "codec" not in meta or not is_exact(str(meta["codec"]), meta.get("config", {})):
            return meta
        newest = newest or meta
    return newest
