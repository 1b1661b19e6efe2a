"""What a chain takes beside its weights is told before it is written."""

import pytest

import inshrink_core
from inshrink_core.chain import archive_size
from inshrink_core.formats import open_run
from tests.runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("rest") / "run", n_steps=5))


@pytest.mark.parametrize("optimizer", ["compressed", "exact", "drop"])
def test_the_estimated_ratio_of_everything_is_near_that_of_the_archive(run, tmp_path, optimizer):
    told = inshrink_core.verbs.estimate(run, optimizer=optimizer)
    inshrink_core.compress(run, tmp_path / "a.inshrink", optimizer=optimizer)
    frames = archive_size(inshrink_core.open(tmp_path / "a.inshrink")).frames
    real = sum(frame.raw_total for frame in frames) / sum(frame.info.nbytes for frame in frames)
    assert told.ratio_total == pytest.approx(real, rel=0.15)
    assert told.to_json()["ratio_total"] == told.ratio_total


def test_overrides_of_weights_do_not_stand_in_the_way(run):
    config = {"overrides": [{"layer_type": "linear", "coarseness": 2.0}]}
    assert inshrink_core.verbs.estimate(run, config=config).ratio_total > 1
