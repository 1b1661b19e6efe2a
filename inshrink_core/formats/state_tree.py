"""Find the model, the optimizers and the step in what a torch file holds.

Training scripts agree on no layout, only on habits; the lists of keys below are those habits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from inshrink_core.checkpoint import TensorRole
from inshrink_core.errors import DamagedError
from inshrink_core.formats.pickles.names import TensorRef

__all__ = [
    "OPTIMIZER_STATE_ROLES",
    "OptimizerGroup",
    "OptimizerTree",
    "StateTree",
    "read_state_tree",
    "strip_wrappers",
]

MODEL_KEYS: Final = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")
EMA_KEYS: Final = ("ema", "model_ema", "ema_model", "state_dict_ema", "ema_state_dict")
OPTIMIZER_KEYS: Final = ("optimizer", "optimizer_state_dict", "optim", "optimizers", "optimizer_states")
GRADIENT_KEYS: Final = ("gradients", "gradient", "grads", "grad")
STEP_KEYS: Final = ("global_step", "step", "iter_num", "iteration", "it", "n_iter", "num_updates", "epoch")
"""In the order of precedence."""

_OTHER_STATE: Final = frozenset(
    {"scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "lr_scheduler_state_dict"}
    | {"scaler", "grad_scaler", "scaler_state_dict", "amp", "sampler", "dataloader", "loops", "callbacks"}
    | {"rng", "rng_state", "rng_states", "random_state", "random_states", "torch_rng_state"}
    | {"cuda_rng_state", "hyper_parameters", "config", "args", "metadata"}
)
"""Keys whose tensors are no part of a model: they travel with the skeleton."""

OPTIMIZER_STATE_ROLES: Final = {
    "exp_avg": TensorRole.EXP_AVG,
    "exp_avg_sq": TensorRole.EXP_AVG_SQ,
    "max_exp_avg_sq": TensorRole.MAX_EXP_AVG_SQ,
    "momentum_buffer": TensorRole.MOMENTUM,
    "momentum": TensorRole.MOMENTUM,
    "step": TensorRole.STEP,
    "master_param": TensorRole.MASTER,
    "master_weight": TensorRole.MASTER,
    "master_weights": TensorRole.MASTER,
    "master": TensorRole.MASTER,
    "fp32_from_fp16": TensorRole.MASTER,
    "fp32": TensorRole.MASTER,
}

_INNER_WRAPPERS: Final = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_MAX_DEPTH: Final = 8
_MAX_VALUES: Final = 4_000_000
_SOME_VALUES: Final = 4096
_LEAST_TENSOR_BYTES: Final = 32
"""Of a pickle: PyTorch writes about a hundred for each tensor."""

_MAX_INTEGER: Final = 1 << 61
_FEW_PARAMS: Final = 4096


class OptimizerGroup(NamedTuple):
    """One parameter group: its parameters (numbers or names), names if known, its hyperparameters."""

    params: tuple[int | str, ...]
    names: tuple[str, ...]
    numbers: dict[str, float]


class OptimizerTree(NamedTuple):
    """State tensors by parameter, and the groups."""

    state: dict[int | str, dict[TensorRole, TensorRef]]
    groups: tuple[OptimizerGroup, ...]


class StateTree(NamedTuple):
    """What a torch file holds.

    Parameters
    ----------
    model
        Name and tensor of weights and buffers, wrapper prefixes removed, in the file's order.
    extra
        Weights under other top-level keys, named ``ema.<name>`` or ``<key>.<name>``.
    gradients
        By parameter name.
    optimizers
        Every optimizer, in the file's order.
    steps
        Step keys present with their values, in order of precedence.
    """

    model: list[tuple[str, TensorRef]]
    extra: list[tuple[str, TensorRef]]
    gradients: list[tuple[str, TensorRef]]
    optimizers: tuple[OptimizerTree, ...]
    steps: tuple[tuple[str, int], ...]


def strip_wrappers(names: list[str]) -> list[str]:
    """Return names without what DistributedDataParallel, FSDP and torch.compile put before them.

    ``module.`` goes only where every name has it, since a submodule may be called so. Names that
    would collide stay as they are.

    Examples
    --------
    >>> strip_wrappers(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    ['fc.weight', 'fc.bias']
    """
    stripped = list(names)
    while True:
        before = stripped
        for wrapper in _INNER_WRAPPERS:
            if any(wrapper in name for name in stripped):
                stripped = [name.replace(wrapper, "") for name in stripped]
        if stripped and all(name.startswith("module.") and len(name) > 7 for name in stripped):
            stripped = [name[7:] for name in stripped]
        if stripped == before:
            break
    if stripped == names:
        return names
    seen: dict[str, int] = {}
    for name in stripped:
        seen[name] = seen.get(name, 0) + 1
    return [new if new and seen[new] == 1 else old for old, new in zip(names, stripped, strict=True)]


class _Walker:
    """Walks containers that may be huge, shared or refer to themselves; counts, and stops at a bound.

    The bound is the size of the pickle: a value takes a byte of it at least, and a name its length. Only
    one that shares its containers many times over has more to look at than it has bytes.
    """

    def __init__(self, where: str, n_bytes: int | None) -> None:
        self.where, self.n_values, self.n_signs = where, 0, 0
        self.most = _MAX_VALUES if n_bytes is None else min(_MAX_VALUES, _SOME_VALUES + n_bytes)
        self.most_tensors = self.most if n_bytes is None else _SOME_VALUES + n_bytes // _LEAST_TENSOR_BYTES
        self.most_signs = 4 * (self.most if n_bytes is None else _SOME_VALUES + n_bytes)
        self.n_tensors = 0

    def spend(self, n_values: int) -> None:
        """Count values that are looked at.

        Raises
        ------
        DamagedError
            They are too many.
        """
        self.n_values += n_values
        if self.n_values > self.most:
            raise DamagedError("the file holds more values than a checkpoint would", where=self.where)

    def name(self, prefix: str, key: object) -> str:
        """Return the name of a tensor."""
        name = f"{prefix}{key}"
        self.n_signs += len(name)
        self.count(1)
        return name

    def count(self, n_tensors: int) -> None:
        """Count tensors that are found, under however many names.

        Raises
        ------
        DamagedError
            They, or their names, are too many.
        """
        self.n_tensors += n_tensors
        if self.n_signs > self.most_signs or self.n_tensors > self.most_tensors:
            raise DamagedError("the file holds more names than a checkpoint would", where=self.where)

    def tensors(self, value: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, TensorRef]]:
        if isinstance(value, dict):
            items: Any = value.items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        else:
            return
        for key, item in items:
            self.spend(1)
            if isinstance(item, TensorRef):
                yield self.name(prefix, key), item
            elif isinstance(item, (dict, list, tuple)) and depth < _MAX_DEPTH and not _is_optimizer(item):
                inner = f"{prefix}{key}."
                self.n_signs += len(inner)
                yield from self.tensors(item, inner, depth + 1)


def _is_optimizer(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), list)
    )


def _is_state_dict(value: object, walker: _Walker) -> bool:
    """Tell whether most values of a mapping are tensors."""
    if not isinstance(value, dict) or not value:
        return False
    walker.spend(len(value))
    return sum(isinstance(v, TensorRef) for v in value.values()) * 2 > len(value)


def _first_of(root: dict[Any, Any], keys: tuple[str, ...]) -> str | None:
    return next((k for k in keys if isinstance(root.get(k), dict) and root[k]), None)


def _find_model(root: object, walker: _Walker) -> tuple[dict[Any, Any], str | None]:
    """Return the mapping that holds the model, and under which top-level key it was."""
    top: str | None = None
    for _ in range(_MAX_DEPTH):
        if not isinstance(root, dict) or _is_state_dict(root, walker) or _is_optimizer(root):
            break
        key = _first_of(root, MODEL_KEYS)
        if key is None:
            break
        top, root = top or key, root[key]
    return (root if isinstance(root, dict) else {}), top


def _unique(pairs: Iterator[tuple[str, TensorRef]], prefix: str = "") -> list[tuple[str, TensorRef]]:
    found: dict[str, TensorRef] = {}
    for name, ref in pairs:
        found.setdefault(name, ref)
    names = strip_wrappers(list(found))
    return [(prefix + name, ref) for name, ref in zip(names, found.values(), strict=True)]


def _numbers(group: dict[Any, Any]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key in ("lr", "eps", "weight_decay", "momentum"):
        value = group.get(key)
        if (number := _float(value)) is not None:
            numbers[key] = number
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and len(betas) >= 2:
        first, second = _float(betas[0]), _float(betas[1])
        if first is not None and second is not None:
            numbers["beta1"], numbers["beta2"] = first, second
    return numbers


def _float(value: object) -> float | None:
    """Return a finite number as a float; None of anything else, a number of a thousand bits included."""
    if type(value) is int and abs(value) < _MAX_INTEGER:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else None


def _identifiers(values: object, walker: _Walker) -> tuple[int | str, ...]:
    """Return the numbers or names of parameters; numbers whose hashes may be chosen to collide are none."""
    if not isinstance(values, list):
        return ()
    walker.spend(len(values))
    most = _MAX_INTEGER if len(values) <= _FEW_PARAMS else 8 * len(values)
    return tuple(v for v in values if isinstance(v, str) or (type(v) is int and 0 <= v < most))


def _state_tensors(state: object, walker: _Walker) -> dict[TensorRole, TensorRef]:
    found: dict[TensorRole, TensorRef] = {}
    if isinstance(state, dict):
        walker.spend(len(state))
        for key, value in state.items():
            role = OPTIMIZER_STATE_ROLES.get(key) if isinstance(key, str) else None
            if role is not None and isinstance(value, TensorRef):
                found.setdefault(role, value)
        walker.count(len(found))
    return found


def _read_optimizer(tree: dict[Any, Any], walker: _Walker) -> OptimizerTree:
    walker.spend(len(tree["state"]) + len(tree["param_groups"]))
    state = {
        key: _state_tensors(value, walker)
        for key, value in tree["state"].items()
        if isinstance(key, (int, str))
    }
    groups = []
    for group in tree["param_groups"]:
        if not isinstance(group, dict):
            continue
        params = _identifiers(group.get("params"), walker)
        names = tuple(n for n in _identifiers(group.get("param_names"), walker) if isinstance(n, str))
        groups.append(OptimizerGroup(params, names if len(names) == len(params) else (), _numbers(group)))
    return OptimizerTree(state, tuple(groups))


def _optimizers(value: object, walker: _Walker, depth: int = 0) -> Iterator[OptimizerTree]:
    """Find optimizers in a value: one, a list or a mapping of them, or state by parameter name."""
    if _is_optimizer(value):
        yield _read_optimizer(value, walker)  # type: ignore[arg-type]
    elif isinstance(value, (list, tuple)) and depth < 2:
        for item in value[:64]:
            yield from _optimizers(item, walker, depth + 1)
    elif isinstance(value, dict) and depth < 2:
        by_name: dict[int | str, dict[TensorRole, TensorRef]] = {}
        walker.spend(len(value))
        for key, item in value.items():
            if _is_optimizer(item):
                yield _read_optimizer(item, walker)
            elif isinstance(key, str) and (state := _state_tensors(item, walker)):
                by_name[key] = state
        if by_name:
            yield OptimizerTree(by_name, ())


def _steps(root: dict[Any, Any]) -> tuple[tuple[str, int], ...]:
    found = []
    for key in STEP_KEYS:
        value = root.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is int and 0 <= value < 1 << 62:
            found.append((key, value))
    return tuple(found)


def read_state_tree(root: object, where: str = "", *, n_bytes: int | None = None) -> StateTree:
    """Return the parts of a torch file's content.

    Parameters
    ----------
    root
        What `read_pickle` returned.
    where
        The file, for messages.
    n_bytes
        Size of the pickle, which bounds how much there is to look at.

    Raises
    ------
    DamagedError
        It is a maze rather than a checkpoint: more values than bytes, or more than 4 million.

    Notes
    -----
    A mapping whose values are mostly tensors is a state dict; else the first of `MODEL_KEYS` leads to
    it. Tensors under keys of schedulers and random-number generators are no part of it.
    """
    walker = _Walker(where, n_bytes)
    if _is_optimizer(root):
        return StateTree([], [], [], tuple(_optimizers(root, walker)), ())
    if not isinstance(root, dict):
        return StateTree([], [], [], (), ())
    steps, bare = _steps(root), _is_state_dict(root, walker)
    model, top = _find_model(root, walker)
    names = _unique(walker.tensors(model)) if bare or top is not None else []
    extra: list[tuple[str, TensorRef]] = []
    gradients: list[tuple[str, TensorRef]] = []
    optimizers: list[OptimizerTree] = []
    for key, value in [] if bare else list(root.items()):
        if key == top or not isinstance(key, str) or not isinstance(value, (dict, list, tuple)):
            continue
        if key in GRADIENT_KEYS:
            gradients += _unique(walker.tensors(value))
        elif key in OPTIMIZER_KEYS or _is_optimizer(value):
            optimizers += _optimizers(value, walker)
        elif key.lower() not in _OTHER_STATE and isinstance(value, dict):
            inner, _ = _find_model(value, walker)
            if _is_state_dict(inner, walker):
                extra += _unique(walker.tensors(inner), "ema." if key in EMA_KEYS else f"{key}.")
            else:
                optimizers += _optimizers(value, walker, depth=1)
    return StateTree(names, extra, gradients, tuple(optimizers), steps)
