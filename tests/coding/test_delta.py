"""The stages of the published delta, one by one, and that the fused kernels compute the same."""

import numpy as np
import torch

from inshrink_core.coding.events import NO_EXPECTATION, expected_symbols
from inshrink_core.ops.cpu.symbols import count_pairs, delta_events


def _pair(n: int, n_symbols: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    previous = torch.randint(0, n_symbols, (n,), generator=generator).byte()
    moved = torch.rand(n, generator=generator) < 0.2
    other = torch.randint(0, n_symbols, (n,), generator=generator).byte()
    return previous, torch.where(moved, other, previous)


def test_events_are_the_runs_of_the_grouped_delta():
    previous, symbols = _pair(3000, 7)
    delta = ((previous.short() - symbols.short()) % 7).byte()
    bases = np.arange(256)
    records, run_counts, literal_counts = delta_events(previous.numpy(), symbols.numpy(), bases, bases, 7)
    coded: dict[int, list[int]] = {group: [] for group in range(7)}
    groups = np.repeat(np.arange(256), run_counts.sum(axis=1))
    for group, record in zip(groups.tolist(), records.tolist(), strict=True):
        coded[group] += [0] * (record & 0x7FFFFF)
        if record >> 23 != 256:
            coded[group].append(record >> 23)
    order = previous.sort(stable=True).indices
    for group in range(7):
        assert coded[group] == delta[order][previous[order] == group].tolist()
    assert literal_counts.sum() == int((delta != 0).sum())
    assert run_counts.sum() >= literal_counts.sum()


def test_a_group_expects_what_prevails_in_it():
    counts = np.zeros((256, 256), np.int64)
    counts[0, 0], counts[0, 1] = 90, 10  # rests
    counts[1, 2], counts[1, 1] = 80, 20  # the bins were renumbered
    counts[2, 0:4] = 25  # no symbol prevails
    counts[3, 5] = 3  # too few to tell
    expected = expected_symbols(counts, np.arange(256))
    assert expected[:5].tolist() == [0, 2, NO_EXPECTATION, 3, 4]


def test_pairs_are_counted_at_the_stride():
    previous, symbols = _pair(1001, 5)
    counts = count_pairs(previous.numpy(), symbols.numpy(), 3)
    assert counts.sum() == 334
    assert counts[2, 4] == int(((previous[::3] == 2) & (symbols[::3] == 4)).sum())
