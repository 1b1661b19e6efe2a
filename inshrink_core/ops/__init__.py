"""Numeric primitives, each with a reference in plain torch and kernels per device.

Nothing above this package branches on the device. `inshrink_core.ops.registry` says how to add an op.
"""

from inshrink_core.ops.registry import dispatch, force_backend, register
from inshrink_core.ops.schema import SCHEMA, Backend, Op

__all__ = ["SCHEMA", "Backend", "Op", "dispatch", "force_backend", "register"]
