"""One measured truth: numbers of pages are those of the engine and of the command line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.model.measured import known_of
from inshrink_app.pages.archives.view import report_parts
from inshrink_app.pages.run.shrinking import Intent
from inshrink_app.widgets import fmt
from streamlit.testing.v1 import AppTest

import inshrink_core
from inshrink_core.cli import main
from inshrink_core.text import percentage, size
from tests.app.builders import SAMPLE, archives, compared_row, explorer, keep_comparison, snippets, texts
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
    keep_comparison(archive, rows)
    keep_comparison(archive, [compared_row(step=20, drop=DROPS[20], restore_cost=COSTS[20])])
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


@pytest.mark.usefixtures("asked_for")
def test_every_place_shows_the_numbers_that_the_command_line_prints(root, jobs, capsys):
    def printed(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    inspected = printed("inspect", str(SAMPLE))
    shown = services.load_subject(str(SAMPLE))
    intent = Intent(shown=shown, now=services.chosen(shown), evaluator=services.evaluator_of(shown))
    estimated = printed(*intent.estimate.words())
    jobs.answers["estimate"] = estimated
    _, resume, exact = (row["archive"] for row in (estimated, *estimated["each"]))

    app = explorer("run", run=str(SAMPLE))
    on_run = texts(app)
    parameters = f"{size(inspected['n_parameters']).removesuffix('B')} parameters"
    n_steps = f"{len(inspected['steps'])} steps"
    raw = size(inspected["raw_bytes"])
    assert shown.steps == tuple(inspected["steps"])
    assert intent.archive.archive.steps is None, "all of them"
    assert shown.n_parameters == inspected["n_parameters"]
    for place in (on_run, texts(explorer("archives", run=str(SAMPLE)))):
        assert parameters in place
        assert n_steps in place
    # Card and strip: the estimate of what is kept by default, within the bound of the header.
    assert resume["basis"] == "judged"
    ratio = fmt.ratio(inspected["raw_bytes"] / resume["nbytes"])
    assert f"{raw} → about {size(resume['nbytes'])} · {ratio}" in on_run
    strip = {
        "Archive": f"about {size(resume['nbytes'])}",
        "Ratio": ratio,
        "Bits": fmt.value(resume["bits_per_weight"]),
    }
    strip["Restore cost"] = percentage(resume["restore_cost"])
    for label, figure in strip.items():
        assert f":small[{label}] **{figure}**" in on_run, label
    services.choose(shown, keep="exact")
    assert f"{raw} → about {size(exact['nbytes'])}" in texts(app.run())
    # Bits are edited, and searched, from the default settings that the command line uses.
    setting, value = next(iter(services.codec_settings("lattice").items()))
    assert estimated["config"][setting] == value
    services.choose(shown, keep="resume")
    commands, _ = snippets(explorer("run", run=str(SAMPLE), drawer="code"))
    assert intent.estimate.words() in commands
    assert intent.requests(str(root / "digits-cnn.inshrink"))[0].words() in commands
