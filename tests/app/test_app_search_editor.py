"""The editor of configurations: estimates, changes by hand, and what is carried on from it."""

from __future__ import annotations

import json
import math

import pytest
from inshrink_app import services
from inshrink_app.model import config as search_config
from inshrink_app.model.problem import ServiceError

from inshrink_core.chain.defaults import make_configs
from inshrink_core.verbs.shared.values import given_settings, read_config_file
from tests.app.builders import button, explorer, open_panel, texts, visit, write_run
from tests.app.job_stubs import STEPS
from tests.app.search_builders import config, document, point, put, trial


def test_the_editor_estimates_and_says_that_it_does(archived, jobs):
    app = explorer("allocate", run=str(archived), table="settings")
    button(app, "Use these settings").click().run()
    told = {metric.label: metric.delta for metric in app.metric}
    assert told["Bits per weight"] == "estimated, uncalibrated"
    assert button(app, "Undo").disabled


def test_a_configuration_is_carried_on_to_the_export_and_can_be_dropped_there(archived, jobs):
    found = config(2.0, override=[{"layer_type": "linear", "coarseness": 3.5}])
    trials = [trial(step, 2.0, config=found) for step in STEPS]
    put(jobs, archived, result=document(best={"config": found}, trials=trials))
    app = explorer("allocate", run=str(archived))
    button(app, "Apply to compress").click().run()
    assert "Configuration from the page Allocate" in texts(app)
    # A page that is switched to from within a script is not where the next click goes, in a test.
    visit(app, "export").run()
    button(app, "Export").click().run()
    overrides = 'overrides=[{"layer_type": "linear", "coarseness": 3.5}]'
    place = jobs.last.index("--codec")
    assert jobs.last[place : place + 6] == [
        "--codec",
        "lattice",
        "--set",
        "coarseness=2.0",
        "--set",
        overrides,
    ]
    open_panel(app)
    commands = next(code.value for code in app.code if code.value.startswith("inshrink compress"))
    assert "--set" in commands
    button(app, "Choose settings here instead").click().run()
    assert app.select_slider(key="export.lattice.coarseness")


@pytest.mark.parametrize("told", ["[]", '{"run": "RUN", "config": {"codec": 3}}', "[" * 9999])
def test_what_a_link_says_was_carried_on_is_not_trusted(archived, jobs, told):
    app = explorer("export", run=str(archived), carried=told.replace("RUN", str(archived)))
    assert "Configuration from the page Allocate" not in texts(app)


def test_a_setting_that_no_codec_has_and_a_pattern_that_means_nothing_are_told(root):
    shown = services.load_subject(str(write_run(root / "run")))
    with pytest.raises(ServiceError, match="no setting"):
        services.check_config({"codec": "lattice", "settings": {"rough": 1}})
    services.check_config(config(2.0, override=[{"match": "fc1.*", "coarseness": 1}]))
    overrides = [{"match": "fc1.*", "coarseness": 1}, {"match": "gone.*", "coarseness": 1}]
    assert services.unmatched_overrides(shown, config(2.0, override=overrides)) == ("gone.*",)
    assert services.unmatched_overrides(shown, config(2.0, override=[{"layer_type": "embedding"}]))


HOSTILE = {"match": 'a"]\n[x]\u007f\\*.é', "layer_type": "linear", "coarseness": 1.5}


@pytest.mark.parametrize("form", ["toml", "json"])
def test_the_file_of_a_configuration_is_what_the_command_line_reads(tmp_path, form):
    wanted = config(2.5, override=[{"layer_type": "vector", "coarseness": 1}, HOSTILE])
    wanted["settings"] |= {"shaping": "auto", "exact": False}
    path = tmp_path / f"config.{form}"
    path.write_text(search_config.toml_text(wanted) if form == "toml" else json.dumps(wanted))
    told = read_config_file(path)
    assert told == wanted
    assert given_settings(told, []) == search_config.engine_settings(wanted)
    assert len(make_configs("lattice", given_settings(told, []))[1]) == 2


@pytest.mark.parametrize("form", ["toml", "json"])
def test_a_configuration_that_was_saved_is_loaded_as_it_was(form):
    wanted = config(2.5, override=[HOSTILE])
    text = search_config.toml_text(wanted) if form == "toml" else json.dumps(wanted)
    assert search_config.loaded(text.encode(), f"X.{form.upper()}") == wanted
    found = json.dumps({"best": {"config": wanted}, "trials": []}).encode()
    assert search_config.loaded(found, "search.json") == wanted


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 9999,
        b"codec = 3",
        b"codec = 'x'\nsettings = 1",
        b"codec = 'x'\noverride = 1",
        b"codec = 'x'\noverride = [1]",
        b"codec = 'x'\nevil = 1",
    ],
)
@pytest.mark.parametrize("name", ["a.toml", "a.json"])
def test_a_file_that_is_no_configuration_is_refused(content, name):
    with pytest.raises(ValueError, match="the file"):
        search_config.loaded(content, name)


def test_a_file_is_taken_into_the_editor_and_one_for_another_model_is_not(archived, jobs):
    app = explorer("allocate", run=str(archived), table="settings")
    box = app.get("file_uploader")[0]
    box.upload("inshrink.toml", search_config.toml_text(config(7.0)).encode(), "text/plain").run()
    assert app.session_state["search.edit"].config == config(7.0)
    wrong = config(7.0, override=[{"match": "gone.*", "coarseness": 1}])
    app.get("file_uploader")[0].upload("x.json", json.dumps(wrong).encode(), "text/plain").run()
    assert app.session_state["search.edit"].config == config(7.0)


def test_rows_of_the_editor_become_the_configuration_they_came_from():
    wanted = config(2.5, override=[{"match": "*.head", "layer_type": "linear", "coarseness": 1.5}])
    rows = search_config.setting_rows(wanted), search_config.override_rows(wanted)
    assert search_config.edited("lattice", *rows) == wanted
    empty = [("linear", None, math.nan, ""), (None, None, None, None)]
    assert "override" not in search_config.edited("lattice", [("coarseness", "2"), (None, None)], empty[1:])
    with pytest.raises(ValueError, match="lacks its setting"):
        search_config.edited("lattice", [], empty)


def test_undo_goes_back_one_change_and_reset_to_what_was_loaded():
    edit = services.Edit("/run", config(1.0))
    edit.undo()
    edit.reset()
    assert (edit.config, edit.version) == (config(1.0), 0)
    loaded = point(9, 0.0, config=config(2.0))
    edit.load(loaded)
    edit.change(config(3.0))
    edit.change(config(3.0))
    assert edit.is_changed
    edit.reset()
    assert (edit.config, edit.is_changed) == (config(2.0), False)
    for wanted, origin in ((config(3.0), loaded), (config(2.0), loaded), (config(1.0), None)):
        edit.undo()
        assert (edit.config, edit.origin) == (wanted, origin)
    assert not edit.before
