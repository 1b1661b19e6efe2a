"""Probability tables of the context rANS coder in numba: the reference, compiled."""

from __future__ import annotations

from numba import njit

from inshrink_core.ops import reference_rans_tables as reference
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

register("normalize_counts", Backend.CPU)(njit(nogil=True, cache=True)(reference.normalize_counts))
register("pool_contexts", Backend.CPU)(njit(nogil=True, cache=True)(reference.pool_contexts))
register("write_tables", Backend.CPU)(njit(nogil=True, cache=True)(reference.write_tables))
register("read_tables", Backend.CPU)(njit(nogil=True, cache=True)(reference.read_tables))
