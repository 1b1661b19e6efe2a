"""Every back end's context rANS counts, writes and reads the words of the reference."""

import numpy as np
import torch

from inshrink_core.coding.rans import decode_rans, encode_rans
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu import tables
from inshrink_core.ops.cpu.tables import COSTS
from inshrink_core.ops.rans import RansBlocks, RansModel, rans_counts, rans_decode, rans_encode
from tests.ops.interpreted import is_interpreted, kernels

SHAPES = [
    (1, 1, 1, 2),
    (300, 1, 1, 512),
    (500, 3, 4, 128),
    (513, 16, 8, 64),
    (700, 5, 32, 1024),
    (20, 2, 32, 32),
    (1000, 32, 64, 256),
    (900, 4, 16, 256),
    (3000, 7, 32, 2048),
    (3000, 1, 16, 4096),
]

INTERPRETED_SHAPES = [(1, 1, 1, 2), (100, 1, 32, 512), (270, 3, 16, 256)]
"""Fewer steps, because each takes the interpreter some ten milliseconds."""


def drawn(n, n_symbols, n_contexts, seed=0):
    """Symbols whose spread grows with their context, so that tables differ."""
    rng = np.random.default_rng(seed)
    contexts = rng.integers(0, n_contexts, n).astype(np.uint8)
    power = 8.0 / (1 + contexts)
    symbols = np.minimum(n_symbols * rng.random(n) ** power, n_symbols - 1).astype(np.uint8)
    return torch.from_numpy(symbols), None if n_contexts == 1 else torch.from_numpy(contexts)


def normalize_counts(counts, precision):
    """Frequencies of rows of counts, each summing to ``2**precision``."""
    frequencies = np.empty(counts.shape, np.int64)
    tables.fit_kernel(counts, precision, COSTS, frequencies)
    return frequencies


def model_of(symbols, contexts, n_symbols, n_contexts):
    counts = rans_counts(symbols, contexts, n_symbols, n_contexts).numpy()
    return RansModel(np.arange(n_contexts), normalize_counts(counts, 12))


def check_the_same_words(device):
    for n, n_contexts, lanes, block_length in INTERPRETED_SHAPES if is_interpreted(device) else SHAPES:
        symbols, contexts = drawn(n, 40, n_contexts)
        model = model_of(symbols, contexts, 40, n_contexts)
        expected = rans_encode(symbols, contexts, model, lanes, block_length)
        payload = encode_rans(symbols, contexts, 40, n_contexts)
        there = symbols.to(device)
        contexts_there = None if contexts is None else contexts.to(device)
        with kernels():
            assert encode_rans(there, contexts_there, 40, n_contexts) == payload
            assert torch.equal(decode_rans(payload, n, 40, contexts_there, n_contexts), there)
            found = rans_encode(there, contexts_there, model, lanes, block_length)
            decoded, intact = rans_decode(found, contexts_there, model, n, block_length)
        with force_backend(Backend.REFERENCE):
            counts = rans_counts(there, contexts_there, 40, n_contexts)
        assert torch.equal(counts, rans_counts(symbols, contexts, 40, n_contexts))
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))
        assert intact
        assert torch.equal(decoded.cpu(), symbols)


def check_damage_is_noticed(device):
    symbols, contexts = drawn(200, 40, 3)
    model = model_of(symbols, contexts, 40, 3)
    blocks = rans_encode(symbols, contexts, model, 4, 128)
    n_words = blocks.n_words.clone()
    n_words[0] -= 1
    states = blocks.states.clone()
    states[1, 2] ^= 1 << 20
    damaged = [
        blocks._replace(words=blocks.words ^ 0x55),
        blocks._replace(states=states),
        RansBlocks(blocks.words[:-1], n_words, blocks.states),
        RansBlocks(blocks.words[:0], torch.zeros(2, dtype=torch.int64), blocks.states),
    ]
    for these in damaged:
        with kernels():
            decoded, intact = rans_decode(these, contexts, model, 200, 128)
        assert decoded.numel() == 200
        assert not intact
