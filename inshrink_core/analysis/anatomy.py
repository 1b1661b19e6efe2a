"""Anatomy of one tensor at one step: its values, partition, levels, and size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.analysis.movement import movement
from inshrink_core.analysis.profile import StepScores
from inshrink_core.chain import Archive, ChainConfig, ChainState, FramePlan
from inshrink_core.chain.archive import open_any
from inshrink_core.chain.config import overridden
from inshrink_core.chain.defaults import make_configs
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.codec import (
    DEFAULT_CODEC,
    FALLBACK_CODEC,
    PARTS,
    AnyCodec,
    Levels,
    TensorReference,
    get_codec,
)
from inshrink_core.errors import InputError
from inshrink_core.formats import Run, open_run
from inshrink_core.frame import FrameKind
from inshrink_core.sensitivity import SensitivityMetric
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor

_METRICS = ("taylor", "fisher", "update")
"""Sensitivities other than the magnitude, in the order of preference."""

MAX_LEVELS = 256
"""Maximum number of distinct decoded values of a codebook: the symbols of a byte."""

N_ROWS = 128
"""Maximum number of groups of rows."""

N_BINS = 120
"""Bins of a histogram: about one for every six pixels of a chart."""

_CHUNK = 1 << 20
"""Values turned to float64 at a time, 8 MB."""


class _Coded(NamedTuple):
    """A tensor's state after a frame, and the bitstream and size of its block."""

    state: TensorReference
    bitstream: str
    nbytes: int


def _step_before(series: Run | Archive, step: int, spec: TensorSpec) -> Checkpoint | None:
    """Return the checkpoint before a step, if it has the same tensor."""
    earlier = max((other for other in series.steps if other < step), default=None)
    if earlier is None:
        return None
    checkpoint = series[earlier]
    if spec.key not in checkpoint:
        return None
    old = checkpoint.spec(spec.key)
    return checkpoint if (old.dtype, old.shape) == (spec.dtype, spec.shape) else None


def _encode_alone(
    chain: ChainConfig, checkpoint: Checkpoint, before: Checkpoint | None, spec: TensorSpec
) -> _Coded:
    """Encode a tensor alone and, where there is one, against its predecessor, which is encoded first."""
    state = ChainState()
    if before is not None:
        plan = FramePlan(chain, before, state, [spec])
        (first,) = plan.encode([spec])
        state = ChainState(references={spec.key: first.reference}, memory=plan.memory)
    (after,) = FramePlan(chain, checkpoint, state, [spec]).encode([spec])
    return _Coded(after.reference, after.block.codec, len(after.block.payload))


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
        all its tensors. False for an archive: this is what it holds.
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
    step_size
        From one lattice point to the next; None where levels are not even.
    nbytes
        Bytes of the tensor's block.
    metric
        Sensitivity of `rows`: ``taylor``, ``fisher`` or ``update``; None if there is none.
    relative_error
        Root of the squared rounding error over the squared norm of the values; None where the originals are
        not known, or are all zero and the decoded values are not.
    rows : Float[ndarray, "groups"] or None
        Mean sensitivity of neighbouring rows (`row_means`); None for vectors, and without a sensitivity.
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
    step_size: float | None
    nbytes: int
    metric: str | None
    relative_error: float | None = None
    rows: NDArray[np.float64] | None = None

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the block for each value; None for an empty tensor."""
        return 8 * self.nbytes / self.spec.numel if self.spec.numel else None


def anatomy(
    source: Run | Archive | str | os.PathLike[str],
    step: int,
    tensor: str,
    codec: str | None = None,
    config: Mapping[str, Any] | AnyCodec | None = None,
    *,
    against: Run | str | os.PathLike[str] | None = None,
    metric: str | None = None,
) -> Anatomy:
    """Look into one tensor of one step; reads only it, its auxiliary tensors and predecessors.

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
        Sensitivity to locate: ``taylor``, ``fisher`` or ``update``; by default the first of them that the
        checkpoint has.

    Returns
    -------
    Anatomy
        Its size does not depend on the tensor's.

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
    >>> settings = {"bins": 8, "prune": 0.25}
    >>> seen = inshrink_core.analysis.anatomy(run, 400, "fc1.weight", "inshrinkerator", settings)
    >>> seen.level_kind, [part.name for part in seen.histogram.parts]
    ('codebook', ['pruned', 'quantized', 'protected'])
    """
    opened = source if isinstance(source, Run | Archive) else open_any(source)
    if isinstance(opened, Archive):
        if codec is not None or config is not None:
            raise InputError("an archive already has its codec", remedy="leave out codec and config")
        run = against if isinstance(against, Run) or against is None else open_run(against)
        run = None if run is None else run.matched()
        return _of_archive(opened, run, step, tensor, metric)
    if against is not None:
        raise InputError("'against' needs an archive, but this is a run", remedy="leave out 'against'")
    return _of_run(opened.matched(), step, tensor, codec or DEFAULT_CODEC, config, metric)


def _of_run(
    run: Run,
    step: int,
    key: str,
    name: str,
    settings: Mapping[str, Any] | AnyCodec | None,
    metric: str | None,
) -> Anatomy:
    """Encode the tensor by itself, against the step before where there is one."""
    checkpoint = run[step]
    spec = checkpoint.spec(key)
    base, overrides = make_configs(name, settings)
    codec = overridden(base, overrides, spec)
    if spec.role not in codec.takes():
        codec = get_codec(FALLBACK_CODEC)()
    before = _step_before(run, step, spec)
    coded = _encode_alone(ChainConfig(config=codec), checkpoint, before, spec)
    return Anatomy(
        step=step,
        spec=spec,
        codec=codec.name,
        config=codec.settings(),
        estimated=True,
        kind=(FrameKind.KEYFRAME if before is None else FrameKind.DELTA).value,
        restored=False,
        **_seen(checkpoint, before, spec, checkpoint[spec.key], coded, metric, decoded=coded.state.decoded()),
    )


def _of_archive(archive: Archive, run: Run | None, step: int, key: str, metric: str | None) -> Anatomy:
    """Decode the tensor's chain."""
    info = archive.reader.find(step)
    view = archive.sequential()
    frame = archive.frame(info)
    checkpoint = view.checkpoint(info)
    spec = checkpoint.spec(key)
    decoded, state = view.decode(info, spec.key)
    blocks = archive.blocks(info, spec.key)
    coded = _Coded(state, blocks[0].codec, sum(entry.nbytes for entry in blocks))
    original = run[step] if run is not None and step in run and spec.key in run[step] else None
    origin = checkpoint if original is None else original
    before = _step_before(view if original is None or run is None else run, step, spec)
    values = decoded if original is None else original[spec.key]
    return Anatomy(
        step=origin.step,
        spec=spec,
        codec=coded.bitstream.partition("/")[0],
        config=dict(frame.meta.get("config", {})),
        estimated=False,
        kind=info.kind.value,
        restored=original is None,
        **_seen(origin, before, spec, values, coded, metric, decoded=None if original is None else decoded),
    )


def _seen(
    checkpoint: Checkpoint,
    before: Checkpoint | None,
    spec: TensorSpec,
    values: Tensor,
    coded: _Coded,
    metric: str | None,
    *,
    decoded: Tensor | None,
) -> dict[str, Any]:
    """Return the fields of `Anatomy` that do not depend on how the tensor was encoded."""
    levels = levels_of(coded.state, coded.bitstream)
    known = _known_scores(checkpoint, before, spec, values, metric)
    return {
        "histogram": value_histogram(values, levels.parts),
        "level_kind": levels.kind,
        "points": levels.points if levels.points is not None else np.empty(0),
        "step_size": levels.step_size,
        "nbytes": coded.nbytes,
        "metric": None if known is None else known[0],
        "relative_error": None if decoded is None else movement(values, decoded).relative,
        "rows": None if known is None else row_means(known[1]),
    }


def levels_of(state: TensorReference, bitstream: str) -> Levels:
    """Return the levels of a decoded state; `Levels.points` is empty beyond `MAX_LEVELS`.

    Parameters
    ----------
    state
        State after a frame.
    bitstream
        Bitstream of the tensor's block in it; some lossy codecs use the state of the exact codec.

    Notes
    -----
    O(n) for states that store their levels; for other states the values are sorted.
    """
    # Here, because it imports torch, which opening a run must not wait for.
    import torch

    from inshrink_core.codecs.exact import BITSTREAM, LosslessReference

    levels = state.levels()
    if levels.kind != "other" and not (isinstance(state, LosslessReference) and bitstream != BITSTREAM):
        few = levels.points is not None and levels.points.size <= MAX_LEVELS
        return levels if few else levels._replace(points=None)
    values = magnitudes(state.decoded().reshape(-1), torch.float64).numpy()
    distinct = np.unique(values)
    is_codebook = distinct.size <= min(MAX_LEVELS, values.size // 2) and np.isfinite(distinct).all()
    return Levels("codebook", distinct) if is_codebook else Levels("other")


def row_means(score: Tensor) -> NDArray[np.float64] | None:
    """Return the mean sensitivity of neighbouring rows of a matrix; None for other tensors.

    Parameters
    ----------
    score
        A sensitivity for each value. Rows are the outermost dimension.

    Returns
    -------
    Float[ndarray, "groups"] or None
        At most `N_ROWS` groups of rows; NaN where no value of a group is finite.

    Examples
    --------
    >>> import torch
    >>> row_means(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).tolist()
    [1.5, 4.5]
    """
    if score.ndim < 2 or not score.numel():
        return None
    rows = score.detach().cpu().float().flatten(1)
    finite = rows.isfinite()
    sums, counts = rows.where(finite, 0).numpy().sum(1, dtype=np.float64), finite.sum(1).numpy()
    begins = np.linspace(0, sums.size, min(sums.size, N_ROWS) + 1).round().astype(np.int64)[:-1]
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = np.add.reduceat(sums, begins) / np.add.reduceat(counts, begins)
    return means


def _known_scores(
    checkpoint: Checkpoint, before: Checkpoint | None, spec: TensorSpec, values: Tensor, metric: str | None
) -> tuple[str, Tensor] | None:
    """Return the sensitivity that was asked for, or the first that is known."""
    if metric is not None and metric not in _METRICS:
        raise InputError(
            f"'{metric}' is not a sensitivity of tensors", remedy=f"choose one of {', '.join(_METRICS)}"
        )
    if spec.role is not TensorRole.WEIGHT or not values.is_floating_point():
        return None
    for name in _METRICS if metric is None else (metric,):
        found = StepScores(checkpoint, before).by(SensitivityMetric(name), spec, values)
        if found is not None:
            return name, found.values
    return None


class Part(NamedTuple):
    """The values of one tensor that became zero, a level, or themselves.

    Parameters
    ----------
    name
        ``pruned``, ``quantized`` or ``protected``.
    n, share
        How many they are, and of all values.
    """

    name: str
    n: int
    share: float


class ValueHistogram(NamedTuple):
    """Values of one tensor in even bins, by part.

    Parameters
    ----------
    edges : Float[ndarray, "bins + 1"]
        Ascending; the last bin contains its upper edge. Empty where no value is finite.
    counts : Int[ndarray, "3 bins"]
        In the order of `PARTS`.
    parts
        Totals, in the same order.
    n_nonfinite
        NaN and infinite values, which are in no bin.
    rms
        Root mean square of the finite values; NaN where there are none.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    parts: tuple[Part, ...]
    n_nonfinite: int
    rms: float


def value_histogram(values: Tensor, parts: NDArray[np.uint8] | int) -> ValueHistogram:
    """Count the values of a tensor in even bins from the smallest to the largest, by part.

    Parameters
    ----------
    values
        Any shape and dtype; a complex number counts by its absolute value.
    parts : UInt8[ndarray, "n"] or int
        Index into `PARTS` for each element, or one for all.

    Notes
    -----
    Two passes over chunks of float64; O(n).
    """
    low, high, square, n_finite = np.inf, -np.inf, 0.0, 0
    for _, chunk in _chunks_of(values):
        finite = chunk[np.isfinite(chunk)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            with np.errstate(over="ignore"):  # an infinite sum of squares is right
                square += float(np.square(finite).sum())
            n_finite += finite.size
    totals = np.zeros(len(PARTS), np.int64)
    edges = _edges(low, high)
    counts = np.zeros((len(PARTS), N_BINS), np.int64)
    part_of = np.broadcast_to(np.asarray(parts), values.numel())
    for start, chunk in _chunks_of(values):
        for part in range(len(PARTS)):
            mine = chunk[part_of[start : start + chunk.size] == part]
            totals[part] += mine.size
            finite = mine[np.isfinite(mine)]
            counts[part] += np.histogram(finite, N_BINS, (edges[0], edges[-1]))[0]
    n = max(int(totals.sum()), 1)
    return ValueHistogram(
        edges=edges,
        counts=counts,
        parts=tuple(
            Part(name, int(total), int(total) / n) for name, total in zip(PARTS, totals, strict=True)
        ),
        n_nonfinite=int(totals.sum()) - n_finite,
        rms=float(np.sqrt(square / n_finite)) if n_finite else float("nan"),
    )


def _chunks_of(values: Tensor) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield the flat values in float64, some at a time, each with its first index."""
    import torch

    flat = values.detach().cpu().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk: NDArray[np.float64] = magnitudes(flat[start : start + _CHUNK], torch.float64).numpy()
        yield start, chunk


def _edges(low: float, high: float) -> NDArray[np.float64]:
    """Return even edges; a single value gets a bin with room around it."""
    if not low <= high:
        return np.linspace(-1.0, 1.0, N_BINS + 1)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    edges: NDArray[np.float64] = np.linspace(low, high, N_BINS + 1)
    return edges
