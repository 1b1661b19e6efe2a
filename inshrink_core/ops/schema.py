"""Every numeric primitive, declared once: its name, its family, its back ends and what it computes.

A family is a set of ops that live in the same files: ``ops/<family>.py`` holds the typed functions
that callers import, ``ops/reference/<family>.py`` the norm in plain torch, which runs on any device,
``ops/cpu/<family>.py`` the numba kernels and ``ops/triton/<family>.py`` the Triton kernels, if any.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

__all__ = ["SCHEMA", "Backend", "Op"]


class Backend(StrEnum):
    """Where an op runs: `reference` anywhere (plain torch), the others on their device."""

    REFERENCE = "reference"
    CPU = "cpu"
    CUDA = "cuda"


class Op(NamedTuple):
    """One declared op.

    Parameters
    ----------
    name
        Unique among all families.
    family
        Suffix of the files that implement it.
    summary
        What it computes, in one line; the typed function in ``ops/<family>.py`` says the rest.
    backends
        Back ends beside the reference that implement it.
    """

    name: str
    family: str
    summary: str
    backends: frozenset[Backend] = frozenset({Backend.CPU})


_KERNELS = frozenset({Backend.CPU, Backend.CUDA})

_SYMBOLS = (
    Op("code_lengths", "symbols", "code lengths of a length-limited Huffman code"),
    Op("count_groups", "symbols", "histogram of bytes"),
    Op("count_pairs", "symbols", "histogram of (group, delta) over some or all symbols"),
    Op("delta_events", "symbols", "modular delta, grouped and run-length coded, as events"),
    Op("pack_events", "symbols", "Huffman-code events into one bit stream"),
    Op("unpack_events", "symbols", "inverse of delta_events and pack_events in one pass"),
    Op("pack_symbols", "symbols", "Huffman-code symbols into a bit stream"),
    Op("unpack_symbols", "symbols", "inverse of pack_symbols"),
)

_PLANES = (
    Op("split_planes", "planes", "delta or rotation of words, then one byte plane per byte of a word"),
    Op("merge_planes", "planes", "inverse of split_planes"),
)

_QUANTIZE = (
    Op(
        "histogram16",
        "quantize",
        "counts by the upper 16 bits of float32, where sensitivity is within bounds",
        _KERNELS,
    ),
    Op(
        "sensitivity_histogram",
        "quantize",
        "counts by magnitude key of the product of value and gradient",
        _KERNELS,
    ),
    Op(
        "assign", "quantize", "symbol of every value from a table of keys and bounds on sensitivity", _KERNELS
    ),
    Op("gather_protected", "quantize", "values whose symbol is PROTECTED, in tensor order"),
    Op("gather_decoded", "quantize", "what other symbols decode to where a symbol is PROTECTED", _KERNELS),
    Op("symbol_counts", "quantize", "histogram of uint8 symbols", _KERNELS),
    Op("dequantize", "quantize", "symbols back to values by table, protected values put in place", _KERNELS),
)

_RANS = (
    Op("rans_counts", "rans", "histogram of (context, symbol)", _KERNELS),
    Op("rans_encode", "rans", "blocks of interleaved rANS lanes", _KERNELS),
    Op("rans_decode", "rans", "inverse of rans_encode", _KERNELS),
)

_LATTICE = (
    Op("round_to_grid", "lattice", "changes of lattice points as tokens, and the state after them", _KERNELS),
    Op("advance", "lattice", "inverse of round_to_grid", _KERNELS),
    Op("gain_grades", "lattice", "thresholds of matched-gain rounding", _KERNELS),
)

_SAMPLE = (Op("sample_sums", "sample", "mantissas of squares of a sample summed per exponent"),)

_FAMILIES = (_SYMBOLS, _PLANES, _QUANTIZE, _RANS, _LATTICE, _SAMPLE)

SCHEMA: Mapping[str, Op] = {op.name: op for family in _FAMILIES for op in family}
"""Every op by name."""
