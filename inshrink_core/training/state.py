"""The models and optimizers of a training: their saved state, and loading it in place."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inshrink_core.errors import InputError, named
from inshrink_core.formats.state_tree import SAVE_KEY, strip_wrappers
from inshrink_core.training.staging import address

Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer]"
Also: TypeAlias = "nn.Module | Optimizers | tuple[nn.Module, Optimizers]"


_VERSION: Final = 1
"""Version of the record in a file."""

_OPTIMIZER: Final = ("param_groups", "state", "state_dict", "load_state_dict")
"""Attributes of an optimizer; not all inherit from torch's class."""

_NAME: Final = re.compile(r"\w[\w.-]*")
_TAKEN: Final = frozenset({"extra", "optimizer"})
"""First parts of names that other tensors of a save have."""


class TrainingState:
    """Models and optimizers that are saved together, by name; the main ones have the name ``""``.

    Parameters
    ----------
    model, optimizer
        The main ones; several optimizers as a list.
    also
        Further models, optimizers, or pairs of them, by name.

    Attributes
    ----------
    models
        By name.
    optimizers
        By name.

    Raises
    ------
    InputError
        A value is neither model nor optimizer, or has an invalid name.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizers | None = None,
        also: Mapping[str, Also] | None = None,
    ) -> None:
        self.models: dict[str, nn.Module] = {} if model is None else {"": model}
        self.optimizers: dict[str, list[Optimizer]] = {}
        self._is_list: set[str] = set()
        self._names: dict[str, dict[str, str]] = {}
        if optimizer is not None:
            self._add_optimizers("", optimizer, "optimizer")
        for name, value in (also or {}).items():
            where = f"also[{name!r}]"
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
                raise InputError(f"{where} is not a valid model or optimizer name", remedy="choose another")
            pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], nn.Module)
            if isinstance(value, nn.Module) or pair:
                self.models[name] = value[0] if pair else value  # type: ignore[index, assignment]
                self._require_new_names(name)
            if not isinstance(value, nn.Module):
                self._add_optimizers(name, value[1] if pair else value, where)  # type: ignore[index, arg-type]

    def _add_optimizers(self, name: str, value: Optimizers, where: str) -> None:
        members: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        wrong = [each for each in members if not all(hasattr(each, word) for word in _OPTIMIZER)]
        if wrong or not members:
            raise InputError(
                f"{where} is no optimizer" if not name else f"{where} is neither a model nor an optimizer",
                expected="a torch.optim.Optimizer, or a list of them"
                if not name
                else "a model, an optimizer, or a pair (model, optimizer)",
                found=type(wrong[0] if wrong else value).__qualname__,
                remedy="name further models and optimizers: also={'D': (net, optimizer)}; what else has a "
                "state_dict() is saved by `save(step, {'scheduler': scheduler.state_dict()})`",
            )
        self.optimizers[name] = members
        if isinstance(value, (list, tuple)):
            self._is_list.add(name)

    def _require_new_names(self, name: str) -> None:
        """Refuse a name that gives a tensor the name of another model's tensor."""
        before = {
            called: state[raw]
            for label, model in self.models.items()
            if label != name
            for state in [model.state_dict()]
            for raw, called in self._called(label, state).items()
        }
        state = self.models[name].state_dict()
        for raw, called in self._called(name, state).items():
            other = before.get(called, state[raw])
            if other is not state[raw] and address(other) != address(state[raw]):
                raise InputError(
                    f"also[{name!r}] has a tensor that is called '{called}', as another model's is",
                    remedy="choose another name",
                )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all models by their names in the archive, each once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, model in self.models.items():
            called = self._called(name, model.state_dict())
            for raw, parameter in model.named_parameters():
                found.setdefault(id(parameter), (called.get(raw, _joined(name, raw)), parameter))
        return dict(found.values())

    def content(self, *, models: bool = True, optimizers: bool = True) -> dict[str, Any]:
        """Return the contents of a file, with further models and optimizers by name under ``also``.

        Groups of optimizers have the names of their parameters (``param_names``).
        """
        parts: dict[str, dict[str, Any]] = {}
        names = {id(parameter): name for name, parameter in self.parameters().items()}
        buffers: list[str] = []
        for name, model in self.models.items():
            state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
            buffers += [plain for raw, plain in self._called(name, state).items() if raw not in parameters]
            if models:
                parts[name] = {"model": state}
        for name, members in self.optimizers.items() if optimizers else ():
            states = [_state_of(each, names) for each in members]
            parts.setdefault(name, {})["optimizer"] = states if name in self._is_list else states[0]
        also = {name: part for name, part in parts.items() if name}
        record = {SAVE_KEY: {"save": _VERSION, "buffers": buffers}}
        return {**parts.get("", {}), **({"also": also} if also else {}), **record}

    def _called(self, name: str, state: Mapping[str, Any]) -> dict[str, str]:
        """Return the names of a model's tensors in the archive, by their names in the model."""
        called = self._names.get(name, {})
        if called.keys() != state.keys():
            plain = strip_wrappers(list(state))
            called = {raw: _joined(name, short) for raw, short in zip(state, plain, strict=True)}
            self._names[name] = called
        return called

    def known_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return names of tensors, after checking that the models have them.

        Raises
        ------
        InputError
            No model has a tensor of one of the names, or there are no names.
        """
        asked = frozenset([names] if isinstance(names, str) else names)
        known = {_joined(name, raw) for name, model in self.models.items() for raw in model.state_dict()}
        unknown = sorted(asked - known)
        if unknown or not asked:
            raise InputError(
                f"the model has no tensor '{unknown[0]}'" if unknown else "a partial restore of no tensor",
                expected="names as in model.state_dict()",
                remedy="leave `partial` out to restore everything",
            )
        return asked

    def require_same(self, content: Mapping[str, Any], where: str) -> None:
        """Check that saved models and optimizers match, before anything is loaded.

        Raises
        ------
        InputError
            A model or an optimizer does not match.
        """
        for name, model in self.models.items():
            part = _part(content, name)
            if not isinstance(part.get("model"), dict):
                raise InputError(
                    f"nothing was saved of also[{name!r}]",
                    where=where,
                    remedy="restore with a saver without it, and close that one",
                )
            _require_same_model(model, part["model"], where, name)
        for name, optimizers in self.optimizers.items():
            saved = [_group_sizes(state) for state in states_of(_part(content, name))]
            sizes = [[len(group["params"]) for group in each.param_groups] for each in optimizers]
            if saved and saved != sizes:
                raise InputError(
                    "the optimizer is not the one that was saved",
                    where=where,
                    expected=f"parameter groups of {named([str(each) for each in saved])}",
                    found=named([str(each) for each in sizes]),
                    remedy="build the optimizer that was saved",
                )

    def load(self, content: Mapping[str, Any]) -> None:
        """Load saved states; optimizers without one are reset."""
        for name, optimizers in self.optimizers.items():
            saved = states_of(_part(content, name))
            for number, optimizer in enumerate(optimizers):
                if saved:
                    optimizer.load_state_dict(_without_names(saved[number]))
                else:
                    optimizer.state = defaultdict(dict)
        for name, model in self.models.items():
            model.load_state_dict(_renamed(model.state_dict(), _part(content, name)["model"]))

    def load_lost(self, content: Mapping[str, Any], names: frozenset[str]) -> None:
        """Load some tensors in place, with their optimizer state.

        Parameters
        ----------
        content
            The saved content, for the same tensors and parameter groups.
        names
            Names of the tensors, as `known_names` returns them.

        References
        ----------
        Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (SCAR), ICML 2019, section 4.
        """
        lost: set[int] = set()
        for name, model in self.models.items():
            state = model.state_dict()
            saved = _renamed(state, _part(content, name)["model"])
            wanted = [raw for raw in state if _joined(name, raw) in names]
            with torch.no_grad():
                for raw in wanted:
                    if isinstance(state[raw], Tensor):
                        state[raw].copy_(saved[raw])
            parameters = dict(model.named_parameters(remove_duplicate=False))
            lost |= {id(parameters[raw]) for raw in wanted if raw in parameters}
        for name, optimizers in self.optimizers.items():
            saved_states = states_of(_part(content, name)) or [{}] * len(optimizers)
            for optimizer, saved_state in zip(optimizers, saved_states, strict=True):
                trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
                for number, parameter in enumerate(trained):
                    if id(parameter) in lost:
                        state = saved_state.get("state", {}).get(number, {})
                        optimizer.state[parameter] = {k: _loaded(v, parameter) for k, v in state.items()}


def _joined(name: str, raw: str) -> str:
    return f"{name}.{raw}" if name else raw


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the part of a file for a name; empty if it has none."""
    also = content.get("also")
    part = content if not name else also.get(name) if isinstance(also, dict) else None
    return part if isinstance(part, dict) else {}


def parts_of(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a file: the main one, and one for each further name."""
    return [content, *content.get("also", {}).values()]


def states_of(part: Mapping[str, Any]) -> list[Any]:
    """Return the states of the optimizers of a part; empty if they were omitted."""
    saved = part.get("optimizer")
    return [] if saved is None else saved if isinstance(saved, list) else [saved]


def _state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer, with the names of each group's parameters."""
    state = optimizer.state_dict()
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return state
    named = []
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        called = [names.get(id(parameter)) for parameter in live["params"]]
        # Readers match a group with a parameter that no model has, such as a master weight.
        named.append(group if None in called else {**group, "param_names": called})
    return {**state, "param_groups": named}


def _without_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state without the names of parameters."""
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _renamed(state: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state dict with the names of a model that may have other wrappers."""
    if state.keys() == saved.keys():
        return saved
    by_plain = dict(zip(strip_wrappers(list(saved)), saved.values(), strict=True))
    renamed: OrderedDict[str, Any] = OrderedDict()
    for raw, plain in zip(state, strip_wrappers(list(state)), strict=True):
        renamed[raw] = by_plain[plain]
    if hasattr(state, "_metadata"):
        renamed._metadata = state._metadata  # type: ignore[attr-defined]
    return renamed


def _loaded(value: Any, parameter: Tensor) -> Any:
    """Return a value of optimizer state on the parameter's device; step counters stay in host memory."""
    if not isinstance(value, Tensor):
        return value
    return value.to(parameter.device, copy=True) if value.dim() else value.clone()


def _require_same_model(model: nn.Module, saved: Mapping[str, Any], where: str, label: str) -> None:
    """Refuse another model; its wrappers may differ."""
    sides: list[dict[str, Any]] = [
        dict(zip(strip_wrappers(list(side)), side.values(), strict=True))
        for side in (model.state_dict(), saved)
    ]
    for name in dict.fromkeys(key for side in sides for key in side):
        # Extra state of modules has no shape.
        shapes = [str(tuple(getattr(side[name], "shape", ()))) if name in side else "none" for side in sides]
        if shapes[0] == shapes[1]:
            continue
        what = f"tensor '{_joined(label, name)}' has another shape than the one saved"
        if "none" in shapes:
            side = "has no tensor" if shapes[1] == "none" else "has a tensor that the model lacks:"
            what = f"the saved model {side} '{_joined(label, name)}'"
        remedy = "build the model that was saved"
        raise InputError(what, where=where, expected=shapes[1], found=shapes[0], remedy=remedy)


def _group_sizes(state: Any) -> list[int]:
    """Return the number of parameters in each group of a saved optimizer."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return [len(group.get("params", ())) for group in groups] if isinstance(groups, list) else []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in state dicts of models and optimizers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, or several."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of other tensors
        return 0
