"""Numba kernels for the CPU. They release the GIL; most make one pass over a tensor in each direction."""
