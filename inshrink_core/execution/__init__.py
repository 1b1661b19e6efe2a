"""Running independent jobs, on threads whose kernels release the GIL, and the memory they take."""

from inshrink_core.execution.buffers import new_buffer
from inshrink_core.execution.threads import default_threads, ordered_map

__all__ = ["default_threads", "new_buffer", "ordered_map"]
