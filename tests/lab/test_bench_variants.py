"""Codecs as they are named for a bench, and what of them is swept."""

import pytest

from inshrink_core.codec import codec_names
from inshrink_core.codecs.variants import Variant, choose_variants
from inshrink_core.errors import ConfigError


def test_every_codec_for_weights_is_measured_by_default():
    assert {item.codec for item in choose_variants(None)} == set(codec_names()) - {"moments"}


def test_a_codec_without_a_known_tunable_is_measured_once():
    assert Variant("lossless").tunable is None
    assert len(Variant("lossless").configs()) == 1


def test_the_middle_lies_between_or_is_one_of_two_neighbours():
    bins, alpha = Variant("inshrinkerator").tunable, Variant("excp").tunable
    assert bins.between(16, 12) == 14
    assert bins.between(5, 6) in (5, 6)
    assert 1e-3 < alpha.between(1e-3, 3e-3) < 3e-3


def test_settings_that_are_held_are_in_every_config_and_in_the_label():
    variant = Variant.parse("excp:coder=rans,bits=3")
    assert variant.label == "excp:coder=rans,bits=3"
    assert {(config.coder, config.bits, config.keyframe) for config in variant.configs()} == {
        ("rans", 3, "quantized")
    }
    assert len({config.alpha for config in variant.configs()}) == len(variant.tunable.values)


def test_a_held_setting_prevails_over_what_a_sweep_needs():
    assert Variant.parse("excp:keyframe=exact").configs()[0].keyframe == "exact"


def test_a_held_tunable_leaves_nothing_to_sweep():
    variant = Variant.parse("inshrinkerator:bins=12")
    assert variant.tunable is None
    assert [config.bins for config in variant.configs()] == [12]


def test_lists_are_split_at_codecs_not_at_settings():
    labels = [item.label for item in choose_variants("uniform, excp:coder=rans,bits=3 ,lattice,uniform")]
    assert labels == ["uniform", "excp:coder=rans,bits=3", "lattice"]


@pytest.mark.parametrize(
    "text",
    ["", "none-such", "uniform,", "uniform:bits", "uniform:bits=99", "uniform:none=1", "moments", "a=1", ":"],
)
def test_what_names_no_codec_or_setting_is_refused_before_anything_is_measured(text):
    with pytest.raises(ConfigError):
        choose_variants(text)


def test_moments_are_kept_for_codecs_with_a_rule_of_their_own():
    assert Variant("excp").optimizer("drop") == "exact"
    assert Variant.parse("excp:moments=exact").optimizer("drop") == "drop"
    assert Variant("uniform").optimizer("drop") == "drop"
    assert Variant("excp").optimizer("compressed") == "compressed"
