"""A request as a command line and as a JSON document: it says itself again, and nothing else."""

import hashlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import inshrink_core
from inshrink_core.cli.derived import read_request
from inshrink_core.codec import make_codec
from inshrink_core.errors import InputError
from inshrink_core.plugins import VERBS, plugins
from inshrink_core.request import MAX_REQUEST_BYTES, read_document, request_from_json, request_of
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.compress import Compress
from inshrink_core.verbs.verify import Verify

ASKED = {verb: request_of(verb) for verb in sorted(plugins(VERBS)) if verb not in ("run", "ui")}
MORE = {
    "evaluate": ["evaluate", "run", "--write", "judge.py"],
    "compress": ["compress", "run", "-o", "a", "--watch", "--until", "40"],
    "search": ["search", "run", "--max-divergence", "inf", "--steps", "1,2", "--set", 'x=[1, {"y": null}]'],
}
JUDGE = (
    "import pathlib\n\n\ndef evaluate(state):\n    pathlib.Path({!r}).touch()\n    return {{'loss': 1.0}}\n"
)


@pytest.mark.parametrize("command", ASKED)
def test_a_request_of_every_verb_says_itself_again_as_a_document_and_as_words(command):
    kind = ASKED[command]
    examples = [shlex.split(example)[1:] for example in kind.EXAMPLES]
    examples += [MORE[command]] if command in MORE else []
    assert examples
    for words in examples:
        asked = read_request(kind, words)
        document = json.loads(json.dumps(asked.to_json(), allow_nan=False))
        read = request_from_json(document)
        assert (type(read), read, read.to_json()) == (kind, asked, document)
        assert read_request(kind, read.words()) == asked


def deep(n):
    return {} if n == 0 else {"x": [deep(n - 1)]}


RUN = {"run": "run", "archive": "a"}


@pytest.mark.parametrize(
    ("document", "output"),
    [
        ([], "no request"),
        ({"verb": "compress", "fields": RUN, "trusted": []}, "no request"),
        ({"verb": ["compress"], "fields": RUN}, "no request"),
        ({"verb": "compres", "fields": RUN}, "no request is of the verb 'compres'; did you mean 'compress'?"),
        ({"verb": "ui", "fields": {}}, "no request is of the verb 'ui'"),
        ({"verb": "run", "fields": {"request": "x"}}, "no request is of the verb 'run'"),
        ({"verb": "os.system", "fields": {}}, "no request is of the verb 'os.system'"),
        ({"verb": "compress", "mode": "watch", "fields": RUN}, "no request"),
        ({"verb": "compress", "fields": {**RUN, "trusted": ["x"]}}, "has no field 'trusted'"),
        ({"verb": "compress", "fields": {**RUN, "progress": None}}, "has no field 'progress'"),
        ({"verb": "compress", "fields": {**RUN, "until": 40}}, "--until goes with --watch"),
        ({"verb": "compress", "fields": {**RUN, "threads": 0}}, "--threads 0"),
        ({"verb": "compress", "fields": {**RUN, "threads": True}}, "threads is of another type"),
        ({"verb": "compress", "fields": {**RUN, "run": "a\0b"}}, "run cannot be used"),
        ({"verb": "compress", "fields": {**RUN, "run": "\ud800"}}, "run cannot be used"),
        ({"verb": "compress", "fields": {**RUN, "config": deep(20)}}, "config cannot be used"),
        ({"verb": "compress", "fields": {**RUN, "max_drop": "nan"}}, "max_drop is of another type"),
        ({"verb": "compress", "fields": {**RUN, "max_drop": 10**400}}, "max_drop is of another type"),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(cli, tmp_path, document, output):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(document))
    outcome = cli("run", str(path), "--json")
    assert outcome.code == 2
    assert output in outcome.document["error"]["message"]
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[" * 100_000, b'{"verb": NaN}', b'{"verb": "a", "verb": "b"}', b" " * 2_000_000],
)
def test_what_is_no_document_is_refused(content):
    assert len(content) < MAX_REQUEST_BYTES or len(set(content)) == 1
    with pytest.raises(InputError):
        read_document(content)


@pytest.mark.parametrize("own", [True, False])
def test_code_runs_under_its_digest_alone(cli, small_run, tmp_path, own):
    run = Path(shutil.copytree(small_run, tmp_path / "run"))
    trace, judge = tmp_path / "trace", run / "judge.py"
    judge.write_text(JUDGE.format(str(trace)))
    (run / "inshrink.toml").write_text('[evaluator]\nfile = "judge.py"\n')
    fields = {"trust_run": True} if own else {"evaluator": f"{judge}:evaluate"}
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"verb": "evaluate", "fields": {"run": str(run), **fields}}))
    for more in ((), ("--trust", "0" * 64)):
        outcome = cli("run", str(path), "--json", *more)
        assert (outcome.code, outcome.document["error"]["type"]) == (2, "UntrustedCodeError")
    assert not trace.exists()
    digest = hashlib.sha256(judge.read_bytes()).hexdigest()
    assert cli("run", str(path), "--json", "--trust", digest).code == 0
    assert trace.exists()


def test_a_file_of_a_task_is_code_too(cli, tmp_path):
    (tmp_path / "task.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n")
    fields = {"task": f"{tmp_path}/task.py:Task", "output": str(tmp_path / "out")}
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"verb": "rehearse", "fields": fields}))
    assert cli("run", str(path), "--json").document["error"]["type"] == "UntrustedCodeError"
    assert not (tmp_path / "trace").exists()


def test_who_asks_in_python_is_trusted(small_run):
    asked = inshrink_core.verbs.evaluate
    with pytest.raises(InputError, match="not what was trusted"):
        asked(small_run, evaluator=f"{__file__}:none", trusted=("0" * 64,))
    assert replace(Compress("run", "a"), trusted=("x",)) == Compress("run", "a")


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
        Compress("run", "a", config={"coarseness": 4, "refine": {"linear": 0.5}, "x": [1, {"y": None}]}),
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
    document = json.loads(json.dumps(request_made.to_json()))
    assert request_from_json(document).to_json() == document
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
