"""Averages of several steps as a new step: uniform, exponential, or with searched coefficients.

Late checkpoints of a training surround a point that is better than each of them. A search for the
coefficients of a linear combination, including negative ones, finds still better points (LCSC, "Linear
Combination of Saved Checkpoints", arXiv 2404.02241).
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, ClassVar, Final

import numpy as np

from inshrink_core.chain import Archive
from inshrink_core.chain.sizes import step_needs
from inshrink_core.checkpoint import (
    FLOATS,
    MODEL_ROLES,
    Checkpoint,
    FileLayout,
    TensorRole,
    TensorsInMemory,
    TensorSpec,
)
from inshrink_core.errors import ExistsError, InputError, NotFiniteError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.progress import Progress
from inshrink_core.execution.resources import Limits
from inshrink_core.formats import Run
from inshrink_core.formats.write import LAYOUTS, restorable_layout, write_checkpoint, write_files
from inshrink_core.metrics import Direction
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import Opening, PathLike, RunOrArchive, Stepping, steps_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.frame import FrameInfo

__all__ = ["REPORT_FILE", "Average", "AverageReport", "Evaluated", "average", "evolve"]

REPORT_FILE: Final = "average.json"
"""File next to the checkpoint with the report and the coefficients."""

_WEIGHTS: Final = ("uniform", "ema")
_BUDGET: Final = 600
_N_PARENTS: Final = 12
_LARGEST_CHANGE: Final = 0.3
_SMALLEST_CHANGE: Final = 0.005
_ACCUMULATOR_NBYTES: Final = 16
"""Bytes per value of a float64 sum and the product that is added to it."""

_SEARCHED_NBYTES: Final = 4
"""Bytes per value of one step during a search: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluator's results for one combination.

    Parameters
    ----------
    name
        ``last`` (the last step unchanged), ``uniform``, ``ema``, ``search`` or ``given``.
    value
        Metric on the data of the search.
    """

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageReport(Report):
    """Result of `average`; also written next to the checkpoint.

    Parameters
    ----------
    source
        Run or archive of the steps.
    paths
        Paths written.
    weights
        ``uniform``, ``ema``, ``search`` or, from Python, ``given``.
    steps
        Training steps, ascending.
    coefficients
        Coefficient of each step.
    metric
        Metric that is compared.
    direction
        Better direction of the metric: ``higher`` or ``lower``.
    judged
        Combinations evaluated.
    n_candidates
        Number of coefficient vectors that were tried.
    n_averaged
        Number of averaged weight elements.
    from_last
        Number of tensors copied from the last step, by role, because an average of them has no meaning.
    seconds
        Wall time.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    """

    source: str
    paths: tuple[Path, ...]
    weights: str
    steps: tuple[int, ...]
    coefficients: tuple[float, ...]
    metric: str | None = None
    direction: str | None = None
    judged: tuple[Evaluated, ...] = ()
    n_candidates: int = 0
    n_averaged: int
    from_last: Mapping[str, int]
    seconds: float = 0.0
    device: str = "cpu"

    KEYS: ClassVar = (
        "source files=paths weights steps coefficients metric direction judged n_candidates n_averaged "
        "from_last seconds device"
    )


@dataclass(frozen=True)
class Average(Stepping, EvaluatorRequest, Opening, Request[AverageReport]):
    """Write the average of several steps as a step in the run's own format.

    Parameters
    ----------
    source
        A run or an archive.
    output
        Folder to write the files of the last step with other weights, and average.json.
    weights
        uniform: equal weights; ema: larger weights for later steps. In Python also a list of coefficients.
    decay
        Decay of ema, per step, also as the baseline of a search.
    search
        Search for the coefficients with the best metric; they sum to 1.
    budget
        Maximum number of candidates.
    seed
        Seed of random choices.
    layout
        File layout to write; same: that of the last step.
    force
        Overwrite existing files.

    Raises
    ------
    InputError
        Fewer than two steps, coefficients that do not match them, a tensor that a step lacks, a search
        without an evaluator, or a layout that cannot store the step.
    NotFoundError
        A step does not exist.
    ExistsError
        The folder is not empty and `force` is not set.
    EvaluatorError
        The evaluator failed.
    TooLargeError
        Not enough memory or disk space is available.

    Notes
    -----
    Floating-point weights are summed in float64, ``w = Σ c_t w_t`` with coefficients c and steps t, and
    stored in their dtype. Everything else comes from the last step: buffers, including the running statistics
    of batch normalisation, integers and the optimizer. Every frame is decoded once, tensor by tensor, so the
    largest tensor bounds the memory: 16 bytes per value besides its decoding. A search holds the weights of
    all steps as float32, n + 1 times the model for n steps. A cancelled search writes nothing.

    Examples
    --------
    >>> import inshrink_core, tempfile
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.verbs.average(run, tempfile.mkdtemp(), steps=run.steps[-4:])
    >>> report.coefficients
    (0.25, 0.25, 0.25, 0.25)
    """

    source: RunOrArchive
    output: Annotated[PathLike, Option(("--output", "-o"), metavar="DIR")]
    _: KW_ONLY
    weights: Annotated[str | Sequence[float], Option(metavar="uniform|ema")] = "uniform"
    decay: float = 0.9
    search: bool = False
    budget: Annotated[int | None, Option(least=1)] = None
    seed: int = 0
    layout: Annotated[str, Option(("--format",), metavar="same|safetensors|torch")] = "same"
    force: bool = False

    EXAMPLES: ClassVar = (
        "inshrink average digits.inshrink --steps 1600: -o averaged/",
        "inshrink average runs/digits --search --evaluator judge.py:evaluate -o best/",
    )
    UNIT: ClassVar = "steps"

    def perform(self) -> AverageReport:
        """Average the steps, and write the result."""
        begun = time.perf_counter()
        self._check()
        limits = self.limits()
        opened = self.opened(self.source)
        steps = steps_of(opened, self.steps)
        chain = _Chain(opened, opened.steps if steps is None else steps, limits)
        target = Path(self.output)
        if target.is_dir() and any(target.iterdir()) and not self.force:
            raise ExistsError(
                "the folder is not empty", where=str(target), remedy="add --force to write there"
            )
        coefficients, judge = self._judged(chain, limits)
        made = replace(chain.last, source=_Combined(chain, coefficients))
        report = AverageReport(
            source=str(opened.path),
            paths=(),
            weights=self._kind,
            steps=chain.steps,
            coefficients=coefficients,
            metric=judge.metric if judge else None,
            direction=judge.direction.value if judge else None,
            judged=judge.rows if judge else (),
            n_candidates=self._n_candidates if self.search else 0,
            n_averaged=sum(spec.numel for spec in chain.averaged.values()),
            from_last=chain.from_last(),
            device=opened.device if isinstance(opened, Archive) else "cpu",
        )
        paths = write_checkpoint(
            made,
            target,
            layout=restorable_layout(made) if self.layout == "same" else self.layout,
            force=self.force,
            limits=limits,
            progress=partial(self._report_written, chain, set()),
        )
        report = replace(report, paths=paths, seconds=time.perf_counter() - begun)
        write_files(target, {REPORT_FILE: partial(_write_report, report=report)}, force=self.force)
        return report

    @property
    def _kind(self) -> str:
        """Name of the kind of coefficients."""
        if self.search:
            return "search"
        return self.weights if isinstance(self.weights, str) else "given"

    @property
    def _n_candidates(self) -> int:
        return _BUDGET if self.budget is None else self.budget

    def _check(self) -> None:
        """Refuse invalid options and combinations of options."""
        for name, value, known in (("weights", self.weights, _WEIGHTS), ("format", self.layout, LAYOUTS)):
            if isinstance(value, str) and value not in known:
                raise InputError(f"--{name} {value}", remedy=f"choose one of {', '.join(known)}")
        if self.search and self.weights != "uniform":
            raise InputError("--search and --weights exclude each other", remedy="give one of them")
        if self.budget is not None and not self.search:
            raise InputError("--budget goes with --search", remedy="add --search")
        if not 0 < self.decay < 1:
            raise InputError(f"a decay of {self.decay:g}", expected="more than 0, less than 1")

    def _judged(self, chain: _Chain, limits: Limits) -> tuple[tuple[float, ...], _Scorer | None]:
        """Return the coefficients, searched if requested, and the evaluator, if an evaluator is given."""
        n, kind = len(chain.steps), self._kind
        rows: dict[str, Sequence[float]] = {
            "last": uniform(n, 1),
            "uniform": uniform(n),
            "ema": exponential(n, self.decay),
        }
        if kind == "given":
            rows[kind] = _checked(self.weights, chain.steps)
        if self.evaluator is None and not self.search:
            return tuple(rows[kind]), None
        with ExitStack() as stack:
            judge = _Scorer(chain, self, stack, limits)
            if self.search:
                starts = [*rows.values(), *(uniform(n, some) for some in (2, 3, 5, 8))]
                report = partial(self._report_search, judge, chain.steps[-1])
                rows[kind] = evolve(
                    judge.cost, starts, budget=self._n_candidates, seed=self.seed, report=report
                )
            judge.rows = tuple(judge.row(name, coefficients) for name, coefficients in rows.items())
        return tuple(rows[kind]), judge

    def _report_search(self, judge: _Scorer, step: int, done: int, total: int, least: float) -> None:
        if self.progress is not None:
            best, metric = judge.direction.cost(least), judge.metric
            detail = f"{metric} {best:.6g}"
            self.progress(Progress("search", done, total, step, detail, {metric: best}))

    def _report_written(self, chain: _Chain, written: set[str], key: str) -> None:
        written.add(key)
        if self.progress is not None:
            total = len(chain.last.specs)
            self.progress(Progress("average", len(written), total, chain.steps[-1], key))


average = python_call(Average)


def uniform(n: int, last: int | None = None) -> tuple[float, ...]:
    """Return equal coefficients for all steps, or for the last few.

    Examples
    --------
    >>> uniform(4, 2)
    (0.0, 0.0, 0.5, 0.5)
    """
    present = min(n, last or n)
    return (0.0,) * (n - present) + (1 / present,) * present


def exponential(n: int, decay: float) -> tuple[float, ...]:
    """Return the coefficients of an exponential moving average that starts at the first step.

    Examples
    --------
    >>> exponential(3, 0.5)
    (0.25, 0.25, 0.5)
    """
    return (decay ** (n - 1), *((1 - decay) * decay ** (n - 1 - i) for i in range(1, n)))


def _checked(given: str | Sequence[float], steps: Sequence[int]) -> tuple[float, ...]:
    """Return the user's coefficients after checking them."""
    coefficients = tuple(map(float, given))
    if len(coefficients) != len(steps) or not all(map(math.isfinite, coefficients)):
        raise InputError(
            "the coefficients do not match the steps",
            expected=f"{len(steps)} numbers",
            found=f"{len(coefficients)}",
        )
    return coefficients


def evolve(
    cost: Callable[[Sequence[float]], float],
    starts: Sequence[Sequence[float]],
    *,
    budget: int,
    seed: int = 0,
    report: Callable[[int, int, float], None] | None = None,
) -> tuple[float, ...]:
    """Return the coefficients of least cost that an evolutionary search finds; they sum to 1.

    Parameters
    ----------
    cost
        Function of coefficients to minimize; NaN and inf never win.
    starts
        First candidates, all of equal length.
    budget
        Number of evaluations of the cost, including the starts; all starts are tried in any case.
    seed
        Seed of the random numbers: equal costs give equal coefficients.
    report
        Callback with the number of tried candidates, the budget, and the least cost so far.

    Notes
    -----
    A child takes each coefficient from one of two parents among the 12 best, or interpolates or extrapolates
    them. Some coefficients get normal noise of random width, and a random one restores the sum of 1. As in
    LCSC (arXiv 2404.02241), coefficients may be negative.

    Examples
    --------
    >>> found = evolve(lambda c: (c[0] + 0.5) ** 2, [(1.0, 0.0), (0.5, 0.5)], budget=300)
    >>> abs(found[0] + 0.5) < 0.05, abs(sum(found) - 1) < 1e-12
    (True, True)
    """
    dice = np.random.default_rng(seed)
    pool: list[tuple[float, int, NDArray[np.float64]]] = []
    most = max(budget, len(starts))
    for number in range(most):
        child = np.asarray(starts[number]) if number < len(starts) else _child(dice, [row[2] for row in pool])
        value = cost(tuple(child.tolist()))
        pool.append((value if math.isfinite(value) else math.inf, number, child))
        pool.sort(key=lambda row: row[:2])
        del pool[_N_PARENTS:]
        if report is not None:
            report(number + 1, most, pool[0][0])
    return tuple(pool[0][2].tolist())


def _child(dice: np.random.Generator, parents: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    item, other = (parents[int(dice.integers(len(parents)))] for _ in range(2))
    n = len(item)
    if dice.random() < 0.5:
        child = np.where(dice.random(n) < 0.5, item, other)
    else:
        child = item + dice.uniform(-0.5, 1.5) * (other - item)
    width = math.exp(dice.uniform(math.log(_SMALLEST_CHANGE), math.log(_LARGEST_CHANGE)))
    moved = dice.random(n) < max(1 / n, dice.random() / 2)
    child = child + np.where(moved, dice.normal(0, width, n), 0)
    child[int(dice.integers(n))] += 1 - child.sum()
    return child


class _Chain:
    """Steps of a run or an archive, read in order and tensor by tensor."""

    def __init__(self, source: Run | Archive, steps: Iterable[int], limits: Limits) -> None:
        self.source = source
        self.steps = tuple(sorted(set(steps)))
        if len(self.steps) < 2:
            raise InputError("an average of fewer than two steps", where=str(source.path))
        self._infos: tuple[FrameInfo, ...] = ()
        if isinstance(source, Archive):
            self._infos = tuple(source.reader.find(step) for step in self.steps)
            self.checkpoints = tuple(map(source.checkpoint, self._infos))
        else:
            self.checkpoints = tuple(source[step] for step in self.steps)
        self.last = self.checkpoints[-1]
        self.averaged = {
            spec.key: spec
            for spec in self.last.specs
            if spec.role is TensorRole.WEIGHT and spec.dtype in FLOATS and spec.numel
        }
        for checkpoint in self.checkpoints[:-1]:
            self._require_alike(checkpoint)
        self._require_memory(limits)

    def _require_alike(self, checkpoint: Checkpoint) -> None:
        for key, spec in self.averaged.items():
            found = checkpoint.spec(key) if key in checkpoint else None
            if found is None or (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise InputError(
                    f"tensor '{key}' differs in shape or dtype between steps",
                    where=f"step {checkpoint.step}",
                    expected=f"{spec.dtype} {spec.shape}",
                    found="none" if found is None else f"{found.dtype} {found.shape}",
                )

    def _require_memory(self, limits: Limits) -> None:
        largest = max((spec.numel for spec in self.averaged.values()), default=0)
        needed = _ACCUMULATOR_NBYTES * largest
        if isinstance(self.source, Archive):
            needed += max(step_needs(self.source, info).memory_in_turn for info in self._infos)
        limits.require_memory(needed, "averaging", self.last.origin)

    def values(self, key: str) -> Iterator[Tensor]:
        """Yield a weight of each step; each block of an archive is decoded once."""
        if not isinstance(self.source, Archive):
            yield from (checkpoint[key] for checkpoint in self.checkpoints)
            return
        view = self.source.sequential()
        yield from (view.decode(info, key)[0].cpu() for info in self._infos)

    def from_last(self) -> dict[str, int]:
        """Return the number of tensors copied from the last step, by role."""
        return dict(Counter(spec.role.value for spec in self.last.specs if spec.key not in self.averaged))


@dataclass(frozen=True)
class _Combined:
    """A `TensorSource` of a step whose weights are a linear combination of several steps."""

    chain: _Chain
    coefficients: Sequence[float]

    def read(self, spec: TensorSpec) -> Tensor:
        """Return the combination of a weight, or another tensor of the last step."""
        if spec.key not in self.chain.averaged:
            return self.chain.last.source.read(spec)
        import torch

        total = torch.zeros(spec.shape, dtype=torch.float64)
        for coefficient, value in zip(self.coefficients, self.chain.values(spec.key), strict=True):
            if coefficient:
                total += coefficient * value.double()
        return total.to(getattr(torch, spec.dtype))

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the last step's content besides its tensors."""
        return self.chain.last.source.skeleton(layout)


class _Scorer:
    """Evaluators of combinations, and the weights of all steps in memory."""

    def __init__(self, chain: _Chain, request: Average, stack: ExitStack, limits: Limits) -> None:
        import torch

        source = chain.source
        run = source if isinstance(source, Run) else None
        self._evaluator = stack.enter_context(request.resolve(run))
        n_values = sum(spec.numel for spec in chain.averaged.values())
        needed = _SEARCHED_NBYTES * n_values * (len(chain.steps) + 1) + chain.last.raw_bytes()
        limits.require_memory(needed, "holding the weights of all steps", chain.last.origin)
        self._last = chain.last
        self._state = {s.key: chain.last[s.key] for s in chain.last.specs if s.role in MODEL_ROLES}
        self._steps = {
            key: torch.stack([value.reshape(-1).float() for value in chain.values(key)])
            for key in chain.averaged
        }
        self._specs = chain.averaged
        self._values: dict[tuple[float, ...], float] = {}
        self.metric, self.direction = "", Direction.LOWER
        self.rows: tuple[Evaluated, ...] = ()

    def _combined(self, coefficients: Sequence[float]) -> Checkpoint:
        import torch

        factors = torch.tensor(coefficients, dtype=torch.float32)
        made = {
            key: (factors @ self._steps[key]).reshape(spec.shape).to(getattr(torch, spec.dtype))
            for key, spec in self._specs.items()
        }
        state = self._state | made
        specs = tuple(spec for spec in self._last.specs if spec.key in state)
        return replace(self._last, specs=specs, files=(), source=TensorsInMemory(state))

    def _value(self, coefficients: Sequence[float]) -> float:
        asked = tuple(coefficients)
        if asked not in self._values:
            found = self._evaluator.evaluate(self._combined(coefficients))
            self._values[asked] = found.value
            self.metric, self.direction = found.metric, found.direction
        return self._values[asked]

    def cost(self, coefficients: Sequence[float]) -> float:
        """Return the metric of a combination, negated if higher is better."""
        try:
            value = self._value(coefficients)
        except NotFiniteError:
            return math.inf
        return self.direction.cost(value)

    def row(self, name: str, coefficients: Sequence[float]) -> Evaluated:
        """Return the evaluators' results for a combination."""
        return Evaluated(name=name, value=self._value(coefficients))


def _write_report(file: IO[bytes], report: AverageReport) -> None:
    file.write(json.dumps(report.to_json(), indent=2).encode() + b"\n")
