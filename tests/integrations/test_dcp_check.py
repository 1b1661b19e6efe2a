"""`InshrinkWriter` under a check: what one rank is promised, several are, and decide alike."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as the ranks have it

import dcp_checks as checks
from dcp_ranks import on_ranks

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.chain.meta import QUALITY
from inshrink_core.training.check import ModelEvaluator

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def said(path):
    """Return what each frame says of its settings and quality."""
    archive = Archive.open(path)
    metas = [archive.frame(info).meta for info in archive.frames]
    return [(meta["config"], meta[QUALITY]["how"]) for meta in metas]


def costs(path, stored):
    """Return what a restore of each step costs, measured anew, of the whole model."""
    archive, evaluator = Archive.open(path), ModelEvaluator(checks.network().eval(), checks.check)
    found = []
    for info in archive.frames:
        full = torch.load(stored / f"{info.step}.pt")
        original = {name.removeprefix("model."): value for name, value in full.items()}
        restored = evaluator.evaluate(archive.checkpoint(info))
        found.append(evaluator.evaluate(original).restore_cost(restored))
    return found


def saved(folder, name, world, *arguments, **options):
    options = {"max_restore_cost": checks.BOUND, **options}
    on_ranks(world, folder, checks.train, folder / name, folder, options, *arguments)
    return folder / name


PLAIN = {"shaping": "off"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank decides, where rounding does not depend on how many rows a rank has."""
    return said(saved(tmp_path_factory.mktemp("alone"), "a", 1, config=PLAIN))


@pytest.mark.parametrize("replicas", [False, True], ids=["shards", "copies"])
def test_ranks_decide_as_one_does_and_every_frame_keeps_the_promise(tmp_path, alone, replicas):
    assert said(saved(tmp_path, "plain", 2, replicas, config=PLAIN)) == alone
    assert len({str(config) for config, _ in alone}) > 2  # it moves
    archive = saved(tmp_path, "a", 2, replicas)
    for written in (tmp_path / "plain", archive):
        found = costs(written, tmp_path)
        assert max(found) <= checks.BOUND
        assert max(found) > 0.1 * checks.BOUND
        assert not inshrink_core.verify(written, deep=True).problems


def test_ranks_that_ask_about_samples_of_their_own_keep_the_mean(tmp_path):
    archive = saved(tmp_path, "a", 2, False, checks.check_of_share)
    assert {how for _, how in said(archive)} == {"measured"}
    assert max(costs(archive, tmp_path)) <= checks.BOUND * 1.01


def test_saves_between_checks_are_written_alike_and_what_nothing_keeps_is_exact(tmp_path):
    archive = saved(tmp_path, "a", 2, check_every=2)
    assert [how for _, how in said(archive)] == ["measured", "predicted", "measured", "predicted", "measured"]
    archive = saved(tmp_path, "exact", 2, max_restore_cost=0.0)
    assert [how for _, how in said(archive)] == ["exact"] * 5
    for step in checks.STEPS:
        full = torch.load(tmp_path / f"{step}.pt")
        restored = Archive.open(archive)[step]
        assert torch.equal(restored["0.weight"], full["model.0.weight"])


def test_a_codec_of_another_kind_of_search_is_one_of_all_ranks_too(tmp_path):
    archive = saved(tmp_path, "a", 2, codec="inshrinkerator", max_restore_cost=0.02)
    assert max(costs(archive, tmp_path)) <= 0.02


def test_a_check_that_fails_on_one_rank_fails_the_save_on_all_and_names_it(tmp_path):
    on_ranks(2, tmp_path, checks.fail, tmp_path)


def test_what_one_rank_finds_not_finite_is_exact_on_all(tmp_path):
    on_ranks(2, tmp_path, checks.not_finite, tmp_path / "a")
    assert [how for _, how in said(tmp_path / "a")] == ["exact", "exact"]
