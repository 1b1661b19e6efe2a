"""Entry points: ours are found without asking every installed distribution."""

import pytest

from inshrink_core import plugins


@pytest.fixture
def unscanned(monkeypatch):
    """Refuse to scan what is installed."""

    def refuse(group):
        raise AssertionError(f"{group} was looked for everywhere")

    monkeypatch.setattr(plugins, "entry_points", refuse)
    plugins.plugins.cache_clear()
    yield
    plugins.plugins.cache_clear()


@pytest.mark.parametrize(
    ("group", "name"),
    [("inshrink.codecs", "lattice"), ("inshrink.readers", "file"), ("inshrink.tasks", "char-gpt")],
)
def test_what_comes_with_the_project_is_found_without_a_scan(unscanned, group, name):
    point = plugins.plugin(group, name)
    assert point.name == name
    assert callable(point.load())


def test_a_name_that_is_nobodys_is_none():
    assert plugins.plugin("inshrink.codecs", "none-such") is None
