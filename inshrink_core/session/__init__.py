"""What a user does with a run: compress it, restore steps, compare them, verify the archive."""

from inshrink_core.session.compare import compare
from inshrink_core.session.compress import CompressReport, compress
from inshrink_core.session.config import DEFAULT_CODEC, make_config
from inshrink_core.session.progress import OnProgress, Progress
from inshrink_core.session.restore import RestoreReport, load_state_dict, open_any, restore

__all__ = [
    "DEFAULT_CODEC",
    "CompressReport",
    "OnProgress",
    "Progress",
    "RestoreReport",
    "compare",
    "compress",
    "load_state_dict",
    "make_config",
    "open_any",
    "restore",
]
