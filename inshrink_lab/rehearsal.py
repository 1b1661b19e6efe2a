"""The rehearsal: trainings with failures, stored results, and their comparison."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.codec import get_codec
from inshrink_core.errors import InputError
from inshrink_core.evaluate import Executing
from inshrink_core.execution.device import resolve_device
from inshrink_core.execution.progress import Progress
from inshrink_core.execution.results import ResultStore
from inshrink_core.metrics import Direction, drop, ratio
from inshrink_core.plugins import plugin
from inshrink_core.report import Part, Report, Table, parts_of
from inshrink_core.request import Option, Request, python_call
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.space import space_of
from inshrink_core.text import duration, percent, plain, size, steps_in_short
from inshrink_core.text import ratio as ratio_text
from inshrink_core.verbs.shared.groups import Bounding, PathLike, Writing
from inshrink_lab.results import TrainingResult, parse_training
from inshrink_lab.tasks.task import find_task

if TYPE_CHECKING:
    from inshrink_core.chain import ChainConfig
    from inshrink_lab.failing import Setup
    from inshrink_lab.losing import PartialRehearsal

__all__ = ["Rehearsal", "Rehearse", "half_width", "rehearse"]


_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantile .975 of Student's t at 1 to 30 degrees of freedom (any table of it)."""

_Z_975: Final = 1.959964
"""The same of the normal distribution."""


@dataclass(frozen=True)
class Rehearse(Writing, Bounding, Executing, Request["Rehearsal | PartialRehearsal"]):
    """Train with failures restored from the archive, and compare with uninterrupted training.

    Parameters
    ----------
    task
        A shipped task, such as char-gpt (docs/rehearsal.md lists them), or FILE.py:CLASS, which is executed.
    output
        Folder of the finished trainings, shared by all codecs.
    restores
        Number of evenly spaced failures of each training; by default the task's.
    seeds
        Number of pairs of trainings, with the seeds from 0.
    saves
        Number of evenly spaced saves of each training; by default the task's.
    steps
        Number of steps of each training; by default the task's.
    control
        Train each seed a third time, with weights moved by their last bits at each restore, to measure
        chance.
    lose
        Lose this share of the model's tensors between two saves, restore only these, and count the lost
        steps.
    budget
        With --lose, limit a save to this share of a complete one's bytes, and save more often by its inverse.
    device
        Device of the training; it affects the result.
    threads
        Number of threads of the training; it affects the result.
    keep_archives
        Keep the archives of the restored trainings.

    Raises
    ------
    NotFoundError
        The task does not exist.
    InputError
        Too many restores for the saves, another invalid setting, bounds on figures that the task does not
        measure, or a codec without anything to search.

    Notes
    -----
    A repeated call continues after the finished trainings. The folder ``reports`` in `output` has a file for
    each storage configuration, with the report of the pairs finished so far. With bounds, each save is the
    smallest frame found that keeps them, with the task as the evaluator, or exact if no smaller frame keeps
    them. A lossless restore has an excess of exactly zero on the CPU, where equal operations give equal bits.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> source = '''
    ... import torch
    ... class Line:
    ...     name, version, metric, direction = "line", 1, "loss", "lower"
    ...     n_steps, n_saves, n_restores, max_gradient_norm = 12, 4, 2, None
    ...     def build(self): return torch.nn.Linear(4, 1)
    ...     def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ...     def learning_rate_factor(self, step, n_steps): return 1.0
    ...     def batch(self, step, generator): return torch.randn(8, 4, generator=generator)
    ...     def loss(self, model, batch): return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    ...     def evaluate(self, model): return float(self.loss(model, torch.eye(4)).detach())
    ... '''
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "line.py").write_text(source)
    >>> result = rehearse(
    ...     f"{folder}/line.py:Line", folder / "out", codec="lossless", restores=3, seeds=2
    ... )
    >>> result.restored_at, result.excess
    ((3, 6, 9), 0.0)
    """

    task: Annotated[str, Option(metavar="TASK")]
    output: Annotated[PathLike, Option(("--output", "-o"), metavar="DIR")] = "rehearsal"
    _: KW_ONLY
    restores: Annotated[int | None, Option(least=0)] = None
    seeds: Annotated[int, Option(least=1)] = 3
    saves: Annotated[int | None, Option(least=1)] = None
    steps: Annotated[int | None, Option(least=1)] = None
    control: bool = False
    lose: Annotated[float | None, Option(metavar="SHARE")] = None
    budget: Annotated[float | None, Option(metavar="SHARE")] = None
    device: Annotated[str, Option(metavar="auto|cpu|cuda")] = "auto"
    threads: Annotated[int, Option(least=1)] = 1
    keep_archives: bool = False

    EXAMPLES: ClassVar = (
        "inshrink rehearse char-gpt --codec inshrinkerator --set bins=32 -o rehearsal",
        "inshrink rehearse char-gpt --max-drop 0.01 -o rehearsal",
        "inshrink rehearse regression --seeds 5 --control -o rehearsal",
        "inshrink rehearse my_task.py:MyTask --codec lossless --restores 4 --seeds 5",
        "inshrink rehearse char-gpt --lose 0.25 --budget 0.125",
    )
    INTERRUPTED: ClassVar = "what is trained is kept, and the same command continues"
    UNIT: ClassVar = "steps"

    def perform(self) -> Rehearsal | PartialRehearsal:
        """Run the missing trainings, and pair all of them."""
        from inshrink_lab.failing import Setup

        self._check()
        bounds = self.bounds.requested()
        if plugin("inshrink.tasks", self.task) is None:
            self.require_trusted(self.task.rpartition(":")[0])
        task, identity = find_task(self.task)
        numbers = {"n_steps": self.steps, "n_saves": self.saves, "n_restores": self.restores}
        setup = Setup.of(task, resolve_device(self.device), **numbers)
        chain = self.chain_config(device="cpu", threads=self.threads)
        if self.lose is not None:
            from inshrink_lab.losing import rehearse_partial

            return rehearse_partial(
                setup,
                chain,
                Path(self.output),
                lose=self.lose,
                budget=self.budget,
                seeds=self.seeds,
                progress=self.progress,
            )
        return _Runner(request=self, setup=setup, identity=identity, chain=chain, bounds=bounds).run_all()

    def _check(self) -> None:
        """Refuse invalid options and combinations of options."""
        if self.lose is None and self.budget is not None:
            raise InputError("--budget goes with --lose", remedy="add --lose SHARE, or leave it out")
        for name in ("lose", "budget"):
            share = getattr(self, name)
            if share is not None and not 0 < share < 1:
                raise InputError(f"--{name} is a share", expected="above 0, below 1", found=f"{share:g}")
        for name in ("max_drop", "max_divergence", "max_restore_cost", "control", "keep_archives"):
            if self.lose is not None and getattr(self, name) not in (None, False):
                raise InputError(
                    f"--{name.replace('_', '-')} does not go with --lose",
                    remedy="leave one of them out: --lose counts steps, not loss",
                )


rehearse = python_call(Rehearse)


@dataclass(slots=True, kw_only=True)
class _Runner:
    """Runs the trainings without a stored result, and counts the steps of all."""

    request: Rehearse
    setup: Setup
    identity: str
    chain: ChainConfig
    bounds: Bounds | None
    done: int = 0

    def run_all(self) -> Rehearsal:
        """Return the results of all trainings, stored and new."""
        from inshrink_lab.failing import isolated, require_evaluable

        pairs: list[tuple[TrainingResult, TrainingResult]] = []
        seeds = range(self.request.seeds)
        with isolated(self.request.threads):
            if self.bounds is not None:
                space_of(self.chain.codec)  # refuses a codec without anything to search
                require_evaluable(self.setup.task, self.bounds, self.setup.device)
            for seed in seeds:
                pairs.append((self.trained("uninterrupted", seed), self.trained("restored", seed)))
                self._report(pairs)
            perturbed = tuple(self.trained("perturbed", seed) for seed in seeds if self.request.control)
            return self._report(pairs, perturbed)

    def _report(
        self,
        pairs: Sequence[tuple[TrainingResult, TrainingResult]],
        perturbed: tuple[TrainingResult, ...] = (),
    ) -> Rehearsal:
        """Return the report of the pairs so far, and write it to the folder."""
        task, chain = self.setup.task, self.chain
        made = Rehearsal(
            task=task.name,
            metric=task.metric,
            direction=task.direction,
            codec=chain.codec,
            config=chain.settings(),
            optimizer=chain.optimizer,
            n_steps=self.setup.n_steps,
            n_saves=self.setup.n_saves,
            restored_at=self.setup.restored_at,
            uninterrupted=tuple(before for before, _ in pairs),
            restored=tuple(after for _, after in pairs),
            perturbed=perturbed,
            device=self.setup.device,
        )
        store = ResultStore(Path(self.request.output) / "reports", "rehearsal", dict)
        store.keep(f"{made.task}-{made.codec}", self._key() | self._restored_key(), made.to_json())
        return made

    def _key(self) -> dict[str, Any]:
        """Return all settings that every training depends on."""
        import torch

        return {
            "task": self.identity,
            "n_steps": self.setup.n_steps,
            "saved_at": list(self.setup.saved_at),
            "device": self.setup.device,
            "threads": self.request.threads,
            "torch": torch.__version__,
        }

    def _restored_key(self) -> dict[str, Any]:
        """Return the additional settings that a training with failures depends on."""
        from inshrink_core import __version__

        # As strings, because JSON cannot distinguish infinity, a waived bound, from a default.
        bounds = {name: str(limit) for name, limit in asdict(self.bounds).items()} if self.bounds else {}
        return bounds | {
            "codec": self.chain.codec,
            "config": self.chain.settings(),
            "optimizer_state": self.chain.optimizer,
            "keyframe_every": self.chain.keyframe_every,
            "bitstream": get_codec(self.chain.codec).bitstream,
            "inshrink": __version__,
            "restored_at": list(self.setup.restored_at),
        }

    def trained(self, kind: str, seed: int) -> TrainingResult:
        """Return a stored training, or train and store it.

        Parameters
        ----------
        kind
            ``uninterrupted``, ``restored`` (with failures) or ``perturbed`` (the control).
        seed
            Its seed.
        """
        from inshrink_lab import failing

        folder, label, key = Path(self.request.output), f"{kind}-seed{seed}", self._key() | {"seed": seed}
        if kind == "restored":
            key |= self._restored_key()
        elif kind == "perturbed":
            key["perturbed_at"] = list(self.setup.restored_at)
        store = ResultStore(folder / "results", "result", parse_training)
        result = store.load(label, key)
        if result is None:
            archive = folder / "archives" / f"{store.name_of(label, key)}.inshrink"
            how = (archive, self.chain, self.bounds) if kind == "restored" else ()
            train = getattr(failing, f"train_{kind}")
            made: TrainingResult = train(
                self.setup, seed, *how, lambda step: self._advance(step, f"seed {seed}, {kind}")
            )
            store.keep(label, key, asdict(made))
            if not self.request.keep_archives:
                shutil.rmtree(archive, ignore_errors=True)
            result = made
        self.done += self.setup.n_steps
        return result

    def _advance(self, step: int, detail: str) -> None:
        if self.request.progress is not None:
            total = (3 if self.request.control else 2) * self.request.seeds * self.setup.n_steps
            self.request.progress(Progress("rehearse", self.done + step, total, step, detail))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal(Report):
    """Trainings of a rehearsal, paired by seed, and its settings.

    Parameters
    ----------
    task
        Name of the task.
    metric
        Metric that is compared.
    direction
        Better direction of the metric: ``higher`` or ``lower``.
    codec
        Codec of the weights.
    config
        All settings of the codec.
    optimizer
        How optimizer state is stored: ``exact``, ``compressed``, ``compact`` or ``drop``.
    n_steps
        Number of steps of each training.
    n_saves
        Number of saves of each training.
    restored_at
        Steps with a failure after the save.
    uninterrupted, restored
        The trainings, in the order of the seeds.
    perturbed
        The control, with every weight moved by its last bit at each restore; empty without a control.
    device
        Device of the trainings: ``cpu`` or ``cuda``.
    """

    task: str
    metric: str
    direction: str
    codec: str
    config: Mapping[str, Any]
    optimizer: str
    n_steps: int
    n_saves: int
    restored_at: tuple[int, ...]
    uninterrupted: tuple[TrainingResult, ...]
    restored: tuple[TrainingResult, ...]
    perturbed: tuple[TrainingResult, ...] = ()
    device: str = "cpu"

    KEYS: ClassVar = (
        "task metric direction codec config optimizer steps=n_steps saves=n_saves restored_at seeds "
        "uninterrupted=finals restored=restored_finals excesses excess excess_half_width chance "
        "beyond_chance beyond_chance_half_width noise ratio_weights ratio_total raw_bytes archive_bytes "
        "train_seconds restored_seconds device save_seconds curves"
    )

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each pair of trainings."""
        return tuple(item.seed for item in self.uninterrupted)

    @property
    def finals(self) -> tuple[float, ...]:
        """The final metric of each uninterrupted training."""
        return tuple(item.final for item in self.uninterrupted)

    @property
    def restored_finals(self) -> tuple[float, ...]:
        """The final metric of each restored training."""
        return tuple(item.final for item in self.restored)

    @property
    def excesses(self) -> tuple[float | None, ...]:
        """Relative change of the final metric for the worse, by seed."""
        return self._drops(self.restored)

    def _drops(self, others: Sequence[TrainingResult]) -> tuple[float | None, ...]:
        direction = Direction(self.direction)
        return tuple(
            drop(before.final, after.final, direction)
            for before, after in zip(self.uninterrupted, others, strict=bool(others))
        )

    @property
    def excess(self) -> float | None:
        """Mean of `excesses`; None if one is unknown."""
        return _mean(self.excesses)

    @property
    def excess_half_width(self) -> float | None:
        """Half-width of the 95 % interval of `excess`, t·sd/√n; None for a single seed."""
        return half_width(_all_known(self.excesses))

    @property
    def chance(self) -> float | None:
        """Mean excess of the control, with weights moved by their last bits; None without a control."""
        return _mean(self._drops(self.perturbed))

    @property
    def beyond_chance(self) -> float | None:
        """Mean excess of restored trainings over the control, by pairs; None without a control."""
        return _mean(self._beyond_chance())

    @property
    def beyond_chance_half_width(self) -> float | None:
        """Half-width of the 95 % interval of `beyond_chance`, t·sd/√n; None for a single seed."""
        return half_width(_all_known(self._beyond_chance()))

    def _beyond_chance(self) -> tuple[float | None, ...]:
        pairs = zip(self.excesses, self._drops(self.perturbed), strict=bool(self.perturbed))
        return tuple(None if item is None or other is None else item - other for item, other in pairs)

    @property
    def noise(self) -> float | None:
        """Relative standard deviation of the uninterrupted seeds' final metric; None for a single seed."""
        finals = _all_known(self.finals)
        if len(finals) < 2 or not (mean := abs(statistics.fmean(finals))):
            return None
        return statistics.stdev(finals) / mean

    @property
    def ratio_weights(self) -> float | None:
        """Raw bytes over stored bytes of weights and buffers, including headers and indexes."""
        return ratio(self._sum("raw_weights"), self._sum("weights_nbytes"))

    @property
    def ratio_total(self) -> float | None:
        """Raw bytes over stored bytes of everything; None for an empty archive."""
        return ratio(self.raw_bytes, self.archive_bytes)

    def _sum(self, name: str) -> Any:
        return sum(getattr(result, name) for result in self.restored)

    @property
    def raw_bytes(self) -> int:
        """Uncompressed bytes of the tensors."""
        return int(self._sum("raw_total"))

    @property
    def archive_bytes(self) -> int:
        """Bytes of the frames and the manifest."""
        return int(self._sum("nbytes"))

    @property
    def train_seconds(self) -> float:
        """Wall time of the uninterrupted trainings."""
        return sum(result.seconds for result in self.uninterrupted)

    @property
    def restored_seconds(self) -> float:
        """Wall time of the restored trainings."""
        return float(self._sum("seconds"))

    @property
    def save_seconds(self) -> float:
        """Time that the restored trainings waited for their archives."""
        return float(self._sum("save_seconds"))

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink rehearse --json``.

        Returns
        -------
        bounds : Bounds
            Limits asked for. Without bounds this key, ``evaluations``, ``decided`` and ``max_…`` are absent.
        max_drop, max_divergence, max_restore_cost : float
            Largest value of any step.
        evaluations : int
            States evaluated; originals are not counted.
        frames : [object]
            Saves of all restored trainings; absent without bounds.
        frames[].seed : int
            Seed.
        frames[].step : int
            Training step.
        frames[].config, frames[].drop, frames[].divergence, frames[].restore_cost : StepQuality?
        frames[].discriminative, frames[].exact, frames[].side : StepQuality?
        """
        return self._promised() | Report.to_json(self)

    def shown(self) -> Iterator[Part]:
        """Yield a row per seed, then the summary."""
        pairs = zip(self.uninterrupted, self.restored, self.excesses, strict=True)
        rows = [(before.seed, before.final, after.final, excess) for before, after, excess in pairs]
        yield Table({"seed": str, "uninterrupted": plain, "restored": plain, "excess": percent}, rows)
        yield "task", f"{self.task}, {self.n_steps} steps, {self.n_saves} saves"
        yield "metric", f"{self.metric}, {self.direction} is better"
        yield "codec", f"{self.codec}, optimizer {self.optimizer}"
        yield "restored at", steps_in_short(self.restored_at)
        yield "excess", _with_half_width(self.excess, self.excess_half_width)
        if self.chance is not None:
            yield "excess by chance", percent(self.chance)
            yield "beyond chance", _with_half_width(self.beyond_chance, self.beyond_chance_half_width)
        yield "noise of the seeds", percent(self.noise).lstrip("+")
        sizes = f"{size(self.raw_bytes)} in {size(self.archive_bytes)}"
        yield "ratio of everything", f"{ratio_text(self.ratio_total)}  ({sizes})"
        yield "ratio of the weights", ratio_text(self.ratio_weights)
        document = self.to_json()
        for key in ("bounds", "max_drop", "max_divergence", "max_restore_cost", "evaluations"):
            yield from parts_of(key, document.get(key))
        restored = f"{duration(self.restored_seconds)} restored, {duration(self.save_seconds)} of it saving"
        yield "time", f"{duration(self.train_seconds)} uninterrupted, {restored} (on {self.device})"

    @property
    def curves(self) -> list[dict[str, Any]]:
        """Curves of each pair of trainings.

        Returns
        -------
        seed : int
            Seed.
        steps : [int]
            Steps of the saves.
        uninterrupted : [float]
            Metric at each save of the uninterrupted training.
        restored : [float]
            Metric at each save of the restored training, before a failure.
        uninterrupted_train_loss : [float]
            Mean training loss since the previous save, uninterrupted.
        restored_train_loss : [float]
            Mean training loss since the previous save, restored.
        """
        return [
            {
                "seed": before.seed,
                "steps": before.steps,
                "uninterrupted": before.metrics,
                "restored": after.metrics,
                "uninterrupted_train_loss": before.train_losses,
                "restored_train_loss": after.train_losses,
            }
            for before, after in zip(self.uninterrupted, self.restored, strict=True)
        ]

    def _promised(self) -> dict[str, Any]:
        """Return the bounds on every save, over all trainings; empty without bounds."""
        records = [(row.seed, row.bound_record) for row in self.restored if row.bound_record is not None]
        if not records:
            return {}
        frames = [{"seed": seed, **frame} for seed, record in records for frame in record["frames"]]
        return {
            "bounds": records[0][1]["bounds"],
            "max_drop": _largest([frame["drop"] for frame in frames]),
            "max_divergence": _largest([frame["divergence"] for frame in frames]),
            "max_restore_cost": _largest([frame.get("restore_cost") for frame in frames]),
            "evaluations": sum(record["evaluations"] for _, record in records),
            "frames": frames,
        }


def _with_half_width(mean: float | None, width: float | None) -> str:
    if width is None:
        return f"{percent(mean)}  (a single seed shows little)"
    return f"{percent(mean)} ± {percent(width).lstrip('+')}  (95 %)"


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _all_known(values: Sequence[float | None]) -> list[float]:
    """Return the values, or none if one is missing or not finite: a mean of the rest would mislead."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if len(known) == len(values) else []


def _mean(values: Sequence[float | None]) -> float | None:
    known = _all_known(values)
    return statistics.fmean(known) if known else None


def half_width(values: Sequence[float]) -> float | None:
    """Return the half-width of the 95 % interval of a mean, ``t · sd / √n``; None below two values.

    Parameters
    ----------
    values
        Independent measurements.

    Examples
    --------
    >>> round(half_width([1.0, 2.0, 3.0]), 4)
    2.4843
    """
    if len(values) < 2:
        return None
    freedom, z = len(values) - 1, _Z_975
    if freedom <= len(_T_975):
        quantile = _T_975[freedom - 1]
    else:  # Abramowitz & Stegun 26.7.5, two terms of the expansion in 1/ν
        quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
