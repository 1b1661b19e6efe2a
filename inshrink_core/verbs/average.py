"""The average of several steps as a step of its own: uniform, exponential, or with coefficients searched for.

Late checkpoints of a training lie around a point that is better than any of them. A search for the
coefficients of a linear combination, negative ones allowed, finds better points yet (LCSC, "Linear
Combination of Saved Checkpoints", arXiv 2404.02241).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Final

import numpy as np

from inshrink_core.chain import Archive, step_needs
from inshrink_core.checkpoint import FLOATS, Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.errors import ExistsError, InputError, NotFiniteError
from inshrink_core.evaluate import Evaluator, EvaluatorRequest
from inshrink_core.execution import Limits
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.formats import Run
from inshrink_core.formats.write import LAYOUTS, restorable_layout, write_checkpoint, write_files
from inshrink_core.metrics import Direction
from inshrink_core.report import Report
from inshrink_core.verbs.restore import open_any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.frame import FrameInfo

__all__ = ["DEFAULT_BUDGET", "DEFAULT_DECAY", "REPORT_FILE", "AverageReport", "Judged", "average", "evolve"]

DEFAULT_DECAY: Final = 0.9
DEFAULT_BUDGET: Final = 600
REPORT_FILE: Final = "average.json"
"""What is written beside the checkpoint: the report, with the coefficients."""

_WEIGHTS: Final = ("uniform", "ema", "search")
_N_PARENTS: Final = 12
_LARGEST_CHANGE: Final = 0.3
_SMALLEST_CHANGE: Final = 0.005
_ACCUMULATOR_NBYTES: Final = 16
"""A value that is summed in float64, and the product that is added."""

_SEARCHED_NBYTES: Final = 4
"""A value of one step while coefficients are searched for: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What an evaluator says of one combination.

    Parameters
    ----------
    name
        ``last`` (the last step as it is), ``uniform``, ``ema`` or ``search``.
    value
        The metric on the data that coefficients are searched on.
    held_out
        On other data; None without a second evaluator.
    """

    name: str
    value: float
    held_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageReport(Report):
    """What `average` made, and of what; also written beside the checkpoint.

    Parameters
    ----------
    source, paths
        What was averaged, and the files that were made.
    weights
        ``uniform``, ``ema``, ``search`` or ``given``.
    steps, coefficients
        The steps, ascending, and the coefficient of each.
    metric, direction
        By which combinations were judged, and whether ``higher`` or ``lower`` is better; None if none was.
    judged
        Baselines and the combination itself.
    n_candidates
        Coefficients that were tried.
    n_averaged
        Elements of the weights that are averages.
    from_last
        Tensors that are the last step's, by role: no average of them means anything.
    seconds
        Wall time.
    device
        Where an archive was decoded.
    """

    source: str
    paths: tuple[Path, ...]
    weights: str
    steps: tuple[int, ...]
    coefficients: tuple[float, ...]
    metric: str | None = None
    direction: str | None = None
    judged: tuple[Judged, ...] = ()
    n_candidates: int = 0
    n_averaged: int
    from_last: Mapping[str, int]
    seconds: float = 0.0
    device: str = "cpu"

    DOCUMENT: ClassVar = (
        "source files=paths weights steps coefficients metric direction judged n_candidates n_averaged "
        "from_last seconds device"
    )


def average(
    source: Run | Archive | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    steps: Iterable[int] | None = None,
    weights: str | Sequence[float] = "uniform",
    decay: float = DEFAULT_DECAY,
    evaluator: str | None = None,
    held_out: str | None = None,
    metric: str | None = None,
    direction: str | None = None,
    trust_run: bool = False,
    timeout: float = 600.0,
    budget: int = DEFAULT_BUDGET,
    seed: int = 0,
    layout: str = "same",
    force: bool = False,
    device: str = "auto",
    max_memory: int | None = None,
    progress: OnProgress | None = None,
) -> AverageReport:
    """Write a linear combination of the weights of several steps as a checkpoint.

    Parameters
    ----------
    source
        A run or an archive, or the path of one.
    output
        The folder to write into: the files of the last step with other weights, and ``average.json``.
    steps
        The steps; by default all.
    weights
        ``uniform``; ``ema``, an exponential moving average over the steps; ``search``, coefficients that
        sum to 1 and that an evolution finds; or the coefficients themselves.
    decay
        Of ``ema``, from one step to the next; also of the baseline that a search is compared with.
    evaluator, metric, direction, trust_run, timeout
        What judges combinations, as for `inshrink_core.compare`. A search needs one.
    held_out
        An evaluator on other data, which judges the result and the baselines, and decides nothing.
    budget, seed
        Combinations that a search tries, and of its random numbers.
    layout
        ``same`` as the last step, ``safetensors`` or ``torch``.
    force
        Write into a folder that is not empty.
    device
        Where an archive is decoded: ``auto``, ``cpu`` or ``cuda``. The values are the same.
    max_memory
        Bytes that may be taken; by default what is available.
    progress
        Called after each candidate and each tensor; raising cancels, and nothing is written.

    Raises
    ------
    InputError
        Fewer than two steps, coefficients that do not go with them, a tensor that some step has not, no
        evaluator for a search, or a layout that cannot hold the step.
    NotFoundError
        A step is not there.
    ExistsError
        The folder is not empty and `force` is not set.
    EvaluatorError
        The evaluator failed.
    TooLargeError
        It would take more memory than that.

    Notes
    -----
    Floating-point weights are summed in float64 and stored in their own dtype. Everything else is the
    last step's: buffers, running statistics of batch normalisation included, integers, the optimizer.
    Every frame is decoded once, tensor by tensor: memory is bounded by the largest tensor, at 16 bytes a
    value beside what its decoding takes. A search holds the weights of all steps as float32, n + 1 times
    the model for n steps.

    Examples
    --------
    >>> import inshrink_core, tempfile
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.verbs.average(run, tempfile.mkdtemp(), steps=run.steps[-4:])
    >>> report.coefficients
    (0.25, 0.25, 0.25, 0.25)
    """
    begun = time.perf_counter()
    limits = Limits(max_memory=max_memory)
    opened = source if isinstance(source, Run | Archive) else open_any(source)
    if isinstance(opened, Archive):
        opened = opened.limited(limits).on(device)
    kind = weights if isinstance(weights, str) else "given"
    if kind not in (*_WEIGHTS, "given"):
        raise InputError(f"weights '{kind}'", remedy=f"choose one of {', '.join(_WEIGHTS)}")
    if layout not in LAYOUTS:
        raise InputError(f"layout '{layout}'", remedy=f"choose one of {', '.join(LAYOUTS)}")
    if not 0 < decay < 1:
        raise InputError(f"a decay of {decay:g}", expected="more than 0, less than 1")
    chain = _Chain(opened, opened.steps if steps is None else steps, limits)
    target = Path(output)
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ExistsError("the folder is not empty", where=str(target), remedy="add --force to write there")
    baselines = {
        "last": uniform(len(chain.steps), 1),
        "uniform": uniform(len(chain.steps)),
        "ema": exponential(len(chain.steps), decay),
    }
    chosen = baselines.get(kind)
    if chosen is None:
        chosen = () if kind == "search" else _checked(weights, chain.steps)
    judged: tuple[Judged, ...] = ()
    judge: _Judge | None = None
    if evaluator is not None or kind == "search":
        request = EvaluatorRequest(
            evaluator=evaluator, metric=metric, direction=direction, trust_run=trust_run, timeout=timeout
        )
        with ExitStack() as stack:
            judge = _Judge(chain, request, held_out, stack, limits)
            if kind == "search":
                starts = [*baselines.values(), *(uniform(len(chain.steps), n) for n in (2, 3, 5, 8))]
                told = _told(progress, chain.steps[-1], judge)
                chosen = evolve(judge.cost, starts, budget=budget, seed=seed, told=told)
            rows = baselines | {kind: chosen}
            judged = tuple(judge.row(name, coefficients) for name, coefficients in rows.items())
    elif held_out is not None:
        raise InputError("a held-out evaluator without an evaluator", remedy="give --evaluator too")
    made = chain.combined(chosen)
    written_as = restorable_layout(made) if layout == "same" else layout
    report = AverageReport(
        source=str(opened.path),
        paths=(),
        weights=kind,
        steps=chain.steps,
        coefficients=tuple(chosen),
        metric=judge.metric if judge else None,
        direction=judge.direction.value if judge else None,
        judged=judged,
        n_candidates=budget if kind == "search" else 0,
        n_averaged=sum(spec.numel for spec in chain.averaged.values()),
        from_last=chain.from_last(),
        device=opened.device if isinstance(opened, Archive) else "cpu",
    )
    paths = write_checkpoint(
        made,
        target,
        layout=written_as,
        force=force,
        limits=limits,
        progress=_counted(progress, chain) if progress else None,
    )
    report = replace(report, paths=paths, seconds=time.perf_counter() - begun)
    write_files(target, {REPORT_FILE: partial(_write_report, report=report)}, force=force)
    return report


def uniform(n: int, last: int | None = None) -> tuple[float, ...]:
    """Return equal coefficients, of all steps or of some last ones.

    Examples
    --------
    >>> uniform(4, 2)
    (0.0, 0.0, 0.5, 0.5)
    """
    held = min(n, last or n)
    return (0.0,) * (n - held) + (1 / held,) * held


def exponential(n: int, decay: float) -> tuple[float, ...]:
    """Return the coefficients of an exponential moving average that begins at the first step.

    Examples
    --------
    >>> exponential(3, 0.5)
    (0.25, 0.25, 0.5)
    """
    return (decay ** (n - 1), *((1 - decay) * decay ** (n - 1 - i) for i in range(1, n)))


def _checked(given: str | Sequence[float], steps: Sequence[int]) -> tuple[float, ...]:
    """Return coefficients that the user gave."""
    coefficients = tuple(map(float, given))
    if len(coefficients) != len(steps) or not all(map(math.isfinite, coefficients)):
        raise InputError(
            "coefficients that do not go with the steps",
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
    told: Callable[[int, int, float], None] | None = None,
) -> tuple[float, ...]:
    """Return the coefficients of the least cost that an evolution finds; they sum to 1.

    Parameters
    ----------
    cost
        Of coefficients, less is better; NaN and inf are no better than anything.
    starts
        What is tried first; all of one length.
    budget
        How often the cost is asked for, the starts included; at least the starts are tried.
    seed
        Of the random numbers: the same costs give the same coefficients.
    told
        Called with the number tried, of how many, and the least cost so far.

    Notes
    -----
    A child takes each coefficient from one of two of the 12 best, or lies between or beyond them. Some of
    its coefficients are moved by a normal of random width, and one that is drawn makes up the sum. As in
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
        if told is not None:
            told(number + 1, most, pool[0][0])
    return tuple(pool[0][2].tolist())


def _child(dice: np.random.Generator, parents: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    one, other = (parents[int(dice.integers(len(parents)))] for _ in range(2))
    n = len(one)
    if dice.random() < 0.5:
        child = np.where(dice.random(n) < 0.5, one, other)
    else:
        child = one + dice.uniform(-0.5, 1.5) * (other - one)
    width = math.exp(dice.uniform(math.log(_SMALLEST_CHANGE), math.log(_LARGEST_CHANGE)))
    moved = dice.random(n) < max(1 / n, dice.random() / 2)
    child = child + np.where(moved, dice.normal(0, width, n), 0)
    child[int(dice.integers(n))] += 1 - child.sum()
    return child


class _Chain:
    """Some steps of a run or an archive, to be read one after the other, tensor by tensor."""

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
                    f"tensor '{key}' is not the same thing at every step",
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
        """Yield a weight of each step; of an archive, each of its blocks is decoded once."""
        if not isinstance(self.source, Archive):
            yield from (checkpoint[key] for checkpoint in self.checkpoints)
            return
        view = self.source.sequential()
        yield from (view.decode(info, key)[0].cpu() for info in self._infos)

    def from_last(self) -> dict[str, int]:
        """Return how many tensors are the last step's, by role."""
        counts: dict[str, int] = {}
        for spec in self.last.specs:
            if spec.key not in self.averaged:
                counts[spec.role.value] = counts.get(spec.role.value, 0) + 1
        return counts

    def combined(self, coefficients: Sequence[float]) -> Checkpoint:
        """Return the last step with weights that are a combination; they are summed when asked for."""
        return replace(self.last, source=_Combined(self, coefficients))


@dataclass(frozen=True)
class _Combined:
    """A `TensorSource` of a step whose weights are a combination of several."""

    chain: _Chain
    coefficients: Sequence[float]

    def read(self, spec: TensorSpec) -> Tensor:
        """Return the combination of a weight; another tensor as the last step has it."""
        if spec.key not in self.chain.averaged:
            return self.chain.last.source.read(spec)
        import torch

        total = torch.zeros(spec.shape, dtype=torch.float64)
        for coefficient, value in zip(self.coefficients, self.chain.values(spec.key), strict=True):
            if coefficient:
                total += coefficient * value.double()
        return total.to(getattr(torch, spec.dtype))

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return what the last step has outside of its tensors."""
        return self.chain.last.source.skeleton(layout)


class _Judge:
    """Evaluators of combinations, and the weights of all steps in memory to make them of."""

    def __init__(
        self,
        chain: _Chain,
        request: EvaluatorRequest,
        held_out: str | None,
        stack: ExitStack,
        limits: Limits,
    ) -> None:
        import torch

        source = chain.source
        settings, folder = (source.settings, source.directory) if isinstance(source, Run) else (None, None)
        self._evaluator = stack.enter_context(request.resolve(settings, folder))
        self._held_out: Evaluator | None = None
        if held_out is not None:
            other = replace(request, evaluator=held_out)
            self._held_out = stack.enter_context(other.resolve(settings, folder))
        n_values = sum(spec.numel for spec in chain.averaged.values())
        needed = _SEARCHED_NBYTES * n_values * (len(chain.steps) + 1) + chain.last.raw_bytes()
        limits.require_memory(needed, "holding the weights of all steps", chain.last.origin)
        self._state = chain.last.state_dict()
        self._aliases = {a: key for a, key in chain.last.aliases.items() if key in chain.averaged}
        self._steps = {
            key: torch.stack([value.reshape(-1).float() for value in chain.values(key)])
            for key in chain.averaged
        }
        self._specs = chain.averaged
        self._values: dict[tuple[int, tuple[float, ...]], float] = {}
        self.metric = ""
        self.direction = Direction.LOWER

    def _combined(self, coefficients: Sequence[float]) -> dict[str, Tensor]:
        import torch

        factors = torch.tensor(coefficients, dtype=torch.float32)
        state = dict(self._state)
        for key, spec in self._specs.items():
            made = (factors @ self._steps[key]).reshape(spec.shape).to(getattr(torch, spec.dtype))
            state[spec.name] = made
        return state | {alias: state[self._specs[key].name] for alias, key in self._aliases.items()}

    def _value(self, evaluator: Evaluator, coefficients: Sequence[float]) -> float:
        asked = (id(evaluator), tuple(coefficients))
        if asked not in self._values:
            found = evaluator.evaluate(self._combined(coefficients))
            self._values[asked] = found.value
            if evaluator is self._evaluator:
                self.metric, self.direction = found.metric, found.direction
        return self._values[asked]

    def cost(self, coefficients: Sequence[float]) -> float:
        """Return the metric of a combination, turned so that less is better."""
        try:
            value = self._value(self._evaluator, coefficients)
        except NotFiniteError:
            return math.inf
        return self.direction.cost(value)

    def row(self, name: str, coefficients: Sequence[float]) -> Judged:
        """Return what the evaluators say of a combination."""
        other = None if self._held_out is None else self._value(self._held_out, coefficients)
        return Judged(name=name, value=self._value(self._evaluator, coefficients), held_out=other)


def _told(progress: OnProgress | None, step: int, judge: _Judge) -> Callable[[int, int, float], None] | None:
    """Return what tells how far a search has come."""
    if progress is None:
        return None

    def told(done: int, total: int, least: float) -> None:
        best = judge.direction.cost(least)
        progress(Progress("search", done, total, step, f"{judge.metric} {best:.6g}", {judge.metric: best}))

    return told


def _counted(progress: OnProgress, chain: _Chain) -> Callable[[str], None]:
    """Return what tells how many tensors are written."""
    total, written = len(chain.last.specs), set[str]()

    def count(key: str) -> None:
        written.add(key)
        progress(Progress("average", len(written), total, chain.steps[-1], key))

    return count


def _write_report(file: IO[bytes], report: AverageReport) -> None:
    file.write(json.dumps(report.to_json(), indent=2).encode() + b"\n")
