"""What a training goes on with where some of its tensors were lost, and the others were not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["known_names", "load_lost"]


def known_names(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return names of tensors of a model.

    Raises
    ------
    InputError
        The model has no tensor of one of them, or there is none.
    """
    asked = frozenset([names] if isinstance(names, str) else names)
    unknown = sorted(asked - model.state_dict().keys())
    if unknown or not asked:
        raise InputError(
            f"the model has no tensor '{unknown[0]}'" if unknown else "a partial restore of no tensor",
            expected="names as in model.state_dict()",
            remedy="leave `partial` out to restore everything",
        )
    return asked


def load_lost(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    content: Mapping[str, Any],
    names: frozenset[str],
) -> None:
    """Load some tensors of a model in place, and the optimizer's state of them.

    Parameters
    ----------
    model, optimizer
        What goes on training; the saved ones had the same tensors and parameter groups.
    content
        What was saved: ``model``, a state dict, and ``optimizer``, if it was kept.
    names
        Of the tensors that were lost.

    References
    ----------
    Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (SCAR), ICML 2019, section 4.
    """
    own = model.state_dict()
    with torch.no_grad():
        for name in names:
            if isinstance(own[name], Tensor):
                own[name].copy_(content["model"][name])
    if optimizer is None:
        return
    saved = (content.get("optimizer") or {}).get("state", {})
    named = dict(model.named_parameters(remove_duplicate=False))
    lost = {id(named[name]) for name in names & named.keys()}
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in enumerate(trained):
        if id(parameter) in lost:
            state = saved.get(number, {})
            optimizer.state[parameter] = {key: _loaded(value, parameter) for key, value in state.items()}


def _loaded(value: Any, parameter: Tensor) -> Any:
    """Return a value of an optimizer's state where the parameter is; a step counter stays in host memory."""
    if not isinstance(value, Tensor):
        return value
    return value.to(parameter.device, copy=True) if value.dim() else value.clone()
