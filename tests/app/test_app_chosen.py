"""What is chosen for a run: kept on disk, read by every tab, undone, and never trusted."""

import pytest
from inshrink_app import services
from inshrink_app.services import Bound
from inshrink_app.services.chosen import file_of_run

from tests.app.builders import write_run
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
    path = file_of_run(shown.path)
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("a file where the folder would be")
    services.choose(shown, metric="accuracy")
    assert services.chosen(shown).metric == "accuracy"
