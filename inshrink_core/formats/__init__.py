"""Runs and checkpoints on disk, read and written; no pickle is ever executed."""

from inshrink_core.formats.disk import Skipped
from inshrink_core.formats.log import RunSettings, TrainingLog
from inshrink_core.formats.run import NoCheckpointError, Run, open_run
from inshrink_core.formats.write import write_checkpoint

__all__ = [
    "NoCheckpointError",
    "Run",
    "RunSettings",
    "Skipped",
    "TrainingLog",
    "open_run",
    "write_checkpoint",
]
