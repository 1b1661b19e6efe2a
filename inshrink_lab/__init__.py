"""The laboratory: what proves the product and is not the product.

Published codecs to compare with, benches of all codecs, rehearsals of failing trainings and the tasks they
train, averages of steps. It uses the engine and the command line as a package of somebody else's would, and
registers its codecs, tasks and verbs by entry points; nothing else of the project imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_lab.average import AverageReport as AverageReport
    from inshrink_lab.average import average as average
    from inshrink_lab.bench import BenchReport as BenchReport
    from inshrink_lab.bench import bench as bench
    from inshrink_lab.losing import PartialRehearsal as PartialRehearsal
    from inshrink_lab.rehearsal import Rehearsal as Rehearsal
    from inshrink_lab.rehearsal import rehearse as rehearse
    from inshrink_lab.results import TrainingResult as TrainingResult
    from inshrink_lab.tasks import Task as Task
    from inshrink_lab.tasks import find_task as find_task
    from inshrink_lab.tasks import task_names as task_names

__all__ = index(
    __name__,
    {
        "inshrink_lab.average": ["AverageReport", "average"],
        "inshrink_lab.bench": ["BenchReport", "bench"],
        "inshrink_lab.losing": ["PartialRehearsal"],
        "inshrink_lab.rehearsal": ["Rehearsal", "rehearse"],
        "inshrink_lab.results": ["TrainingResult"],
        "inshrink_lab.tasks": ["Task", "find_task", "task_names"],
    },
)
