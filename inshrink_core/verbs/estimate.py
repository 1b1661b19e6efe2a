"""Estimate ratio and quality of configurations in seconds, without evaluating restored steps."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec, Unseen
from inshrink_core.errors import EvaluatorError, InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.progress import Counter
from inshrink_core.execution.results import key_digest
from inshrink_core.metrics import bits_per_parameter
from inshrink_core.report import OMITTED, Report, plain_value
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import (
    Bounding,
    Computing,
    Reading,
    RunLike,
    Stepping,
    Writing,
    steps_of,
)
from inshrink_core.verbs.shared.measured import Asking, EvaluatorId, Measurements, read_as
from inshrink_core.verbs.shared.values import given_settings, parse_settings

if TYPE_CHECKING:
    from inshrink_core.chain import ChainConfig
    from inshrink_core.chain.sizes import ArchiveSize, FrameSize
    from inshrink_core.formats import Run
    from inshrink_core.search.bounds import Bounds
    from inshrink_core.search.quadratic import Calibration
    from inshrink_core.search.trials import Trial


_NUMEL: Final = 1 << 23
"""Elements encoded in all: takes a few seconds."""

_LEAST_NUMEL: Final = 1 << 17
"""Fewest elements of a step for a useful ratio."""

_TENSORS: Final = 2000
"""Tensors encoded in all; each takes some milliseconds, even a small one."""

_LEAST_TENSORS: Final = 32
"""Fewest tensors of a step, if it has so many; twice as many if its layers are of several types."""

_RUN_LENGTH: Final = 16
"""Steps of a stretch, in a run with more steps than can be encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateReport(Report):
    """Estimates of a configuration for a run; nothing is measured on decoded states.

    Parameters
    ----------
    codec
        Codec of the weights.
    config
        All settings of the codec.
    overrides
        Settings of some tensors.
    ratio_total
        Raw bytes over stored bytes of everything; None for an empty archive.
    ratio_weights
        Raw bytes over stored bytes of weights and buffers, including headers and indexes.
    drop
        Relative change of the metric for the worse at the worst step; None if the trials do not
        determine it.
    divergence
        Divergence of the predictions at the worst step, in nats; None if the trials do not determine
        it.
    basis
        Source of drop and divergence: ``trials`` of this run, or an uncalibrated ``rule of thumb``.
    n_trials
        Number of trials that calibrate the prediction.
    n_steps
        Number of steps encoded.
    sampled
        Share of their weights that was encoded.
    seconds
        Wall time.
    notes
        Remarks.
    unseen
        Bytes outside parsed tensors, stored unchanged (docs/runs.md#opaque-files).
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    tensors
        Estimates of the encoded tensors, if requested.
    archive
        Size and cost of an archive, if `tried` steps were requested.
    set
        With several configurations: the codec, settings and optimizer of this one.
    each
        The other configurations, in their order.
    measured_at
        Unix time of the oldest reused result (docs/design.md#what-was-measured); None if all are new.
    """

    codec: str
    config: Mapping[str, Any]
    overrides: tuple[Mapping[str, Any], ...]
    ratio_total: float | None
    ratio_weights: float
    drop: float | None
    divergence: float | None
    basis: str
    n_trials: int
    n_steps: int
    sampled: float
    seconds: float
    notes: tuple[str, ...] = ()
    unseen: Unseen
    device: str = "cpu"
    tensors: tuple[TensorEstimate, ...] = field(default=(), metadata=OMITTED)
    archive: ArchiveEstimate | None = field(default=None, metadata=OMITTED)
    set: Mapping[str, Any] = field(default_factory=dict, metadata=OMITTED)
    each: tuple[EstimateReport, ...] = field(default=(), metadata=OMITTED)
    measured_at: float | None = None

    SHOWS: ClassVar = (
        "estimated=estimated basis n_trials n_steps sampled tried=archive.tried "
        "not_evaluated=archive.not_evaluated seconds device measured_at tensors"
    )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink estimate --json``; optional parts only if requested.

        Returns
        -------
        estimate : bool
            Always True.
        tensors : [TensorEstimate]
            Tensors encoded, with ``--by-tensor``.
        archive : ArchiveEstimate
            Estimate of the archive, with ``--try``; the restore cost is that of the worst step.
        set : object
            Configuration asked for, with ``--each``.
        set.codec : str
            Codec of the weights.
        set.optimizer : str
            How optimizer state is stored: ``exact``, ``compressed``, ``compact`` or ``drop``.
        set.settings : object
            Settings, as in a config file.
        each : [object]
            The other configurations, with all these keys.
        """
        parts = {name: getattr(self, name) for name in ("tensors", "archive", "set", "each")}
        there = {name: plain_value(value) for name, value in parts.items() if value}
        return {"estimate": True} | Report.to_json(self) | there

    @property
    def estimated(self) -> list[dict[str, Any]]:
        """One row per configuration, each with a name."""
        figures = ("ratio_total", "ratio_weights", "drop", "divergence")
        rows = []
        for row in (self, *self.each):
            asked = {**row.set, **row.set.get("settings", {})}
            words = [f"{k}={v}" for k, v in asked.items() if k not in ("codec", "settings")]
            found: dict[str, Any] = {"estimated": " ".join([row.codec, *words])}
            found |= {name: getattr(row, name) for name in figures}
            if row.archive is not None:
                found |= {name: getattr(row.archive, name) for name in ("nbytes", "restore_cost", "basis")}
            rows.append(found)
        return rows

    def remarks(self) -> Iterator[str]:
        """Yield the notes."""
        yield from (f"note: {note}" for note in self.notes)


@dataclass(frozen=True, slots=True)
class TensorEstimate:
    """Estimate for one weight or buffer.

    Parameters
    ----------
    key
        Key of the tensor.
    layer_type
        ``embedding``, ``attention``, ``convolution``, ``linear`` or ``vector``; None for other buffers.
    n_values
        Number of elements.
    bits_per_weight
        Stored bits of its blocks per value and frame, with keyframes in the proportion of the chain.
    sensitivity
        Mean squared gradient h, or movement, of its values at the last encoded step; None if unknown.
    damage
        ½ Σ h·e², with errors e, at the worst encoded step. If no tensor has an h, its squared error; if only
        others do, None.
    """

    key: str
    layer_type: str | None
    n_values: int
    bits_per_weight: float
    sensitivity: float | None
    damage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEstimate:
    """Estimated size of the chain's archive, and the cost of a restore.

    Parameters
    ----------
    tried
        The steps that were encoded.
    raw_bytes
        Uncompressed bytes of the tensors.
    nbytes
        Size of the archive in bytes.
    bits_per_weight
        Mean stored bits of one weight at one step.
    restore_cost
        Expected rise of the loss, as a share of it; None if unknown.
    basis
        Source of the restore cost: ``exact`` (nothing is lost), ``judged`` (by the evaluator at the tried
        steps), ``predicted`` (from trials of a search) or ``unknown``.
    not_evaluated
        Why the evaluator gives no restore cost; empty if it does, or was not asked.
    evaluator_failed
        Whether the evaluator itself failed; False if it returned unsuitable results.
    """

    tried: tuple[int, ...]
    raw_bytes: int
    nbytes: int
    bits_per_weight: float | None
    restore_cost: float | None
    basis: str
    not_evaluated: str = ""
    evaluator_failed: bool = False


@dataclass(frozen=True)
class Estimate(
    Stepping, Asking, Bounding, EvaluatorRequest, Writing, Computing, Reading, Request[EstimateReport]
):
    """Estimate the ratio and the drop of one or more configurations, without measuring.

    Parameters
    ----------
    run
        The run to estimate for.
    each
        Estimate another configuration, too: codec=uniform,bits=4 replaces codec and settings; may be
        repeated.
    tried
        Encode N steps from the middle of the run, and report the size of an archive. With bounds and an
        evaluator, each step is written as small as they allow, and evaluated.
    by_tensor
        Also report bits, sensitivity and damage of every encoded tensor.

    Raises
    ------
    InputError
        The configuration is not applicable.
    UntrustedCodeError
        The evaluator lacks consent to run.

    Notes
    -----
    A sample of the tensors, of every layer type, is encoded in closed loop: at most `_NUMEL` elements, unless
    the steps are large. Drop and divergence come from ½ Σ h·e² and trials of the same steps, of the same
    codec if available (`inshrink_core.search.quadratic.Calibration`): close to the measurement for a measured
    configuration, and with the same correction near it. Without trials they are rules of thumb, right to an
    order of magnitude at best. With several configurations, progress events carry the document of each.
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> fine = inshrink_core.verbs.estimate(
    ...     run, config={"coarseness": 1}, each=["coarseness=4"], steps=run.steps[-3:]
    ... )
    >>> 5 < fine.ratio_weights < fine.each[0].ratio_weights
    True
    """

    run: RunLike
    _: KW_ONLY
    each: Annotated[Sequence[str], Option(metavar="NAME=VALUE,…", many=True)] = ()
    tried: Annotated[int | None, Option(("--try",), metavar="N", least=1)] = None
    by_tensor: bool = False

    EXAMPLES: ClassVar = (
        "inshrink estimate runs/digits --config my.toml",
        "inshrink estimate runs/digits --set coarseness=4",
        "inshrink estimate runs/digits --codec uniform --set bits=8 --each bits=4 --each bits=2",
        "inshrink estimate runs/digits --try 2 --each codec=lossless,optimizer=exact --each optimizer=drop",
    )
    UNIT: ClassVar = "steps"

    def perform(self) -> EstimateReport:
        """Estimate each configuration."""
        from inshrink_core.search.search import choose_steps, trial_log_of

        begun = time.perf_counter()
        if self.bounds.requested() is not None and self.tried is None:
            raise InputError("bounds go with --try", remedy="add --try 2")
        opened = self.opened_run(self.run).matched()
        chosen = choose_steps(opened, steps_of(opened, self.steps))
        known = trial_log_of(opened, make=False).values()
        configs = [_Config.of(self, text) for text in (("", *self.each) if self.each else ("",))]
        store = Measurements.of_run(opened, make=True)
        question = self._question(opened, chosen, configs, known)
        found = None if self.again else store.find("estimate", question)
        known_at = {} if found is None else found.document | {"measured_at": found.at}
        report = read_as(EstimateReport, known_at) if known_at else None
        if report is None:
            sample = _Sample.of(opened, chosen, self.tried, known, len(configs))
            first, *others = self._estimated(sample, configs)
            seconds = time.perf_counter() - begun
            report = replace(first, each=tuple(others), seconds=seconds if others else first.seconds)
            store.add("estimate", question, report.to_json())
        return report

    def _estimated(self, sample: _Sample, configs: Sequence[_Config]) -> list[EstimateReport]:
        """Estimate each configuration, then evaluate the lossy ones under the bound."""
        found: list[EstimateReport] = []
        n, bounds = sum(map(len, sample.stretches)), self.bounds.requested()
        total = n * len(configs) * (1 if bounds is None else 2)
        count = Counter(self.progress if len(configs) > 1 else None, "estimate", total)
        for config in configs:
            found.append(_estimate(sample, config, self))
            count.add(n, sample.steps[-1], found=found[-1].to_json())
        if bounds is None:
            return found
        # The weights are written the same way for every choice of optimizer state.
        alike = [at for at, row in enumerate(found) if _weights(row) == _weights(found[0])]
        lossy = [at for at in alike if _tried(found[at]).basis != "exact"]
        chains = sorted((configs[at].chain for at in lossy), key=lambda entry: entry.optimizer == "drop")
        judged = None
        try:
            judged = _evaluated(sample, chains[0], self, bounds) if chains else None
        except InputError as error:  # The evaluator's results do not give the bounded figure.
            about: dict[str, Any] = {
                "not_evaluated": str(error),
                "evaluator_failed": isinstance(error, EvaluatorError),
            }
            found = [replace(row, archive=replace(_tried(row), **about)) for row in found]
        if judged is not None:
            for at in lossy:
                found[at] = _with_evaluated(found[at], judged, sample, configs[at].chain)
                count.add(n, sample.steps[-1], found=found[at].to_json())
        return found

    def _question(
        self, run: Run, steps: Sequence[int], configs: Sequence[_Config], known: Sequence[Trial]
    ) -> dict[str, Any]:
        """Return what the estimates depend on, apart from the run."""
        first, *others = (
            {"config": config.chain.record(), "keyframe_every": config.chain.keyframe_every}
            for config in configs
        )
        question = first | {"steps": list(steps), "by_tensor": self.by_tensor, "version": version("inshrink")}
        question["trials"] = key_digest({"trials": [trial.to_json() for trial in known]})
        if others or self.tried is not None:
            question |= {"each": others, "tried": self.tried}
        if (bounds := self.bounds.requested()) is not None:
            with self.resolve(run) as judge:
                asked = EvaluatorId.of(judge)
            question |= {"bounds": bounds.limits, "evaluator": asked.digest, "name": asked.name}
        return question


estimate = python_call(Estimate)


class _Config(NamedTuple):
    """A chain config, and the settings that distinguish it from the other configurations."""

    chain: ChainConfig
    set: Mapping[str, Any]

    @classmethod
    def of(cls, asked: Estimate, text: str) -> _Config:
        """Return a request's configuration with some settings replaced."""
        given = parse_settings(text.split(",") if text else ())
        codec, optimizer = given.pop("codec", None), given.pop("optimizer", asked.optimizer)
        settings = given if codec else {**given_settings({}, asked.settings), **given}
        config = None if codec else asked.config
        written = replace(
            asked, codec=codec or asked.codec, config=config, settings=settings, optimizer=optimizer
        )
        chain = written.chain_config(device=asked.device, threads=asked.threads)
        chosen = written.chosen()["config"] or {}
        settings = (
            {k: v for k, v in chosen.items() if k != "overrides"} if isinstance(chosen, Mapping) else {}
        )
        words: dict[str, Any] = {"codec": chain.codec, "settings": settings}
        return cls(chain, (words | ({"optimizer": optimizer} if optimizer else {})) if asked.each else {})


class _Sample(NamedTuple):
    """The encoded sample of a run: stretches of its steps, tensors of each, and the known trials.

    The configurations share the open checkpoints, and what is known of these.
    """

    run: Run
    steps: tuple[int, ...]
    stretches: list[Sequence[int]]
    few: Sequence[int]
    keys: frozenset[str]
    known: tuple[Trial, ...]
    checkpoint: Callable[[int], Checkpoint]
    sensitivities: Mapping[int, Mapping[str, float]]
    attachments: Callable[[str], Sequence[int]]
    initial: dict[str, Any]

    @classmethod
    def of(
        cls, run: Run, steps: tuple[int, ...], tried: int | None, known: tuple[Trial, ...], n_settings: int
    ) -> _Sample:
        from inshrink_core.search.measure import attachment_sizes, middle_of, sample_keys
        from inshrink_core.search.quadratic import sensitivities

        stretches = [steps if tried is None else middle_of(steps, tried)]
        if tried is None and len(steps) > 3 * _RUN_LENGTH:  # movement changes over a training
            stretches = [steps[:_RUN_LENGTH], middle_of(steps, _RUN_LENGTH), steps[-_RUN_LENGTH:]]
        n_steps = sum(map(len, stretches))
        numel = max(_LEAST_NUMEL, _NUMEL // n_steps)
        read = functools.cache(run.__getitem__)
        first = read(stretches[0][0])
        n_types = len({spec.layer for spec in first.specs if spec.role in MODEL_ROLES})
        n_tensors = max(_LEAST_TENSORS * min(2, n_types), _TENSORS // (n_steps * n_settings))
        keys = sample_keys(first, numel, n_tensors)
        pairs = [pair for stretch in stretches for pair in zip((None, *stretch), stretch, strict=False)]
        h = {now: sensitivities(read(now), None if was is None else read(was), keys) for was, now in pairs}
        few = middle_of(steps) if tried is None else stretches[0]
        files = functools.cache(lambda optimizer: attachment_sizes(map(read, few), optimizer))
        return cls(run, steps, stretches, few, keys, known, read, h, files, {})

    def ahead(self, chain: ChainConfig) -> Any:
        """Return the encoder's look-ahead, cached: it does not depend on the tunable parameter."""
        from inshrink_core.chain import look_ahead

        tuning = chain.config.tuning
        turned = () if tuning is None else tuning.tunable.settings
        settings = {k: v for k, v in chain.config.settings().items() if k not in turned}
        key = json.dumps([chain.codec, settings], sort_keys=True, default=str)
        if key not in self.initial:
            self.initial[key] = look_ahead(chain, self.steps, self.checkpoint, self.keys)
        return self.initial[key]

    def model(self) -> list[TensorSpec]:
        """Return the weights and buffers of the first step."""
        return [spec for spec in self.checkpoint(self.steps[0]).specs if spec.role in MODEL_ROLES]

    @property
    def share(self) -> float:
        """Encoded share of the model's elements."""
        numel = {spec.key: spec.numel for spec in self.model()}
        return sum(numel[key] for key in numel.keys() & self.keys) / max(1, sum(numel.values()))


def _tried(row: EstimateReport) -> ArchiveEstimate:
    if row.archive is None:
        raise RuntimeError("no archive was estimated")
    return row.archive


def _weights(row: EstimateReport) -> str:
    """Return a key of the settings that determine how weights are written."""
    return json.dumps([row.codec, row.config, row.overrides], sort_keys=True)


def _evaluated(
    sample: _Sample, chain: ChainConfig, judging: EvaluatorRequest, bounds: Bounds
) -> tuple[ArchiveSize, Mapping[str, Any]]:
    """Write the tried steps under bounds; return their sizes, and the worst figures."""
    from inshrink_core.search.bounded import open_bounded, written_bounded

    (tried,), run = sample.stretches, sample.run
    with open_bounded(run, tuple(tried), chain, bounds, judging) as bounded:
        # The bound on the restore cost follows the learning rate: earlier steps provide its largest value.
        for step in sample.steps[: sample.steps.index(tried[0])]:
            bounded.saw(run[step])
        sizes = written_bounded(bounded, chain, [run[step] for step in tried], sample.ahead(chain))
        return sizes, bounded.bound_record.to_json()


def _with_evaluated(
    found: EstimateReport, judged: tuple[ArchiveSize, Mapping[str, Any]], sample: _Sample, chain: ChainConfig
) -> EstimateReport:
    """Return an estimate with the evaluated weights in place of the estimated ones.

    The step size of the weights determines that of optimizer state, so the evaluated frames give its size,
    too.
    """
    from inshrink_core.search.measure import Rest, in_proportion

    n_steps, tried, (sizes, worst) = len(sample.steps), _tried(found), judged

    def of_chain(nbytes: Callable[[FrameSize], int]) -> float:
        first, *deltas = map(nbytes, sizes.frames)
        return in_proportion([first], deltas, n_steps, chain.keyframe_every)

    nbytes = of_chain(lambda frame: frame.weights_nbytes)
    raw = sum(spec.nbytes for spec in sample.model()) * n_steps
    if chain.optimizer != "drop":
        stored = of_chain(lambda frame: frame.info.nbytes - frame.weights_nbytes)
    else:
        stored = tried.nbytes - raw / found.ratio_weights if found.ratio_weights else 0.0
    rest = Rest(tried.raw_bytes - raw, stored)
    archive = replace(
        tried,
        nbytes=round(nbytes + rest.nbytes),
        bits_per_weight=bits_per_parameter(round(nbytes), n_steps * sizes.frames[0].n_weights),
        restore_cost=worst["max_restore_cost"],
        basis="judged",
    )
    return replace(
        found,
        ratio_total=rest.ratio_total(raw, nbytes),
        ratio_weights=raw / nbytes if nbytes else 0.0,
        drop=worst["max_drop"],
        divergence=worst["max_divergence"],
        archive=archive,
    )


def _estimate(sample: _Sample, asked: _Config, request: Estimate) -> EstimateReport:
    """Return the estimate of one configuration: encode the sample, and extrapolate to the chain."""
    from inshrink_core.search.measure import encode_chain, estimate_rest, in_proportion
    from inshrink_core.search.quadratic import calibrate

    begun, chain, run, steps = time.perf_counter(), asked.chain, sample.run, sample.steps
    is_tried, specs = request.tried is not None, sample.model()
    count = Counter(None if request.each else request.progress, "estimate", sum(map(len, sample.stretches)))
    rows: list[_Row] = []
    for stretch in sample.stretches:
        encoded = encode_chain(chain, map(sample.checkpoint, stretch), sample.keys, sample.ahead(chain))
        for number, (step, row) in enumerate(zip(stretch, encoded, strict=True)):
            rows.append(
                _Row(
                    step,
                    row.checkpoint.raw_bytes(MODEL_ROLES),
                    row.scaled_nbytes,
                    row.scaled_damage(sample.sensitivities[step]),
                    row.relative_error,
                    number % chain.keyframe_every == 0,
                    row.nbytes,
                    row.squared_errors,
                )
            )
            count.add(1, step)
    calibration = calibrate([entry for entry in sample.known if entry.config.get("codec") == chain.codec])
    calibration = calibration if calibration.n_trials else calibrate(sample.known)
    drop, divergence = _figures(calibration, chain, rows)
    raw = len(steps) * sum(row.raw for row in rows) / len(rows)
    keyframes, deltas = ([row.nbytes for row in rows if row.keyframe is kind] for kind in (True, False))
    nbytes = in_proportion(keyframes, deltas, len(steps), chain.keyframe_every)
    few, files = map(sample.checkpoint, sample.few), sample.attachments(chain.optimizer)
    rest = estimate_rest(chain, list(few), len(steps), sample.keys, files, sample.ahead(chain))
    archive = None
    if is_tried:
        basis, cost = _cost(sample.known, chain, calibration, divergence)
        n_weights = len(steps) * sum(spec.numel for spec in specs)
        archive = ArchiveEstimate(
            tried=tuple(sample.few),
            raw_bytes=round(raw + rest.raw),
            nbytes=round(nbytes + rest.nbytes),
            bits_per_weight=bits_per_parameter(round(nbytes), n_weights),
            restore_cost=cost,
            basis=basis,
        )
    unseen = Unseen.of(layout for step in steps for layout in run[step].files)
    n_trials = calibration.n_trials
    tensors = _by_tensor(sample, specs, rows, chain.keyframe_every) if request.by_tensor else ()
    return EstimateReport(
        codec=chain.codec,
        config=chain.record()["config"],
        overrides=tuple(override.to_json() for override in chain.overrides),
        ratio_total=rest.ratio_total(raw, nbytes),
        ratio_weights=raw / nbytes if nbytes else 0.0,
        drop=drop,
        divergence=divergence,
        basis="trials" if n_trials else "rule of thumb",
        n_trials=n_trials,
        n_steps=len(rows),
        sampled=sample.share,
        seconds=time.perf_counter() - begun,
        notes=tuple(note for note in ("" if n_trials else _UNCALIBRATED, unseen.text) if note),
        unseen=unseen,
        device=chain.device,
        tensors=tuple(tensors),
        archive=archive,
        set=asked.set,
    )


def _figures(calibration: Calibration, chain: ChainConfig, rows: Sequence[_Row]) -> tuple[float | None, ...]:
    """Return drop and divergence of the worst step, from trials if available."""
    from inshrink_core.search.quadratic import DROP_PER_NAT

    if not calibration.n_trials:
        divergence = chain.config.expected_divergence(max(row.relative_error for row in rows))
        return DROP_PER_NAT * divergence, divergence
    found = (
        [calibration.predict(figure, row.step, row.damage) for row in rows]
        for figure in ("drop", "divergence")
    )
    return tuple(max((value for value in values if value is not None), default=None) for values in found)


def _cost(
    known: Sequence[Trial], chain: ChainConfig, calibration: Calibration, divergence: float | None
) -> tuple[str, float | None]:
    """Return the basis and the restore cost, at the trials' median cost per divergence."""
    from inshrink_core.chain.config import is_exact

    if chain.optimizer == "exact" and is_exact(chain.codec, {}):
        return "exact", 0.0
    if not calibration.n_trials:
        return "unknown", None
    prices = [
        trial.restore_cost / trial.divergence
        for trial in known
        if trial.restore_cost is not None and trial.divergence
    ]
    is_known = prices and divergence is not None
    return "predicted", statistics.median(prices) * (divergence or 0.0) if is_known else None


def _by_tensor(
    sample: _Sample, specs: Sequence[TensorSpec], rows: Sequence[_Row], keyframe_every: int
) -> Iterator[TensorEstimate]:
    """Yield the estimate of each tensor that was encoded."""
    from inshrink_core.search.measure import in_proportion

    n_steps, weighed = len(sample.steps), any(sample.sensitivities.values())
    for spec in specs:
        there = [row for row in rows if spec.key in row.nbytes_of]
        if not there or not spec.numel:
            continue
        keyframes, deltas = (
            [row.nbytes_of[spec.key] for row in there if row.keyframe is k] for k in (True, False)
        )
        nbytes = in_proportion(keyframes or deltas, deltas, n_steps, keyframe_every)
        errors = {row.step: row.squared_errors[spec.key] for row in there}
        known = [(step, sample.sensitivities[step]) for step in errors]
        h = {step: values[spec.key] for step, values in known if spec.key in values}
        damages = [0.5 * h[step] * errors[step] for step in h] if weighed else list(errors.values())
        yield TensorEstimate(
            key=spec.key,
            layer_type=None if spec.layer is None else str(spec.layer),
            n_values=spec.numel,
            bits_per_weight=8 * nbytes / (spec.numel * n_steps),
            sensitivity=list(h.values())[-1] if h else None,
            damage=max(damages, default=None),
        )


_UNCALIBRATED: Final = (
    "drop and divergence are estimated, uncalibrated: without trials of this run, rules of thumb from other"
    " runs are accurate to an order of magnitude at best; `inshrink search` makes trials"
)


class _Row(NamedTuple):
    """Figures of one step, from its sample."""

    step: int
    raw: int
    nbytes: float
    damage: float | None
    relative_error: float
    keyframe: bool
    nbytes_of: Mapping[str, int]
    squared_errors: Mapping[str, float]
