"""One tensor of one step, looked into: its values, its partition, its levels, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inshrink_core.chain import Archive
from inshrink_core.chain.override import overridden
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.codec import CodecConfig, get_codec
from inshrink_core.errors import InputError
from inshrink_core.formats import Run, open_run
from inshrink_core.frame import FrameKind
from inshrink_core.session.alone import Coded, encode_alone, step_before
from inshrink_core.session.anatomy_map import SensitivityMap, map_sensitivity
from inshrink_core.session.anatomy_values import ValueHistogram, value_histogram
from inshrink_core.session.config import DEFAULT_CODEC, make_configs
from inshrink_core.session.restore import open_any

if TYPE_CHECKING:
    import os

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Anatomy", "anatomy"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Anatomy:
    """One tensor of one step, and what a codec makes or made of it.

    Parameters
    ----------
    step, spec
        Which tensor.
    codec, config
        What it was encoded with, or would be.
    estimated
        True for a run: the tensor was encoded by itself, although a frame pools thresholds and steps over
        all its tensors. False for an archive: this is what stands in it.
    kind
        ``keyframe``, or ``delta`` against the step before.
    histogram
        Of the original values where they are known, else of the restored ones.
    restored
        True where the values are those an archive restores.
    level_kind
        ``codebook``, ``lattice``, ``grid``, ``rounded``, ``exact`` or ``other`` (`Levels.kind`).
    points : Float[ndarray, "c"]
        Levels that occur, ascending, where they are at most 256; else empty.
    spacing
        From one lattice point to the next; None where levels are not even.
    entropy
        Of the symbols, in bits a value (`entropy_of_symbols`); None where there are none.
    nbytes
        Bytes of the tensor's block.
    keyframe_nbytes
        Bytes of a block that stands alone; None for an archive's delta.
    sensitivity
        Sensitivity against magnitude; None where the checkpoint does not tell a sensitivity.
    """

    step: int
    spec: TensorSpec
    codec: str
    config: Mapping[str, Any]
    estimated: bool
    kind: str
    histogram: ValueHistogram
    restored: bool
    level_kind: str
    points: NDArray[np.float64]
    spacing: float | None
    entropy: float | None
    nbytes: int
    keyframe_nbytes: int | None
    sensitivity: SensitivityMap | None

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the block for each value; None for an empty tensor."""
        return 8 * self.nbytes / self.spec.numel if self.spec.numel else None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "step": self.step,
            "tensor": self.spec.key,
            "dtype": self.spec.dtype,
            "shape": list(self.spec.shape),
            "codec": self.codec,
            "config": dict(self.config),
            "estimated": self.estimated,
            "kind": self.kind,
            "restored": self.restored,
            "histogram": self.histogram.to_json(),
            "levels": {"kind": self.level_kind, "points": self.points.tolist(), "spacing": self.spacing},
            "entropy_bits": self.entropy,
            "nbytes": self.nbytes,
            "keyframe_nbytes": self.keyframe_nbytes,
            "bits_per_weight": self.bits_per_weight,
            "sensitivity": self.sensitivity.to_json() if self.sensitivity is not None else None,
        }


def anatomy(
    source: Run | Archive | str | os.PathLike[str],
    step: int,
    tensor: str,
    codec: str | None = None,
    config: Mapping[str, Any] | CodecConfig | None = None,
    *,
    against: Run | str | os.PathLike[str] | None = None,
    metric: str | None = None,
) -> Anatomy:
    """Look into one tensor of one step; reads it, its companions and its predecessors, and nothing else.

    Parameters
    ----------
    source
        A run, an archive, or the path of one.
    step, tensor
        The step, and the tensor's key.
    codec, config
        For a run: what it would be encoded with; by default the default codec. Not for an archive.
    against
        The original run of an archive: its values are shown instead of the restored ones.
    metric
        Sensitivity to set against the magnitude: ``taylor``, ``fisher`` or ``update``; by default the
        first of them that the checkpoint tells.

    Returns
    -------
    Anatomy
        Bounded in size, whatever the tensor.

    Raises
    ------
    NotFoundError
        No such step or tensor.
    InputError
        A codec for an archive, originals for a run, or no such metric.
    ConfigError
        The config is not one of the codec.

    Notes
    -----
    A run: two steps of the tensor are read and encoded. An archive: its chain is decoded from the last
    keyframe on. O(n); memory of a few copies of the tensor.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> seen = inshrink_core.anatomy(run, 400, "fc1.weight", "inshrinkerator", {"bins": 8, "prune": 0.25})
    >>> seen.level_kind, [part.name for part in seen.histogram.parts]
    ('codebook', ['pruned', 'quantized', 'protected'])
    """
    opened = source if isinstance(source, Run | Archive) else open_any(source)
    if isinstance(opened, Archive):
        if codec is not None or config is not None:
            raise InputError("an archive has its codec already", remedy="leave out codec and config")
        run = against if isinstance(against, Run) or against is None else open_run(against)
        return _of_archive(opened, run, step, tensor, metric)
    if against is not None:
        raise InputError("originals go with an archive, and this is a run", remedy="leave out 'against'")
    return _of_run(opened, step, tensor, codec or DEFAULT_CODEC, config, metric)


def _of_run(
    run: Run,
    step: int,
    key: str,
    name: str,
    settings: Mapping[str, Any] | CodecConfig | None,
    metric: str | None,
) -> Anatomy:
    """Encode the tensor by itself, against the step before where there is one."""
    checkpoint = run[step]
    spec = checkpoint.spec(key)
    base, overrides = make_configs(name, settings)
    codec, config = get_codec(name), overridden(base, overrides, spec)
    if spec.role not in codec.takes(config):
        name = "lossless"
        codec = get_codec(name)
        config = codec.config_type()
    before = step_before(run, step, spec)
    coded, values = encode_alone(codec, config, checkpoint, before, spec)
    return _put_together(
        checkpoint=checkpoint,
        before=before,
        spec=spec,
        values=values,
        coded=coded,
        metric=metric,
        codec=name,
        config=dataclasses.asdict(config),  # type: ignore[call-overload]
        estimated=True,
        kind=FrameKind.KEYFRAME if coded.reference is None else FrameKind.DELTA,
        restored=False,
    )


def _of_archive(archive: Archive, run: Run | None, step: int, key: str, metric: str | None) -> Anatomy:
    """Decode the tensor's chain, and say what stands in it."""
    info = archive.reader.find(step)
    view = archive.sequential()
    frame = archive.frame(info)
    checkpoint = view.checkpoint(info)
    spec = checkpoint.spec(key)
    chain = archive.reader.chain(info.frame_id)
    reference = None
    if len(chain) > 1 and spec.key in archive.checkpoint(chain[-2]):
        reference = view.decode(chain[-2], spec.key)[1]
    decoded, state = view.decode(info, spec.key)
    entry = frame.entry(spec.key)
    original = run[step] if run is not None and step in run and spec.key in run[step] else None
    told = checkpoint if original is None else original
    return _put_together(
        checkpoint=told,
        before=step_before(view if original is None or run is None else run, step, spec),
        spec=spec,
        values=decoded if original is None else original[spec.key],
        coded=Coded(state, reference, entry.codec, entry.nbytes, entry.nbytes if reference is None else None),
        metric=metric,
        codec=entry.codec.partition("/")[0],
        config=dict(frame.meta.get("config", {})),
        estimated=False,
        kind=info.kind,
        restored=original is None,
    )


def _put_together(
    *,
    checkpoint: Checkpoint,
    before: Checkpoint | None,
    spec: TensorSpec,
    values: Tensor,
    coded: Coded,
    metric: str | None,
    codec: str,
    config: Mapping[str, Any],
    estimated: bool,
    kind: FrameKind,
    restored: bool,
) -> Anatomy:
    """Count values by part, and set sensitivity against magnitude."""
    # Here, because it imports torch, which opening a run must not wait for.
    from inshrink_core.session.levels import entropy_of_symbols, levels_of

    levels = levels_of(coded.state, coded.bitstream)
    return Anatomy(
        step=checkpoint.step,
        spec=spec,
        codec=codec,
        config=config,
        estimated=estimated,
        kind=kind.value,
        histogram=value_histogram(values, levels.parts),
        restored=restored,
        level_kind=levels.kind,
        points=levels.points,
        spacing=levels.spacing,
        entropy=entropy_of_symbols(coded.state, coded.reference),
        nbytes=coded.nbytes,
        keyframe_nbytes=coded.keyframe_nbytes,
        sensitivity=map_sensitivity(checkpoint, before, spec, values, metric),
    )
