"""The sums over a sample in numba: one call, because what it replaces is ten of torch's.

Each of those hands the GIL to another thread that observes its tensor, and waits for it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Int32s, Int64s, UInt32s, brief
from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.sample import SAMPLE_RUN, SAMPLE_RUNS, Sampled, sample

__all__: list[str] = []

_F32, _U32 = np.float32, np.uint32
_NO_INTEGERS, _NO_MOMENTS = np.zeros(1, np.int32), np.zeros(1, np.float32)


@brief
def _sum(
    w: Float32s,
    x: Int32s,
    known: int,
    m: Float32s,
    adaptive: int,
    n_runs: int,
    run: int,
    apart: int,
    unit: np.float32,
    terms: Float32s,
    bits: UInt32s,
    sums: Int64s,
    places: Int64s,
    probe: Float32s,
) -> None:  # pragma: no cover - compiled
    """Add up runs; `known` and `adaptive` are 1, or 0 where their array has one element.

    `bits` is `terms`, of three numbers, as integers.
    """
    for begin in range(0, n_runs * apart, apart):
        for i in range(begin, begin + run):
            away = _F32(w[i] - _F32(_F32(x[i * known]) * unit))
            terms[0], terms[1], terms[2] = _F32(w[i] * w[i]), _F32(away * away), m[i * adaptive]
            for k in range(3):
                exponent = (bits[k] >> 23) & 255
                # With the hidden bit, which subnormal numbers do not have.
                sums[k, exponent] += (bits[k] & 0x7FFFFF) | (0x800000 if exponent > 0 else 0)
                if exponent == 255:
                    sums[k, 256] += 1
    for k in range(places.size):
        probe[k] = w[places[k]]


def add_sample(
    values: Tensor, integers: Tensor | None, second: Tensor | None, unit: float, places: Int64s
) -> Sampled:
    """See `sample.sample_sums`."""
    if values.dtype != torch.float32 or (second is not None and second.dtype != torch.float32):
        return _of_samples(values, integers, second, unit, places)
    n = values.numel()
    whole = n <= SAMPLE_RUN * SAMPLE_RUNS
    terms, sums = np.empty(3, np.float32), np.zeros((3, 257), np.int64)
    probe = np.empty(places.size, np.float32)
    _sum(
        values.numpy().reshape(-1),
        _NO_INTEGERS if integers is None else integers.numpy(),
        int(integers is not None),
        _NO_MOMENTS if second is None else second.numpy().reshape(-1),
        int(second is not None),
        *((1, n, 1) if whole else (SAMPLE_RUNS, SAMPLE_RUN, n // SAMPLE_RUNS)),
        _F32(unit),
        terms,
        terms.view(np.uint32),
        sums,
        places,
        probe,
    )
    # What was not given was counted as zeros, and distances to them.
    if integers is None:
        sums[1] = 0
    return Sampled(sums, probe)


def _of_samples(
    values: Tensor, integers: Tensor | None, second: Tensor | None, unit: float, places: Int64s
) -> Sampled:
    """Take the samples first, in float32: the kernel knows no other dtype."""
    flat = flattened(values)
    sampled = add_sample(
        as_float32(sample(flat)),
        None if integers is None else sample(integers),
        None if second is None else as_float32(sample(flattened(second))),
        unit,
        places[:0],
    )
    return sampled._replace(probe=as_float32(flat[torch.from_numpy(places)]).numpy())
