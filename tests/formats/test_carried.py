"""Tensors that a torch file carries unread reach every format, as they are or in parts, or are named."""

import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import inshrink_core
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.formats import open_run, write_checkpoint
from inshrink_core.verbs import export, load_state_dict, prune
from tests.formats.run_builders import Call, same_bits


def _quantized(dtype):
    with warnings.catch_warnings(action="ignore"):  # PyTorch means to drop them, and loads them still
        return torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 3, dtype)


def _complex():
    return torch.randn(3, 5, dtype=torch.complex64)


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
ODD = {
    "conjugate": lambda: _complex().conj(),
    "conjugate and negative": lambda: torch._neg_view(_complex().conj()),
    "imaginary part": lambda: _complex().conj().imag,
    "negative": lambda: torch._neg_view(torch.randn(4, 6)),
    "negative rows": lambda: torch._neg_view(torch.randn(6, 6))[::2],
    "expanded": lambda: torch.tensor([2.5]).expand(4096, 1100),
    "coo": lambda: torch.eye(5).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor(
        [[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True
    ),
    "coo, hybrid": lambda: torch.sparse_coo_tensor(
        [[0, 2]], torch.randn(2, 3), (4, 3), check_invariants=True
    ),
    "coo, empty": lambda: torch.zeros(3, 3).to_sparse(),
    "coo, a column of another": lambda: torch.randn(4, 6)[:, ::2].to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.randn(4, 4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.randn(4, 4).to_sparse_bsc((2, 2)),
}


def _dense(tensor):
    return tensor.to_dense().resolve_conj().resolve_neg().contiguous()


@pytest.fixture(params=ODD)
def odd(request):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # the first sparse tensor of a process is "in beta"
        made: Tensor = ODD[request.param]()
    return made


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_odd_tensors_reach_both_formats_from_an_archive(tmp_path, odd, zipped):
    (tmp_path / "run").mkdir()
    torch.save(
        {"model": {"a.weight": torch.randn(8, 8), "odd": odd}, "step": 1},
        tmp_path / "run" / "c_1.pt",
        _use_new_zipfile_serialization=zipped,
    )
    archive = tmp_path / "a.inshrink"
    inshrink_core.compress(tmp_path / "run", archive, codec="lossless")
    (same,) = inshrink_core.restore(archive, tmp_path / "same").paths
    assert same.read_bytes() == (tmp_path / "run" / "c_1.pt").read_bytes()

    report = inshrink_core.restore(archive, tmp_path / "torch", layout="torch")
    with warnings.catch_warnings(action="ignore"):
        found = torch.load(report.paths[0], weights_only=True)["model"]["odd"]
        loaded = load_state_dict(archive)["odd"]
    for one in (found, loaded):
        assert (one.dtype, one.shape, one.layout) == (odd.dtype, odd.shape, odd.layout)
        assert (one.is_conj(), one.is_neg()) == (odd.is_conj(), odd.is_neg())
        assert one.layout is not torch.sparse_coo or one.is_coalesced() == odd.is_coalesced()
        assert same_bits(_dense(one), _dense(odd))

    if odd.layout is not torch.strided:
        with pytest.raises(InputError, match="odd"):
            inshrink_core.restore(archive, tmp_path / "plain", layout="safetensors")
        return
    report = inshrink_core.restore(archive, tmp_path / "plain", layout="safetensors")
    assert same_bits(load_file(report.paths[0])["odd"], _dense(odd))


def test_a_tensor_without_values_is_named_where_it_cannot_be_written(tmp_path):
    torch.save(
        {"model": {"w": torch.ones(3), "m.weight": torch.empty(3, 2, device="meta")}}, tmp_path / "c_1.pt"
    )
    checkpoint = open_run(tmp_path / "c_1.pt")[1]
    for layout in ("safetensors", "dcp"):
        with pytest.raises(InputError, match=r"'m\.weight' \(meta\)"):
            write_checkpoint(checkpoint, tmp_path / layout, layout=layout)
    (path,) = write_checkpoint(checkpoint, tmp_path / "torch", layout="torch")
    assert torch.load(path)["model"]["m.weight"].is_meta
    (path,) = write_checkpoint(checkpoint, tmp_path / "w", keys=lambda key: key == "w")
    assert list(load_file(path)) == ["w"]


def test_a_view_of_a_stored_tensor_takes_its_values(tmp_path):
    base = _complex()
    torch.save({"c": base, "odd": base.conj(), "part": base[1:].conj()}, tmp_path / "c_1.pt")
    (path,) = write_checkpoint(open_run(tmp_path / "c_1.pt")[1], tmp_path / "out", layout="safetensors")
    stored = load_file(path)
    assert same_bits(stored["odd"], base.conj().resolve_conj())
    assert same_bits(stored["part"], base[1:].conj().resolve_conj())


def test_an_export_writes_or_names_what_it_cannot_hold(tmp_path):
    model = {"w": torch.ones(3), "q": _quantized(torch.qint8), "c": _complex().conj()}
    torch.save({"model": model, "optimizer": OPTIMIZER}, tmp_path / "c_1.pt")
    inshrink_core.compress(tmp_path / "c_1.pt", tmp_path / "a", codec="lossless")
    packed = export(tmp_path / "a", tmp_path / "b", weights_only=True, exact=True)
    assert {"q (quantized)", "c (conjugate)"} <= set(packed.left_out)
    how = {"weights_only": True, "layout": "safetensors"}
    with pytest.raises(InputError, match=r"'q' \(quantized\)"):
        export(tmp_path / "a", tmp_path / "q.safetensors", **how)
    plain = export(tmp_path / "a", tmp_path / "m.safetensors", without="q", **how)
    assert same_bits(load_file(plain.output)["c"], model["c"].resolve_conj())
    assert load_file(plain.output).keys() == {"w", "c"}


def test_an_optimizer_that_carries_tensors_of_the_model_is_not_dropped(tmp_path):
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        state = {"model": {"w": torch.ones(3), "q": _quantized(torch.qint8)}, "optimizer": OPTIMIZER}
        torch.save(state, tmp_path / "run" / f"c_{step}.pt")
    with pytest.raises(InputError, match=r"q \(quantized\)"):
        inshrink_core.compress(tmp_path / "run", tmp_path / "a", optimizer="drop")
    inshrink_core.compress(tmp_path / "run", tmp_path / "b", codec="lossless")
    with pytest.raises(InputError, match=r"q \(quantized\)"):
        prune(tmp_path / "b", optimizer_last=1, apply=True)
    assert inshrink_core.restore(tmp_path / "b", tmp_path / "out", steps=[1]).layout == "same"


def test_shards_of_their_own_reach_both_formats(tmp_path):
    odd = _complex().conj()
    with warnings.catch_warnings(action="ignore"):
        state = {"model": {"w": torch.ones(4, 6), "odd": odd, "none": torch.empty(0, 3)}, "step": 1}
        dcp.save(state, checkpoint_id=tmp_path / "run" / "step-1", no_dist=True)
    inshrink_core.compress(tmp_path / "run", tmp_path / "a", codec="lossless")
    report = inshrink_core.restore(tmp_path / "a", tmp_path / "plain", layout="safetensors")
    assert same_bits(load_file(report.paths[0])["odd"], _dense(odd))
    report = inshrink_core.restore(tmp_path / "a", tmp_path / "torch", layout="torch")
    with warnings.catch_warnings(action="ignore"):
        found = torch.load(report.paths[0])["model"]["odd"]
    assert (found.dtype, found.is_conj()) == (odd.dtype, odd.is_conj())
    assert same_bits(_dense(found), _dense(odd))


@pytest.mark.parametrize(
    ("layout", "data"),
    [
        (torch.sparse_coo, (torch.tensor([[9], [9]]), torch.ones(1), (2, 2), False)),
        (torch.sparse_csr, (torch.tensor([0, 9]), torch.tensor([0]), torch.ones(1), (1, 1))),
        (torch.sparse_coo, (torch.tensor([[0], [0]]), 3, (2, 2), False)),
        (torch.sparse_coo, ()),
        (torch.strided, (torch.ones(1), torch.ones(1), (1,))),
    ],
)
def test_a_sparse_tensor_that_contradicts_itself_is_damage(tmp_path, layout, data):
    state = {"w": torch.ones(3), "odd": Call(torch._utils._rebuild_sparse_tensor, layout, data)}
    torch.save({"model": state}, tmp_path / "c_1.pt")
    checkpoint = open_run(tmp_path / "c_1.pt")[1]
    for kind in ("torch", "safetensors"):
        with pytest.raises(DamagedError, match="odd"):
            write_checkpoint(checkpoint, tmp_path / "out", layout=kind)
    assert not os.path.lexists(tmp_path / "out")
