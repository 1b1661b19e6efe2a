"""Read and write runs and checkpoints on disk; no pickle is ever executed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.formats.disk import Fate as Fate
    from inshrink_core.formats.disk import Skipped as Skipped
    from inshrink_core.formats.logs.log import RunSettings as RunSettings
    from inshrink_core.formats.logs.log import TrainingLog as TrainingLog
    from inshrink_core.formats.logs.log import read_metrics as read_metrics
    from inshrink_core.formats.names import split_step_pattern as split_step_pattern
    from inshrink_core.formats.run import NoCheckpointError as NoCheckpointError
    from inshrink_core.formats.run import Run as Run
    from inshrink_core.formats.run import open_run as open_run
    from inshrink_core.formats.run import unreadable_error as unreadable_error
    from inshrink_core.formats.write import write_checkpoint as write_checkpoint

__all__ = index(__name__)
