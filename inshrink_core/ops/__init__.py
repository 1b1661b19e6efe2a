"""Numeric primitives: a reference in plain PyTorch for each op, and kernels per device.

Code above this package never branches on the device. `inshrink_core.ops.registry` describes how to add an op.
"""

from inshrink_core.ops.registry import Backend, force_backend

__all__ = ["Backend", "force_backend"]
