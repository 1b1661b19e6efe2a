"""Steps that a verb is asked for: a number, a text, or several of them."""

import numpy as np
import pytest

import inshrink_core
from inshrink_core.errors import InputError


@pytest.fixture(scope="module")
def archive(run_path):
    inshrink_core.compress(run_path, run_path.parent / "run.inshrink", codec="lossless", steps=":20")
    return run_path.parent / "run.inshrink"


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
def test_one_step_is_given_as_several_are(archive, tmp_path, steps, chosen):
    assert inshrink_core.restore(archive, tmp_path / "out", steps=steps).steps == chosen


@pytest.mark.parametrize("steps", [1.5, [2.0], [None], b"5", np.array(0.5)])
def test_what_is_no_step_is_refused(archive, tmp_path, steps):
    with pytest.raises(InputError, match="a step is a whole number, or a text"):
        inshrink_core.restore(archive, tmp_path / "out", steps=steps)
