"""What is chosen for a run: kept on disk, read by every tab, undone, and never trusted."""

from __future__ import annotations

import pytest
from inshrink_app import services
from inshrink_app.services import Bound
from inshrink_app.services.headers import file_of_run

from tests.app.builders import explorer, header, judged, write_run
from tests.app.search_builders import config


@pytest.fixture
def shown(root):
    return services.load_subject(str(write_run(root / "run")))


def test_what_is_chosen_is_there_for_everybody_who_reads_it_again(shown):
    assert services.chosen(shown).bound == Bound("restore_cost", 0.003)
    services.choose(shown, bound=Bound("drop", 0.01), evaluator="auto", metric="accuracy", direction="higher")
    services.change_bits(shown, config(2.0), "a point")
    found = services.chosen(shown)
    assert found.bound.fields == {"max_drop": 0.01}
    assert (found.evaluator, found.metric, found.config, found.origin) == (
        *("auto", "accuracy"),
        config(2.0),
        "a point",
    )
    services.change_bits(shown, config(4.0))
    assert services.undo_bits(shown).config == config(2.0)
    assert services.undo_bits(shown).config == {}
    assert services.undo_bits(shown).bound.kind == "drop"


def test_a_configuration_of_another_version_is_none(shown):
    services.choose(shown, config={"codec": "lattice", "settings": {"bogus": 1}}, bound=Bound("none", 0.0))
    assert services.chosen(shown).config == {}


def test_a_disk_that_refuses_costs_nothing_before_the_end(shown, monkeypatch):
    path = file_of_run("chosen", shown.path)
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("a file where the folder would be")
    services.choose(shown, metric="accuracy")
    assert services.chosen(shown).metric == "accuracy"


def test_the_chosen_metric_is_asked_for_by_requests(root):
    run = write_run(root / "run")
    judged(run)
    shown = services.load_subject(str(run))
    services.choose(shown, metric="accuracy", direction="higher")
    judge, ready = services.named_judge(shown)
    assert not ready
    assert judge.fields == {"trust_run": True, "metric": "accuracy", "direction": "higher"}
    assert services.judge_of(shown) is None


def test_the_header_shows_what_is_chosen(root):
    run = write_run(root / "run")
    judged(run)
    services.choose(services.load_subject(str(run)), bound=Bound("drop", 0.01))
    app = explorer("archives", run=str(run))
    assert any("drop ≤ 1.00 %" in one for one in header(app))
