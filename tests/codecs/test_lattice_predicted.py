"""A restore cost that nobody measures is predicted, chooses the coarseness, and is said to be predicted."""

import pytest
import torch

import inshrink_core
from inshrink_core.chain import Archive, ChainState, FramePlan, look_ahead
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.meta import QUALITY
from inshrink_core.chain.report import predicted_cost
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.codecs.lattice.plan import COST_OF_ERROR, COST_OF_SHAPED
from tests.builders import memory_run
from tests.chain.test_defaults import metas
from tests.codecs.lattice_chains import encode_run
from tests.codecs.test_lattice_look_ahead import chain_of

BOUND = 0.003


def training(n_steps, pace, shrinks_at=None):
    """Return a run of two matrices of normal weights on random walks."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(60, 50, generator=generator) for name in ("a.weight", "b.weight")}
    steps = {}
    for step in range(n_steps):
        steps[step] = {name: weight.clone() for name, weight in weights.items()}
        for weight in weights.values():
            weight += pace * torch.randn(60, 50, generator=generator)
            weight *= 0.3 if step + 1 == shrinks_at else 1.0
    return memory_run(steps)


def frames_of(run, **settings):
    """Encode a run as a chain; return what each frame says, and the relative squared error of its weights."""
    found = []
    for plan, results in encode_run(run, **settings):
        rows = results.values()
        error = sum(row.squared_error for row in rows) / sum(row.squared_norm for row in rows)
        found.append((plan.quality, error))
    return found


@pytest.mark.parametrize(("shaping", "cost"), [("auto", COST_OF_SHAPED), ("off", COST_OF_ERROR)])
def test_the_coarseness_is_what_the_predicted_cost_allows(shaping, cost):
    found = frames_of(training(6, 0.1), predicted_cost=BOUND, shaping=shaping)
    chosen = {quality["coarseness"] for quality, _ in found}
    assert len(chosen) == 1
    assert 0.5 < chosen.pop() < 4
    for quality, error in found:
        assert quality["how"] == "predicted"
        assert quality["bounds"] == {"restore_cost": BOUND}
        assert 0.8 * BOUND < quality["restore_cost"] <= BOUND
        assert quality["restore_cost"] == pytest.approx(cost * error, rel=0.1)


def test_it_is_never_below_the_one_that_is_set_and_the_cost_is_told_as_it_is():
    for quality, error in frames_of(training(3, 0.45), predicted_cost=BOUND):
        assert quality["coarseness"] == 0.5
        assert quality["restore_cost"] > quality["bounds"]["restore_cost"]
        assert quality["restore_cost"] == pytest.approx(COST_OF_SHAPED * error, rel=0.1)


def test_it_is_never_above_four():
    assert {quality["coarseness"] for quality, _ in frames_of(training(6, 1e-3), predicted_cost=BOUND)} == {
        4.0
    }


def test_it_is_halved_where_weights_have_shrunk():
    chain, run = chain_of(predicted_cost=BOUND), training(4, 0.04, shrinks_at=3)
    seen = look_ahead(chain, run.steps[:3], run.__getitem__)
    plans = [FramePlan(chain, run[step], ChainState(memory=seen), run[step].specs) for step in run.steps]
    costs = [plan.quality["coarseness"] for plan in plans if plan.quality is not None]
    assert costs[:3] == [costs[0]] * 3
    assert costs[3] == costs[0] / 4
    assert plans[3].quality is not None
    assert plans[3].quality["restore_cost"] <= BOUND


def test_nothing_is_predicted_of_what_is_set_or_exact_or_judged():
    assert LatticeCodec().predicted_cost == 0
    asked = make_chain_config("", None, {"predicted_cost": BOUND}, None, 32, "cpu", 1)
    assert asked.config.predicted_cost == BOUND
    for settings in (None, {"coarseness": 0.5}, {"exact": True}, {"predicted_cost": 0.0}):
        config = make_chain_config("", None, settings, None, 32, "cpu", 1)
        assert config.config.predicted_cost == 0
        assert "predicted_cost" not in config.config.settings()
    judged = asked.as_set()
    assert judged.config == LatticeCodec()
    assert all(quality is None for quality, _ in frames_of(training(3, 0.01), coarseness=2.0))


def test_a_second_session_goes_on_with_the_same_bytes(run_path, tmp_path):
    run = inshrink_core.open(run_path)
    inshrink_core.compress(run, tmp_path / "a", steps=run.steps[:2], config={"predicted_cost": BOUND})
    inshrink_core.compress(run, tmp_path / "a")
    found = metas(tmp_path / "a")
    assert len({meta[QUALITY]["coarseness"] for meta in found}) == 1
    inshrink_core.compress(run, tmp_path / "b", steps=run.steps[:2], config={"predicted_cost": BOUND})
    archives = [Archive.open(tmp_path / name) for name in "ab"]
    first = [one.frame(one.frames[1]) for one in archives]
    for entry in first[0].entries:
        if not entry.attachment:
            assert first[0].read(entry) == first[1].read(first[1].entry(entry.key))


def test_an_archive_goes_on_without_it_where_a_coarseness_is_set(run_path, tmp_path):
    run = inshrink_core.open(run_path)
    inshrink_core.compress(run, tmp_path / "a", steps=run.steps[:2], config={"predicted_cost": BOUND})
    inshrink_core.compress(run, tmp_path / "a", coarseness=1.0)
    found = metas(tmp_path / "a")
    assert [QUALITY in meta for meta in found[:2]] == [True, True]
    assert all(QUALITY not in meta and meta["config"]["coarseness"] == 1.0 for meta in found[2:])
    assert predicted_cost(Archive.open(tmp_path / "a")) is None


def test_a_saver_sees_no_future_and_predicts_nothing(tmp_path):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    with inshrink_core.Saver(tmp_path / "a", model, optimizer) as saver:
        for step in (1, 2, 3):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            saver.save(step)
    assert all(QUALITY not in meta for meta in metas(tmp_path / "a"))
