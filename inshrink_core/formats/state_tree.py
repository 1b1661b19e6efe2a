"""Find the model, the optimizers and the step in a torch file, and match state to parameters.

Training scripts share no layout, only conventions; the lists of keys below are these conventions.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    MODEL_ROLES,
    N_AVERAGED,
    OPTIMIZER_ROLES,
    Box,
    TensorRole,
    is_average_name,
    model_of,
    twins,
)
from inshrink_core.errors import DamagedError, clipped
from inshrink_core.formats.matching.laws import Claims, Slot, claims_of_headers
from inshrink_core.formats.torch.pickles import TensorParts, TensorRef, mapping

MODEL_KEYS: Final = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")
MODELS_KEYS: Final = ("models", "networks", "nets", "agents", "policies")
EMA_KEYS: Final = ("ema", "model_ema", "ema_model", "state_dict_ema", "ema_state_dict")
CURRENT_KEY: Final = "current_model_state"
"""Lightning's WeightAveraging stores the trained model here, and its average under the model's usual key."""

_KEYS: Final = (CURRENT_KEY, *MODEL_KEYS)

OPTIMIZER_KEYS: Final = ("optimizer", "optimizer_state_dict", "optim", "optimizers", "optimizer_states")
GRADIENT_KEYS: Final = ("gradients", "gradient", "grads", "grad")
STEP_KEYS: Final = ("global_step", "step", "iter_num", "iteration", "it", "n_iter", "num_updates", "epoch")
"""Keys of the step, in order of precedence."""

SAVE_KEY: Final = "inshrink"
"""The key that marks a file of Inshrink's saver: ``{"save": 1, "buffers": names}``.

Nothing is guessed in such a file: ``model`` and ``optimizer`` have their literal meaning, ``also`` holds
further ones by name, and ``extra`` is never searched for models or optimizers.
"""

_OTHER_STATE: Final = frozenset(
    {"scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "lr_scheduler_state_dict"}
    | {"scaler", "grad_scaler", "scaler_state_dict", "amp", "sampler", "dataloader", "loops", "callbacks"}
    | {"rng", "rng_state", "rng_states", "random_state", "random_states", "torch_rng_state"}
    | {"cuda_rng_state", "hyper_parameters", "config", "args", "metadata", "train_state"}
)
"""Keys whose tensors are no part of a model; they are stored in the skeleton."""

STATE_ROLES: Final = {
    **{role.value: role for role in OPTIMIZER_ROLES},
    "momentum_buffer": TensorRole.MOMENTUM,
    # RMSprop and Adadelta; Adagrad. Averages or sums of squared gradients, like Adam's; only their relative
    # sizes matter.
    **dict.fromkeys(("square_avg", "sum"), TensorRole.EXP_AVG_SQ),
    **dict.fromkeys(
        ("master_param", "master_weight", "master_weights", "fp32_from_fp16", "fp32", "fp32_param"),
        TensorRole.MASTER,
    ),
}

_INNER_WRAPPERS: Final = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_MAX_DEPTH: Final = 8
_MAX_VALUES: Final = 4_000_000
_SOME_VALUES: Final = 4096
_LEAST_TENSOR_BYTES: Final = 32
"""Minimum pickle bytes per tensor; PyTorch writes about a hundred."""

_MIN_DEFERRED_BYTES: Final = 1 << 14
"""Minimum size of a tensor outside model and optimizer; the skeleton stores smaller ones losslessly."""

MAX_EXTENT: Final = 1 << 62
"""Bound for the product of an empty tensor's extents, counting 0 as 1; PyTorch's strides have 64 bits."""

_MAX_NAME: Final = 500
_MAX_INTEGER: Final = 1 << 61
_FEW_PARAMS: Final = 4096
_MAX_MODELS: Final = 64
_MAX_NESTED: Final = 3

_BUFFER_NAME: Final = re.compile(
    r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|masked_bias|position_ids|attn_mask|"
    r"causal_mask|rotary_emb\.\w+)$"
)
_FLOATS: Final = ("float", "bfloat", "complex")
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_SUFFIXES: Final = {role: "" if role in MODEL_ROLES else f"@{role.value}" for role in TensorRole}


class Placed(NamedTuple):
    """A tensor's place in a file: first byte, extent in bytes, element strides (None: contiguous).

    If the tensor is split into `pieces`, each has its own place and `span` is their total size in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    span: int
    pieces: tuple[Piece, ...] = ()

    @classmethod
    def empty(cls, dtype: str, shape: tuple[int, ...], offset: int, where: str) -> Placed:
        """Return the place of a tensor without elements.

        Raises
        ------
        DamagedError
            Its extents are too large for PyTorch.
        """
        if math.prod(size or 1 for size in shape) > MAX_EXTENT:
            raise DamagedError(f"an empty tensor of shape {clipped(str(shape))}", where=where)
        return cls(dtype, shape, None, offset, 0)

    @classmethod
    def joined(cls, dtype: str, shape: tuple[int, ...], parts: Iterable[tuple[Box, int, Placed]]) -> Placed:
        """Return the place of a tensor split into boxes, each with the number of its file and its place."""
        pieces = tuple(Piece(None if box.sizes == shape else box, file, at) for box, file, at in parts)
        nbytes = math.prod(shape) * DTYPE_SIZES[dtype]
        return cls(dtype, shape, None, pieces[0].placed.offset, nbytes, pieces)


def extent(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Return how many storage elements a non-empty tensor spans."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_shared(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> bool:
    """Return whether two elements of a strided tensor may share bytes."""
    if stride is None:
        return False
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step < reach:
            return True
        reach = step * size
    return False


class Piece(NamedTuple):
    """A part of a tensor (None: the whole), the number of its file in the checkpoint, its place there.

    The pieces of a tensor cover it exactly once. No other tensor may share their bytes.
    """

    box: Box | None
    file: int
    placed: Placed


class Named(NamedTuple):
    """A placed tensor with its name, its role and the number of its file."""

    name: str
    role: TensorRole
    placed: Placed
    file: int = 0

    @property
    def key(self) -> str:
        """The key of the tensor's spec."""
        return self.name + _SUFFIXES[self.role]

    def of(self, owner: str, file: int = 0) -> Named:
        """Return a parameter's state tensor, given its suffix, with its full name."""
        return Named(owner + self.name, self.role, self.placed, file)


class OptimizerGroup(NamedTuple):
    """One parameter group: its parameters (numbers or names), names if known, its hyperparameters."""

    params: tuple[int | str, ...]
    names: tuple[str, ...]
    numbers: dict[str, float]


class Optimizer(NamedTuple):
    """State tensors by parameter, and the parameter groups.

    The name of a state tensor is a suffix of the parameter's: empty where the role alone identifies it.
    """

    state: dict[int | str, list[Named]]
    groups: tuple[OptimizerGroup, ...]


class StateTree(NamedTuple):
    """The content of a torch file.

    Parameters
    ----------
    model
        Name and place of weights and buffers in the file's order, without wrapper prefixes.
    extra
        Weights and buffers of further models, named ``ema.<name>`` or ``<key>.<name>``.
    gradients
        Gradients by parameter name.
    optimizers
        Every optimizer, in the file's order.
    steps
        The step keys present with their values, in order of precedence.
    named
        Tensors with a role of their own: state that is named after its parameter, and tensors in a saver's
        file outside models and optimizers, by their path from ``extra``.
    buffers
        Names of the tensors of `model` that are buffers; the others are parameters. None if the file does
        not list them.
    models
        Names of the further models, which prefix the names of their tensors.
    """

    model: Sequence[tuple[str, Placed]] = ()
    extra: Sequence[tuple[str, Placed]] = ()
    gradients: Sequence[tuple[str, Placed]] = ()
    optimizers: tuple[Optimizer, ...] = ()
    steps: tuple[tuple[str, int], ...] = ()
    named: Sequence[Named] = ()
    buffers: frozenset[str] | None = None
    models: tuple[str, ...] = ()

    def with_role(self, tensor: Named) -> Named:
        """Return a tensor of `model` with the role that the file gives it, if any."""
        if self.buffers is None or not tensor.placed.dtype.startswith(_FLOATS):
            return tensor
        return tensor._replace(role=TensorRole.BUFFER if tensor.name in self.buffers else TensorRole.WEIGHT)

    def prefixed(self, prefix: str) -> StateTree:
        """Return the tree with a prefix before the names of tensors, parameters and models."""
        return self.renamed(lambda name: prefix + name)

    def renamed(self, new: Callable[[str], str]) -> StateTree:
        """Return the tree with new names for tensors, parameters and models."""

        def of(rows: Sequence[tuple[str, Placed]]) -> list[tuple[str, Placed]]:
            return [(new(name), placed) for name, placed in rows]

        def param(name: str | int) -> str | int:
            return new(name) if isinstance(name, str) else name

        optimizers = []
        for state, groups in self.optimizers:
            renamed = (
                g._replace(params=tuple(map(param, g.params)), names=tuple(map(new, g.names))) for g in groups
            )
            called = {param(name): items for name, items in state.items()}
            optimizers.append(Optimizer(called, tuple(renamed)))
        return self._replace(
            model=of(self.model),
            extra=of(self.extra),
            gradients=of(self.gradients),
            named=[t if t.role is TensorRole.EXTRA else t._replace(name=new(t.name)) for t in self.named],
            optimizers=tuple(optimizers),
            buffers=None if self.buffers is None else frozenset(map(new, self.buffers)),
            models=tuple(map(new, self.models)),
        )


Place = Callable[[TensorRef], Placed | None]


def strip_wrappers(names: list[str]) -> list[str]:
    """Return names without the prefixes of DistributedDataParallel, FSDP and torch.compile.

    ``module.`` is removed only if every name has it, since a submodule may have that name. Names that
    would collide stay unchanged.

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
    seen = Counter(stripped)
    return [new if new and seen[new] == 1 else old for old, new in zip(names, stripped, strict=True)]


class _Walker:
    """Walks containers that may be huge, shared or cyclic; counts values and stops at a bound.

    The bound follows from the size of the pickle: each value takes at least one byte, and a name its length.
    Only a pickle that shares its containers many times exceeds it.
    """

    def __init__(self, place: Place, where: str, n_bytes: int) -> None:
        self.place, self.where = place, where
        self.n_values = self.n_signs = self.n_tensors = 0
        self.most = min(_MAX_VALUES, _SOME_VALUES + n_bytes)
        self.max_tensors = _SOME_VALUES + n_bytes // _LEAST_TENSOR_BYTES
        self.max_signs = 4 * (_SOME_VALUES + n_bytes)

    def spend(self, n_values: int) -> None:
        """Count visited values.

        Raises
        ------
        DamagedError
            They exceed the bound.
        """
        self.n_values += n_values
        if self.n_values > self.most:
            raise DamagedError("the file holds more values than a checkpoint would", where=self.where)

    def name(self, prefix: str, key: object) -> str:
        """Return the name of a tensor.

        Raises
        ------
        DamagedError
            The number of named tensors, or the total length of their names, exceeds the bound.
        """
        name = f"{prefix}{key}"
        self.n_signs += len(name)
        self.n_tensors += 1
        if self.n_signs > self.max_signs or self.n_tensors > self.max_tensors:
            raise DamagedError("the file holds more names than a checkpoint would", where=self.where)
        return name

    def tensors(self, value: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, TensorRef]]:
        for key, item in _items(value):
            self.spend(1)
            if isinstance(item, TensorRef):
                yield self.name(prefix, key), item
            elif isinstance(item, (dict, list, tuple)) and depth < _MAX_DEPTH and not _is_optimizer(item):
                inner = f"{prefix}{key}."
                self.n_signs += len(inner)
                yield from self.tensors(item, inner, depth + 1)

    def placed(self, value: object, prefix: str = "") -> list[tuple[str, Placed]]:
        """Return the tensors in a value by name; the first of equal names wins."""
        found: dict[str, TensorRef] = {}
        for name, ref in self.tensors(value):
            found.setdefault(name, ref)
        if found.pop(N_AVERAGED, None):  # AveragedModel's counter; it wraps a model like the others
            found = {name.removeprefix("module."): ref for name, ref in found.items()}
        refs = zip(strip_wrappers(list(found)), found.values(), strict=True)
        return [(prefix + name, placed) for name, ref in refs if (placed := self.place(ref)) is not None]

    def carried(self, value: object, name: str) -> list[Named]:
        """Return the tensors anywhere in a value by their paths, except small ones and ones with long paths.

        The skeleton stores the omitted tensors, so exceeding a limit is no error here.
        """
        found: dict[str, Placed] = {}
        seen: set[int] = set()
        waiting: list[tuple[str, object]] = [(name, value)]
        room = self.max_signs
        while waiting and room > 0:
            path, entry = waiting.pop()
            if id(entry) in seen:
                continue
            seen.add(id(entry))
            if isinstance(entry, TensorRef):
                placed = self.place(entry)
                if placed is not None and placed.span >= _MIN_DEFERRED_BYTES:
                    found.setdefault(path, placed)
            else:
                inner = [
                    (f"{path}.{key}", item)
                    for key, item in _items(entry)
                    if isinstance(item, (dict, list, tuple, TensorRef))
                    and (type(key) is int or (type(key) is str and len(path) + len(key) < _MAX_NAME))
                ]
                room -= sum(len(path) for path, _ in inner)
                waiting += reversed(inner)
        return [Named(path, TensorRole.EXTRA, placed) for path, placed in found.items()]


def _items(value: object) -> Iterable[tuple[Any, Any]]:
    """Return the items of a mapping, or those of a sequence by number; nothing for another value."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _is_optimizer(value: object) -> bool:
    kinds = {"state": dict, "param_groups": list}
    return isinstance(value, dict) and all(isinstance(value.get(k), kind) for k, kind in kinds.items())


def _is_state(value: object) -> bool:
    """Return whether a mapping holds a tensor under a key specific to optimizers, unlike ``sum``."""
    words = STATE_ROLES.keys() - {"sum", "state"}
    return isinstance(value, dict) and any(isinstance(value.get(word), TensorRef) for word in words)


def _is_state_dict(value: object, walker: _Walker) -> bool:
    """Return whether most values of a mapping or a list are tensors.

    None entries do not count, nor do numbers and strings beside dotted names.
    """
    if not isinstance(value, (dict, list, tuple)) or not value:
        return False
    walker.spend(len(value))
    tensors = [key for key, v in _items(value) if isinstance(v, (TensorRef, TensorParts))]
    is_dotted = any(isinstance(key, str) and "." in key for key in tensors)
    ignored = _PLAIN if is_dotted else (type(None),)
    return len(tensors) * 2 > sum(not isinstance(v, ignored) for _, v in _items(value))


def _is_model(value: object, walker: _Walker) -> bool:
    """Return whether a value can be a model under a model's key: a mapping, or a list with state dicts."""
    if isinstance(value, (list, tuple)):
        return any(_is_state_dict(item, walker) for item in value[:_MAX_MODELS])
    return isinstance(value, dict) and bool(value)


def _find_model(root: object, walker: _Walker) -> tuple[Any, str | None]:
    """Return the mapping or list that holds the model, and its top-level key."""
    top: str | None = None
    for _ in range(_MAX_DEPTH):
        if not isinstance(root, dict) or _is_state_dict(root, walker) or _is_optimizer(root):
            break
        key = next((k for k in _KEYS if k in root and _is_model(root[k], walker)), None)
        if key is None:
            break
        top, root = top or key, root[key]
    return (root if isinstance(root, (dict, list, tuple)) else {}), top


def _models(value: object, name: str, walker: _Walker, depth: int = 0) -> Iterator[tuple[str, object]]:
    inner, _ = _find_model(value, walker)
    is_top = not depth and isinstance(inner, dict)
    if _is_state_dict(inner, walker) and (is_top or is_average_name(name) or _is_dotted(inner)):
        yield name, inner
    elif depth < _MAX_NESTED and not _is_optimizer(inner):
        # Deeper values count as models only if their key is a model's key.
        is_known = is_average_name(name) or name in MODELS_KEYS
        items = list(islice(_items(inner), _MAX_MODELS))
        walker.spend(len(items))
        is_known_list = is_known or isinstance(inner, (list, tuple))
        rows = [(key, item) for key, item in items if isinstance(item, (dict, list, tuple)) and item]
        known = [(key, item) for key, item in rows if is_known_list or is_average_name(str(key))]
        for key, item in known:
            if is_known or isinstance(key, int):
                found = f"{name}.{key}" if len(known) > 1 else name
            else:
                found = _model_name(re.split(r"\W", str(key))[0])
            yield from _models(item, found, walker, depth + 1)


def _is_dotted(value: object) -> bool:
    """Return whether a mapping has dotted names or matrices; other lists of mappings are plain records."""
    refs = ((k, v) for k, v in value.items() if isinstance(v, TensorRef)) if isinstance(value, dict) else ()
    return any(len(ref.shape) > 1 or "." in str(key) for key, ref in refs)


def _model_name(key: str) -> str:
    return "ema" if key in EMA_KEYS else key


def _numbers(group: dict[Any, Any]) -> dict[str, float]:
    values = {key: group.get(key) for key in ("lr", "eps", "weight_decay", "momentum", "dampening")}
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and None not in map(_float, betas[:2]):
        values |= dict(zip(("beta1", "beta2"), betas, strict=False)) if len(betas) > 1 else {}
    return {key: number for key, value in values.items() if (number := _float(value)) is not None}


def _float(value: object) -> float | None:
    """Return a finite number as a float; None for anything else, including huge integers."""
    if type(value) is int and abs(value) < _MAX_INTEGER:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else None


def _identifiers(values: object, walker: _Walker) -> tuple[int | str, ...]:
    """Return the numbers or names of parameters; drop large numbers, whose hashes could collide."""
    if not isinstance(values, list):
        return ()
    walker.spend(len(values))
    most = _MAX_INTEGER if len(values) <= _FEW_PARAMS else 8 * len(values)
    return tuple(v for v in values if isinstance(v, str) or (type(v) is int and 0 <= v < most))


def _state_tensors(state: object, walker: _Walker) -> list[Named]:
    """Return the optimizer's tensors of a parameter; scalars with unknown keys stay in the skeleton."""
    found: dict[tuple[TensorRole, str], TensorRef] = {}
    if not isinstance(state, dict):
        return []
    for key, ref in walker.tensors(state):
        # Centred RMSprop takes the root of square_avg - grad_avg², which rounding could make negative.
        role = None if key == "square_avg" and "grad_avg" in state else STATE_ROLES.get(key)
        found.setdefault((TensorRole.STATE, f":{key}") if role is None else (role, ""), ref)
    rows = ((suffix, role, walker.place(ref)) for (role, suffix), ref in found.items())
    placed = [Named(suffix, role, place) for suffix, role, place in rows if place is not None]
    return [item for item in placed if item.role is not TensorRole.STATE or item.placed.shape]


def _read_optimizer(tree: dict[Any, Any], walker: _Walker) -> Optimizer:
    walker.spend(len(tree["state"]) + len(tree["param_groups"]))
    items = ((key, value) for key, value in tree["state"].items() if isinstance(key, (int, str)))
    state = {key: _state_tensors(value, walker) for key, value in items}
    groups = []
    for group in tree["param_groups"]:
        if not isinstance(group, dict):
            continue
        params = _identifiers(group.get("params"), walker)
        names = tuple(n for n in _identifiers(group.get("param_names"), walker) if isinstance(n, str))
        groups.append(OptimizerGroup(params, names if len(names) == len(params) else (), _numbers(group)))
    return Optimizer(state, tuple(groups))


def _optimizers(value: object, walker: _Walker, depth: int = 0) -> Iterator[Optimizer]:
    """Yield the optimizers in a value: one, a list or a mapping of them, or state by parameter name."""
    if _is_optimizer(value):
        yield _read_optimizer(value, walker)  # type: ignore[arg-type]
    elif isinstance(value, (list, tuple)) and depth < 2:
        for item in value[:64]:
            yield from _optimizers(item, walker, depth + 1)
    elif isinstance(value, dict) and depth < 2:
        by_name: dict[int | str, list[Named]] = {}
        walker.spend(len(value))
        items: dict[object, Optimizer] = {}
        for key, item in value.items():
            if _is_optimizer(item):
                items[key] = _read_optimizer(item, walker)
            elif isinstance(key, str) and _is_state(item):
                by_name[key] = _state_tensors(item, walker)
        groups: tuple[OptimizerGroup, ...] = ()
        if all(sum(len(group.params) for group in entry.groups) == 1 for entry in items.values()) and any(
            isinstance(key, str) and "." in key for key in items
        ):  # one optimizer per parameter, keyed by its name
            by_name |= {str(key): next(iter(entry.state.values()), []) for key, entry in items.items()}
            groups = tuple(entry.groups[0]._replace(params=(str(key),)) for key, entry in items.items())
            items = {}
        yield from items.values()
        if by_name:
            yield Optimizer(by_name, groups)


def _steps(root: dict[Any, Any]) -> tuple[tuple[str, int], ...]:
    history = root.get("optimizer_history")  # fairseq's
    inner = [history[-1] if isinstance(history, list) and history else None, root.get("extra_state")]
    values: dict[Any, Any] = {}
    for item in (*reversed(inner), root):
        values |= item if isinstance(item, dict) and len(item) < _SOME_VALUES else {}
    found = []
    for key in STEP_KEYS:
        value = values.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is int and 0 <= value < 1 << 62:
            found.append((key, value))
    return tuple(found)


def read_state_tree(root: object, place: Place, where: str = "", *, n_bytes: int = _MAX_VALUES) -> StateTree:
    """Return the parts of a torch file's content.

    Parameters
    ----------
    root
        The value returned by `read_pickle`.
    place
        Returns the place of a tensor; None for one that is carried unread.
    where
        The file, for messages.
    n_bytes
        Size of the pickle in bytes, which bounds the number of visited values.

    Raises
    ------
    DamagedError
        The file has more values than bytes, or more than 4 million; no checkpoint does.

    Notes
    -----
    A mapping with mostly tensors as values is a state dict; otherwise the first of `MODEL_KEYS` leads to
    it. Tensors under the keys of schedulers and random-number generators are no part of it.
    """
    walker = _Walker(place, where, n_bytes)
    if _is_optimizer(root):
        return StateTree(optimizers=tuple(_optimizers(root, walker)))
    if isinstance(root, (list, tuple)) and len(root) <= _MAX_MODELS:
        root = _as_mapping(root)
    if not isinstance(root, dict):
        return StateTree()
    if isinstance(given := root.get(SAVE_KEY), dict) and type(given.get("save")) is int:
        return _read_save(root, given, walker)
    if isinstance(state := root.get("state"), dict) and "model" in state:  # Composer's
        root = state
    steps, bare = _steps(root), _is_state_dict(root, walker)
    model, top = _find_model(root, walker)
    models: dict[str, object] = {"": model} if bare or top is not None else {}
    gradients: list[tuple[str, Placed]] = []
    optimizers: list[Optimizer] = []
    for key, value in list(root.items()):
        if key == top or not isinstance(key, str) or not isinstance(value, (dict, list, tuple)):
            continue
        if _is_optimizer(value) or (key in OPTIMIZER_KEYS and not bare):
            optimizers += _optimizers(value, walker)
        elif bare:
            continue
        elif key in GRADIENT_KEYS:
            gradients += walker.placed(value)
        else:
            name = "ema" if top == CURRENT_KEY and key in MODEL_KEYS else _model_name(key)
            is_other = key.lower() in _OTHER_STATE
            there = _models(value, name, walker)
            inner = {n: item for n, item in there if not is_other or is_average_name(n)}
            models |= inner
            if not inner and not is_other and isinstance(value, dict):
                optimizers += _optimizers(value, walker, depth=1)
    if not models:
        loose = {k: v for k, v in root.items() if _is_parameter(k, v)}
        models = {"": loose} if loose else {}
    trained = [name for name in models if not is_average_name(name)] or list(models)
    if len(trained) == 1:  # the only model is the main one, regardless of its name
        models = {"": models.pop(trained[0])} | models
    main = walker.placed(models.pop("", None))
    found = {name: rows for name, item in models.items() if (rows := walker.placed(item, f"{name}."))}
    extra = [row for rows in found.values() for row in rows]
    return StateTree(main, extra, gradients, tuple(optimizers), steps, models=tuple(found))


def _as_mapping(root: Sequence[Any]) -> dict[str, Any]:
    """Return a sequence of models, optimizers and numbers as a mapping; a single integer is the step."""
    found = {str(at): value for at, value in enumerate(root)}
    for at, value in enumerate(root):
        if isinstance(value, (list, tuple)) and any(map(_is_optimizer, value[:_MAX_MODELS])):
            found |= {f"{at}.{inner}": item for inner, item in enumerate(found.pop(str(at)))}
    numbers = [value for value in root if type(value) is int]
    return found | ({"step": numbers[0]} if len(numbers) == 1 else {})


def _is_parameter(key: object, value: object) -> bool:
    """Return whether a value beside an optimizer is a parameter: a float tensor with dimensions."""
    is_tensor = isinstance(value, TensorRef) and bool(value.shape) and value.dtype.startswith(_FLOATS)
    return is_tensor and isinstance(key, str) and key.lower() not in _OTHER_STATE


def _read_save(root: dict[Any, Any], described: dict[Any, Any], walker: _Walker) -> StateTree:
    """Return the parts of a saver's file, following its explicit keys."""
    buffers, parts = described.get("buffers"), {"": root, **mapping(root.get("also"))}
    model: list[tuple[str, Placed]] = []
    optimizers: list[Optimizer] = []
    for name, part in parts.items():
        if isinstance(part, dict):
            model += walker.placed(part.get("model"), f"{name}." if name else "")
            optimizers += _optimizers(part.get("optimizer"), walker)
    models = tuple(n for n, part in parts.items() if n and isinstance(part, dict) and part.get("model"))
    named = frozenset(n for n in buffers if isinstance(n, str)) if isinstance(buffers, list) else None
    remaining = walker.carried(root.get("extra"), "extra")
    return StateTree(model, (), (), tuple(optimizers), _steps(root), remaining, named, models)


class RoleMap(NamedTuple):
    """Model tensors with their roles, optimizer tensors, and the group of each parameter.

    A group is identified by the numbers of its file, its optimizer and itself. `slots` are the parameters
    that optimizers know by number only, `owners` maps slots to parameter names where known, and `free` holds
    the candidate weights for the remaining slots with their shapes, in the given order.
    """

    model: list[Named]
    state: list[Named]
    groups: dict[str, tuple[int, int, int]]
    slots: tuple[Slot, ...]
    owners: dict[str, str]
    free: dict[str, tuple[int, ...]]


@functools.lru_cache(maxsize=1 << 16)
def is_buffer(name: str, dtype: str) -> bool:
    """Return whether name and dtype show that a tensor is no parameter."""
    # Cached because the names of a run are the same at every step.
    return not dtype.startswith(_FLOATS) or _BUFFER_NAME.search(name) is not None


def _shape_of(state: Sequence[Named]) -> tuple[int, ...] | None:
    """Return the shape of the parameter that owns the state, or None if no tensor shows it."""
    without_shape = (TensorRole.STEP, TensorRole.STATE)
    return next((item.placed.shape for item in state if item.role not in without_shape), None)


def _names_known(optimizer: Optimizer) -> dict[int | str, str]:
    """Return the parameter names that the file gives."""
    params = [p for group in optimizer.groups for p in group.params]
    known = [n for group in optimizer.groups for n in group.names]
    if len(known) == len(params) and params:
        return dict(zip(params, strip_wrappers(known), strict=True))
    by_name = [k for k in dict.fromkeys([*params, *optimizer.state]) if isinstance(k, str)]
    return dict(zip(by_name, strip_wrappers(by_name), strict=True))


class _Parameters(NamedTuple):
    """The parameters of one optimizer: slots and known names, and the prefix of the names of its state."""

    file: int
    number: int
    optimizer: Optimizer
    prefix: str
    slots: dict[int | str, Slot]
    names: dict[int | str, str]


def _parameters(optimizers: Sequence[Sequence[Optimizer]]) -> Iterator[_Parameters]:
    n_optimizers = n_groups = 0
    for file, items in enumerate(optimizers):
        for number, optimizer in enumerate(items):
            prefix = f"optimizer.{n_optimizers}.state" if n_optimizers else "optimizer.state"
            slots: dict[int | str, Slot] = {}
            for params in [*(group.params for group in optimizer.groups), optimizer.state]:
                for param in params:
                    shape = _shape_of(optimizer.state.get(param, ()))
                    slots.setdefault(param, Slot(f"{prefix}.{param}", n_optimizers, n_groups, shape))
                n_groups += 1
            yield _Parameters(file, number, optimizer, prefix, slots, _names_known(optimizer))
            n_optimizers += 1


def parameters_of(model: Mapping[str, tuple[int, Placed]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors whose names are not buffer names; tied tensors count once."""
    first: dict[tuple[int, Placed], str] = {}
    rows = ((name, place[1]) for name, place in model.items() if first.setdefault(place, name) == name)
    return {name: placed.shape for name, placed in rows if not is_buffer(name, placed.dtype)}


def assign_roles(
    model: Mapping[str, tuple[int, Placed]],
    optimizers: Sequence[Sequence[Optimizer]],
    *,
    ordered: bool = True,
    owners: Claims | None = None,
    models: Sequence[str] = (),
) -> RoleMap:
    """Return every tensor with its name and role.

    Parameters
    ----------
    model
        File number and place of weights and buffers by name, in order; tied names have equal places.
    optimizers
        For each file, its optimizers.
    ordered
        Whether the tensors are in the model's order, not sorted by name.
    owners
        Parameter names of the slots; by default those found from headers (`claims_of_headers`).
    models
        Names of the models beside the main one.

    Notes
    -----
    Unattributed state is named after its slot. If all state is attributed, a float tensor that no
    optimizer group holds is a buffer, unless it is a matrix named ``weight``: that is a frozen weight. The
    tensors of a model without any state are frozen too. Models beside the main one count as trained if the
    optimizers have more parameters than the main model; a tensor of a moving average has the role of the
    tensor that it averages.
    """
    free = parameters_of(model)
    every = list(_parameters(optimizers))
    shapes = {name: placed.shape for name, (_, placed) in model.items()}
    averaged = twins(shapes, models)
    if models or averaged:
        weights = {n: shape for n, shape in free.items() if n not in averaged and not model_of(n, models)}
        if sum(len(item.slots) for item in every) > len(weights):
            averaged = twins(shapes, models, models)
            weights = {n: shape for n, shape in free.items() if n not in averaged or not model_of(n, models)}
        free = weights
    named = {name for item in every for name in item.names.values()}
    free = {name: shape for name, shape in free.items() if name not in named}
    slots = [slot for item in every for param, slot in item.slots.items() if param not in item.names]
    if owners is None:
        owners = claims_of_headers(slots, free, ordered=ordered)
    owners = {slot.key: owners[slot.key] for slot in slots if owners.get(slot.key) in free}
    state: list[Named] = []
    groups: dict[str, tuple[int, int, int]] = {}
    unmatched, taken = False, set[str]()
    for file, number, optimizer, prefix, numbered, names in every:
        called = {param: names.get(param) or owners.get(slot.key, "") for param, slot in numbered.items()}
        for param, tensors in optimizer.state.items():
            added = [item.of(called[param], file) for item in tensors]
            if not called[param] or not taken.isdisjoint(item.key for item in added):
                unmatched, added = True, [item.of(f"{prefix}.{param}", file) for item in tensors]
            taken.update(tensor.key for tensor in added)
            state += added
        for i, group in enumerate(optimizer.groups):
            if group.numbers:
                groups |= {called[p] or f"{prefix}.{p}": (file, number, i) for p in group.params}
    used = {*owners.values(), *named}
    trained = {model_of(name, models) for name in used}
    any_state = any(item.optimizer.state for item in every)
    loose = free.keys() - used if any_state and not unmatched else set()
    loose = {name for name in loose if model_of(name, models) in trained}
    roles = []
    for name, (file, placed) in model.items():
        source = averaged.get(name, name)
        is_frozen = len(placed.shape) >= 2 and source.endswith("weight")
        beside = is_buffer(source, placed.dtype) or (source in loose and not is_frozen)
        roles.append(Named(name, TensorRole.BUFFER if beside else TensorRole.WEIGHT, placed, file))
    return RoleMap(roles, state, groups, tuple(slots), owners, free)
