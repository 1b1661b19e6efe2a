"""Probability tables of the context rANS coder in numba: the reference, compiled."""

from __future__ import annotations

from inshrink_core.ops.cpu.compiled import brief
from inshrink_core.ops.reference import rans_tables as reference
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

register("fit_tables", Backend.CPU)(brief(reference.fit_tables))
register("pool_contexts", Backend.CPU)(brief(reference.pool_contexts))
register("read_tables", Backend.CPU)(brief(reference.read_tables))
