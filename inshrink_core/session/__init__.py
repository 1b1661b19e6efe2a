"""What a user does with a run: compress it, save it while it trains, restore steps, compare them."""

from inshrink_core.session.compare import compare
from inshrink_core.session.compress import CompressReport, compress
from inshrink_core.session.config import DEFAULT_CODEC, make_config
from inshrink_core.session.gain import RestoreGain, restore_gain
from inshrink_core.session.progress import OnProgress, Progress
from inshrink_core.session.restore import RestoreReport, load_state_dict, open_any, restore
from inshrink_core.session.saver import Saver

__all__ = [
    "DEFAULT_CODEC",
    "CompressReport",
    "OnProgress",
    "Progress",
    "RestoreGain",
    "RestoreReport",
    "Saver",
    "compare",
    "compress",
    "load_state_dict",
    "make_config",
    "open_any",
    "restore",
    "restore_gain",
]
