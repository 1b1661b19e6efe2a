"""The ranks of a training that save together: what they exchange, and what they are asked about a save."""

from __future__ import annotations

import json
import logging
import math
import operator
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, cast
from uuid import uuid4

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inshrink_core.chain.parts import box_of, cells_of
from inshrink_core.checkpoint import MODEL_ROLES, Box, Checkpoint, TensorSpec
from inshrink_core.errors import ConflictError, EvaluatorError, InputError, NotFiniteError, named
from inshrink_core.evaluate import Evaluation
from inshrink_core.training.check import Check, ModelEvaluator

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

_Value = TypeVar("_Value")

_logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""While a rank answers, it looks so often whether another one has failed."""

_PAUSES_S: Final = (0.001, 0.2)
"""The first and the longest pause of a rank that waits for others."""

_GRACE_S: Final = 3.0
"""After a failure, ranks that still run notice it within this time."""


class _State(NamedTuple):
    """What a rank writes into the store about itself.

    A rank ``comes``, with the name of its connections. The first rank answers in the same place: the rank
    ``meets`` the others, in a meeting that has a name, with a 1 if all are connected, or it ``leaves``, for a
    reason. In a meeting, a rank is ``in`` the exchange of a number, ``past`` it, or has ``lost`` it.
    """

    at: str = ""
    name: str = ""
    number: int = 0


class _Failed(NamedTuple):
    """What a rank gives the others in the place of a value."""

    why: str


class Ranks:
    """The ranks that save together, over connections apart from those of the training.

    Notes
    -----
    Ranks find each other in the store of the training, by their numbers and the process group. The first rank
    gives each meeting a random name. Groups, writers and saves that a rank has alone change none of this.
    """

    def __init__(self, process_group: ProcessGroup | None, timeout: timedelta, *, no_dist: bool) -> None:
        from torch import distributed

        self.numbers, self.rank = [0], 0
        self._timeout, self._key = timeout, ""
        if not no_dist and distributed.is_available() and distributed.is_initialized():
            self.rank = distributed.get_rank(process_group)
            if self.rank < 0:
                raise InputError("this rank is not in the process group", remedy="save on its ranks alone")
            group = process_group or cast("ProcessGroup", distributed.group.WORLD)
            self.numbers = distributed.get_process_group_ranks(group)
            # Groups that were split off others have a description; their names may differ between ranks.
            name = group.group_name if group.group_desc == "undefined" else group.group_desc
            self._key = sha256(f"{self.numbers} {name}".encode()).hexdigest()
        self._store: Any = None
        self._connections: Any = None
        self._connected = self._meeting = self._failure = self._save = ""
        self._n_exchanges = 0
        self._all_know = False

    @property
    def n_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.numbers)

    def meet(self, save: str) -> None:
        """Wait for all ranks, and connect them unless they are connected.

        Parameters
        ----------
        save
            What messages call the save.

        Raises
        ------
        ConflictError
            Some have not come in time, or cannot be connected; it names them.
        """
        from torch import distributed
        from torch.distributed import distributed_c10d

        if self.n_ranks == 1:
            return
        # Another thread of the training may wait in its client of the store, which serves one at a time.
        store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        prefixed = distributed.PrefixStore  # type: ignore[attr-defined]
        self._store = prefixed(f"inshrink/{self._key}", store)
        self._save, self._n_exchanges = save, 0
        came: dict[int, str] = {}
        try:
            answer = self._answer(came)
        except RuntimeError as error:
            raise _conflict(_unserved(error)) from error
        except BaseException as error:
            why = error.what if isinstance(error, ConflictError) else f"a rank ended its save ({error!r})"
            # The first rank answers the others before it leaves: they do not miss it then.
            self._set(_State("leaves", why), *sorted({self.rank, *came}, reverse=True))
            raise
        self._meeting, self._failure = answer.name, f"failure of {answer.name}"
        if not answer.number:
            with self._exchange("the connection"):
                self._connections = distributed.ProcessGroupGloo(
                    prefixed(self._meeting, self._store), self.rank, self.n_ranks, self._timeout
                )
            self._connected = self._meeting

    def _answer(self, came: dict[int, str]) -> _State:
        """Return the answer of the first rank, which notes who came with which connections."""

        def all_came() -> bool:
            for rank, state in enumerate(self._states()):
                if state.at == "comes":
                    came[rank] = state.name
                elif state.at == "leaves" and rank in came:
                    raise _conflict(state.name)
            return len(came) == self.n_ranks

        def is_answered() -> bool:
            return self._states([self.rank])[0].at != "comes"

        self._set(_State("comes", self._connected))
        seconds = self._timeout.total_seconds()
        while not _until(is_answered if self.rank else all_came, seconds):
            late = {rank: one for rank, one in enumerate(self._states()) if one.at not in ("comes", "meets")}
            if late and self.rank not in late:
                why = self._without(late, f"did not come to {self._save}", seconds)
                gave_up = [f"; before that: {state.name}" for state in late.values() if state.at == "leaves"]
                raise _conflict(why + "".join(gave_up[:1]))
        if self.rank == 0:
            is_connected = self._connected != "" and len({*came.values()}) == 1
            self._set(_State("meets", uuid4().hex, int(is_connected)), *came)
        (answer,) = self._states([self.rank])
        if answer.at == "leaves":
            raise _conflict(answer.name)
        return answer

    def _set(self, state: _State, *ranks: int) -> None:
        for rank in ranks or [self.rank]:
            self._store.set(f"{rank}", json.dumps(state))

    def _states(self, ranks: Sequence[int] = ()) -> list[_State]:
        keys = [f"{rank}" for rank in ranks or range(self.n_ranks)]
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        found = dict(zip(there, map(json.loads, self._store.multi_get(there)), strict=True))
        return [_State(*found.get(key, ())) for key in keys]

    def _without(self, ranks: Iterable[int], what: str, seconds: float) -> str:
        late = named([f"rank {self.numbers[rank]}" for rank in ranks], 8)
        return f"{late} {what}: rank {self.numbers[self.rank]} waited {seconds:.3g} s there"

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Do what all ranks do together; where that fails, say which rank is missing."""
        self._n_exchanges += 1
        began = time.monotonic()
        try:
            self._set(_State("in", self._meeting, self._n_exchanges))
            yield
            self._set(_State("past", self._meeting, self._n_exchanges))
        except BaseException as error:
            self._connections, self._connected = None, ""  # closed: the others fail soon, too
            if not isinstance(error, RuntimeError):
                raise
            why = self._lost(f"{what} of {self._save}", time.monotonic() - began, error)
            _logger.warning("%s", why)  # DCP raises this only if its next collective does not fail, too
            raise _conflict(why) from error

    def _lost(self, what: str, seconds: float, error: RuntimeError) -> str:
        """Return why an exchange failed."""
        states: list[_State] = []
        waiting = _State("in", self._meeting, self._n_exchanges)
        sound: set[int] = set()

        def all_notice() -> bool:
            states[:] = self._states()
            for rank, state in enumerate(states):
                # Ranks that are not connected yet notice nothing.
                is_waiting = state == waiting and waiting.number > 1
                if state.name == waiting.name and state.number >= waiting.number and not is_waiting:
                    sound.add(rank)
            return len(sound) == self.n_ranks

        def late() -> list[int]:
            return [rank for rank, state in enumerate(states) if rank not in sound and state != waiting]

        try:
            self._set(waiting._replace(at="lost"))
            # Where a connection broke, ranks that run are waited for: those that are left have ended.
            is_over = seconds >= self._timeout.total_seconds()
            if all_notice() or (not (is_over and late()) and _until(all_notice, _GRACE_S)):
                if not self.has_failed():
                    self.fail(f"rank {self.numbers[self.rank]}: {_first_line(error)}")
                return f"the ranks lost each other in {what} ({self._store.get(self._failure).decode()})"
            silent = [rank for rank, state in enumerate(states) if rank not in sound and state == waiting]
            if silent and not (is_over and late()):
                why = self._without(silent, f"stopped answering in {what}", seconds)
            else:
                why = self._without(late(), f"did not come to {what}", seconds)
            self.fail(why)
        except RuntimeError as unserved:
            return _unserved(unserved)
        return why

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        found = [torch.empty_like(tensor) for _ in self.numbers]
        self._connections.allgather([found], [tensor]).wait()
        return found

    def gathered(self, make: Callable[[], _Value], what: str) -> list[_Value]:
        """Return what each rank makes, in their order; where one fails, all do.

        Parameters
        ----------
        make
            Returns it.
        what
            What messages call the exchange.

        Raises
        ------
        ConflictError
            Another rank failed: which, and why.
        """
        try:
            return self._gathered(make, what)
        except BaseException:
            self._all_know = True
            raise

    def _gathered(self, make: Callable[[], _Value], what: str) -> list[_Value]:
        if self.n_ranks == 1:
            return [make()]
        failure: BaseException | None = None
        try:
            packed = pickle.dumps(make())
        except BaseException as error:  # raised again, when the others know
            packed, failure = pickle.dumps(_Failed(f"{type(error).__name__}: {error}")), error
        try:
            with self._exchange(what):
                sizes = [int(size) for size in self._all(torch.tensor([len(packed)]))]
                rows = self._all(torch.frombuffer(bytearray(packed.ljust(max(sizes))), dtype=torch.uint8))
        finally:
            if failure is not None:
                raise failure
        found = [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
        for rank, value in zip(self.numbers, found, strict=True):
            if isinstance(value, _Failed):
                raise ConflictError(f"rank {rank} could not save: {value.why}")
        return found

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Enter exchanges that every rank comes to, in the same order, and end them with one.

        A rank that fails between two of them says so in the place of the next, whichever the others wait in.
        """
        self._all_know = False
        try:
            yield
        except BaseException as error:
            if not self._all_know:
                with suppress(type(error)):
                    self.gathered(partial(_raised, error), "the end")
            raise
        self.gathered(lambda: None, "the end")

    def fail(self, why: str) -> None:
        """Let those know that look for it while they do not come to an exchange."""
        if self._store is not None:
            self._store.set(self._failure, why)

    def has_failed(self) -> bool:
        """Whether a rank has failed since all met."""
        return self._store is not None and bool(self._store.check([self._failure]))

    def send(self, given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]) -> None:
        """Send tensors to ranks, and receive others in place, in the order in which each pair has them."""
        if self.n_ranks == 1:
            return
        with self._exchange("the exchange of tensors"):
            for work in [
                *(self._connections.recv([tensor], rank, 0) for tensor, rank in taken),
                *(self._connections.send([tensor], rank, 0) for tensor, rank in given),
            ]:
                work.wait()


def _until(is_done: Callable[[], bool], seconds: float) -> bool:
    end, (pause, longest) = time.monotonic() + seconds, _PAUSES_S
    while not is_done():
        if (rest := end - time.monotonic()) <= 0:
            return False
        time.sleep(min(pause, rest))
        pause = min(1.25 * pause, longest)
    return True


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _unserved(error: RuntimeError) -> str:
    return f"the store of the training does not answer; mostly rank 0 serves it ({_first_line(error)})"


def _raised(error: BaseException) -> None:
    raise error


def _conflict(what: str) -> ConflictError:
    return ConflictError(
        what,
        remedy="nothing of this save is in the archive; see why a rank failed or is late; `timeout` says how"
        " long the others wait, `process_group` and `no_dist` which ranks save",
    )


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

_CHECK: Final = "the check"


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
        super().__init__(model, check)
        self._ranks = ranks
        self._cells: dict[str, list[tuple[TensorSpec, Box]]] = {}
        self._lent: list[tuple[_Place, int, int]] = []
        self._stuck: threading.Thread | None = None

    def begin(self, specs: Iterable[TensorSpec], own: Iterable[TensorSpec]) -> None:
        """Find out which rank has what others need of a save.

        Parameters
        ----------
        specs, own
            The tensors of the save, whole, and what this rank writes of them.

        Raises
        ------
        EvaluatorError
            The model has a tensor that the save does not have.
        """
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
            for rank, places in enumerate(self._ranks.gathered(lambda: sorted(held - written), _CHECK))
            for place in places
        ]
        owners: dict[_Place, int] = {}
        if needed:
            asked = {place for place, _ in needed}
            found = self._ranks.gathered(lambda: written & asked, _CHECK)
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
                self._ranks.fail(f"the check failed on rank {self._ranks.numbers[self._ranks.rank]}")
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
        answers = self._ranks.gathered(lambda: own, _CHECK)
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
