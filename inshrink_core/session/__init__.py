"""What a user does with a run: compress it, save it while it trains, restore steps, compare them."""

from inshrink_core.session.anatomy import Anatomy, anatomy
from inshrink_core.session.compare import compare
from inshrink_core.session.compress import CompressReport, compress
from inshrink_core.session.config import DEFAULT_CODEC, make_config
from inshrink_core.session.diff import StepDiff, diff
from inshrink_core.session.estimate import EstimateReport, estimate
from inshrink_core.session.export import ExportReport, export
from inshrink_core.session.gain import RestoreGain, restore_gain
from inshrink_core.session.pack import PackReport, pack, unpack
from inshrink_core.session.progress import OnProgress, Progress
from inshrink_core.session.prune import PruneReport, prune
from inshrink_core.session.restore import RestoreReport, load_state_dict, open_any, restore
from inshrink_core.session.saver import Saver
from inshrink_core.session.search import OnSearch, SearchProgress, SearchReport, search
from inshrink_core.session.trajectory import Trajectory, trajectory
from inshrink_core.session.watch import watch
from inshrink_core.session.watch_report import WatchEvent, WatchReport

__all__ = [
    "DEFAULT_CODEC",
    "Anatomy",
    "CompressReport",
    "EstimateReport",
    "ExportReport",
    "OnProgress",
    "OnSearch",
    "PackReport",
    "Progress",
    "PruneReport",
    "RestoreGain",
    "RestoreReport",
    "Saver",
    "SearchProgress",
    "SearchReport",
    "StepDiff",
    "Trajectory",
    "WatchEvent",
    "WatchReport",
    "anatomy",
    "compare",
    "compress",
    "diff",
    "estimate",
    "export",
    "load_state_dict",
    "make_config",
    "open_any",
    "pack",
    "prune",
    "restore",
    "restore_gain",
    "search",
    "trajectory",
    "unpack",
    "watch",
]
