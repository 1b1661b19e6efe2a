"""What a job shows of its requests asks for the same: in a shell, in Python, and from its record."""

from __future__ import annotations

import ast
import importlib
import inspect
import shlex
from typing import Any

import msgspec
import pytest
from inshrink_app.jobs.work import Work
from inshrink_app.widgets.ending import python_text, shell_text

from inshrink_core.cli.derived import read_request
from inshrink_core.plugins import VERBS, plugins
from inshrink_core.request import Request, request_of
from inshrink_core.verbs.compress import Compress
from tests.app.job_stubs import asked

EXAMPLES = [
    words
    for verb in sorted(plugins(VERBS))
    if (request := request_of(verb)) is not None and request.REPORTS and verb != "run"
    for words in ([shlex.split(example)[1:] for example in request.EXAMPLES])
] + [
    ["compress", "run", "-o", "a", "--watch", "--until", "40"],
    ["compress", "run", "-o", "a", "--max-divergence", "inf"],
    ["estimate", "run", "--each", "codec=qd,bits=3", "--try", "2"],
    ["evaluate", "run", "--write", "judge.py", "--model", "net:Net"],
    ["prune", "a", "--forget-missing", "--apply"],
]


def kept(*requests: Request[Any]) -> tuple[Request[Any], ...]:
    """Return the requests of a job as another explorer reads them."""
    work = Work.asking(requests, shown="run", page="jobs")
    return msgspec.json.decode(msgspec.json.encode(work), type=Work).requests


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_the_line_and_the_call_of_a_job_ask_for_its_request_again(words):
    (request,) = kept(asked(words))
    assert request == asked(words)
    line = shlex.split(shell_text([request]))
    assert line[0] == "inshrink"
    again = read_request(type(request), line[1:]) if line[1] != words[0] else asked(line[1:])
    assert again == request
    (_, found, *_) = ast.parse(python_text([request])).body
    assert isinstance(found, ast.Assign)
    call = found.value
    assert isinstance(call, ast.Call)
    home, _, name = ast.unparse(call.func).rpartition(".")
    function = getattr(importlib.import_module(home), name)
    evaluated = {"float": float}
    places = [eval(ast.unparse(one), evaluated) for one in call.args]
    named = {str(one.arg): eval(ast.unparse(one.value), evaluated) for one in call.keywords}
    given = inspect.signature(function).bind(*places, **named).arguments
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()} == request.given()


def test_settings_are_options_of_their_own_and_the_same_request_in_python():
    config = {"coarseness": 2.5, "overrides": [{"match": "*.bias", "coarseness": 1.0}]}
    (request,) = kept(Compress("run", "a", codec="lattice", config=config))
    read: Any = read_request(type(request), request.words())
    assert read.chosen() == Compress("run", "a", codec="lattice", config=config).chosen()
    assert f"config={config!r}" in python_text([request])
