"""Layout of a context rANS stream: header, tables, word counts, states, words.

``docs/format.md`` (rANS streams) is normative; the names here are its names.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch

from inshrink_core.entropy.rans_tables import ChosenModel, read_model
from inshrink_core.errors import DamagedError
from inshrink_core.ops.rans import INITIAL_STATE, PRECISION, RansBlocks, RansModel, block_sizes

__all__ = ["MAX_BLOCK_LOG2", "MAX_LANES_LOG2", "RansStream", "pack_stream", "parse_stream"]

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


def pack_stream(chosen: ChosenModel, blocks: RansBlocks, block_length: int, before: bytes = b"") -> bytes:
    """Return the bytes of coded blocks and their model, after those that stand before."""
    lanes = blocks.states.shape[1]
    n_tables = chosen.model.frequencies.shape[0]
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
    """Everything after the tables; the count of blocks is checked before anything is made of it."""
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
