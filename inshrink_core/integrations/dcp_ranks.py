"""The ranks of a training that save together: their collectives, and checks of sharded models."""

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
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast
from uuid import uuid4

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inshrink_core.chain.parts import box_of, cells_of
from inshrink_core.checkpoint import MODEL_ROLES, Box, Checkpoint, TensorSpec
from inshrink_core.errors import (
    ConflictError,
    EvaluatorError,
    InputError,
    InshrinkError,
    NotFiniteError,
    named,
)
from inshrink_core.evaluate import Evaluation
from inshrink_core.training.check import Check, ModelEvaluator

_Value = TypeVar("_Value")

_logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""Interval at which a rank in a check looks for failures of others."""

_PAUSES_S: Final = (0.001, 0.2)
"""First and longest pause of a rank that waits for others."""

_GRACE_S: Final = 3.0
"""Time within which running ranks notice a failure."""


class _State(NamedTuple):
    """The state of a rank in the store.

    A rank ``comes``, with the name of its connections. The first rank answers under the same key: the rank
    ``meets`` the others, with the name of the meeting and 1 if all are connected, or it ``leaves``, with a
    reason. In a meeting, a rank is ``in`` the exchange with a number, ``past`` it, or has ``lost`` it.
    """

    at: str = ""
    name: str = ""
    number: int = 0


class Ranks:
    """The ranks that save together, over connections apart from those of the training.

    Notes
    -----
    Ranks find each other in the training's store, by their numbers and the process group. The first rank
    gives each meeting a random name. Groups, writers and saves of single ranks do not interfere.
    """

    def __init__(self, process_group: ProcessGroup | None, timeout: timedelta, *, no_dist: bool) -> None:
        self.numbers, self.rank = [0], 0
        self._timeout, self._key = timeout, ""
        if not no_dist and distributed.is_available() and distributed.is_initialized():
            self.rank = distributed.get_rank(process_group)
            if self.rank < 0:
                raise InputError("this rank is not in the process group", remedy="save on its ranks alone")
            group = process_group or cast("ProcessGroup", distributed.group.WORLD)
            self.numbers = distributed.get_process_group_ranks(group)
            # Names of split groups may differ between ranks; their descriptions do not.
            name = group.group_name if group.group_desc == "undefined" else group.group_desc
            self._key = sha256(f"{self.numbers} {name}".encode()).hexdigest()
        self._store: Any = None
        self._connections: Any = None
        self._connected = self._meeting = self._failure = self._save = ""
        self._n_exchanges = 0
        self._known: BaseException | None = None
        """The last error of an exchange, which all ranks know."""

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.numbers)

    def meet(self, save: str) -> None:
        """Wait for all ranks, and connect them if needed.

        Parameters
        ----------
        save
            Name of the save in messages.

        Raises
        ------
        ConflictError
            Ranks did not come in time or cannot be connected; the message names them.
        """
        if self.n_ranks == 1:
            return
        # The training's client of the store serves one thread at a time.
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
            # The first rank answers the others before it leaves, so that they do not wait.
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
        """Return the answer of the first rank, which records the ranks that came and their connections."""

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
            states = enumerate(self._states())
            late = {rank: state for rank, state in states if state.at not in ("comes", "meets")}
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
        """Run a collective; if it fails, raise an error that names the missing ranks."""
        self._n_exchanges += 1
        began = time.monotonic()
        try:
            self._set(_State("in", self._meeting, self._n_exchanges))
            yield
            self._set(_State("past", self._meeting, self._n_exchanges))
        except BaseException as error:
            self._connections, self._connected = None, ""  # closed, so that others fail soon, too
            if not isinstance(error, RuntimeError):
                raise
            why = self._lost(f"{what} of {self._save}", time.monotonic() - began, error)
            _logger.warning("%s", why)  # DCP may raise the failure of its next collective instead
            raise _conflict(why) from error

    def _lost(self, what: str, seconds: float, error: RuntimeError) -> str:
        """Return why a collective failed."""
        states: list[_State] = []
        waiting = _State("in", self._meeting, self._n_exchanges)
        sound: set[int] = set()

        def all_notice() -> bool:
            states[:] = self._states()
            for rank, state in enumerate(states):
                # Ranks that are not connected yet notice no failure.
                is_waiting = state == waiting and waiting.number > 1
                if state.name == waiting.name and state.number >= waiting.number and not is_waiting:
                    sound.add(rank)
            return len(sound) == self.n_ranks

        def late() -> list[int]:
            return [rank for rank, state in enumerate(states) if rank not in sound and state != waiting]

        try:
            self._set(waiting._replace(at="lost"))
            # After a broken connection, wait for running ranks; the others have ended.
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
        """Return the tensors of all ranks, which have equal shapes."""
        found = [torch.empty_like(tensor) for _ in self.numbers]
        self._connections.allgather([found], [tensor]).wait()
        return found

    def gathered(self, make: Callable[[], _Value], what: str) -> list[_Value]:
        """Return the values of all ranks, in their order; if one rank fails, all do.

        Parameters
        ----------
        make
            Returns the value of this rank.
        what
            Name of the collective in messages.

        Raises
        ------
        InshrinkError
            That of a rank, on all ranks alike; the message begins with the rank.
        ConflictError
            Another rank raised an error of another kind, or the ranks lost each other.
        """
        try:
            return self._gathered(make, what)
        except BaseException as error:
            self._known = error
            raise

    def _gathered(self, make: Callable[[], _Value], what: str) -> list[_Value]:
        if self.n_ranks == 1:
            return [make()]
        failure: BaseException | None = None
        is_ours = False
        try:
            packed = pickle.dumps(make())
        except BaseException as error:  # raised again after the exchange
            failure, is_ours = error, isinstance(error, InshrinkError)
            packed = pickle.dumps(error if is_ours else _conflict(f"{type(error).__name__}: {error}"))
        try:
            with self._exchange(what):
                sizes = [int(size) for size in self._all(torch.tensor([len(packed)]))]
                rows = self._all(torch.frombuffer(bytearray(packed.ljust(max(sizes))), dtype=torch.uint8))
        finally:
            if failure is not None and (not is_ours or self._connections is None):
                raise failure
        found = [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
        errors = []
        for rank, value in zip(self.numbers, found, strict=True):
            if isinstance(value, InshrinkError):
                value.args = (f"rank {rank}: {value}",)
                errors.append(value)
        if errors:
            # A check that failed may be an answer; a conflict ends the save.
            raise min(errors, key=lambda error: not isinstance(error, ConflictError)) from failure
        return found

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Run collectives in the same order on all ranks, and end with one.

        A rank that fails between two collectives sends its failure in the next one.
        """
        try:
            yield
        except BaseException as error:
            if self._known is None or self._known not in (error, error.__cause__):
                with suppress(InshrinkError, type(error)):
                    self.gathered(partial(_raised, error), "the end")
            raise
        finally:
            self._known = None
        self.gathered(lambda: None, "the end")

    def fail(self, why: str) -> None:
        """Publish a failure for ranks that are not in a collective."""
        if self._store is not None:
            self._store.set(self._failure, why)

    def has_failed(self) -> bool:
        """Whether a rank has failed since the meeting."""
        return self._store is not None and bool(self._store.check([self._failure]))

    def send(self, given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]) -> None:
        """Send tensors to ranks, and receive others in place, in the same order on both sides."""
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


_CHECK: Final = "the check"


@dataclass(frozen=True, kw_only=True)
class SharedEvaluation(Evaluation):
    """The evaluation of one state by all ranks: means over the samples of all ranks."""

    mean: Callable[[Callable[[], float | None]], float | None] = field(repr=False)

    def divergence(self, restored: Evaluation) -> float | None:
        """Return the mean over the ranks' samples."""
        return self.mean(lambda: Evaluation.divergence(self, restored))

    def restore_cost(self, restored: Evaluation, nats: float | None = None) -> float | None:
        """Return the mean over the ranks' samples."""
        return self.mean(lambda: Evaluation.restore_cost(self, restored, nats))


_Place: TypeAlias = tuple[str, tuple[int, ...]]
"""Key of a tensor and offsets of a cell: the name of a cell on all ranks."""


def _place_of(spec: TensorSpec) -> _Place:
    return spec.full_spec.key, box_of(spec).offsets


class ShardedEvaluator(ModelEvaluator):
    """Evaluates states of a sharded model by a function that all ranks call together.

    Each state is loaded into the model, the function is called, and the model's values are put back, bit for
    bit. Cells that another rank writes are received from that rank.

    Parameters
    ----------
    model
        The model of the training. The function gets it in eval mode, and no gradients are computed.
    check
        The function; may communicate. Ranks may evaluate different samples.
    ranks
        The ranks that save.

    Notes
    -----
    Keeps a copy of the rank's shards during a check. The function runs on a thread: if it fails on one rank,
    the other ranks stop waiting and leave their thread behind.
    """

    which = None  # A rank knows its own tensors only, and all ranks need the same settings.

    def __init__(self, model: nn.Module, check: Check, ranks: Ranks) -> None:
        super().__init__(model, check)
        self._ranks = ranks
        self._cells: dict[str, list[tuple[TensorSpec, Box]]] = {}
        self._lent: list[tuple[_Place, int, int]] = []
        self._stuck: threading.Thread | None = None

    def begin(self, specs: Iterable[TensorSpec], written: Iterable[TensorSpec]) -> None:
        """Find which ranks send which cells of a save.

        Parameters
        ----------
        specs, written
            The tensors of the save, and the cells that this rank writes.

        Raises
        ------
        EvaluatorError
            The model has a tensor that the save lacks.
        """
        known = {spec.name: spec for spec in specs if spec.role in MODEL_ROLES}
        self._cells = {}
        for name, tensor in self._tensors().items():
            if name in known:
                self._cells[name] = _cells_in(known[name], tensor)
            elif not any(other in known for other in self._tied.get(name, ())):
                raise EvaluatorError(f"the save has no tensor '{name}' of the model", where=self.spec)
        sent = {_place_of(spec) for spec in written if spec.role in MODEL_ROLES}
        shards = {_place_of(cell) for cells in self._cells.values() for cell, _ in cells}
        needed = [
            (place, rank)
            for rank, places in enumerate(self._ranks.gathered(lambda: sorted(shards - sent), _CHECK))
            for place in places
        ]
        owners: dict[_Place, int] = {}
        if needed:
            asked = {place for place, _ in needed}
            found = self._ranks.gathered(lambda: sent & asked, _CHECK)
            owners = {place: rank for rank, places in enumerate(found) for place in places}
        if lost := [place for place, _ in needed if place not in owners]:
            raise EvaluatorError(f"no rank saves '{lost[0][0]}' at {lost[0][1]}", where=self.spec)
        self._lent = [(place, owners[place], rank) for place, rank in needed]

    def evaluate(self, state_dict: Mapping[str, Tensor] | Checkpoint) -> Evaluation:
        """Return the evaluation by all ranks of a state, a `Checkpoint` of this rank's cells; else the model.

        Raises
        ------
        EvaluatorError, NotFiniteError
            As `ModelEvaluator`, on all ranks if one raises it.
        """
        live = {name: _local(tensor) for name, tensor in self._tensors().items()}
        before = {name: tensor.clone() for name, tensor in live.items()}
        modes = [(module, module.training) for module in self._model.modules()]
        try:
            if isinstance(state_dict, Checkpoint):
                self._put(state_dict, live)
            self._model.eval()
            return self._shared()
        finally:
            if self._stuck is None:
                self._tensors()  # reshards what the function gathered
            for name, tensor in live.items():
                tensor.copy_(before[name])
            for module, mode in modes:
                module.training = mode

    def state_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return nothing: the model is evaluated with its current state."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model, as they are sharded."""
        state = self._model.state_dict()
        return {name: state[raw].detach() for raw, name in self._names.items()}

    def _put(self, state: Checkpoint, live: Mapping[str, Tensor]) -> None:
        """Load a state into the model."""
        here = {_place_of(spec): spec for spec in state.specs if spec.role in MODEL_ROLES}
        rank = self._ranks.rank
        targets: dict[_Place, list[Tensor]] = {}
        lent: list[tuple[Tensor, int]] = []

        def load() -> None:
            for name, cells in self._cells.items():
                for cell, box in cells:
                    target = live[name][box.slices]
                    if _place_of(cell) in here:
                        target.copy_(state[here[_place_of(cell)].key])
                    else:
                        targets.setdefault(_place_of(cell), []).append(target)
            lent.extend(
                (state[here[place].key].contiguous(), to) for place, owner, to in self._lent if owner == rank
            )

        self._ranks.gathered(load, _CHECK)
        asked = [(place, owner) for place, owner, to in self._lent if to == rank]
        found = [
            (torch.empty(targets[place][0].shape, dtype=targets[place][0].dtype), owner)
            for place, owner in asked
        ]
        self._ranks.send(lent, found)
        for (place, _), (tensor, _) in zip(asked, found, strict=True):
            for target in targets[place]:
                target.copy_(tensor)

    def _asked(self) -> Evaluation | None:
        """Evaluate on a thread; return None if another rank fails, since collectives with it never end."""
        if self._ranks.n_ranks == 1:
            return self._answered(time.perf_counter())
        if self._stuck is not None and self._stuck.is_alive():
            raise EvaluatorError(
                "an earlier check still waits for a rank that failed", where=self.spec, remedy="start again"
            )
        self._stuck = None
        answers: list[Evaluation | BaseException] = []
        device = next((tensor.device for tensor in self._tensors().values() if tensor.is_cuda), None)

        def ask() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                answers.append(self._answered(time.perf_counter()))
            except BaseException as error:  # raised again by the caller
                answers.append(error)

        thread = threading.Thread(target=ask, name="inshrink-check", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and self._ranks.has_failed():
                self._stuck = thread
                return None
        (answer,) = answers
        if isinstance(answer, BaseException):
            if not isinstance(answer, NotFiniteError):
                self._ranks.fail(f"the check failed on rank {self._ranks.numbers[self._ranks.rank]}")
            raise answer
        return answer

    def _shared(self) -> Evaluation:
        """Return the evaluation by all ranks."""
        evaluations: list[Evaluation] = []

        def answer() -> tuple[Any, ...] | None:
            found = self._asked()
            if found is None:  # another rank sends its error
                return None
            evaluations.append(found)
            rows = found.predictions if found.log_probs is None else found.log_probs
            form = (found.metric, found.direction, found.log_probs is None, found.predictions is None)
            return form, found.value, 1 if rows is None else len(rows)

        answers = cast("list[tuple[Any, ...]]", self._ranks.gathered(answer, _CHECK))
        for number, (form, _, _) in zip(self._ranks.numbers, answers, strict=True):
            if form != answers[0][0]:
                raise EvaluatorError(
                    f"rank {number} returns another metric than rank {self._ranks.numbers[0]}",
                    where=self.spec,
                    expected=str(answers[0][0][0]),
                    found=str(form[0]),
                    remedy="return the same numbers and predictions on all ranks",
                )
        weights = [weight for _, _, weight in answers]
        value = _mean([value for _, value, _ in answers], weights)

        def mean(make: Callable[[], float | None]) -> float | None:
            found = [value for value in self._ranks.gathered(make, _CHECK) if value is not None]
            return _mean(found, weights) if len(found) == len(weights) else None

        (found,) = evaluations
        values = {field.name: getattr(found, field.name) for field in fields(Evaluation)}
        return SharedEvaluation(**values | {"value": value, "metrics": {found.metric: value}}, mean=mean)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return a weighted mean; exactly the value if all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cells_in(spec: TensorSpec, tensor: Tensor) -> list[tuple[TensorSpec, Box]]:
    """Return the cells of a rank's shard of a tensor, with their boxes in the shard."""
    if not isinstance(tensor, DTensor):
        return [(spec, box_of(spec))]
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return cells_of(spec, Box(tuple(offsets), tuple(sizes)))
