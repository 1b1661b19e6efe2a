"""Read and write runs and checkpoints on disk; no pickle is ever executed."""

from inshrink_core.formats.disk import Fate, Skipped
from inshrink_core.formats.logs.log import MetricsFile, RunSettings, TrainingLog, read_metrics
from inshrink_core.formats.run import (
    NoCheckpointError,
    Run,
    open_run,
    preview_steps,
    unreadable_error,
)
from inshrink_core.formats.step_pattern import NamedStep, split_step_pattern, suggest_step_pattern
from inshrink_core.formats.write import write_checkpoint

__all__ = [
    "Fate",
    "MetricsFile",
    "NamedStep",
    "NoCheckpointError",
    "Run",
    "RunSettings",
    "Skipped",
    "TrainingLog",
    "open_run",
    "preview_steps",
    "read_metrics",
    "split_step_pattern",
    "suggest_step_pattern",
    "unreadable_error",
    "write_checkpoint",
]
