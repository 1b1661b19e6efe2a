"""Configurations as points, and the walk over them on synthetic surfaces whose truth is known."""

import json
import math
import random
import statistics

import pytest

from inshrink_core.chain import ChainConfig
from inshrink_core.checkpoint import LayerType
from inshrink_core.codec import get_codec
from inshrink_core.errors import ConfigError
from inshrink_core.search.space import Cube, space_of, with_settings
from inshrink_core.search.walk import Outcome, Walk, walk_cube, walk_line

CUBE = space_of("inshrinkerator", frozenset())


class Surface:
    """Ratio and use of a bound over the cube, as quantization, pruning and protection have them."""

    def __init__(self, seed, noise=0.0):
        draw = random.Random(seed)
        self.bins, self.prune = draw.uniform(4, 16), draw.uniform(0.5, 3)
        self.protect, self.sensitive = draw.uniform(0.03, 0.3), draw.uniform(0.6, 1.4)
        self.limit = 10 ** draw.uniform(-2.5, -0.3)
        self.seed, self.noise, self.n_asked = seed, noise, 0

    def ratio(self, point):
        bins, prune, protect = (a.values[i] for a, i in zip(CUBE.axes, point.place, strict=True))
        pruned = -prune * math.log2(prune) if prune else 0.0
        return 32 / ((1 - prune) * math.log2(bins) * 0.35 + 20 * protect + 0.12 + 0.25 * pruned)

    def estimate(self, point):
        return self.ratio(point) * math.exp(0.03 * self._normal(point, "ratio"))

    def usage(self, point):
        bins, prune, protect = (a.values[i] for a, i in zip(CUBE.axes, point.place, strict=True))
        metric = self.sensitive if point.word == "sensitivity" else 1.0
        damage = self.bins / bins**2 * (1 - self.protect * math.log10(protect / 0.0005))
        damage += metric * self.prune * prune**3
        return damage * math.exp(self.noise * self._normal(point, "usage")) / self.limit

    def _normal(self, point, what):
        return random.Random(f"{self.seed} {point} {what}").gauss(0, 1)

    def measure(self, point):
        self.n_asked += 1
        return Outcome(point, self.usage(point) <= 1, self.ratio(point), self.usage(point))

    def truth(self):
        return max((self.ratio(p) for p in CUBE.points() if self.usage(p) <= 1), default=None)


def surfaces(noise=0.0, n=60):
    return [item for item in (Surface(seed, noise) for seed in range(n)) if item.truth() is not None]


def walked(surface, last=None, **options):
    walk = Walk(surface.measure, **options)
    walk_cube(walk, CUBE, surface.estimate, last)
    return walk


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_walk_is_within_five_percent_with_seven_percent_of_the_evaluations(noise):
    shares, qualities = [], []
    for surface in surfaces(noise):
        best = walked(surface).best
        shares.append(surface.n_asked / 216)
        qualities.append((best.ratio if best else 0.0) / surface.truth())
    assert len(shares) > 40
    assert statistics.median(shares) <= 0.07
    assert statistics.median(qualities) >= 0.95
    if noise == 0:
        assert min(qualities) > 0.9


@pytest.mark.parametrize("limit", [1e-9, 1e9])
def test_a_walk_knows_soon_that_nothing_or_everything_is_kept(limit):
    surface = Surface(1)
    surface.limit = limit
    best = walked(surface).best
    assert surface.n_asked <= 12
    assert best is None if limit < 1 else best.ratio >= 0.95 * surface.truth()


def test_neighbourhood_stays_where_the_last_configuration_is_kept():
    surface = Surface(3)
    surface.limit = 1e9
    last = CUBE.point((2, 0, 1))
    assert walked(surface, last).best.point == last
    assert surface.n_asked == 1


def test_neighbourhood_switches_the_metric_of_pruning_where_the_other_is_kept():
    surface = Surface(3)
    surface.sensitive, surface.bins, surface.prune, surface.limit = 0.1, 0.1, 3.0, 0.05
    last = CUBE.point((0, 4, 0), "magnitude")
    best = walked(surface, last).best
    assert best.point == CUBE.point((0, 4, 0), "sensitivity")
    assert surface.n_asked == 2


def test_neighbourhood_takes_at_most_six_evaluations_a_step_in_the_median():
    counts, never_coarser = [], True
    for seed in range(40):
        surface = Surface(seed)
        best = walked(surface).best
        if best is None:
            continue
        surface.limit *= 0.8  # the next checkpoint is a little denser
        surface.n_asked = 0
        explored = walked(surface, best.point)
        counts.append(surface.n_asked)
        if len(explored.outcomes) <= 12 and explored.best is not None:
            place = explored.best.point.place
            never_coarser &= all(a <= b for a, b in zip(place, best.point.place, strict=True))
    assert statistics.median(counts) <= 6
    assert never_coarser


def test_neighbourhood_falls_back_on_the_whole_cube():
    surface = Surface(5)
    best = walked(surface).best
    last = CUBE.point((5, 5, 2), "magnitude")
    assert walked(surface, last).best.ratio >= 0.95 * best.ratio


def test_embeddings_have_an_axis_of_their_own_where_there_are_any():
    cube = space_of("inshrinkerator", frozenset({LayerType.EMBEDDING}))
    assert cube.axes[-1].settings == ("embedding_bins",)

    def measure(point):
        n = sum(point.place)
        return Outcome(point, n <= 6, 1.0 + n, 0.5 if n <= 6 else 2.0)

    assert walk_cube(Walk(measure), cube, lambda point: 1.0 + sum(point.place)).ratio == 7


def bracket(usage, start, **options):
    walk = Walk(lambda c: Outcome(c, usage(c) <= 1, c**0.7, usage(c)), budget=8)
    walk_line(walk, start, **options)
    return walk, [item.point for item in walk.outcomes]


@pytest.mark.parametrize("power", [1.2, 2.0, 3.0])
@pytest.mark.parametrize("limit", [0.02, 0.7, 2.5, 60.0])
def test_bracket_closes_in_on_the_limit_within_eight_evaluations(limit, power):
    explored, asked = bracket(lambda c: (c / limit) ** power, start=2.5)
    assert len(asked) <= 8
    assert 0.85 * limit <= explored.best.point <= limit


def test_bracket_from_a_good_start_takes_one_evaluation():
    explored, asked = bracket(lambda c: (c / 2.6) ** 2, start=2.5)
    assert asked == [2.5]
    assert explored.best.point == 2.5


def test_bracket_never_tries_a_coarser_step_than_it_may():
    explored, asked = bracket(lambda c: 0.0, start=2.5, most=5.0)
    assert max(asked) == explored.best.point == 5.0


def test_bracket_bears_steps_that_change_nothing():
    # Held steps make plateaus: the lattice's figures only change at powers of two.
    explored, asked = bracket(lambda c: (2 ** round(math.log2(c)) / 5) ** 2, start=2.5)
    assert len(asked) <= 8
    assert explored.best.usage <= 1
    assert explored.best.point >= 4


@pytest.mark.parametrize("start", [2.5, 9.0])
def test_bracket_leaves_a_plateau_of_equal_frames_by_its_middle(start):
    def held(c):
        return 2 ** math.floor(math.log2(c))

    # Just beyond the bound at 4, so that only a hair less seems to be called for.
    walk = Walk(lambda c: Outcome(c, held(c) < 4, held(c), held(c) ** 2 / 15), budget=8)
    assert held(walk_line(walk, start).point) == 2
    assert len(walk.outcomes) <= 5


def test_bracket_finds_nothing_where_nothing_is_kept():
    explored, asked = bracket(lambda c: math.inf, start=2.5)
    assert explored.best is None
    assert len(asked) <= 8
    assert asked == sorted(asked, reverse=True)


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


def test_held_settings_and_overrides_of_the_base_stay():
    chain = base("lattice", gamma=0.75)
    made = with_settings(chain, space_of("lattice").settings(4.0))
    assert (made.config.gamma, made.config.coarseness) == (0.75, 4.0)


def test_a_candidate_with_a_setting_the_codec_lacks_is_refused():
    with pytest.raises(ConfigError, match="bins"):
        with_settings(base("lattice"), {"bins": 4})
