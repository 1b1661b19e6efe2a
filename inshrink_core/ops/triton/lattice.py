"""Triton kernels of the lattice codec: rounding and its inverse.

`inshrink_core.ops.lattice` documents the functions and has the versions in plain PyTorch. Importing this
module needs Triton. Kernels are launched without fused multiply-add, which would round once instead of twice.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.lattice import (
    CONTEXT_BITS,
    EXACT,
    FIRST_LARGE,
    MAX_PRODUCT,
    NEGATIVE,
    OLDEST_CONTEXT,
    Lattice,
    Rounded,
)

_CONTEXT = tl.constexpr(CONTEXT_BITS)
_SIGN = tl.constexpr(NEGATIVE)
_AGING = tl.constexpr(OLDEST_CONTEXT)
_LARGE = tl.constexpr(FIRST_LARGE)
_EXACT = tl.constexpr(EXACT)
_FIRST_INTEGER = tl.constexpr(2.0**23)

RANKED = 1024
"""Elements of a program: eight per thread, two 16-byte accesses for each 32-bit array."""


@triton.jit
def nearest(x: tl.tensor) -> tl.tensor:
    """Round to the nearest integer, ties to even: a sum with 2**23 has no fractional bits."""
    size = tl.abs(x)
    rounded = tl.where(size < _FIRST_INTEGER, (size + _FIRST_INTEGER) - _FIRST_INTEGER, size)
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def _next_context_state(change: tl.tensor, old: tl.tensor) -> tl.tensor:
    """Return the context state after a change; only the sign of the change matters."""
    context = old & _CONTEXT
    aged = old + tl.where((context > 0) & (context < _AGING), 3, 0)
    negative = (change < 0).to(tl.int32)
    pair = 2 + (negative ^ ((old >> 5) & 1))
    fresh = tl.where(context == 0, 1, pair) + negative * _SIGN
    return tl.where(change == 0, aged, fresh)


@triton.jit
def _token_of(z: tl.tensor) -> tl.tensor:
    """Return z below 128, else ``128 + 4 (k - 7)`` plus the two bits of z below its highest bit, number k."""
    # With the bit below the highest cleared, rounding to float32 cannot reach the next power of two.
    place = ((z & ~(z >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    large = _LARGE + 4 * (place - 7) + ((z >> tl.maximum(place - 2, 0)) & 3)
    return tl.where(z < _LARGE, z, large)


@triton.jit(do_not_specialize=["step_size", "bound"])
def _round(
    values: tl.tensor,
    integers: tl.tensor,
    context_state: tl.tensor,
    chosen: tl.tensor,
    tokens: tl.tensor,
    after: tl.tensor,
    new: tl.tensor,
    seen: tl.tensor,
    unit: tl.tensor,
    reciprocal: tl.tensor,
    limit: tl.tensor,
    step_size: tl.tensor,
    bound: tl.tensor,
    n: tl.tensor,
    tracked: tl.constexpr,
    given: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Compute ``q = rint((w - N u) / (D u))`` and ``N' = N + D q`` for the elements of a program.

    w are `values`, N `integers`, u the unit and D `step_size`, in units. `chosen` holds q instead, if given.
    An element is `EXACT`, with ``N' = 0``, if q exceeds `limit` or N' exceeds `bound`. For others, let p be q
    times the sign of the last change: the token encodes ``z = 2p`` for ``p >= 0``, else ``-2p - 1``. `seen`
    receives the numbers of large and of exact tokens, and the largest token.
    """
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = place < n
    w = tl.load(values + place, mask=here, other=0.0)
    before = tl.load(integers + place, mask=here, other=0)
    old = tl.zeros((size,), tl.int32)
    if tracked:
        old = tl.load(context_state + place, mask=here, other=0).to(tl.int32)
    if given:
        changes = tl.load(chosen + place, mask=here, other=0.0)
    else:
        changes = nearest((w - before.to(tl.float32) * unit) * reciprocal)
    near = tl.abs(changes) <= limit  # false for NaN
    change = tl.where(near, changes, 0.0).to(tl.int32)
    reached = before + step_size * change
    exact = here & ((near == 0) | (reached > bound) | (reached < -bound))
    change = tl.where(exact, 0, change)
    turned = tl.where((old & _SIGN) != 0, -change, change)
    token = tl.where(exact, _EXACT, _token_of((turned << 1) ^ (turned >> 31)))
    fresh = tl.where(exact, 0, _next_context_state(change, old))
    tl.store(tokens + place, token.to(tl.uint8), mask=here)
    tl.store(after + place, tl.where(exact, 0, reached), mask=here)
    tl.store(new + place, fresh.to(tl.uint8), mask=here)
    token = tl.where(here, token, 0)
    tally = seen + 3 * tl.program_id(0).to(tl.int64)
    tl.store(tally, tl.sum((token >= _LARGE).to(tl.int32), 0))
    tl.store(tally + 1, tl.sum(exact.to(tl.int32), 0))
    tl.store(tally + 2, tl.max(token, 0))


@triton.jit(do_not_specialize=["step_size", "bound", "n_large"])
def _advance(
    tokens: tl.tensor,
    large: tl.tensor,
    ranks: tl.tensor,
    integers: tl.tensor,
    context_state: tl.tensor,
    after: tl.tensor,
    new: tl.tensor,
    outside: tl.tensor,
    step_size: tl.tensor,
    bound: tl.tensor,
    n: tl.tensor,
    n_large: tl.tensor,
    known: tl.constexpr,
    tracked: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Compute ``N' = N + D q`` from the tokens of a program; the inverse of `_round`.

    A large token has its z in `large`, at its rank among the large tokens: that of the program, from `ranks`,
    plus a prefix sum. `outside` receives the number of elements whose N' exceeds `bound`, or whose z is
    missing.
    """
    block = tl.program_id(0).to(tl.int64)
    place = block * size + tl.arange(0, size)
    here = place < n
    token = tl.load(tokens + place, mask=here, other=0).to(tl.int32)
    is_large = (token >= _LARGE) & (token != _EXACT)
    rank = tl.load(ranks + block) + tl.cumsum(is_large.to(tl.int32), 0) - 1
    stored = is_large & (rank < n_large)
    z = tl.where(token < _LARGE, token, 0).to(tl.int64) + tl.load(large + rank, mask=stored, other=0)
    change = (z >> 1) ^ -(z & 1)
    old = tl.zeros((size,), tl.int32)
    if tracked:
        old = tl.load(context_state + place, mask=here, other=0).to(tl.int32)
    change = tl.where((old & _SIGN) != 0, -change, change)
    reached = step_size * change
    if known:
        reached += tl.load(integers + place, mask=here, other=0)
    exact = token == _EXACT
    reached = tl.where(exact, 0, reached)
    fresh = tl.where(exact, 0, _next_context_state(change, old))
    tl.store(after + place, reached.to(tl.int32), mask=here)
    tl.store(new + place, fresh.to(tl.uint8), mask=here)
    wrong = (reached > bound) | (reached < -bound) | (is_large & (rank >= n_large))
    tl.store(outside + block, tl.sum((here & wrong).to(tl.int32), 0))


def round_to_lattice(
    values: Tensor,
    integers: Tensor | None,
    context_state: Tensor | None,
    lattice: Lattice,
    changes: Tensor | None = None,
) -> Rounded:
    """See `inshrink_core.ops.lattice.round_to_lattice`."""
    if integers is None:
        integers = torch.zeros(values.numel(), dtype=torch.int32, device=values.device)
    device, home, n = values.device, integers.device, values.numel()
    n_blocks = triton.cdiv(n, RANKED)
    tokens, new = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    after = torch.empty(n, dtype=torch.int32, device=device)
    seen = torch.empty(n_blocks, 3, dtype=torch.int32, device=device)
    before = integers.to(device)
    known = tokens if context_state is None else context_state.to(device)
    tracked, given = context_state is not None, changes is not None
    chosen = values if changes is None else changes.to(device)
    tensors = (values, before, known, chosen, tokens, after, new, seen)
    limit = float(MAX_PRODUCT // lattice.step_size)
    numbers = (lattice.unit, lattice.reciprocal, limit, lattice.step_size, lattice.bound, n)
    _round[(n_blocks,)](*tensors, *numbers, tracked, given, RANKED, enable_fp_fusion=False)
    n_large, n_exact = seen[:, :2].sum(0).tolist()
    largest = int(seen[:, 2].max())
    return Rounded(tokens.to(home), after.to(home), new.to(home), n_large, n_exact, largest)


def advance(
    tokens: Tensor,
    large: NDArray[np.int64],
    integers: Tensor | None,
    context_state: Tensor | None,
    lattice: Lattice,
) -> tuple[Tensor, Tensor] | None:
    """See `inshrink_core.ops.lattice.advance`."""
    device, n = tokens.device, tokens.numel()
    after = torch.empty(n, dtype=torch.int32, device=device)
    new = torch.empty(n, dtype=torch.uint8, device=device)
    n_blocks = triton.cdiv(n, RANKED)
    outside = torch.empty(n_blocks, dtype=torch.int32, device=device)
    found = (tokens >= FIRST_LARGE) & (tokens < EXACT)
    blocks = torch.nn.functional.pad(found, (0, -n % RANKED)).view(-1, RANKED).sum(1)
    ranks = blocks.cumsum(0) - blocks
    stored = torch.from_numpy(large).to(device) if large.size else ranks
    before = after if integers is None else integers.to(device)
    past = new if context_state is None else context_state.to(device)
    tensors = (tokens, stored, ranks, before, past, after, new, outside)
    numbers = (lattice.step_size, lattice.bound, n, large.size)
    known, tracked = integers is not None, context_state is not None
    _advance[(n_blocks,)](*tensors, *numbers, known, tracked, RANKED, enable_fp_fusion=False)
    return None if bool(outside.any()) else (after, new)
