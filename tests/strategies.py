"""Tensors that tests are made of: those of the shipped suites, and symbols."""

import numpy as np
import torch
from hypothesis import strategies as st

from inshrink_core.testing.tensors import EDGE_TENSORS, bits, float_chains, normal, random_bits, spec_of

__all__ = ["EDGE_TENSORS", "bits", "float_chains", "normal", "random_bits", "spec_of", "symbol_pairs"]


@st.composite
def symbol_pairs(draw, max_n=300):
    """Symbols, their alphabet, and perhaps previous ones with theirs."""
    n = draw(st.integers(0, max_n))
    n_symbols, n_previous = draw(st.integers(1, 256)), draw(st.integers(1, 256))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.sampled_from([1.0, 3.0, 30.0]))
    previous = (n_previous * rng.random(n) ** skew).astype(np.uint8)
    moved = rng.random(n) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    symbols = np.where(moved, n_symbols * rng.random(n) ** skew, np.minimum(previous, n_symbols - 1))
    before = torch.from_numpy(previous) if draw(st.booleans()) else None
    return torch.from_numpy(symbols.astype(np.uint8)), n_symbols, before, n_previous
