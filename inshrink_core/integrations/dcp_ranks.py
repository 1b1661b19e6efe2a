"""The ranks of a training that save together: what they exchange, and what they are asked about a save."""

from __future__ import annotations

import itertools
import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self, TypeAlias, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inshrink_core.chain.parts import box_of, cells_of
from inshrink_core.checkpoint import MODEL_ROLES, Box, Checkpoint, TensorSpec
from inshrink_core.errors import ConflictError, EvaluatorError, InputError, NotFiniteError
from inshrink_core.evaluate import Evaluation
from inshrink_core.training.check import Check, ModelEvaluator

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

_Value = TypeVar("_Value")

_LOOK_S: Final = 1.0
"""While a rank answers, it looks so often whether another one has failed."""


class _Failed(NamedTuple):
    """What a rank gives the others in the place of a value."""

    why: str


class Ranks:
    """The ranks that save together, on a group of their own, so that the training's is left alone."""

    _numbers: ClassVar = itertools.count()

    def __init__(self, process_group: ProcessGroup | None, timeout: timedelta, *, no_dist: bool) -> None:
        from torch import distributed

        self._timeout, self._group, self._n_met = timeout, cast("ProcessGroup | None", None), 0
        self.numbers, self.rank = [0], 0
        if not no_dist and distributed.is_available() and distributed.is_initialized():
            self.numbers = distributed.get_process_group_ranks(process_group or distributed.group.WORLD)
            self.rank = self.numbers.index(distributed.get_rank())
        self._store: Any = None
        # Of the writer among those of this process: the ranks make their writers in the same order.
        self._prefix = f"inshrink/{next(self._numbers)}"

    @property
    def n_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.numbers)

    def meet(self) -> None:
        """Wait for all ranks.

        Raises
        ------
        ConflictError
            Some have not come in time; it names them.
        """
        from torch import distributed
        from torch.distributed import distributed_c10d

        if self.n_ranks == 1:
            return
        # No collective says who is late.
        default = distributed_c10d._get_default_store()
        store = self._store = distributed.PrefixStore(self._prefix, default)  # type: ignore[attr-defined]
        self._n_met += 1
        names = {rank: f"{self._n_met}/{rank}" for rank in self.numbers}
        own = names[self.numbers[self.rank]]
        store.set(own, "")
        try:
            store.wait(list(names.values()), self._timeout)
            if self._group is None:
                self._group = distributed.new_group(
                    self.numbers, timeout=self._timeout, backend="gloo", use_local_synchronization=True
                )
        except RuntimeError as error:
            late = [f"rank {rank}" for rank, name in names.items() if not store.check([name])]
            raise ConflictError(
                f"{', '.join(late[:8]) or 'a rank'} did not come to save",
                expected=f"{self.n_ranks} ranks within {self._timeout.total_seconds():g} s",
                remedy="see why it failed or what keeps it; `timeout` says how long the others wait, "
                "`process_group` and `no_dist` which ranks save",
            ) from error
        store.delete_key(f"{self._n_met - 1}/{self.numbers[self.rank]}")

    def gathered(self, make: Callable[[], _Value]) -> list[_Value]:
        """Return what each rank makes, in their order; where one fails, all do.

        Raises
        ------
        ConflictError
            Another rank failed: which, and why.
        """
        from torch import distributed

        if self.n_ranks == 1:
            return [make()]
        own: _Value | _Failed
        failure: BaseException | None = None
        try:
            own = make()
        except BaseException as error:  # raised again, when the others know
            own, failure = _Failed(f"{type(error).__name__}: {error}"), error
        found: list[_Value | _Failed | None] = [None] * self.n_ranks
        try:
            distributed.all_gather_object(found, own, group=self._group)
        except RuntimeError as error:
            raise failure or ConflictError(
                "another rank ended, or did not answer in time, while the ranks saved together",
                remedy="nothing of this save is in the archive; see which rank failed, and start again",
            ) from error
        if failure is not None:
            raise failure
        for rank, value in zip(self.numbers, found, strict=True):
            if isinstance(value, _Failed):
                raise ConflictError(f"rank {rank} could not save: {value.why}")
        return cast("list[_Value]", found)

    def fail(self) -> None:
        """Let those know that look for it while they do not come to an exchange."""
        if self._store is not None:
            self._store.set(f"{self._n_met}/failed", "")

    def has_failed(self) -> bool:
        """Whether a rank has failed since all met."""
        return self._store is not None and bool(self._store.check([f"{self._n_met}/failed"]))

    def send(self, given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]) -> None:
        """Send tensors to ranks, and receive others in place, in the order in which each pair has them."""
        from torch import distributed

        waiting = [
            *(distributed.irecv(one, self.numbers[rank], group=self._group) for one, rank in taken),
            *(distributed.isend(one, self.numbers[rank], group=self._group) for one, rank in given),
        ]
        for one in waiting:
            if one is not None:
                one.wait()


class Exchanges:
    """Exchanges of one save that every rank comes to, in the same order; a context that ends with one.

    A rank that fails between two of them says so in the place of the next, whichever the others wait in.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._is_over = ranks, False

    def gathered(self, make: Callable[[], _Value]) -> list[_Value]:
        """Return what each rank makes (`Ranks.gathered`)."""
        try:
            return self._ranks.gathered(make)
        except BaseException:
            self._is_over = True  # all know
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.gathered(lambda: None)
        elif not self._is_over:
            with suppress(type(error)):
                self.gathered(partial(_raised, error))


def _raised(error: BaseException) -> None:
    raise error


class _Answer(NamedTuple):
    """What a rank says when all are asked: a value, or how it failed."""

    value: Any = None
    failure: str = ""
    why: str = ""


_SHARED: Final[Mapping[str, type[InputError]]] = {
    "not finite": NotFiniteError,
    "evaluator": EvaluatorError,
    "input": InputError,
}
"""Failures that are one of all ranks where they are one rank's; any other ends the save."""

_GAVE_UP: Final = "gave up"


class _GaveUpError(Exception):
    """Another rank failed while this one was asked."""


@dataclass(frozen=True, kw_only=True)
class SharedEvaluation(Evaluation):
    """What all ranks say of one state, each of its own samples: figures are means over all of these."""

    mean: Callable[[Callable[[], float | None]], float | None] = field(repr=False)

    def divergence(self, restored: Evaluation) -> float | None:
        """Return the mean over the ranks' samples."""
        return self.mean(lambda: Evaluation.divergence(self, restored))

    def restore_cost(self, restored: Evaluation, nats: float | None = None) -> float | None:
        """Return the mean over the ranks' samples."""
        return self.mean(lambda: Evaluation.restore_cost(self, restored, nats))


_Place: TypeAlias = tuple[str, tuple[int, ...]]
"""A tensor, and where in it a cell begins: what all ranks call a cell."""


def _place_of(spec: TensorSpec) -> _Place:
    return spec.whole.key, box_of(spec).offsets


class ShardedEvaluator(ModelEvaluator):
    """Judges states of a model of which each rank holds shards, by a function that all ranks call together.

    Each state is put into the model itself, the function is asked, and what the model held is put back, bit
    for bit. What a rank holds and another one writes, that one sends.

    Parameters
    ----------
    model
        The model of the training. The function sees it in eval mode, and no gradients are computed.
    check
        What is asked about it; may communicate. Ranks may answer for samples of their own.
    ranks
        Those that save.

    Notes
    -----
    Holds a copy of what the rank holds of the model while it is asked about. The function runs on a thread:
    a rank on which it fails ends the waiting of those that communicate with it, whose thread stays behind.
    """

    def __init__(self, model: nn.Module, check: Check, ranks: Ranks) -> None:
        super().__init__(model, check, metric=None, direction=None)
        self._ranks, self._exchanges = ranks, Exchanges(ranks)
        self._cells: dict[str, list[tuple[TensorSpec, Box]]] = {}
        self._lent: list[tuple[_Place, int, int]] = []
        self._stuck: threading.Thread | None = None

    def begin(self, specs: Iterable[TensorSpec], own: Iterable[TensorSpec], exchanges: Exchanges) -> None:
        """Find out which rank has what others need of a save.

        Parameters
        ----------
        specs, own
            The tensors of the save, whole, and what this rank writes of them.
        exchanges
            Of the save.

        Raises
        ------
        EvaluatorError
            The model has a tensor that the save does not have.
        """
        self._exchanges = exchanges
        known = {spec.name: spec for spec in specs if spec.role in MODEL_ROLES}
        self._cells = {}
        for name, tensor in self._tensors().items():
            if name in known:
                self._cells[name] = _cells_in(known[name], tensor)
            elif not any(other in known for other in self._tied.get(name, ())):
                raise EvaluatorError(f"the save has no tensor '{name}' of the model", where=self.spec)
        written = {_place_of(spec) for spec in own if spec.role in MODEL_ROLES}
        held = {_place_of(cell) for cells in self._cells.values() for cell, _ in cells}
        needed = [
            (place, rank)
            for rank, places in enumerate(exchanges.gathered(lambda: sorted(held - written)))
            for place in places
        ]
        owners: dict[_Place, int] = {}
        if needed:
            asked = {place for place, _ in needed}
            found = exchanges.gathered(lambda: written & asked)
            owners = {place: rank for rank, places in enumerate(found) for place in places}
        if lost := [place for place, _ in needed if place not in owners]:
            raise EvaluatorError(f"no rank saves '{lost[0][0]}' at {lost[0][1]}", where=self.spec)
        self._lent = [(place, owners[place], rank) for place, rank in needed]

    def evaluate(self, state_dict: Mapping[str, Tensor] | Checkpoint) -> Evaluation:
        """Return what all ranks say of a state, a `Checkpoint` of what this one writes; else of the model.

        Raises
        ------
        EvaluatorError, NotFiniteError
            As `ModelEvaluator`, on all ranks where one of them raises it; it is named.
        """
        live = {name: _local(tensor) for name, tensor in self._tensors().items()}
        kept = {name: tensor.clone() for name, tensor in live.items()}
        modes = [(module, module.training) for module in self._model.modules()]
        try:
            if isinstance(state_dict, Checkpoint):
                self._put(state_dict, live)
            self._model.eval()
            return self._shared(self._asked)
        finally:
            if self._stuck is None:
                self._tensors()  # what the function gathered is given up
            for name, tensor in live.items():
                tensor.copy_(kept[name])
            for module, mode in modes:
                module.training = mode

    def state_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return nothing: the model is asked about as it is."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model, as they are sharded."""
        state = self._model.state_dict()
        return {name: state[own].detach() for own, name in self._names.items()}

    def _put(self, state: Checkpoint, live: Mapping[str, Tensor]) -> None:
        """Put a state into the model."""
        own = {_place_of(spec): spec for spec in state.specs if spec.role in MODEL_ROLES}
        rank = self._ranks.rank
        targets: dict[_Place, list[Tensor]] = {}
        lent: list[tuple[Tensor, int]] = []

        def put() -> None:
            for name, cells in self._cells.items():
                for cell, box in cells:
                    target = live[name][box.slices]
                    if _place_of(cell) in own:
                        target.copy_(state[own[_place_of(cell)].key])
                    else:
                        targets.setdefault(_place_of(cell), []).append(target)
            lent.extend(
                (state[own[place].key].contiguous(), to) for place, owner, to in self._lent if owner == rank
            )

        self._all_answer(put)
        asked = [(place, owner) for place, owner, to in self._lent if to == rank]
        found = [
            (torch.empty(targets[place][0].shape, dtype=targets[place][0].dtype), owner)
            for place, owner in asked
        ]
        self._ranks.send(lent, found)
        for (place, _), (tensor, _) in zip(asked, found, strict=True):
            for target in targets[place]:
                target.copy_(tensor)

    def _asked(self) -> Evaluation:
        """Ask on a thread, and give up where another rank failed: what this one waits for will not come."""
        if self._ranks.n_ranks == 1:
            return self._answered(time.perf_counter())
        if self._stuck is not None:
            raise EvaluatorError(
                "an earlier check still waits for a rank that failed", where=self.spec, remedy="start again"
            )
        answers: list[Evaluation | BaseException] = []
        device = next((one.device for one in self._tensors().values() if one.is_cuda), None)

        def ask() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                answers.append(self._answered(time.perf_counter()))
            except BaseException as error:  # raised again, where it was asked
                answers.append(error)

        thread = threading.Thread(target=ask, name="inshrink-check", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and self._ranks.has_failed():
                self._stuck = thread
                raise _GaveUpError
        (answer,) = answers
        if isinstance(answer, BaseException):
            if not isinstance(answer, NotFiniteError):
                self._ranks.fail()
            raise answer
        return answer

    def _all_answer(self, make: Callable[[], _Value]) -> list[_Value]:
        """Return what all ranks make; where one fails, all raise that."""
        try:
            own = _Answer(make())
        except _GaveUpError:
            own = _Answer(failure=_GAVE_UP)
        except InputError as error:
            own = _Answer(
                failure=next(name for name, kind in _SHARED.items() if isinstance(error, kind)),
                why=error.what,
            )
        answers = self._exchanges.gathered(lambda: own)
        for number, answer in zip(self._ranks.numbers, answers, strict=True):
            if answer.failure in _SHARED:
                raise _SHARED[answer.failure](f"rank {number}: {answer.why}", where=self.spec)
        return [answer.value for answer in answers]

    def _shared(self, ask: Callable[[], Evaluation]) -> Evaluation:
        """Return what all ranks say together."""
        own: list[Evaluation] = []

        def answer() -> tuple[Any, ...]:
            own.append(found := ask())
            rows = found.predictions if found.log_probs is None else found.log_probs
            said = (found.metric, found.direction, found.log_probs is None, found.predictions is None)
            return said, found.value, 1 if rows is None else len(rows)

        answers = self._all_answer(answer)
        for number, (said, _, _) in zip(self._ranks.numbers, answers, strict=True):
            if said != answers[0][0]:
                raise EvaluatorError(
                    f"rank {number} says something else than rank {self._ranks.numbers[0]}",
                    where=self.spec,
                    expected=str(answers[0][0][0]),
                    found=str(said[0]),
                    remedy="return the same numbers and predictions on all ranks",
                )
        weights = [weight for _, _, weight in answers]
        value = _mean([value for _, value, _ in answers], weights)

        def mean(make: Callable[[], float | None]) -> float | None:
            found = [one for one in self._all_answer(make) if one is not None]
            return _mean(found, weights) if len(found) == len(weights) else None

        (found,) = own
        values = {one.name: getattr(found, one.name) for one in fields(Evaluation)}
        return SharedEvaluation(**values | {"value": value, "metrics": {found.metric: value}}, mean=mean)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return a weighted mean; of equal values, the value."""
    if len(set(values)) == 1:
        return values[0]
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cells_in(spec: TensorSpec, tensor: Tensor) -> list[tuple[TensorSpec, Box]]:
    """Return the cells of what a rank holds of a tensor, and where in that they lie."""
    if not isinstance(tensor, DTensor):
        return [(spec, box_of(spec))]
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return cells_of(spec, Box(tuple(offsets), tuple(sizes)))
