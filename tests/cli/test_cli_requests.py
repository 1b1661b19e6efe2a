"""A request and the command line that asks for the same."""

import pytest

from inshrink_core.codec import make_codec
from inshrink_core.errors import InputError
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.compress import Compress
from inshrink_core.verbs.verify import Verify


@pytest.fixture
def asked(monkeypatch):
    """Return the requests that commands would perform."""
    seen = []

    def refuse(request):
        seen.append(request)
        raise InputError("seen")

    for request in (CompareArchives, Compress, Verify):
        monkeypatch.setattr(request, "perform", refuse)
    return seen


@pytest.mark.parametrize(
    "request_made",
    [
        Compress("run", "a", steps=["100:500", "7"], base="model.pt", allow_damaged=True),
        Compress("run", "a", config={"coarseness": 4, "refine": {"linear": 0.5}}, optimizer="exact"),
        Compress("run", "a", config="found.json", settings=["coarseness=2"], max_divergence=float("inf")),
        Compress("run", "a", coarseness=2.5, metric="accuracy", timeout=3.5, threads=2),
        Compress(
            "run", "a", watch=True, interval=0.5, until=40, idle=3.0, codec="lossless", skip_damaged=True
        ),
        CompareArchives(["a"], "run"),
        CompareArchives(["a", "b", "c"], "run", steps=["1:9"], max_drop=0.5, again=True, max_memory=4_000),
        Verify("a", deep=True, against="run", max_disk=7, skip_damaged=True, base="model.pt"),
    ],
    ids=str,
)
def test_words_of_a_request_ask_for_the_same(cli, asked, request_made):
    assert cli(*request_made.words()).code == 2
    (read,) = asked
    assert type(read) is type(request_made)
    if isinstance(read, Compress) and request_made.config != "found.json":
        assert read.chosen() == request_made.chosen()
    free = {"config", "settings"}  # one option gives both
    given = [{k: v for k, v in row.given().items() if k not in free} for row in (read, request_made)]
    assert given[0] == given[1]


def test_several_arguments_may_have_options_between_them(cli, asked):
    cli("compare", "a", "--against", "run", "b", "--again", "c", "--timeout", "5", "d")
    assert asked == [CompareArchives(("a", "b", "c", "d"), "run", again=True, timeout=5.0)]
    outcome = cli("compare", "--against", "run")
    assert outcome.code == 2
    assert "ARCHIVE requires an argument; see inshrink compare --help" in outcome.err
    assert len(asked) == 1


def test_options_go_above_settings_and_settings_above_a_file(tmp_path):
    (tmp_path / "c.toml").write_text(
        'codec = "inshrinkerator"\nkeyframe_every = 4\n[settings]\nbins = 8\nprotect = 0.1\nprune = 0.2\n'
    )
    request = Compress("run", "a", config=tmp_path / "c.toml", settings=["bins=16", "prune=0.4"])
    assert [*request.chosen().values()] == [
        "inshrinkerator", {"bins": 16, "protect": 0.1, "prune": 0.4}, None, 4,
    ]  # fmt: skip
    again = Compress("run", "a", settings={"bins": 16}, keyframe_every=2)
    assert [*again.chosen().values()] == [None, {"bins": 16}, None, 2]
    codec = make_codec("uniform", {"bits": 4})
    assert Compress("run", "a", codec="uniform", config=codec).chosen()["config"] is codec
    with pytest.raises(InputError, match="codec already has settings"):
        Compress("run", "a", codec="uniform", config=codec, settings=["bits=3"]).chosen()


def test_no_name_becomes_an_option_by_how_it_begins(cli, asked):
    request = CompareArchives(["--trust-run", "-b"], "-run", evaluator="-e.py:f")
    cli(*request.words())
    assert asked == [CompareArchives(("./--trust-run", "./-b"), "-run", evaluator="-e.py:f")]
