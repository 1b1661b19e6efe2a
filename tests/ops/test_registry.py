"""Ops are found by device, fall back to the reference, and compile nothing until they are used."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.planes import Transform, split_planes
from inshrink_core.ops.registry import OPS, implementation, op

FAMILIES = (
    "distance",
    "lattice",
    "moments",
    "planes",
    "quantize",
    "rans",
    "sample",
    "shaping",
    "streams",
    "symbols",
)
PARTS_OF_MOMENTS = {
    *("kinds_of", "squares_cover", "sum_sides", "relative_square", "row_reaches", "count_magnitudes"),
    *("round_in_units", "round_to_octaves"),
}
"""What the host does within the kernels of whole moments."""

ON_GPU = {
    *(
        "round_to_lattice",
        "shape_changes",
        "advance",
        "gain_grades",
        "rans_counts",
        "rans_encode",
        "rans_decode",
    ),
    *("histogram16", "sensitivity_histogram", "assign", "gather_decoded", "symbol_counts", "dequantize"),
    *PARTS_OF_MOMENTS,
    "expand_units",
}


@pytest.fixture(autouse=True)
def every_family():
    for family in FAMILIES:
        import_module(f"inshrink_core.ops.{family}")


def test_every_op_has_a_reference_and_a_compiled_kernel():
    assert len(OPS) >= 20
    for name, front in OPS.items():
        reference = implementation(front, Backend.REFERENCE)
        assert reference.__module__.startswith("inshrink_core.ops.reference."), name
        assert (implementation(front, Backend.CPU) is reference) == (name in PARTS_OF_MOMENTS), name


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_gpu_has_the_kernels_it_should():
    found = {
        name for name, front in OPS.items() if "triton" in implementation(front, Backend.CUDA).__module__
    }
    assert found == ON_GPU


def test_an_unknown_device_gets_the_reference():
    words = torch.zeros(4, dtype=torch.uint8, device="meta")
    assert split_planes(words, None, Transform.NONE).device.type == "meta"


def test_a_forced_back_end_lasts_as_long_as_its_context(monkeypatch):
    words = torch.zeros(4, dtype=torch.uint8)
    with force_backend(Backend.REFERENCE):
        split_planes(words, None, Transform.NONE)
    monkeypatch.setattr("inshrink_core.ops.reference.planes.split_planes", None)
    split_planes(words, None, Transform.NONE)


def test_an_op_without_a_reference_is_told():
    @op
    def no_such_op(values: torch.Tensor) -> None:
        """Nobody implemented it."""

    OPS.pop("no_such_op")
    no_such_op.__module__ = split_planes.__module__
    with pytest.raises(LookupError, match="no_such_op"):
        no_such_op(torch.zeros(1))


def test_importing_ops_imports_no_compiler():
    code = "import sys, inshrink_core.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
