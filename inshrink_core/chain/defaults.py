"""Filling in what the user did not ask for: codec, config, device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inshrink_core.archive import is_archive
from inshrink_core.chain import (
    OPTIMIZER_CHOICES,
    Archive,
    ChainConfig,
    Override,
    is_exact,
    optimizer_of,
    parse_overrides,
)
from inshrink_core.codec import (
    DEFAULT_CODEC,
    FALLBACK_CODEC,
    AnyCodec,
    get_codec,
    make_codec,
    require_weight_codec,
)
from inshrink_core.errors import InputError, MissingFrameError
from inshrink_core.execution import default_threads, resolve_device

if TYPE_CHECKING:
    import os


def make_configs(
    codec: str, settings: Mapping[str, Any] | AnyCodec | None
) -> tuple[AnyCodec, tuple[Override, ...]]:
    """Return a codec's config and the overrides that stand in the settings as ``overrides``.

    Raises
    ------
    ConfigError
        An unknown setting, or a value out of range.
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
    """Fill in what was not asked for from the archive's newest frame, or the defaults.

    Settings may hold ``overrides``, a list of tables (`inshrink_core.chain.Override`); given anew, they
    replace the archive's.
    """
    if optimizer is not None and optimizer not in OPTIMIZER_CHOICES:
        raise InputError(f"--optimizer {optimizer}", remedy=f"choose one of {', '.join(OPTIMIZER_CHOICES)}")
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
        # A frame of an archive from elsewhere that does not say it has kept everything.
        optimizer = optimizer or (optimizer_of(meta) if meta else None)
    codec = codec or DEFAULT_CODEC
    require_weight_codec(codec)
    if config is None or isinstance(config, Mapping):
        kind = get_codec(codec)
        config = {**(_settings_of(meta) if meta else {}), **kind.having(config or {})}
    made, overrides = make_configs(codec, config)
    return ChainConfig(
        config=made,
        overrides=overrides,
        optimizer=optimizer or "",
        keyframe_every=keyframe_every,
        device=resolve_device(device),
        threads=threads or default_threads(),
    )


def chain_config_of(meta: Mapping[str, Any]) -> ChainConfig:
    """Return how a frame was made, from what it says of itself.

    Raises
    ------
    ConfigError
        It was made with a codec or a setting that is not known here.
    """
    config, overrides = make_configs(str(meta.get("codec", FALLBACK_CODEC)), _settings_of(meta))
    return ChainConfig(config=config, overrides=overrides, optimizer=optimizer_of(meta))


def _settings_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {**meta.get("config", {}), "overrides": meta.get("overrides", [])}


def _newest_meta(archive: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the newest frame says of how it was made; empty for an archive without frames.

    Steps stored exactly because nothing coarser kept a bound are passed over, unless all are exact.
    """
    opened = Archive.open(archive)
    newest: dict[str, Any] = {}
    for info in reversed(opened.frames):
        try:
            meta = opened.frame(info).meta
        except MissingFrameError:  # whether it is needed, whoever appends decides
            continue
        if "codec" not in meta or not is_exact(str(meta["codec"]), meta.get("config", {})):
            return meta
        newest = newest or meta
    return newest
