"""Numba kernels for the CPU: one pass over a tensor each way, the GIL released."""
