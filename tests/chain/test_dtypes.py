"""Runs of every dtype that PyTorch can save: compressed by every codec, without loss where no rule holds."""

import warnings

import pytest
import torch
from torch import Tensor

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.chain.config import OPTIMIZER_CHOICES
from inshrink_core.chain.sizes import frame_size
from inshrink_core.checkpoint import DTYPE_SIZES, TensorRole
from tests.strategies import bits, random_bits

STEPS = (1, 2)

ROUNDED = {"float32", "bfloat16", "float16"}
"""Dtypes that lossy rules cover."""

NUMBERS = {"float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", *ROUNDED}
"""Dtypes that a model is made in by conversion; the others are made of random bits."""

CODECS = {
    "lattice": "compressed",
    "inshrinkerator": "compact",
    "excp": "exact",
    "uniform": "drop",
    "lossless": "exact",
}
"""Codecs of each kind, each with a way of storing optimizer state; `test_exact_rules` has all codecs."""

CARRIED = {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
"""Dtypes that are bytes without meaning to PyTorch, too: a file's rest holds them, and nothing reads them."""

UNSAVED = {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


def every_dtype():
    """Return the names of all dtypes of the PyTorch that is installed."""
    return {str(value).removeprefix("torch.") for value in vars(torch).values() if type(value) is torch.dtype}


def values(dtype, shape, seed):
    if dtype not in NUMBERS:
        return random_bits(dtype, shape, seed)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed // 10)).abs()
    moved = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).abs()
    return (0.5 * numbers + 0.01 * moved).to(getattr(torch, dtype))


def content_of(step):
    """Return a checkpoint with weights of each dtype, and weights whose optimizer state is of each dtype."""
    model, moments = {}, {}
    for number, dtype in enumerate(sorted(DTYPE_SIZES)):
        seed = 1000 * number + step
        model[f"{dtype}.weight"] = values(dtype, (12, 10), seed + 100)
        model[f"{dtype}.odd"] = random_bits(dtype, (81,), seed + 300)
        model[f"with_{dtype}.weight"] = values("float32", (12, 10), seed + 400)
        model[f"moved_by_{dtype}.weight"] = values("float32", (12, 10), seed + 500)
        model[f"copy_of_{dtype}.weight"] = values("bfloat16", (12, 10), seed + 600)
        for name in (f"{dtype}.weight", f"with_{dtype}.weight"):
            moments[name] = {
                "step": torch.tensor(float(step)),
                "exp_avg": values(dtype, (12, 10), seed + 700),
                "exp_avg_sq": values(dtype, (12, 10), seed + 800),
            }
        moments[f"moved_by_{dtype}.weight"] = {"momentum_buffer": values(dtype, (12, 10), seed + 900)}
        moments[f"copy_of_{dtype}.weight"] = {"master_param": values(dtype, (12, 10), seed + 950)}
    names = list(model)
    groups = [{"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(range(len(names)))}]
    state = {names.index(name): tensors for name, tensors in moments.items()}
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": step}


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dtypes") / "run"
    folder.mkdir()
    for step in STEPS:
        torch.save(content_of(step), folder / f"ckpt_{step}.pt")
    return folder


def leaves(content):
    """Return the tensors of nested mappings, in order."""
    if isinstance(content, Tensor):
        return [content]
    return [leaf for part in content.values() for leaf in leaves(part)] if isinstance(content, dict) else []


def test_every_way_of_storing_optimizer_state_is_tried():
    assert {*CODECS.values()} == {*OPTIMIZER_CHOICES}


@pytest.mark.parametrize(("codec", "optimizer"), CODECS.items())
def test_a_run_of_every_dtype_is_compressed_and_restored(codec, optimizer, run_path, tmp_path):
    run = inshrink_core.open(run_path)
    inshrink_core.compress(run, tmp_path / "a", codec=codec, optimizer=optimizer)
    archive = Archive.open(tmp_path / "a")
    for info in archive.frames:
        step, original = archive[info.step], run[info.step]
        for tensor in frame_size(archive, info).tensors:
            if tensor.spec.dtype not in ROUNDED:
                assert tensor.codec == "lossless/1", tensor.spec.key
                assert bits(step[tensor.spec.key]) == bits(original.source.read(tensor.spec)), tensor.spec.key
    checked = inshrink_core.verify(tmp_path / "a", deep=True, against=run)
    assert checked.ok, checked.problems
    if optimizer != "drop":
        report = inshrink_core.restore(tmp_path / "a", tmp_path / "out", steps=[2])
        restored, original = torch.load(report.paths[0]), content_of(2)
        for one, other in zip(leaves(restored), leaves(original), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if str(one.dtype).removeprefix("torch.") not in ROUNDED or codec == optimizer == "lossless":
                assert bits(one) == bits(other)


def test_every_dtype_of_pytorch_is_stored_or_carried_or_cannot_be_saved(tmp_path):
    known = set(DTYPE_SIZES) | CARRIED | UNSAVED | QUANTIZED
    assert every_dtype() <= known, "a new dtype: store it (DTYPE_SIZES), or say here why not"
    for dtype in UNSAVED & every_dtype():
        with pytest.raises(KeyError):
            torch.save(torch.zeros(4, dtype=torch.uint8).view(getattr(torch, dtype)), tmp_path / "none.pt")


def quantized(kind):
    numbers = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    if kind in ("quint4x2", "quint2x4"):
        scales, zeros = torch.full((4,), 0.1), torch.zeros(4)
        return torch.quantize_per_channel(numbers, scales, zeros, 0, getattr(torch, kind))
    return torch.quantize_per_tensor(numbers, 0.1, 0, getattr(torch, kind))


def carried(kind):
    if kind in QUANTIZED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch deprecates them with every call
            return quantized(kind)
    return random_bits("uint8", (4, 8), 1).view(getattr(torch, kind))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bits8", "bits16", "bits4x2", "qint8", "qint32", "quint4x2"])
def test_what_is_no_tensor_of_numbers_is_carried_bit_for_bit(kind, tmp_path):
    (tmp_path / "run").mkdir()
    for step in STEPS:
        model = {"fc.weight": values("float32", (8, 8), step), "packed.weight": carried(kind)}
        torch.save({"model": model, "step": step}, tmp_path / "run" / f"ckpt_{step}.pt")
    inshrink_core.compress(tmp_path / "run", tmp_path / "a", codec="lossless")
    report = inshrink_core.restore(tmp_path / "a", tmp_path / "out", steps=STEPS)
    assert len(report.paths) == len(STEPS)
    for path in report.paths:
        assert path.read_bytes() == (tmp_path / "run" / path.name).read_bytes()
    assert {spec.role for spec in Archive.open(tmp_path / "a")[1].specs} == {TensorRole.WEIGHT}
