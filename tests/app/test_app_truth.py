"""One measured truth: every number that pages show of an archive is the one that the engine keeps."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.model.measured import known_of
from inshrink_app.pages.archives.view import report_parts
from inshrink_app.widgets import fmt
from streamlit.testing.v1 import AppTest

import inshrink_core
from tests.app.builders import archives, compared_row, explorer, keep_comparison, texts
from tests.app.job_stubs import STEPS

PAGES = ("run", "archives")
COSTS = {10: 0.0011, 20: 0.0077, 30: 0.0022, 40: 0.0013}
DROPS = {10: 0.051, 20: 0.0, 30: 0.012, 40: -0.02}


@pytest.fixture
def measured(archived, jobs) -> Path:
    """Return a run whose archive was measured twice: all of it, and then one step, which costs more."""
    archive = archived.with_name("run.inshrink")
    shutil.rmtree(archive)
    inshrink_core.compress(archived, archive, config={"coarseness": 4.0})
    rows = [
        compared_row(step=step, drop=DROPS[step], restore_cost=COSTS[step] / (2 if step == 20 else 1))
        for step in STEPS
    ]
    keep_comparison(archive, archived, rows)
    keep_comparison(archive, archived, [compared_row(step=20, drop=DROPS[20], restore_cost=COSTS[20])])
    return archived


def wanted(run: Path) -> dict[str, str]:
    """Return what each figure of the archive must be, wherever it is shown."""
    chain = services.chain_of(str(run.with_name("run.inshrink")))
    known = known_of(chain)
    found = known.comparison
    assert (found.max_restore_cost, found.max_drop) == (max(COSTS.values()), max(DROPS.values()))
    return {
        "Archive": fmt.size(chain.nbytes),
        "Size": fmt.size(chain.nbytes),
        "Compression ratio": fmt.ratio(chain.ratio_total),
        "Bits per weight": fmt.value(chain.bits_per_weight or 0.0),
        "Restore cost": fmt.percent(found.max_restore_cost),
        "Largest drop": fmt.percent(found.max_drop),
    }


def shown(app: AppTest, truth: dict[str, str]) -> dict[str, str]:
    """Return the figures of a page that have a name of the truth; those of a plan are of no archive."""
    return {
        metric.label: metric.value
        for metric in app.metric
        if metric.label in truth and not str(metric.delta).startswith(("estimated", "not known yet"))
    }


@pytest.mark.parametrize("kind", ["run", "run.inshrink"])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_the_figures_that_are_kept(measured, page, kind):
    truth = wanted(measured)
    app = explorer(page, run=str(measured.with_name(kind)), panel="frames")
    found = shown(app, truth)
    assert found == {name: truth[name] for name in found}
    if page == "archives":
        line = app.dataframe[0].value.iloc[0]
        kept = known_of(services.chain_of(str(measured.with_name("run.inshrink")))).comparison
        assert line["restore cost"] == pytest.approx(100 * kept.max_restore_cost)
        assert line["drop of loss"] == pytest.approx(100 * kept.max_drop)
        assert {"Compression ratio", "Restore cost", "Largest drop"} <= set(found)
    # In words, too: whatever a page calls a restore cost is the one that was measured, or the bound.
    said = re.findall(r"restore costs? (?:is |of )?(\d[\d.e-]* %)", texts(app), re.IGNORECASE)
    assert set(said) <= {truth["Restore cost"], "0.30 %"}


def test_the_table_of_runs_and_the_report_say_the_same(measured):
    archive = measured.with_name("run.inshrink")
    chain = services.chain_of(str(archive))
    table = explorer().dataframe[0].value.set_index("name")
    for name, row in table.iterrows():
        if Path(str(name)).name in ("run", "run.inshrink"):
            assert row["ratio"] == chain.ratio_total
            assert row["restore cost"] == pytest.approx(100 * max(COSTS.values()))
            assert row["largest drop"] == pytest.approx(100 * max(DROPS.values()))
    run = services.load_subject(str(measured))
    (told,) = [part.content for part in report_parts(chain, run) if part.heading == "Summary"]
    values = told.set_index("figure")["value"]
    assert values["Restore cost"] == fmt.percent(max(COSTS.values()))
    assert values["Largest drop"] == fmt.percent(max(DROPS.values()))


def test_after_a_change_every_page_says_that_it_was_measured_before(measured):
    inshrink_core.verbs.prune(measured.with_name("run.inshrink"), keep_last=2, apply=True)
    app = archives("frames", measured)
    (cost,) = [metric for metric in app.metric if metric.label == "Restore cost"]
    assert str(cost.delta).endswith("before the last change")
    assert app.dataframe[0].value["state"][0] == "outdated"
    assert "measured before its last change" in texts(archives("compare", measured)).casefold()
    assert "restore cost" not in explorer().dataframe[0].value
