"""Ops are found by device, fall back to plain torch, and compile nothing until they are used."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from inshrink_core.ops import Backend, force_backend, lattice, planes
from inshrink_core.ops.planes import Transform, split_planes
from inshrink_core.ops.registry import op


def runs(call, backend):
    """The module of the function that a back end calls."""
    calls = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name == call.__name__:
            calls.append(frame.f_globals["__name__"])

    words = torch.zeros(4, dtype=torch.uint8)
    with force_backend(backend):
        sys.setprofile(profile)
        try:
            call(words, None, Transform.NONE)
        finally:
            sys.setprofile(None)
    return calls


def test_a_back_end_runs_its_kernel_and_one_without_runs_plain_torch():
    assert runs(split_planes, Backend.CPU) == ["inshrink_core.ops.cpu.planes"]
    assert runs(split_planes, Backend.REFERENCE) == ["inshrink_core.ops.planes"]
    assert runs(split_planes, Backend.CUDA) == ["inshrink_core.ops.planes"]


def test_an_unknown_device_gets_plain_torch():
    words = torch.zeros(4, dtype=torch.uint8, device="meta")
    assert split_planes(words, None, Transform.NONE).device.type == "meta"


def test_a_forced_back_end_lasts_as_long_as_its_context():
    words, seen = torch.zeros(4, dtype=torch.uint8), []

    @op
    def split(words: torch.Tensor) -> None:
        seen.append("torch")

    split.__wrapped__.__module__, split.__wrapped__.__name__ = planes.__name__, "split_planes"
    with force_backend(Backend.REFERENCE):
        split(words)
    with pytest.raises(TypeError):
        split(words)  # numba's, which takes three
    assert seen == ["torch"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_no_kernel_is_launched_for_no_elements():
    grid = lattice.Lattice(1.0, 1, 1.0, 2**24 - 1)
    with force_backend(Backend.CUDA):
        assert lattice.round_to_lattice(torch.zeros(0), None, None, grid).largest == 0


def test_importing_ops_imports_no_compiler():
    code = "import sys, inshrink_core.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
