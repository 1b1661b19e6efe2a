"""Probability tables of the context rANS coder in numba: the reference, compiled."""

from __future__ import annotations

from numba.extending import register_jitable

from inshrink_core.ops import reference_rans_tables as reference
from inshrink_core.ops.compiled import kernel
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

# Plain functions that compiled ones may call.
register_jitable(reference.normalize_counts)
register_jitable(reference.write_tables)

register("normalize_counts", Backend.CPU)(kernel(reference.normalize_counts))
register("pool_contexts", Backend.CPU)(kernel(reference.pool_contexts))
register("write_tables", Backend.CPU)(kernel(reference.write_tables))
register("choose_tables", Backend.CPU)(kernel(reference.choose_tables))
register("read_tables", Backend.CPU)(kernel(reference.read_tables))
