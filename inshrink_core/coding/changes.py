"""Coding of changes of floats: tokens in contexts chosen for each tensor, and extra bits.

The place of an element consists of its context state and the exponent of its reference. It predicts the
element's change. The encoder counts tokens by place in a sample, sorts the places by the size of their
changes, and merges neighbouring places as long as the total size of tables and data decreases. The mapping
from places to tables is stored with the tokens. ``docs/format.md`` (changes) defines the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.coding.rans import decode_rans, encode_rans
from inshrink_core.coding.raw import in_range
from inshrink_core.errors import DamagedError
from inshrink_core.ops.cpu.changes import (
    N_PLACES,
    Changes,
    apply_changes,
    find_changes,
    find_contexts,
)
from inshrink_core.ops.cpu.compiled import brief
from inshrink_core.ops.rans import BIT_LENGTHS, MAX_CONTEXTS, PRECISION
from inshrink_core.varint import Cursor, write_section

SAMPLE = 1 << 15
"""Elements in a sample: enough for some hundred places, and processed in a tenth of a millisecond."""

_STRETCHES = 4

N_TOKENS = {2: 64, 4: 128}
"""Size of the alphabet by bytes of a word: 4 tokens for each bit of z."""

_COST_BITS = 16
_LOGARITHMS = np.zeros(SAMPLE + 1, np.int64)
_LOGARITHMS[1:] = np.round(np.arange(1, SAMPLE + 1) * np.log2(np.arange(1, SAMPLE + 1)) * (1 << _COST_BITS))
"""c log2 c in 65536ths of a bit, as integers, so that sums do not depend on the order."""

_SIZES = BIT_LENGTHS[np.arange(max(N_TOKENS.values()))]
"""Approximate size of a token's change, by which places are sorted."""

_MAPPED_BITS = 4
"""Approximate bits of a place in the mapping."""

_SELDOM = 4096
"""Elements in the sample of exponents, of which one in 256 may exceed the top."""

_IDENTITY = torch.arange(N_PLACES, dtype=torch.int16)


class ChangePlan(NamedTuple):
    """Plan for coding the changes of a tensor.

    Parameters
    ----------
    changes
        The changes.
    mantissa
        Mantissa bits of the dtype.
    top
        Exponent of the first class of places.
    mapping : UInt8[Tensor, "places"]
        Table of each place.
    n_tables
        Number of tables, 1 to 32.
    bits
        Estimated size of the tensor in bits.
    """

    changes: Changes
    mantissa: int
    top: int
    mapping: Tensor
    n_tables: int
    bits: float


def plan_changes(words: Tensor, earlier: Tensor, context_state: Tensor | None, mantissa: int) -> ChangePlan:
    """Compute the changes of a tensor, and choose their contexts from a sample.

    Parameters
    ----------
    words, earlier : Int16[Tensor, "n"] or Int32[Tensor, "n"]
        Bits of the values and of the reference; n is at least 1.
    context_state : UInt8[Tensor, "n"] or None
        History before the change.
    mantissa
        Mantissa bits of the dtype.
    """
    n = words.numel()
    before, old = sampled(earlier), None if context_state is None else sampled(context_state)
    top = _top(before, mantissa)
    changes = find_changes(words, earlier, context_state)
    tokens = sampled(changes.tokens)
    counts = np.zeros((N_PLACES, N_TOKENS[words.element_size()]), np.int64)
    n_by_place = np.zeros(N_PLACES, np.int64)
    places = find_contexts(before, old, _IDENTITY, mantissa, top)
    count_kernel(places.numpy(), tokens.numpy(), counts, n_by_place)
    used = np.flatnonzero(n_by_place)
    counts = counts[used]
    order = np.argsort(counts @ _SIZES[: counts.shape[1]] / n_by_place[used], kind="stable")
    scale = n / tokens.numel()
    groups, bits = _cluster(counts[order], scale)
    by_place = np.empty(used.size, np.int64)
    by_place[order] = groups
    # A place that does not occur in the sample uses the table of the place before it.
    known = np.zeros(N_PLACES, np.int64)
    known[used] = np.arange(used.size)
    mapping = by_place[np.maximum.accumulate(known)].astype(np.uint8)
    n_tables = int(groups[-1]) + 1
    bits += 32 * changes.extra.size + (_MAPPED_BITS * used.size if n_tables > 1 else 0)
    return ChangePlan(changes, mantissa, top, torch.from_numpy(mapping), n_tables, bits)


def sampled(values: Tensor) -> Tensor:
    """Return four stretches of a tensor; all of it if it is small."""
    n, length = values.numel(), SAMPLE // _STRETCHES
    if n <= SAMPLE:
        return values
    starts = (i * (n - length) // (_STRETCHES - 1) for i in range(_STRETCHES))
    return torch.cat([values[start : start + length] for start in starts])


def _top(words: Tensor, mantissa: int) -> int:
    """Return the largest exponent that is not rare."""
    some = words[:: max(1, words.numel() // _SELDOM)].numpy()
    exponents = np.sort((some & np.iinfo(some.dtype).max) >> mantissa)
    return int(exponents[-1 - exponents.size // 256])


def _cluster(counts: NDArray[np.int64], scale: float) -> tuple[NDArray[np.int64], float]:
    """Return the group of each row, and the bits of data and tables; overwrites `counts`."""
    n = len(counts)
    bits, following, groups = np.empty((2, n)), np.arange(1, n + 1), np.empty(n, np.int64)
    total = cluster_kernel(
        counts, scale / (1 << _COST_BITS), _LOGARITHMS, BIT_LENGTHS, bits, following, groups
    )
    return groups, float(total)


def encode_changes(earlier: Tensor, context_state: Tensor | None, plan: ChangePlan) -> bytes:
    """Encode changes as bytes.

    Parameters
    ----------
    earlier, context_state, plan
        The arguments and the result of `plan_changes`.
    """
    head = bytearray((plan.top, plan.n_tables - 1))
    contexts = None
    if plan.n_tables > 1:
        steps = plan.mapping.long().diff(prepend=torch.zeros(1, dtype=torch.int64)) % plan.n_tables
        write_section(head, encode_rans(steps.to(torch.uint8), None, plan.n_tables))
        contexts = find_contexts(earlier, context_state, plan.mapping, plan.mantissa, plan.top)
    write_section(head, plan.changes.extra.astype("<u4", copy=False).tobytes())
    tokens = encode_rans(
        plan.changes.tokens,
        contexts,
        N_TOKENS[earlier.element_size()],
        plan.n_tables,
        apart=True,
    )
    return b"".join((head, tokens))


def decode_changes(
    payload: memoryview, earlier: Tensor, context_state: Tensor | None, mantissa: int
) -> tuple[Tensor, Tensor]:
    """Decode changes, and return the words and the context state after them.

    Parameters
    ----------
    payload
        The result of `encode_changes`.
    earlier, context_state, mantissa
        As given to `encode_changes` and `plan_changes`.

    Raises
    ------
    DamagedError
        The payload is not valid for the tensor.
    """
    cursor, word = Cursor(payload), earlier.element_size()
    top, n_tables = cursor.take(2)
    n_tables = in_range(n_tables + 1, 1, MAX_CONTEXTS, "changes have no valid number of tables")
    contexts = None
    if n_tables > 1:
        mapping = decode_rans(cursor.section(), N_PLACES, n_tables).cumsum(0) % n_tables
        contexts = find_contexts(earlier, context_state, mapping.to(torch.uint8), mantissa, top)
    section = cursor.section()
    if len(section) % 4:
        raise DamagedError("extra bits of changes are no whole words", found=f"{len(section)} bytes")
    extra = np.frombuffer(section, "<u4").astype(np.uint32, copy=False)
    tokens = decode_rans(cursor.rest, earlier.numel(), N_TOKENS[word], contexts, n_tables)
    words, after, intact = apply_changes(tokens, extra, earlier, context_state)
    if not intact:
        raise DamagedError("extra bits do not fit the tokens of changes", found=f"{extra.size} words")
    return words, after


@brief
def count_kernel(
    places: NDArray[np.int16],
    tokens: NDArray[np.uint8],
    counts: NDArray[np.int64],
    n_by_place: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled
    """Count tokens by place."""
    for i in range(places.size):
        counts[places[i], tokens[i]] += 1
        n_by_place[places[i]] += 1


@brief
def _bits_of(
    counts: NDArray[np.int64],
    row: int,
    other: int,
    scale: float,
    logarithms: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> float:  # pragma: no cover - compiled
    """Return the bits of the data and the table of one row, or of two rows merged."""
    two = 1 if other != row else 0
    total, data = 0, 0
    n_tokens = counts.shape[1]
    for s in range(n_tokens):
        count = counts[row, s] + two * counts[other, s]
        total += count
        data -= logarithms[count]
    data += logarithms[total]
    before, left, table = 0, total, 0
    for s in range(n_tokens):
        if left == 0:
            break
        count = counts[row, s] + two * counts[other, s]
        f = (count << PRECISION) // total
        length = lengths[f if f > 1 or count == 0 else 1]
        jump = length - before if length > before else before - length
        table += 1 + 2 * lengths[jump] + (length - 1 if length > 0 else 0)
        before = length
        left -= count
    return float(data * scale + table)


@brief
def cluster_kernel(
    counts: NDArray[np.int64],
    scale: float,
    logarithms: NDArray[np.int64],
    lengths: NDArray[np.int64],
    bits: NDArray[np.float64],
    following: NDArray[np.int64],
    groups: NDArray[np.int64],
) -> float:  # pragma: no cover - compiled
    """Merge neighbouring rows in place while this saves bits; number the groups and return their bits.

    Overwrites `counts`. For each row that leads a group, `bits` receives its bits and those of a merge with
    the next group, and `following` the next leading row, or the number of rows for the last.
    """
    n, n_tokens = counts.shape
    alone, pair, n_left = bits[0], bits[1], n
    for i in range(n):
        alone[i] = _bits_of(counts, i, i, scale, logarithms, lengths)
        if i + 1 < n:
            pair[i] = _bits_of(counts, i, i + 1, scale, logarithms, lengths)
    while n_left > 1:
        best, best_gain, before_best, before = -1, 0.0, -1, -1
        i = 0
        while following[i] < n:
            gain = alone[i] + alone[following[i]] - pair[i]
            if best < 0 or gain > best_gain:
                best, best_gain, before_best = i, gain, before
            before, i = i, following[i]
        if best_gain <= 0.0 and n_left <= MAX_CONTEXTS:
            break
        other = following[best]
        for s in range(n_tokens):
            counts[best, s] += counts[other, s]
        alone[best] = pair[best]
        following[best] = following[other]
        if following[best] < n:
            pair[best] = _bits_of(counts, best, following[best], scale, logarithms, lengths)
        if before_best >= 0:
            pair[before_best] = _bits_of(counts, before_best, best, scale, logarithms, lengths)
        n_left -= 1
    total, leader, group = 0.0, 0, 0
    for i in range(n):
        if i == following[leader]:
            leader = i
            group += 1
        if i == leader:
            total += alone[i]
        groups[i] = group
    return total
