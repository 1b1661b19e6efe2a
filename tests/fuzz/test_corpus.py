"""What the fuzzer once found, for ever: each input is refused, or gives what it should.

The files lie in ``corpus/TARGET/NAME``, written by ``python -m benchmarks.fuzz --save``.
"""

from pathlib import Path

import pytest

from benchmarks.fuzz.campaign import limits_of, warm_up
from benchmarks.fuzz.judging import Limits, judge_alone
from benchmarks.fuzz.targets import named

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file() and path.name != "README.md")


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.relative_to(CORPUS).as_posix())
def test_what_was_once_found_stays_mended(path):
    (target,) = named((path.parent.name,))
    warm_up(target)
    verdict = judge_alone(target, path.read_bytes(), limits_of(target, Limits()))
    assert not verdict.bad, verdict
