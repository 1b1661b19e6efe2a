"""The lab: what proves the product.

Published codecs to compare with, benches of all codecs, rehearsals of failing trainings and the tasks they
train, averages of steps. It uses the engine as another package would, and registers its codecs, tasks and
verbs by entry points; nothing imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_lab.average import average as average
    from inshrink_lab.bench.benchmark import bench as bench
    from inshrink_lab.rehearsal import rehearse as rehearse
    from inshrink_lab.tasks.task import Task as Task
    from inshrink_lab.tasks.task import find_task as find_task
    from inshrink_lab.tasks.task import task_names as task_names

__all__ = index(__name__)
