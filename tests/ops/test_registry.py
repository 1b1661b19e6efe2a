"""Ops are found by device, fall back to the reference, and compile nothing until they are used."""

import subprocess
import sys

import pytest
import torch

from inshrink_core.ops import SCHEMA, Backend, dispatch, force_backend, register


def test_every_declared_op_has_a_reference_and_the_kernels_it_names():
    for op, declared in SCHEMA.items():
        for backend in (Backend.REFERENCE, *declared.backends):
            with force_backend(backend):
                assert callable(dispatch(op, torch.device("cpu")))


def test_an_unknown_device_gets_the_reference():
    reference = dispatch("split_planes", torch.device("meta"))
    assert reference.__module__ == "inshrink_core.ops.reference.planes"
    assert dispatch("split_planes", torch.device("cpu")).__module__ == "inshrink_core.ops.cpu.planes"


def test_a_forced_back_end_lasts_as_long_as_its_context():
    with force_backend(Backend.REFERENCE):
        forced = dispatch("split_planes", torch.device("cpu"))
    assert forced is not dispatch("split_planes", torch.device("cpu"))


def test_an_op_that_is_not_declared_is_not_registered():
    with pytest.raises(KeyError):
        register("no_such_op", Backend.CPU)


def test_importing_ops_imports_no_compiler():
    code = "import sys, inshrink_core.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
