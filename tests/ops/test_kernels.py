"""Every back end's kernels return the bits of their plain-torch twins."""

import pytest

from inshrink_core.ops import Backend
from tests.ops import interpreted
from tests.ops.interpreted import NEEDS_GPU, NEEDS_TRITON, checks_of, outcomes

MODULES = ("frame_checks", "lattice_checks", "rans_checks", "shaping_checks")
CHECKS = [
    pytest.param(check, id=f"{module.removesuffix('_checks')}-{check.__name__.removeprefix('check_')}")
    for module in MODULES
    for check in checks_of(module)
]


@pytest.mark.parametrize("check", CHECKS)
def test_numbas_kernels_keep_to_the_reference(check, monkeypatch):
    monkeypatch.setattr(interpreted, "backend", Backend.CPU)
    check("cpu")


@NEEDS_TRITON
def test_tritons_kernels_keep_to_the_reference_in_the_interpreter():
    told = outcomes(*MODULES)
    assert len(told) == len(CHECKS)
    assert not any(told.values()), "\n".join(told.values())


@pytest.mark.gpu
@NEEDS_TRITON
@NEEDS_GPU
@pytest.mark.parametrize("check", CHECKS)
def test_tritons_kernels_keep_to_the_reference_on_a_gpu(check):
    check("cuda")
