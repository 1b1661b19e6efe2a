"""Triton kernels for CUDA devices. Without Triton the ops use their reference version."""
