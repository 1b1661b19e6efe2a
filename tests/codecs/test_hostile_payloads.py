"""Whatever the bytes, a decoder returns what the spec says, or refuses with an error of ours."""

import random
import struct
import warnings

import numpy as np
import pytest
import torch
import zstandard

from benchmarks.fuzz.payloads import PayloadTarget, situations
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import TensorInput, codec_names, enough_memory, get_codec
from inshrink_core.codecs.exact import LosslessReference, decode_exact, encode_exact
from inshrink_core.codecs.moments.block import MomentsReference
from inshrink_core.coding.zstd import zstd_compress, zstd_decompress
from inshrink_core.errors import DamagedError, InshrinkError, TooLargeError
from inshrink_core.frame import Block
from tests.strategies import bits, normal, spec_of

N_MUTANTS = 1000

GIANTS = ((1 << 40,), (1 << 62,), (1 << 63,), (1 << 21,) * 40)


def attempt(target, case):
    try:
        target.execute(case)
    except InshrinkError:
        return
    except Exception as error:
        raise AssertionError(f"a payload was neither decoded nor refused: {case.hex()}") from error


def test_mutated_payloads_of_every_codec_are_refused_or_decode_to_their_spec():
    target = PayloadTarget()
    for case in target.seeds()[::5]:
        attempt(target, case)
    for number in range(N_MUTANTS):
        attempt(target, target.mutate(random.Random(f"tests/{number}")))


def test_the_harness_meets_every_codec_and_every_bitstream():
    met = {situation.bitstream for situation in situations()}
    read = {bitstream for name in codec_names() for bitstream in (get_codec(name).bitstream,)}
    assert met == read


def giant(shape, dtype="float16", role=TensorRole.WEIGHT):
    return TensorSpec(name="giant.weight", role=role, dtype=dtype, shape=shape)


@pytest.mark.parametrize("shape", GIANTS, ids=["2**40", "2**62", "2**63", "2**840"])
@pytest.mark.parametrize("name", codec_names())
def test_a_payload_of_a_few_bytes_for_a_tensor_no_memory_holds_is_refused(name, shape):
    codec = get_codec(name)()
    for bitstream in {codec.bitstream, "lossless/1"}:
        heads = {case.sound[0][:40] for case in situations() if case.bitstream == bitstream and case.sound}
        for payload in (b"\x02\x00\x00", b"\x00\x00\x00\x00", b"\x01\x00\x00\x00", *sorted(heads)):
            with pytest.raises((DamagedError, TooLargeError)), enough_memory(giant(shape)):
                codec.decode(giant(shape), Block(bitstream, payload), None).decoded()


def test_an_allocation_that_fails_is_an_error_of_ours_with_the_size():
    spec = TensorSpec(name="fc", role=TensorRole.WEIGHT, dtype="float32", shape=(1 << 50,))
    with pytest.raises(TooLargeError, match=f"fc.*{1 << 52} bytes"), enough_memory(spec):
        get_codec("lossless")().decode(spec, Block("lossless/1", b"\x02\0\0\0\0"), None)


def test_a_moment_that_repeats_a_state_of_another_dtype_is_refused():
    codec = get_codec("moments")()
    wide, half = (giant((8, 8), dtype, TensorRole.EXP_AVG) for dtype in ("float32", "float16"))
    state = codec.encode(TensorInput(spec=wide, tensor=normal((8, 8), 1)), None, None).reference
    assert isinstance(state, MomentsReference)
    same = struct.pack("<BBh", 1, state.form | 0x40, state.codes.base)
    assert bits(codec.decode(wide, Block(codec.bitstream, same), state).decoded()) == bits(state.decoded())
    with pytest.raises(DamagedError, match="another dtype"):
        codec.decode(half, Block(codec.bitstream, same), state)


def test_bools_that_are_neither_are_refused():
    spec = TensorSpec(name="mask", role=TensorRole.BUFFER, dtype="bool", shape=(3,))
    with pytest.raises(DamagedError, match="neither false nor true"):
        decode_exact(spec, b"\x00\x01\x02\x00", None)


def test_bools_that_are_neither_are_stored_as_true():
    strange = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    spec = spec_of(strange, "mask")
    for owned in (False, True):
        encoded = encode_exact(spec, strange, None, owned=owned)
        decoded = decode_exact(spec, encoded.block.payload, None)
        assert bits(decoded.decoded()) == bits(encoded.reference.decoded()) == b"\0\1\1\1"


def test_the_state_of_a_bool_tensor_is_its_bits():
    mask = normal((50, 20), 1) > 0
    reference = LosslessReference(mask)
    encoded = encode_exact(spec_of(mask), ~mask, reference)
    decoded = decode_exact(spec_of(mask), encoded.block.payload, reference)
    assert bits(decoded.decoded()) == bits(decoded.decoded()) == bits(~mask)


def frame_with_window(exponent, content):
    """Return a zstd frame of one raw block that asks for a window of ``2**exponent`` bytes."""
    descriptor = bytes((0, (exponent - 10) << 3))
    return descriptor + (len(content) << 3 | 1).to_bytes(3, "little") + content


def test_a_zstd_frame_that_asks_for_more_than_eight_megabytes_is_refused():
    assert zstd_decompress(frame_with_window(23, b"weights"), 7) == b"weights"
    for exponent in (24, 27, 31):
        with pytest.raises(DamagedError, match="does not decode"):
            zstd_decompress(frame_with_window(exponent, b"weights"), 7)


@pytest.mark.parametrize("level", [1, 3, 9, 19])
def test_no_level_that_is_written_asks_for_more(level):
    content = np.random.default_rng(1).integers(0, 4, 1 << 18, np.uint8).tobytes()
    frame = zstd_compress(content, level)
    assert zstd_decompress(frame, len(content)) == content
    most = zstandard.ZstdCompressionParameters.from_level(level).window_log
    assert most <= 23


def test_a_zstd_frame_that_states_a_large_content_size_allocates_nothing():
    written = zstandard.ZstdCompressionParameters.from_level(
        1, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=True
    )
    bomb = zstandard.ZstdCompressor(compression_params=written).compress(bytes(1 << 20))
    with pytest.raises(DamagedError, match="another size"):
        zstd_decompress(bomb, 1000)


def test_units_beyond_float32_overflow_to_infinity_without_a_warning():
    spec = TensorSpec(name="fc", role=TensorRole.MOMENTUM, dtype="float32", shape=(2, 2))
    codec = get_codec("moments")()
    payload = b"\x01\x03" + (1024).to_bytes(2, "little") + b"\x02\x01\xff" + b"\x02\x01\xff" + b"\x01\xff"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.decode(spec, Block("moments/1", payload), None).decoded().shape == (2, 2)
