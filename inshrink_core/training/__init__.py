"""Training with an archive: the saver of a training loop, and rehearsals of failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.training.folder_saver import FolderSaver as FolderSaver
    from inshrink_core.training.losing import PartialRehearsal as PartialRehearsal
    from inshrink_core.training.losing import rehearse_partial as rehearse_partial
    from inshrink_core.training.rehearsal import Rehearsal as Rehearsal
    from inshrink_core.training.rehearsal import TrainingResult as TrainingResult
    from inshrink_core.training.rehearsal import rehearse as rehearse
    from inshrink_core.training.saver import Saver as Saver
    from inshrink_core.training.tasks import Task as Task
    from inshrink_core.training.tasks import find_task as find_task
    from inshrink_core.training.tasks import task_names as task_names

__all__ = index(__name__)
