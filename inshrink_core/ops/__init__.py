"""Numeric primitives, each with a reference in plain torch and kernels per device.

Nothing above this package branches on the device. `inshrink_core.ops.registry` says how to add an op.
"""

from inshrink_core.ops.registry import Backend, force_backend

__all__ = ["Backend", "force_backend"]
