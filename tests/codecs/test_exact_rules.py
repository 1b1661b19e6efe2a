"""What no rule of a lossy codec covers is stored exactly, whichever codec it is."""

import pytest
import torch

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import codec_names, get_codec
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import state_bits
from tests.codecs.lattice_chains import encode
from tests.strategies import bits, normal, spec_of

LOSSY = [name for name in codec_names() if name != "lossless"]
AT_ONCE = ["lattice", "inshrinkerator", "uniform", "qd"]
"""Codecs whose first frame is lossy."""

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(
    ("role", "shape", "dtype"),
    [
        ("buffer", (8, 80), "float32"),
        ("step", (), "float32"),
        ("master", (8, 80), "float64"),
        ("weight", (8, 80), "float64"),
        ("weight", (8, 80), "int64"),
        ("weight", (8, 80), "complex64"),
    ],
)
def test_other_roles_and_dtypes_are_exact(name, role, shape, dtype):
    codec, tensor = get_codec(name)(), (normal(shape, 0) * 100).to(getattr(torch, dtype))
    spec = TensorSpec(name="x", role=TensorRole(role), dtype=dtype, shape=shape)
    encoded = encode(tensor, codec, spec=spec)
    assert encoded.block.codec == "lossless/1"
    assert bits(codec.decode(spec, encoded.block, None).decoded()) == bits(tensor)


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_are_not_finite_are_exact_and_return_to_the_codec_after(name, bad, dtype):
    codec, good = get_codec(name)(), normal((40, 40), 0).to(dtype)
    broken = good.clone()
    broken[2, 3] = bad
    reference, bitstreams = None, []
    for tensor in (good, broken, good):
        block, after = encode(tensor, codec, reference)
        decoded = codec.decode(spec_of(tensor, "layer.weight"), block, reference)
        assert state_bits(decoded) == state_bits(after)
        reference = after
        bitstreams.append(block.codec)
    assert bitstreams[:2] == [codec.bitstream, "lossless/1"]
    # Of 16 bits, what changed by one value takes least as it is.
    if name != "lattice" or dtype is torch.float32:
        assert bitstreams[2] == codec.bitstream


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_floats_stay_finite(name, dtype):
    largest = torch.finfo(dtype).max
    tensor = torch.linspace(-1, 1, 900).view(30, 30).to(dtype)
    tensor[0, 0], tensor[1, 1] = largest, -largest
    assert bool(torch.isfinite(encode(tensor, get_codec(name)()).reference.decoded()).all())


@pytest.mark.parametrize("name", LOSSY)
def test_blocks_are_refused_for_tensors_that_have_none(name):
    codec = get_codec(name)()
    for tensor in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(0, 2), torch.zeros(2).double()):
        with pytest.raises(DamagedError, match="blocks"):
            codec.decode(spec_of(tensor), Block(codec.bitstream, b"\0\0\0"), None)


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_tensor_unlike_its_spec_is_refused(name):
    for tensor in (normal((4, 5), 0), normal((5, 4), 0).double()):
        with pytest.raises(InputError, match="differs from its spec"):
            encode(tensor, get_codec(name)(), spec=spec_of(normal((5, 4), 0), "x.weight"))
