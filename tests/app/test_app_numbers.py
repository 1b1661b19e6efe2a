"""Numbers agree: sizes, parameters, default settings and costs of the sample, in the pages and in the CLI."""

from __future__ import annotations

import json
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.pages.run.shrinking import Intent
from inshrink_app.widgets import fmt

from inshrink_core.cli import main
from inshrink_core.text import percentage, size
from tests.app.builders import SAMPLE, explorer, texts
from tests.app.test_app_snippets import snippets


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
    assert resume["bound"] == services.chosen(shown).bound.value
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
