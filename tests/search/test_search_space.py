"""Configurations as points and documents."""

import json
import math

import pytest

from inshrink_core.chain import ChainConfig
from inshrink_core.checkpoint import LayerType
from inshrink_core.codec import get_codec
from inshrink_core.errors import ConfigError
from inshrink_core.search.space import Cube, space_of, with_settings


def base(codec, **settings):
    return ChainConfig(config=get_codec(codec)(**settings))


def test_the_published_cube_has_216_places_and_every_one_is_a_configuration():
    cube = space_of("inshrinkerator", frozenset({LayerType.LINEAR}))
    assert math.prod(cube.shape) * len(cube.words) == 216
    configs = {json.dumps(cube.settings(point)) for point in cube.points()}
    assert len(configs) == len(cube.points())
    coarsest = with_settings(base("inshrinkerator"), cube.settings(cube.point((5, 5, 2), "sensitivity")))
    assert (coarsest.config.bins, coarsest.config.prune, coarsest.config.protect) == (4, 0.5, 0.0005)
    assert coarsest.config.prune_metric == "sensitivity"


@pytest.mark.parametrize("codec", ["qd", "uniform", "lc-checkpoint", "excp", "context"])
def test_every_rival_has_a_cube_whose_points_are_configurations(codec):
    cube = space_of(codec, frozenset())
    assert isinstance(cube, Cube)
    for point in cube.points():
        assert with_settings(base(codec), cube.settings(point)).codec == codec


@pytest.mark.parametrize(
    "codec", ["lattice", "inshrinkerator", "qd", "uniform", "lc-checkpoint", "excp", "context"]
)
def test_every_codec_has_levels_from_fine_to_coarse(codec):
    found = space_of(codec, frozenset({LayerType.LINEAR})).levels(7)
    assert 2 <= len(found) <= 7
    assert len({json.dumps(item) for item in found}) == len(found)
    for item in found:
        assert with_settings(base(codec), item).codec == codec
    assert len(space_of(codec, frozenset()).levels(1)) == 1


def test_a_codec_without_a_tunable_has_nothing_to_search():
    with pytest.raises(ConfigError, match="nothing to search"):
        space_of("lossless", frozenset())


def test_held_settings_and_overrides_of_the_base_stay():
    chain = base("lattice", gamma=0.75)
    made = with_settings(chain, space_of("lattice").settings(4.0))
    assert (made.config.gamma, made.config.coarseness) == (0.75, 4.0)


def test_a_candidate_with_a_setting_the_codec_lacks_is_refused():
    with pytest.raises(ConfigError, match="bins"):
        with_settings(base("lattice"), {"bins": 4})
