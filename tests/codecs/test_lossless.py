"""The lossless codec keeps the laws, and its own promises: sizes, modes, old bytes."""

import json
from pathlib import Path

import pytest
import torch

from inshrink_core.checkpoint import DTYPE_SIZES
from inshrink_core.codec import TensorInput
from inshrink_core.codecs.exact import LosslessReference
from inshrink_core.codecs.lossless import LosslessCodec, decode_exact, encode_exact
from inshrink_core.errors import DamagedError
from inshrink_core.testing.codecs import CodecSuite
from inshrink_core.varint import Cursor
from tests.strategies import bits, normal, random_bits, spec_of

_GOLDEN = Path(__file__).parent / "golden" / "lossless-1.json"


LONG = [(dtype, (2**18 + 1,)) for dtype in ("uint8", "bfloat16", "float32", "float64")]
"""A tensor of more than one chunk, for each size of a word."""


class TestLossless(CodecSuite):
    codec = LosslessCodec()
    largest = 1, 1


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, shape) for dtype in DTYPE_SIZES for shape in [(), (0,), (5, 13), (1000,)]), *LONG],
)
def test_random_bits_of_every_dtype_survive(dtype, shape):
    reference = None
    for seed in range(3):
        tensor = random_bits(dtype, shape, seed)
        encoded = encode_exact(spec_of(tensor), tensor, reference)
        assert len(encoded.block.payload) <= 1 + tensor.numel() * tensor.element_size()
        decoded = decode_exact(spec_of(tensor), encoded.block.payload, reference)
        assert bits(decoded.decoded()) == bits(tensor)
        assert decoded.decoded().dtype == tensor.dtype
        assert decoded.decoded().shape == tensor.shape
        reference = encoded.reference


def test_a_tiny_tensor_costs_one_byte_more_than_its_bytes():
    step = torch.tensor(400.0)
    assert len(encode_exact(spec_of(step), step, None).block.payload) == 5
    assert encode_exact(spec_of(step), step, None).block.payload == b"\0" + bits(step)


def test_negative_zero_is_not_unchanged_from_zero():
    zero, negative = torch.zeros(100), torch.full((100,), -0.0)
    first = encode_exact(spec_of(zero), zero, None)
    again = encode_exact(spec_of(zero), negative, first.reference)
    assert bits(decode_exact(spec_of(zero), again.block.payload, first.reference).decoded()) == bits(negative)


def test_a_constant_tensor_costs_its_element_and_one_byte():
    tensor = torch.full((1000, 1000), 0.125, dtype=torch.bfloat16)
    assert encode_exact(spec_of(tensor), tensor, None).block.payload == b"\2" + bits(tensor[0, 0])


def test_a_delta_is_smaller_than_no_delta_where_little_moved():
    before = normal((500, 500), 0)
    after = before + normal((500, 500), 1) * 0.01
    reference = encode_exact(spec_of(before), before, None).reference
    alone = len(encode_exact(spec_of(after), after, None).block.payload)
    delta = encode_exact(spec_of(after), after, reference)
    # An update of 1 % moves about 7 of 24 mantissa bits less than the value itself has: under .7 of raw.
    assert len(delta.block.payload) < 0.7 * after.numel() * 4 < alone
    assert delta.block.payload[0] == 5


def test_a_tensor_that_was_given_away_becomes_the_state_without_a_copy():
    tensor, codec = normal((100, 100), 0), LosslessCodec()
    given = codec.encode(TensorInput(spec=spec_of(tensor), tensor=tensor, owned=True), None, None)
    copied = codec.encode(TensorInput(spec=spec_of(tensor), tensor=tensor), None, None)
    assert given.reference.decoded().data_ptr() == tensor.data_ptr()
    assert copied.reference.decoded().data_ptr() != tensor.data_ptr()
    assert bytes(given.block.payload) == bytes(copied.block.payload)


def chain_of(tensors):
    """Encode frames, decode each from its own chain, and return the payloads and both last states."""
    encoder = decoder = None
    payloads = []
    for tensor in tensors:
        block, encoder = encode_exact(spec_of(tensor), tensor, encoder)
        decoder = decode_exact(spec_of(tensor), block.payload, decoder)
        decoded = decoder.decoded()
        assert bits(decoded) == bits(tensor)
        payloads.append(bytes(block.payload))
    return payloads, encoder, decoder


def fine_tuned(dtype, n_frames=4, n=40_000, pace=3e-5):
    """Return weights of one dtype whose float32 masters drift."""
    masters, drift = normal((n // 100, 100), 0), normal((n // 100, 100), 1, scale=pace)
    return [(masters + t * drift).to(getattr(torch, dtype)) for t in range(n_frames)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_changes_are_coded_in_contexts_of_what_elements_did_before(dtype):
    tensors = fine_tuned(dtype)
    payloads, encoder, decoder = chain_of(tensors)
    assert [payload[0] for payload in payloads] == [3, 5, 5, 5]
    assert torch.equal(encoder.context_state, decoder.context_state)
    unaware = LosslessReference(tensors[2])
    alone = encode_exact(spec_of(tensors[3]), tensors[3], unaware).block.payload
    # A drift repeats itself: its sign is known at least, and how large it is.
    assert len(payloads[3]) < 0.97 * len(alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_special_about_floats_survives_as_a_change(dtype):
    strange = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-7, 6e4]
    tensors = fine_tuned(dtype)
    for t, tensor in enumerate(tensors):
        at = torch.arange(len(strange)) * 7 + t
        tensor.view(-1)[at] = torch.tensor(strange).to(tensor.dtype)
    assert [payload[0] for payload in chain_of(tensors)[0]][1:] == [5, 5, 5]


def test_the_largest_change_and_the_one_without_an_opposite_survive():
    words = torch.tensor([0, 0x7FFF, -0x8000, -1, 1, -0x4000], dtype=torch.int16)
    ends = words.repeat(200), words.flip(0).repeat(200), words.roll(2).repeat(200)
    base = normal((3000,), 2).bfloat16()
    tensors = [base] + [torch.cat((end.view(torch.bfloat16), base[end.numel() :])) for end in ends]
    payloads, _, _ = chain_of(tensors)
    assert 5 in {payload[0] for payload in payloads}


def test_a_state_of_words_of_32_bits_has_no_history():
    payloads, encoder, decoder = chain_of(fine_tuned("float32"))
    assert [payload[0] for payload in payloads] == [3, 5, 5, 5]
    assert encoder.context_state is None
    assert decoder.context_state is None


def test_an_unchanged_frame_keeps_the_history():
    first, second, third, _ = fine_tuned("bfloat16")
    _, before, _ = chain_of([first, second])
    payloads, _, after = chain_of([first, second, second])
    assert payloads[2] == b"\1"
    assert torch.equal(after.context_state, before.context_state)
    assert encode_exact(spec_of(third), third, after).block.payload[0] == 5


@pytest.mark.parametrize(
    "payload",
    [
        b"\5",
        b"\5\x78\x20",
        b"\5\x78\1\xff\1",
        b"\5\x78\0\3\0\0\0" + b"\1\0",
        b"\5\x78\0\4\0\0\0\0" + b"\1\0",
        b"\5\x78\0\0" + b"\1\x10",
        b"\5\x78\0\0" + b"\1\x40",
        b"\6\2\1\0" + b"\1",
        b"\6\2\1\0" + b"\6\2\1\0\2\0\0",
        b"\6\2\1\x80" + b"\2\0\0",
        b"\6\x7f\1\0",
    ],
    ids=[
        *("empty", "tables", "section", "half-word", "unused-word", "no-extra-bits", "token"),
        *("relative", "nested", "history", "cut"),
    ],
)
def test_malformed_changes_are_refused(payload):
    before = LosslessReference(normal((100,), 1).bfloat16())
    spec = spec_of(before.tensor)
    with pytest.raises(DamagedError):
        decode_exact(spec, payload, before)
    sound = b"\5\x78\0\0" + b"\1\2"
    assert bits(decode_exact(spec, sound, before).decoded()) != bits(before.tensor)


def test_a_dtype_without_changes_refuses_them():
    before = LosslessReference(torch.arange(100))
    with pytest.raises(DamagedError, match="no changes"):
        decode_exact(spec_of(before.tensor), b"\5\x78\0\0" + b"\1\2", before)


def test_numbers_of_16_bits_held_in_32_are_not_coded_as_changes():
    tensors = [tensor.float() for tensor in fine_tuned("bfloat16", 2, pace=3e-4)]
    wide, _, _ = chain_of(tensors)
    # Two of four planes are zero where signs agree: half of the words, and less.
    assert len(wide[1]) < 0.4 * 4 * tensors[0].numel()


def test_a_plane_whose_histogram_tells_all_is_coded_with_rans():
    # Exponents of normal numbers: 2.6 bits, and nothing repeats.
    tensor = normal((1000, 100), 0).bfloat16()
    payload = encode_exact(spec_of(tensor), tensor, None).block.payload
    assert Cursor(memoryview(payload)[1 + 1 + tensor.numel() :]).varint() & 3 == 3
    assert len(payload) < (8 + 2.7) / 16 * 2 * tensor.numel()


def _golden_chain():
    """The tensors of which the golden blocks are made, by name: two frames each."""
    step = torch.tensor(100.0), torch.tensor(200.0)
    ramp = torch.linspace(-1, 1, 60), torch.linspace(-1, 1, 60) * 1.0001
    half = ramp[0].bfloat16(), ramp[1].bfloat16() * 2
    counts = torch.arange(40) - 20, torch.arange(40) - 21
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42] * 10)
    return {
        "step": step,
        "ramp": ramp,
        "half": half,
        "counts": counts,
        "special": (special, special),
        "mask": (torch.arange(100) % 3 == 0, torch.arange(100) % 5 == 0),
        "constant": (torch.full((50,), 2.0), torch.zeros(50)),
        "empty": (torch.zeros(0), torch.zeros(0)),
        "tuned": tuple(fine_tuned("bfloat16", 2, n=2000)),
        "wide": tuple(fine_tuned("float32", 2, n=600)),
    }


def test_blocks_written_by_the_first_version_still_decode_to_the_same_bits():
    golden = json.loads(_GOLDEN.read_text())
    assert golden.keys() == _golden_chain().keys()
    for name, (first, second) in _golden_chain().items():
        state = decode_exact(spec_of(first), bytes.fromhex(golden[name][0]), None)
        two = decode_exact(spec_of(second), bytes.fromhex(golden[name][1]), state)
        assert bits(state.decoded()) == bits(first), name
        assert bits(two.decoded()) == bits(second), name
