"""A codec that is installed from elsewhere is offered with its label and tunable parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from inshrink_app import services
from inshrink_app.widgets.choices import codec_labels

from inshrink_core.codec import get_codec
from inshrink_core.plugins import plugins
from tests.app.builders import archives, button, explorer, write_run
from tests.app.job_stubs import option
from tests.codecs.test_codec_guide import package

__all__ = ["package"]


@pytest.fixture
def installed(package, monkeypatch) -> Iterator[None]:
    """The codec of the guide, found through its entry point in this process."""
    monkeypatch.syspath_prepend(str(package))
    plugins.cache_clear()
    yield
    plugins.cache_clear()
    get_codec.cache_clear()


def test_a_codec_from_elsewhere_is_exported_with_its_tunable(installed, root, jobs):
    app = archives("write", write_run(root / "run"))
    codecs = app.selectbox(key="export.codec")
    assert "Cut mantissa" in codecs.options
    codecs.set_value("cut").run()
    tunable = app.select_slider(key="export.cut.bits")
    assert (tunable.label, tunable.value, list(tunable.options)) == (
        "Mantissa",
        8,
        ["16", "12", "8", "6", "4", "2"],
    )
    tunable.set_value(4).run()
    button(app, "Write archive").click().run()
    words = jobs.words(0)[0]
    assert (option(words, "--codec"), option(words, "--set")) == ("cut", "bits=4")


def test_a_codec_from_elsewhere_is_searched_and_edited(installed, root, jobs):
    run = write_run(root / "run")
    services.change_bits(services.load_subject(str(run)), {"codec": "cut", "settings": {"bits": 4}})
    app = explorer("run", run=str(run), codec="cut")
    assert app.selectbox(key="search.codec").value == "cut"
    assert services.codec_settings("cut") == {"bits": 8}


def test_every_codec_of_weights_has_a_label_and_the_default_comes_first():
    assert next(iter(codec_labels())) == "lattice"
    assert "moments" not in codec_labels()
    assert set(codec_labels()) - set(codec_labels(searched=True)) == {"lossless"}
    assert all(label != name for name, label in codec_labels().items())
