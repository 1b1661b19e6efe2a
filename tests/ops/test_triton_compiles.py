"""Every Triton kernel compiles for a GPU as it is launched, without one, and fuses no float operations."""

import itertools
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.lattice import Lattice, advance, round_to_lattice
from inshrink_core.ops.rans import RansBlocks, RansModel, rans_decode, rans_encode
from inshrink_core.ops.shaping import RANK, Factors, shape_changes

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

N = 2048
GRID = Lattice(2.0**-10, 100, float(np.float32(2.0**10 / 100)), 2**24 - 1)
VALUES, INTEGERS = torch.zeros(N), torch.zeros(N, dtype=torch.int32)
BYTES = torch.zeros(N, dtype=torch.uint8)
MODEL = RansModel(np.zeros(2, np.int64), np.full((1, 4), 1024))
BLOCKS = RansBlocks(torch.zeros(0, dtype=torch.int16), torch.zeros(1, dtype=torch.int64), INTEGERS[None, :32])


class HopperWithoutDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The PTX of every kernel that is launched; none runs."""
    from triton.runtime import JITFunction, driver

    found = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        found[f"{self.__module__.rpartition('.')[2]}.{self.__name__}"] = kernel.asm["ptx"]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", HopperWithoutDevice())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    # Nothing is written to them here, so that counts are not those of whatever memory holds.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    with force_backend(Backend.CUDA):
        yield found


_INEXACT = r"\bfma\.\S+|\S+\.ftz\S*|\S+\.approx\S*|\bdiv\.full\S*"


def inexact(compiled):
    """The operations in PTX that would not round as the reference does: fused or flushed."""
    return set(re.findall(_INEXACT, "".join(compiled.values())))


def test_lattice_kernels_compile_and_round_every_operation(compiled):
    round_to_lattice(VALUES, INTEGERS, None, GRID)
    assert not inexact(compiled)
    round_to_lattice(VALUES, INTEGERS, BYTES, GRID, VALUES)
    advance(BYTES, np.array([128]), INTEGERS, BYTES, GRID)
    advance(BYTES, np.zeros(0, np.int64), None, None, GRID)
    assert set(compiled) == {"lattice._round", "lattice._advance"}
    assert not inexact(compiled)


def test_the_shaping_kernel_compiles_and_rounds_every_operation(compiled):
    factors = Factors(np.ones((64, RANK), np.int16), np.ones((64, RANK), np.int16), 20, 0.5, 1.1)
    by_row = Factors(np.ones((32, RANK), np.int16), np.ones((32, RANK), np.int16), 20, 0.5, 1.1)
    for base, down in itertools.product((None, VALUES), (None, by_row)):
        shape_changes(VALUES, base, INTEGERS, GRID, 0, factors, down)
        assert set(compiled) == {"shaping._shape"}
        assert not inexact(compiled)


def test_rans_kernels_compile(compiled):
    for contexts in (None, BYTES):
        rans_encode(BYTES, contexts, MODEL, 32, N)
        rans_decode(BLOCKS, contexts, MODEL, N, N)
    kernels = ("_encode", "_gather_words", "_decode")
    assert set(compiled) == {f"rans.{kernel}" for kernel in kernels}
