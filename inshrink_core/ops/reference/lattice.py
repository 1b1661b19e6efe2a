"""The norm of the lattice codec's kernels, in plain torch and plain Python: read it to know the rule.

`inshrink_core.ops.lattice` documents the functions. Those on arrays are compiled by numba, too.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.lattice import (
    CONTEXT_BITS,
    EXACT,
    FIRST_LARGE,
    GAIN_BINS,
    GAIN_SLACK,
    MAX_GRADE,
    MAX_PRODUCT,
    MIN_GRADE,
    NEGATIVE,
    OLDEST_CONTEXT,
    WEAK_ENERGY,
    Advanced,
    Gain,
    Lattice,
    Rounded,
)


def float32(value: float, like: Tensor) -> Tensor:
    """Make a 0-d float32, because a Python float would be rounded by rules of its own."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def changes_from(values: Tensor, integers: Tensor, lattice: Lattice) -> tuple[Tensor, Tensor]:
    """Where the state lies, and how many spacings values are from it."""
    at = integers.to(torch.float32) * float32(lattice.unit, values)
    return at, (values - at) * float32(lattice.reciprocal, values)


def _matched(values: Tensor, at: Tensor, lattice: Lattice, gain: Gain) -> Tensor:
    """Return the changes under matched gain, as floats."""
    base = gain.base.to(values.device)
    reciprocal = float32(lattice.reciprocal, values)
    r, o = (values - base) * reciprocal, (at - base) * reciprocal
    grades = gain.grades.to(values.device)
    rows = grades.repeat_interleave(values.numel() // max(grades.numel(), 1))
    crossed = torch.where(r < 0, -o, o) > 0.5
    threshold = torch.where(crossed, rows * 7 // 10, rows)
    moved = torch.floor(r.abs() + (4096 - threshold).to(torch.float32) / 4096)
    y = torch.where(rows == 0, r.round(), torch.where(r < 0, -moved, moved))
    return (y - o).round()


def _next_history(changes: Tensor, turned: Tensor, history: Tensor) -> Tensor:
    """History after changes; `turned` are the changes times the sign of the last ones."""
    context = history & CONTEXT_BITS
    aged = history + 3 * ((context > 0) & (context < OLDEST_CONTEXT)).to(torch.uint8)
    pair = torch.where(context == 0, 1, torch.where(turned > 0, 2, 3)).to(torch.uint8)
    fresh = pair + NEGATIVE * (changes < 0).to(torch.uint8)
    return torch.where(changes == 0, aged, fresh)


def _tokens_of(z: Tensor) -> Tensor:
    """Tokens of z, int64."""
    place = torch.zeros_like(z)
    for k in range(1, 40):
        place += (z >> k) > 0
    large = FIRST_LARGE + 4 * (place - 7) + ((z >> (place - 2).clamp_min(0)) & 3)
    return torch.where(z < FIRST_LARGE, z, large)


def round_to_lattice(
    values: Tensor,
    integers: Tensor | None,
    history: Tensor | None,
    lattice: Lattice,
    gain: Gain | Tensor | None,
) -> Rounded:
    """See `lattice.round_to_lattice`."""
    if integers is None:
        integers = torch.zeros(values.numel(), dtype=torch.int32)
    before = integers.to(values.device).long()
    at, u = changes_from(values, integers.to(values.device), lattice)
    if isinstance(gain, Tensor):
        changes = gain.to(values.device)
    else:
        changes = u.round() if gain is None else _matched(values, at, lattice, gain)
    near = changes.abs() <= float(MAX_PRODUCT // lattice.spacing)  # false for NaN
    q = torch.where(near, changes, 0).long()
    after = before + lattice.spacing * q
    exact = ~(near & (after.abs() <= lattice.bound))
    q[exact] = 0
    old = torch.zeros_like(q, dtype=torch.uint8) if history is None else history.to(values.device)
    turned = torch.where((old & NEGATIVE) != 0, -q, q)
    tokens = _tokens_of((turned << 1) ^ (turned >> 63))
    tokens[exact], after[exact] = EXACT, 0
    new = _next_history(q, turned, old)
    new[exact] = 0
    return Rounded(
        tokens.to(torch.uint8).to(integers.device),
        after.to(torch.int32).to(integers.device),
        new.to(integers.device),
        int((tokens >= FIRST_LARGE).sum()),
        int(exact.sum()),
        int(tokens.max()) if tokens.numel() else 0,
    )


def advance(
    tokens: Tensor,
    large: NDArray[np.int64],
    integers: Tensor | None,
    history: Tensor | None,
    lattice: Lattice,
) -> Advanced:
    """See `lattice.advance`."""
    z = tokens.long()
    exact = tokens == EXACT
    z[(tokens >= FIRST_LARGE) & ~exact] = torch.from_numpy(large).to(z.device)
    z[exact] = 0
    turned = (z >> 1) ^ -(z & 1)
    old = torch.zeros_like(tokens) if history is None else history
    q = torch.where((old & NEGATIVE) != 0, -turned, turned)
    after = lattice.spacing * q if integers is None else integers.long() + lattice.spacing * q
    after[exact] = 0
    new = _next_history(q, turned, old)
    new[exact] = 0
    valid = not bool((after.abs() > lattice.bound).any())
    return Advanced(after.to(torch.int32), new, valid)


def scale_integers(integers: Tensor, unit: float) -> Tensor:
    """See `lattice.scale_integers`."""
    return integers.to(torch.float32) * float32(unit, integers)


def best_grade(counts: NDArray[np.int64], beyond: int) -> int:
    """Return the grade of a row from counts by (crossed, bin) and of values beyond the bins.

    In integers: a bin's abs(r) is ``(2 b + 1) / 512``, thresholds are 4096ths, sums are in 512ths squared.
    """
    total, energy, plain = np.int64(0), np.int64(0), np.int64(0)
    for b in range(GAIN_BINS):
        count = counts[0, b] + counts[1, b]
        twice = 2 * b + 1
        total += count
        energy += count * twice * twice
        plain += count * twice * ((twice + 256) // 512 * 512 - twice)
    # Values at the lower edge of their bin are counted at its middle: that much may be missing.
    slack = energy // GAIN_SLACK
    if plain + slack >= 0:
        return 0
    low, high = MIN_GRADE - 1, MAX_GRADE + 1
    while high - low > 1:
        grade = (low + high) // 2
        lead = np.int64(0)
        for crossed in range(2):
            threshold = grade * 7 // 10 if crossed else grade
            for b in range(GAIN_BINS):
                if counts[crossed, b] > 0:
                    twice = 2 * b + 1
                    whole = (16 * b + 8 + 4096 - threshold) // 4096
                    lead += counts[crossed, b] * twice * (whole * 512 - twice)
        if lead + slack >= 0:
            low = grade
        else:
            high = grade
    # What is beyond the bins has at least 8 squared.
    if low < MIN_GRADE or (beyond == 0 and WEAK_ENERGY * energy < total * 512 * 512):
        return -max(low, MIN_GRADE)
    return low


def gain_grades(values: Tensor, base: Tensor, integers: Tensor, lattice: Lattice, n_rows: int) -> Tensor:
    """See `lattice.gain_grades`."""
    base = base.to(values.device)
    reciprocal = float32(lattice.reciprocal, values)
    at, _ = changes_from(values, integers.to(values.device), lattice)
    r, o = (values - base) * reciprocal, (at - base) * reciprocal
    crossed = (torch.where(r < 0, -o, o) > 0.5).view(n_rows, -1)
    scaled = (r.abs() * 256).view(n_rows, -1)
    grades = torch.zeros(n_rows, dtype=torch.int32)
    for row in range(n_rows):
        inside = scaled[row] < GAIN_BINS
        keys = scaled[row][inside].long() + GAIN_BINS * crossed[row][inside].long()
        counts = torch.bincount(keys, minlength=2 * GAIN_BINS).view(2, GAIN_BINS).cpu().numpy()
        grades[row] = best_grade(counts, int((~inside).sum()))
    return grades


_EXTRA_PART = 1 << 16
"""Large numbers whose bits are spread out at a time: 64-bit numbers, a megabyte for each bit of theirs."""


def large_changes(
    tokens: Tensor, before: Tensor | None, after: Tensor, history: Tensor | None, spacing: int
) -> NDArray[np.int64]:
    """See `lattice.large_changes`."""
    at = ((tokens >= FIRST_LARGE) & (tokens != EXACT)).nonzero().view(-1)
    moved = after[at].long() - (0 if before is None else before[at].long())
    changes = moved // spacing
    if history is not None:
        turned = (history[at] & NEGATIVE) != 0
        changes[turned] = -changes[turned]
    z: NDArray[np.int64] = ((changes << 1) ^ (changes >> 63)).cpu().numpy()
    return z


def pack_extra(z: NDArray[np.int64]) -> bytes:
    """See `lattice.pack_extra`."""
    # Whole bytes at the end of each part but the last: the bits of a part are put before the next one's.
    left, parts = np.zeros(0, np.uint8), []
    for begin in range(0, z.size, _EXTRA_PART):
        part = z[begin : begin + _EXTRA_PART]
        lengths = _places(part) - 2
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        bits = np.concatenate((left, (np.repeat(part, lengths) >> within & 1).astype(np.uint8)))
        whole = bits.size // 8 * 8
        parts.append(np.packbits(bits[:whole], bitorder="little").tobytes())
        left = bits[whole:]
    return b"".join((*parts, np.packbits(left, bitorder="little").tobytes()))


def _places(z: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the highest bits: numbers below 2**27 are exact as float64."""
    return np.frexp(z.astype(np.float64))[1].astype(np.int64) - 1


def unpack_extra(tokens: Tensor, extra: bytes | memoryview) -> NDArray[np.int64] | None:
    """See `lattice.unpack_extra`."""
    large = tokens[(tokens >= FIRST_LARGE) & (tokens < EXACT)].cpu().numpy().astype(np.int64) - FIRST_LARGE
    lengths = large // 4 + 5
    ends = np.cumsum(lengths)
    n_bits = int(ends[-1]) if large.size else 0
    stored = np.frombuffer(extra, np.uint8)
    if (n_bits + 7) // 8 != stored.size or (n_bits % 8 and int(stored[-1]) >> n_bits % 8):
        return None
    z: NDArray[np.int64] = (4 | large % 4) << lengths
    for begin in range(0, large.size, _EXTRA_PART):
        span = slice(begin, begin + _EXTRA_PART)
        first, last = int(ends[begin] - lengths[begin]), int(ends[span][-1])
        bits = np.unpackbits(stored[first // 8 : (last + 7) // 8], bitorder="little")[first % 8 :]
        bits = bits[: last - first]
        starts = ends[span] - lengths[span] - first
        weights = bits.astype(np.int64) << (np.arange(last - first) - np.repeat(starts, lengths[span]))
        z[span] |= np.add.reduceat(weights, starts)
    return z


def sum_tokens(tokens: Tensor, n_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """See `lattice.sum_tokens`."""
    matrix = tokens.view(n_rows, -1)
    rows, columns = matrix.sum(1, dtype=torch.int64), matrix.sum(0, dtype=torch.int64)
    return rows.cpu().numpy(), columns.cpu().numpy()
