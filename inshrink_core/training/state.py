"""The models and optimizers of a training: what is saved of them, and how it is put back in place."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from inshrink_core.errors import InputError
from inshrink_core.formats.state_tree import SAVE_KEY, strip_wrappers
from inshrink_core.training.staging import address

if TYPE_CHECKING:
    from torch.optim import Optimizer

Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer]"
Also: TypeAlias = "nn.Module | Optimizers | tuple[nn.Module, Optimizers]"


_VERSION: Final = 1
"""Of how a file says what it holds."""

_OPTIMIZER: Final = ("param_groups", "state", "state_dict", "load_state_dict")
"""What an optimizer has; not all are made from torch's class."""

_NAME: Final = re.compile(r"\w[\w.-]*")
_TAKEN: Final = frozenset({"extra", "optimizer"})
"""What begins the names of other tensors of a save."""


class TrainingState:
    """Models and optimizers that are saved together, by name; those without one have the name ``""``.

    Parameters
    ----------
    model, optimizer
        The training's own; several optimizers as a list.
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
        Something is neither model nor optimizer, or its name cannot be used.
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
                raise InputError(f"{where} is no name for a model or an optimizer", remedy="choose another")
            pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], nn.Module)
            if isinstance(value, nn.Module) or pair:
                self.models[name] = value[0] if pair else value  # type: ignore[index, assignment]
                self._require_own_names(name)
            if not isinstance(value, nn.Module):
                self._add_optimizers(name, value[1] if pair else value, where)  # type: ignore[index, arg-type]

    def _add_optimizers(self, name: str, value: Optimizers, where: str) -> None:
        held: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        wrong = [one for one in held if not all(hasattr(one, word) for word in _OPTIMIZER)]
        if wrong or not held:
            raise InputError(
                f"{where} is no optimizer" if not name else f"{where} is neither a model nor an optimizer",
                expected="a torch.optim.Optimizer, or a list of them"
                if not name
                else "a model, an optimizer, or a pair (model, optimizer)",
                found=type(wrong[0] if wrong else value).__qualname__,
                remedy="name further models and optimizers: also={'D': (net, optimizer)}; what else has a "
                "state_dict() is saved by `save(step, {'scheduler': scheduler.state_dict()})`",
            )
        self.optimizers[name] = held
        if isinstance(value, (list, tuple)):
            self._is_list.add(name)

    def _require_own_names(self, name: str) -> None:
        """Refuse a name under which a tensor would be called as another model's is."""
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
        """Return the parameters of all models by the names that an archive gives them, each once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, model in self.models.items():
            called = self._called(name, model.state_dict())
            for raw, parameter in model.named_parameters():
                found.setdefault(id(parameter), (called.get(raw, _joined(name, raw)), parameter))
        return dict(found.values())

    def content(self, *, models: bool = True, optimizers: bool = True) -> dict[str, Any]:
        """Return what a file holds: further models and optimizers by name under ``also``, and what is what.

        Optimizers say which parameters they train: ``param_names`` of their groups.
        """
        parts: dict[str, dict[str, Any]] = {}
        names: dict[int, str] = {}
        buffers: list[str] = []
        for name, model in self.models.items():
            state = model.state_dict()
            called = self._called(name, state)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            for raw, parameter in parameters.items():
                names.setdefault(id(parameter), called.get(raw, _joined(name, raw)))
            buffers += [plain for raw, plain in called.items() if raw not in parameters]
            if models:
                parts[name] = {"model": state}
        for name, held in self.optimizers.items() if optimizers else ():
            states = [_state_of(one, names) for one in held]
            parts.setdefault(name, {})["optimizer"] = states if name in self._is_list else states[0]
        also = {name: part for name, part in parts.items() if name}
        said = {SAVE_KEY: {"save": _VERSION, "buffers": buffers}}
        return {**parts.get("", {}), **({"also": also} if also else {}), **said}

    def _called(self, name: str, state: Mapping[str, Any]) -> dict[str, str]:
        """Return what an archive calls the tensors of a model, by what the model calls them."""
        called = self._names.get(name, {})
        if called.keys() != state.keys():
            plain = strip_wrappers(list(state))
            called = {raw: _joined(name, one) for raw, one in zip(state, plain, strict=True)}
            self._names[name] = called
        return called

    def known_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return names of tensors of models: as in their state dicts, behind the name of a further one.

        Raises
        ------
        InputError
            No model has a tensor of one of them, or there is none.
        """
        asked = frozenset([names] if isinstance(names, str) else names)
        own = {_joined(name, raw) for name, model in self.models.items() for raw in model.state_dict()}
        unknown = sorted(asked - own)
        if unknown or not asked:
            raise InputError(
                f"the model has no tensor '{unknown[0]}'" if unknown else "a partial restore of no tensor",
                expected="names as in model.state_dict()",
                remedy="leave `partial` out to restore everything",
            )
        return asked

    def require_same(self, content: Mapping[str, Any], where: str) -> None:
        """Refuse what was saved of other models or optimizers, before anything is loaded.

        Raises
        ------
        InputError
            A model or an optimizer is not the one that was saved.
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
        for name, held in self.optimizers.items():
            saved = states_of(_part(content, name))
            if saved and len(saved) != len(held):
                raise _other_optimizer(where, f"{len(saved)} of them", f"{len(held)}")
            for optimizer, state in zip(held, saved, strict=False):
                _require_same_optimizer(optimizer, state, where)

    def load(self, content: Mapping[str, Any]) -> None:
        """Load what was saved; optimizers of which nothing was saved forget what they have gathered."""
        for name, held in self.optimizers.items():
            saved = states_of(_part(content, name))
            for number, optimizer in enumerate(held):
                if saved:
                    optimizer.load_state_dict(_without_names(saved[number]))
                else:
                    optimizer.state = defaultdict(dict)
        for name, model in self.models.items():
            model.load_state_dict(_renamed(model.state_dict(), _part(content, name)["model"]))

    def load_lost(self, content: Mapping[str, Any], names: frozenset[str]) -> None:
        """Load some tensors in place, and the optimizers' state of them.

        Parameters
        ----------
        content
            What was saved; the saved models and optimizers had the same tensors and parameter groups.
        names
            Of the tensors that were lost, as `known_names` has them.

        References
        ----------
        Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (SCAR), ICML 2019, section 4.
        """
        lost: set[int] = set()
        for name, model in self.models.items():
            own = model.state_dict()
            saved = _renamed(own, _part(content, name)["model"])
            wanted = [raw for raw in own if _joined(name, raw) in names]
            with torch.no_grad():
                for raw in wanted:
                    if isinstance(own[raw], Tensor):
                        own[raw].copy_(saved[raw])
            parameters = dict(model.named_parameters(remove_duplicate=False))
            lost |= {id(parameters[raw]) for raw in wanted if raw in parameters}
        for name, held in self.optimizers.items():
            saved_states = states_of(_part(content, name)) or [{}] * len(held)
            for optimizer, whole in zip(held, saved_states, strict=True):
                trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
                for number, parameter in enumerate(trained):
                    if id(parameter) in lost:
                        state = whole.get("state", {}).get(number, {})
                        optimizer.state[parameter] = {k: _loaded(v, parameter) for k, v in state.items()}


def _joined(name: str, raw: str) -> str:
    return f"{name}.{raw}" if name else raw


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what a file holds of a name; nothing where it holds nothing."""
    also = content.get("also")
    part = content if not name else also.get(name) if isinstance(also, dict) else None
    return part if isinstance(part, dict) else {}


def parts_of(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a file holds of the training's own model and optimizer, and of each further name."""
    return [content, *content.get("also", {}).values()]


def states_of(part: Mapping[str, Any]) -> list[Any]:
    """Return the states of the optimizers of one name; none where they were left out."""
    saved = part.get("optimizer")
    return [] if saved is None else saved if isinstance(saved, list) else [saved]


def _state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer, in which each group says what its parameters are called."""
    state = optimizer.state_dict()
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return state
    named = []
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        called = [names.get(id(parameter)) for parameter in own["params"]]
        # A group with a parameter that no model has, a master weight, is left to what readers find out.
        named.append(group if None in called else {**group, "param_names": called})
    return {**state, "param_groups": named}


def _without_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state as the optimizer itself gave it; it knows the names of its own."""
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _renamed(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state dict by the names of a model that other wrappers may be around."""
    if own.keys() == saved.keys():
        return saved
    by_plain = dict(zip(strip_wrappers(list(saved)), saved.values(), strict=True))
    renamed: OrderedDict[str, Any] = OrderedDict()
    for raw, plain in zip(own, strip_wrappers(list(own)), strict=True):
        renamed[raw] = by_plain[plain]
    if hasattr(own, "_metadata"):
        renamed._metadata = own._metadata  # type: ignore[attr-defined]
    return renamed


def _loaded(value: Any, parameter: Tensor) -> Any:
    """Return a value of an optimizer's state where the parameter is; a step counter stays in host memory."""
    if not isinstance(value, Tensor):
        return value
    return value.to(parameter.device, copy=True) if value.dim() else value.clone()


def _require_same_model(model: nn.Module, saved: Mapping[str, Any], where: str, label: str) -> None:
    """Refuse another model before anything is loaded; wrappers around it may be others."""
    own = model.state_dict()
    sides: list[dict[str, Any]] = [
        dict(zip(strip_wrappers(list(side)), side.values(), strict=True)) for side in (own, saved)
    ]
    for name in dict.fromkeys(one for side in sides for one in side):
        if any(name not in side for side in sides):
            side = "has no tensor" if name not in sides[1] else "has a tensor that the model lacks:"
            raise InputError(
                f"the saved model {side} '{_joined(label, name)}'",
                where=where,
                remedy="build the model saved",
            )
        # What a module saves beside tensors has no shape, and is its own business.
        shapes = [tuple(getattr(side[name], "shape", ())) for side in sides]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"tensor '{_joined(label, name)}' has another shape than the one saved",
                where=where,
                expected=str(shapes[1]),
                found=str(shapes[0]),
                remedy="build the model that was saved",
            )


def _require_same_optimizer(optimizer: Optimizer, state: Any, where: str) -> None:
    """Refuse another optimizer before anything is loaded."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group.get("params", ())) for group in groups] if isinstance(groups, list) else []
    if own != saved:
        raise _other_optimizer(where, f"parameter groups of {saved}", f"{own}")


def _other_optimizer(where: str, expected: str, found: str) -> InputError:
    return InputError(
        "the optimizer is not the one that was saved",
        where=where,
        expected=expected,
        found=found,
        remedy="build the optimizer that was saved",
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in state dicts of models and optimizers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def memory(tensor: Tensor) -> int:
    """Return where the storage of a tensor begins; 0 of one that has none, or several."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or kept as other tensors
        return 0
