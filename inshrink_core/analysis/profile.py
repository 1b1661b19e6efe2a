"""Sensitivity of every weight of a run: measured one tensor at a time, and cached step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from inshrink_core.analysis.findings import Findings, findings
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.errors import NotFoundError
from inshrink_core.execution.results import ResultStore, cache_folder
from inshrink_core.formats import Run
from inshrink_core.sensitivity import Grouping, ScoreHistogram, SensitivityMetric, Summary
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor

# Part of every key; incremented when a record or the measurement changes.
_VERSION: Final = 4

OnStep = Callable[[int, int, int], None]


def sensitivity(
    run: Run | Archive,
    metric: SensitivityMetric | str = "magnitude",
    *,
    steps: Iterable[int] | None = None,
    device: str = "auto",
    progress: OnStep | None = None,
) -> Profile:
    """Measure the sensitivity of every weight at every step; `Profile.by` gives it as a table.

    Parameters
    ----------
    run
        The checkpoints. The profile of a run is cached.
    metric
        ``magnitude``, ``taylor``, ``fisher`` or ``update``.
    steps
        Measure these only. An update is the movement since the previous step of the run, measured or not.
    device
        Where the tensors of an archive are decoded: ``auto``, ``cpu`` or ``cuda``.
    progress
        Called after each step with (steps done, steps in all, step).

    Raises
    ------
    InputError
        The metric does not exist.
    NotFoundError
        The run lacks a step.

    Notes
    -----
    O(bytes read) time; memory of one tensor with its auxiliary tensors and a histogram per layer type. Every
    measured step is cached at once, so that an interrupted profile continues.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> table = inshrink_core.analysis.sensitivity(run, "fisher", steps=(400, 800)).by("layer_type")
    >>> table.rows, table.mean.shape
    (('convolution', 'vector', 'linear'), (3, 2))
    """
    metric = SensitivityMetric.parse(metric)
    used = "cpu"
    if isinstance(run, Archive):
        run = run.on(device)
        used = run.device
    if isinstance(run, Run):
        run = run.matched()
    every = tuple(run.steps)
    chosen = every if steps is None else tuple(sorted(set(steps)))
    if missing := set(chosen) - set(every):
        raise NotFoundError(
            f"the run has no step {min(missing)}", remedy="`inshrink inspect` lists its steps"
        )
    identity: Callable[[int], str] | None = getattr(run, "identity", None)
    owners = run.matching_digest if isinstance(run, Run) else ""
    directory = getattr(run, "directory", None)
    folder = cache_folder(Path(directory)) if directory is not None and identity is not None else None
    cache = ResultStore(folder, "record", _unpack)
    records: list[StepRecord] = []
    bytes_read = 0
    for done, step in enumerate(chosen, 1):
        before = max((other for other in every if other < step), default=None)
        if metric is not SensitivityMetric.UPDATE:
            before = None
        key: dict[str, Any] = {"version": _VERSION, "metric": metric.value, "owners": owners}
        if identity is not None:
            key |= {"step": identity(step), "before": "" if before is None else identity(before)}
        record = cache.load(metric.value, key)
        if record is None:
            reader = StepScores(run[step], None if before is None else run[before])
            record = _measure(reader, metric)
            cache.try_keep(metric.value, key, msgspec.to_builtins(record))
            bytes_read += reader.bytes_read
        records.append(record)
        if progress is not None:
            progress(done, len(chosen), step)
    return Profile(metric=metric, steps=chosen, bytes_read=bytes_read, records=tuple(records), device=used)


class Scores(NamedTuple):
    """Scores of every parameter of one tensor.

    Parameters
    ----------
    values
        Non-negative float32, in the shape of the weight.
    source
        Input of the computation, if several are possible: ``gradient`` (recorded) or ``exp_avg`` (Adam's
        first moment as a proxy) for `taylor`; ``uncorrected`` for a `fisher` without bias correction; else
        None.
    """

    values: Tensor
    source: str | None = None


class StepScores:
    """Scores of the tensors of a step, some relative to the step before; counts the bytes read.

    Notes
    -----
    O(n); computed in float32 by single operations. The first moment is used as stored, without bias
    correction: this common factor changes no order and vanishes within tens of steps.
    """

    def __init__(self, checkpoint: Checkpoint, previous: Checkpoint | None) -> None:
        self.checkpoint, self._previous = checkpoint, previous
        self.bytes_read = 0

    def _read(self, checkpoint: Checkpoint | None, key: str) -> Tensor | None:
        if checkpoint is None or key not in checkpoint:
            return None
        self.bytes_read += checkpoint.spec(key).nbytes
        return checkpoint[key]

    def _auxiliary(self, spec: TensorSpec, role: TensorRole) -> Tensor | None:
        found = self.checkpoint.auxiliary_spec(spec, role)
        return None if found is None else self._read(self.checkpoint, found.key)

    def _updates_of(self, spec: TensorSpec) -> float:
        """Return how often the optimizer has moved a tensor: its own count, else the checkpoint's step."""
        count = self._read(self.checkpoint, f"{spec.name}@{TensorRole.STEP.value}")
        return float(count.item()) if count is not None and count.numel() == 1 else self.checkpoint.step

    def of(self, metric: SensitivityMetric, spec: TensorSpec) -> Scores | None:
        """Read a tensor, if the metric needs it, and return its scores."""
        weight = None if metric is SensitivityMetric.FISHER else self._read(self.checkpoint, spec.key)
        return self.by(metric, spec, weight)

    def by(self, metric: SensitivityMetric, spec: TensorSpec, weight: Tensor | None) -> Scores | None:
        """Return the scores of one tensor, reading what a metric needs beside it and nothing more.

        The loss is not of a moving average: what it minds there is what it minds in the tensor averaged.
        """
        twin = self.checkpoint.twins.get(spec.name)
        if twin is not None and metric in (SensitivityMetric.TAYLOR, SensitivityMetric.FISHER):
            spec = self.checkpoint.spec(twin)
            weight = self._read(self.checkpoint, spec.key) if metric is SensitivityMetric.TAYLOR else None
        if metric is SensitivityMetric.FISHER:
            second = self._auxiliary(spec, TensorRole.EXP_AVG_SQ)
            return None if second is None else self._fisher(spec, _float32(second).abs())
        if weight is None:
            return None
        values = _float32(weight)
        if metric is SensitivityMetric.MAGNITUDE:
            return Scores(values.abs())
        if metric is SensitivityMetric.UPDATE:
            previous = self._read(self._previous, spec.key)
            if previous is None or previous.shape != weight.shape:
                return None
            return Scores((values - _float32(previous)).abs())
        for role in (TensorRole.GRADIENT, TensorRole.EXP_AVG):
            slope = self._auxiliary(spec, role)
            if slope is not None:
                return Scores((_float32(slope) * values).abs(), role.value)
        return None

    def _fisher(self, spec: TensorSpec, moment: Tensor) -> Scores:
        """Correct the bias towards zero of Adam's early steps, if decay and step are known."""
        beta2 = self.checkpoint.hyperparameters.get(spec.name, {}).get("beta2")
        step = self._updates_of(spec)
        if beta2 is None or step < 1 or not 0 <= beta2 < 1:
            return Scores(moment, "uncorrected")
        return Scores(moment / (1 - beta2**step))


def _float32(tensor: Tensor) -> Tensor:
    import torch

    return magnitudes(tensor, torch.float32)


def _block(spec: TensorSpec) -> str:
    """Return the module path that holds a tensor; of a tensor of the root, its own name."""
    return spec.name.rpartition(".")[0] or spec.name


def _row(name: str, members: Sequence[TensorSpec], shape: tuple[int, ...] | None = None) -> Row:
    """Describe a tensor or a group of them."""
    largest = max(members, key=lambda spec: spec.numel)
    return Row(
        name=name,
        block=_block(members[0]),
        layer_type=str(largest.layer),
        role=members[0].role.value,
        n_tensors=len(members),
        numel=sum(spec.numel for spec in members),
        shape=shape,
    )


def _measure(reader: StepScores, metric: SensitivityMetric) -> StepRecord:
    """Measure every weight of one step; buffers are no parameters and have no sensitivity."""
    weights = [spec for spec in reader.checkpoint.specs if spec.role is TensorRole.WEIGHT]
    members: dict[str, list[TensorSpec]] = {}
    for spec in weights:
        members.setdefault(_block(spec), []).append(spec)
    sources: set[str | None] = set()
    tensors: dict[str, MeasuredRow] = {}
    blocks: list[MeasuredRow] = []
    types: dict[str, tuple[ScoreHistogram, list[TensorSpec]]] = {}
    for block, specs in members.items():  # block by block: one histogram of a block is in memory
        of_block = ScoreHistogram()
        for spec in specs:
            histogram, found = ScoreHistogram(), reader.of(metric, spec)
            if found is not None:
                histogram.add(found.values)
                sources.add(found.source)
            tensors[spec.name] = MeasuredRow(_row(spec.name, (spec,), spec.shape), histogram.summary())
            of_type, alike = types.setdefault(str(spec.layer), (ScoreHistogram(), []))
            of_type.merge(histogram)
            of_block.merge(histogram)
            alike.append(spec)
        blocks.append(MeasuredRow(_row(block, specs), of_block.summary()))
    rows = {
        Grouping.TENSOR: tuple(tensors[spec.name] for spec in weights),
        Grouping.BLOCK: tuple(blocks),
        Grouping.LAYER_TYPE: tuple(
            MeasuredRow(_row(name, alike)._replace(block=""), histogram.summary())
            for name, (histogram, alike) in types.items()
        ),
    }
    return StepRecord("mixed" if len(sources) > 1 else next(iter(sources), None), rows)


class Row(NamedTuple):
    """One tensor, block or layer type.

    Parameters
    ----------
    name
        Of the tensor, of the block, or of the layer type.
    block
        Path of the module that holds it: the name without its last component; empty for a layer type.
    layer_type
        Layer type; of a block, the one most of its parameters have.
    role
        Role of its tensors in the training.
    n_tensors, numel
        How many tensors it holds, and how many parameters.
    shape
        Of a tensor; None for a group.
    """

    name: str
    block: str
    layer_type: str
    role: str
    n_tensors: int
    numel: int
    shape: tuple[int, ...] | None


class MeasuredRow(NamedTuple):
    """A row and what was measured of it at one step."""

    row: Row
    summary: Summary


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One metric of one checkpoint: what the cache keeps.

    Parameters
    ----------
    source
        What the scores came from, where there is a choice (`Scores.source`); None if there is none,
        ``mixed`` if tensors differ.
    rows
        Per grouping, in model order.
    """

    source: str | None
    rows: Mapping[Grouping, tuple[MeasuredRow, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SensitivityTable:
    """One metric of a run by one grouping.

    Parameters
    ----------
    metric, grouping
        What the values are, and what a row is.
    rows
        Names, in model order.
    details
        The rows with all that is known of them, as at the last step that has them.
    steps
        Ascending.
    mean, p50, p99
        float32 ``[rows, steps]``; NaN where a row is absent or the metric is not defined.
    n_nonfinite
        int64 ``[rows, steps]``: scores that are NaN or infinite and left out.
    sources
        Per step, what the scores came from, where there is a choice (`Scores.source`).
    """

    metric: SensitivityMetric
    grouping: Grouping
    rows: tuple[str, ...]
    details: tuple[Row, ...]
    steps: tuple[int, ...]
    mean: NDArray[np.float32]
    p50: NDArray[np.float32]
    p99: NDArray[np.float32]
    n_nonfinite: NDArray[np.int64]
    sources: tuple[str | None, ...]

    def findings(self) -> Findings:
        """Return which rows carry the sensitivity, and which have changed most."""
        sizes = [row.numel for row in self.details]
        return findings(self.metric, self.grouping, self.rows, sizes, self.steps, self.mean)


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """Sensitivity of a run by one metric.

    Parameters
    ----------
    metric
        What was measured.
    steps
        Ascending.
    bytes_read
        Bytes of tensors read to measure; 0 if everything came from the cache.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    """

    metric: SensitivityMetric
    steps: tuple[int, ...]
    bytes_read: int
    records: tuple[StepRecord, ...] = field(repr=False)
    device: str = "cpu"

    def by(self, grouping: Grouping | str = "tensor") -> SensitivityTable:
        """Return a table, rows by ``tensor``, ``block`` or ``layer_type``.

        Raises
        ------
        InputError
            No such grouping.
        """
        grouping = Grouping.parse(grouping)
        measured = [{row.row.name: row for row in record.rows[grouping]} for record in self.records]
        details = {name: found.row for rows in measured for name, found in rows.items()}
        values = np.full((3, len(details), len(self.steps)), np.nan, np.float32)
        n_nonfinite = np.zeros((len(details), len(self.steps)), np.int64)
        # A mean beyond float32 becomes infinite, as the scores themselves would.
        with np.errstate(over="ignore"):
            for row, name in enumerate(details):
                for column, rows in enumerate(measured):
                    if name in rows:
                        values[:, row, column] = rows[name].summary[:3]
                        n_nonfinite[row, column] = rows[name].summary.n_nonfinite
        return SensitivityTable(
            metric=self.metric,
            grouping=grouping,
            rows=tuple(details),
            details=tuple(details.values()),
            steps=self.steps,
            mean=values[0],
            p50=values[1],
            p99=values[2],
            n_nonfinite=n_nonfinite,
            sources=tuple(record.source for record in self.records),
        )


def _unpack(document: Any) -> StepRecord:
    """Return a record of JSON values; what does not fit raises, and the record is measured anew."""
    record = msgspec.convert(document, StepRecord)
    if set(record.rows) != set(Grouping):
        raise ValueError("a grouping is missing")
    return record
