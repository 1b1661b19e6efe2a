"""Context rANS coder of bytes: within a percent of the conditional entropy, the same bytes everywhere.

Symbols are coded with one probability table per context, where the decoder knows the contexts before
(from the reference state, say). What does not pay falls back to packed bits or to a constant.
``docs/format.md`` (rANS streams) defines the bytes.

The parameters in the stream follow the estimated size of the coded symbols, never the device:

- lanes cost four bytes each, so all of them together get at most `_STATE_SHARE` of the size. Up to 32
  lanes share one block (1 lane below 13 kbit, 8 from 51 kbit, 32 from 205 kbit);
- beyond that the tensor is split into blocks of at least 2**16 symbols with 32 lanes, the width of a
  GPU's warp, so that 8 M symbols at .7 bit are about 900 lanes in 32 blocks;
- contexts share tables, and tables of few symbols are coarser, as far as that makes the sum smaller.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.coding.raw import pack_bits, packed_bytes, unpack_bits
from inshrink_core.coding.tables import TABLE_BITS, Tables, choose_tables, pool_contexts, read_tables
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.ops.rans import (
    INITIAL_STATE,
    MAX_CONTEXTS,
    PRECISION,
    RansBlocks,
    RansModel,
    block_sizes,
    rans_counts,
    rans_decode,
    rans_encode,
)

_PACKED = 0
_CONSTANT = 1
_RANS = 2

_HEADER_BYTES = 4
"""Mode byte and stream header."""

_STATE_SHARE = 200
"""States take at most one part in 200 of the data: half a percent, the budget for all but the entropy."""

_STATE_BITS = 32
_WARP = 32
_SHORTEST_BLOCK_LOG2 = 16


def worst_case_rans_bytes(n: int, n_symbols: int) -> int:
    """Return the largest payload `encode_rans` produces for `n` symbols of an alphabet.

    Examples
    --------
    >>> worst_case_rans_bytes(1000, 16)
    501
    """
    return 0 if n == 0 else 1 + max(packed_bytes(n, n_symbols), 1)


def stream_shape(n: int, data_bits: float) -> tuple[int, int]:
    """Return the number of lanes and the block length for symbols of an estimated size.

    Parameters
    ----------
    n
        Number of symbols, at least 1.
    data_bits
        Their size when coded.
    """
    budget = max(int(data_bits) // (_STATE_BITS * _STATE_SHARE), 1)
    lanes = min(1 << (budget.bit_length() - 1), _WARP)
    whole = max(n - 1, lanes - 1).bit_length()
    per_block = max(n // max(budget // _WARP, 1), 1).bit_length()
    return lanes, 1 << min(max(per_block, _SHORTEST_BLOCK_LOG2), whole, MAX_BLOCK_LOG2)


def encode_rans(
    symbols: Tensor,
    contexts: Tensor | None,
    n_symbols: int,
    n_contexts: int = 1,
    *,
    rows: NDArray[np.int64] | None = None,
    lanes: int | None = None,
    block_length: int | None = None,
) -> bytes:
    """Code symbols, each with the probability table of its context.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Below `n_symbols`; contiguous, any device.
    contexts : UInt8[Tensor, "n"] or None
        On the same device, known to the decoder; their lower five bits are below `n_contexts`, the others
        do not count. None: no contexts.
    n_symbols
        Size of the alphabet, 1 to 256.
    n_contexts
        1 to 32.
    rows : (n_contexts,)
        Table of each context, numbered without gaps; None: contexts share tables where that pays.
    lanes, block_length
        Powers of two that override the rule of this module, ``lanes <= 4096``, ``lanes <= block_length``.

    Returns
    -------
    bytes
        At most `worst_case_rans_bytes`; the same on every device and back end. O(n).

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
    counts: NDArray[np.int64] = rans_counts(symbols, contexts, n_symbols, n_contexts).numpy()
    n_counted = int(counts.sum())
    if n_counted != n:  # those out of range are not counted
        raise InputError(
            "a symbol or a context is out of range",
            expected=f"symbols below {n_symbols}, contexts below {n_contexts}",
            found=f"{n - n_counted} pairs outside",
        )
    used = np.flatnonzero(counts.any(0))
    if used.size == 1:
        return bytes((_CONSTANT, int(used[0])))
    stored_bytes = packed_bytes(n, n_symbols)
    if rows is None:
        rows, _ = pool_contexts(counts)
    chosen = choose_tables(counts, rows, (PRECISION,) if n >= _COARSE_BELOW else _TRIED_PRECISIONS)
    if chosen.bits.size + chosen.data_bits < 8 * stored_bytes:
        shape = stream_shape(n, chosen.data_bits)
        lanes, block_length = lanes or shape[0], block_length or max(shape[1], lanes or 1)
        model = RansModel(chosen.rows, chosen.frequencies << (PRECISION - chosen.precision))
        blocks = rans_encode(symbols, contexts, model, lanes, block_length)
        stream = pack_stream(chosen, blocks, block_length, bytes((_RANS,)))
        if len(stream) <= stored_bytes:
            return stream
    return bytes((_PACKED,)) + pack_bits(symbols.cpu().numpy(), n_symbols)


def decode_rans(
    payload: bytes | memoryview,
    n: int,
    n_symbols: int,
    contexts: Tensor | None = None,
    n_contexts: int = 1,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Return the symbols that `encode_rans` coded.

    Parameters
    ----------
    payload
        Its bytes; nothing in them is trusted.
    n, n_symbols, n_contexts
        As given to the encoder.
    contexts : UInt8[Tensor, "n"] or None
        As given to the encoder; one that is not below `n_contexts` counts as 0.
    device
        Where to decode; by default where the contexts are, else on the CPU.

    Returns
    -------
    UInt8[Tensor, "n"]
        On that device. O(n); beside it, memory of the size of the payload.

    Raises
    ------
    DamagedError
        The payload is not the code of `n` symbols with these contexts.
    InputError
        Contexts have another shape or dtype, or the sizes are out of range.
    """
    if device is None:
        device = torch.device("cpu") if contexts is None else contexts.device
    _check_arguments(n, n_symbols, n_contexts, None, contexts)
    if n == 0 or len(payload) == 0:
        if n or len(payload):
            raise DamagedError(
                "coded symbols have the wrong length", expected=f"{n} symbols", found=f"{len(payload)} bytes"
            )
        return torch.zeros(0, dtype=torch.uint8, device=device)
    mode, body = payload[0], memoryview(payload)[1:]
    if mode == _PACKED:
        return torch.from_numpy(unpack_bits(body, n, n_symbols)).to(device)
    if mode == _CONSTANT:
        return _constant(body, n, n_symbols, device)
    if mode != _RANS:
        raise DamagedError("coded symbols have an unknown mode", expected="0 to 2", found=str(mode))
    stream = parse_stream(body, n, n_symbols, n_contexts, device)
    if contexts is not None:
        contexts = contexts.to(device)
    symbols, intact = rans_decode(stream.blocks, contexts, stream.model, n, stream.block_length)
    if not intact:
        raise DamagedError("a rANS stream does not end in its initial state and with its last word")
    return symbols


def estimate_bits_of_counts(counts: NDArray[np.int64]) -> float:
    """Return about how many bits symbols with these counts, (n_contexts, n_symbols), take when coded."""
    n, n_symbols = int(counts.sum()), counts.shape[1]
    if np.count_nonzero(counts.any(0)) <= 1:
        return 16.0 if n else 0.0
    _, bits = pool_contexts(counts)
    lanes, block_length = stream_shape(n, bits)
    states = _STATE_BITS * lanes * -(-n // block_length)
    return min(bits + states + 8.0 * _HEADER_BYTES, 8.0 * worst_case_rans_bytes(n, n_symbols))


def _constant(body: memoryview, n: int, n_symbols: int, device: torch.device) -> Tensor:
    """Symbols that are all the same."""
    if len(body) != 1 or body[0] >= n_symbols:
        raise DamagedError(
            "a constant symbol is not one of the alphabet", expected=f"below {n_symbols}", found=body.hex()
        )
    return torch.full((n,), body[0], dtype=torch.uint8, device=device)


def _check_arguments(
    n: int, n_symbols: int, n_contexts: int, symbols: Tensor | None, contexts: Tensor | None
) -> None:
    """Check what kernels take on trust."""
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


_HEADER = struct.Struct("<BBB")

MAX_LANES_LOG2 = 12
"""4096 lanes: what one block of a GPU's threads can hold in registers."""

MAX_BLOCK_LOG2 = 31
"""A place inside a block fits a signed 32-bit integer."""

_STATE_BYTES = 4
_WORD_BYTES = 2


class RansStream(NamedTuple):
    """A stream that was parsed and checked."""

    model: RansModel
    blocks: RansBlocks
    block_length: int


def pack_stream(chosen: Tables, blocks: RansBlocks, block_length: int, before: bytes = b"") -> bytes:
    """Return the bytes of coded blocks and their model, after those of `before`."""
    lanes = blocks.states.shape[1]
    n_tables = chosen.frequencies.shape[0]
    shape = (lanes.bit_length() - 1) | chosen.precision << 4
    counts = blocks.n_words.numpy().astype("<u4")
    return b"".join(
        (
            before,
            _HEADER.pack(shape, block_length.bit_length() - 1, n_tables - 1),
            np.packbits(chosen.bits, bitorder="little").data,
            # The last block has what remains of the words.
            counts[:-1].data,
            blocks.states.cpu().numpy().astype("<i4", copy=False).data,
            blocks.words.cpu().numpy().astype("<i2", copy=False).data,
        )
    )


def parse_stream(
    payload: bytes | memoryview, n: int, n_symbols: int, n_contexts: int, device: torch.device
) -> RansStream:
    """Return the parts of a stream; nothing larger than the payload is allocated.

    Parameters
    ----------
    payload
        What `pack_stream` returned.
    n
        Number of symbols, at least 1.
    n_symbols, n_contexts
        As when it was encoded.
    device
        Where words and states go.

    Raises
    ------
    DamagedError
        A field is out of its range, or the parts and the length of the payload disagree.
    """
    if len(payload) < _HEADER.size:
        raise DamagedError("a rANS stream has no header", expected="3 bytes", found=str(len(payload)))
    shape, log2_block, n_tables = _HEADER.unpack_from(payload)
    log2_lanes, precision, n_tables = shape & 15, shape >> 4, n_tables + 1
    if not (
        log2_lanes <= MAX_LANES_LOG2
        and log2_lanes <= log2_block <= MAX_BLOCK_LOG2
        and n_tables <= n_contexts
        and 1 <= precision <= PRECISION
    ):
        raise DamagedError(
            "a rANS header is out of range",
            found=f"lanes 2**{log2_lanes}, block 2**{log2_block}, {n_tables} tables of {precision} bits",
            expected=f"lanes to 2**{MAX_LANES_LOG2}, at most {n_contexts} tables of 1 to {PRECISION} bits",
        )
    model, model_bytes = read_model(payload[_HEADER.size :], n_tables, n_symbols, n_contexts, precision)
    body = memoryview(payload)[_HEADER.size + model_bytes :]
    return RansStream(
        model, _parse_blocks(body, n, 1 << log2_lanes, 1 << log2_block, device), 1 << log2_block
    )


def _parse_blocks(
    body: memoryview, n: int, lanes: int, block_length: int, device: torch.device
) -> RansBlocks:
    """Everything after the tables; the number of blocks is checked before anything is allocated for it."""
    n_blocks = -(-n // block_length)
    counts_end = (n_blocks - 1) * _STATE_BYTES
    states_end = counts_end + n_blocks * lanes * _STATE_BYTES
    if len(body) < states_end or (len(body) - states_end) % _WORD_BYTES:
        raise DamagedError(
            "a rANS stream has the wrong length",
            expected=f"{states_end} bytes and words",
            found=f"{len(body)} bytes",
        )
    n_words = np.empty(n_blocks, np.int64)
    n_words[:-1] = np.frombuffer(body[:counts_end], "<u4")
    total = (len(body) - states_end) // _WORD_BYTES
    n_words[-1] = total - n_words[:-1].sum()
    # A symbol takes at most one word, a word being 16 bits and a frequency 12.
    if (n_words < 0).any() or (n_words > block_sizes(n, block_length)).any():
        raise DamagedError(
            "the blocks of a rANS stream do not fit",
            expected="at most a word a symbol",
            found=f"{total} words",
        )
    states = np.frombuffer(body[counts_end:states_end], "<i4").astype(np.int32).reshape(n_blocks, lanes)
    if int(states.min()) < INITIAL_STATE:
        raise DamagedError(
            "a rANS state is out of range", expected=f"at least {INITIAL_STATE}", found=str(int(states.min()))
        )
    words = np.frombuffer(body[states_end:], "<i2").astype(np.int16)
    coded, lanes_at = torch.from_numpy(words), torch.from_numpy(states)
    if device.type != "cpu":
        coded, lanes_at = coded.to(device), lanes_at.to(device)
    return RansBlocks(coded, torch.from_numpy(n_words), lanes_at)


_TRIED_PRECISIONS = (12, 10, 8, 6)
"""Coarser tables are shorter; two bits less cost about a thousandth of the data."""

_COARSE_BELOW = 1 << 17
"""Symbols from which the finest tables are taken unseen: coarser ones then save less than they cost."""


def read_model(
    payload: bytes | memoryview, n_tables: int, n_symbols: int, n_contexts: int, precision: int
) -> tuple[RansModel, int]:
    """Return the model that a payload begins with, and how many bytes it takes.

    Parameters
    ----------
    payload
        The bits of `Tables`, lowest first in each byte, and anything after them.
    n_tables
        At most `n_contexts`.
    n_symbols, n_contexts, precision
        As when the model was written.

    Raises
    ------
    DamagedError
        The bits end early, name a table that is not there, or hold one that does not sum to
        ``2**precision``.
    """
    width = (n_tables - 1).bit_length()
    most = MAX_CONTEXTS * width + n_tables * n_symbols * TABLE_BITS
    packed = np.frombuffer(payload[: (most + 7) // 8], np.uint8).copy()
    shape = (n_contexts, n_tables, n_symbols)
    rows, frequencies, n_bits = read_tables(packed, 8 * packed.size, shape, precision)
    if n_bits < 0:
        raise DamagedError(
            "rANS tables are cut, do not sum to their total, or belong to no context",
            found=f"{packed.size} bytes",
        )
    if n_bits % 8 and packed[n_bits // 8] >> n_bits % 8:
        raise DamagedError("rANS tables have a padding bit set")
    return RansModel(rows, frequencies << (PRECISION - precision)), (n_bits + 7) // 8
