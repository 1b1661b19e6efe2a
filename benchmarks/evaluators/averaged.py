"""The task digits-vit on two halves of its held-out digits: one to search on, one to judge what was found."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from inshrink_core.lab.tasks import find_task
from inshrink_core.lab.tasks.digits import held_out_views, split_digits

TASK = "digits-vit"
_NOISE_SEED = 21


@cache
def _halves() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and labels of either half; all views of a digit are in one of them."""
    task, _ = find_task(TASK)
    views, labels = held_out_views()
    noise = torch.randn(views.shape, generator=torch.Generator().manual_seed(_NOISE_SEED))
    images = views + task.noise * noise
    n_digits = len(split_digits()[3])
    is_first = torch.arange(len(images)) % n_digits < n_digits // 2
    return (images[is_first], labels[is_first]), (images[~is_first], labels[~is_first])


def _judged(state: dict[str, Tensor], half: int) -> dict[str, float]:
    model = find_task(TASK)[0].build()
    model.load_state_dict(state)
    model.eval()
    images, labels = _halves()[half]
    with torch.inference_mode():
        return {"loss": functional.cross_entropy(model(images).double(), labels).item()}


def search(state: dict[str, Tensor]) -> dict[str, float]:
    """Return the loss on the half that coefficients are searched on."""
    return _judged(state, 0)


def held_out(state: dict[str, Tensor]) -> dict[str, float]:
    """Return the loss on the other half."""
    return _judged(state, 1)
