"""Which model of a checkpoint a tensor belongs to, and which models are moving averages of another.

The names of a second model's tensors begin with the model's: ``ema.fc.weight`` beside ``fc.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

AVERAGE: Final = "average"
"""What an evaluator asks for to get the moving average, whatever it is called."""

N_AVERAGED: Final = "n_averaged"
"""Buffer of ``torch.optim.swa_utils.AveragedModel``, which has the model under ``module``."""

_BEGIN: Final = r"(?:^|[._-]|(?<=[a-z])(?=[A-Z]))"
_END: Final = r"(?![a-z])"
_AVERAGE: Final = re.compile(rf"{_BEGIN}(?i:emas?|swa|ewma|polyak|avg|averaged?|averaging|shadow){_END}")
_COPY: Final = re.compile(rf"{_BEGIN}(?i:teacher|target|momentum|lagged|slow|old){_END}")
"""Names of models that follow another one; layers have such names too, so that shapes have to confirm it."""

Shapes = Mapping[str, tuple[int, ...]]


def is_average_name(name: str) -> bool:
    """Tell whether a model or a key of a file is called like a moving average.

    Examples
    --------
    >>> [is_average_name(name) for name in ("ema", "unet_ema", "netEMA", "state_dict_ema", "schema")]
    [True, True, True, True, False]
    """
    return _AVERAGE.search(name) is not None


def model_of(name: str, models: Iterable[str]) -> str:
    """Return the name of the model that a tensor belongs to; that of the main model is empty.

    Examples
    --------
    >>> model_of("ema.fc.weight", ["ema"]), model_of("fc.weight", ["ema"])
    ('ema', '')
    """
    return max((model for model in models if name.startswith(f"{model}.")), key=len, default="")


def twins(shapes: Shapes, models: Collection[str] = (), trained: Collection[str] = ()) -> dict[str, str]:
    """Return for each tensor of a moving average the tensor that it averages, by name.

    Parameters
    ----------
    shapes
        Shapes of weights and buffers by name.
    models
        Names of the models beside the main one.
    trained
        Those that have an optimizer: one that is not called an average is none.

    Notes
    -----
    A model is an average if it is called so and most of its tensors have a twin of the same name and shape,
    or if it has the names and shapes of the main model and no optimizer. An average may also be a module of a
    model: ``ema_model.module.fc.weight`` beside ``model.fc.weight``.

    Examples
    --------
    >>> twins({"fc.weight": (2, 3), "ema.fc.weight": (2, 3)}, ["ema"])
    {'ema.fc.weight': 'fc.weight'}
    """
    groups: dict[str, dict[str, str]] = {}
    for name in shapes:
        model = model_of(name, models)
        prefix = "" if is_average_name(model) else _average_prefix(name)
        if prefix := prefix or (model and f"{model}."):
            groups.setdefault(prefix, {})[name.removeprefix(prefix)] = name
    found: dict[str, str] = {}
    for prefix, members in groups.items():
        if N_AVERAGED in members:
            members = {tail.removeprefix("module."): name for tail, name in members.items()}
        called = is_average_name(prefix)
        if called:
            others = [n for n in shapes if not n.startswith(prefix) and _average_prefix(n) == ""]
            pairs = _paired(members, others, shapes)
            if 2 * sum(shapes[n] != () for n in pairs) > sum(shapes[n] != () for n in members.values()):
                found |= pairs
        elif prefix[:-1] not in trained or _COPY.search(prefix):
            bases = ["", *models] if _COPY.search(prefix) else [""]
            for base in bases:
                own = [n for n in shapes if model_of(n, models) == base and f"{base}." != prefix]
                stem = f"{base}." if base else ""
                pairs = {name: stem + tail for tail, name in members.items()}
                if set(own) == set(pairs.values()) and all(shapes[n] == shapes[t] for n, t in pairs.items()):
                    found |= pairs
                    break
    return found


def _average_prefix(name: str) -> str:
    """Return a name as far as the first module that is called an average."""
    match = _AVERAGE.search(name)
    return name[: name.find(".", match.end()) + 1] if match else ""


def _paired(members: Mapping[str, str], others: Iterable[str], shapes: Shapes) -> dict[str, str]:
    """Return the twins of an average's tensors, from the module in which most of them are."""
    known = {name: name for name in others}
    if not any("." in tail for tail in members):
        # Latent diffusion's average has names without dots.
        known = {name.replace(".", ""): name for name in known} | known
    longest = max(members, key=lambda tail: (shapes[members[tail]] != (), len(tail)))
    bases = {"", *(name.removesuffix(longest) for name in known if name.endswith(longest))}

    def pairs(base: str) -> dict[str, str]:
        wanted = {name: known.get(base + tail) for tail, name in members.items()}
        return {name: twin for name, twin in wanted.items() if twin and shapes[twin] == shapes[name]}

    return max(map(pairs, sorted(bases, key=len)), key=len)
