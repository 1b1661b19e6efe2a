"""Tensors for conformance suites: edge cases by name, and chains of weights for hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from inshrink_core.checkpoint import DTYPE_SIZES, TensorRole, TensorSpec

__all__ = ["EDGE_TENSORS", "bits", "float_chains", "normal", "random_bits", "spec_of"]


def spec_of(
    tensor: Tensor, name: str = "layer.weight", role: TensorRole = TensorRole.WEIGHT, exact: bool = False
) -> TensorSpec:
    """Return the spec of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, role=role, dtype=dtype, shape=tuple(tensor.shape), exact=exact)


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements in order, which distinguish NaN payloads and -0.0."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random bit patterns: for floats, many exponents, NaN payloads and infinities."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    n_bytes = int(np.prod(shape, dtype=np.int64)) * DTYPE_SIZES[dtype]
    raw = torch.randint(0, 256, (n_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


def normal(shape: tuple[int, ...], seed: int, scale: float = 0.02) -> Tensor:
    """Return normally distributed values, like those of weights."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def _special() -> Tensor:
    """Return weights with NaNs, infinities, a subnormal and -0.0 among them."""
    values = normal((40, 30), 3)
    flat = values.view(-1)
    flat[3], flat[77], flat[401] = float("nan"), float("inf"), float("-inf")
    flat[500], flat[501] = 1e-42, -0.0
    flat.view(torch.int32)[600] = 0x7FC12345
    flat.view(torch.int32)[601] = -1
    return values


EDGE_TENSORS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.zeros(0),
    "empty_matrix": lambda: torch.zeros(3, 0),
    "scalar": lambda: torch.tensor(3.5),
    "scalar_int64": lambda: torch.tensor(-7),
    "one_value": lambda: torch.tensor([-0.0]),
    "one_by_one": lambda: torch.tensor([[2.5]]),
    "two_values": lambda: torch.tensor([[1.0, -2.0]]),
    "nan_only": lambda: torch.full((5, 5), float("nan")),
    "infinities": lambda: torch.tensor([[float("inf"), float("-inf")], [1.0, 2.0]]),
    "special_floats": _special,
    "negative_zeros": lambda: torch.full((8, 8), -0.0),
    "zeros": lambda: torch.zeros(33, 17),
    "subnormals": lambda: torch.arange(-50, 50).reshape(10, 10).float() * 1e-41,
    "huge_range": lambda: torch.logspace(-40, 38, 400).reshape(20, 20),
    "constant": lambda: torch.full((50, 20), 0.125),
    "constant_but_one": lambda: torch.cat([torch.ones(999), torch.zeros(1)]).reshape(40, 25),
    "two_levels": lambda: (normal((30, 30), 1) > 0).float(),
    "vector": lambda: normal((257,), 5),
    "transposed": lambda: normal((31, 65), 6).t(),
    "every_other": lambda: normal((64, 64), 7)[::2, 1::3],
    "expanded": lambda: normal((1, 40), 8).expand(25, 40),
    "convolution": lambda: normal((8, 4, 3, 3), 9),
    "bfloat16": lambda: normal((40, 40), 10).bfloat16(),
    "float16": lambda: normal((40, 40), 11).half(),
    "float64": lambda: normal((20, 40), 12).double() / 3,
    "float8": lambda: normal((40, 40), 13).to(torch.float8_e4m3fn),
    "int64": lambda: torch.arange(-500, 500).reshape(10, 100) * (1 << 40),
    "int32": lambda: torch.arange(-500, 500, dtype=torch.int32).reshape(10, 100),
    "uint8": lambda: torch.arange(1000).to(torch.uint8).reshape(10, 100),
    "bool": lambda: normal((50, 20), 14) > 0.01,
    "complex64": lambda: torch.complex(normal((20, 20), 15), normal((20, 20), 16)),
    "conjugate": lambda: torch.complex(normal((20, 20), 15), normal((20, 20), 16)).conj(),
    **{f"length_{n}": partial(normal, (1, n), n) for n in (63, 64, 65, 1023, 1024, 1025, 4095, 4097)},
}
"""Edge cases that a codec must handle, by name."""


@st.composite
def float_chains(draw: st.DrawFn, n_frames: int = 3) -> list[Tensor]:
    """Draw frames of one weight: its first values, and the share and size of the changes per frame."""
    shape = draw(st.sampled_from([(1, 1), (2, 3), (7, 9), (16, 16), (33, 31), (1, 300)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    seed = draw(st.integers(0, 2**31 - 1))
    moving = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    scale = draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * scale
    frames = []
    for _ in range(n_frames):
        frames.append(values.to(dtype))
        mask = torch.rand(shape, generator=generator) < moving
        values = values + mask * torch.randn(shape, generator=generator) * scale * 0.1
    return frames
