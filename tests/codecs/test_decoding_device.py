"""The device given to a codec's decoder is that of the kernels it calls; no memory there is told as such."""

from dataclasses import replace

import pytest
import torch

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import codec_for_block, enough_memory, make_codec
from inshrink_core.coding import rans
from inshrink_core.errors import TooLargeError
from tests.codecs.lattice_chains import frame, moving
from tests.strategies import spec_of

CODECS = [("lattice", {}), ("moments", {})]


class ReachedError(Exception):
    """A kernel was called: that is all a test without such a device wants to know."""


def encoded(name, settings):
    """Return the spec, block and state of a keyframe."""
    tensor = moving(1)[0].abs()
    role = TensorRole.EXP_AVG_SQ if name == "moments" else TensorRole.WEIGHT
    spec = replace(spec_of(tensor, "layer.weight"), role=role)
    (block, reference), _ = frame(tensor, make_codec(name, settings), spec=spec)
    return spec, block, reference


@pytest.mark.parametrize(("name", "settings"), CODECS, ids=[name for name, _ in CODECS])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_keyframe_is_decoded_on_the_device(monkeypatch, name, settings, device):
    def kernel(*arguments):
        raise ReachedError(arguments[-1].type)

    spec, block, _ = encoded(name, settings)
    monkeypatch.setattr(rans, "_parse_blocks", kernel)
    with pytest.raises(ReachedError) as raised:
        codec_for_block(block.codec).decode(spec, block, None, device)
    assert raised.value.args == (device,)


@pytest.mark.parametrize(("name", "settings"), CODECS, ids=[name for name, _ in CODECS])
def test_a_device_without_the_memory_is_told_with_the_other_choice(monkeypatch, name, settings):
    def kernel(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    spec, block, _ = encoded(name, settings)
    monkeypatch.setattr(rans, "_parse_blocks", kernel)
    with pytest.raises(TooLargeError, match="--device cpu"), enough_memory(spec, "meta"):
        codec_for_block(block.codec).decode(spec, block, None, "meta")
    with pytest.raises(TooLargeError, match="close other programs"), enough_memory(spec):
        codec_for_block(block.codec).decode(spec, block, None)
