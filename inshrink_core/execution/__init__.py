"""Execution of independent jobs on threads, with devices, memory limits and cached results."""

from __future__ import annotations

from inshrink_core.execution.device import resolve_device as resolve_device
from inshrink_core.execution.device import separate_stream as separate_stream
from inshrink_core.execution.device import upload as upload
from inshrink_core.execution.files import NotRegularError as NotRegularError
from inshrink_core.execution.files import is_temporary as is_temporary
from inshrink_core.execution.files import new_file as new_file
from inshrink_core.execution.files import open_regular as open_regular
from inshrink_core.execution.files import read_regular as read_regular
from inshrink_core.execution.files import require_free as require_free
from inshrink_core.execution.files import temporary_name as temporary_name
from inshrink_core.execution.files import temporary_path as temporary_path
from inshrink_core.execution.files import write_durably as write_durably
from inshrink_core.execution.folders import make_folders as make_folders
from inshrink_core.execution.folders import remove_empty as remove_empty
from inshrink_core.execution.folders import sync_path as sync_path
from inshrink_core.execution.folders import working_folder as working_folder
from inshrink_core.execution.resources import Limits as Limits
from inshrink_core.execution.resources import new_buffer as new_buffer
from inshrink_core.execution.results import ResultStore as ResultStore
from inshrink_core.execution.results import cache_folder as cache_folder
from inshrink_core.execution.results import keep_result as keep_result
from inshrink_core.execution.results import key_digest as key_digest
from inshrink_core.execution.results import load_result as load_result
from inshrink_core.execution.results import parse_record as parse_record
from inshrink_core.execution.results import results_folder as results_folder
from inshrink_core.execution.results import user_cache_folder as user_cache_folder
from inshrink_core.execution.results import write_atomic as write_atomic
from inshrink_core.execution.threads import default_threads as default_threads
from inshrink_core.execution.threads import ordered_map as ordered_map
from inshrink_core.execution.threads import without_collection as without_collection
