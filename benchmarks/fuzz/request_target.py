"""Attacks on requests: documents of strangers are read, and are a request of ours or refused."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Sequence
from functools import cache

from benchmarks.fuzz.input_mutants import mutate_json
from benchmarks.fuzz.target import require
from inshrink_core.cli.derived import read_request
from inshrink_core.evaluate import Executing
from inshrink_core.plugins import VERBS, plugins
from inshrink_core.request import read_document, request_from_json, request_of


@cache
def _documents() -> tuple[bytes, ...]:
    """Return the documents of the examples of every verb and mode."""
    found = []
    for verb in plugins(VERBS):
        request = request_of(verb)
        if request is None or not request.REPORTS or verb == "run":
            continue
        words = (shlex.split(example)[1:] for example in request.EXAMPLES)
        found += [json.dumps(read_request(request, line).to_json()).encode() for line in words]
    return tuple(found)


class RequestTarget:
    """Requests as ``inshrink run`` reads them; what they ask for is not performed."""

    name = "requests"

    def seeds(self) -> Sequence[bytes]:
        """Return a request of each kind."""
        return _documents()

    def mutate(self, rng: random.Random) -> bytes:
        """Return a request that someone else wrote."""
        return mutate_json(rng, rng.choice(_documents()))

    def execute(self, data: bytes) -> str:
        """Read it; what is read says itself again, trusts no code, and is a command line."""
        request = read_document(data, "request.json")
        document = request.to_json()
        again = request_from_json(json.loads(json.dumps(document, allow_nan=False))).to_json()
        require(again == document, "a request that was read says itself again", str(document)[:200])
        trusts = isinstance(request, Executing) and request.trusted is not None
        require(not trusts, "no document says that code is trusted", str(document)[:200])
        is_line = all(isinstance(word, str) for word in request.words())
        require(is_line, "a request is a command line", str(document)[:200])
        return "same" if data in _documents() else "different"
