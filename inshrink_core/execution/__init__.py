"""Running independent jobs: in this thread, or on threads whose kernels release the GIL."""

from inshrink_core.execution.threads import default_threads, ordered_map

__all__ = ["default_threads", "ordered_map"]
