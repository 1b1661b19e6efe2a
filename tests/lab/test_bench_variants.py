"""Codecs as they are named for a bench, and what of them is swept."""

import pytest

from inshrink_core.codec import codec_names
from inshrink_core.codecs.variants import Variant, choose_variants, default_variants, parse_variants
from inshrink_core.errors import ConfigError

WITH_KNOB = ("inshrinkerator", "lattice", "lc-checkpoint", "excp", "qd", "uniform", "context")


def test_every_codec_for_weights_is_measured_by_default():
    assert {item.codec for item in default_variants()} == set(codec_names()) - {"moments"}
    assert choose_variants(None) == default_variants()


@pytest.mark.parametrize("name", WITH_KNOB)
def test_the_knob_runs_from_faithful_to_small_within_its_range(name):
    knob = Variant(name).knob
    assert len(Variant(name).configs()) == len(knob.values) >= 8
    pairs = list(zip(knob.values, knob.values[1:], strict=False))
    assert all(knob.is_coarser(later, earlier) for earlier, later in pairs)
    assert not any(knob.is_coarser(earlier, later) for earlier, later in pairs)


def test_a_codec_without_a_known_knob_is_measured_once():
    assert Variant("lossless").knob is None
    assert len(Variant("lossless").configs()) == 1


def test_the_middle_lies_between_or_is_one_of_two_neighbours():
    bins, alpha = Variant("inshrinkerator").knob, Variant("excp").knob
    assert bins.between(16, 12) == 14
    assert bins.between(5, 6) in (5, 6)
    assert 1e-3 < alpha.between(1e-3, 3e-3) < 3e-3


def test_settings_that_are_held_are_in_every_config_and_in_the_label():
    variant = Variant.parse("excp:coder=rans,bits=3")
    assert variant.label == "excp:coder=rans,bits=3"
    assert {(config.coder, config.bits, config.keyframe) for config in variant.configs()} == {
        ("rans", 3, "quantized")
    }
    assert len({config.alpha for config in variant.configs()}) == len(variant.knob.values)


def test_a_held_setting_prevails_over_what_a_sweep_needs():
    assert Variant.parse("excp:keyframe=exact").configs()[0].keyframe == "exact"


def test_a_held_knob_leaves_nothing_to_sweep():
    variant = Variant.parse("inshrinkerator:bins=12")
    assert variant.knob is None
    assert [config.bins for config in variant.configs()] == [12]


def test_lists_are_split_at_codecs_not_at_settings():
    labels = [item.label for item in parse_variants("uniform, excp:coder=rans,bits=3 ,lattice,uniform")]
    assert labels == ["uniform", "excp:coder=rans,bits=3", "lattice"]


@pytest.mark.parametrize(
    "text",
    ["", "none-such", "uniform,", "uniform:bits", "uniform:bits=99", "uniform:none=1", "moments", "a=1", ":"],
)
def test_what_names_no_codec_or_setting_is_refused_before_anything_is_measured(text):
    with pytest.raises(ConfigError):
        parse_variants(text)


def test_moments_are_kept_for_codecs_with_a_rule_of_their_own():
    assert Variant("excp").optimizer("drop") == "exact"
    assert Variant.parse("excp:moments=exact").optimizer("drop") == "drop"
    assert Variant("uniform").optimizer("drop") == "drop"
    assert Variant("excp").optimizer("compressed") == "compressed"
