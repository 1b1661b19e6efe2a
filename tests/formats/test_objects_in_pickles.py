"""Values of any class beside tensors: harmless ones are carried, modules are read, nothing is executed."""

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import http
import io
import ipaddress
import itertools
import json
import logging
import operator
import os
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
import warnings
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import torch
from torch import nn

from inshrink_core.checkpoint import TensorRole
from inshrink_core.errors import UnsafePickleError
from inshrink_core.formats import open_run, write_checkpoint
from inshrink_core.formats.torch.pickles import read_pickle
from tests.formats.run_builders import Call, same_bits


class Mode(enum.Enum):
    FAST = "fast"


class Bits(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Outer:
    class Inner(enum.Enum):
        ONE = 1

    def method(self):
        """Be a method."""


class OwnError(Exception):
    pass


class Words(dict[str, int]):
    pass


class Row(list[int]):
    pass


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Width:
    value: int = 3


class Rebuilt:
    def __reduce__(self):
        return _rebuild, (1,)


def _rebuild(value):
    raise AssertionError("executed")


HARMLESS: dict[str, object] = {
    "enum": Mode.FAST,
    "flags": Bits.LOW | Bits.HIGH,
    "enum within a class": Outer.Inner.ONE,
    "enum of Python": http.HTTPStatus.OK,
    "method": Outer().method,
    "deque": collections.deque([1, 2], 5),
    "chain of mappings": collections.ChainMap({}),
    "counter": collections.Counter("aab"),
    "mapping with a default": collections.defaultdict(list, a=[1]),
    "mapping of its own class": Words(a=1),
    "list of its own class": Row([1, 2]),
    "named tuple": Point(1, 2),
    "dataclass": Width(),
    "call of its own function": Rebuilt(),
    "time": datetime.datetime(2024, 5, 6, 7, 8, tzinfo=datetime.UTC),
    "time of a zone": datetime.datetime(2024, 5, 6, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "date": datetime.date(2024, 5, 6),
    "duration": datetime.timedelta(1, 2, 3),
    "decimal": decimal.Decimal("1.50"),
    "context of decimals": decimal.Context(),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=7),
    "regex": re.compile("a+", re.IGNORECASE),
    "namespace": argparse.Namespace(a=1),
    "simple namespace": types.SimpleNamespace(a=1),
    "partial": functools.partial(print, 1),
    "partial of a module's class": functools.partial(nn.LayerNorm, eps=1e-6),
    "getter": operator.itemgetter(1),
    "exception": ValueError("x"),
    "exception of the system": OSError(2, "x"),
    "exception of its own class": OwnError("x"),
    "exception of a library": json.JSONDecodeError("a", "b", 0),
    "random state of Python": random.getstate(),
    "random numbers of Python": random.Random(0),
    "random state of numpy": np.random.RandomState(0).get_state(),
    "random states of numpy": np.random.RandomState(0),
    "generator of numpy": np.random.default_rng(0),
    "state of a generator of numpy": np.random.Generator(np.random.Philox(1)).bit_generator.state,
    "seeds of numpy": np.random.SeedSequence(1),
    "array of numpy": np.arange(3),
    "records of numpy": np.rec.array([(1, 2.0)]),
    "masked array": np.ma.masked_array([1, 2], [True, False]),
    "date of numpy": np.datetime64("2024-05-06"),
    "generator of PyTorch": torch.Generator(),
    "distribution": torch.distributions.Normal(0, 1),
    "loss": nn.CrossEntropyLoss(),
    "activation": nn.functional.gelu,
    "size, dtype, device, layout": (torch.Size([1]), torch.float16, torch.device("cpu"), torch.strided),
    "path": pathlib.PurePosixPath("a"),
    "address": ipaddress.ip_address("127.0.0.1"),
    "logger": logging.getLogger("x"),
    "bytes in memory": io.BytesIO(b"x"),
    "array": array.array("i", [1, 2]),
    "iterator": iter([1, 2]),
    "count": itertools.count(3),
    "type of a list": list[int],
    "union": int | None,
    "optional": Optional[int],  # noqa: UP045 - pickled in another way than the union
    "ellipsis": ...,
    "slices and ranges": (slice(1, 2), range(3), 1j, frozenset([1]), bytearray(b"x")),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_value_is_carried_at_every_protocol(name, protocol):
    program = pickle.dumps({"value": HARMLESS[name], "behind": [HARMLESS[name], 1]}, protocol)
    found: Any = read_pickle(program)
    assert found["behind"][1] == 1


def test_all_of_them_beside_a_model_come_back_bit_for_bit(tmp_path):
    state = {"model": {"w": torch.ones(3)}, "params": HARMLESS["namespace"], "beside": HARMLESS, "step": 4}
    torch.save(state, tmp_path / "c.pt")
    run = open_run(tmp_path / "c.pt")
    assert list(run[4]) == ["w"]
    (path,) = write_checkpoint(run[4], tmp_path / "out")
    assert path.read_bytes() == (tmp_path / "c.pt").read_bytes()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "call",
    [
        *(Call(os.system, "x"), Call(eval, "1"), Call(exec, "1"), Call(__import__, "os"), Call(print)),
        *(Call(open, "x", "w"), Call(map, os.system, ["x"]), Call(functools.reduce, os.system, ["x"])),
        *(Call(getattr, Call(__import__, "os"), "system"), Call(sys.exit), Call(torch.load, "x")),
        *(Call(torch.hub.load, "x", "y"), Call(np.load, "x"), Call(pickle.loads, b"N.")),
    ],
    ids=lambda call: call.function.__name__,
)
def test_a_call_that_no_harmless_value_needs_is_refused(call, protocol):
    with pytest.raises(UnsafePickleError):
        read_pickle(pickle.dumps({"a": call}, protocol))


_GETATTR = b"c__builtin__\ngetattr\n"


@pytest.mark.parametrize(
    "program",
    [
        _GETATTR + b"cpathlib\nPath\nX\x0a\0\0\0write_text\x86R(X\x01\0\0\0xtR",
        _GETATTR + b"(cmine\nC\n)\x81X\x01\0\0\0mtR)R",
        b"cmine\nC\n)\x81)R",
        b"cfunctools\npartial\ncos\nsystem\n\x85R)R",
        b"cfunctools\npartial\ncos\nsystem\n\x85\x81X\x01\0\0\0x\x85R",
    ],
    ids=["method of a class", "method of an object", "object", "partial", "partial that was not called"],
)
def test_what_a_value_would_do_if_it_were_called_is_refused(program):
    with pytest.raises(UnsafePickleError):
        read_pickle(b"\x80\x02}X\x01\0\0\0a" + program + b"s.")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.ones(5), persistent=False)
        self.register_parameter("absent", None)
        self.activation = nn.functional.gelu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)
        self.head.weight = self.blocks[0].linear.weight
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        self.owner = [self]


class Agent:
    def __init__(self, net):
        self.net, self.settings = net, {"a": 1}


WHOLE: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "at the top": (lambda net: net, ""),
    "under model": (lambda net: {"model": net, "step": 3}, ""),
    "under state_dict": (lambda net: {"state_dict": net, "epoch": 3}, ""),
    "wrapped": (nn.DataParallel, ""),
    "compiled": (torch.compile, ""),
    "average beside none": (lambda net: {"model": None, "ema": net}, ""),
    "attribute of an object": (lambda net: {"agent": Agent(net)}, "net."),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", WHOLE)
def test_a_whole_module_is_read_under_the_names_of_its_state_dict(tmp_path, place, protocol, zipped):
    make, prefix = WHOLE[place]
    net = Net()
    with warnings.catch_warnings(action="ignore"):  # what torch.compile imports is deprecated
        made = make(net)
    torch.save(made, tmp_path / "c_3.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    run = open_run(tmp_path / "c_3.pt")
    checkpoint = run[3]
    found = checkpoint.state_dict()
    assert found.keys() == {prefix + name for name in net.state_dict()}
    assert all(same_bits(found[prefix + name], value) for name, value in net.state_dict().items())
    (path,) = write_checkpoint(checkpoint, tmp_path / "out")
    assert path.read_bytes() == (tmp_path / "c_3.pt").read_bytes()


def test_a_traced_module_is_read(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    torch.save({"model": traced}, tmp_path / "c_1.pt")
    assert set(open_run(tmp_path / "c_1.pt")[1]) == {"0.weight", "0.bias"}


def test_a_whole_optimizer_is_read_as_its_state(tmp_path):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": net, "optimizer": optimizer}, tmp_path / "c_1.pt")
    checkpoint = open_run(tmp_path / "c_1.pt")[1]
    for name, parameter in net.named_parameters():
        assert same_bits(checkpoint[f"{name}@exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert checkpoint.hyperparameters[name]["lr"] == 0.25
    assert checkpoint.spec("weight").role is TensorRole.WEIGHT


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_read_as_its_parts(tmp_path, layout):
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        torch.save({"model": {"w": torch.ones(2), "n": nested}}, tmp_path / "c_1.pt")
    checkpoint = open_run(tmp_path / "c_1.pt")[1]
    assert same_bits(checkpoint["n.values"].reshape(6, 3), torch.cat(parts))
    (path,) = write_checkpoint(checkpoint, tmp_path / "out")
    assert path.read_bytes() == (tmp_path / "c_1.pt").read_bytes()
