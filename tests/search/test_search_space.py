"""Configurations as points and documents."""

import math

import pytest

from inshrink_core.chain import ChainConfig
from inshrink_core.checkpoint import LayerType
from inshrink_core.codec import get_codec
from inshrink_core.errors import ConfigError
from inshrink_core.search.space import Candidate, Cube, space_of


def base(codec, **settings):
    return ChainConfig(config=get_codec(codec)(**settings))


def test_the_published_cube_has_216_places_and_every_one_is_a_configuration():
    cube = space_of("inshrinkerator", frozenset({LayerType.LINEAR}))
    assert math.prod(cube.shape) * len(cube.words) == 216
    configs = {cube.candidate(point).digest for point in cube.points()}
    assert len(configs) == len(cube.points())
    coarsest = cube.candidate(cube.point((5, 5, 2), "sensitivity")).chain_config(base("inshrinkerator"))
    assert (coarsest.config.bins, coarsest.config.prune, coarsest.config.protect) == (4, 0.5, 0.0005)
    assert coarsest.config.prune_metric == "sensitivity"


@pytest.mark.parametrize("codec", ["qd", "uniform", "lc-checkpoint", "excp", "context"])
def test_every_rival_has_a_cube_whose_points_are_configurations(codec):
    cube = space_of(codec, frozenset())
    assert isinstance(cube, Cube)
    for point in cube.points():
        assert cube.candidate(point).chain_config(base(codec)).codec == codec


@pytest.mark.parametrize(
    "codec", ["lattice", "inshrinkerator", "qd", "uniform", "lc-checkpoint", "excp", "context"]
)
def test_every_codec_has_levels_from_fine_to_coarse(codec):
    found = space_of(codec, frozenset({LayerType.LINEAR})).levels(7)
    assert 2 <= len(found) <= 7
    assert len({item.digest for item in found}) == len(found)
    for item in found:
        assert item.chain_config(base(codec)).codec == codec
    assert len(space_of(codec, frozenset()).levels(1)) == 1


def test_a_codec_without_a_tunable_has_nothing_to_search():
    with pytest.raises(ConfigError, match="nothing to search"):
        space_of("lossless", frozenset())


def test_held_settings_and_overrides_of_the_base_stay():
    chain = base("lattice", gamma=0.75)
    made = space_of("lattice").candidate(4.0).chain_config(chain)
    assert (made.config.gamma, made.config.coarseness) == (0.75, 4.0)


def test_a_candidate_with_a_setting_the_codec_lacks_is_refused():
    with pytest.raises(ConfigError, match="bins"):
        Candidate(codec="lattice", settings={"bins": 4}).chain_config(base("lattice"))


def test_equal_configurations_have_equal_digests_whatever_the_order():
    item = Candidate(codec="qd", settings={"bits": 4, "grid": "held"})
    two = Candidate(codec="qd", settings={"grid": "held", "bits": 4})
    assert item.digest == two.digest != Candidate(codec="qd", settings={"bits": 5, "grid": "held"}).digest
