"""Runs and checkpoints on disk, read and written; no pickle is ever executed."""

from inshrink_core.formats.discovery import NamedStep, split_step_pattern, suggest_step_pattern
from inshrink_core.formats.disk import Skipped
from inshrink_core.formats.log import RunSettings, TrainingLog
from inshrink_core.formats.run import NoCheckpointError, Run, open_run, preview_steps
from inshrink_core.formats.write import write_checkpoint

__all__ = [
    "NamedStep",
    "NoCheckpointError",
    "Run",
    "RunSettings",
    "Skipped",
    "TrainingLog",
    "open_run",
    "preview_steps",
    "split_step_pattern",
    "suggest_step_pattern",
    "write_checkpoint",
]
