"""Ops are found by device, fall back to plain torch, and compile nothing until they are used."""

import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from inshrink_core.ops import Backend, force_backend, lattice
from inshrink_core.ops.quantize import sensitivity_histogram


def runs(context):
    """The modules of the functions that `sensitivity_histogram`, which Triton lacks, calls in a context."""
    calls = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name == "sensitivity_histogram":
            calls.append(frame.f_globals["__name__"])

    with context:
        sys.setprofile(profile)
        try:
            sensitivity_histogram(torch.ones(4), torch.ones(4))
        finally:
            sys.setprofile(None)
    return calls


def test_a_back_end_runs_its_kernel_and_one_without_runs_plain_torch():
    for backend in (Backend.REFERENCE, Backend.CUDA):
        assert runs(force_backend(backend)) == ["inshrink_core.ops.quantize"]
    assert runs(force_backend(Backend.CPU)) == ["inshrink_core.ops.cpu.quantize"]
    assert runs(nullcontext()) == ["inshrink_core.ops.cpu.quantize"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_no_kernel_is_launched_for_no_elements():
    grid = lattice.Lattice(1.0, 1, 1.0, 2**24 - 1)
    with force_backend(Backend.CUDA):
        assert lattice.round_to_lattice(torch.zeros(0), None, None, grid).largest == 0


def test_importing_ops_imports_no_compiler():
    code = "import sys, inshrink_core.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
