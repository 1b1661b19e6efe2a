import pytest
import torch

import inshrink_core
from benchmarks.overhead import listening, overhead_share
from benchmarks.scaling import N_STEPS, write_run
from inshrink_core.coding import rans
from inshrink_core.ops.reference.streams import parse_stream
from inshrink_core.ops.streams import Coded


def test_all_of_a_stream_but_its_words_is_overhead():
    symbols = torch.randint(0, 7, (20_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    payload = rans.encode_rans(symbols, None, 8)
    coded = Coded(payload[1:], symbols.numel(), 8, 1, torch.device("cpu"))
    n_words = parse_stream(coded).blocks.words.numel()
    with listening() as side:
        rans.decode_rans(payload, symbols.numel(), 8)
    assert side.tables_nbytes == len(payload) - 1 - 2 * n_words
    assert side.tables_nbytes > 0


def test_parsers_are_as_before_when_nobody_listens_any_more():
    before = rans.read_stream
    with pytest.raises(KeyError), listening():
        raise KeyError
    assert rans.read_stream is before


def test_the_share_of_overhead_falls_as_tensors_grow(tmp_path):
    shares = []
    for width in (32, 96):
        run = tmp_path / str(width)
        run.mkdir()
        n_parameters = write_run(run, width, 1)
        assert n_parameters == 12 * width**2 + width
        archive = tmp_path / f"{width}.inshrink"
        report = inshrink_core.compress(run, archive, threads=1)
        assert len(report.size.frames) == N_STEPS
        shares.append(overhead_share(archive))
    assert 0 < shares[1] < shares[0] < 1
