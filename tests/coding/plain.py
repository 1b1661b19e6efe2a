"""Kernels of the coders as the plain Python that numba compiles."""

from contextlib import ExitStack, contextmanager
from unittest import mock

from inshrink_core.ops.cpu import tables
from inshrink_lab.published import adaptive

_KERNELS = {
    tables: ("fit_kernel", "pool_kernel", "read_kernel", "write_kernel", "_bit", "put_bits"),
    adaptive: ("encode_kernel", "decode_kernel", "_bound", "_learn", "_put", "_byte"),
}


@contextmanager
def plain_kernels():
    """Run tables and the adaptive coder uncompiled while the context is open."""
    with ExitStack() as stack:
        for module, names in _KERNELS.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, getattr(module, name).py_func))
        yield
