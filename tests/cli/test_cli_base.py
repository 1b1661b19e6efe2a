"""Base models on the command line."""

import shutil

import pytest


@pytest.fixture
def based(cli, small_run, tmp_path):
    """An archive upon a base model that its hint does not lead to, and the base."""
    made = tmp_path / "made.inshrink"
    outcome = cli("compress", small_run, "-o", made, "--steps", "50", "--base", f"{small_run}@25")
    assert outcome.code == 0
    assert "base model" in outcome.out
    moved = tmp_path / "a" / "b" / "moved.inshrink"
    shutil.copytree(made, moved)
    return moved, f"{small_run}@25"


def test_every_verb_that_decodes_asks_for_the_base_and_takes_it(cli, small_run, tmp_path, based):
    archive, base = based
    verbs = (
        ("restore", archive, "-o", tmp_path / "out"),
        ("verify", archive, "--deep"),
        ("export", archive, "-o", tmp_path / "one.inshrink"),
        ("compare", archive, "--against", small_run, "--trust-run"),
        ("prune", archive, "--stand-alone", "--apply"),
    )
    for words in verbs:
        refused = cli(*words)
        assert refused.code in (1, 2)
        assert "base model" in refused.out + refused.err
        given = cli(*words, "--base", base)
        assert given.code == 0, given.err
    assert cli("verify", archive, "--deep").code == 0
    assert "base" not in cli("inspect", archive, "--json").document


def test_watch_begins_upon_a_base(cli, small_run, tmp_path):
    words = ("compress", small_run, "-o", tmp_path / "w.inshrink", "--watch", "--until", 25, "--poll", 0.1)
    outcome = cli(*words, "--base", f"{small_run}@10", "--json")
    assert outcome.code == 0
    assert outcome.document["base"]["name"] == f"{small_run.name}@10"
