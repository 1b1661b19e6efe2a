"""A pickle of a megabyte is read or refused within a second and a hundred megabytes."""

import json
import pickle
import sys

import pytest

from inshrink_core.errors import DamagedError, InshrinkError, UnsafePickleError
from inshrink_core.formats.state_tree import read_state_tree
from inshrink_core.formats.torch.pickles import _REPLACED, _plain_for, read_pickle
from tests.formats.hostile_pickles import CASES
from tests.processes import ran

MAX_SECONDS = 1.0
MAX_MEGABYTES = 100
MAX_SIGNS = 10_000


@pytest.fixture(scope="module")
def measured():
    done = ran(sys.executable, "-m", "tests.formats.hostile_pickles", timeout=250)
    assert done.returncode == 0, done.stderr
    return {row[0]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_megabyte_takes_a_second_and_a_hundred_megabytes_at_most(name, measured):
    _, seconds, megabytes, signs, said = measured[name]
    assert 0 <= seconds < MAX_SECONDS, said
    assert megabytes < MAX_MEGABYTES
    assert signs < MAX_SIGNS


def test_two_hundred_thousand_refused_names_make_a_short_message():
    program = b"\x80\x02" + b"".join(b"cos\nname%d\n)R0" % i for i in range(200_000)) + b"N."
    with pytest.raises(UnsafePickleError) as caught:
        read_pickle(program)
    assert len(str(caught.value)) < 2000
    assert "more" in str(caught.value)
    assert len(caught.value.wanted) <= 1001
    assert caught.value.wanted[-1] == "(and 199,000 imports more)"


def test_odd_keys_stay_apart_and_names_of_tensors_stay_what_they_were():
    told = read_pickle(pickle.dumps({1.5: "a", (1, 2): "b", 1 << 70: "c", (1, 3): "d", "e": 1, 7: 2}))
    assert sorted(map(str, told)) == ["(1, 2)", "(1, 3)", "0x400000000000000000", "1.5", "7", "e"]
    assert (told["e"], told[7]) == (1, 2)
    ids = {140_000_000_000_000 + i: i for i in range(50)}
    assert read_pickle(pickle.dumps(ids)) == ids
    many = {i: None for i in range(50_000)}
    assert read_pickle(pickle.dumps(many)) == many


@pytest.mark.parametrize("rate", [1 << 2400, -(1 << 2400), 10**400, float("nan"), float("inf"), "x", [1]])
def test_a_hyperparameter_that_is_no_number_is_left_out(rate):
    group = {"lr": rate, "betas": (rate, rate), "eps": 1e-8, "params": [0]}
    tree = read_state_tree({"optimizer": {"state": {}, "param_groups": [group]}}, lambda ref: None)
    assert tree.optimizers[0].groups[0].numbers == {"eps": 1e-8}


def test_shared_dictionaries_are_read_where_they_are_few():
    shared = {"w": 1}
    assert read_pickle(pickle.dumps({"a": shared, "b": shared})) == {"a": shared, "b": shared}


def test_optimizers_that_share_their_groups_many_times_are_refused():
    shared = {"state": {}, "param_groups": [None] * 1000}
    with pytest.raises(DamagedError, match="more values than a checkpoint"):
        read_state_tree({"optimizer": [[shared] * 64] * 64}, lambda ref: None, n_bytes=10_000)


def test_an_error_of_the_file_alone_is_one_of_ours():
    for program in (b"\x80\x02" + b"(" * 20_000 + b".", b"\x80\x04" + b"N" + b"\x94" * 9000 + b"."):
        with pytest.raises(InshrinkError):
            read_pickle(program)


@pytest.mark.parametrize("protocol", range(1, 6))
def test_what_a_pickler_writes_is_read_at_every_binary_protocol(protocol):
    from collections import Counter, OrderedDict, defaultdict

    state = {"a": [1, -2, 1 << 70, 2.5, None, True], "b": ("é" * 300, b"raw"), "c": {"d": {}}}
    state |= {"e": OrderedDict(x=1), "f": defaultdict(list, {"y": [2]}), "g": Counter("aab"), "h": {3, 4}}
    told = read_pickle(pickle.dumps(state, protocol))
    del state["h"]
    assert {key: told[key] for key in state} == state


def test_a_program_of_only_data_opcodes_is_left_to_pythons_machine():
    dangerous = b"}]\x8fR\x81\x92b\x90\x91ldoiP\x82\x83\x84\x97\x98\x95."
    plain = _plain_for(100)
    assert all(plain.match(bytes([code]) + bytes(40)).end() == 0 for code in dangerous)
    assert set(_REPLACED) < {bytes([code]) for code in dangerous}
