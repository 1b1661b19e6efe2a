"""A pickle of a megabyte is read or refused within a second and a hundred megabytes."""

import json
import subprocess
import sys

import pytest

from inshrink_core.errors import DamagedError, InshrinkError, UnsafePickleError
from inshrink_core.formats.pickles.machine import read_pickle
from inshrink_core.formats.state_tree import read_state_tree
from tests.formats.hostile_pickles import CASES

MOST_SECONDS = 1.0
MOST_MEGABYTES = 100
MOST_SIGNS = 10_000


@pytest.fixture(scope="module")
def measured() -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.formats.hostile_pickles"],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    return {row[0]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_megabyte_takes_a_second_and_a_hundred_megabytes_at_most(name: str, measured):
    _, seconds, megabytes, signs, said = measured[name]
    assert 0 <= seconds < MOST_SECONDS, said
    assert megabytes < MOST_MEGABYTES
    assert signs < MOST_SIGNS


def test_two_hundred_thousand_refused_names_make_a_short_message():
    program = b"\x80\x02" + b"".join(b"cos\nname%d\n0" % i for i in range(200_000)) + b"N."
    with pytest.raises(UnsafePickleError) as caught:
        read_pickle(program)
    assert len(str(caught.value)) < 2000
    assert "more" in str(caught.value)
    assert len(caught.value.wanted) <= 1001
    assert caught.value.wanted[-1] == "(and 199,000 imports more)"


def test_every_part_of_a_message_is_bounded():
    error = DamagedError("a" * 10**6, where="b" * 10**6, expected="c" * 10**6, found="d" * 10**6)
    assert len(str(error)) < 20_000
    assert str(error).startswith("bbb")


def test_odd_keys_stay_apart_and_names_of_tensors_stay_what_they_were():
    import pickle

    told = read_pickle(pickle.dumps({1.5: "a", (1, 2): "b", 1 << 70: "c", (1, 3): "d", "e": 1, 7: 2}))
    assert sorted(map(str, told)) == ["(1, 2)", "(1, 3)", "0x400000000000000000", "1.5", "7", "e"]
    assert (told["e"], told[7]) == (1, 2)
    ids = {140_000_000_000_000 + i: i for i in range(50)}
    assert read_pickle(pickle.dumps(ids)) == ids
    many = {i: None for i in range(50_000)}
    assert read_pickle(pickle.dumps(many)) == many


@pytest.mark.parametrize("rate", [1 << 2400, -(1 << 2400), 10**400, float("nan"), float("inf"), "x", [1]])
def test_a_hyperparameter_that_is_no_number_is_left_out(rate: object):
    group = {"lr": rate, "betas": (rate, rate), "eps": 1e-8, "params": [0]}
    tree = read_state_tree({"optimizer": {"state": {}, "param_groups": [group]}})
    assert tree.optimizers[0].groups[0].numbers == {"eps": 1e-8}


def test_shared_dictionaries_are_read_where_they_are_few():
    import pickle

    shared = {"w": 1}
    assert read_pickle(pickle.dumps({"a": shared, "b": shared})) == {"a": shared, "b": shared}


def test_an_error_of_the_file_alone_is_one_of_ours():
    for program in (b"\x80\x02" + b"(" * 20_000 + b".", b"\x80\x04" + b"N" + b"\x94" * 9000 + b"."):
        with pytest.raises(InshrinkError):
            read_pickle(program)
