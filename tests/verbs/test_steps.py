"""Steps that a verb is asked for: a number, a text, or several of them."""

from pathlib import Path

import numpy as np
import pytest

import inshrink_core
from inshrink_core import verbs
from inshrink_core.errors import InputError
from inshrink_core.request import request_from_json
from inshrink_core.verbs.prune import Prune
from inshrink_core.verbs.restore import Restore
from tests.runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("steps") / "run")


@pytest.fixture(scope="module")
def archive(run: Path) -> Path:
    target = run.parent / "run.inshrink"
    inshrink_core.compress(run, target, codec="lossless")
    return target


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        (5, (5,)),
        (np.int64(10), (10,)),
        ([np.int32(5), 10], (5, 10)),
        (range(5, 11, 5), (5, 10)),
        ("10", (10,)),
        ("5,15", (5, 15)),
        ("5:15", (5, 10, 15)),
        ([5, "15:"], (5, 15, 20)),
    ],
)
def test_one_step_is_given_as_several_are(archive: Path, tmp_path: Path, steps, chosen):
    assert inshrink_core.restore(archive, tmp_path / "out", steps=steps).steps == chosen


@pytest.mark.parametrize(
    "verb",
    [
        lambda run, archive, steps: (
            inshrink_core.open(
                inshrink_core.compress(run, archive.with_name(f"{steps}.inshrink"), steps=steps).path
            ).steps
        ),
        lambda run, archive, steps: verbs.sensitivity(run, steps=steps).table.steps,
        lambda run, archive, steps: [
            row.step for row in verbs.release(run, archive, steps=steps).steps if row.nbytes
        ],
        lambda run, archive, steps: [
            frame.step
            for frame in verbs.prune(archive, keep=steps).plan.kept
            if frame.step != inshrink_core.open(archive).steps[-1]
        ],
    ],
)
@pytest.mark.parametrize("steps", [5, "5", (5,)])
def test_every_verb_takes_one_step(run: Path, archive: Path, verb, steps):
    assert list(verb(run, archive, steps)) == [5]


@pytest.mark.parametrize("steps", [1.5, [2.0], [None], b"5", np.array(0.5)])
def test_what_is_no_step_is_refused(archive: Path, tmp_path: Path, steps):
    with pytest.raises(InputError, match="a step is a whole number, or a text"):
        inshrink_core.restore(archive, tmp_path / "out", steps=steps)


@pytest.mark.parametrize(
    "request_", [Restore("a", "b", steps=0), Restore("a", "b", steps="5:"), Prune("a", keep=7)]
)
def test_a_request_for_one_step_is_written_and_read_as_that_for_several(request_):
    assert request_from_json(request_.to_json()) == request_
    assert request_.words()[-2:] in (["--steps", "0"], ["--steps", "5:"], ["--keep", "7"])
