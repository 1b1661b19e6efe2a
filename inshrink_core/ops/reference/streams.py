"""Whole rANS streams from the ops they are made of, on any device: the norm.

Tables are chosen and read in host memory, by the same code on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inshrink_core.errors import DamagedError, InputError
from inshrink_core.ops.cpu.tables import TABLE_BITS, Tables, choose_tables, read_tables
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
from inshrink_core.ops.streams import (
    COARSE_BELOW,
    CONSTANT,
    HEADER,
    MAX_BLOCK_LOG2,
    MAX_LANES_LOG2,
    PRECISIONS,
    RANS,
    STATE_BYTES,
    WORD_BYTES,
    Coded,
    stream_shape,
)

__all__: list[str] = []


def write_stream(
    symbols: Tensor,
    contexts: Tensor | None,
    n_symbols: int,
    n_contexts: int,
    apart: bool,
    shape: tuple[int, int] | None,
) -> bytes:
    """See `streams.write_stream`."""
    n = symbols.numel()
    counts = rans_counts(symbols, contexts, n_symbols, n_contexts).numpy()
    check_counted(n, int(counts.sum()), n_symbols, n_contexts)
    used = np.flatnonzero(counts.any(0))
    if used.size == 1:
        return bytes((CONSTANT, int(used[0])))
    # Symbols beyond the last one that occurs have no place in any table.
    precisions = PRECISIONS[: 1 if n >= COARSE_BELOW else None]
    chosen = choose_tables(counts[:, : used[-1] + 1], precisions, apart=apart)
    stored_bits = 8 * stored_bytes(n, n_symbols)
    if chosen.n_bits + chosen.data_bits >= stored_bits:
        return b""
    lanes, block_length = shape or stream_shape(n, chosen.data_bits)
    model = RansModel(chosen.rows, chosen.frequencies << (PRECISION - chosen.precision))
    stream = _packed(chosen, rans_encode(symbols, contexts, model, lanes, block_length), block_length)
    return stream if 8 * len(stream) <= stored_bits else b""


def stored_bytes(n: int, n_symbols: int) -> int:
    """Return the size of symbols in the fewest whole bits each."""
    return (n * (n_symbols - 1).bit_length() + 7) // 8


def check_counted(n: int, n_counted: int, n_symbols: int, n_contexts: int) -> None:
    """Refuse symbols of which some were not counted."""
    if n_counted != n:
        raise InputError(
            "a symbol or a context is out of range",
            expected=f"symbols below {n_symbols}, contexts below {n_contexts}",
            found=f"{n - n_counted} pairs outside",
        )


def _packed(chosen: Tables, blocks: RansBlocks, block_length: int) -> bytes:
    """Return the bytes of coded blocks and their model."""
    lanes = blocks.states.shape[1]
    shape = (lanes.bit_length() - 1) | chosen.precision << 4
    counts = blocks.n_words.numpy().astype("<u4")
    return b"".join(
        (
            bytes((RANS,)),
            HEADER.pack(shape, block_length.bit_length() - 1, chosen.frequencies.shape[0] - 1),
            chosen.packed.data,
            # The last block has what remains of the words.
            counts[:-1].data,
            blocks.states.cpu().numpy().astype("<i4", copy=False).data,
            blocks.words.cpu().numpy().astype("<i2", copy=False).data,
        )
    )


def read_stream(coded: Coded, contexts: Tensor | None) -> Tensor:
    """See `streams.read_stream`."""
    stream = parse_stream(coded)
    symbols, intact = rans_decode(stream.blocks, contexts, stream.model, coded.n, stream.block_length)
    if not intact:
        raise DamagedError("a rANS stream does not end in its initial state and with its last word")
    return symbols


class RansStream(NamedTuple):
    """A stream that was parsed and checked."""

    model: RansModel
    blocks: RansBlocks
    block_length: int


def parse_stream(coded: Coded) -> RansStream:
    """Return the parts of a stream; nothing larger than the payload is allocated.

    Raises
    ------
    DamagedError
        A field is out of its range, or the parts and the length of the payload disagree.
    """
    payload, n, n_symbols, n_contexts, device = coded
    if len(payload) < HEADER.size:
        raise DamagedError("a rANS stream has no header", expected="3 bytes", found=str(len(payload)))
    shape, log2_block, n_tables = HEADER.unpack_from(payload)
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
    model, model_bytes = _read_model(payload[HEADER.size :], n_tables, n_symbols, n_contexts, precision)
    body = memoryview(payload)[HEADER.size + model_bytes :]
    return RansStream(
        model, _parse_blocks(body, n, 1 << log2_lanes, 1 << log2_block, device), 1 << log2_block
    )


def _parse_blocks(
    body: memoryview, n: int, lanes: int, block_length: int, device: torch.device
) -> RansBlocks:
    """Everything after the tables; the number of blocks is checked before anything is allocated for it."""
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


def _read_model(
    payload: bytes | memoryview, n_tables: int, n_symbols: int, n_contexts: int, precision: int
) -> tuple[RansModel, int]:
    """Return the model that a payload begins with, and how many bytes it takes."""
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
