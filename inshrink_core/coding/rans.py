"""Context rANS coder of bytes: within a percent of the conditional entropy, with the same bytes everywhere.

Each context has a probability table. The decoder must know the contexts in advance, for example from the
reference state. Data that rANS does not shrink is stored as packed bits or as a constant. ``docs/format.md``
(rANS streams) defines the bytes. The parameters of a stream depend on the estimated size of the coded
symbols, never on the device:

- Lanes cost four bytes each, so all of them together get at most 1 / `STATE_SHARE` of the size. Up to 32
  lanes share one block (1 lane below 13 kbit, 8 from 51 kbit, 32 from 205 kbit).
- Larger tensors are split into blocks of at least 2**16 symbols with 32 lanes, the width of a GPU's warp. For
  example, 8 M symbols at .7 bit give about 900 lanes in 32 blocks.
- Contexts share tables, and tables of few symbols have a lower precision, if that reduces the total size.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.coding.raw import (
    CONSTANT,
    PACKED,
    decode_escape,
    in_range,
    pack_bits,
    packed_bytes,
    worst_case_coded_bytes,
)
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.ops.cpu.tables import TABLE_BITS, choose_tables, pool_contexts, read_tables
from inshrink_core.ops.rans import (
    INITIAL_STATE,
    MAX_CONTEXTS,
    PRECISION,
    RansBlocks,
    RansModel,
    rans_counts,
    rans_decode,
    rans_encode,
)

_RANS = 2
"""First byte of a stream; `PACKED` and `CONSTANT` are smaller."""

HEADER = struct.Struct("<BBB")

STATE_BYTES, WORD_BYTES = 4, 2

MAX_LANES_LOG2 = 12
"""4096 lanes: the number that one block of GPU threads can hold in registers."""

MAX_BLOCK_LOG2 = 31
"""An index inside a block fits a signed 32-bit integer."""

PRECISIONS = (12, 10, 8, 6)
"""Precisions of tables. Lower ones are shorter; two bits less cost about 1/1000 of the data."""

COARSE_BELOW = 1 << 17
"""Number of symbols from which only the highest precision is tried: lower ones save less than they cost."""

STATE_BITS = 32

STATE_SHARE = 200
"""States take at most 1/200 of the data: half a percent, the budget for everything beyond the entropy."""

WARP_LOG2 = 5

SHORTEST_BLOCK_LOG2 = 16


def stream_shape(n: int, data_bits: float) -> tuple[int, int]:
    """Return the number of lanes and the block length for an estimated data size.

    Parameters
    ----------
    n
        Number of symbols, at least 1.
    data_bits
        Estimated coded size in bits.
    """
    budget = max(int(data_bits) // (STATE_BITS * STATE_SHARE), 1)
    lanes = min(1 << (budget.bit_length() - 1), 1 << WARP_LOG2)
    needed = max(n - 1, lanes - 1).bit_length()
    per_block = max(n // max(budget >> WARP_LOG2, 1), 1).bit_length()
    return lanes, 1 << min(max(per_block, SHORTEST_BLOCK_LOG2), needed, MAX_BLOCK_LOG2)


def encode_rans(
    symbols: Tensor,
    contexts: Tensor | None,
    n_symbols: int,
    n_contexts: int = 1,
    *,
    apart: bool = False,
) -> bytes:
    """Encode symbols, each with the probability table of its context.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Values below `n_symbols`; contiguous, on any device.
    contexts : UInt8[Tensor, "n"] or None
        Contexts on the same device, known to the decoder. Their lower five bits are below `n_contexts`; the
        other bits are ignored. None: no contexts.
    n_symbols
        Size of the alphabet, 1 to 256.
    n_contexts
        Number of contexts, 1 to 32.
    apart
        Whether each context has a separate table; by default contexts share tables if that is smaller.

    Returns
    -------
    bytes
        At most `worst_case_coded_bytes`; the same on every device and back end. O(n).

    Raises
    ------
    InputError
        A symbol or a context is out of range, or the shapes differ.

    Examples
    --------
    >>> import torch
    >>> symbols = torch.tensor([3, 3, 3, 0, 3], dtype=torch.uint8)
    >>> payload = encode_rans(symbols, None, 4)
    >>> decode_rans(payload, 5, 4).tolist()
    [3, 3, 3, 0, 3]
    """
    n = symbols.numel()
    _check_arguments(n, n_symbols, n_contexts, symbols, contexts)
    if n == 0:
        return b""
    counts = rans_counts(symbols, contexts, n_symbols, n_contexts).numpy()
    by_symbol = counts.sum(0)
    n_counted = int(by_symbol.sum())
    if n_counted != n:
        raise InputError(
            "a symbol or a context is out of range",
            expected=f"symbols below {n_symbols}, contexts below {n_contexts}",
            found=f"{n - n_counted} pairs outside",
        )
    (used,) = by_symbol.nonzero()
    if used.size == 1:
        return bytes((CONSTANT, int(used[0])))
    # Symbols beyond the last one that occurs have no entry in any table.
    precisions = PRECISIONS[: 1 if n >= COARSE_BELOW else None]
    chosen = choose_tables(counts[:, : used[-1] + 1], precisions, apart=apart)
    limit = packed_bytes(n, n_symbols)
    if chosen.n_bits + chosen.data_bits < 8 * limit:
        lanes, block_length = stream_shape(n, chosen.data_bits)
        model = RansModel(chosen.rows, chosen.frequencies << (PRECISION - chosen.precision))
        blocks = rans_encode(symbols, contexts, model, lanes, block_length)
        lanes_and_precision = (lanes.bit_length() - 1) | chosen.precision << 4
        parts = (
            bytes((_RANS,)),
            HEADER.pack(lanes_and_precision, block_length.bit_length() - 1, chosen.frequencies.shape[0] - 1),
            chosen.packed.data,
            # The last block takes the remaining words, so its count is omitted.
            blocks.n_words.numpy()[:-1].astype("<u4").data,
            blocks.states.cpu().numpy().astype("<i4", copy=False).data,
            blocks.words.cpu().numpy().astype("<i2", copy=False).data,
        )
        stream = b"".join(parts)
        if len(stream) <= limit:
            return stream
    return bytes((PACKED,)) + pack_bits(symbols.cpu().numpy(), n_symbols)


def decode_rans(
    payload: bytes | memoryview,
    n: int,
    n_symbols: int,
    contexts: Tensor | None = None,
    n_contexts: int = 1,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Decode the symbols from a payload of `encode_rans`.

    Parameters
    ----------
    payload
        The payload, which is untrusted.
    n, n_symbols, n_contexts
        As given to the encoder.
    contexts : UInt8[Tensor, "n"] or None
        As given to the encoder; a context that is not below `n_contexts` counts as 0.
    device
        Device to decode on; by default that of the contexts, else the CPU.

    Returns
    -------
    UInt8[Tensor, "n"]
        The symbols on that device. Decoding is O(n) and takes additional memory of the payload's size.

    Raises
    ------
    DamagedError
        The payload does not code `n` symbols with these contexts: a field is out of range, the parts and the
        length of the payload disagree, or words are left over. Up to then no allocation exceeds the size of
        the payload, except for the symbols if the stream has enough lanes.
    InputError
        The contexts have another shape or dtype, or the sizes are out of range.
    """
    if device is None:
        device = torch.device("cpu") if contexts is None else contexts.device
    _check_arguments(n, n_symbols, n_contexts, None, contexts)
    escaped = decode_escape(payload, n, n_symbols)
    if escaped is not None:
        return torch.from_numpy(escaped).to(device)
    if payload[0] != _RANS:
        raise DamagedError("coded symbols have an unknown mode", expected="0 to 2", found=str(payload[0]))
    if contexts is not None:
        contexts = contexts.to(device)
    stream = memoryview(payload)[1:]
    if len(stream) < HEADER.size:
        raise DamagedError("a rANS stream has no header", expected="3 bytes", found=str(len(stream)))
    lanes_and_precision, log2_block, n_tables = HEADER.unpack_from(stream)
    log2_lanes, precision, n_tables = lanes_and_precision & 15, lanes_and_precision >> 4, n_tables + 1
    in_range(log2_lanes, 0, MAX_LANES_LOG2, "the lanes of a rANS stream are out of range")
    in_range(log2_block, log2_lanes, MAX_BLOCK_LOG2, "the blocks of a rANS stream are out of range")
    in_range(n_tables, 1, n_contexts, "a rANS stream has too many tables")
    in_range(precision, 1, PRECISION, "the precision of rANS tables is out of range")
    model, model_bytes = _read_model(stream[HEADER.size :], n_tables, n_symbols, n_contexts, precision)
    body = stream[HEADER.size + model_bytes :]
    blocks = _parse_blocks(body, n, 1 << log2_lanes, 1 << log2_block, device)
    symbols, intact = rans_decode(blocks, contexts, model, n, 1 << log2_block)
    if not intact:
        raise DamagedError("a rANS stream does not end in its initial state and with its last word")
    return symbols


def estimate_bits_of_counts(counts: NDArray[np.int64]) -> float:
    """Return the estimated bits for coding symbols with these counts, of shape (n_contexts, n_symbols)."""
    n, n_symbols = int(counts.sum()), counts.shape[1]
    if np.count_nonzero(counts.any(0)) <= 1:
        return 16.0 if n else 0.0
    _, _, bits = pool_contexts(counts)
    lanes, block_length = stream_shape(n, bits)
    states = STATE_BITS * lanes * -(-n // block_length)
    return min(bits + states + 8.0 * (1 + HEADER.size), 8.0 * worst_case_coded_bytes(n, n_symbols))


def _check_arguments(
    n: int, n_symbols: int, n_contexts: int, symbols: Tensor | None, contexts: Tensor | None
) -> None:
    for name, tensor in (("symbols", symbols), ("contexts", contexts)):
        if tensor is not None and (tensor.dtype != torch.uint8 or tensor.shape != (n,)):
            raise InputError(
                f"{name} have the wrong form",
                expected=f"uint8, ({n},)",
                found=f"{tensor.dtype}, {tuple(tensor.shape)}",
            )
    if not (1 <= n_symbols <= 256 and 1 <= n_contexts <= MAX_CONTEXTS and n >= 0):
        raise InputError(
            "an alphabet or a number of contexts is out of range",
            expected=f"1 to 256 symbols, 1 to {MAX_CONTEXTS} contexts",
            found=f"{n_symbols} symbols, {n_contexts} contexts, {n} values",
        )


def _parse_blocks(
    body: memoryview, n: int, lanes: int, block_length: int, device: torch.device
) -> RansBlocks:
    """Parse everything after the tables; check the number of blocks before allocating for it."""
    n_blocks = -(-n // block_length)
    counts_end = (n_blocks - 1) * STATE_BYTES
    states_end = counts_end + n_blocks * lanes * STATE_BYTES
    if len(body) < states_end or (len(body) - states_end) % WORD_BYTES:
        raise DamagedError(
            "a rANS stream has the wrong length",
            expected=f"{states_end} bytes and words",
            found=f"{len(body)} bytes",
        )
    n_words = np.empty(n_blocks, np.int64)
    n_words[:-1] = np.frombuffer(body[:counts_end], "<u4")
    total = (len(body) - states_end) // WORD_BYTES
    n_words[-1] = total - n_words[:-1].sum()
    # A symbol takes at most one word, because a word has 16 bits and a frequency 12.
    if (n_words < 0).any() or (n_words > np.minimum(block_length, n - np.arange(0, n, block_length))).any():
        raise DamagedError(
            "the blocks of a rANS stream do not fit",
            expected="at most a word a symbol",
            found=f"{total} words",
        )
    states = np.frombuffer(body[counts_end:states_end], "<i4").astype(np.int32).reshape(n_blocks, lanes)
    in_range(states.min(), INITIAL_STATE, (1 << 31) - 1, "a rANS state is out of range")
    words = np.frombuffer(body[states_end:], "<i2").astype(np.int16)
    coded, first_states = (torch.from_numpy(part).to(device) for part in (words, states))
    return RansBlocks(coded, torch.from_numpy(n_words), first_states)


def _read_model(
    payload: bytes | memoryview, n_tables: int, n_symbols: int, n_contexts: int, precision: int
) -> tuple[RansModel, int]:
    """Return the model at the start of a payload, and its length in bytes."""
    width = (n_tables - 1).bit_length()
    most = MAX_CONTEXTS * width + n_tables * n_symbols * TABLE_BITS
    packed = np.frombuffer(payload[: (most + 7) // 8], np.uint8).copy()
    shape = (n_contexts, n_tables, n_symbols)
    rows, frequencies, n_bits = read_tables(packed, shape, precision)
    if n_bits < 0:
        raise DamagedError(
            "rANS tables are cut, do not sum to their total, or belong to no context",
            found=f"{packed.size} bytes",
        )
    if n_bits % 8 and packed[n_bits // 8] >> n_bits % 8:
        raise DamagedError("rANS tables have a padding bit set")
    return RansModel(rows, frequencies << (PRECISION - precision)), (n_bits + 7) // 8
