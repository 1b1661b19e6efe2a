"""What a codec says of itself, how one is found by its name, and on which device it decodes."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import (
    DEFAULT_CODEC,
    FALLBACK_CODEC,
    codec_for_block,
    codec_names,
    decoding_memory,
    enough_memory,
    get_codec,
    make_codec,
    weight_codecs,
)
from inshrink_core.coding import rans
from inshrink_core.errors import ConfigError, IncompatibleError, TooLargeError
from tests.codecs.lattice_chains import frame, moving
from tests.strategies import spec_of


@pytest.mark.parametrize("name", codec_names())
def test_settings_are_a_frozen_dataclass_of_its_own(name):
    codec = get_codec(name)()
    for field in dataclasses.fields(codec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(codec, field.name, field.default)
    assert not hasattr(codec, "__dict__")
    defaults = {field.name: field.default for field in dataclasses.fields(codec)}
    assert defaults | codec.settings() == dataclasses.asdict(codec) | dict(codec.constants)
    assert codec.constants.keys().isdisjoint(defaults)
    assert {*codec.words, *codec.ranges} <= defaults.keys()


@pytest.mark.parametrize("name", codec_names())
def test_what_is_compared_and_what_is_tuned_are_settings_with_a_label(name):
    kind = get_codec(name)
    assert kind.label or name not in weight_codecs()
    for label, settings in kind.compared:
        assert label
        kind(**settings)
    if kind.tuning is not None:
        assert kind.tuning.tunable.label
        assert {*kind.tuning.tunable.settings} <= kind().settings().keys()


@pytest.mark.parametrize("name", codec_names())
def test_a_value_beside_every_range_and_a_word_beside_every_list_are_refused(name):
    kind = get_codec(name)
    for setting, (low, high) in kind.ranges.items():
        is_whole = isinstance(low, int) and isinstance(high, int)
        for value in (low - 1, high + 1, float("nan"), True, "1", *([float(low)] if is_whole else ())):
            with pytest.raises(ConfigError, match=setting):
                kind(**{setting: value})
    for setting in kind.words:
        with pytest.raises(ConfigError, match=setting):
            kind(**{setting: "no such word"})


def test_a_codec_is_made_from_its_name_and_settings():
    assert make_codec("qd", {"bits": 4}) == get_codec("qd")(bits=4)
    assert make_codec("qd", get_codec("qd")(bits=4)).bits == 4
    assert make_codec("qd", None) == get_codec("qd")()
    with pytest.raises(ConfigError, match="no setting 'bins'"):
        make_codec("qd", {"bins": 4})
    with pytest.raises(ConfigError, match="does not configure"):
        make_codec("qd", get_codec("uniform")())
    with pytest.raises(ConfigError, match="there is no codec"):
        make_codec("no-such", None)


def test_a_bitstream_that_nobody_reads_is_told():
    assert codec_for_block("lattice/1") is codec_for_block("lattice/1")
    for bitstream in ("lattice/9", "no-such/1", ""):
        with pytest.raises(IncompatibleError, match="no installed codec reads"):
            codec_for_block(bitstream)


def test_the_divergence_of_a_lattice_follows_its_coarseness_and_of_others_their_error():
    fine, coarse = (get_codec("lattice")(coarseness=value) for value in (1.0, 3.0))
    assert coarse.expected_divergence(0.01) == pytest.approx(9 * fine.expected_divergence(0.01))
    assert fine.expected_divergence(0.0) == 0.0
    uniform = get_codec("uniform")()
    assert uniform.expected_divergence(0.02) == pytest.approx(4 * uniform.expected_divergence(0.01))


@pytest.mark.parametrize("name", codec_names())
def test_what_a_codec_makes_exact_is_exact_and_the_same_codec(name):
    codec = get_codec(name)()
    exact = codec.made_exact()
    assert type(codec).is_exact(codec.settings()) is (name == FALLBACK_CODEC)
    assert exact is None or (type(exact) is type(codec) and codec.is_exact(exact.settings()))


def test_the_default_codec_writes_a_step_exactly_by_itself():
    codec = get_codec(DEFAULT_CODEC)(**{get_codec(DEFAULT_CODEC).tuning.tunable.settings[0]: 2.5})
    assert codec.tuning.value(codec.made_exact()) == codec.tuning.value(codec) == 2.5


def test_memory_of_decoding_is_that_of_the_codec_that_reads():
    assert decoding_memory("lossless/1") < decoding_memory("lattice/1") == decoding_memory("nobody/9")


class ReachedError(Exception):
    """A kernel was called: that is all a test without such a device wants to know."""


def encoded(name):
    """Return the spec, block and state of a keyframe."""
    tensor = moving(1)[0].abs()
    role = TensorRole.EXP_AVG_SQ if name == "moments" else TensorRole.WEIGHT
    spec = replace(spec_of(tensor, "layer.weight"), role=role)
    (block, reference), _ = frame(tensor, make_codec(name, None), spec=spec)
    return spec, block, reference


@pytest.mark.parametrize("name", ["lattice", "moments"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_keyframe_is_decoded_on_the_device(monkeypatch, name, device):
    def kernel(*arguments):
        raise ReachedError(arguments[-1].type)

    spec, block, _ = encoded(name)
    monkeypatch.setattr(rans, "_parse_blocks", kernel)
    with pytest.raises(ReachedError) as raised:
        codec_for_block(block.codec).decode(spec, block, None, device)
    assert raised.value.args == (device,)


@pytest.mark.parametrize("name", ["lattice", "moments"])
def test_a_device_without_the_memory_is_told_with_the_other_choice(monkeypatch, name):
    def kernel(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    spec, block, _ = encoded(name)
    monkeypatch.setattr(rans, "_parse_blocks", kernel)
    for device, said in (("meta", "--device cpu"), ("cpu", "close other programs")):
        with pytest.raises(TooLargeError, match=said), enough_memory(spec, device):
            codec_for_block(block.codec).decode(spec, block, None, device)
