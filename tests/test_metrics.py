"""Metrics and their divergence, and how a report becomes a document."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from inshrink_core.errors import InputError
from inshrink_core.metrics import Direction, divergence, drop, known_direction, output_error, tensor_error
from inshrink_core.report import Report

LOG_HALF = math.log(0.5)


def log_softmax(seed, n=7, classes=5, scale=1.0):
    logits = torch.randn(n, classes, generator=torch.Generator().manual_seed(seed)) * scale
    return torch.log_softmax(logits, dim=1)


@pytest.mark.parametrize(
    ("original", "restored", "direction", "expected"),
    [
        (0.8, 0.6, Direction.HIGHER, 0.25),
        (0.8, 0.9, Direction.HIGHER, -0.125),
        (2.0, 3.0, Direction.LOWER, 0.5),
        (-2.0, -1.0, Direction.LOWER, 0.5),
        (0.0, 1.0, Direction.LOWER, None),
        (1.0, math.inf, Direction.LOWER, None),
    ],
)
def test_drop_is_signed_for_the_worse(original, restored, direction, expected):
    found = drop(original, restored, direction)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_no_change_is_a_drop_of_positive_zero():
    assert math.copysign(1, drop(0.5, 0.5, Direction.LOWER)) == 1


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("loss", "lower"),
        ("val_loss", "lower"),
        ("eval_perplexity", "lower"),
        ("Accuracy", "higher"),
        ("val_f1", "higher"),
        ("neg_loss", None),
        ("score", None),
    ],
)
def test_well_known_metrics_have_a_direction_and_others_are_not_guessed(name, direction):
    assert known_direction(name) == direction


def test_divergence_of_equal_predictions_is_exactly_zero():
    rows = log_softmax(0, scale=30)
    assert divergence(rows, rows.clone()) == 0.0


def test_divergence_is_the_mean_over_rows_and_matches_torch():
    first, second = log_softmax(1).double(), log_softmax(2).double()
    expected = torch.nn.functional.kl_div(second, first, log_target=True, reduction="batchmean")
    assert divergence(first, second) == pytest.approx(expected.item(), rel=1e-6)


def test_divergence_over_many_chunks_is_that_of_one(monkeypatch):
    first, second = log_softmax(1), log_softmax(2)
    entire = divergence(first, second)
    monkeypatch.setattr("inshrink_core.metrics.CHUNK_ELEMENTS", 10)
    assert divergence(first, second) == pytest.approx(entire, rel=1e-12)


def test_a_zero_probability_in_the_original_adds_nothing():
    original = np.array([[-np.inf, 0.0]])
    assert divergence(original, original) == 0.0
    assert divergence(original, np.log([[0.5, 0.5]])) == pytest.approx(math.log(2))


def test_a_zero_probability_in_the_restored_alone_is_large_but_finite():
    found = divergence(np.log([[0.5, 0.5]]), np.array([[-np.inf, 0.0]]))
    assert 300 < found < math.inf


@pytest.mark.parametrize(
    ("original", "restored"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 3)),
        (torch.zeros(3), torch.zeros(3)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.randn(4, 3), torch.randn(4, 3)),
        (torch.full((1, 2), 0.5), torch.full((1, 2), 0.5)),
        (torch.tensor([[math.nan, 0.0]]), torch.tensor([[LOG_HALF, LOG_HALF]])),
        (torch.tensor([[LOG_HALF, LOG_HALF]]), torch.tensor([[math.inf, 0.0]])),
        (torch.tensor([[-math.inf, -math.inf]]), torch.tensor([[LOG_HALF, LOG_HALF]])),
    ],
    ids=["shapes", "1-D", "empty", "logits", "probabilities", "nan", "inf", "impossible"],
)
def test_divergence_refuses_what_is_no_pair_of_log_probabilities(original, restored):
    with pytest.raises(InputError):
        divergence(original, restored)


def test_output_error_is_relative_to_the_variance():
    assert output_error([0.0, 2.0], [0.5, 2.5]) == pytest.approx(0.25)
    assert output_error([1.0, 1.0], [1.0, 1.0]) == 0.0
    assert output_error([1.0, 1.0], [1.0, 2.0]) is None


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], []), ([math.nan], [1.0])])
def test_output_error_refuses_what_cannot_be_compared(a, b):
    with pytest.raises(InputError):
        output_error(a, b)


def test_error_norms_are_those_of_the_difference():
    error = tensor_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
    assert error == (1.0, pytest.approx(math.sqrt(0.5 / 12.5)), False)


def test_bit_exact_sees_negative_zero_and_nan_payloads():
    zero = torch.zeros(2)
    assert tensor_error(zero, zero.clone()) == (0.0, None, True)
    assert tensor_error(zero, -zero) == (0.0, None, False)
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tensor_error(nan, nan[[0, 0]]) == (0.0, None, False)
    assert tensor_error(nan, nan.clone()).bit_exact


def test_a_nan_that_appears_or_vanishes_is_an_infinite_error():
    value, nan = torch.tensor([1.0]), torch.tensor([math.nan])
    assert tensor_error(value, nan).max_abs == math.inf
    assert tensor_error(nan, value).max_abs == math.inf
    assert tensor_error(torch.tensor([math.inf]), torch.tensor([-math.inf])).max_abs == math.inf


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.tensor(2.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j, 0j]),
        torch.tensor([2**62 + 1, -5]),
    ],
    ids=["empty", "0-d", "non-contiguous", "bool", "bfloat16", "float8", "complex", "int64"],
)
def test_every_kind_of_tensor_is_bit_exact_to_itself(tensor):
    error = tensor_error(tensor, tensor.clone())
    assert (error.max_abs, error.bit_exact) == (0.0, True)


def test_tensors_of_unlike_shape_or_dtype_have_no_error_norms():
    with pytest.raises(InputError, match="one shape and dtype"):
        tensor_error(torch.zeros(2), torch.zeros(3))
    with pytest.raises(InputError, match="one shape and dtype"):
        tensor_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


class _Part(NamedTuple):
    name: str
    n: int


@dataclass(frozen=True)
class _Whole(Report):
    path: Path
    parts: tuple[_Part, ...]
    last: _Part | None
    values: np.ndarray

    KEYS: ClassVar = "file=path names=parts.name last=last.n parts values"


@dataclass(frozen=True)
class _Plain(Report):
    b: int
    a: tuple[int, ...]


def test_values_become_what_json_has():
    parts = (_Part("x", 1), _Part("y", 2))
    found = _Whole(Path("run"), parts, None, np.array([[1.0, np.nan]])).to_json()
    assert list(found) == ["file", "names", "last", "parts", "values"]
    assert (found["file"], found["names"], found["last"]) == ("run", ["x", "y"], None)
    assert found["parts"] == [{"name": "x", "n": 1}, {"name": "y", "n": 2}]
    assert found["values"] == [[1.0, None]]
    assert _Whole(Path("run"), (), parts[1], np.zeros(0)).to_json()["last"] == 2


def test_a_report_that_does_not_say_otherwise_is_all_of_its_fields():
    assert list(_Plain(1, (2, 3)).to_json().items()) == [("b", 1), ("a", [2, 3])]
