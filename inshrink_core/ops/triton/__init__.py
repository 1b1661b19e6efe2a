"""Triton kernels for CUDA devices, and the reference where Triton is not installed."""
