"""Running independent jobs, on threads whose kernels release the GIL; devices, memory, and results kept."""

from inshrink_core.execution.buffers import new_array, new_buffer, recycling
from inshrink_core.execution.device import resolve_device
from inshrink_core.execution.files import NotRegularError, new_file, open_regular, read_regular
from inshrink_core.execution.folders import make_folders, remove_empty, sync_path, working_folder
from inshrink_core.execution.kept import (
    ResultLog,
    ResultStore,
    cache_folder,
    keep_result,
    key_digest,
    load_result,
    parse_record,
    results_folder,
    user_cache_folder,
    write_whole,
)
from inshrink_core.execution.resources import Limits, free_disk, memory_available
from inshrink_core.execution.threads import default_threads, ordered_map, prepare_process

__all__ = [
    "Limits",
    "NotRegularError",
    "ResultLog",
    "ResultStore",
    "cache_folder",
    "default_threads",
    "free_disk",
    "keep_result",
    "key_digest",
    "load_result",
    "make_folders",
    "memory_available",
    "new_array",
    "new_buffer",
    "new_file",
    "open_regular",
    "ordered_map",
    "parse_record",
    "prepare_process",
    "read_regular",
    "recycling",
    "remove_empty",
    "resolve_device",
    "results_folder",
    "sync_path",
    "user_cache_folder",
    "working_folder",
    "write_whole",
]
